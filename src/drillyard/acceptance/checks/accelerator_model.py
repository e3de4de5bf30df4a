"""Model and memory of each GPU: those of the machine's row."""

from __future__ import annotations

from collections.abc import Iterator

from drillyard.acceptance.check import Check, Expected, Level
from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.gpu_evidence import GpuFinding, NodeGpus, judge_gpus, unreadable
from drillyard.acceptance.node_results import has_gpus
from drillyard.acceptance.parsers.nvidia_smi import Gpu
from drillyard.acceptance.results import CheckResult, Status
from drillyard.hardware.facts import cited

LEAST_MEMORY = 0.98
"""Of the row's memory: drivers keep up to 2 % for themselves, and differ by version."""


def judge(evidence: AcceptanceEvidence, expected: Expected) -> Iterator[CheckResult]:
    """One result per GPU that differs, else one per node."""
    accelerator = expected.accelerator

    def judge_gpu(gpu: Gpu, node: NodeGpus) -> GpuFinding:
        if accelerator is None or not has_gpus(expected):
            return GpuFinding(Status.skipped, "the cluster config names no machine with GPUs")
        name = gpu.texts["name"]
        wanted = {"expected": accelerator.title}
        if not accelerator.is_called(name):
            known = expected.catalog.find_accelerator(name)
            if known is None:
                reason = f"is called '{name}', which is not a known name of {accelerator.name}"
                action = "give the name as reported_as in a file of --hardware, if it is the same"
                return GpuFinding(Status.incomplete, reason, name, {**wanted, "action": action})
            reason = f"is an accelerator {known.name}; the machine has {accelerator.name}"
            return GpuFinding(Status.fail, reason, name, wanted)
        if gpu.texts.get("mig") == "Enabled":
            action = "nvidia-smi -mig 0, and restart the node"
            return GpuFinding(Status.fail, "is split (MIG)", name, {**wanted, "action": action})
        if "memory.total_mib" not in gpu or accelerator.memory_gib is None:
            return GpuFinding(Status.passed, "")
        memory = gpu.number("memory.total_mib")
        if memory is None:
            return unreadable(gpu, "memory.total_mib")
        gib = memory / 1024
        if gib < LEAST_MEMORY * accelerator.memory_gib:
            reason = f"has {gib:.1f} GiB of memory; {accelerator.name} has {accelerator.memory_gib}"
            source = {**wanted, "evidence": (cited(accelerator, "memory_gib"),)}
            return GpuFinding(Status.fail, reason, f"{gib:.1f} GiB", source)
        return GpuFinding(Status.passed, "")

    healthy = f"model and memory of {accelerator.name}" if accelerator else ""
    return judge_gpus(CHECK, evidence, expected, judge_gpu, healthy, ("name",))


CHECK = Check(
    name="accelerator-model",
    title="Accelerator models",
    level=Level.quick,
    probes=("accelerators",),
    seconds=1,
    measures="model, memory and MIG mode of each GPU",
    how="nvidia-smi -q",
    evidence="a name of every GPU that is one of the accelerator's",
    references="the accelerator's row: reported_as, memory_gib (at least 98 % of it)",
    meaning="it is another GPU than was ordered, a part of one, or its memory is not all there",
    action="compare the machine type with the cluster config; else have the GPU replaced",
    judge=judge,
)
