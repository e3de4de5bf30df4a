"""Reading text logs fast: a format tells once how a line like this one looks, then C code matches all lines like it.

The idea: step lines of one run differ in their numbers only. A format looks at one line with its slow, general rules
and returns a `StepPattern`: where the message begins on the line, a pattern whose groups are the values, and how these
become columns. Together with the shape of the line's prefix (loglines/prefixes.py) that is a `Layout`: one compiled
pattern for the whole line. The next lines are matched one after the other; where no step line follows, the next one is
searched by a literal that all step lines of the format have. Values are converted column by column. A line that no
known layout matches is looked at slowly again and may add a layout. Blocks of nothing but step lines are read as a
matrix of characters where their numbers are printed alike (grid.py).

Cost: 1 to 3 microseconds a step line; text without step lines is searched at gigabytes a second.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from drillyard.loglines.blocks import LineBlock, count_lines, line_ends
from drillyard.loglines.prefixes import LineOrigins, Origin, PrefixShape, parse_origin, shape_of
from drillyard.loglines.stamps import Stamps
from drillyard.measurement.formats.grid import Cells, Templates
from drillyard.measurement.formats.values import Columns, Values, WholeLines
from drillyard.measurement.lanes import Lane, Lanes
from drillyard.measurement.parsed_log import NO_TIME

if TYPE_CHECKING:
    from drillyard.measurement.formats.line_rules import LineRule

NUMBER: Final = rb"([-+.0-9a-zA-Z]{1,64}+)"
"""What may be a number; `float` decides (nan, inf, Infinity and e-notation are). A line where it refuses is damaged."""
ENDS: Final = rb"(?=[\s,|\]}]|\Z)"
"""What comes after a whole number: a line torn inside a number is no step line."""

LARGEST_STEP: Final = 2**53
_MOST_LAYOUTS: Final = 48
_MOST_LEARNED: Final = 2_000
"""Kinds of step lines in one source; each takes about a millisecond to learn. A run has fewer than 50."""
_LONGEST_PREFIX: Final = 4096
"""Launchers and loggers write less than 500 bytes before a message; what is learned from a line costs time."""


@dataclass(frozen=True, slots=True)
class MatchedLines:
    """The lines whose values are converted: their block, where they begin in it, numbers, and what reads times."""

    block: LineBlock
    begins: Sequence[int] | None
    """None when they are all lines of the block."""
    lines: NDArray[np.int64]
    stamps: Stamps

    @property
    def count(self) -> int:
        return len(self.lines)


@dataclass(frozen=True, slots=True)
class StepPattern:
    """How a step line looks from `begin` on. `pattern` has plain groups only; `decode` turns their values, group by
    group, into columns; rows whose `step` it gives as -1 are no steps. It raises ValueError for what is no number."""

    begin: int
    pattern: bytes
    decode: Callable[[Sequence[Values], MatchedLines], Columns]
    opening: bytes | None = None
    """Where the message is this and then one group up to the end of its line: what it is. `decode` raises ValueError
    for a group that is not as the pattern wants it."""


class TextFormat:
    """A format of step lines. An instance reads one source: it may remember what went before."""

    name: ClassVar[str]
    anchor: ClassVar[bytes]
    """A literal that every step line has."""
    longest: ClassVar[int] = 16 << 10
    """Bytes of the longest line that is taken for a step line: the longest known have 3,000."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        """Facts (see records.Facts) that step lines carry."""
        self.warnings: list[str] = []

    def message(self, line: bytes) -> StepPattern | None:
        """How this line looks; None when it is no step line."""
        raise NotImplementedError

    def notes(self) -> tuple[LineRule, ...]:
        """What else the log says: see line_rules.py."""
        return ()

    def end_block(self, block: LineBlock) -> None:
        """All step lines of a block have been read."""

    def settle(self, lane: Lane) -> None:
        """All lines have been read: mend what only the whole lane tells."""


@dataclass(slots=True)
class _Layout:
    match: Callable[[bytes, int], re.Match[bytes] | None]
    find_all: Callable[[bytes], list[Any]]
    templates: Templates
    opening: bytes | None
    """What every line has before its only group, which goes up to the line's end."""
    groups: int
    shape: PrefixShape
    stamp: int | None
    origins: tuple[int, ...]
    """Positions of the stamp and of the origin's parts among the groups."""
    first_value: int
    decode: Callable[[Sequence[Values], MatchedLines], Columns]

    def groups_of(self, text: bytes, lines: int) -> Sequence[Any] | None:
        """The groups of `lines` lines that all have this layout; None if `text` is not such lines."""
        if self.opening is not None:
            whole = WholeLines.behind(self.opening, text, lines) if self.opening else WholeLines(text, lines)
            return None if whole is None else [whole]
        if (cells := self.templates.read(text, lines)) is not None:
            return cells
        rows = self.find_all(text)
        if len(rows) != lines:
            return None
        return list(zip(*rows, strict=True)) if self.groups > 1 else [rows]


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
    all_steps: bool = False
    """Whether the last block had nothing but step lines."""
    _dense: bool = False
    """Whether nearly all lines of the last block were step lines."""
    _compiled: int = 0
    _layouts: list[_Layout] = field(default_factory=list)
    _line_origins: LineOrigins = field(default_factory=LineOrigins)
    _origins: dict[tuple[tuple[str, ...], tuple[bytes, ...]], Origin] = field(default_factory=dict)

    def feed(self, block: LineBlock) -> None:
        """Read all step lines of a block."""
        self.all_steps = self._dense and self._feed_dense(block)
        if not self.all_steps:
            self._feed_sparse(block)
            self.format.end_block(block)

    def _feed_dense(self, block: LineBlock) -> bool:
        """Read a block all of whose lines have the last layout, in one go; False if it is not such a block."""
        layout = self._layouts[0]
        begins = None
        lines = np.arange(block.first_line, block.first_line + block.lines)
        if block.redrawn:
            begins = np.append(0, line_ends(block.text)[:-1] + 1).tolist()
            lines = line_numbers(block, begins)
        groups = layout.groups_of(block.text, len(lines))
        if groups is None:
            return False
        try:
            self._read(layout, groups, MatchedLines(block, begins, lines, self.stamps))
        except (ValueError, OverflowError):
            return False
        return True

    def _feed_sparse(self, block: LineBlock) -> None:
        text, anchor = block.text, self.format.anchor
        rows: list[tuple[Any, ...]] = []
        begins: list[int] = []
        layout = self._layouts[0] if self._layouts else None
        before = self.step_lines
        at = text.find(anchor)
        while at >= 0:
            begin = text.rfind(b"\n", 0, at) + 1
            found = layout.match(text, begin) if layout else None
            if found is None:
                other, found = self._layout_for(text, begin)
                if found is None:
                    at = text.find(anchor, text.find(b"\n", at))
                    continue
                if other is not layout:
                    self._flush(layout, block, begins, rows)
                    rows, begins, layout = [], [], other
            assert layout is not None
            match = layout.match
            while found is not None:
                rows.append(found.groups())
                begins.append(begin)
                begin = found.end()
                found = match(text, begin)
            at = text.find(anchor, begin)
        self._flush(layout, block, begins, rows)
        lines = count_lines(text) if block.redrawn else block.lines
        self._dense = self.step_lines - before > 0.99 * lines

    def _layout_for(self, text: bytes, begin: int) -> tuple[_Layout | None, re.Match[bytes] | None]:
        """The layout of the line at `begin`, with its match: one of those known, now first in order, or a new one."""
        for index, layout in enumerate(self._layouts):
            match = layout.match(text, begin)
            if match is not None:
                self._layouts.insert(0, self._layouts.pop(index))
                return layout, match
        end = text.find(b"\n", begin)
        message = self.format.message(text[begin:end]) if end - begin <= self.format.longest else None
        if message is None:
            return None, None
        if message.begin > _LONGEST_PREFIX or self._compiled >= _MOST_LEARNED:
            self.damaged += 1
            return None, None
        line = text[begin:end]
        self._compiled += 1
        layout = _compile(shape_of(line[: message.begin], loose=self._compiled > _MOST_LAYOUTS), message)
        match = layout.match(text, begin)
        if match is None:
            self.damaged += 1
            return None, None
        self._layouts.insert(0, layout)
        del self._layouts[_MOST_LAYOUTS:]
        return layout, match

    def _flush(self, layout: _Layout | None, block: LineBlock, begins: list[int], rows: list[tuple[Any, ...]]) -> None:
        """Convert rows of one layout and append them to their lanes."""
        if layout is None or not rows:
            return
        place = MatchedLines(block, begins, line_numbers(block, begins), self.stamps)
        try:
            self._read(layout, list(zip(*rows, strict=True)), place)
        except (ValueError, OverflowError):
            if len(rows) == 1:
                self.damaged += 1
                return
            for begin, row in zip(begins, rows, strict=True):
                self._flush(layout, block, [begin], [row])

    def _read(self, layout: _Layout, groups: Sequence[Any], place: MatchedLines) -> None:
        """Convert the groups of rows. Raises ValueError or OverflowError, before anything is kept, if one
        holds what is no number."""
        columns = layout.decode(groups[layout.first_value :], place)
        columns["line"] = place.lines
        if layout.stamp is not None and "time_us" not in columns:
            style = layout.shape.style
            assert style is not None
            stamps: Any = groups[layout.stamp]
            times = self.stamps.column(style, stamps.fixed_width() if isinstance(stamps, Cells) else stamps)
            if place.block.redrawn and place.begins is not None:
                times[_drawn_over(place.block, place.begins)] = NO_TIME
            columns["time_us"] = times
        self.step_lines += place.count
        self._append(layout, groups, columns, place)

    def _append(self, layout: _Layout, groups: Sequence[Any], columns: Columns, place: MatchedLines) -> None:
        """Distribute rows over lanes by their origin, leaving out those that are no steps.

        A redrawn line has its prefix once, before its first drawing: the others inherit its origin, not its time.
        """
        steps = (columns["step"] >= 0) & (columns["step"] < LARGEST_STEP)
        keys: list[Any] = []
        named: Callable[[Any], Origin] = partial(self._origin, layout)
        if layout.origins:
            keys = list(zip(*(groups[index] for index in layout.origins), strict=True))
        elif place.block.redrawn and place.begins is not None:
            keys, named = self._line_origins.at(place.block, place.begins), _itself
        codes = {key: code for code, key in enumerate(dict.fromkeys(keys or [()]))}
        if len(codes) == 1:
            (key,) = codes
            append_rows(self.lanes.lane(named(key)), columns, None if steps.all() else steps)
            return
        code = np.fromiter(map(codes.__getitem__, keys), np.int64, place.count)
        order = np.argsort(code, kind="stable")
        ends = np.searchsorted(code[order], np.arange(1, len(codes) + 1))
        begin = 0
        for key, end in zip(codes, ends, strict=True):
            chosen = order[begin:end]
            append_rows(self.lanes.lane(named(key)), columns, chosen[steps[chosen]])
            begin = end

    def _origin(self, layout: _Layout, values: tuple[bytes, ...]) -> Origin:
        key = (layout.shape.parts, values)
        if key not in self._origins:
            self._origins[key] = parse_origin(layout.shape.parts, values)
        return self._origins[key]


def _compile(shape: PrefixShape, message: StepPattern) -> _Layout:
    pattern = re.compile(rb"^" + shape.pattern + message.pattern + rb"[^\n]*+\n", re.MULTILINE)
    named = pattern.groupindex
    return _Layout(
        match=pattern.match,
        find_all=pattern.findall,
        templates=Templates(pattern.match),
        opening=None if shape.pattern else message.opening,
        groups=pattern.groups,
        shape=shape,
        stamp=named["stamp"] - 1 if shape.style else None,
        origins=tuple(named[f"o{index}"] - 1 for index in range(len(shape.parts))),
        first_value=len(named),
        decode=message.decode,
    )


def append_rows(lane: Lane, columns: Columns, chosen: NDArray[Any] | None) -> None:
    """Append rows of columns (all of them, or those that a mask or an index chooses) to a lane."""
    if chosen is not None:
        columns = {name: values[chosen] for name, values in columns.items()}
    if len(columns["step"]):
        lane.extend(len(columns["step"]), columns)


def _itself(origin: Origin) -> Origin:
    return origin


def _drawn_over(block: LineBlock, begins: Sequence[int]) -> NDArray[np.bool_]:
    """Which lines were drawn over by others: the stamp before them is that of all drawings."""
    ends = line_ends(block.text)
    after = ends[np.searchsorted(ends, np.asarray(begins))]
    drawn: NDArray[np.bool_] = np.frombuffer(block.counted, np.uint8)[after] == ord("\r")
    return drawn


def line_numbers(block: LineBlock, begins: Sequence[int]) -> NDArray[np.int64]:
    """The numbers of the lines that begin at the given offsets of a block, in order."""
    if len(begins) < 64:
        numbers, since, line = [], 0, block.first_line
        for begin in begins:
            line += block.counted.count(b"\n", since, begin)
            since = begin
            numbers.append(line)
        return np.array(numbers, np.int64)
    return np.searchsorted(line_ends(block.counted), np.asarray(begins)) + block.first_line


def times_column(times: Sequence[int | None]) -> NDArray[np.int64]:
    """Times with NO_TIME for those that are None."""
    try:
        return np.array(times, np.int64)
    except TypeError:
        return np.array([NO_TIME if time is None else time for time in times], np.int64)
