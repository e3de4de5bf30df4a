"""What a log says besides steps: facts about the run, and marks (starts, checkpoints, evaluations, failures).

The idea: each format lists `LineRule`s: a literal to search for, a pattern for its line, and what to do with it. A
block is
searched for all literals at once, at several gigabytes a second; only lines that have one are looked at, and their time
stamp and rank are read as those of step lines are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Final

from ahocorasick_rs import BytesAhoCorasick, MatchKind

from drillyard.loglines.blocks import LineBlock
from drillyard.loglines.prefixes import NOWHERE, Origin, split_prefix
from drillyard.loglines.stamps import Stamps, find_stamp
from drillyard.measurement.parsed_log import LogFacts, Mark, MarkKind

_MOST_MARKS: Final = 20_000
_LONGEST_TEXT: Final = 500

Action = Callable[["RuleContext", "re.Match[bytes]"], None]


@dataclass(frozen=True, slots=True)
class LineRule:
    """Lines with `literal` that match `pattern` are handed to `action`."""

    literal: bytes
    pattern: bytes
    action: Action
    once: bool = False
    """It says something about the whole run: nobody looks for it again, nor far into the log."""


class RuleSearch:
    """The notes that are looked for in one source, all of them in one pass over a block."""

    def __init__(self, notes: Iterable[LineRule]) -> None:
        self._look_for([(note, re.compile(note.pattern)) for note in notes])

    def _look_for(self, notes: list[tuple[LineRule, re.Pattern[bytes]]]) -> None:
        self._notes = notes
        literals = list(dict.fromkeys(note.literal for note, _ in notes))
        # Of overlapping literals it finds the first only, but always one on a line that has any. This kind of match
        # is the one that is searched by vector instructions.
        self._search = BytesAhoCorasick(literals, matchkind=MatchKind.LeftmostFirst)

    def find(self, block: LineBlock) -> list[tuple[int, int, re.Match[bytes], Action]]:
        """Begin and end of lines with a note, their match and action, in the order of the log."""
        text = block.text
        found: list[tuple[int, int, re.Match[bytes], Action]] = []
        told: set[LineRule] = set()
        end = -1
        for _, at, _ in self._search.find_matches_as_indexes(text):
            if at < end:
                continue
            begin, end = block.line_at(at)
            for note, pattern in self._notes:
                if text.find(note.literal, begin, end) < 0:
                    continue
                match = pattern.search(text, begin, end)
                if match is not None:
                    found.append((begin, end, match, note.action))
                    told.add(note)
        if any(note.once for note in told):
            self._look_for([pair for pair in self._notes if not pair[0].once or pair[0] not in told])
        return found

    def end_of_beginning(self) -> None:
        """Look no more for what is only said at the beginning."""
        self._look_for([pair for pair in self._notes if not pair[0].once])


@dataclass(slots=True)
class RuleContext:
    """Collects facts and marks of one source. `lines` counts the lines that were of use."""

    name: str
    file: int
    stamps: Stamps
    facts: LogFacts = field(default_factory=LogFacts)
    marks: list[tuple[Origin, Mark]] = field(default_factory=list)
    lines: int = 0
    line: bytes = b""
    """The current line."""
    _begin: int = 0
    """Where the line's text begins, behind the launcher's prefix."""
    _number: int = 0
    _time_us: int | None = None
    _origin: Origin = NOWHERE

    def read(self, block: LineBlock, search: RuleSearch) -> None:
        """Act upon all lines of a block that have a note."""
        found = search.find(block)
        since, line = 0, block.first_line
        for begin, end, match, action in found:
            line += block.counted.count(b"\n", since, begin)
            since = begin
            self.line, self._number = block.text[begin:end], line
            self._time_us, self._origin, self._begin = line_time(self.line, self.stamps)
            try:
                action(self, match)
            except ValueError:
                # What stands in a number's place is none: the line says nothing.
                continue
            self.lines += 1

    def learn(self, **facts: Any) -> None:
        """Take over facts from the current line."""
        self.facts.learn(f"{self.name}:{self._number}", **facts)

    def add(self, kind: MarkKind, match: re.Match[bytes], **fields: Any) -> None:
        """A mark at the current line."""
        if len(self.marks) < _MOST_MARKS:
            text = self.line[self._begin :].decode("utf-8", "replace").strip()[:_LONGEST_TEXT]
            rank = self._origin.rank
            fields.setdefault("text", text)
            time_us = fields.pop("time_us", self._time_us)
            self.marks.append((self._origin, Mark(kind, time_us, self.file, self._number, rank=rank, **fields)))

    def begin_round(self, match: re.Match[bytes]) -> None:
        """The current line is one that every start of the ranks prints once; named groups are facts."""
        self.add("round_start", match)
        self.learn_groups(match)

    def learn_groups(self, match: re.Match[bytes]) -> None:
        """The pattern's named groups are facts."""
        self.learn(**{name: _FACT_READERS[name](text) for name, text in match.groupdict().items()})

    def evaluation(self, match: re.Match[bytes]) -> None:
        """The current line has the `loss` of an evaluation, after `step` steps if it says so."""
        step = match.groupdict().get("step")
        self.add("evaluation", match, step=int(step) if step else None, values={"loss": float(match["loss"])})

    @staticmethod
    def mark(kind: MarkKind) -> Action:
        """An action that marks its line; the groups `step` and `seconds` of the pattern are the mark's."""

        def action(context: RuleContext, match: re.Match[bytes]) -> None:
            fields: dict[str, Any] = {}
            named = match.groupdict()
            if named.get("seconds"):
                fields["seconds"] = float(named["seconds"])
            if named.get("step"):
                fields["step"] = int(named["step"])
            context.add(kind, match, **fields)

        return action


def line_time(line: bytes, stamps: Stamps) -> tuple[int | None, Origin, int]:
    """When and where a line was written, as its prefix says, and where what was written begins."""
    shape, stamp, where, end = split_prefix(line)
    if stamp is not None and shape.style is not None:
        return stamps.convert(shape.style, [stamp])[0], where, end
    found = find_stamp(line[end : end + 200])
    if found is None:
        return None, where, end
    style, begin, stop = found
    return stamps.convert(style, [line[end + begin : end + stop]])[0], where, end


_SUFFIXES: Final = {b"K": 1e3, b"M": 1e6, b"B": 1e9, b"T": 1e12}


def parse_count_suffix(text: bytes) -> float:
    """A count in the field's short form: `70.55B`, `8,030,261,248`."""
    plain = text.replace(b",", b"")
    scale = _SUFFIXES.get(plain[-1:].upper())
    return float(plain[:-1]) * scale if scale else float(plain)


_READERS: Final[dict[str, Callable[[bytes], Any]]] = {
    "str": lambda text: text.decode("utf-8", "replace"),
    "int": lambda text: int(text.replace(b",", b"")),
    "float": parse_count_suffix,
}
_FACT_READERS: Final = {
    fact.name: _READERS[kind] for fact in fields(LogFacts) if (kind := str(fact.type).partition(" ")[0]) in _READERS
}


LAUNCHER_RULES: Final = (
    # torch elastic's own words, the same under every framework.
    LineRule(
        b"(exitcode: ",
        rb"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<rank>\d+)",
        lambda context, match: context.add("failure", match, values={"exit_code": int(match["code"])}),
    ),
    LineRule(b"will restart worker group", rb"will restart worker group", RuleContext.mark("restart")),
    LineRule(b"DUE TO ", rb"CANCELLED AT \S+ DUE TO [A-Z ]+", RuleContext.mark("failure")),
)
"""Notes of launchers and schedulers, whatever the framework."""
