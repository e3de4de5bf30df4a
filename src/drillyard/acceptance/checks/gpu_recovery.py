"""What the driver itself asks for: a reset of a GPU, or a restart of its node."""

from __future__ import annotations

from collections.abc import Iterator

from drillyard.acceptance.check import Check, Expected, Level
from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.gpu_evidence import (
    GpuFinding,
    NodeGpus,
    gpus_of,
    judge_gpus,
)
from drillyard.acceptance.node_results import node_result
from drillyard.acceptance.parsers.nvidia_smi import Gpu
from drillyard.acceptance.results import CheckResult, Status

_ACTIONS = {
    "reset": "drain the node and reset the GPU (nvidia-smi -r)",
    "gpu reset": "drain the node and reset the GPU (nvidia-smi -r)",
    "reboot": "drain and restart the node",
    "node reboot": "drain and restart the node",
    "drain p2p": "end the jobs that use NVLink of the GPU, then reset it",
    "drain and reset": "drain the node and reset the GPU (nvidia-smi -r)",
}


def judge(evidence: AcceptanceEvidence, expected: Expected) -> Iterator[CheckResult]:
    """One result per GPU that needs something, else one per node."""
    for node in gpus_of(evidence):
        for gpu in node.table.gpus if node.table else ():
            if gpu.lost:
                reason = f"{node.name}: {gpu.title} does not answer the driver: {gpu.lost}"
                action = "drain and restart the node; if it comes back, have the GPU replaced"
                yield node_result(
                    CHECK, node.rank, Status.fail, reason,
                    device=gpu.index, observed=gpu.lost, action=action,
                )  # fmt: skip
    yield from judge_gpus(CHECK, evidence, expected, _judge_gpu, "no recovery is needed")


def _judge_gpu(gpu: Gpu, node: NodeGpus) -> GpuFinding:
    if not gpu.has_value("recovery"):
        return GpuFinding(Status.skipped, "their driver names no recovery (it does since 570)")
    asked = gpu.texts["recovery"]
    if asked == "None":
        return GpuFinding(Status.passed, "")
    if (action := _ACTIONS.get(asked.lower())) is None:
        return GpuFinding(
            Status.incomplete, f"needs recovery by the unknown action '{asked}'", asked
        )
    return GpuFinding(Status.fail, f"needs recovery: {asked}", asked, {"action": action})


CHECK = Check(
    name="gpu-recovery",
    title="Recovery that the driver asks for",
    level=Level.quick,
    probes=("accelerators",),
    seconds=1,
    measures="the driver's recovery action of each GPU, and GPUs that do not answer it",
    how="nvidia-smi -q: GPU recovery action",
    evidence="an action of every GPU; skipped where the driver (before 570) has none",
    references="None",
    meaning="a GPU had an error after which it must not be used before it is reset",
    action="drain the node and reset the GPU (nvidia-smi -r)",
    judge=judge,
)
