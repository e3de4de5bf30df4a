"""Reading one source: what it is, told by its content, and everything that it holds.

The idea: until steps are found, all text formats look at each block, which costs a search for one literal each. Once
some are found, the formats that have seen none within `_PATIENCE` blocks drop out, so that a file in which another
format begins later (a mixed log) is still read, and a gigabyte log is searched for little more than its own literals.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import tzinfo
from typing import BinaryIO, Final

from drillyard.loglines.blocks import BLOCK_BYTES, LineBlock, LineSplitter
from drillyard.loglines.prefixes import Origin
from drillyard.loglines.sources import LogFile
from drillyard.loglines.stamps import Stamps
from drillyard.measurement.formats import hf_trainer_state, tensorboard
from drillyard.measurement.formats.line_rules import LAUNCHER_RULES, RuleContext, RuleSearch, line_time
from drillyard.measurement.formats.registry import TEXT_FORMATS
from drillyard.measurement.formats.text_format import StepLineReader, TextFormat
from drillyard.measurement.lanes import Lane, Lanes
from drillyard.measurement.parsed_log import LogFacts, LogSource, Mark

_PATIENCE: Final = 4
_NOTE_BLOCKS: Final = 64
_STAMPED_LINES: Final = 50
_BINARY_BYTES: Final = 4096


@dataclass(slots=True)
class FormatContent:
    """What one format found in a source."""

    format: str
    lanes: list[Lane]
    marks: list[tuple[Origin, Mark]]
    facts: LogFacts
    warnings: list[str] = field(default_factory=list)

    @property
    def records(self) -> int:
        """The most step records of any one origin."""
        return max((lane.length for lane in self.lanes), default=0)


@dataclass(slots=True)
class _Candidate:
    """A text format that looks at the blocks of a source."""

    reader: StepLineReader
    book: RuleContext
    notes: RuleSearch


class TextSourceReader:
    """Reads a text log from pieces of bytes, as they come. `results` may be asked for at any time."""

    def __init__(self, file: LogFile, number: int, zone: tzinfo | None, only: str | None = None) -> None:
        self.source = LogSource(file.name, None)
        self.stamps = Stamps(zone, file.changed)
        self.first_time_us: int | None = None
        self.last_time_us: int | None = None
        self._blocks = LineSplitter()
        self._count = 0
        self._found_at: int | None = None
        self._last: LineBlock | None = None
        chosen = [kind() for kind in TEXT_FORMATS if only in (None, kind.name)]
        self._candidates = [self._candidate(format, number) for format in chosen]

    def _candidate(self, format: TextFormat, number: int) -> _Candidate:
        book = RuleContext(self.source.name, number, self.stamps)
        return _Candidate(
            StepLineReader(format, Lanes(number), self.stamps), book, RuleSearch((*format.notes(), *LAUNCHER_RULES))
        )

    def feed(self, piece: bytes) -> None:
        """Read the next bytes."""
        block = self._blocks.feed(piece)
        if block is None:
            return
        self._count += 1
        for candidate in self._candidates:
            candidate.reader.feed(block)
        found = [candidate for candidate in self._candidates if candidate.reader.step_lines]
        if found or self._count <= _NOTE_BLOCKS:
            for candidate in found or self._candidates:
                if not candidate.reader.all_steps:
                    candidate.book.read(block, candidate.notes)
        if self._count == _NOTE_BLOCKS:
            for candidate in self._candidates:
                candidate.notes.end_of_beginning()
        if self.first_time_us is None and self._count <= _PATIENCE:
            self.first_time_us = next(self._times(block.text.split(b"\n", _STAMPED_LINES)[:_STAMPED_LINES]), None)
        self._last = block
        if self._found_at is None and found:
            self._found_at = self._count
        if self._found_at is not None and self._count - self._found_at == _PATIENCE:
            self._candidates = found

    def finish(self) -> None:
        """The source has ended."""
        self._blocks.finish()

    def _times(self, lines: list[bytes]) -> Iterator[int]:
        for line in lines:
            time = line_time(line, self.stamps)[0] if line else None
            if time is not None:
                yield time

    def results(self) -> list[FormatContent]:
        """What each format found; formats without step records or marks of their own are left out."""
        if self._last is not None:
            tail = self._last.text[-65_536:].split(b"\n")[-_STAMPED_LINES:]
            self.last_time_us = next(self._times(tail[::-1]), self.last_time_us)
        found = []
        for candidate in self._candidates:
            format = candidate.reader.format
            for name, value in format.found.items():
                candidate.book.facts.learn(self.source.name, **{name: value})
            lanes = [lane for lane in candidate.reader.lanes if lane.length]
            format.warnings.clear()
            for lane in lanes:
                format.settle(lane)
            book = candidate.book
            if lanes or book.marks or book.facts.places:
                found.append(FormatContent(format.name, lanes, list(book.marks), book.facts, list(format.warnings)))
        self._count_lines()
        return found

    def _count_lines(self) -> None:
        best = max(self._candidates, key=lambda one: one.reader.step_lines, default=None)
        source = self.source
        source.bytes, source.lines = self._blocks.bytes, self._blocks.lines
        source.unfinished_lines = self._blocks.unfinished
        source.damaged_lines = self._blocks.overlong
        useful = 0
        if best is not None:
            source.damaged_lines += best.reader.damaged
            useful = best.reader.step_lines + best.book.lines
        source.lines_passed_over = max(0, source.lines - useful)


@dataclass(slots=True)
class SourceContent:
    """One source that was read to its end."""

    source: LogSource
    found: list[FormatContent]
    stamps: Stamps
    first_time_us: int | None = None
    last_time_us: int | None = None
    trouble: str | None = None
    """Why its compressed data ended before their end."""


def read_source(file: LogFile, number: int, stream: BinaryIO, zone: tzinfo | None, only: str | None) -> SourceContent:
    """Read a source of any kind. Raises OSError."""
    head = stream.read(BLOCK_BYTES)
    if only in (None, tensorboard.NAME) and tensorboard.looks_like(head):
        return _read_events(file, number, _Again(head, stream))
    if only in (None, hf_trainer_state.NAME) and hf_trainer_state.looks_like(head):
        return _read_state(file, number, _Again(head, stream))
    if b"\0" in head[:_BINARY_BYTES]:
        source = LogSource(file.name, None, used=False, note="binary: passed over", bytes=len(head))
        return SourceContent(source, [], Stamps(zone))
    reading = TextSourceReader(file, number, zone, only)
    while head:
        reading.feed(head)
        head = stream.read(BLOCK_BYTES)
    reading.finish()
    found = reading.results()
    return SourceContent(reading.source, found, reading.stamps, reading.first_time_us, reading.last_time_us)


class _Again:
    """A stream whose first bytes were read already."""

    def __init__(self, head: bytes, stream: BinaryIO) -> None:
        self._head = head
        self._stream = stream

    def read(self, count: int = -1) -> bytes:
        if not self._head:
            return self._stream.read(count)
        taken, self._head = (self._head, b"") if count < 0 else (self._head[:count], self._head[count:])
        return taken + self._stream.read() if count < 0 else taken


def _read_events(file: LogFile, number: int, stream: _Again) -> SourceContent:
    events = tensorboard.EventFile(Lanes(number))
    events.read(stream)
    source = LogSource(file.name, tensorboard.NAME, bytes=events.bytes, lines=events.records)
    stamps = Stamps()
    stamps.zoned = True
    warnings = [f"{file.name}: reading ended there: {events.trouble}"] if events.trouble else []
    source.damaged_lines = int(events.trouble is not None)
    found = FormatContent(tensorboard.NAME, list(events.lanes), [], LogFacts(), warnings)
    return SourceContent(source, [found], stamps, events.first_time_us, events.last_time_us)


def _read_state(file: LogFile, number: int, stream: _Again) -> SourceContent:
    state = hf_trainer_state.TrainerState(file.name, Lanes(number))
    state.read(stream)
    source = LogSource(file.name, hf_trainer_state.NAME, bytes=state.bytes, lines=state.records)
    source.unfinished_lines = int(not state.complete)
    found = FormatContent(hf_trainer_state.NAME, list(state.lanes), state.marks, state.facts)
    return SourceContent(source, [found], Stamps())
