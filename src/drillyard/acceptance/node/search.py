"""Finding a bad node, link or rack from measured pairs of nodes, in at most three rounds.

A slow pair says that one of two nodes, or what lies between them, is slow. Round 1 measures
disjoint pairs within racks. In round 2 each node without a good result meets one that has passed,
in another rack where there is one, and the others are paired across racks as well: that measures
the links between racks, the noise, and how often a result is bad by chance. In round 3 the
remaining suspects meet another node that has passed, in their own rack, and a slow pair of good
nodes is measured again.

A node is blamed when it was slow with at least two nodes that are proven good, about equally slow
each time, and never fast. That is not enough where other results were bad without a cause: as many
healthy nodes as the cluster has would look like that by chance (`MOST_BY_CHANCE`).

`passed` of a result comes from a threshold. Without one, results are judged by each other: the
healthy ones are the group of the fastest, if most nodes are in it.

Pure: node 0 runs `next_round` between rounds, and the judgement runs `conclude` over the same
results.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

ROUNDS = 3
RELATIVE = 0.8
"""Without a threshold: slower than this share of the healthy pairs is slow."""
NOISES = 4.0
"""A result this many standard deviations below the healthy ones is slow, and not noise."""
CLEARING_NOISES = 2.0
"""A result within so many below the healthy ones clears both nodes."""
LEAST_NOISE = 0.005
MOST_BY_CHANCE = 1e-4
"""Healthy nodes, or pairs, of a cluster that may look bad by chance."""
PRIOR_SLOW, PRIOR_RESULTS = 0.5, 25
"""What is assumed to have been seen before: half a result in 25 that was bad by chance."""


@dataclass(frozen=True)
class PairResult:
    """A measured pair of nodes, by rank. `passed` None: it was not measured, or nothing says what
    is enough."""

    pair: tuple[int, int]
    value: float | None
    passed: bool | None
    round: int


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


class _View:
    """Results, each judged by a threshold or by the others."""

    def __init__(self, racks: Mapping[str, str], results: Sequence[PairResult]) -> None:
        self.racks = racks
        self.results = list(results)
        self.absolute = any(each.passed is not None for each in results)
        values = [each.value for each in results if each.value]
        if self.absolute:
            healthy = [each.value for each in results if each.passed and each.value]
        else:
            healthy = [value for value in values if value >= RELATIVE * max(values)]
        met = {node for each in results for node in each.pair}
        fast = {node for each in results if (each.value or 0.0) in healthy for node in each.pair}
        self.reliable = bool(healthy) and (self.absolute or 2 * len(fast) > len(met))
        self.level = _median(healthy) if healthy else 0.0
        # Above the level are healthy pairs alone, and noise goes both ways.
        self.noise = _noise([math.log(each / self.level) for each in healthy if each >= self.level])
        self.spread = max(0.03, 4 * self.noise)
        self._of: dict[int, list[PairResult]] = {}
        for each in results:
            for node in each.pair:
                self._of.setdefault(node, []).append(each)
        self._limit = self.level * math.exp(-NOISES * self.noise)
        self._near = self.level * math.exp(-CLEARING_NOISES * self.noise)
        if not self.absolute:
            self._limit = min(self._limit, RELATIVE * self.level)

    def good(self, result: PairResult) -> bool:
        if self.absolute:
            return result.passed is True
        return bool(result.value) and (result.value or 0.0) >= self._limit

    def clears(self, result: PairResult) -> bool:
        """So good that both nodes are: a slow node may reach the limit by noise."""
        return self.good(result) and (result.value or 0.0) >= self._near

    def slow(self, result: PairResult) -> bool:
        """Not good, and not by noise."""
        return not self.good(result) and (result.value or 0.0) < self._limit

    def of(self, node: int) -> list[PairResult]:
        return self._of.get(node, [])

    def is_cleared(self, node: int, but: int | None = None) -> bool:
        """Whether a result with another node than `but` clears it."""
        return any(self.clears(each) for each in self.of(node) if but not in each.pair)

    def measured(self, one: int, other: int) -> list[PairResult]:
        return [each for each in self.of(one) if other in each.pair]

    def rack(self, node: int) -> str:
        return self.racks.get(str(node), "")

    def crosses(self, result: PairResult) -> bool:
        return self.rack(result.pair[0]) != self.rack(result.pair[1])

    def rack_is_joined(self, rack: str) -> bool:
        """Whether a pair of the rack with another rack was good."""
        return any(
            self.good(each) and self.crosses(each)
            for each in self.results
            if rack in (self.rack(each.pair[0]), self.rack(each.pair[1]))
        )


def next_round(
    nodes: Sequence[int], racks: Mapping[str, str], results: Sequence[PairResult]
) -> list[tuple[int, int]]:
    """Disjoint pairs to measure next; empty: nothing more can be learnt."""
    number = 1 + max((each.round for each in results), default=-1)
    if number == 0:
        return _within_racks(nodes, racks)
    if number >= ROUNDS or not any(each.value for each in results):
        return []
    view = _View(racks, results)
    free = list(nodes)
    pairs: list[tuple[int, int]] = []

    def take(one: int, other: int) -> None:
        pairs.append((one, other))
        free.remove(one)
        free.remove(other)

    again = [each.pair for each in results if view.slow(each) and _both_cleared(view, each)]
    crossing = [pair for pair in again if view.rack(pair[0]) != view.rack(pair[1])]
    if number == ROUNDS - 1:
        for one, other in again:
            once = len(view.measured(one, other)) == 1
            if once and one in free and other in free and len(crossing) < 2:
                take(one, other)
    suspects = [node for node in nodes if not view.is_cleared(node) and node in free]
    same_rack = number == ROUNDS - 1
    for node in suspects:
        partners = [each for each in free if view.is_cleared(each)]
        partner = _partner(view, node, partners, same_rack=same_rack)
        if partner is not None:
            take(node, partner)
    rest = [node for node in suspects if node in free]
    for node in rest:
        others = [each for each in rest if each in free and each != node]
        partner = _partner(view, node, others, same_rack=False) if node in free else None
        if partner is not None:
            take(node, partner)
    several_racks = len({view.rack(node) for node in nodes}) > 1
    unmeasured_racks = number == 1 and several_racks
    if not (suspects or again or unmeasured_racks):
        return []
    if suspects or unmeasured_racks or len(crossing) > 1:
        # They cost no time beside the others, and say how often a result is bad by chance.
        pairs += _across_racks(view, free)
    return pairs


def _both_cleared(view: _View, result: PairResult) -> bool:
    one, other = result.pair
    return view.is_cleared(one, other) and view.is_cleared(other, one)


def _within_racks(nodes: Sequence[int], racks: Mapping[str, str]) -> list[tuple[int, int]]:
    """Neighbours in each rack, then what is left over; of an odd number one stays alone."""
    groups: dict[str, list[int]] = {}
    for node in nodes:
        groups.setdefault(racks.get(str(node), ""), []).append(node)
    pairs, left = [], []
    for group in groups.values():
        pairs += list(zip(group[::2], group[1::2]))
        left += group[len(group) // 2 * 2 :]
    return pairs + list(zip(left[::2], left[1::2]))


def _partner(view: _View, node: int, others: Iterable[int], *, same_rack: bool) -> int | None:
    """One that it has not met, in its rack or outside of it where there is one."""
    found = [each for each in others if each != node and not view.measured(node, each)]
    wanted = [each for each in found if (view.rack(each) == view.rack(node)) == same_rack]
    return next(iter(wanted or found), None)


def _across_racks(view: _View, free: list[int]) -> list[tuple[int, int]]:
    """Pairs of the free nodes that have not met, of different racks where that is possible."""
    pairs = []
    left = list(free)
    while left:
        groups: dict[str, list[int]] = {}
        for node in left:
            groups.setdefault(view.rack(node), []).append(node)
        node = max(groups.values(), key=len)[0]
        left.remove(node)
        by_size = sorted(left, key=lambda each: -len(groups[view.rack(each)]))
        met = {view.rack(other) for each in view.of(node) for other in each.pair if other != node}
        fresh = [each for each in by_size if view.rack(each) not in met]
        partner = _partner(view, node, fresh, same_rack=False)
        if partner is None:
            partner = _partner(view, node, by_size, same_rack=False)
        if partner is not None:
            left.remove(partner)
            pairs.append((node, partner))
    return pairs


def conclude(
    nodes: Sequence[int], racks: Mapping[str, str], results: Sequence[PairResult]
) -> list[Conclusion]:
    """What the results prove, and what they leave open; nothing where no pair is slow."""
    view = _View(racks, results)
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
        reason = "one of the two nodes, or what joins them: there is no third to compare with"
        return Conclusion("link", tuple(sorted(measured)), False, reason, tuple(results))
    reason = (
        "no pair passed: the fabric, the configuration or most nodes are at fault, and single nodes"
        " cannot be distinguished"
    )
    return Conclusion("fabric", tuple(nodes), False, reason, tuple(results))


def _slow_nodes(view: _View, nodes: Sequence[int]) -> list[Conclusion]:
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


def _is_proof(view: _View, node: int, result: PairResult) -> bool:
    """Whether neither the partner nor the way between racks can be the cause."""
    (other,) = (each for each in result.pair if each != node)
    if not view.is_cleared(other, node) and not _is_faster(view, other, result):
        return False
    return not view.crosses(result) or (
        view.rack_is_joined(view.rack(node)) and view.rack_is_joined(view.rack(other))
    )


def _is_faster(view: _View, other: int, result: PairResult) -> bool:
    """Whether a node that is slow itself was clearly faster with all others than in `result`."""
    its = [each.value or 0.0 for each in view.of(other) if each is not result]
    return len(its) > 1 and min(its) > (result.value or 0.0) * math.exp(view.spread)


def _slow_links(view: _View) -> list[Conclusion]:
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
        if not _both_cleared(view, seen[0]) or not _alike(view, seen):
            continue
        reason = f"was slow {len(seen)} times, and both nodes are fast with others"
        found.append(Conclusion("link", (one, other), True, reason, tuple(seen)))
    return found


def _slow_racks(view: _View) -> list[Conclusion]:
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


def _crossings(view: _View, rack: str) -> list[PairResult]:
    """Pairs of the rack with others, of nodes that are good within their racks."""
    return [
        each
        for each in view.results
        if view.crosses(each)
        and rack in (view.rack(each.pair[0]), view.rack(each.pair[1]))
        and all(view.is_cleared(node) for node in each.pair)
    ]


def _explains(view: _View, by: Conclusion, result: PairResult) -> bool:
    if by.kind == "node":
        return by.nodes[0] in result.pair
    if by.kind == "link":
        return set(by.nodes) == set(result.pair)
    return view.crosses(result) and any(view.rack(node) in by.racks for node in result.pair)


def _by_chance(view: _View, conclusion: Conclusion, chance: float) -> float:
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


def _left_open(view: _View, nodes: Sequence[int], failed: Sequence[PairResult]) -> list[Conclusion]:
    """Failed results without a proven cause."""
    found = []
    for node in nodes:
        its = [each for each in failed if node in each.pair]
        if its and not view.is_cleared(node):
            reason = "has no good result, and it is not proven that others are not the cause"
            found.append(Conclusion("node", (node,), False, reason, tuple(its)))
    for each in failed:
        if _both_cleared(view, each) and view.slow(each):
            reason = "was slow once between two nodes that are fast with others"
            found.append(Conclusion("link", tuple(sorted(each.pair)), False, reason, (each,)))
    return found


def _alike(view: _View, results: Sequence[PairResult]) -> bool:
    """Whether the values are one value and noise."""
    values = [each.value or 0.0 for each in results]
    if min(values) <= 0.0:
        return max(values) <= 0.0
    return math.log(max(values) / min(values)) <= view.spread


def _noise(above: Sequence[float]) -> float:
    """Standard deviation of healthy results, from the deviations of the upper half; more for few of
    them."""
    if len(above) < 2:
        return 4 * LEAST_NOISE
    return max(LEAST_NOISE, 1.4826 * _median(above) * (1 + 3 / len(above)))


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return (ordered[middle] + ordered[-1 - middle]) / 2
