"""Rows of memory that each GPU has replaced by spare ones, and pages that older GPUs retire."""

from __future__ import annotations

from collections.abc import Iterator

from drillyard.acceptance.check import Check, Expected, Level
from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.gpu_evidence import GpuFinding, NodeGpus, judge_gpus, unreadable
from drillyard.acceptance.node_results import has_gpus
from drillyard.acceptance.parsers.nvidia_smi import Gpu
from drillyard.acceptance.results import CheckResult, Status, Threshold

MOST_UNCORRECTABLE_ROWS = 512
MOST_RETIRED_PAGES = 63
_DCGM = "NVIDIA/DCGM@72fa3fe: DCGM_LIMIT_MAX_ROW_REMAP_UNCORRECTABLE, DCGM_LIMIT_MAX_RETIRED_PAGES"
_REPLACE = "drain the node; have the GPU replaced"


def judge(evidence: AcceptanceEvidence, expected: Expected) -> Iterator[CheckResult]:
    """One result per GPU that needs a reset or is worn out, else one per node."""

    def judge_gpu(gpu: Gpu, node: NodeGpus) -> GpuFinding:
        rows, pages = gpu.has_value("remapped.failure"), gpu.has_value("retired.pending")
        if not rows and not pages:
            status = Status.incomplete if has_gpus(expected) else Status.skipped
            return GpuFinding(status, "shows neither remapped rows nor retired pages")
        return (_rows(gpu) if rows else None) or (_pages(gpu) if pages else None) or _GOOD

    keys = ("remapped.pending|retired.pending", "remapped.failure|retired.pending")
    return judge_gpus(CHECK, evidence, expected, judge_gpu, "no row waits for a reset", keys)


_GOOD = GpuFinding(Status.passed, "")


def _rows(gpu: Gpu) -> GpuFinding | None:
    failure, pending = gpu.flag("remapped.failure"), gpu.flag("remapped.pending")
    if failure is None:
        return unreadable(gpu, "remapped.failure")
    if failure:
        more = {"metric": "remapped.failure", "action": _REPLACE}
        return GpuFinding(Status.fail, "could not remap a row of its memory", "failure", more)
    if pending is None:
        return unreadable(gpu, "remapped.pending")
    if pending:
        more = {"metric": "remapped.pending"}
        return GpuFinding(Status.fail, "waits for a reset to remap a row", "pending", more)
    if "remapped.uncorrectable" not in gpu:
        return None
    count = gpu.number("remapped.uncorrectable")
    if count is None:
        return unreadable(gpu, "remapped.uncorrectable")
    return _worn(count, MOST_UNCORRECTABLE_ROWS, "remapped.uncorrectable", "rows remapped")


def _pages(gpu: Gpu) -> GpuFinding | None:
    pending = gpu.flag("retired.pending")
    if pending is None:
        return unreadable(gpu, "retired.pending")
    if pending:
        more = {"metric": "retired.pending"}
        return GpuFinding(Status.fail, "waits for a restart to retire a page", "pending", more)
    keys = [key for key in ("retired.single_bit", "retired.double_bit") if gpu.has_value(key)]
    counts = [gpu.number(key) for key in keys]
    if None in counts:
        return unreadable(gpu, keys[counts.index(None)])
    total = sum(count for count in counts if count is not None)
    return _worn(total, MOST_RETIRED_PAGES, "retired pages", "pages retired")


def _worn(count: float, most: int, metric: str, title: str) -> GpuFinding | None:
    if count < most:
        return None
    threshold = Threshold(most, title, False, _DCGM)
    more = {"metric": metric, "threshold": threshold, "action": _REPLACE}
    return GpuFinding(
        Status.fail, f"has {count:g} {title}; from {most} it is replaced", count, more
    )


CHECK = Check(
    name="remapped-rows",
    title="Remapped rows and retired pages",
    level=Level.quick,
    probes=("accelerators",),
    seconds=1,
    measures="rows of each GPU's memory that were replaced, wait for it, or could not be",
    how="nvidia-smi -q: remapped rows, retired pages",
    evidence="pending and failure of every GPU",
    references="none pending, no failure; fewer than 512 uncorrectable rows or 63 pages (DCGM)",
    meaning="memory failed; until a reset the bad row is in use",
    action="drain the node and reset the GPU (nvidia-smi -r)",
    judge=judge,
)
