"""Bus bandwidth of all nodes over that of one node: what is often called scaling efficiency. It is
a ratio of bus bandwidths, and says nothing about the scaling of training."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from drillyard.acceptance.check import Check, Expected, Level
from drillyard.acceptance.collective_evidence import MeasuredCollective, measured_collectives
from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.rank_values import ranks_of
from drillyard.acceptance.results import CheckResult, Status, Threshold
from drillyard.hardware.bandwidths import bus_bandwidth

OF_ROWS = 0.9
OF_BASELINE = 7 / 8
"""Least share of the ratio that the machine's rows, or the baseline, have."""


def judge(evidence: AcceptanceEvidence, expected: Expected) -> Iterator[CheckResult]:
    """One result per collective that was measured on one node and on all."""
    nodes = tuple(each.rank for each in evidence.nodes)
    if evidence.expected_nodes == 1:
        yield _result("bus bandwidth", nodes, Status.skipped, "there is one node")
        return
    before = {} if expected.baseline is None else ratios(expected.baseline)
    found = ratios(evidence)
    if not found:
        reason = "no collective was measured on one node and on all"
        yield _result("bus bandwidth", nodes, Status.skipped, reason)
    for name, (every, own, size) in found.items():
        ratio, limit = every / own, _of_rows(expected, name, evidence.expected_nodes, size)
        if limit is None and name in before and _on_gpu(evidence):
            known = before[name][0] / before[name][1]
            source = f"{OF_BASELINE:.3g} of the baseline"
            limit = Threshold(OF_BASELINE * known, "", True, source, known)
        status = Status.recorded
        if limit is not None:
            status = Status.passed if ratio >= limit.value else Status.fail
        reason = (
            f"{name}: {every:.4g} GB/s of bus bandwidth on {evidence.expected_nodes} nodes over"
            f" {own:.4g} on one: {ratio:.1%}"
        )
        yield _result(f"{name}, all nodes over one", nodes, status, reason, ratio, limit)


def ratios(evidence: AcceptanceEvidence) -> dict[str, tuple[float, float, int]]:
    """By collective: bus bandwidth in GB/s of all nodes, the median of single nodes, and the bytes
    of the largest message that both had. The best repeat counts, of the last measurement."""
    every: dict[str, dict[int, float]] = {}
    single: dict[str, dict[int, dict[int, float]]] = {}
    for each in measured_collectives(evidence):
        if each.collective is None or each.problems or each.wrong:
            continue
        curve = {_asked(evidence, each, size): max(values) for size, values in each.bus.items()}
        if len(each.nodes) == evidence.expected_nodes:
            every[each.collective] = curve
        elif len(each.nodes) == 1:
            single.setdefault(each.collective, {})[each.nodes[0]] = curve
    found = {}
    for name, curve in every.items():
        own = list(single.get(name, {}).values())
        common = curve.keys() & set[int]().union(*own)
        if common:
            size = max(common)
            found[name] = (curve[size], median(one[size] for one in own if size in one), size)
    return found


def _asked(evidence: AcceptanceEvidence, found: MeasuredCollective, size: int) -> int:
    """The size that was asked for: ranks share it in equal parts, so that a few bytes may lack."""
    sizes = found.observation.arguments.get("sizes")
    listed = [each for each in (sizes if isinstance(sizes, list) else []) if type(each) is int]
    return min((each for each in listed if size <= each <= 1.01 * size), default=size)


def _on_gpu(evidence: AcceptanceEvidence) -> bool:
    seen = evidence.of("collective")
    return any(each.on_gpu for one in seen for each in ranks_of(evidence, one).ranks)


def _of_rows(expected: Expected, name: str, nodes: int, size: int) -> Threshold | None:
    """A share of the ratio of the machine's own rows; None where one of them is missing."""
    if expected.machine is None:
        return None
    rows = expected.catalog.bandwidths
    every, one = (bus_bandwidth(rows, expected.machine, name, each, size) for each in (nodes, 1))
    if every is None or one is None or every.row.nodes != nodes:
        return None
    known = every.gb_per_s.value / one.gb_per_s.value
    source = f"{OF_ROWS:.3g} of the rows' ({every.gb_per_s.source}; {one.gb_per_s.source})"
    return Threshold(OF_ROWS * known, "", True, source, known)


def _result(
    metric: str,
    nodes: tuple[int, ...],
    status: Status,
    reason: str,
    observed: float | None = None,
    threshold: Threshold | None = None,
) -> CheckResult:
    return CHECK.result(
        nodes, status, reason,
        metric=metric, observed=observed, threshold=threshold, required=False,
    )  # fmt: skip


CHECK = Check(
    name="bandwidth-scaling",
    title="Bus bandwidth of all nodes over one",
    level=Level.quick,
    probes=("collective",),
    seconds=0,
    measures="the ratio of bus bandwidths, by collective, at the largest size that both have",
    how="figures of the collectives' checks",
    evidence="the collective on single nodes and on all of them",
    references="0.9 of the ratio of the machine's rows, or 7/8 of the baseline's; else recorded",
    meaning="the network between nodes is slower than it should be beside the links inside them",
    action="look at the collectives' checks of pairs: they say which node or link it is",
    judge=judge,
)
