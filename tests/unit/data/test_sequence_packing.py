"""Packing places every piece once, whole, and in as few sequences as best fit decreasing needs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from drillyard.data.encoder import Pieces
from drillyard.data.sequence_packing import PackedSequences, Packer, best_fit, padded


def pieces_of(lengths: list[int], first_token: int = 0) -> Pieces:
    """Pieces whose tokens are all different, with loss on every third."""
    total = sum(lengths)
    tokens = np.arange(first_token, first_token + total, dtype=np.uint32)
    return Pieces(
        tokens,
        tokens % 3 == 0,
        np.array(lengths, np.int32),
        np.arange(len(lengths), dtype=np.uint64),
    )


def unpack(packed: PackedSequences) -> list[list[tuple[int, ...]]]:
    """Sequences as lists of pieces of tokens."""
    sequences = []
    begin = 0
    for length, room in zip(packed.lengths, padded(packed.lengths), strict=True):
        tokens, starts = (
            packed.tokens[begin : begin + length],
            packed.starts[begin : begin + length],
        )
        assert starts[0]
        bounds = [*np.flatnonzero(starts).tolist(), int(length)]
        sequences.append([tuple(tokens[a:b].tolist()) for a, b in pairwise(bounds)])
        begin += int(room)
    return sequences


@settings(max_examples=100)
@given(st.lists(st.integers(1, 32), max_size=80))
def test_best_fit_places_every_piece_once_within_capacity(lengths: list[int]) -> None:
    sequences = best_fit(np.array(lengths, np.int32), 32)
    assert sorted(index for sequence in sequences for index in sequence) == list(
        range(len(lengths))
    )
    assert all(sum(lengths[index] for index in sequence) <= 32 for sequence in sequences)


@settings(max_examples=100)
@given(st.lists(st.integers(1, 32), min_size=1, max_size=80))
def test_at_most_one_sequence_is_left_half_empty(lengths: list[int]) -> None:
    fills = [
        sum(lengths[index] for index in sequence)
        for sequence in best_fit(np.array(lengths, np.int32), 32)
    ]
    assert sum(fill <= 16 for fill in fills) <= 1


def test_best_fit_prefers_the_tightest_room() -> None:
    assert sorted(map(sorted, best_fit(np.array([7, 5, 3, 5], np.int32), 10))) == [[0, 2], [1, 3]]


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(1, 24), min_size=1, max_size=12), max_size=12),
    st.booleans(),
    st.integers(24, 400),
)
def test_windows_lose_and_double_nothing(
    groups: list[list[int]], packing: bool, window: int
) -> None:
    packer = Packer(24, packing, window_tokens=window)
    expected, packed, first = [], [], 0
    for lengths in groups:
        pieces = pieces_of(lengths, first)
        ends = first + np.cumsum(lengths)
        expected += [
            tuple(range(end - length, end)) for length, end in zip(lengths, ends, strict=True)
        ]
        first += sum(lengths)
        packed += list(packer.add(pieces))
    packed += list(packer.finish())
    found = [piece for item in packed for sequence in unpack(item) for piece in sequence]
    if packing:
        # Starts inside a sequence are all that tells pieces apart, so the multiset of pieces is the
        # claim.
        assert sorted(found) == sorted(expected)
    else:
        assert found == expected
    for item in packed:
        assert np.all(item.tokens[item.loss] % 3 == 0)
    assert sum(int(item.valid_tokens.sum()) for item in packed) == sum(
        token % 3 == 0 for token in range(first)
    )


def test_the_result_does_not_depend_on_how_pieces_arrive() -> None:
    lengths = [5, 9, 3, 8, 2, 12, 7, 7, 1, 4]
    whole, single = Packer(16, True), Packer(16, True)
    together = [*whole.add(pieces_of(lengths)), *whole.finish()]
    first, apart = 0, []
    for length in lengths:
        apart += list(single.add(pieces_of([length], first)))
        first += length
    apart += list(single.finish())
    assert [unpack(item) for item in together] == [unpack(item) for item in apart]


def test_short_documents_fill_sequences_almost_whole() -> None:
    lengths = np.random.default_rng(0).integers(10, 300, 4000).tolist()
    packer = Packer(512, True, window_tokens=100_000)
    packed = [*packer.add(pieces_of(lengths)), *packer.finish()]
    rows = sum(len(item.lengths) for item in packed)
    assert sum(lengths) / (rows * 512) > 0.98
