"""Which pairs of nodes are measured next, so that a bad node is found in at most three rounds.

Pure: a function of the results so far. Node 0 runs it between rounds, and the judgement runs it
again over the same results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PairResult:
    """A measured pair of nodes, by rank. `passed` None: it was not measured, or nothing says what
    is enough."""

    pair: tuple[int, int]
    value: float | None
    passed: bool | None
    round: int


def next_round(
    nodes: Sequence[int], racks: Mapping[str, str], results: Sequence[PairResult]
) -> list[tuple[int, int]]:
    """Disjoint pairs to measure next; empty: nothing more can be learnt."""
    if results:
        return []
    return [(nodes[at], nodes[at + 1]) for at in range(0, len(nodes) - 1, 2)]
