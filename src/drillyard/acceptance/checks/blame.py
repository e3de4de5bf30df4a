"""Which nodes are at fault where pairs of nodes have failed: shared by the checks of pairs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Blame:
    """Nodes proven to be at fault, and the bad pairs that they do not explain."""

    nodes: tuple[int, ...]
    links: tuple[tuple[int, int], ...]


def blame(good: Iterable[tuple[int, int]], bad: Iterable[tuple[int, int]]) -> Blame:
    """A node is at fault where every pair that it is in failed, and at least two of its partners
    have a good pair with somebody else. With two nodes nothing is proven. Pairs have no
    direction."""
    good_pairs = {frozenset(pair) for pair in good}
    bad_pairs = {frozenset(pair) for pair in bad} - good_pairs
    works = {rank for pair in good_pairs for rank in pair}
    found: list[int] = []
    for rank in sorted({rank for pair in bad_pairs for rank in pair} - works):
        partners = {other for pair in bad_pairs if rank in pair for other in pair - {rank}}
        if len(partners & works) >= 2:
            found.append(rank)
    links = sorted(
        (min(pair), max(pair)) for pair in bad_pairs if pair.isdisjoint(found) and len(pair) == 2
    )
    return Blame(tuple(found), tuple(links))
