"""Copies between the devices of a node: every ordered pair."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from drillyard.acceptance.check import Check, Expected, Level
from drillyard.acceptance.checks.device_rates import OF_BASELINE, OF_OTHERS, OF_PEERS
from drillyard.acceptance.evidence import AcceptanceEvidence, Observation
from drillyard.acceptance.node_results import node_result
from drillyard.acceptance.rank_values import RanksOfProbe, mapping, numbers, ranks_of, without_ranks
from drillyard.acceptance.results import CheckResult, Status, Threshold


def judge(evidence: AcceptanceEvidence, expected: Expected) -> Iterator[CheckResult]:
    """One result per node, and one for each slow pair."""
    asked = [seen for seen in evidence.of("devices") if seen.arguments.get("peers")]
    found = [ranks_of(evidence, seen) for seen in asked]
    reason = None
    if evidence.processes_per_node == 1:
        reason = "a node has one device"
    elif evidence.of("devices") and not asked:
        reason = "copies between devices were not asked for"
    if reason is not None:
        nodes = tuple(each.rank for each in evidence.nodes)
        yield CHECK.result(nodes, Status.skipped, reason)
        return
    yield from without_ranks(evidence, CHECK, "peers", found, "copies between devices")
    before = _baseline(expected.baseline)
    for one in found:
        for node in one.observation.nodes:
            yield from _judge_node(evidence, expected, one, node, before)


def matrix(found: RanksOfProbe, node: int) -> dict[tuple[int, int], tuple[float, ...]]:
    """GB/s by repeat, by (from, to)."""
    entries = {}
    for each in found.ranks:
        if each.node == node:
            for peer, row in mapping(each.values.get("peers")).items():
                if peer.isdecimal() and (figures := numbers(mapping(row).get("gb_per_s"))):
                    entries[each.local_rank, int(peer)] = figures
    return entries


def _judge_node(
    evidence: AcceptanceEvidence,
    expected: Expected,
    found: RanksOfProbe,
    node: int,
    before: float | None,
) -> Iterator[CheckResult]:
    ranks = [each for each in found.ranks if each.node == node]
    name, entries = evidence.name_of(node), matrix(found, node)
    if not ranks:
        return
    if not any(each.on_gpu for each in ranks):
        reason = f"{name}: its ranks run on CPUs"
        yield _result(node, Status.skipped, reason)
        return
    wanted = evidence.processes_per_node * (evidence.processes_per_node - 1)
    if len(entries) != wanted:
        yield _result(node, Status.incomplete, f"{name}: {len(entries)} of {wanted} pairs measured")
        return
    usual = median(median(figures) for figures in entries.values())
    limit = _limit(expected, before)
    least = OF_OTHERS[True] * usual
    # Cards that a bridge joins in pairs are far apart from all others: then only the best counts.
    switched = limit is None or usual >= limit.value
    if limit is not None and max(max(figures) for figures in entries.values()) < limit.value:
        reason = f"{name}: {usual:.4g} GB/s, below {limit.value:.4g} ({limit.source})"
        yield _result(node, Status.fail, reason, usual, limit)
        return
    slow = {pair: max(figures) for pair, figures in entries.items() if max(figures) < least}
    if slow and switched:
        (source, target), value = min(slow.items(), key=lambda each: each[1])
        reason = (
            f"{name}: device {source} to {target} reaches {value:.4g} GB/s, {value / usual:.0%} of"
            f" the {usual:.4g} of all pairs ({len(slow)} pairs are below {OF_OTHERS[True]:.0%})"
        )
        yield _result(node, Status.fail, reason, value, limit)
        return
    status = Status.recorded if limit is None else Status.passed
    lowest = min(median(figures) for figures in entries.values())
    reason = f"{name}: {wanted} pairs, {lowest:.4g} GB/s and more"
    yield _result(node, status, reason, lowest, limit)


def _limit(expected: Expected, before: float | None) -> Threshold | None:
    link = expected.accelerator and expected.accelerator.one_way_link_gb_per_s()
    if link:
        assert expected.accelerator is not None
        source = f"{OF_PEERS:.3g} of {expected.accelerator.name}'s link: {link.source}"
        return Threshold(OF_PEERS * link.value, "GB/s", True, source, link.value, link.value)
    if before is not None:
        share = OF_BASELINE[True]
        return Threshold(share * before, "GB/s", True, f"{share:.3g} of the baseline", before)
    return None


def _baseline(baseline: AcceptanceEvidence | None) -> float | None:
    """The median of all pairs."""
    seen: list[Observation] = [] if baseline is None else baseline.of("devices")
    found = [
        median(figures)
        for each in seen
        for node in each.nodes
        for figures in matrix(ranks_of(baseline, each), node).values()  # type: ignore[arg-type]
    ]
    return median(found) if found else None


def _result(
    node: int,
    status: Status,
    reason: str,
    observed: float | None = None,
    threshold: Threshold | None = None,
) -> CheckResult:
    figure = {"observed": observed, "unit": "GB/s", "threshold": threshold}
    return node_result(CHECK, node, status, reason, **figure)


CHECK = Check(
    name="peers",
    title="Copies between devices",
    level=Level.standard,
    probes=("devices",),
    seconds=20,
    measures="copies from each device to each other one of its node",
    how="torch copy_ from one device's buffer to another's, one device at a time",
    evidence="a rate for every ordered pair",
    references="0.7 of the link's one-way rate, or 7/8 of the baseline; 0.9 of all other pairs",
    meaning="a link between devices is down or slow, or copies go through the host",
    action="look at nvidia-smi nvlink -s and topo -m; restart the fabric manager or the node",
    judge=judge,
)
