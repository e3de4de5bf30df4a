"""What a step trains on: a pure function of seed and step, right at every boundary."""

from __future__ import annotations

from collections import Counter
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drillyard.config.run_checks import steps_for_epochs
from drillyard.data.mapped_sequences import Sequences
from drillyard.data.sampler import (
    BLOCK,
    CHUNK,
    BatchShape,
    Mixture,
    order_chunk,
    permute,
    slot_counts,
    slot_pattern,
)


class Counted:
    """Stands for the sequences of a source: only their number and key decide the order."""

    def __init__(self, size: int, key: str = "k") -> None:
        self.size, self.key, self.name = size, key, key

    def __len__(self) -> int:
        return self.size


def mixture(*sizes: int, weights: list[float] | None = None, seed: int = 0) -> Mixture:
    sources = [cast(Sequences, Counted(size, f"k{number}")) for number, size in enumerate(sizes)]
    return Mixture(sources, weights or [1.0] * len(sizes), seed)


@settings(max_examples=50)
@given(size=st.integers(1, 300), batch=st.integers(1, 40), seed=st.integers(0, 99))
def test_every_epoch_takes_every_sequence_once(size: int, batch: int, seed: int) -> None:
    data = mixture(size, seed=seed)
    steps = -(-3 * size // batch)
    drawn = [ref for step in range(steps) for ref in data.indices(step, BatchShape(batch))]
    for epoch in range(3):
        assert sorted(row for _, row in drawn[epoch * size : (epoch + 1) * size]) == list(
            range(size)
        )


@settings(max_examples=50)
@given(batch=st.integers(1, 24), other=st.integers(1, 24), seed=st.integers(0, 9))
def test_the_stream_does_not_depend_on_the_batch_size(batch: int, other: int, seed: int) -> None:
    """So ranks and micro-batches, which only share out a step, cannot change it either."""
    data = mixture(7, 50, weights=[1.0, 3.0], seed=seed)
    count = batch * other * 3
    streams = [
        [ref for step in range(count // size) for ref in data.indices(step, BatchShape(size))]
        for size in (batch, other)
    ]
    assert streams[0] == streams[1]


def test_a_step_is_the_same_whether_or_not_others_were_drawn_before() -> None:
    walked, resumed = mixture(1000, 10), mixture(1000, 10)
    for step in range(60):
        last = walked.indices(step, BatchShape(33))
    assert resumed.indices(59, BatchShape(33)) == last


def test_seeds_and_epochs_change_the_order() -> None:
    data = mixture(500)
    assert data.indices(0, BatchShape(500)) != data.indices(1, BatchShape(500))
    assert data.indices(0, BatchShape(500)) != mixture(500, seed=1).indices(0, BatchShape(500))


def test_resuming_far_out_costs_no_walk_through_the_past() -> None:
    data = mixture(10**9)
    assert len(data.indices(10**9, BatchShape(64))) == 64


@settings(max_examples=60)
@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=8))
def test_shares_are_exact_to_a_thousandth_over_every_block(weights: list[float]) -> None:
    counts = slot_counts(weights)
    assert counts.sum() == BLOCK
    assert np.all(counts >= 1)
    shares = np.array(weights) / sum(weights)
    assert np.all(np.abs(counts / BLOCK - shares) <= 1e-3)
    assert Counter(slot_pattern(counts).tolist()) == Counter(dict(enumerate(counts.tolist())))


def test_a_source_is_spread_evenly_over_a_block() -> None:
    pattern = slot_pattern(slot_counts([1.0, 3.0]))
    per_hundred = (pattern == 0).reshape(-1, 100).sum(axis=1)
    assert np.all(np.abs(per_hundred - 25) <= 1)


def test_each_source_of_a_mixture_passes_through_its_own_epochs() -> None:
    data = mixture(30, 400, weights=[1.0, 1.0])
    drawn = [ref for step in range(10) for ref in data.indices(step, BatchShape(BLOCK // 10))]
    small = [row for source, row in drawn if source == 0]
    assert len(small) == BLOCK // 2
    for epoch in range(len(small) // 30):
        assert sorted(small[epoch * 30 : (epoch + 1) * 30]) == list(range(30))


def test_an_epoch_is_all_sequences_of_all_sources() -> None:
    data = mixture(30, 70)
    assert data.num_sequences == 100
    assert data.epoch_of(0, BatchShape(10)) == 0
    assert data.epoch_of(15, BatchShape(10)) == pytest.approx(1.5)


def test_the_fingerprint_changes_with_content_order_and_weights() -> None:
    prints = {
        mixture(30, 70).fingerprint,
        mixture(30, 71).fingerprint,
        mixture(30, 70, seed=1).fingerprint,
        mixture(30, 70, weights=[1.0, 2.0]).fingerprint,
        Mixture(
            [cast(Sequences, Counted(30, "a")), cast(Sequences, Counted(70, "b"))], [1.0, 1.0], 0
        ).fingerprint,
    }
    assert len(prints) == 5
    assert mixture(30, 70).fingerprint == mixture(30, 70).fingerprint


@settings(max_examples=60)
@given(size=st.integers(1, 200), batch=st.integers(1, 40), epochs=st.integers(1, 4))
def test_steps_of_epochs_take_each_sequence_once_an_epoch(
    size: int, batch: int, epochs: int
) -> None:
    data = mixture(size)
    steps = steps_for_epochs(epochs, size, batch)
    drawn = [data.indices(step, BatchShape(batch, by_epoch=True)) for step in range(steps)]
    per_epoch = -(-size // batch)
    assert steps == epochs * per_epoch
    for epoch in range(epochs):
        taken = drawn[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert Counter(row for refs in taken for _, row in refs) == Counter(range(size))
        assert all(len(refs) == batch for refs in taken[:-1])
    assert data.coverage(steps, BatchShape(batch, by_epoch=True)) == {
        "seen": size,
        "of": size,
        "epochs": epochs,
    }


def test_both_cuts_agree_until_the_first_epoch_ends_within_a_step() -> None:
    data = mixture(30, 70)
    for step in range(100 // 8):
        assert data.indices(step, BatchShape(8, by_epoch=True)) == data.indices(step, BatchShape(8))
    assert data.indices(12, BatchShape(8, by_epoch=True)) == data.indices(12, BatchShape(8))[:4]
    assert data.indices(13, BatchShape(8, by_epoch=True))[:4] == data.indices(12, BatchShape(8))[4:]
    assert data.epoch_of(13, BatchShape(8, by_epoch=True)) == 1


def test_a_part_of_an_epoch_is_whole_steps() -> None:
    assert steps_for_epochs(0.3, 10, 1) == 3
    assert steps_for_epochs(0.5, 166, 4) == 21
    assert steps_for_epochs(2.5, 7, 4) == 5
    assert steps_for_epochs(0.001, 7, 4) == 1


def test_what_is_drawn_is_counted_by_source() -> None:
    data = mixture(30, 400, weights=[1.0, 3.0])
    for name, source in zip("ab", data.sources, strict=True):
        source.name = name
    drawn = [source for step in range(10) for source, _ in data.indices(step, BatchShape(43))]
    assert data.drawn(430) == {"a": (drawn.count(0), 30), "b": (drawn.count(1), 400)}
    # The small source is seen whole, and again.
    assert data.coverage(10, BatchShape(43)) == {
        "seen": 30 + drawn.count(1),
        "of": 430,
        "epochs": 1.0,
        "sources": {
            "a": {"seen": 30, "of": 30, "epochs": drawn.count(0) / 30},
            "b": {"seen": drawn.count(1), "of": 400, "epochs": drawn.count(1) / 400},
        },
    }


@settings(max_examples=60)
@given(n=st.integers(1, 5000), key=st.integers(0, 2**64 - 1))
def test_every_item_has_exactly_one_position(n: int, key: int) -> None:
    order = permute(np.arange(n, dtype=np.uint64), n, key)
    assert np.array_equal(np.sort(order), np.arange(n))


@given(n=st.integers(2, 2**40), key=st.integers(0, 2**32), position=st.integers(0, 2**40))
@settings(max_examples=60)
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
