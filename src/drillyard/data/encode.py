"""From raw rows to tokenised pieces: the work that is spread over processes.

A document is BOS (if the tokenizer has one), its segments' tokens, EOS. A `text` document without BOS begins with EOS
instead, so that its first real token is predicted too. A piece is what packing places: at most T = sequence_length
tokens of one document. `split` cuts a long document so that neighbours overlap by one token, which is context in the
second: every token of a document except its first carries loss exactly once, and bits per byte over the text are
exact.

Loss is kept per position, as the model is trained: position t carries loss if token t+1 of the same piece is to be
learnt.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from drillyard.data.batches import NUMBER_BITS, Origin, RawBatch, Row
from drillyard.data.formats import RowFormat, Segments
from drillyard.errors import UserError

TRAIN, HELD_OUT = 0, 1


@dataclass(frozen=True)
class Split:
    """Which documents are held out: a share of the documents, or of the values of a column, by hash."""

    fraction: float = 0.0
    column: str | None = None

    def part_of(self, row: Row, identity: str, where: str) -> int:
        """TRAIN or HELD_OUT; the same for equal documents (equal values of `column`), whatever else is in the data."""
        if self.fraction == 0.0:
            return TRAIN
        if self.column is not None:
            if self.column not in row:
                raise UserError(
                    f"{where}: no column {self.column!r} (data.held_out.split_by); the columns are: {', '.join(row)}."
                )
            identity = repr(row[self.column])
        return (
            HELD_OUT
            if xxhash.xxh3_64_intdigest(b"held out" + identity.encode("utf-8", "surrogatepass")) < self.fraction * 2**64
            else TRAIN
        )


@dataclass(frozen=True)
class EncodeSettings:
    """All that decides how rows become pieces. Picklable; also part of a cache's key."""

    format: RowFormat
    sequence_length: int
    too_long: str
    split: Split
    tokenizer_json: str
    wide: bool
    bos_id: int | None
    eos_id: int | None
    chat_template: str | None
    special_tokens: dict[str, str]

    @property
    def dtype(self) -> np.dtype[Any]:
        """uint16 while the vocabulary fits."""
        return np.dtype(np.uint32 if self.wide else np.uint16)


@dataclass
class Pieces:
    """Tokenised pieces of one raw batch and one part, concatenated.

    places: where the document of each piece comes from, uint64 as in `batches.NUMBER_BITS`; the origins are the raw
    batch's, until a cache counts its own.
    """

    tokens: npt.NDArray[Any]
    loss: npt.NDArray[np.bool_]
    lengths: npt.NDArray[np.int32]
    places: npt.NDArray[np.uint64]


@dataclass
class Encoded:
    """What one raw batch became: pieces and counts per part (TRAIN, HELD_OUT), and what its rows came from."""

    nbytes: int
    origins: tuple[Origin, ...] = ()
    pieces: dict[int, Pieces] = field(default_factory=dict)
    counts: dict[int, Counter[str]] = field(default_factory=dict)


class Encoder:
    """Turns raw batches into pieces; one per process."""

    def __init__(self, settings: EncodeSettings) -> None:
        from tokenizers import Tokenizer

        self.settings = settings
        self.tokenizer = Tokenizer.from_str(settings.tokenizer_json)
        self.is_chat = settings.format.name == "chat"
        # A chat template writes special tokens as text; everywhere else such text is data and must stay harmless.
        self.tokenizer.encode_special_tokens = not self.is_chat
        special = [
            re.escape(token.content) for token in self.tokenizer.get_added_tokens_decoder().values() if token.special
        ]
        self.special = re.compile("|".join(special)) if special and not self.is_chat else None
        self.chat: Any = None
        if self.is_chat:
            from drillyard.data.chat import ChatRenderer

            assert settings.chat_template is not None
            self.chat = ChatRenderer(settings.chat_template, settings.special_tokens, settings.format.loss_on)
        start = settings.bos_id
        if start is None and settings.format.name == "text":
            start = settings.eos_id
        self.start = [] if start is None or self.is_chat else [start]
        self.end = [] if settings.eos_id is None or self.is_chat else [settings.eos_id]

    def encode(self, batch: RawBatch) -> Encoded:
        """Pieces of all rows of a batch, in order. UserError names the row."""
        result = Encoded(batch.nbytes, batch.origins)
        texts: list[str] = []
        flags: list[bool] = []
        documents: list[tuple[int, int, int]] = []  # row number, part, number of segments
        for number, row in batch.rows():
            segments, part = self._segments(row, batch, number)
            counts = result.counts.setdefault(part, Counter())
            counts["rows"] += 1
            if not any(text for text, _ in segments):
                counts["empty"] += 1
                continue
            if self.special is not None and any(self.special.search(text) for text, _ in segments):
                counts["special_tokens_as_text"] += 1
            documents.append((number, part, len(segments)))
            for text, loss in segments:
                texts.append(text)
                flags.append(loss)
        if documents:
            flat = self._tokenise(batch, texts, flags, documents)
            self._place(result, batch, flat, documents)
        return result

    def _segments(self, row: Row, batch: RawBatch, number: int) -> tuple[Segments, int]:
        form = self.settings.format
        where = batch.where(number)
        canonical = form.canonical(row, where)
        segments = self.chat.segments(canonical, where) if self.is_chat else form.segments(canonical, where)
        if self.settings.split.fraction == 0.0:
            return segments, TRAIN
        return segments, self.settings.split.part_of(row, form.identity(canonical, where), where)

    def _tokenise(
        self, batch: RawBatch, texts: list[str], flags: list[bool], documents: list[tuple[int, int, int]]
    ) -> _Flat:
        try:
            encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):
            raise UserError(_lone_surrogate(batch, texts, documents)) from None
        tokens: list[int] = []
        run_lengths: list[int] = []
        run_flags: list[bool] = []
        ends: list[int] = []
        nbytes: list[int] = []
        position = 0
        for _, _, num_segments in documents:
            tokens += self.start
            run_lengths.append(len(self.start))
            run_flags.append(False)
            size = 0
            for index in range(position, position + num_segments):
                ids = encodings[index].ids
                tokens += ids
                run_lengths.append(len(ids))
                run_flags.append(flags[index])
                size += len(texts[index].encode("utf-8"))
            tokens += self.end
            run_lengths.append(len(self.end))
            run_flags.append(True)
            ends.append(len(tokens))
            nbytes.append(size)
            position += num_segments
        learnt = np.repeat(np.array(run_flags), run_lengths)
        return _Flat(np.fromiter(tokens, self.settings.dtype, len(tokens)), np.append(learnt[1:], False), ends, nbytes)

    def _place(self, result: Encoded, batch: RawBatch, flat: _Flat, documents: list[tuple[int, int, int]]) -> None:
        """Cut documents that are too long, drop pieces without loss, count, and sort the rest by part."""
        with_loss_before = np.concatenate([[0], np.cumsum(flat.loss)])
        spans: dict[int, list[tuple[int, int]]] = {}
        places: dict[int, list[int]] = {}
        begin = 0
        for (number, part, _), end, nbytes in zip(documents, flat.ends, flat.nbytes, strict=True):
            counts = result.counts[part]
            flat.loss[end - 1] = False
            kept = 0
            for start, stop in self._cut(begin, end, counts, batch, number):
                # The last position of a piece predicts nothing: what follows is not in the piece.
                if with_loss_before[stop - 1] > with_loss_before[start]:
                    spans.setdefault(part, []).append((start, stop))
                    kept += 1
                else:
                    counts["pieces_without_loss"] += 1
            if kept:
                origin, line = batch.place(number)
                places.setdefault(part, []).extend([origin << NUMBER_BITS | line] * kept)
                counts["documents"] += 1
                counts["bytes"] += nbytes
            begin = end
        for part, placed in spans.items():
            result.pieces[part] = flat.pieces(placed, places[part])

    def _cut(self, begin: int, end: int, counts: Counter[str], batch: RawBatch, number: int) -> list[tuple[int, int]]:
        """Where the pieces of the document [begin, end) of the flat tokens begin and end."""
        limit = self.settings.sequence_length
        if end - begin <= limit:
            return [(begin, end)]
        if self.settings.too_long == "error":
            raise UserError(
                f"{batch.where(number)}: {end - begin} tokens, longer than data.sequence_length ({limit}). "
                f"Raise it, or set data.too_long to truncate, split or drop."
            )
        if self.settings.too_long == "drop":
            counts["dropped"] += 1
            return []
        if self.settings.too_long == "truncate":
            counts["truncated"] += 1
            return [(begin, begin + limit)]
        counts["split"] += 1
        return [(start, min(start + limit, end)) for start in range(begin, end - 1, limit - 1)]


@dataclass
class _Flat:
    """Documents laid end to end: tokens, loss per position (shifted), where each document ends, its bytes of text."""

    tokens: npt.NDArray[Any]
    loss: npt.NDArray[np.bool_]
    ends: list[int]
    nbytes: list[int]

    def pieces(self, spans: list[tuple[int, int]], places: list[int]) -> Pieces:
        """The pieces at these spans, from these places; the last position of each carries no loss."""
        bounds = np.array(spans, np.int64)
        lengths = (bounds[:, 1] - bounds[:, 0]).astype(np.int32)
        tokens = np.concatenate([self.tokens[start:stop] for start, stop in spans])
        loss = np.concatenate([self.loss[start:stop] for start, stop in spans])
        loss[np.cumsum(lengths) - 1] = False
        return Pieces(tokens, loss, lengths, np.array(places, np.uint64))


def _lone_surrogate(batch: RawBatch, texts: list[str], documents: list[tuple[int, int, int]]) -> str:
    """The message for text that has no UTF-8 form, such as a lone \\ud800 escape in JSON."""
    position = 0
    for number, _, num_segments in documents:
        for text in texts[position : position + num_segments]:
            if any("\ud800" <= character <= "\udfff" for character in text):
                return (
                    f"{batch.where(number)}: the text holds a lone surrogate (\\ud800 to \\udfff), "
                    f"which is not Unicode text. Mend the row."
                )
        position += num_segments
    raise AssertionError("the tokenizer refused text without surrogates")
