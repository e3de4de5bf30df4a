"""Which nodes measure each other in scope `mesh`: rounds of disjoint pairs."""

from __future__ import annotations

from collections.abc import Sequence

ALL_PAIRS_UP_TO = 64
"""Nodes. Of more, each meets log2(n) others."""


def matchings(nodes: Sequence[int], most: int | None = None) -> list[list[tuple[int, int]]]:
    """Rounds of disjoint pairs in which every node meets every other once: the schedule of a
    round-robin tournament (the circle method). With more than 64 nodes, or `most` rounds at most,
    evenly spaced ones of these rounds. Of an odd number one node sits out each round."""
    places: list[int | None] = [*nodes] if len(nodes) % 2 == 0 else [*nodes, None]
    count = len(places) - 1
    if count < 1:
        return []
    wanted = count if len(nodes) <= ALL_PAIRS_UP_TO else (len(nodes) - 1).bit_length()
    wanted = min(wanted, count, most or count)
    rounds = []
    for number in (at * count // wanted for at in range(wanted)):
        circle = [places[0], *places[1 + number :], *places[1 : 1 + number]]
        halves = zip(circle[: len(circle) // 2], reversed(circle[len(circle) // 2 :]))
        rounds.append(
            sorted((min(a, b), max(a, b)) for a, b in halves if a is not None and b is not None)
        )
    return rounds


def partners(nodes: Sequence[int], most: int | None = None) -> dict[int, list[int]]:
    """The others that each node meets, in an order in which they do not all ask one node at the
    same time."""
    found: dict[int, list[int]] = {rank: [] for rank in nodes}
    for pairs in matchings(nodes, most):
        for a, b in pairs:
            found[a].append(b)
            found[b].append(a)
    return found
