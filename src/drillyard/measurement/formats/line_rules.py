"""Content of a log besides steps: facts about the run, and events (starts, checkpoints,
evaluations, failures).

Each format lists `LineRule`s: a literal to search for, a pattern for its line, and what to do with
it. A block is searched for all literals at once, at several gigabytes a second; only lines that
have one are matched, and their time stamp and rank are read as those of step lines are.
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
from drillyard.measurement.formats.values import number
from drillyard.measurement.parsed_log import LogEvent, LogEventKind, LogFacts

_MOST_EVENTS: Final = 20_000
_LONGEST_TEXT: Final = 500

Action = Callable[["RuleContext", "re.Match[bytes]"], None]


@dataclass(frozen=True, slots=True)
class LineRule:
    """Lines with `literal` that match `pattern` are handed to `action`."""

    literal: bytes
    pattern: bytes
    action: Action
    once: bool = False
    """It states something about the whole run: it is not searched for again, nor far into the
    log."""


class RuleSearch:
    """Searches blocks of one source for the lines of all rules, in one pass."""

    def __init__(self, rules: Iterable[LineRule]) -> None:
        self._look_for([(rule, re.compile(rule.pattern)) for rule in rules])

    def _look_for(self, rules: list[tuple[LineRule, re.Pattern[bytes]]]) -> None:
        self._rules = rules
        literals = list(dict.fromkeys(rule.literal for rule, _ in rules))
        # Of overlapping literals it finds the first only, but always one on a line that has any.
        # LeftmostFirst is the kind that is searched by vector instructions.
        self._search = BytesAhoCorasick(literals, matchkind=MatchKind.LeftmostFirst)

    def find(self, block: LineBlock) -> list[tuple[int, int, re.Match[bytes], Action]]:
        """Begin and end of lines that a rule matches, the match and the rule's action, in the order
        of the log."""
        text = block.text
        found: list[tuple[int, int, re.Match[bytes], Action]] = []
        matched: set[LineRule] = set()
        end = -1
        for _, at, _ in self._search.find_matches_as_indexes(text):
            if at < end:
                continue
            begin, end = block.line_at(at)
            for rule, pattern in self._rules:
                if (
                    text.find(rule.literal, begin, end) >= 0
                    and (match := pattern.search(text, begin, end)) is not None
                ):
                    found.append((begin, end, match, rule.action))
                    matched.add(rule)
        if any(rule.once for rule in matched):
            self._look_for(
                [pair for pair in self._rules if not pair[0].once or pair[0] not in matched]
            )
        return found

    def end_of_beginning(self) -> None:
        """Stop searching for what is stated at the beginning only."""
        self._look_for([pair for pair in self._rules if not pair[0].once])


@dataclass(slots=True)
class RuleContext:
    """Collects facts and events of one source. `lines` counts the lines that were of use."""

    name: str
    file: int
    stamps: Stamps
    search: RuleSearch
    facts: LogFacts = field(default_factory=LogFacts)
    events: list[tuple[Origin, LogEvent]] = field(default_factory=list)
    lines: int = 0
    line: bytes = b""
    """The current line."""
    _begin: int = 0
    """Offset at which the line's text begins, after the launcher's prefix."""
    _number: int = 0
    _time_us: int | None = None
    _origin: Origin = NOWHERE

    def read(self, block: LineBlock) -> None:
        """Act on all lines of a block that a rule matches."""
        for begin, end, match, action in self.search.find(block):
            self.line, self._number = block.text[begin:end], int(block.line_numbers([begin])[0])
            self._time_us, self._origin, self._begin = line_time(self.line, self.stamps)
            try:
                action(self, match)
            except ValueError:
                # What should be a number is none: the line is ignored.
                continue
            self.lines += 1

    def learn(self, **facts: Any) -> None:
        """Take over facts from the current line."""
        self.facts.learn(f"{self.name}:{self._number}", **facts)

    def add(self, kind: LogEventKind, **fields: Any) -> None:
        """An event at the current line."""
        if len(self.events) < _MOST_EVENTS:
            text = self.line[self._begin :].decode("utf-8", "replace").strip()[:_LONGEST_TEXT]
            time_us = fields.pop("time_us", self._time_us)
            event = LogEvent(
                kind, time_us, self.file, self._number, rank=self._origin.rank, text=text, **fields
            )
            self.events.append((self._origin, event))

    def begin_attempt(self, match: re.Match[bytes]) -> None:
        """The current line is one that every start of the ranks prints once; named groups are
        facts."""
        self.add("round_start")
        self.learn_groups(match)

    def learn_groups(self, match: re.Match[bytes]) -> None:
        """The pattern's named groups are facts."""
        self.learn(**{name: _FACT_READERS[name](text) for name, text in match.groupdict().items()})


EVENT_LOSS: Final = rb"(?P<loss>[-+]?(?:\.?\d|nan|inf)[-+.\da-zA-Z]*(?:,\d+)?)"
"""The loss of an event, as a group: finite or not."""


def fact_rule(literal: bytes, pattern: bytes) -> LineRule:
    """A line that states facts of the whole run: the named groups of `pattern`."""
    return LineRule(literal, pattern, RuleContext.learn_groups, once=True)


def event_rule(kind: LogEventKind, literal: bytes, pattern: bytes = b"") -> LineRule:
    """A line that is an event. The groups `step`, `seconds` and `loss` of the pattern (by default
    the literal) are the event's."""

    def action(context: RuleContext, match: re.Match[bytes]) -> None:
        named = match.groupdict()
        fields: dict[str, Any] = {}
        if named.get("seconds"):
            fields["seconds"] = float(named["seconds"])
        if named.get("step"):
            fields["step"] = int(named["step"])
        if "loss" in named:
            fields["values"] = {"loss": number(named["loss"])}
        context.add(kind, **fields)

    return LineRule(literal, pattern or re.escape(literal), action)


def line_time(line: bytes, stamps: Stamps) -> tuple[int | None, Origin, int]:
    """The time and origin of a line by its prefix, and where its text begins."""
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
    fact.name: _READERS[kind]
    for fact in fields(LogFacts)
    if (kind := str(fact.type).partition(" ")[0]) in _READERS
}


LAUNCHER_RULES: Final = (
    # Of torch elastic, the same under every framework.
    LineRule(
        b"(exitcode: ",
        rb"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<rank>\d+)",
        lambda context, match: context.add("failure", values={"exit_code": int(match["code"])}),
    ),
    event_rule("restart", b"will restart worker group"),
    event_rule("failure", b"DUE TO ", rb"CANCELLED AT \S+ DUE TO [A-Z ]+"),
)
"""Rules for output of launchers and schedulers, whatever the framework."""
