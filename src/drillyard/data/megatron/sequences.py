"""Sequences cut from Megatron data in place: T + 1 tokens of a stream of documents make T inputs
and T labels.

Sample i covers tokens i * T to i * T + T of the stream, so neighbours share one token and every
token but the first is learnt once. By default the stream is the file, in its order, and its last
sample may be short; with `SampleOrder` it is Megatron-LM's own. Which samples a step takes is the
sampler's matter.

`isolation: none` is what Megatron-LM trains: a sample is one sequence, and each token sees all
before it. With `documents` attention and positions begin again at each document, and no document is
asked to predict the next.

Nothing is copied into the tokenised cache: ranks share the pages of `.bin`. So there is no checksum
per sequence; the files' hashes are compared at each start unless size and times are those of the
last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from drillyard.data.mapped_sequences import IGNORED, Batch, Sequences
from drillyard.data.megatron.indexed_file import IndexedFile
from drillyard.data.megatron.sample_order import SampleOrder


@dataclass(frozen=True)
class CutSettings:
    """What decides the samples besides the file: tokens per sequence, whether attention stays
    within documents."""

    sequence_length: int
    isolated: bool
    pad_id: int


class MegatronSequences(Sequences):
    """Samples of documents [first, last) of a file in its order, or of Megatron-LM's `order`, as
    numbered there."""

    def __init__(
        self,
        name: str,
        key: str,
        file: IndexedFile,
        documents: tuple[int, int],
        cut: CutSettings,
        order: SampleOrder | None = None,
    ) -> None:
        self.name, self.key, self._file, self._cut, self._order = name, key, file, cut, order
        self.sequence_length, self.pad_id = cut.sequence_length, cut.pad_id
        self.firsts, self.first_fault, self.document_bytes = {}, "", None
        self.documents = np.zeros((0, 2), np.uint64)
        itemsize = file.tokens.itemsize
        if order is None:
            self._first_document = documents[0]
            bounds = (
                np.append(file.starts, file.tokens.nbytes)[documents[0] : documents[1] + 1]
                // itemsize
            )
            self._stream_starts, self._file_starts = bounds[:-1] - bounds[0], bounds[:-1]
            self._size = int(bounds[-1] - bounds[0])
            self._samples: npt.NDArray[Any] | range = range(
                max(0, -(-(self._size - 1) // self.sequence_length))
            )
        else:
            ends = np.cumsum(file.lengths[order.documents], dtype=np.int64)
            self._stream_starts = ends - file.lengths[order.documents]
            self._file_starts = file.offsets[order.documents] // itemsize
            self._size = int(ends[-1])
            self._samples = order.samples
        number = documents[1] - documents[0]
        self.counts = {"rows": number, "documents": number}
        # An empty document begins where the next one does.
        self._boundaries = np.unique(self._stream_starts)
        begins = np.asarray(self._samples, np.int64) * self.sequence_length
        labels = np.minimum(begins + self.sequence_length, self._size - 1) - begins
        self.num_tokens = int(labels.sum())
        if cut.isolated:
            after = np.searchsorted(self._boundaries, begins, "right")
            labels = labels - (np.searchsorted(self._boundaries, begins + labels, "right") - after)
        self.valid_tokens = labels.astype(np.int32)

    def __len__(self) -> int:
        return len(self._samples)

    def _begin_and_count(self, index: int) -> tuple[int, int]:
        """First token of a sample in the stream, and its number of tokens, at most T + 1."""
        begin = int(self._samples[index]) * self.sequence_length
        return begin, min(self.sequence_length + 1, self._size - begin)

    def tokens(self, index: int) -> npt.NDArray[np.int64]:
        """The tokens of a sample: T + 1, or less for the last one of a file."""
        begin, count = self._begin_and_count(index)
        return np.concatenate(
            [self._file.tokens[at : at + size] for _, at, size in self._spans(begin, count)]
        ).astype(np.int64)

    def _spans(self, begin: int, count: int) -> list[tuple[int, int, int]]:
        """Tokens [begin, begin + count) of the stream as (document of the stream, token of the
        file, tokens)."""
        end, spans = begin + count, []
        document = int(np.searchsorted(self._stream_starts, begin, "right")) - 1
        while begin < end:
            last = document + 1 == len(self._stream_starts)
            stop = min(end, self._size if last else int(self._stream_starts[document + 1]))
            if stop > begin:
                start = (
                    int(self._file_starts[document]) + begin - int(self._stream_starts[document])
                )
                spans.append((document, start, stop - begin))
            begin, document = stop, document + 1
        return spans

    def read(self, indices: npt.NDArray[np.integer[Any]] | Sequence[int]) -> Batch:
        size, length = len(indices), self.sequence_length
        input_ids = np.full((size, length), self.pad_id, np.int64)
        labels = np.full((size, length), IGNORED, np.int64)
        starts = np.zeros((size, length), np.bool_)
        starts[:, 0] = True
        padding = np.zeros((size, length), np.bool_)
        for b, index in enumerate(indices):
            begin, count = self._begin_and_count(int(index))
            tokens = self.tokens(int(index))
            input_ids[b, : count - 1], labels[b, : count - 1] = tokens[:-1], tokens[1:]
            if self._cut.isolated:
                first, last = np.searchsorted(self._boundaries, [begin, begin + count - 1], "right")
                at = self._boundaries[first:last] - begin
                labels[b, at - 1] = IGNORED
                starts[b, at[at < length]] = True
            padding[b, count - 1 :] = True
        document_ids = np.cumsum(starts, axis=1, dtype=np.int32) - 1
        document_ids[padding] = -1
        # Padding is numbered from 0 like a document, so that it is masked like one.
        starts[:, 1:] |= padding[:, 1:] & ~padding[:, :-1]
        positions = np.arange(length, dtype=np.int64)
        begins = np.maximum.accumulate(np.where(starts, positions, 0), axis=1)
        return Batch(input_ids, labels, positions - begins, document_ids.astype(np.int32))

    def places(self, index: int) -> list[tuple[str, str]]:
        spans = self._spans(*self._begin_and_count(index))
        numbers = [
            n + self._first_document if self._order is None else int(self._order.documents[n])
            for n, _, _ in spans
        ]
        return [("", f"document {number}") for number in numbers]

    def place_of(self, place: int) -> tuple[str, str, int]:
        return "", "document", place
