"""Storage of the run directory: what one node and all nodes together write, what they read, files
by the thousand, and how long a checkpoint takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from drillyard.acceptance.check import Check, Expected, Level
from drillyard.acceptance.checks.mesh_evidence import member, number
from drillyard.acceptance.evidence import AcceptanceEvidence, Observation
from drillyard.acceptance.results import CheckResult, Status, Threshold

SHARE = 0.5
"""Of a row, which is the most that a storage can do; or of a baseline."""
_KINDS = {"bucket": ("fuse",), "ebs": ("ext", "xfs", "btrfs")}
"""First letters of the file systems that a row's kind of storage shows as."""


def judge(evidence: AcceptanceEvidence, expected: Expected) -> Iterator[CheckResult]:
    """Errors of single nodes; then one writer, all writers, readers, files, and a checkpoint."""
    steps = _steps(evidence)
    if not steps:
        yield _result(
            tuple(node.rank for node in evidence.nodes),
            "write",
            Status.incomplete,
            "no node ran the probe storage",
        )
        return
    for step in steps:
        yield from _errors(evidence, step)
    for metric, step in (("write", steps[0]), ("write of all nodes", steps[-1])):
        if metric == "write" or len(steps) > 1:
            yield from _written(evidence, expected, metric, step)
    yield from _recorded(evidence, steps[-1])
    yield from _save_time(evidence, expected, steps[-1])


def _steps(evidence: AcceptanceEvidence) -> list[list[Observation]]:
    """The observations of each storage step, which began at one time."""
    steps: dict[float, list[Observation]] = {}
    for seen in evidence.of("storage"):
        if len(seen.nodes) == 1:
            steps.setdefault(seen.started_at, []).append(seen)
    return list(steps.values())


def _errors(evidence: AcceptanceEvidence, step: list[Observation]) -> Iterator[CheckResult]:
    """A node that cannot write what others can is at fault; so is one that reads something else."""
    worked = [seen for seen in step if number(_rate(seen, "write")) is not None]
    for seen in step:
        (rank,) = seen.nodes
        name = evidence.name_of(rank)
        if seen.silent:
            continue
        if (wrong := member(seen.values, "read", "error")) is not None:
            yield _result((rank,), "read", Status.fail, f"{name}: {wrong}", culprits=(rank,))
        if number(_rate(seen, "write")) is None:
            culprits = (rank,) if len(worked) >= 2 else ()
            why = seen.error or "the probe printed no rate"
            status = Status.fail if seen.error else Status.incomplete
            yield _result((rank,), "write", status, f"{name}: {why}", culprits=culprits)


def _written(
    evidence: AcceptanceEvidence, expected: Expected, metric: str, step: list[Observation]
) -> Iterator[CheckResult]:
    observed, ranks = _together(step)
    if observed is None:
        return
    threshold = _threshold(expected, metric, step, len(ranks))
    size = number(member(step[0].values, "bytes")) or 0.0
    what = (
        f"{len(ranks)} nodes write {observed:.3g} GB/s"
        if len(ranks) > 1
        else (f"{evidence.name_of(ranks[0])} writes {observed:.3g} GB/s")
    )
    reason = f"{what}, {size / 1e9:.3g} GB each with fsync"
    if threshold is None:
        kind = member(step[0].values, "filesystem")
        reason = f"{reason}; no reference for this storage ({kind})"
        yield _result(ranks, metric, Status.recorded, reason, observed)
        return
    status = Status.passed if observed >= threshold.value else Status.warn
    slow = min(step, key=lambda seen: number(_rate(seen, "write")) or float("inf"))
    if status is Status.warn and len(ranks) > 2:
        reason = f"{reason}; the slowest is {evidence.name_of(slow.nodes[0])}"
    yield _result(ranks, metric, status, reason, observed, threshold)


def _threshold(
    expected: Expected, metric: str, step: list[Observation], writers: int
) -> Threshold | None:
    """Half of the baseline, else of the machine's row where the storage is of its kind."""
    if expected.baseline is not None and (before := _steps(expected.baseline)):
        old = before[0] if metric == "write" else before[-1]
        value, ranks = _together(old)
        if value is not None and len(ranks) == writers:
            return Threshold(SHARE * value, "GB/s", True, "half of the baseline", value)
    machine = expected.machine
    if machine is None or machine.storage is None:
        return None
    kind = str(member(step[0].values, "filesystem"))
    row = machine.storage_gb_per_s(writers)
    if row is None or not kind.startswith(_KINDS.get(machine.storage.kind, ("?",))):
        return None
    source = f"half of what the storage of {machine.name} can do ({row.source})"
    return Threshold(SHARE * row.value, "GB/s", True, source, row.value, row.value)


def _recorded(evidence: AcceptanceEvidence, step: list[Observation]) -> Iterator[CheckResult]:
    ranks = tuple(rank for seen in step for rank in seen.nodes)
    reads = [rate for seen in step if (rate := number(_rate(seen, "read"))) is not None]
    if reads:
        how = {str(member(seen.values, "read", "how")) for seen in step if seen.values}
        ways = {"direct": "past the page cache", "dropped": "with its pages dropped first"}
        reason = f"reading {', '.join(ways.get(each, each) for each in sorted(how))}: "
        reason += f"{min(reads):.3g} GB/s on the slowest of {len(reads)} nodes"
        yield _result(ranks, "read", Status.recorded, reason, min(reads))
    rates = [
        rate
        for seen in step
        if (rate := number(member(seen.values, "files", "create_per_s"))) is not None
    ]
    if rates:
        reason = f"{sum(rates):.0f} small files are made per second by {len(rates)} nodes"
        yield _result(ranks, "files", Status.recorded, reason, sum(rates), unit="1/s")


def _save_time(
    evidence: AcceptanceEvidence, expected: Expected, step: list[Observation]
) -> Iterator[CheckResult]:
    observed, ranks = _together(step)
    if observed and expected.checkpoint_bytes is not None:
        seconds = expected.checkpoint_bytes / 1e9 / observed
        size = f"{expected.checkpoint_bytes / 1e9:.3g} GB"
        reason = f"a checkpoint of {size} takes {seconds:.1f} s at this rate"
        yield _result(ranks, "save time", Status.recorded, reason, seconds, unit="s")


def _together(step: list[Observation]) -> tuple[float | None, tuple[int, ...]]:
    """What the nodes of a step write in all, in GB/s: their bytes over the time of the slowest."""
    done = [
        (seen.nodes[0], number(member(seen.values, "bytes")), seconds)
        for seen in step
        if (seconds := number(member(seen.values, "write", "seconds"))) and not seen.error
    ]
    if not done or any(size is None for _, size, _ in done):
        return None, ()
    total = sum(size or 0.0 for _, size, _ in done)
    slowest = max(seconds or 0.0 for _, _, seconds in done)
    return total / slowest / 1e9, tuple(rank for rank, _, _ in done)


def _rate(seen: Observation, what: str) -> Any:
    return member(seen.values, what, "gb_per_s")


def _result(
    nodes: tuple[int, ...],
    metric: str,
    status: Status,
    reason: str,
    observed: float | None = None,
    threshold: Threshold | None = None,
    **more: Any,
) -> CheckResult:
    values = {"observed": observed, "unit": "GB/s", "threshold": threshold, **more}
    return CHECK.result(nodes, status, reason, metric=metric, **values)


CHECK = Check(
    name="storage",
    title="Storage",
    level=Level.standard,
    probes=("storage",),
    seconds=60,
    measures="rates of writing with fsync, of one node and of all at once, of reading, and of small"
    " files; and the time of a checkpoint that follows",
    how="each node writes a file of its own in the run directory, of its share of a checkpoint"
    " (--run), else of a size by level; reads it past the page cache or with its pages dropped;"
    " makes 1,000 files; and removes everything",
    evidence="a rate of writing from every node",
    references="half of the storage's row for this machine, or of a baseline; a rate below warns",
    meaning="the storage is slow or shared with others, or a node's mount of it is broken",
    action="compare the mounts of the nodes; look at what else uses the storage",
    judge=judge,
)
