"""Power and clock limits of each GPU: those with which it was delivered."""

from __future__ import annotations

from collections.abc import Iterator

from drillyard.acceptance.check import Check, Expected, Level
from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.gpu_evidence import GpuFinding, NodeGpus, judge_gpus, unreadable
from drillyard.acceptance.parsers.nvidia_smi import Gpu
from drillyard.acceptance.results import CheckResult, Status, Threshold

_PAIRS = (
    ("power.limit_w", "power.default_limit_w", "W", "power limit"),
    ("clocks.applications_mhz", "clocks.default_applications_mhz", "MHz", "application clock"),
)


def judge(evidence: AcceptanceEvidence, expected: Expected) -> Iterator[CheckResult]:
    """One result per GPU that is limited, else one per node."""
    return judge_gpus(
        CHECK, evidence, expected, _judge_gpu, "power and clock limits are not lowered",
        ("power.limit_w", "power.default_limit_w"),
    )  # fmt: skip


def _judge_gpu(gpu: Gpu, node: NodeGpus) -> GpuFinding:
    for key, default_key, unit, title in _PAIRS:
        if not gpu.has_value(key) or not gpu.has_value(default_key):
            if unit == "W":
                return GpuFinding(Status.skipped, "the driver shows no power limit")
            continue
        limit, default = gpu.number(key), gpu.number(default_key)
        if limit is None or default is None:
            return unreadable(gpu, key if limit is None else default_key)
        if limit < default:
            threshold = Threshold(default, unit, True, "the GPU's own default, by nvidia-smi")
            reason = f"has a {title} of {limit:g} {unit}; its default is {default:g} {unit}"
            more = {"metric": title, "unit": unit, "threshold": threshold}
            return GpuFinding(Status.fail, reason, limit, more)
    return GpuFinding(Status.passed, "")


CHECK = Check(
    name="gpu-limits",
    title="Power and clock limits",
    level=Level.quick,
    probes=("accelerators",),
    seconds=1,
    measures="power limit and application clock of each GPU",
    how="nvidia-smi -q",
    evidence="a power limit and its default of every GPU",
    references="the GPU's own defaults",
    meaning="a limit was lowered: the GPU is slower than the others",
    action="set the power limit to its default (nvidia-smi -pl WATTS), clocks with nvidia-smi -rac",
    judge=judge,
)
