"""Which nodes measure each other: every pair once, a node in one pair at a time."""

from __future__ import annotations

from itertools import combinations

import pytest

from drillyard.acceptance.node.matchings import matchings, partners


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 16, 33, 64])
def test_all_pairs_up_to_64_nodes(count: int) -> None:
    nodes = list(range(0, 3 * count, 3))
    rounds = matchings(nodes)
    met = [pair for pairs in rounds for pair in pairs]
    assert sorted(met) == list(combinations(nodes, 2))
    for pairs in rounds:
        taken = [rank for pair in pairs for rank in pair]
        assert len(taken) == len(set(taken))


@pytest.mark.parametrize(("count", "rounds"), [(65, 7), (100, 7), (128, 7), (1000, 10), (1001, 10)])
def test_more_nodes_meet_log2_of_them(count: int, rounds: int) -> None:
    found = matchings(range(count))
    assert len(found) == rounds
    met = [pair for pairs in found for pair in pairs]
    assert len(met) == len(set(met))
    for rank, others in partners(range(count)).items():
        assert rounds - 1 <= len(others) <= rounds
        assert rank not in others


def test_fewer_rounds_where_asked() -> None:
    assert len(matchings(range(16), 3)) == 3
    assert matchings(range(2), 3) == [[(0, 1)]]
    assert all(len(others) <= 3 for others in partners(range(16), 3).values())
