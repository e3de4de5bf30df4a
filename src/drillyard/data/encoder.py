"""From raw rows to tokenised pieces: the work that runs in parallel processes.

A document begins with the tokens that the tokenizer adds before a text (BOS, or none for GPT-2 and Qwen), so that a
prompt has the same tokens in training as in plain transformers. Then follow its segments' tokens and EOS. A
conversation is exactly the output of its chat template, tokenised as one text; a token is learnt if any of its
characters is. Packing places pieces: at most T = sequence_length tokens of one document. `split` cuts a long document
so that neighbours overlap by one token, which is context in the second: every token of a document except its first
carries loss exactly once, and bits per byte over the text that carries loss are exact.

Loss is per position: position t carries loss if token t+1 of the same piece is to be learnt.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from drillyard.data.raw_batches import NUMBER_BITS, Origin, RawBatch, Row
from drillyard.data.row_formats import RowFormat, Segments
from drillyard.errors import UserError

TRAIN, HELD_OUT = 0, 1


@dataclass(frozen=True)
class HeldOutSplit:
    """Which documents are held out: a share of the documents, or of the values of a column, by hash."""

    fraction: float = 0.0
    column: str | None = None

    def part_of(self, row: Row, identity: str, where: str) -> int:
        """TRAIN or HELD_OUT; depends only on the document (or on its value of `column`)."""
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
    """The settings that decide how rows become pieces. Picklable; also part of a cache's key."""

    format: RowFormat
    sequence_length: int
    too_long: str
    split: HeldOutSplit
    tokenizer_json: str
    wide: bool
    start_ids: tuple[int, ...]
    eos_id: int | None
    chat_template: str | None
    special_tokens: dict[str, str]

    @property
    def dtype(self) -> np.dtype[Any]:
        """uint16 if the vocabulary fits."""
        return np.dtype(np.uint32 if self.wide else np.uint16)


@dataclass
class Pieces:
    """Tokenised pieces of one raw batch and one part, concatenated.

    places: the place of each piece's document, uint64 as in `raw_batches.NUMBER_BITS`; numbers of origins are those of
    the raw batch until a cache assigns its own.
    """

    tokens: npt.NDArray[Any]
    loss: npt.NDArray[np.bool_]
    lengths: npt.NDArray[np.int32]
    places: npt.NDArray[np.uint64]


@dataclass
class Encoded:
    """The result for one raw batch, per part (TRAIN, HELD_OUT): pieces, counts, the first and last place of each count,
    and (hash of its identity, place) of each document; and the origins of the rows."""

    nbytes: int
    origins: tuple[Origin, ...] = ()
    pieces: dict[int, Pieces] = field(default_factory=dict)
    counts: dict[int, Counter[str]] = field(default_factory=dict)
    firsts: dict[int, dict[str, int]] = field(default_factory=dict)
    documents: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    lasts: dict[tuple[int, str], int] = field(default_factory=dict)

    def count(self, part: int, what: str, place: int) -> None:
        """Raise a count for the row at `place`, once for all documents of the row."""
        if self.lasts.get((part, what)) == place:
            return
        self.lasts[part, what] = place
        self.counts.setdefault(part, Counter())[what] += 1
        self.firsts.setdefault(part, {}).setdefault(what, place)


@dataclass(frozen=True)
class _Document:
    """A document before tokenising: number and place of its row, its part, hash, and number of segments."""

    number: int
    place: int
    part: int
    hash: int
    num_segments: int


class Encoder:
    """Turns raw batches into pieces; one per process."""

    def __init__(self, settings: EncodeSettings) -> None:
        from tokenizers import Tokenizer

        self.settings = settings
        self.tokenizer = Tokenizer.from_str(settings.tokenizer_json)
        self.is_chat = settings.format.name == "chat"
        # A chat template writes special tokens as text; anywhere else such text is data and must stay text.
        self.tokenizer.encode_special_tokens = not self.is_chat
        special = [
            re.escape(token.content) for token in self.tokenizer.get_added_tokens_decoder().values() if token.special
        ]
        self.special = re.compile("|".join(special)) if special and not self.is_chat else None
        self.chat: Any = None
        if self.is_chat:
            from drillyard.data.chat_template import ChatRenderer

            assert settings.chat_template is not None
            self.chat = ChatRenderer(settings.chat_template, settings.special_tokens, settings.format.loss_on)
            # Without special tokens it only trims the offsets, which find the turns.
            self.tokenizer.post_processor = None
        self.start = [] if self.is_chat else list(settings.start_ids)
        self.end = [] if settings.eos_id is None or self.is_chat else [settings.eos_id]
        # Nothing precedes the first token of such a document, so its bytes carry no loss.
        self.first_is_context = settings.format.name == "text" and not self.start
        self.added = {i: token.content for i, token in self.tokenizer.get_added_tokens_decoder().items()}

    def encode(self, batch: RawBatch) -> Encoded:
        """Pieces of all rows of a batch, in order. UserError names the row."""
        result = Encoded(batch.nbytes, batch.origins)
        texts: list[str] = []
        flags: list[bool] = []
        documents: list[_Document] = []
        for number, row in batch.rows():
            origin, line = batch.place(number)
            place = origin << NUMBER_BITS | line
            where = batch.where(number)
            canonical = self.settings.format.canonical(row, where)
            identity = self.settings.format.identity(canonical, where)
            part = self.settings.split.part_of(row, identity, where)
            result.counts.setdefault(part, Counter())["rows"] += 1
            for segments in self._segments(canonical, result, part, place, where):
                if not any(text for text, _ in segments):
                    result.count(part, "empty", place)
                    continue
                if self.special is not None and any(self.special.search(text) for text, _ in segments):
                    result.count(part, "special_tokens_as_text", place)
                digest = xxhash.xxh3_64_intdigest(identity.encode("utf-8", "surrogatepass"))
                documents.append(_Document(number, place, part, digest, len(segments)))
                for text, loss in segments:
                    texts.append(text)
                    flags.append(loss)
        if documents:
            flat = self._tokenise(batch, texts, flags, documents)
            self._place(result, batch, flat, documents)
        return result

    def _segments(self, row: Row, result: Encoded, part: int, place: int, where: str) -> list[Segments]:
        """The documents of a canonical row."""
        if not self.is_chat:
            return [self.settings.format.segments(row, where)]
        rendered = self.chat.render(row, where)
        for mark in rendered.marks:
            result.count(part, mark, place)
        documents: list[Segments] = rendered.documents
        return documents

    def _tokenise(self, batch: RawBatch, texts: list[str], flags: list[bool], documents: list[_Document]) -> _Flat:
        try:
            runs = self._chat_runs(texts, flags, documents) if self.is_chat else self._runs(texts, flags)
        except (TypeError, UnicodeEncodeError):
            raise UserError(_lone_surrogate(batch, texts, documents)) from None
        tokens: list[int] = []
        run_lengths: list[int] = []
        run_flags: list[bool] = []
        ends: list[int] = []
        nbytes: list[int] = []
        position = 0
        for document in documents:
            tokens += self.start
            run_lengths.append(len(self.start))
            run_flags.append(False)
            size = 0
            for index in range(position, position + document.num_segments):
                for ids, learnt in runs[index]:
                    tokens += ids
                    run_lengths.append(len(ids))
                    run_flags.append(learnt)
                size += len(texts[index].encode("utf-8"))
            if self.first_is_context and runs[position][0][0]:
                size -= self._num_bytes(runs[position][0][0][0], texts[position])
            tokens += self.end
            run_lengths.append(len(self.end))
            run_flags.append(True)
            ends.append(len(tokens))
            nbytes.append(size)
            position += document.num_segments
        learnt_T = np.repeat(np.array(run_flags), run_lengths)
        return _Flat(
            np.fromiter(tokens, self.settings.dtype, len(tokens)), np.append(learnt_T[1:], False), ends, nbytes
        )

    def _runs(self, texts: list[str], flags: list[bool]) -> list[list[tuple[list[int], bool]]]:
        """Per segment its tokens, and whether they are learnt; no token crosses from one segment to the next."""
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [[(encoding.ids, flag)] for encoding, flag in zip(encodings, flags, strict=True)]

    def _chat_runs(
        self, texts: list[str], flags: list[bool], documents: list[_Document]
    ) -> list[list[tuple[list[int], bool]]]:
        """Like `_runs`, but each conversation is tokenised as one text, as in plain transformers; all its runs are at
        the index of its first segment."""
        bounds = list(itertools.accumulate((document.num_segments for document in documents), initial=0))
        spans = [slice(begin, end) for begin, end in itertools.pairwise(bounds)]
        encodings = self.tokenizer.encode_batch(["".join(texts[span]) for span in spans], add_special_tokens=False)
        runs: list[list[tuple[list[int], bool]]] = [[] for _ in texts]
        for span, encoding in zip(spans, encodings, strict=True):
            learnt_T = np.zeros(len(encoding.ids), np.bool_)
            begins, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
            start = 0
            for text, flag in zip(texts[span], flags[span], strict=True):
                if flag:
                    learnt_T |= (begins < start + len(text)) & (ends > start)
                start += len(text)
            cuts = [0, *(np.flatnonzero(np.diff(learnt_T)) + 1).tolist(), len(encoding.ids)]
            runs[span.start] = [(encoding.ids[i:j], bool(learnt_T[i])) for i, j in itertools.pairwise(cuts) if i < j]
        return runs

    def _num_bytes(self, token: int, text: str) -> int:
        """Bytes of `text` in its first token, with a byte-level vocabulary (a character is a byte)."""
        if token in self.added:
            return len(self.added[token].encode("utf-8"))
        piece = self.tokenizer.id_to_token(token) or ""
        is_prefix_space = piece.startswith("\u0120") and not text.startswith(" ")
        return len(piece) - is_prefix_space

    def _place(self, result: Encoded, batch: RawBatch, flat: _Flat, documents: list[_Document]) -> None:
        """Cut documents that are too long, drop pieces without loss, count, and group the rest by part."""
        with_loss_before = np.concatenate([[0], np.cumsum(flat.loss)])
        spans: dict[int, list[tuple[int, int]]] = {}
        places: dict[int, list[int]] = {}
        begin = 0
        for document, end, nbytes in zip(documents, flat.ends, flat.nbytes, strict=True):
            part, place = document.part, document.place
            counts = result.counts[part]
            flat.loss[end - 1] = False
            kept = 0
            pieces = self._cut(begin, end, document, result, batch)
            for start, stop in pieces:
                # The last position of a piece predicts nothing: the next token is not in the piece.
                if with_loss_before[stop - 1] > with_loss_before[start]:
                    spans.setdefault(part, []).append((start, stop))
                    kept += 1
                else:
                    counts["pieces_without_loss"] += 1
            if kept:
                places.setdefault(part, []).extend([place] * kept)
                result.documents.setdefault(part, []).append((document.hash, place))
                counts["documents"] += 1
                counts["bytes"] += nbytes
            elif pieces:
                result.count(part, "without_loss", place)
            begin = end
        for part, placed in spans.items():
            result.pieces[part] = flat.pieces(placed, places[part])

    def _cut(
        self, begin: int, end: int, document: _Document, result: Encoded, batch: RawBatch
    ) -> list[tuple[int, int]]:
        """The bounds of the pieces of the document [begin, end) of the flat tokens."""
        limit = self.settings.sequence_length
        if end - begin <= limit:
            return [(begin, end)]
        if self.settings.too_long == "error":
            raise UserError(
                f"{batch.where(document.number)}: {end - begin} tokens, longer than data.sequence_length ({limit}). "
                f"Raise it, or set data.too_long to truncate, split or drop."
            )
        if self.settings.too_long == "drop":
            result.count(document.part, "dropped", document.place)
            return []
        if self.settings.too_long == "truncate":
            result.count(document.part, "truncated", document.place)
            return [(begin, begin + limit)]
        result.count(document.part, "split", document.place)
        return [(start, min(start + limit, end)) for start in range(begin, end - 1, limit - 1)]


@dataclass
class _Flat:
    """Concatenated documents: tokens, loss per position (shifted), the end of each document, and its bytes of text."""

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


def _lone_surrogate(batch: RawBatch, texts: list[str], documents: list[_Document]) -> str:
    """The message for text that has no UTF-8 form, such as a lone \\ud800 escape in JSON."""
    position = 0
    for document in documents:
        for text in texts[position : position + document.num_segments]:
            if any("\ud800" <= character <= "\udfff" for character in text):
                return (
                    f"{batch.where(document.number)}: the text has a lone surrogate (\\ud800 to \\udfff), "
                    f"which is not Unicode text. Fix the row."
                )
        position += document.num_segments
    raise AssertionError("the tokenizer refused text without surrogates")
