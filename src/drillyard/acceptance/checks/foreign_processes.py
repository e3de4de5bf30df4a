"""Programs and memory on GPUs that should be idle."""

from __future__ import annotations

from collections.abc import Iterator

from drillyard.acceptance.check import Check, Expected, Level
from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.gpu_evidence import GpuFinding, NodeGpus, judge_gpus, unreadable
from drillyard.acceptance.parsers.nvidia_smi import Gpu
from drillyard.acceptance.results import CheckResult, Status, Threshold

MOST_IDLE_MIB = 15.0
"""facebookresearch/gcm@1b7bde9: with more a process was left."""


def judge(evidence: AcceptanceEvidence, expected: Expected) -> Iterator[CheckResult]:
    """One result per GPU in use, else one per node."""
    return judge_gpus(CHECK, evidence, expected, _judge_gpu, "nothing runs", ("memory.used_mib",))


def _judge_gpu(gpu: Gpu, node: NodeGpus) -> GpuFinding:
    foreign = [each for each in gpu.processes or () if each.kind != "G"]
    if foreign:
        shown = ", ".join(f"{each.name[:60]} ({each.pid})" for each in foreign[:4])
        return GpuFinding(Status.fail, f"is used by {shown}", len(foreign), {"unit": "programs"})
    used = gpu.number("memory.used_mib")
    if used is None:
        return unreadable(gpu, "memory.used_mib")
    if used > MOST_IDLE_MIB:
        source = "facebookresearch/gcm@1b7bde9: memory of an idle GPU"
        threshold = Threshold(MOST_IDLE_MIB, "MiB", False, source)
        more = {"metric": "memory in use", "unit": "MiB", "threshold": threshold}
        reason = f"has {used:g} MiB of memory in use before the job uses it"
        return GpuFinding(Status.fail, reason, used, more)
    return GpuFinding(Status.passed, "")


CHECK = Check(
    name="foreign-processes",
    title="Foreign processes",
    level=Level.quick,
    probes=("accelerators",),
    seconds=1,
    measures="programs and memory on each GPU before the job uses it",
    how="nvidia-smi -q: processes, memory usage",
    evidence="memory in use of every GPU",
    references="no process but of a display (type G), at most 15 MiB in use (gcm)",
    meaning="another job, or one that was not ended, takes memory and time",
    action="end those programs; if none is shown, reset the GPU (nvidia-smi -r)",
    judge=judge,
)
