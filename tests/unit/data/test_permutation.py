"""The order of an epoch: a bijection that is computed, not stored."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from drillyard.data.permutation import CHUNK, order_chunk, permute


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 5000), key=st.integers(0, 2**64 - 1))
def test_every_item_has_exactly_one_position(n: int, key: int) -> None:
    order = permute(np.arange(n, dtype=np.uint64), n, key)
    assert np.array_equal(np.sort(order), np.arange(n))


@given(n=st.integers(2, 2**40), key=st.integers(0, 2**32), position=st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_a_position_is_computed_alone_as_in_company(n: int, key: int, position: int) -> None:
    position %= n
    company = np.array([0, position, n - 1], np.uint64)
    alone = permute(np.array([position], np.uint64), n, key)[0]
    assert permute(company, n, key)[1] == alone
    assert 0 <= alone < n


def test_chunks_together_are_the_whole_order() -> None:
    n = 2 * CHUNK + 17
    chunks = [order_chunk(n, 5, number) for number in range(3)]
    assert np.array_equal(np.concatenate(chunks), permute(np.arange(n, dtype=np.uint64), n, 5))


def test_keys_give_unrelated_orders() -> None:
    n = 10_000
    orders = [permute(np.arange(n, dtype=np.uint64), n, key) for key in range(4)]
    for number, order in enumerate(orders):
        correlation = np.corrcoef(order, np.arange(n))[0, 1]
        assert abs(correlation) < 0.05
        for other in orders[:number]:
            assert np.mean(order == other) < 0.002


def test_neighbours_are_scattered_like_random_draws() -> None:
    n = 1 << 14
    order = permute(np.arange(n, dtype=np.uint64), n, 1)
    distance = np.abs(np.diff(order)).mean() / n
    assert abs(distance - 1 / 3) < 0.02  # mean distance of two uniform draws
