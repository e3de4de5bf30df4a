"""Bus bandwidth of collectives: in each node, between pairs of nodes, on all nodes.

In one node and between two, a collective with a measured row must be measured and reach its
threshold. On more nodes, and for collectives without a row, the figure is recorded; a row of
exactly that many nodes judges it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from drillyard.acceptance.check import Check, Expected, Level
from drillyard.acceptance.collective_evidence import (
    PROBES,
    MeasuredCollective,
    canonical,
    measured_collectives,
)
from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.results import CheckResult, Status, Threshold
from drillyard.acceptance.thresholds import (
    UNIT,
    NoReference,
    accepted_elsewhere,
    baseline_threshold,
    collective_threshold,
    deciding_size,
    judged,
    lost_nic_text,
    nodes_text,
    reference_curve,
    reference_rows,
    required_sizes,
    size_text,
)

_ACTION = {
    "node": "compare its NVLinks and PCIe links with another node's (nvidia-smi nvlink -s)",
    "pairs": "look at the NICs of both nodes: links up, speed, error counters",
    "all": "compare with the bandwidth of the pairs: a slow pair slows down all",
}
_MOST_EVIDENCE = 5


def judge(scope: str, evidence: AcceptanceEvidence, expected: Expected) -> Iterator[CheckResult]:
    """One result per collective and group of nodes that was measured, and one for each that is
    missing."""
    found = [each for each in measured_collectives(evidence) if each.observation.scope == scope]
    for measured in found:
        yield collective_result(measured, evidence, expected)
    missing = [] if evidence.recorded else list(_missing(scope, found, evidence, expected))
    yield from missing
    if not found and not missing:
        alone = scope == "pairs" and evidence.expected_nodes == 1
        reason = "there is one node" if alone else "no collective was measured"
        yield _result(scope, "bus bandwidth", (), Status.skipped, reason)


def collective_result(
    measured: MeasuredCollective, evidence: AcceptanceEvidence, expected: Expected
) -> CheckResult:
    """The judgement of one collective on one group of nodes."""
    scope, nodes = measured.observation.scope, measured.nodes
    collective, count = measured.collective, len(nodes)
    names = _names(evidence, nodes)
    if collective is None:
        return _result(
            scope, "bus bandwidth", nodes, Status.incomplete,
            f"{names}: {measured.by}: {measured.problems[0]}", evidence=measured.problems,
        )  # fmt: skip
    series = tuple((float(size), max(values)) for size, values in sorted(measured.bus.items()))
    size = deciding_size(expected, collective, count, measured.bus)
    at = size if isinstance(size, int) else max(measured.bus, default=0)
    metric = metric_at(collective, at)
    common = partial(_result, scope, metric, nodes, series=series)
    doubts = (*measured.problems, *measured.doubts)
    if measured.wrong and not measured.problems:
        return common(
            Status.fail,
            f"{names}: {measured.wrong} elements of {collective} were wrong ({measured.by}):"
            " data are damaged on the way or in memory",
            action="take the nodes out; check ECC counters and cables, and run the pair again",
        )
    if measured.problems or not at:
        reason = f"{names}: {collective}, {measured.by}: {(*doubts, 'has no rows')[0]}"
        needed = count <= 2 and bool(reference_rows(expected, collective, count))
        # A file that was given was given to be judged.
        status = Status.incomplete if needed or evidence.recorded else Status.recorded
        return common(
            status, reason, evidence=doubts[:_MOST_EVIDENCE],
            action="run it again, and keep its whole output",
        )  # fmt: skip
    threshold: Threshold | NoReference = (
        size if isinstance(size, NoReference)
        else collective_threshold(expected, collective, count, size)
    )  # fmt: skip
    if isinstance(threshold, NoReference):
        at, before = _baseline(expected, measured)
        if before is not None:
            return _judged(
                measured, evidence, expected, before, metric_at(collective, at), at, series
            )
        return _without_reference(measured, evidence, expected, metric, at, threshold, series)
    return _judged(measured, evidence, expected, threshold, metric, at, series)


def metric_at(collective: str, size: int) -> str:
    """The name of a figure."""
    return f"{collective} bus bandwidth{f' at {size_text(size)}' if size else ''}"


def _baseline(expected: Expected, measured: MeasuredCollective) -> tuple[int, Threshold | None]:
    """The limit that this cluster's earlier run gives at the largest size of both: a fraction of
    the least that it measured, on as many nodes."""
    size = max(measured.bus, default=0)
    before = _before(
        expected, str(measured.collective), measured.observation.scope, len(measured.nodes)
    )
    common = [size for size in measured.bus if size in before]
    if not common:
        return size, None
    size = max(common)
    metric = metric_at(str(measured.collective), size)
    return size, baseline_threshold(expected, before[size], metric)


def _before(expected: Expected, collective: str, scope: str, count: int) -> dict[int, float]:
    """By size in bytes: the least GB/s that the baseline has of a collective on as many nodes."""
    least: dict[int, float] = {}
    for each in measured_collectives(expected.baseline) if expected.baseline is not None else ():
        same = (each.collective, each.observation.scope, len(each.nodes))
        if same == (collective, scope, count) and not (each.problems or each.doubts or each.wrong):
            for size, values in each.bus.items():
                least[size] = min(*values, least.get(size, values[0]))
    return least


def pair_limit(expected: Expected, collective: str, size: int) -> float | None:
    """GB/s that a pair of nodes must reach at `size` bytes, for the search; None where neither a
    row nor the baseline says."""
    name = canonical(collective)
    found = collective_threshold(expected, name, 2, size)
    if isinstance(found, NoReference):
        before = _before(expected, name, "pairs", 2)
        if size not in before:
            return None
        found = baseline_threshold(expected, before[size], "")
    return found.value


def _judged(
    measured: MeasuredCollective,
    evidence: AcceptanceEvidence,
    expected: Expected,
    threshold: Threshold,
    metric: str,
    size: int,
    series: tuple[tuple[float, float], ...],
) -> CheckResult:
    assert measured.collective is not None and threshold.reference is not None
    scope, nodes = measured.observation.scope, measured.nodes
    status, median, interval = judged(measured.bus[size], threshold)
    names = _names(evidence, nodes)
    figure = f"{names}: {median:.4g} {UNIT} of {measured.collective} at {size_text(size)}"
    limit = (
        f"{threshold.value:.4g} ({threshold.value / threshold.reference:.0%} of"
        f" {threshold.reference:.4g}: {threshold.source})"
    )
    if status is Status.passed:
        reason = f"{figure}, at least {limit}"
    elif status is Status.fail:
        reason = f"{figure}, below {limit}"
        lost = lost_nic_text(expected.machine, len(nodes), threshold.reference)
        reason += f"; {lost}" if lost else ""
    else:
        reason = (
            f"{figure}, below {limit}, but its repeats reach {interval[1]:.4g}: they do not agree"
        )
    bound = threshold.bound
    if bound is not None and interval[1] > bound and len(nodes) <= 2:
        status = Status.incomplete
        reason = f"{figure}: line rates allow {bound:.1f}, so it is not of this machine"
    if status is Status.passed and measured.doubts:
        status = Status.incomplete
        reason = f"{figure}, {measured.by}: {measured.doubts[0]}"
    # On more nodes no result is required, and an unclear one is recorded.
    required = len(nodes) <= 2 or status is not Status.incomplete
    quoted = accepted_elsewhere(expected, measured.collective, len(nodes))
    return _result(
        scope, metric, nodes,
        status if required else Status.recorded, reason,
        observed=median,
        interval=interval,
        threshold=threshold,
        culprits=nodes if status is Status.fail and scope == "node" else (),
        evidence=(measured.by, *quoted, *measured.doubts[:_MOST_EVIDENCE]),
        series=series,
        reference_series=reference_curve(expected, measured.collective, len(nodes)),
    )  # fmt: skip


def _without_reference(
    measured: MeasuredCollective,
    evidence: AcceptanceEvidence,
    expected: Expected,
    metric: str,
    size: int,
    why: NoReference,
    series: tuple[tuple[float, float], ...],
) -> CheckResult:
    """A figure that no row judges. Where there is a row and only the sizes are others, the evidence
    that it needs is missing."""
    assert measured.collective is not None
    nodes = measured.nodes
    # At least 0: the median and interval without a judgement.
    none = Threshold(0.0, UNIT, True, "")
    _, median, interval = judged(measured.bus[size], none)
    rows = reference_rows(expected, measured.collective, len(nodes))
    required = bool(rows) and len(nodes) <= 2
    return _result(
        measured.observation.scope, metric, nodes,
        Status.incomplete if required else Status.recorded,
        f"{_names(evidence, nodes)}: {median:.4g} {UNIT} of {measured.collective} at"
        f" {size_text(size)}, not judged: {why.reason}",
        observed=median,
        interval=interval,
        evidence=(measured.by, *measured.doubts[:_MOST_EVIDENCE]),
        series=series,
        reference_series=reference_curve(expected, measured.collective, len(nodes)),
        action="measure a size of the row" if required else "",
    )  # fmt: skip


def _missing(
    scope: str, found: list[MeasuredCollective], evidence: AcceptanceEvidence, expected: Expected
) -> Iterator[CheckResult]:
    """Collectives with a row that were not measured on a node."""
    if scope == "all" or (scope == "pairs" and evidence.expected_nodes == 1):
        return
    count = 1 if scope == "node" else 2
    for collective, sizes in required_sizes(expected, count).items():
        met = {node for each in found if each.collective == collective for node in each.nodes}
        for rank in range(evidence.expected_nodes):
            if rank in met or rank in evidence.missing:
                continue
            where = "in" if count == 1 else "between two nodes with"
            reason = f"{collective} was not measured {where} {evidence.name_of(rank)}"
            metric = f"{collective} bus bandwidth at {size_text(max(sizes))}"
            yield _result(scope, metric, (rank,), Status.incomplete, reason)


def _names(evidence: AcceptanceEvidence, nodes: tuple[int, ...]) -> str:
    if len(nodes) > 2:
        return nodes_text(len(nodes))
    return " and ".join(evidence.name_of(rank) for rank in nodes) or "one node"


def _result(
    scope: str, metric: str, nodes: tuple[int, ...], status: Status, reason: str, **more: Any
) -> CheckResult:
    check = {"node": NODE, "pairs": PAIRS, "all": ALL}[scope]
    return check.result(nodes, status, reason, **{"metric": metric, "unit": UNIT, **more})


def _check(scope: str, title: str, level: Level, seconds: float, meaning: str) -> Check:
    return Check(
        name=f"collectives-{scope}",
        title=title,
        level=level,
        probes=PROBES,
        seconds=seconds,
        measures="busbw of all_reduce, all_gather, reduce_scatter, all_to_all, by message size",
        how="nccl-tests where they are installed, else PyTorch; several repeats",
        evidence="a whole table that agrees with itself: time, algbw, busbw, sizes, ranks, results",
        references="90 % of the measured row of this machine, collective, number of nodes and size",
        meaning=meaning,
        action=_ACTION[scope],
        judge=partial(judge, scope),
    )


NODE = _check(
    "node", "Collectives in one node", Level.quick, 10,
    "a link between its GPUs is down or slow, or the switch does not add up",
)  # fmt: skip
PAIRS = _check(
    "pairs", "Collectives between two nodes", Level.quick, 20,
    "one of the two nodes, or what lies between them, is slow: a NIC, a cable, a switch port",
)  # fmt: skip
ALL = _check(
    "all", "Collectives on all nodes", Level.standard, 30,
    "the network between racks is slow, or one node slows down all",
)  # fmt: skip
