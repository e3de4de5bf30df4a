"""Read or follow one source: detect its formats by content, then read its steps, events and facts.

Until steps are found, all text formats search each block, in one pass for a literal of each. Once
some are found, the formats that found none within `_DETECTION_BLOCKS` more blocks are dropped: a
file in which another format begins later (a mixed log) is still read, and a gigabyte log is
searched for little more than its own literals.

A source that grows: text is read on from where it ended, documents and event files are read again
as a whole whenever they changed. The first bytes of a file decide which it is; but they may be
incomplete still, so a file counts as text for good only with a step in it or once all of those
bytes are read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import tzinfo
from io import BytesIO
from typing import BinaryIO, Final

from ahocorasick_rs import BytesAhoCorasick, MatchKind

from drillyard.errors import UserError
from drillyard.guarded_files import open_regular
from drillyard.loglines.blocks import BLOCK_BYTES, LONGEST_SKIPPED_LINE, LineBlock, LineSplitter
from drillyard.loglines.followers import follower
from drillyard.loglines.prefixes import Origin
from drillyard.loglines.sources import LogFile, open_log
from drillyard.loglines.stamps import Stamps
from drillyard.measurement.formats import log_formats
from drillyard.measurement.formats.line_rules import (
    LAUNCHER_RULES,
    RuleContext,
    RuleSearch,
    line_time,
)
from drillyard.measurement.formats.log_format import DocumentFormat, StepLineReader, TextFormat
from drillyard.measurement.lanes import Lane, Lanes
from drillyard.measurement.parsed_log import LogEvent, LogFacts, ReadSource

_DETECTION_BLOCKS: Final = 4
_NOTE_BLOCKS: Final = 64
_STAMPED_LINES: Final = 50
_BINARY_BYTES: Final = 4096
_HEAD_BYTES: Final = 1 << 16


@dataclass(slots=True)
class FormatContent:
    """Content of a source that one format found."""

    format: str
    lanes: list[Lane]
    events: list[tuple[Origin, LogEvent]]
    facts: LogFacts
    warnings: list[str] = field(default_factory=list)

    @property
    def records(self) -> int:
        """The most step records of any one origin."""
        return max((lane.length for lane in self.lanes), default=0)


@dataclass(slots=True)
class SourceContent:
    """One source that was read to its end."""

    source: ReadSource
    found: list[FormatContent]
    stamps: Stamps
    first_time_us: int | None = None
    last_time_us: int | None = None
    trouble: str | None = None
    """Reason why its compressed data ended before their end."""


class _Anchors:
    """Tells which anchors a block has, in one pass for all: a search for each costs a tenth of the
    time of reading a log."""

    def __init__(self) -> None:
        self._literals: list[bytes] = []
        self._outer: list[bytes] = []
        self._search: BytesAhoCorasick | None = None

    def among(self, text: bytes, anchors: list[bytes]) -> set[bytes]:
        if anchors != self._literals:
            self._literals = anchors
            # One that lies in another is found there.
            self._outer = [one for one in set(anchors) if not self._inside(one)]
            self._search = BytesAhoCorasick(self._outer, matchkind=MatchKind.LeftmostFirst)
        if self._search is None or not anchors:
            return set()
        found = {self._outer[index] for index, _, _ in self._search.find_matches_as_indexes(text)}
        return found | {one for one in anchors if self._inside(one) and one in text}

    def _inside(self, anchor: bytes) -> bool:
        return any(anchor != other and anchor in other for other in self._literals)


class TextSourceReader:
    """Reads a text log from pieces of bytes, as they come. `content` may be called at any time."""

    def __init__(
        self, file: LogFile, number: int, zone: tzinfo | None, only: str | None = None
    ) -> None:
        self.source = ReadSource(file.name, None)
        self.stamps = Stamps(zone, file.changed)
        self.first_time_us: int | None = None
        self.last_time_us: int | None = None
        self._blocks = LineSplitter()
        self._count = 0
        self._found_at: int | None = None
        self._last: LineBlock | None = None
        self._anchors = _Anchors()
        self._candidates: list[tuple[StepLineReader, RuleContext]] = []
        """The text formats that search the blocks."""
        for kind in log_formats().values():
            if only in (None, kind.name) and issubclass(kind, TextFormat):
                reader = StepLineReader(kind(), Lanes(number), self.stamps)
                search = RuleSearch((*kind.rules, *LAUNCHER_RULES))
                self._candidates.append(
                    (reader, RuleContext(self.source.name, number, self.stamps, search))
                )

    def feed(self, piece: bytes) -> None:
        block = self._blocks.feed(piece)
        if block is None:
            if self._blocks.skipped_bytes > LONGEST_SKIPPED_LINE:
                raise UserError(
                    f"{self.source.name}:{self._blocks.lines + 1}: a line has more than"
                    f" {LONGEST_SKIPPED_LINE >> 20} MiB: this is not a log. Leave the file out."
                )
            return
        self._count += 1
        present = self._anchors.among(
            block.text,
            [reader.format.anchor for reader, _ in self._candidates if not reader.step_lines],
        )
        for reader, _ in self._candidates:
            if reader.step_lines or reader.format.anchor in present:
                reader.feed(block)
            else:
                reader.format.end_block(block)
        found = [candidate for candidate in self._candidates if candidate[0].step_lines]
        if found or self._count <= _NOTE_BLOCKS:
            for _, context in found or self._candidates:
                context.read(block)
        if self._count == _NOTE_BLOCKS:
            for _, context in self._candidates:
                context.search.end_of_beginning()
        if self.first_time_us is None and self._count <= _DETECTION_BLOCKS:
            self.first_time_us = next(
                self._times(block.text.split(b"\n", _STAMPED_LINES)[:_STAMPED_LINES]), None
            )
        self._last = block
        if self._found_at is None and found:
            self._found_at = self._count
        if self._found_at is not None and self._count - self._found_at == _DETECTION_BLOCKS:
            self._candidates = found

    def finish(self) -> None:
        self._blocks.finish()

    def _times(self, lines: list[bytes]) -> Iterator[int]:
        for line in lines:
            time = line_time(line, self.stamps)[0] if line else None
            if time is not None:
                yield time

    def content(self) -> SourceContent:
        """Return what was read so far. Formats that found no step, event or fact are left out."""
        if self._last is not None:
            tail = self._last.text[-65_536:].split(b"\n")[-_STAMPED_LINES:]
            self.last_time_us = next(self._times(tail[::-1]), self.last_time_us)
        found = []
        for reader, context in self._candidates:
            format = reader.format
            context.facts.learn(self.source.name, **format.facts)
            lanes = [lane for lane in reader.lanes if lane.length]
            format.warnings.clear()
            for lane in lanes:
                format.finish_lane(lane)
            if lanes or context.events or context.facts.places:
                found.append(
                    FormatContent(
                        format.name,
                        lanes,
                        list(context.events),
                        context.facts,
                        list(format.warnings),
                    )
                )
        self._count_lines()
        return SourceContent(self.source, found, self.stamps, self.first_time_us, self.last_time_us)

    def _count_lines(self) -> None:
        source = self.source
        source.bytes, source.lines = self._blocks.bytes, self._blocks.lines
        source.unfinished_lines = self._blocks.unfinished
        source.damaged_lines = self._blocks.overlong
        useful = 0
        if self._candidates:
            reader, context = max(self._candidates, key=lambda candidate: candidate[0].step_lines)
            source.damaged_lines += reader.damaged
            useful = reader.step_lines + context.lines
        source.lines_passed_over = max(0, source.lines - useful)


def document_format(head: bytes, only: str | None) -> type[DocumentFormat] | None:
    """The format that reads a file beginning with `head` as a whole; None for text. `only`: no
    other format."""
    kinds = [
        kind
        for kind in log_formats().values()
        if only in (None, kind.name) and issubclass(kind, DocumentFormat)
    ]
    return next((kind for kind in kinds if kind.matches(head)), None)


def read_source(
    file: LogFile, number: int, stream: BinaryIO, zone: tzinfo | None, only: str | None
) -> SourceContent:
    """Read a source of any kind. Raises OSError."""
    head = stream.read(BLOCK_BYTES)
    if (kind := document_format(head, only)) is not None:
        return _read_document(kind, file, number, _Rewound(head, stream))
    if b"\0" in head[:_BINARY_BYTES]:
        source = ReadSource(
            file.name, None, used=False, note="binary: passed over", bytes=len(head)
        )
        return SourceContent(source, [], Stamps(zone))
    reader = TextSourceReader(file, number, zone, only)
    while head:
        reader.feed(head)
        head = stream.read(BLOCK_BYTES)
    reader.finish()
    return reader.content()


class _Rewound:
    """A stream whose first bytes were read already."""

    def __init__(self, head: bytes, stream: BinaryIO) -> None:
        self._head, self._stream = BytesIO(head), stream

    def read(self, count: int = -1) -> bytes:
        taken = self._head.read(count)
        return taken if taken and count >= 0 else taken + self._stream.read(count)


def _read_document(
    kind: type[DocumentFormat], file: LogFile, number: int, stream: _Rewound
) -> SourceContent:
    parsed = kind().read(file.name, number, stream)
    source = ReadSource(file.name, kind.name, bytes=parsed.bytes, lines=parsed.records)
    source.damaged_lines, source.unfinished_lines = (
        int(parsed.error is not None),
        int(not parsed.complete),
    )
    stamps = Stamps()
    stamps.zoned = parsed.first_time_us is not None
    warnings = [f"{file.name}: reading ended there: {parsed.error}"] if parsed.error else []
    found = FormatContent(kind.name, list(parsed.lanes), parsed.events, parsed.facts, warnings)
    return SourceContent(source, [found], stamps, parsed.first_time_us, parsed.last_time_us)


class FollowedSource:
    """A source that is followed. Raises UserError for what cannot be followed."""

    def __init__(self, file: LogFile, number: int, zone: tzinfo | None, only: str | None) -> None:
        self.file, self._number, self._zone, self._only = file, number, zone, only
        self.input = follower(file)
        self._document: SourceContent | None = None
        self._seen: tuple[int, int, int] | None = None
        self._begin()

    def _begin(self) -> None:
        """Read text from its beginning. Standard input and cloud objects cannot be documents."""
        self._text = TextSourceReader(self.file, self._number, self._zone, self._only)
        self._is_text = self.file.path is None

    def poll(self) -> bool:
        """Read what is new; whether there was anything. Raises UserError."""
        if self.input.ended:
            return False
        try:
            return (
                self._read_on() if self._is_text or not self._is_document() else self._read_again()
            )
        except OSError as error:
            raise UserError(f"{self.file.name}: cannot be read: {error.strerror}") from error

    def content(self) -> SourceContent:
        """Return what was read so far."""
        return self._text.content() if self._document is None else self._document

    def _read_on(self) -> bool:
        news = False
        for piece in self.input.poll():
            news = True
            if piece is None:
                self._begin()
            else:
                self._text.feed(piece)
        if news and not self._is_text:
            found = self._text.content().found
            self._is_text = self._text.source.bytes >= _HEAD_BYTES or any(
                one.lanes for one in found
            )
        if self._is_text:
            self._document = None
        if self.input.ended:
            self._text.finish()
        return news or self.input.ended

    def _is_document(self) -> bool:
        try:
            with open_regular(self.file.name) as stream:
                return document_format(stream.read(_HEAD_BYTES), self._only) is not None
        except FileNotFoundError:
            return False

    def _read_again(self) -> bool:
        status = os.stat(self.file.name)
        now = (status.st_ino, status.st_size, status.st_mtime_ns)
        if now == self._seen:
            return False
        self._seen = now
        # Should it turn into text, that is read from its beginning.
        self.input.close()
        self._begin()
        with open_log(self.file) as stream:
            self._document = read_source(self.file, self._number, stream, self._zone, self._only)
        return True
