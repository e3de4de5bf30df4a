"""Packed sequences read through memory maps, and the batch that training sees.

A part of a cache is flat files (see `FILES`). A sequence takes its own length rounded up to 8
tokens, so short sequences need no padding on disk, and the loss and document-start bits of a row
begin at a byte. All ranks share the same pages.

Every sequence has its own checksum, verified each time it is read: a cache of any size opens at
once, and no damaged sequence ever reaches the model. The rank that reads a damaged sequence marks
the cache and ends, and the next start builds the cache again.

Cost of a batch: one copy of its tokens and some vectorised passes over [B, T]; about 0.1 ms for 16
x 128, of which checksums take 1 microsecond per sequence (and 1 more for every 16 KB of it).
"""

from __future__ import annotations

import mmap
import shlex
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from drillyard.data.raw_batches import NUMBER_BITS
from drillyard.data.sequence_packing import padded
from drillyard.errors import UserError
from drillyard.guarded_files import LARGEST_MODEL_DOCUMENT_BYTES, open_regular, read_json

IGNORED = -100
"""Label of a position without loss, the `ignore_index` of torch's cross entropy."""

FILES = {
    "tokens": None,  # uint16 or uint32, by the size of the vocabulary
    "loss": np.uint8,  # bit t of a row: position t carries loss
    "starts": np.uint8,  # bit t of a row: a document (or piece of one) starts at t
    "lengths": np.int32,  # tokens per sequence
    "valid_tokens": np.int32,  # positions with loss per sequence
    "offsets": np.int64,  # begin of a row in tokens; divided by 8, in bytes of loss and starts
    "checksums": np.uint64,  # of a row's tokens, loss and starts (row_checksum)
    "first_piece": np.int64,  # the first of a sequence's pieces in places
    # per piece: number of its origin, and line or row there (batches.NUMBER_BITS)
    "places": np.uint64,
    # per document in the order of the source: hash of its identity, and its place
    "documents": np.uint64,
}

BULK = ("tokens", "loss", "starts", "places", "documents")
"""The files whose size depends on the text, not on the number of sequences."""

ORIGINS = "origins"
"""The one file of a part that is not an array: JSON, [[file or data set, unit], ...]."""

DAMAGED_FILE = "damaged"
"""A file that a reader writes into a cache directory with a damaged sequence; it names the
sequence."""


class DamagedSequence(RuntimeError):
    """A sequence does not match its checksum. Not a user error: the ranks are started again and the
    cache rebuilt."""


def row_checksum(
    tokens: npt.NDArray[Any], loss: npt.NDArray[np.uint8], starts: npt.NDArray[np.uint8]
) -> int:
    """xxh3-64 over the bytes of a row in the three files, each seeded by the one before."""
    first = xxhash.xxh3_64_intdigest(tokens.data)
    return xxhash.xxh3_64_intdigest(starts.data, xxhash.xxh3_64_intdigest(loss.data, first))


@dataclass
class Batch:
    """B sequences of T tokens, as the model takes them.

    input_ids, labels (already shifted: the token to be predicted from that position, -100 without
    loss), position_ids (from 0 in each document): int64 [B, T]. document_ids: int32 [B, T], 0, 1,
    2, ... within a sequence, -1 on padding.
    """

    input_ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    position_ids: npt.NDArray[np.int64]
    document_ids: npt.NDArray[np.int32]

    def rows(self, numbers: npt.NDArray[np.int64]) -> Batch:
        """The batch of these rows."""
        return Batch(*(getattr(self, field.name)[numbers] for field in fields(self)))


def padding_batch(size: int, sequence_length: int, pad_id: int) -> Batch:
    """`size` sequences of nothing but padding: [size, sequence_length]. None of it carries loss."""
    shape = (size, sequence_length)
    return Batch(
        np.full(shape, pad_id, np.int64),
        np.full(shape, IGNORED, np.int64),
        np.broadcast_to(np.arange(sequence_length, dtype=np.int64), shape).copy(),
        np.full(shape, -1, np.int32),
    )


def concatenate_batches(batches: Sequence[Batch]) -> Batch:
    """Batches of sequences of one length as one batch, in their order."""
    return Batch(
        *(
            np.concatenate([getattr(batch, field.name) for batch in batches])
            for field in fields(Batch)
        )
    )


def map_file(path: Path, dtype: Any) -> npt.NDArray[Any]:
    """A file as a read-only array through a shared memory map. A plain array: numpy's memmap class
    is slow to slice."""
    if path.stat().st_size == 0:
        return np.zeros(0, dtype)
    with open_regular(path) as stream:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(mapped, dtype)


class Sequences(ABC):
    """The sequences of one part of one source, by number. Use `len` and `read`.

    `key` changes with their content; `counts` are those of the rows, `firsts` the first row of each
    count as (file below the source, unit, number). `valid_tokens`: positions with loss of each
    sequence. `documents`: per document (hash of its identity: prompt, text or messages; its place),
    empty if unknown. `document_bytes`: bytes of the text that carries loss, None if unknown.
    """

    name: str
    key: str
    counts: dict[str, int]
    firsts: dict[str, tuple[str, str, int]]
    first_fault: str
    sequence_length: int
    pad_id: int
    document_bytes: int | None
    num_tokens: int
    valid_tokens: npt.NDArray[np.int32]
    documents: npt.NDArray[np.uint64]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, indices: npt.NDArray[np.integer[Any]] | Sequence[int]) -> Batch:
        """The sequences with these numbers as a batch [B, T]."""

    @abstractmethod
    def places(self, index: int) -> list[tuple[str, str]]:
        """The location of each document (or piece of one) of a sequence, in order: file below the
        source ("" if the source is one file), and line or row there ("" if the file is one
        document)."""

    @abstractmethod
    def place_of(self, place: int) -> tuple[str, str, int]:
        """A place of `documents` as (file below the source, unit, number)."""

    @property
    def fill_rate(self) -> float:
        """Tokens over positions: 1.0 when no position is padding."""
        return self.num_tokens / max(1, len(self) * self.sequence_length)

    @cached_property
    def num_valid_tokens(self) -> int:
        """Positions with loss over all sequences."""
        return int(self.valid_tokens.sum(dtype=np.int64))


class CachedSequences(Sequences):
    """The packed sequences of a tokenised cache."""

    def __init__(
        self,
        directory: Path,
        part: str,
        manifest: dict[str, Any],
        name: str,
        vocab_size: int | None = None,
    ) -> None:
        """Open part `part` of the cache in `directory`; `manifest` is the part's entry of its
        manifest. With `vocab_size`, reading refuses tokens that are not in the vocabulary."""
        self._vocab_size = vocab_size
        self.name = name
        self.key = f"{directory.name.partition('-')[0]}/{part}"
        self._directory, self._part = directory, part
        self.counts = manifest["counts"]
        self.first_fault = manifest.get("first_fault", "")
        self.firsts = {
            what: (name, unit, number) for what, (name, unit, number) in manifest["firsts"].items()
        }
        self.sequence_length = manifest["sequence_length"]
        self.pad_id = manifest["pad_id"]
        self.document_bytes = manifest["document_bytes"]
        self.num_tokens = manifest["num_tokens"]
        arrays = {
            name: map_file(directory / f"{part}.{name}", dtype or np.dtype(manifest["token_dtype"]))
            for name, dtype in FILES.items()
        }
        self._tokens, self._loss, self._starts = arrays["tokens"], arrays["loss"], arrays["starts"]
        self._lengths, self._offsets = arrays["lengths"], arrays["offsets"]
        self._checksums, self._places, self._first_piece = (
            arrays["checksums"],
            arrays["places"],
            arrays["first_piece"],
        )
        self.valid_tokens = arrays["valid_tokens"]
        self.documents = arrays["documents"].reshape(-1, 2)
        self._positions = np.arange(self.sequence_length, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._lengths)

    def read(self, indices: npt.NDArray[np.integer[Any]] | Sequence[int]) -> Batch:
        """The sequences with these numbers as a batch [B, T]. DamagedSequence if a checksum
        differs, UserError for tokens that no tokenizer of this model makes: checksums find damage,
        and who forges a cache forges them as well."""
        rows = np.asarray(indices, np.int64)
        size, length = len(rows), self.sequence_length
        offsets, lengths = self._offsets[rows], self._lengths[rows]
        input_ids = np.full((size, length), self.pad_id, np.int64)
        bits = np.zeros((2, size, (length + 7) // 8), np.uint8)
        spans = zip(
            offsets.tolist(), lengths.tolist(), (padded(lengths) // 8).tolist(), strict=True
        )
        for b, (offset, count, num_bytes) in enumerate(spans):
            first = offset >> 3
            tokens = self._tokens[offset : offset + 8 * num_bytes]
            loss_bits, start_bits = (
                self._loss[first : first + num_bytes],
                self._starts[first : first + num_bytes],
            )
            if row_checksum(tokens, loss_bits, start_bits) != self._checksums[rows[b]]:
                raise self._damaged(int(rows[b]))
            input_ids[b, :count] = tokens[:count]
            bits[0, b, :num_bytes] = loss_bits
            bits[1, b, :num_bytes] = start_bits
        if self._vocab_size is not None and (largest := int(input_ids.max())) >= self._vocab_size:
            raise UserError(
                f"{self._directory / f'{self._part}.tokens'}: has token {largest}, and the"
                f" vocabulary has {self._vocab_size} entries: no run of this model wrote this"
                f" cache. Delete it: rm -r {shlex.quote(str(self._directory))}"
            )
        loss, starts = np.unpackbits(bits, axis=2, count=length).view(np.bool_)
        padding = self._positions >= lengths[:, None]
        labels = np.full((size, length), IGNORED, np.int64)
        np.copyto(labels[:, :-1], input_ids[:, 1:], where=loss[:, :-1])
        document_ids = np.cumsum(starts, axis=1, dtype=np.int32)
        document_ids -= 1
        document_ids[padding] = -1
        # Padding is numbered from 0 like a document, so that it is masked like one.
        short = np.flatnonzero(lengths < length)
        starts[short, lengths[short]] = True
        begins = np.maximum.accumulate(np.where(starts, self._positions, 0), axis=1)
        return Batch(input_ids, labels, self._positions - begins, document_ids)

    def places(self, index: int) -> list[tuple[str, str]]:
        last = int(self._first_piece[index + 1]) if index + 1 < len(self) else len(self._places)
        places = self._places[int(self._first_piece[index]) : last].tolist()
        return [
            (name, f"{unit} {number}" if unit else "")
            for name, unit, number in map(self.place_of, places)
        ]

    def place_of(self, place: int) -> tuple[str, str, int]:
        name, unit = self._origins[place >> NUMBER_BITS]
        return name, unit, place & (1 << NUMBER_BITS) - 1

    @cached_property
    def _origins(self) -> list[tuple[str, str]]:
        path = self._directory / f"{self._part}.{ORIGINS}"
        return [(name, unit) for name, unit in read_json(path, LARGEST_MODEL_DOCUMENT_BYTES)]

    def _damaged(self, index: int) -> DamagedSequence:
        """The error for a sequence; marks the cache, so that the next start verifies all of it."""
        what = f"the checksum of sequence {index} of {self._part} does not match"
        try:
            (self._directory / DAMAGED_FILE).write_text(what, encoding="utf-8")
            remedy = "the next start builds it again and resumes from the newest checkpoint"
        except OSError as error:
            remedy = (
                f"delete this directory ({error.strerror}: it could not be marked) and start again"
            )
        return DamagedSequence(
            f"{self._directory}: the tokenised cache of {self.name} is damaged: {what}; {remedy}"
        )
