"""Finding a bad node, link or rack from measured pairs of nodes: which pairs are measured next, in
at most three rounds.

A slow pair says that one of two nodes, or what lies between them, is slow. Round 1 measures
disjoint pairs within racks. In round 2 each node without a good result meets one that has passed,
in another rack where there is one, and the others are paired across racks as well: that measures
the links between racks, the noise, and how often a result is bad by chance. In round 3 the
remaining suspects meet another node that has passed, in their own rack, and a slow pair of good
nodes is measured again.

`passed` of a result comes from a threshold. Without one, results are judged by each other: the
healthy ones are the group of the fastest, if most nodes are in it.

Pure: node 0 runs `next_round` between rounds; what the results prove is found where they are
judged, in `acceptance/pair_conclusions.py`.
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


@dataclass(frozen=True)
class PairResult:
    """A measured pair of nodes, by rank. `passed` None: it was not measured, or nothing says what
    is enough."""

    pair: tuple[int, int]
    value: float | None
    passed: bool | None
    round: int


class PairView:
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
        """Whether it reaches the threshold, or the others."""
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
        """The results with a node."""
        return self._of.get(node, [])

    def is_cleared(self, node: int, but: int | None = None) -> bool:
        """Whether a result with another node than `but` clears it."""
        return any(self.clears(each) for each in self.of(node) if but not in each.pair)

    def both_cleared(self, result: PairResult) -> bool:
        """Whether both nodes of a pair are cleared by others."""
        one, other = result.pair
        return self.is_cleared(one, other) and self.is_cleared(other, one)

    def measured(self, one: int, other: int) -> list[PairResult]:
        """The results of one pair."""
        return [each for each in self.of(one) if other in each.pair]

    def rack(self, node: int) -> str:
        """Empty where it is not known."""
        return self.racks.get(str(node), "")

    def crosses(self, result: PairResult) -> bool:
        """Whether it is between two racks."""
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
    view = PairView(racks, results)
    free = list(nodes)
    pairs: list[tuple[int, int]] = []

    def take(one: int, other: int) -> None:
        pairs.append((one, other))
        free.remove(one)
        free.remove(other)

    again = [each.pair for each in results if view.slow(each) and view.both_cleared(each)]
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


def _partner(view: PairView, node: int, others: Iterable[int], *, same_rack: bool) -> int | None:
    """One that it has not met, in its rack or outside of it where there is one."""
    found = [each for each in others if each != node and not view.measured(node, each)]
    wanted = [each for each in found if (view.rack(each) == view.rack(node)) == same_rack]
    return next(iter(wanted or found), None)


def _across_racks(view: PairView, free: list[int]) -> list[tuple[int, int]]:
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
