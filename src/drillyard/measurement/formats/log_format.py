"""Log formats, and the reader for the step lines of a text log.

A `TextFormat` parses one line with slow, general rules and returns a `StepPattern`: where the
step's text begins on the line, a pattern whose groups are the values, and how these become columns.
With the shape of the line's prefix (loglines/prefixes.py) that is a `_Layout`: one compiled pattern
for the whole line. The next lines are matched against it one after the other; where no step line
follows, the next one is found by a literal that all step lines of the format have. A line that no
known layout matches goes through the slow rules again and may add a layout.

Cost: 2 to 6 microseconds a step line; text without step lines is searched at gigabytes a second.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from drillyard.loglines.blocks import LineBlock, Readable, line_ends
from drillyard.loglines.prefixes import LineOrigins, Origin, PrefixShape, parse_origin, shape_of
from drillyard.loglines.stamps import Stamps
from drillyard.measurement.formats.line_rules import LineRule
from drillyard.measurement.formats.values import (
    COMMA_NUMBER,
    DECIMAL_COMMA,
    Columns,
    MatchedLines,
    Values,
)
from drillyard.measurement.formats.values import NUMBER as NUMBER
from drillyard.measurement.lanes import Lane, Lanes
from drillyard.measurement.parsed_log import NO_TIME, LogEvent, LogFacts

ENDS: Final = rb"(?=[\s|\]}]|,(?!\d)|\Z)"
"""End of a complete number: a line cut inside a number, or at a decimal comma, is no step line."""

LARGEST_STEP: Final = 2**53
_MOST_LAYOUTS: Final = 48
_MOST_LEARNED: Final = 2_000
"""Kinds of step lines in one source; each takes about a millisecond to learn. A run has fewer than
50."""
_LONGEST_PREFIX: Final = 4096
"""Launchers and loggers write less than 500 bytes before a message."""


class LogFormat(ABC):
    """A log format. An instance reads one source and may keep state between its lines.

    Built-in formats are listed in __init__.py; other distributions register theirs as entry points
    of the group `drillyard.log_formats`, named as `name` is.
    """

    name: ClassVar[str]
    """For `--framework` and JSON."""
    title: ClassVar[str]
    """For people."""
    preference: ClassVar[int] = 1000
    """Rank among formats: a run logged in several takes its steps from the one with the lowest
    number. Formats with all digits and their own times come first (10), progress bars last
    (120)."""
    windowed: ClassVar[bool] = False
    """Each line is a mean over the steps since the previous line."""
    yields_to: ClassVar[str] = ""
    """Name of the format from which a run logged in both takes its steps, however few."""
    clock_restarts: ClassVar[bool] = False
    """`elapsed_seconds` restart with each start of the ranks, and only then (NeMo 1: with each
    epoch)."""


@dataclass(frozen=True, slots=True)
class StepPattern:
    """Pattern of a step line from offset `begin` on. `pattern` has plain groups only; `decode`
    turns the values, group by group, into columns; a `step` of -1 marks a row that is no step. It
    raises ValueError if a value is no number."""

    begin: int
    pattern: bytes
    decode: Callable[[Sequence[Values], MatchedLines], Columns]


class TextFormat(LogFormat):
    """A format of step lines."""

    anchor: ClassVar[bytes]
    """A literal that every step line has."""
    longest: ClassVar[int] = 16 << 10
    """Bytes of the longest step line: the longest known have 3,000."""
    rules: ClassVar[tuple[LineRule, ...]] = ()
    """Rules that read facts and events from other lines: see line_rules.py."""

    def __init_subclass__(cls) -> None:
        if missing := [
            name for name in ("name", "title", "anchor") if not getattr(cls, name, None)
        ]:
            raise TypeError(f"{cls.__name__} lacks {', '.join(missing)}")

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        """Facts (see parsed_log.LogFacts) that step lines carry."""
        self.warnings: list[str] = []

    @abstractmethod
    def step_pattern(self, line: bytes) -> StepPattern | None:
        """Return the pattern of this line; None if it is no step line."""

    def end_block(self, block: LineBlock) -> None:
        """Called when all step lines of a block were read."""

    def finish_lane(self, lane: Lane) -> None:
        """Called when all lines were read: correct what can only be known then."""


@dataclass(slots=True, kw_only=True)
class ParsedDocument:
    """Result of a `DocumentFormat` for one source."""

    lanes: Lanes
    events: list[tuple[Origin, LogEvent]] = field(default_factory=list)
    facts: LogFacts = field(default_factory=LogFacts)
    records: int = 0
    bytes: int = 0
    first_time_us: int | None = None
    last_time_us: int | None = None
    complete: bool = True
    """Whether the document was read to its end."""
    error: str | None = None
    """Reason why reading stopped at a damaged record."""


class DocumentFormat(LogFormat):
    """A format that is read as a whole: event files, JSON documents."""

    @staticmethod
    @abstractmethod
    def matches(head: bytes) -> bool:
        """Whether a file that begins with `head` has this format."""

    @abstractmethod
    def read(self, name: str, file: int, stream: Readable) -> ParsedDocument:
        """Read the whole source called `name`, number `file` of the run's sources."""


@dataclass(slots=True)
class _Layout:
    """A kind of step line with its prefix. `stamp`, `origins`: places of these among the groups;
    values follow them."""

    match: Callable[[bytes, int], re.Match[bytes] | None]
    shape: PrefixShape
    stamp: int | None
    origins: tuple[int, ...]
    first_value: int
    decode: Callable[[Sequence[Values], MatchedLines], Columns]


@dataclass(slots=True)
class StepLineReader:
    """Reads the step lines of one format from the blocks of one source into its lanes.

    `step_lines` counts them, `damaged` the lines that begin like one and cannot be read.
    """

    format: TextFormat
    lanes: Lanes
    stamps: Stamps
    step_lines: int = 0
    damaged: int = 0
    _compiled: int = 0
    _layouts: list[_Layout] = field(default_factory=list)
    _line_origins: LineOrigins = field(default_factory=LineOrigins)

    def feed(self, block: LineBlock) -> None:
        """Read all step lines of a block."""
        text, anchor = block.text, self.format.anchor
        rows: list[tuple[Any, ...]] = []
        begins: list[int] = []
        layout = self._layouts[0] if self._layouts else None
        at, end = text.find(anchor), -1
        while at >= 0:
            begin = text.rfind(b"\n", 0, at) + 1
            # Only then is it worth trying the line behind each step line.
            follows_step = begin == end
            found = layout.match(text, begin) if layout else None
            if found is None:
                other, found = self._layout_for(text, begin)
                if found is None:
                    at = text.find(anchor, text.find(b"\n", at))
                    continue
                if other is not layout:
                    self._convert(layout, block, begins, rows)
                    rows, begins, layout = [], [], other
            assert layout is not None
            match = layout.match
            while found is not None:
                rows.append(found.groups())
                begins.append(begin)
                begin = end = found.end()
                found = match(text, begin) if follows_step else None
            at = text.find(anchor, begin)
        self._convert(layout, block, begins, rows)
        self.format.end_block(block)

    def _layout_for(self, text: bytes, begin: int) -> tuple[_Layout | None, re.Match[bytes] | None]:
        """The layout of the line at `begin`, with its match: a known one, moved to the front, or a
        new one."""
        for index, layout in enumerate(self._layouts):
            match = layout.match(text, begin)
            if match is not None:
                self._layouts.insert(0, self._layouts.pop(index))
                return layout, match
        end = text.find(b"\n", begin)
        found = self._pattern_of(text[begin:end]) if end - begin <= self.format.longest else None
        if found is None:
            return None, None
        if found.begin > _LONGEST_PREFIX or self._compiled >= _MOST_LEARNED:
            self.damaged += 1
            return None, None
        self._compiled += 1
        prefix = text[begin : begin + found.begin]
        layout = _compile(shape_of(prefix, loose=self._compiled > _MOST_LAYOUTS), found)
        match = layout.match(text, begin)
        if match is None:
            self.damaged += 1
            return None, None
        self._layouts.insert(0, layout)
        del self._layouts[_MOST_LAYOUTS:]
        return layout, match

    def _pattern_of(self, line: bytes) -> StepPattern | None:
        if DECIMAL_COMMA.search(line) is None:
            return self.format.step_pattern(line)
        found = self.format.step_pattern(DECIMAL_COMMA.sub(b".", line))
        if found is None:
            return None
        return replace(found, pattern=found.pattern.replace(NUMBER, COMMA_NUMBER))

    def _convert(
        self, layout: _Layout | None, block: LineBlock, begins: list[int], rows: list[Any]
    ) -> None:
        """Convert rows of one layout and append them to their lanes; one by one where a value is no
        number."""
        if layout is None or not rows:
            return
        lines = block.line_numbers(begins)
        try:
            self._append(
                layout,
                list(zip(*rows, strict=True)),
                MatchedLines(block, begins, lines, self.stamps),
            )
        except (ValueError, OverflowError):
            for index, row in enumerate(rows):
                one = slice(index, index + 1)
                try:
                    self._append(
                        layout,
                        [(value,) for value in row],
                        MatchedLines(block, begins[one], lines[one], self.stamps),
                    )
                except (ValueError, OverflowError):
                    self.damaged += 1

    def _append(self, layout: _Layout, groups: Sequence[Any], place: MatchedLines) -> None:
        """Convert rows and distribute them over lanes by origin, without those that are no steps.

        A redrawn line has its prefix once, before its first drawing: the others inherit its origin,
        not its time. Raises ValueError or OverflowError, before anything is kept, if a value is no
        number.
        """
        columns = layout.decode(groups[layout.first_value :], place)
        columns["line"] = place.lines
        if layout.stamp is not None and "time_us" not in columns:
            assert layout.shape.style is not None
            times = self.stamps.column(layout.shape.style, groups[layout.stamp])
            if place.block.redrawn:
                times[_overdrawn(place.block, place.begins)] = NO_TIME
            columns["time_us"] = times
        self.step_lines += place.count
        steps = (columns["step"] >= 0) & (columns["step"] < LARGEST_STEP)
        keys: list[Any] = [()]
        if layout.origins:
            keys = list(zip(*(groups[index] for index in layout.origins), strict=True))
        elif place.block.redrawn:
            keys = self._line_origins.at(place.block, place.begins)
        codes = {key: code for code, key in enumerate(dict.fromkeys(keys))}
        lanes = [
            self.lanes.lane(
                key if isinstance(key, Origin) else parse_origin(layout.shape.parts, key)
            )
            for key in codes
        ]
        if len(lanes) == 1:
            append_rows(lanes[0], columns, None if steps.all() else steps)
            return
        code = np.fromiter(map(codes.__getitem__, keys), np.int64, place.count)
        rows = np.split(np.argsort(code, kind="stable"), np.cumsum(np.bincount(code))[:-1])
        for lane, chosen in zip(lanes, rows, strict=True):
            append_rows(lane, columns, chosen[steps[chosen]])


def _compile(shape: PrefixShape, found: StepPattern) -> _Layout:
    pattern = re.compile(rb"^" + shape.pattern + found.pattern + rb"[^\n]*+\n", re.MULTILINE)
    named = pattern.groupindex
    return _Layout(
        match=pattern.match,
        shape=shape,
        stamp=named["stamp"] - 1 if shape.style else None,
        origins=tuple(named[f"o{index}"] - 1 for index in range(len(shape.parts))),
        first_value=len(named),
        decode=found.decode,
    )


def append_rows(lane: Lane, columns: Columns, chosen: NDArray[Any] | None) -> None:
    """Append rows of columns to a lane: all of them, or those that a mask or an index chooses."""
    if chosen is not None:
        columns = {name: values[chosen] for name, values in columns.items()}
    if len(columns["step"]):
        lane.extend(len(columns["step"]), columns)


def _overdrawn(block: LineBlock, begins: Sequence[int]) -> NDArray[np.bool_]:
    """Find lines that were drawn over by others: the stamp before them is that of all drawings."""
    ends = line_ends(block.text)
    after = ends[np.searchsorted(ends, np.asarray(begins))]
    drawn: NDArray[np.bool_] = np.frombuffer(block.counted, np.uint8)[after] == ord("\r")
    return drawn
