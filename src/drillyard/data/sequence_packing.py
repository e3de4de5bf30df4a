"""Best-fit packing of pieces into sequences of T tokens, in constant memory.

Pieces arrive in order and are collected in windows of some millions of tokens. In a window the
longest pieces are placed first, each into the open sequence with the least room that is enough
(best fit decreasing, close to optimal for many small items). The emptiest sequences of a window are
packed again with the next, up to an eighth of it. No piece is lost, duplicated or cut here.

Cost: bit r of one big integer is set while a sequence with room r is open, so best fit takes two
shifts: about a microsecond per piece up to T of 100 thousand. The result depends only on the pieces
and their order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from drillyard.data.encoder import Pieces


def best_fit(lengths: npt.NDArray[np.int32], capacity: int) -> list[list[int]]:
    """Indices of pieces per sequence; every length is in 1..capacity."""
    order = np.argsort(-lengths, kind="stable").tolist()
    sizes = lengths.tolist()
    open_by_room: list[list[list[int]]] = [[] for _ in range(capacity + 1)]
    open_rooms = 0
    sequences: list[list[int]] = []
    for index in order:
        size = sizes[index]
        if fitting := open_rooms >> size:
            room = size + (fitting & -fitting).bit_length() - 1
            sequence = open_by_room[room].pop()
            if not open_by_room[room]:
                open_rooms ^= 1 << room
            sequence.append(index)
        else:
            room = capacity
            sequence = [index]
            sequences.append(sequence)
        if left := room - size:
            if not open_by_room[left]:
                open_rooms |= 1 << left
            open_by_room[left].append(sequence)
    return sequences


@dataclass
class PackedSequences:
    """Consecutive finished sequences. Each begins at a multiple of 8 in the flat arrays, so that
    bits can be packed by row.

    tokens, loss, starts: flat [sum of padded lengths]; lengths: tokens per sequence, int32;
    valid_tokens: positions with loss, int32; pieces: pieces per sequence, int64; places: per piece,
    in the order of the sequences.
    """

    tokens: npt.NDArray[Any]
    loss: npt.NDArray[np.bool_]
    starts: npt.NDArray[np.bool_]
    lengths: npt.NDArray[np.int32]
    valid_tokens: npt.NDArray[np.int32]
    pieces: npt.NDArray[np.int64]
    places: npt.NDArray[np.uint64]


def padded(lengths: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Size of rows of these lengths in the flat arrays: the next multiple of 8."""
    return (lengths.astype(np.int64) + 7) // 8 * 8


class Packer:
    """Packs pieces into sequences. `packing=False`: each piece is one sequence."""

    def __init__(
        self, sequence_length: int, packing: bool, window_tokens: int | None = None
    ) -> None:
        self.sequence_length = sequence_length
        self.packing = packing
        self.window_tokens = window_tokens or min(max(8 << 20, 256 * sequence_length), 32 << 20)
        self._held: list[Pieces] = []
        self._held_tokens = 0

    def add(self, pieces: Pieces) -> Iterator[PackedSequences]:
        """Add pieces; yields sequences when a window is full."""
        self._held.append(pieces)
        self._held_tokens += len(pieces.tokens)
        if self._held_tokens >= self.window_tokens:
            yield self._flush(final=False)

    def finish(self) -> Iterator[PackedSequences]:
        """The remaining sequences."""
        if self._held_tokens:
            yield self._flush(final=True)

    def _flush(self, final: bool) -> PackedSequences:
        held = Pieces(
            *(
                np.concatenate([getattr(pieces, f.name) for pieces in self._held])
                for f in fields(Pieces)
            )
        )
        self._held, self._held_tokens = [], 0
        if not self.packing:
            return _assemble([[index] for index in range(len(held.lengths))], held)
        rows = best_fit(held.lengths, self.sequence_length)
        return _assemble(rows if final else self._carry_over(rows, held), held)

    def _carry_over(self, rows: list[list[int]], pieces: Pieces) -> list[list[int]]:
        """Keep the pieces of the emptiest sequences for the next window; returns the finished
        rows."""
        lengths = pieces.lengths
        fills = np.array([int(lengths[row].sum()) for row in rows])
        emptiest = np.argsort(fills, kind="stable")
        budget = np.cumsum(fills[emptiest]) <= self.window_tokens // 8
        open_rows = emptiest[budget & (fills[emptiest] < 0.99 * self.sequence_length)]
        if kept := sorted(index for row in open_rows for index in rows[row]):
            ends = np.cumsum(lengths, dtype=np.int64)
            spans = [slice(int(ends[i] - lengths[i]), int(ends[i])) for i in kept]
            tokens, loss = (
                np.concatenate([array[s] for s in spans]) for array in (pieces.tokens, pieces.loss)
            )
            self._held, self._held_tokens = (
                [Pieces(tokens, loss, lengths[kept], pieces.places[kept])],
                len(tokens),
            )
        closed = np.ones(len(rows), bool)
        closed[open_rows] = False
        return [rows[row] for row in np.flatnonzero(closed)]


def _assemble(rows: list[list[int]], pieces: Pieces) -> PackedSequences:
    """Copy pieces into flat arrays, row by row."""
    tokens, loss, lengths = pieces.tokens, pieces.loss, pieces.lengths
    ends = np.cumsum(lengths, dtype=np.int64)
    begins = ends - lengths
    order = np.fromiter((index for row in rows for index in row), np.int64, sum(map(len, rows)))
    per_row = np.fromiter(map(len, rows), np.int64, len(rows))
    firsts = np.cumsum(per_row) - per_row
    row_lengths = np.add.reduceat(lengths[order], firsts).astype(np.int32)
    row_starts = np.cumsum(padded(row_lengths)) - padded(row_lengths)
    # Where each piece begins in the output: its row's start plus the pieces before it in the row.
    before = np.cumsum(lengths[order], dtype=np.int64) - lengths[order]
    piece_starts = before - np.repeat(before[firsts], per_row) + np.repeat(row_starts, per_row)
    total = int(padded(row_lengths).sum())
    out_tokens = np.zeros(total, tokens.dtype)
    out_loss = np.zeros(total, np.bool_)
    for start, begin, end in zip(
        piece_starts.tolist(), begins[order].tolist(), ends[order].tolist(), strict=True
    ):
        stop = start + end - begin
        out_tokens[start:stop] = tokens[begin:end]
        out_loss[start:stop] = loss[begin:end]
    out_starts = np.zeros(total, np.bool_)
    out_starts[piece_starts] = True
    valid = np.add.reduceat(out_loss, row_starts, dtype=np.int64).astype(np.int32)
    return PackedSequences(
        out_tokens, out_loss, out_starts, row_lengths, valid, per_row, pieces.places[order]
    )
