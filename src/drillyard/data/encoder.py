"""From raw rows to tokenised pieces: the work that runs in parallel processes.

A document begins with the tokens that the tokenizer adds before a text (BOS, or none for GPT-2 and
Qwen), so that a prompt has the same tokens in training as in plain transformers. Then follow its
segments' tokens and EOS. A conversation is exactly the output of its chat template, tokenised as
one text; a token is learnt if any of its characters is. Packing places pieces: at most T =
sequence_length tokens of one document. `split` cuts a long document so that neighbours overlap by
one token, which is context in the second: every token of a document except its first carries loss
exactly once, and bits per byte over the text that carries loss are exact.

Loss is per position: position t carries loss if token t+1 of the same piece is to be learnt.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from drillyard.data.raw_batches import (
    NUMBER_BITS,
    Origin,
    RawBatch,
    Row,
    RowOrError,
    decoded_row,
)
from drillyard.data.row_formats import RowFormat, Segments
from drillyard.data.tokenizer import refusing_panics
from drillyard.errors import UserError

TRAIN, HELD_OUT = 0, 1
AT_FAULT = "at_fault"


@dataclass(frozen=True)
class HeldOutSplit:
    """Choice of held-out documents: a share of the documents, or of the values of a column, by
    hash."""

    fraction: float = 0.0
    column: str | None = None

    def part_of(self, row: Row, identity: str, where: str) -> int:
        """TRAIN or HELD_OUT; depends only on the document (or on its value of `column`)."""
        if self.fraction == 0.0:
            return TRAIN
        if self.column is not None:
            if self.column not in row:
                raise UserError(
                    f"{where}: no column {self.column!r} (data.held_out.split_by); the columns are:"
                    f" {', '.join(row)}."
                )
            identity = repr(row[self.column])
        digest = xxhash.xxh3_64_intdigest(b"held out" + identity.encode("utf-8", "surrogatepass"))
        return HELD_OUT if digest < self.fraction * 2**64 else TRAIN


@dataclass(frozen=True)
class EncodeSettings:
    """The settings that decide how rows become pieces. Picklable; also part of a cache's key, but
    for `template_origin`, what an error calls the template, `on_error` (`data.on_error`), and
    `date`, which is part of the tokenizer's key."""

    format: RowFormat
    sequence_length: int
    too_long: str
    split: HeldOutSplit
    tokenizer_json: str
    wide: bool
    start_ids: tuple[int, ...]
    eos_id: int | None
    chat_template: str | dict[str, str] | None
    special_tokens: dict[str, str]
    template_origin: str = "the chat template"
    on_error: str = "skip"
    date: str | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        """uint16 if the vocabulary fits."""
        return np.dtype(np.uint32 if self.wide else np.uint16)


@dataclass
class Pieces:
    """Tokenised pieces of one raw batch and one part, concatenated.

    places: the place of each piece's document, uint64 as in `raw_batches.NUMBER_BITS`; numbers of
    origins are those of the raw batch until a cache assigns its own.
    """

    tokens: npt.NDArray[Any]
    loss: npt.NDArray[np.bool_]
    lengths: npt.NDArray[np.int32]
    places: npt.NDArray[np.uint64]


@dataclass
class EncodedPart:
    """The rows of one raw batch in one part: pieces, counts with the first and last place of each,
    (hash of its identity, place) of each document, and the error of the first row at fault after
    its place."""

    pieces: Pieces | None = None
    counts: Counter[str] = field(default_factory=Counter)
    firsts: dict[str, int] = field(default_factory=dict)
    lasts: dict[str, int] = field(default_factory=dict)
    documents: list[tuple[int, int]] = field(default_factory=list)
    first_fault: str = ""

    def count(self, what: str, place: int) -> None:
        """Raise a count for the row at `place`, once for all documents of the row."""
        if self.lasts.get(what) != place:
            self.lasts[what] = place
            self.counts[what] += 1
            self.firsts.setdefault(what, place)

    def fault(self, place: int, error: UserError, where: str) -> None:
        """Count the row at `place` as one at fault."""
        self.count(AT_FAULT, place)
        if not self.first_fault:
            text = str(error)
            self.first_fault = text.removeprefix(where) if text.startswith(where) else f": {text}"


@dataclass
class Encoded:
    """The result for one raw batch: its origins, and its rows by part (TRAIN, HELD_OUT)."""

    nbytes: int
    origins: tuple[Origin, ...]
    parts: dict[int, EncodedPart] = field(default_factory=lambda: defaultdict(EncodedPart))


@dataclass(frozen=True)
class _Document:
    """A document before tokenising, with the number and place of its row, its part and hash."""

    number: int
    place: int
    part: EncodedPart
    hash: int
    segments: Segments


Runs = list[tuple[list[int], bool]]
"""Consecutive tokens of a document, and whether they are learnt."""


class Encoder:
    """Turns raw batches into pieces; one per process."""

    def __init__(self, settings: EncodeSettings) -> None:
        from tokenizers import Tokenizer

        self.settings = settings
        self.tokenizer = Tokenizer.from_str(settings.tokenizer_json)
        self.is_chat = settings.format.is_chat
        # A chat template writes special tokens as text; anywhere else such text is data and must
        # stay text.
        self.tokenizer.encode_special_tokens = not self.is_chat
        added = self.tokenizer.get_added_tokens_decoder()
        self.added = {number: token.content for number, token in added.items()}
        special = [re.escape(token.content) for token in added.values() if token.special]
        self.special = re.compile("|".join(special)) if special and not self.is_chat else None
        self.chat: Any = None
        if self.is_chat:
            from drillyard.data.chat_template import chat_renderer

            assert settings.chat_template is not None
            self.chat = chat_renderer(
                settings.chat_template,
                settings.special_tokens,
                settings.format,
                settings.template_origin,
                settings.date,
            )
            # Without special tokens it only trims the offsets, which find the turns.
            self.tokenizer.post_processor = None
        self.start = [] if self.is_chat else list(settings.start_ids)
        self.end = [] if settings.eos_id is None or self.is_chat else [settings.eos_id]
        # Nothing precedes the first token of such a document, so its bytes carry no loss.
        self.first_is_context = settings.format.name == "text" and not self.start

    def encode(self, batch: RawBatch) -> Encoded:
        """Pieces of all rows of a batch, in order. UserError names the row."""
        result = Encoded(batch.nbytes, batch.origins)
        documents: list[_Document] = []
        for number, row in batch.rows():
            origin, line = batch.place(number)
            documents += self._documents(
                row, number, origin << NUMBER_BITS | line, batch.where(number), result
            )
        if documents:
            with refusing_panics("data.tokenizer"):
                self._place(batch, documents)
        return result

    def _documents(
        self, item: RowOrError, number: int, place: int, where: str, result: Encoded
    ) -> list[_Document]:
        """The documents of a row, none of one at fault; its counts are raised in its part."""
        part_number, form = TRAIN, self.settings.format
        try:
            row = decoded_row(item)
            canonical = form.canonical(row, where)
            identity = form.identity(canonical, where)
            part_number = self.settings.split.part_of(row, identity, where)
            found, counts = self._segments(canonical, where)
        except UserError as error:
            if self.settings.on_error == "refuse":
                raise
            result.parts[part_number].counts["rows"] += 1
            result.parts[part_number].fault(place, error, where)
            return []
        part = result.parts[part_number]
        part.counts["rows"] += 1
        for count in counts:
            part.count(count, place)
        digest = xxhash.xxh3_64_intdigest(identity.encode("utf-8", "surrogatepass"))
        documents = []
        for segments in found:
            if not any(text for text, _ in segments):
                part.count("empty", place)
                continue
            if self.special is not None and any(self.special.search(text) for text, _ in segments):
                part.count("special_tokens_as_text", place)
            documents.append(_Document(number, place, part, digest, segments))
        return documents

    def _segments(self, row: Row, where: str) -> tuple[list[Segments], list[str]]:
        """The documents of a canonical row, and the counts to raise for it."""
        if not self.is_chat:
            return [self.settings.format.segments(row, where)], []
        rendered = self.chat.render(row, where)
        return rendered.documents, rendered.counts

    def _place(self, batch: RawBatch, documents: list[_Document]) -> None:
        """Tokenise the documents, cut those that are too long, drop pieces without loss, and
        count."""
        try:
            runs_of_documents = (
                self._chat_runs(documents) if self.is_chat else self._runs(documents)
            )
        except (TypeError, UnicodeEncodeError):
            documents = self._without_surrogates(batch, documents)
            if documents:
                self._place(batch, documents)
            return
        tokens, loss, ends = self._joined(runs_of_documents)
        with_loss_before = np.concatenate([[0], np.cumsum(loss)])
        kept: dict[int, tuple[EncodedPart, list[tuple[int, int, int]]]] = {}
        for document, runs, (begin, end) in zip(
            documents, runs_of_documents, itertools.pairwise([0, *ends]), strict=True
        ):
            part, place = document.part, document.place
            pieces = self._cut(begin, end, document, batch)
            # The last position of a piece predicts nothing: the next token is not in the piece.
            with_loss = [
                (start, stop, place)
                for start, stop in pieces
                if with_loss_before[stop - 1] > with_loss_before[start]
            ]
            if len(with_loss) < len(pieces):
                part.counts["pieces_without_loss"] += len(pieces) - len(with_loss)
            if with_loss:
                kept.setdefault(id(part), (part, []))[1].extend(with_loss)
                part.documents.append((document.hash, place))
                part.counts["documents"] += 1
                part.counts["bytes"] += self._learnt_bytes(document, runs)
            elif pieces:
                part.count("without_loss", place)
        for part, spans in kept.values():
            part.pieces = _pieces(tokens, loss, spans)

    def _without_surrogates(self, batch: RawBatch, documents: list[_Document]) -> list[_Document]:
        """The documents of the rows whose text has a UTF-8 form."""
        at_fault = {each.number: each for each in documents if _has_surrogate(each)}
        assert at_fault, "the tokenizer refused text without surrogates"
        for number, document in at_fault.items():
            where = batch.where(number)
            error = UserError(
                f"{where}: the text has a lone surrogate (\\ud800 to \\udfff), which is not"
                " Unicode text. Fix the row."
            )
            if self.settings.on_error == "refuse":
                raise error
            document.part.fault(document.place, error, where)
        return [each for each in documents if each.number not in at_fault]

    def _joined(
        self, documents: list[Runs]
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_], list[int]]:
        """Documents concatenated: tokens, loss per position (of the next token), and the end of
        each document."""
        tokens: list[int] = []
        lengths: list[int] = []
        flags: list[bool] = []
        ends: list[int] = []
        for runs in documents:
            for ids, learnt in ((self.start, False), *runs, (self.end, True)):
                tokens += ids
                lengths.append(len(ids))
                flags.append(learnt)
            ends.append(len(tokens))
        learnt_T = np.repeat(np.array(flags), lengths)
        return (
            np.fromiter(tokens, self.settings.dtype, len(tokens)),
            np.append(learnt_T[1:], False),
            ends,
        )

    def _runs(self, documents: list[_Document]) -> list[Runs]:
        """The runs of each document, one per segment; no token crosses from one segment to the
        next."""
        texts = [text for document in documents for text, _ in document.segments]
        encodings = iter(self.tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        return [
            [(next(encodings).ids, learnt) for _, learnt in document.segments]
            for document in documents
        ]

    def _chat_runs(self, documents: list[_Document]) -> list[Runs]:
        """The runs of each conversation, which is tokenised as one text, as in plain
        transformers."""
        texts = ["".join(text for text, _ in document.segments) for document in documents]
        result = []
        for document, encoding in zip(
            documents, self.tokenizer.encode_batch(texts, add_special_tokens=False), strict=True
        ):
            learnt_T = np.zeros(len(encoding.ids), np.bool_)
            begins, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
            start = 0
            for text, learnt in document.segments:
                if learnt:
                    learnt_T |= (begins < start + len(text)) & (ends > start)
                start += len(text)
            cuts = [0, *(np.flatnonzero(np.diff(learnt_T)) + 1).tolist(), len(encoding.ids)]
            result.append(
                [
                    (encoding.ids[i:j], bool(learnt_T[i]))
                    for i, j in itertools.pairwise(cuts)
                    if i < j
                ]
            )
        return result

    def _learnt_bytes(self, document: _Document, runs: Runs) -> int:
        """Bytes of the document's text, without those of a first token that nothing precedes.

        Of the first token only with a byte-level vocabulary, where a character is a byte.
        """
        size = sum(len(text.encode("utf-8")) for text, _ in document.segments)
        if not self.first_is_context or not runs[0][0]:
            return size
        token = runs[0][0][0]
        if token in self.added:
            return size - len(self.added[token].encode("utf-8"))
        piece = self.tokenizer.id_to_token(token) or ""
        is_prefix_space = piece.startswith("\u0120") and not document.segments[0][0].startswith(" ")
        return size - len(piece) + is_prefix_space

    def _cut(
        self, begin: int, end: int, document: _Document, batch: RawBatch
    ) -> list[tuple[int, int]]:
        """The bounds of the pieces of a document at [begin, end)."""
        limit, too_long = self.settings.sequence_length, self.settings.too_long
        if end - begin <= limit:
            return [(begin, end)]
        if too_long == "error":
            raise UserError(
                f"{batch.where(document.number)}: {end - begin} tokens, longer than"
                f" data.sequence_length ({limit}). Raise it, or set data.too_long to truncate,"
                " split or drop."
            )
        document.part.count(
            {"drop": "dropped", "truncate": "truncated", "split": "split"}[too_long], document.place
        )
        if too_long == "drop":
            return []
        if too_long == "truncate":
            return [(begin, begin + limit)]
        return [(start, min(start + limit, end)) for start in range(begin, end - 1, limit - 1)]


def _pieces(
    all_tokens: npt.NDArray[Any], all_loss: npt.NDArray[np.bool_], spans: list[tuple[int, int, int]]
) -> Pieces:
    """The pieces at these spans (begin, end, place); the last position of each carries no loss."""
    lengths = np.array([stop - start for start, stop, _ in spans], np.int32)
    tokens = np.concatenate([all_tokens[start:stop] for start, stop, _ in spans])
    loss = np.concatenate([all_loss[start:stop] for start, stop, _ in spans])
    loss[np.cumsum(lengths) - 1] = False
    return Pieces(tokens, loss, lengths, np.array([place for _, _, place in spans], np.uint64))


def _has_surrogate(document: _Document) -> bool:
    """Whether a text has no UTF-8 form, such as one with a lone \\ud800 escape in JSON."""
    texts = (text for text, _ in document.segments)
    return any("\ud800" <= character <= "\udfff" for text in texts for character in text)
