"""What measured pairs of nodes prove: a bad node, link or rack, or nothing.

A node is blamed when it was slow with at least two nodes that are proven good, about equally slow
each time, and never fast. That is not enough where other results were bad without a cause: as many
healthy nodes as the cluster has would look like that by chance (`MOST_BY_CHANCE`).

Pure: over the results of the pairs that `node/search.py` chose.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from drillyard.acceptance.node.search import PairResult, PairView

MOST_BY_CHANCE = 1e-4
"""Healthy nodes, or pairs, of a cluster that may look bad by chance."""
PRIOR_SLOW, PRIOR_RESULTS = 0.5, 25
"""What is assumed to have been seen before: half a result in 25 that was bad by chance."""


@dataclass(frozen=True)
class Conclusion:
    """What slow pairs come from. `kind`: node, link (between two nodes), rack (what joins it to
    others), fabric (all of it). `nodes` are ranks: the bad one, or those among which it is. Only
    where it is `proven` may a node be blamed."""

    kind: str
    nodes: tuple[int, ...]
    proven: bool
    reason: str
    evidence: tuple[PairResult, ...]
    racks: tuple[str, ...] = ()


def conclude(
    nodes: Sequence[int], racks: Mapping[str, str], results: Sequence[PairResult]
) -> list[Conclusion]:
    """What the results prove, and what they leave open; nothing where no pair is slow."""
    view = PairView(racks, results)
    failed = [each for each in results if not view.good(each)]
    if not failed:
        return []
    if not any(view.good(each) for each in results):
        return [_none_passed(nodes, results)]
    if not view.reliable:
        reason = "most nodes are in no fast pair, so no speed is the measure of the others"
        return [Conclusion("fabric", tuple(nodes), False, reason, tuple(results))]
    found = [*_slow_racks(view), *_slow_nodes(view, nodes), *_slow_links(view)]
    explained = [each for each in results if any(_explains(view, by, each) for by in found)]
    # A suspect may be the cause of its own slow results, so they do not count as chance.
    others = [
        each
        for each in results
        if each not in explained and all(view.is_cleared(node) for node in each.pair)
    ]
    slow = sum(view.slow(each) for each in others)
    chance = (slow + PRIOR_SLOW) / (len(others) + PRIOR_RESULTS)
    pairs = len({tuple(sorted(each.pair)) for each in results})
    proven = []
    for each in found:
        could_be = pairs if each.kind == "link" else len(nodes)
        by_chance = could_be * _by_chance(view, each, chance)
        proven.append(_decided(each, by_chance <= MOST_BY_CHANCE))
    return [*proven, *_left_open(view, nodes, [each for each in failed if each not in explained])]


def _none_passed(nodes: Sequence[int], results: Sequence[PairResult]) -> Conclusion:
    measured = {node for each in results for node in each.pair}
    if len(measured) == 2:
        reason = "one of the two nodes, or what joins them: a third node to compare with is missing"
        return Conclusion("link", tuple(sorted(measured)), False, reason, tuple(results))
    reason = (
        "no pair passed: the fabric, the configuration or most nodes are at fault, and single nodes"
        " cannot be distinguished"
    )
    return Conclusion("fabric", tuple(nodes), False, reason, tuple(results))


def _slow_nodes(view: PairView, nodes: Sequence[int]) -> list[Conclusion]:
    """Nodes that were slow with proven ones, and never anything else."""
    found = []
    for node in nodes:
        its = view.of(node)
        evidence = [each for each in its if view.slow(each) and _is_proof(view, node, each)]
        partners = {other for each in evidence for other in each.pair if other != node}
        if (
            len(partners) < 2
            or not all(view.slow(each) for each in its)
            or not _alike(view, evidence)
        ):
            continue
        reason = f"was slow with {len(partners)} nodes that are fast with others"
        found.append(Conclusion("node", (node,), True, reason, tuple(evidence)))
    return found


def _is_proof(view: PairView, node: int, result: PairResult) -> bool:
    """Whether neither the partner nor the way between racks can be the cause."""
    (other,) = (each for each in result.pair if each != node)
    if not view.is_cleared(other, node) and not _is_faster(view, other, result):
        return False
    return not view.crosses(result) or (
        view.rack_is_joined(view.rack(node)) and view.rack_is_joined(view.rack(other))
    )


def _is_faster(view: PairView, other: int, result: PairResult) -> bool:
    """Whether a node that is slow itself was clearly faster with all others than in `result`."""
    its = [each.value or 0.0 for each in view.of(other) if each is not result]
    return len(its) > 1 and min(its) > (result.value or 0.0) * math.exp(view.spread)


def _slow_links(view: PairView) -> list[Conclusion]:
    """Pairs of good nodes that were slow each time."""
    found = []
    pairs = {tuple(sorted(each.pair)) for each in view.results if view.slow(each)}
    for one, other in sorted(pairs):
        seen = view.measured(one, other)
        slow = all(view.slow(each) for each in seen)
        joined = not view.crosses(seen[0]) or all(
            view.rack_is_joined(view.rack(node)) for node in (one, other)
        )
        if len(seen) < 2 or not slow or not joined:
            continue
        if not view.both_cleared(seen[0]) or not _alike(view, seen):
            continue
        reason = f"was slow {len(seen)} times, and both nodes are fast with others"
        found.append(Conclusion("link", (one, other), True, reason, tuple(seen)))
    return found


def _slow_racks(view: PairView) -> list[Conclusion]:
    """Racks whose nodes are fast among themselves, and slow with every other rack."""
    names = list(dict.fromkeys(view.rack(node) for each in view.results for node in each.pair))
    cut = []
    for name in names:
        evidence = _crossings(view, name)
        inside = {node for each in evidence for node in each.pair if view.rack(node) == name}
        if len(evidence) >= 3 and len(inside) >= 3 and all(view.slow(each) for each in evidence):
            cut.append(name)
    found = []
    for name in cut:
        others = [other for other in names if other != name]
        evidence = [
            each
            for each in _crossings(view, name)
            if all(
                view.rack(node) == name or view.rack_is_joined(view.rack(node))
                for node in each.pair
            )
        ]
        if len(others) == 1 and others[0] in cut:
            if name < others[0]:
                both = _crossings(view, name)
                ranks = tuple(sorted({node for each in both for node in each.pair}))
                reason = "every pair across was slow, and each rack is fast within"
                found.append(
                    Conclusion("rack", ranks, True, reason, tuple(both), (name, others[0]))
                )
        elif len(evidence) >= 3:
            ranks = tuple(
                sorted({n for each in evidence for n in each.pair if view.rack(n) == name})
            )
            reason = (
                "every pair with another rack was slow, and its nodes are fast among themselves"
            )
            found.append(Conclusion("rack", ranks, True, reason, tuple(evidence), (name,)))
    return found


def _crossings(view: PairView, rack: str) -> list[PairResult]:
    """Pairs of the rack with others, of nodes that are good within their racks."""
    return [
        each
        for each in view.results
        if view.crosses(each)
        and rack in (view.rack(each.pair[0]), view.rack(each.pair[1]))
        and all(view.is_cleared(node) for node in each.pair)
    ]


def _explains(view: PairView, by: Conclusion, result: PairResult) -> bool:
    if by.kind == "node":
        return by.nodes[0] in result.pair
    if by.kind == "link":
        return set(by.nodes) == set(result.pair)
    return view.crosses(result) and any(view.rack(node) in by.racks for node in result.pair)


def _by_chance(view: PairView, conclusion: Conclusion, chance: float) -> float:
    """Probability that all results are bad by chance, and those of a node or link alike as well:
    what is bad by chance lies anywhere between a quarter of the speed and all of it."""
    count = len(conclusion.evidence)
    alike = 1.0 if conclusion.kind == "rack" else min(1.0, 2 * view.spread / math.log(4))
    return chance**count * alike ** (count - 1)


def _decided(conclusion: Conclusion, proven: bool) -> Conclusion:
    if proven:
        return conclusion
    reason = f"{conclusion.reason}; at this noise that may be chance"
    return Conclusion(
        conclusion.kind, conclusion.nodes, False, reason, conclusion.evidence, conclusion.racks
    )


def _left_open(
    view: PairView, nodes: Sequence[int], failed: Sequence[PairResult]
) -> list[Conclusion]:
    """Failed results without a proven cause."""
    found = []
    for node in nodes:
        its = [each for each in failed if node in each.pair]
        if its and not view.is_cleared(node):
            reason = "has no good result, and it is not proven that others are not the cause"
            found.append(Conclusion("node", (node,), False, reason, tuple(its)))
    for each in failed:
        if view.both_cleared(each) and view.slow(each):
            reason = "was slow once between two nodes that are fast with others"
            found.append(Conclusion("link", tuple(sorted(each.pair)), False, reason, (each,)))
    return found


def _alike(view: PairView, results: Sequence[PairResult]) -> bool:
    """Whether the values are one value and noise."""
    values = [each.value or 0.0 for each in results]
    if min(values) <= 0.0:
        return max(values) <= 0.0
    return math.log(max(values) / min(values)) <= view.spread
