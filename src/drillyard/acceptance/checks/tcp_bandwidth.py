"""TCP bandwidth between nodes, over the network that everything but the GPUs' traffic uses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from drillyard.acceptance.check import Check, Expected, Level
from drillyard.acceptance.checks.blame import blame
from drillyard.acceptance.checks.mesh_evidence import (
    entries,
    listed,
    member,
    network_steps,
    not_between_nodes,
    number,
    unanswered,
    undirected,
)
from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.results import CheckResult, Status, Threshold
from drillyard.hardware.machines import BITS_PER_BYTE

FIGURE = "slower_gb_per_s"
SHARE = 0.5
"""Of the best pair, or of the baseline: a NIC that runs at its next lower speed has less."""
_PROGRAM_GB_PER_S = 1.25
"""What one program in Python moves over TCP on any host of today, in GB/s: 10 Gb/s. No more is
demanded: above it the processors decide, and other work on a host would look like a bad NIC."""
_SHAPERS = {"tbf", "htb", "hfsc", "cbq", "netem"}
"""Queue disciplines that limit a rate (tc(8)), and that no distribution sets by itself."""


def pair_bandwidths(evidence: AcceptanceEvidence) -> dict[tuple[int, int], float]:
    """The slower direction of each pair in GB/s, its best measurement."""
    found: dict[tuple[int, int], float] = {}
    for seen in evidence.of("tcp_bandwidth"):
        value = number(member(seen.values, FIGURE))
        if len(seen.nodes) == 2 and value is not None and not seen.error:
            pair = undirected(*seen.nodes)
            found[pair] = max(found.get(pair, 0.0), value)
    return found


def least_of_baseline(baseline: AcceptanceEvidence | None) -> float | None:
    """What each pair must reach: a share of the slowest pair of an earlier job, at most of 10 Gb/s;
    None without."""
    before = pair_bandwidths(baseline) if baseline is not None else {}
    return SHARE * min(_PROGRAM_GB_PER_S, *before.values()) if before else None


def judge(evidence: AcceptanceEvidence, expected: Expected) -> Iterator[CheckResult]:
    """One result per slow node or pair, and one for all."""
    if (nothing := not_between_nodes(evidence, CHECK, "tcp_bandwidth")) is not None:
        yield nothing
        return
    found = pair_bandwidths(evidence)
    for each in unanswered(evidence, CHECK, "tcp_bandwidth"):
        if undirected(*each.nodes[:2]) not in found:
            yield each
    if not found:
        return
    threshold = _threshold(expected, found)
    if threshold is None:
        value, pair = min((value, pair) for pair, value in found.items())
        why = "only one pair, and neither a machine nor a baseline to compare it with"
        yield _result(pair, Status.recorded, f"{_pair(evidence, pair)}: {why}", value, None)
        return
    bad = {pair: value for pair, value in found.items() if value < threshold.value}
    blamed = blame(found.keys() - bad.keys(), bad)
    nodes = blamed.nodes or _shaped(evidence, bad)
    for rank in nodes:
        value = max(value for pair, value in bad.items() if rank in pair)
        others = sorted({each for pair in bad if rank in pair for each in pair} - {rank})
        reason = f"{evidence.name_of(rank)} is slow to {listed(evidence, others)}"
        lines = tuple(
            f"{_pair(evidence, pair)}: {value:.3f} GB/s"
            for pair, value in sorted(bad.items())
            if rank in pair
        )
        if kinds := shapers_of(evidence, rank):
            reason = f"{reason}; its interface has the queue discipline {', '.join(kinds)}"
        yield _result(
            (rank,), Status.fail, reason, value, threshold, culprits=(rank,), evidence=lines[:10]
        )
    for pair in blamed.links:
        if nodes and not set(nodes).isdisjoint(pair):
            continue
        reason = f"{_pair(evidence, pair)} is slow; which end is at fault is not known"
        yield _result(pair, Status.fail, reason, bad[pair], threshold)
    if good := sorted((value, pair) for pair, value in found.items() if pair not in bad):
        ranks = tuple(sorted({rank for _, pair in good for rank in pair}))
        reason = f"{len(good)} pairs; the slowest is {_pair(evidence, good[0][1])}"
        yield _result(ranks, Status.passed, reason, good[0][0], threshold)


def _threshold(expected: Expected, found: dict[tuple[int, int], float]) -> Threshold | None:
    """A share of the baseline, else of the best pair, else of the NICs."""
    bound = None
    if expected.machine is not None and expected.machine.host_nics.count:
        nics = expected.machine.host_nics
        bound = nics.count * nics.gbps / BITS_PER_BYTE
    if (least := least_of_baseline(expected.baseline)) is not None:
        source = "half of the baseline's slowest pair, or of 10 Gb/s"
        return Threshold(least, "GB/s", True, source, least / SHARE, bound)
    if len(found) > 1:
        best = min(_PROGRAM_GB_PER_S, max(found.values()))
        source = "half of the best pair, or of 10 Gb/s"
        return Threshold(SHARE * best, "GB/s", True, source, best, bound)
    if expected.machine is not None and bound:
        reached = min(bound, _PROGRAM_GB_PER_S)
        source = f"half of 10 Gb/s, or of the host NICs of {expected.machine.name}"
        return Threshold(SHARE * reached, "GB/s", True, source, reached, bound)
    return None


def shapers_of(evidence: AcceptanceEvidence, rank: int) -> list[str]:
    """Rate-limiting queue disciplines of a node's interfaces."""
    steps = network_steps(evidence)
    interfaces = entries(steps[0].get(rank), "interfaces") if steps else []
    return sorted(
        kind
        for each in interfaces
        for kind in entries(each, "queues")
        if isinstance(kind, str) and kind in _SHAPERS
    )


def _shaped(evidence: AcceptanceEvidence, bad: dict[tuple[int, int], float]) -> tuple[int, ...]:
    """Where pairs do not tell: the end of a slow pair that has a rate limit, if only one has."""
    found: set[int] = set()
    for pair in bad:
        limited = [rank for rank in pair if shapers_of(evidence, rank)]
        if len(limited) == 1:
            found.update(limited)
    return tuple(sorted(found))


def _pair(evidence: AcceptanceEvidence, pair: tuple[int, int]) -> str:
    return f"{evidence.name_of(pair[0])} and {evidence.name_of(pair[1])}"


def _result(
    nodes: tuple[int, ...],
    status: Status,
    reason: str,
    observed: float,
    threshold: Threshold | None,
    **more: Any,
) -> CheckResult:
    figure = {"observed": observed, "unit": "GB/s", "threshold": threshold}
    return CHECK.result(nodes, status, reason, **figure, **more)


CHECK = Check(
    name="tcp-bandwidth",
    title="TCP bandwidth",
    level=Level.quick,
    probes=("tcp_bandwidth",),
    seconds=10,
    measures="TCP bandwidth of pairs of nodes, both ways, in GB/s",
    how="one program sends to another by four connections; a node is in one pair at a time, pairs"
    " that look slow are measured again, and the best counts",
    evidence="a figure for every pair that was measured",
    references="half of 10 Gb/s, or of what is less: the baseline's slowest pair, else the best"
    " pair, else the host NICs",
    meaning="a NIC runs at a lower speed, a cable or port loses packets, or a rate is limited",
    action="look at ethtool's speed and error counters, and at `tc qdisc` of this node",
    judge=judge,
    metric="bandwidth",
)
