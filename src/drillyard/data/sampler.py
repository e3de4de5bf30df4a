"""Sequences that a step trains on: a pure function of (seed, epoch, step), the same for every
number of ranks.

All samples form one endless stream, and a step takes consecutive numbers of it; ranks and
micro-batches divide the numbers of a step. So resuming at a step costs nothing, and any number of
ranks or micro-batches trains on the same samples.

- One source: epoch e is a pseudo-random permutation of its sequences (`permute`), seeded by (seed,
  source, epoch). Sample g is position g mod n of epoch g div n.
- Several sources: samples come in blocks of `BLOCK` slots. A source has slots in proportion to its
  weight (largest remainders, at least one), spread evenly over the block, so the shares are exact
  to 1/1000 over every block, and nearly so in every step. The k-th slot of a source takes the k-th
  sample of that source's own endless order; each source has its own epochs.

`training.steps` and `training.epochs` cut the stream into steps in two ways
(`BatchShape.by_epoch`):

- `training.steps`: step s takes samples s * B to (s + 1) * B, B being the global batch size. Every
  step is full, and a step that reaches the end of an epoch continues with the next one.
- `training.epochs`: each epoch of n samples (of all sources together) is ceil(n / B) steps, the
  last of which takes the rest. So one epoch of a single source trains each of its sequences once,
  and a run of more epochs begins with the steps of a shorter one. Up to step n div B both ways are
  the same.

A step's samples are dealt out to the data ranks in turn, a micro-batch at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from drillyard.data.mapped_sequences import Batch, Sequences, concatenate_batches, padding_batch
from drillyard.errors import UserError

BLOCK = 2000
"""Slots per block of a mixture; rounding to whole slots changes a share by at most 1/2000 (unless
it is below that)."""

ORDER_VERSION = 1

ROUNDS = 8
CHUNK = 4096
"""Positions computed together, to spread numpy's cost per call over many batches."""

SampleRef = tuple[int, int]
"""(source number, sequence number in it)."""


@dataclass(frozen=True)
class BatchShape:
    """Cut of the stream into global batches: data rank r takes micro-batches r, r + data ranks, ...

    `by_epoch`: the last step of each epoch has only the sequences that are left of it.
    """

    micro_batch_size: int
    accumulation: int = 1
    num_data_ranks: int = 1
    by_epoch: bool = False

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.num_data_ranks * self.accumulation

    def reader_of(self, number: int) -> tuple[int, int]:
        """(data rank, its micro-batch) that reads sample `number` of a global batch, all counted
        from 0."""
        micro_batch, data_rank = divmod(number // self.micro_batch_size, self.num_data_ranks)
        return data_rank, micro_batch


def slot_counts(weights: Sequence[float]) -> npt.NDArray[np.int64]:
    """Slots of each source in a block: largest remainders, at least one slot each. One source needs
    a single slot."""
    if len(weights) == 1:
        return np.ones(1, np.int64)
    if len(weights) > BLOCK // 2:
        raise UserError(
            f"data.source: {len(weights)} sources with weights, at most {BLOCK // 2} can be mixed. "
            f"Join some of them in a directory."
        )
    exact = np.array(weights, np.float64) / np.sum(weights) * BLOCK
    counts = np.maximum(1, np.floor(exact)).astype(np.int64)
    while counts.sum() < BLOCK:
        counts[np.argmax(exact - counts)] += 1
    while counts.sum() > BLOCK:
        counts[np.argmax(np.where(counts > 1, counts - exact, -np.inf))] -= 1
    return np.asarray(counts, np.int64)


def slot_pattern(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Source of each slot, evenly spread: the target of the k-th of c slots of a source is (k +
    1/2) / c of the block."""
    sources = np.repeat(np.arange(len(counts)), counts)
    targets = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    return sources[np.argsort(targets, kind="stable")]


class Mixture:
    """The weighted training sources as one endless, resumable stream of sequences."""

    def __init__(self, sources: Sequence[Sequences], weights: Sequence[float], seed: int) -> None:
        self.sources = list(sources)
        self.seed = seed
        self.num_sequences = sum(len(source) for source in self.sources)
        """Sequences of all sources together: one epoch of `training.epochs`."""
        self._counts = counts = slot_counts(weights)
        self._pattern = slot_pattern(counts)
        # rank[s]: the number of earlier slots of the block with the same source.
        one_hot = self._pattern[:, None] == np.arange(len(counts))
        self._rank = (np.cumsum(one_hot, axis=0) - 1)[np.arange(len(self._pattern)), self._pattern]
        parts = [
            ORDER_VERSION,
            seed,
            counts.tolist(),
            [(source.key, len(source)) for source in self.sources],
        ]
        self.fingerprint = xxhash.xxh3_128_hexdigest(repr(parts).encode())
        """Changes when the order or the content of any sample would."""

    def samples_of_step(self, step: int, shape: BatchShape) -> range:
        """The sample numbers of a step (0-based)."""
        size = shape.global_batch_size
        if not shape.by_epoch:
            return range(step * size, (step + 1) * size)
        epoch, batch = divmod(step, math.ceil(self.num_sequences / size))
        begin, end = epoch * self.num_sequences, (epoch + 1) * self.num_sequences
        first = begin + batch * size
        return range(first, min(first + size, end))

    def epoch_of(self, step: int, shape: BatchShape) -> float:
        """Passes over the data before `step` (0-based): samples drawn so far / `num_sequences`."""
        return self.samples_of_step(step, shape).start / self.num_sequences

    def drawn(self, samples: int) -> dict[str, tuple[int, int]]:
        """By source name: the number of the first `samples` samples drawn from it, and its number
        of sequences."""
        blocks, rest = divmod(samples, len(self._pattern))
        counts = blocks * self._counts + np.bincount(
            self._pattern[:rest], minlength=len(self.sources)
        )
        return {
            source.name: (int(count), len(source))
            for source, count in zip(self.sources, counts, strict=True)
        }

    def coverage(self, step: int, shape: BatchShape) -> dict[str, Any]:
        """Coverage before `step`: sequences seen at least once, all sequences, and passes over
        them.

        Of several sources also by name: each is drawn by its weight and has epochs of its own.
        """
        samples = self.samples_of_step(step, shape).start
        drawn = self.drawn(samples)
        seen = sum(min(count, size) for count, size in drawn.values())
        covered = {"seen": seen, "of": self.num_sequences, "epochs": samples / self.num_sequences}
        if len(drawn) == 1:
            return covered
        each = {
            name: {"seen": min(count, size), "of": size, "epochs": count / size}
            for name, (count, size) in drawn.items()
        }
        return covered | {"sources": each}

    def read_step(
        self, step: int, shape: BatchShape, data_rank: int
    ) -> tuple[list[SampleRef], Iterator[Batch]]:
        """The samples of a step (0-based), and the micro-batches of one data rank, read as they are
        taken.

        All ranks get equally many micro-batches, since each gathers weights from all, and each
        micro-batch has `micro_batch_size` rows: those without a sequence are padding.
        """
        refs, size = self.indices(step, shape), shape.micro_batch_size
        starts = range(data_rank * size, data_rank * size + len(refs), size * shape.num_data_ranks)
        return refs, (self._read_padded(refs[start : start + size], size) for start in starts)

    def indices(self, step: int, shape: BatchShape) -> list[SampleRef]:
        """The samples of a step (0-based), in the order in which they are dealt out."""
        numbers = self.samples_of_step(step, shape)
        samples = np.arange(numbers.start, numbers.stop, dtype=np.int64)
        blocks, slots = np.divmod(samples, len(self._pattern))
        owners = self._pattern[slots]
        positions = blocks * self._counts[owners] + self._rank[slots]
        items = np.empty(len(samples), np.int64)
        for number in range(len(self.sources)):
            mine = owners == number
            if mine.any():
                items[mine] = self._items(number, positions[mine])
        return list(zip(owners.tolist(), items.tolist(), strict=True))

    def _items(self, number: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Sequence numbers at increasing positions of a source's endless order."""
        size = len(self.sources[number])
        items = np.empty(len(positions), np.int64)
        epochs, within = np.divmod(positions, size)
        chunks, places = np.divmod(within, CHUNK)
        begin = 0
        while begin < len(positions):
            epoch, chunk = int(epochs[begin]), int(chunks[begin])
            end = begin + int(
                np.count_nonzero((epochs[begin:] == epoch) & (chunks[begin:] == chunk))
            )
            key = xxhash.xxh3_64_intdigest(f"{self.seed}/{number}/{epoch}".encode())
            items[begin:end] = order_chunk(size, key, chunk)[places[begin:end]]
            begin = end
        return items

    def _read_padded(self, refs: Sequence[SampleRef], size: int) -> Batch:
        """The sequences of `refs` (at most `size`), padded to `size` rows with rows that carry no
        loss."""
        if len(refs) == size:
            return self.read(refs)
        first = self.sources[0]
        padding = padding_batch(size - len(refs), first.sequence_length, first.pad_id)
        return concatenate_batches([self.read(refs), padding]) if refs else padding

    def read(self, refs: Sequence[SampleRef]) -> Batch:
        """The sequences of `refs` (at least one) as a batch, in their order."""
        owners = [owner for owner, _ in refs]
        rows = np.array([row for _, row in refs], np.int64)
        if len(set(owners)) == 1:
            return self.sources[owners[0]].read(rows)
        numbers = np.array(owners)
        batches = [
            self.sources[number].read(rows[numbers == number]) for number in sorted(set(owners))
        ]
        back = np.argsort(np.argsort(numbers, kind="stable"), kind="stable")
        return concatenate_batches(batches).rows(back)

    def valid_tokens(self, refs: Sequence[SampleRef]) -> int:
        """Tokens that carry loss in these sequences together, without reading them."""
        return sum(int(self.sources[owner].valid_tokens[row]) for owner, row in refs)


def permute(positions: npt.NDArray[np.uint64], n: int, key: int) -> npt.NDArray[np.int64]:
    """Images of `positions` (each below n) under the permutation of 0..n-1 with this `key`, in O(1)
    memory.

    A Feistel network is a bijection of w-bit numbers for any round function. Images of n or more go
    through it again until they are below n ("cycle walking"), which leaves a bijection of 0..n-1;
    with 2**(w-1) < n <= 2**w this takes fewer than two passes on average. Black and Rogaway,
    "Ciphers with Arbitrary Finite Domains" (2002).
    """
    values = positions.astype(np.uint64)
    if n <= 1:
        return values.astype(np.int64)
    width = (n - 1).bit_length()
    walking = np.arange(len(values))
    while len(walking):
        stepped = _feistel(values[walking], width, key)
        values[walking] = stepped
        walking = walking[stepped >= n]
    return values.astype(np.int64)


def _feistel(values: npt.NDArray[np.uint64], width: int, key: int) -> npt.NDArray[np.uint64]:
    """One bijection of `width`-bit numbers: rounds in which one half, mixed, is xored into the
    other."""
    low_bits = width // 2
    high_bits = width - low_bits
    for number in range(ROUNDS):
        # The halves swap sizes each round, so that odd widths work: (high, low) -> (low, high ^
        # f(low)).
        high, low = values >> np.uint64(low_bits), values & np.uint64((1 << low_bits) - 1)
        mixed = _mix(low, xxhash.xxh3_64_intdigest(f"{key}/{number}".encode())) & np.uint64(
            (1 << high_bits) - 1
        )
        values = (low << np.uint64(high_bits)) | (high ^ mixed)
        low_bits, high_bits = high_bits, low_bits
    return values


def _mix(values: npt.NDArray[np.uint64], round_key: int) -> npt.NDArray[np.uint64]:
    """splitmix64's finaliser of value + round key (Steele, Lea and Flood, 2014), modulo 2**64."""
    mixed = values + np.uint64(round_key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@lru_cache(maxsize=64)
def order_chunk(n: int, key: int, chunk: int) -> npt.NDArray[np.int64]:
    """Items at positions [chunk * CHUNK, ...) of the order of n items with this `key`. Shared: do
    not write to it."""
    first = chunk * CHUNK
    return permute(np.arange(first, min(n, first + CHUNK), dtype=np.uint64), n, key)
