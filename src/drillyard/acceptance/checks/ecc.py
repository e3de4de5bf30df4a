"""Memory errors of each GPU that ECC did not correct."""

from __future__ import annotations

from collections.abc import Iterator

from drillyard.acceptance.check import Check, Expected, Level
from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.gpu_evidence import GpuFinding, NodeGpus, judge_gpus, unreadable
from drillyard.acceptance.node_results import has_gpus
from drillyard.acceptance.parsers.nvidia_smi import Gpu
from drillyard.acceptance.results import CheckResult, Status

MOST_AGGREGATE_SRAM = 4
"""Uncorrected SRAM errors in a GPU's life; with more it is replaced. stas00/ml-engineering@744d01e,
after NVIDIA's RMA policy."""
_VOLATILE = ("ecc.volatile.sram", "ecc.volatile.dram", "ecc.volatile.total")
_REPAIRS = ("ecc.channel_repair_pending", "ecc.tpc_repair_pending")


def judge(evidence: AcceptanceEvidence, expected: Expected) -> Iterator[CheckResult]:
    """One result per GPU with errors, else one per node."""

    def judge_gpu(gpu: Gpu, node: NodeGpus) -> GpuFinding:
        if not any(gpu.has_value(key) for key in _VOLATILE):
            mode = gpu.texts.get("ecc.mode", "N/A")
            reason = f"has no counters of memory errors (ECC mode: {mode})"
            status = Status.incomplete if has_gpus(expected) else Status.skipped
            action = "nvidia-smi -e 1, and restart the node"
            return GpuFinding(
                status, reason, mode, {"action": action} if has_gpus(expected) else {}
            )
        for key in (key for key in _VOLATILE if key in gpu):
            count = gpu.number(key)
            if count is None:
                return unreadable(gpu, key)
            if count > 0:
                reason = f"had {count:g} uncorrected memory errors since its driver was loaded"
                return GpuFinding(Status.fail, reason, count, {"metric": key, "unit": "errors"})
        for key in _REPAIRS:
            if gpu.flag(key):
                reason = "waits for a reset to repair memory"
                return GpuFinding(Status.fail, reason, "pending", {"metric": key})
        sram = gpu.number("ecc.aggregate.sram")
        exceeded = gpu.flag("ecc.sram_threshold_exceeded")
        if exceeded or (sram or 0) > MOST_AGGREGATE_SRAM:
            reason = f"had {sram or 0:g} uncorrected SRAM errors in its life"
            action = "drain the node; have the GPU replaced"
            more = {"metric": "ecc.aggregate.sram", "unit": "errors", "action": action}
            return GpuFinding(Status.fail, reason, sram, more)
        if gpu.has_value("ecc.aggregate.sram") and sram is None:
            return unreadable(gpu, "ecc.aggregate.sram")
        return GpuFinding(Status.passed, "")

    # Before Ampere the driver counts all memories of a GPU together.
    keys = tuple(f"ecc.volatile.{kind}|ecc.volatile.total" for kind in ("sram", "dram"))
    return judge_gpus(CHECK, evidence, expected, judge_gpu, "no uncorrected memory error", keys)


CHECK = Check(
    name="ecc",
    title="Memory errors (ECC)",
    level=Level.quick,
    probes=("accelerators",),
    seconds=1,
    measures="uncorrected memory errors of each GPU, since its driver was loaded and in its life",
    how="nvidia-smi -q: ECC errors",
    evidence="counters of every GPU",
    references="none since the driver was loaded; at most 4 in SRAM in its life, or the GPU's own"
    " threshold",
    meaning="data in the GPU's memory was lost; a job on it fails or computes wrongly",
    action="drain the node and reset the GPU (nvidia-smi -r); if it comes back, have it replaced",
    judge=judge,
)
