"""Output of nccl-tests (and rccl-tests, which prints the same): tables of text, and the JSON of -J.

The text may have a launcher's prefixes, NCCL's own lines in between, and several programs one after
the other. A table begins with the line of its columns' names and ends with the mean below it, or
with the program's name where that stood above. What is read, and what is refused, follows
src/util.cu of nccl-tests: getFloatStr (digits), writeBenchmarkLinePreamble and -Body (columns),
writeResultFooter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from drillyard.acceptance.parsers.collective_table import (
    SHAPES,
    TYPE_BYTES,
    CollectiveTable,
    PrintedNumber,
    PrintedTiming,
    TableRow,
    checked,
)
from drillyard.loglines.blocks import without_colours
from drillyard.loglines.prefixes import Origin, split_prefix

LONGEST_LINE: Final = 4096
_MOST_PROBLEMS: Final = 20

_NUMBER: Final = re.compile(r"(?:0|[1-9]\d{0,17})(?:\.\d+)?")
_TWO_DECIMALS_BELOW: Final = {"time": 100.0, "algbw": 1000.0, "busbw": 1000.0}
_ONE_DECIMAL_BELOW: Final = 10_000.0
"""Numbers of a row below these have two decimals and one, in every version, and none more than two:
getFloatStr, and before it `%7.2f`, `%7.1f` and `%7.0f` of times and `%6.2f` of bandwidths."""
_E_NOTATION: Final = re.compile(r"\d+(?:\.\d+)?[eE][-+]?\d+")
_ROW_START: Final = re.compile(r"\s*\d+\s+\d+\s+[a-z]\w*(?:\s|$)")
_RANK: Final = re.compile(
    r"#\s*Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device"
)
_PROGRAM: Final = re.compile(rf"\b({'|'.join(SHAPES)})_perf\b")
_STARTING: Final = re.compile(r"#\s*Collective test starting:\s*(\S+)")
_CONCLUDED: Final = re.compile(r"#\s*Collective test concluded:\s*(\S+)")
_STEP: Final = re.compile(
    r"#\s*nThread \d+ nGpus \d+ minBytes (\d+) maxBytes (\d+) step: (\d+)\((factor|bytes)\)"
)
_OUT_OF_BOUNDS: Final = re.compile(r"#\s*Out of bounds values\s*:\s*(\d+)\s+(OK|FAILED)\s*$")
_AVERAGE: Final = re.compile(r"#\s*Avg bus bandwidth\s*:\s*(\S+)(?:\s+(?:OK|FAILED))?\s*$")
_FIGURES: Final = ("time", "algbw", "busbw", "#wrong") * 2
_TIMESTAMP: Final = re.compile(r"\d{4}-\d\d-\d\d")


def parse_nccl_tests(text: bytes) -> list[CollectiveTable]:
    """All tables in the output, in order. Rows outside of a table are a table with a problem; an
    output without either gives none."""
    if text.lstrip()[:1] == b"{":
        return [_json_table(text)]
    streams: dict[Origin, _Stream] = {}
    order: list[_Table] = []
    for raw in without_colours(text).splitlines():
        line = raw[:LONGEST_LINE]
        _, _, origin, begin = split_prefix(line)
        message = line[begin:].decode("utf-8", "replace")
        streams.setdefault(origin, _Stream(order)).feed(message)
    for stream in streams.values():
        stream.finish()
    return [table.result() for table in order]


class _Table:
    """A table while it is read."""

    def __init__(self, columns: Sequence[str], stream: _Stream) -> None:
        self.columns = list(columns)
        self.program = stream.starting or stream.program
        self.must_conclude = stream.starting is not None
        self.rank_hosts = dict(stream.rank_hosts)
        self.groups = set(stream.groups)
        self.step = stream.step
        self.rows: list[TableRow] = []
        self.problems: list[str] = []
        self.average: PrintedNumber | None = None
        self.out_of_bounds: int | None = None
        self.footer = False

    def result(self) -> CollectiveTable:
        """The table, checked."""
        named = _PROGRAM.fullmatch(self.program or "")
        collective = named[1] if named else None
        if self.program is not None and named is None:
            self.problems.append(f"{self.program} is not a program of nccl-tests that is known")
        ranks = len(self.rank_hosts) or None
        if ranks is not None and set(self.rank_hosts) != set(range(ranks)):
            self.problems.append("lines of ranks are missing")
        if len(self.groups) > 1:
            self.problems.append("several groups ran at the same time (NCCL_TESTS_SPLIT)")
        factor = None
        if self.step is not None:
            least, most, step, kind = self.step
            factor = float(step) if kind == "factor" else None
            self.problems += self._range_problems(least, most, step, kind)
        table = CollectiveTable(
            collective=collective,
            ranks=ranks,
            hosts=tuple(dict.fromkeys(self.rank_hosts[rank] for rank in sorted(self.rank_hosts))),
            rows=tuple(self.rows),
            problems=tuple(self.problems),
        )
        found = checked(
            table, average=self.average, out_of_bounds=self.out_of_bounds, factor=factor
        )
        return _bounded(found)

    def _range_problems(self, least: int, most: int, step: int, kind: str) -> Iterator[str]:
        sizes = [row.bytes for row in self.rows]
        if not sizes:
            return
        following = sizes[-1] * step if kind == "factor" else sizes[-1] + step
        if following <= most:
            yield f"ends at {sizes[-1]:,} bytes, and {most:,} were asked for"
        if sizes[0] > least * 1.01 and sizes[0] > _ROUNDED_BELOW:
            yield f"begins at {sizes[0]:,} bytes, and {least:,} were asked for"


_ROUNDED_BELOW: Final = 1 << 20
"""Smaller sizes are rounded to what the ranks can share."""


class _Stream:
    """Lines of one origin, in order."""

    def __init__(self, tables: list[_Table]) -> None:
        self._tables = tables
        self._table: _Table | None = None
        self.starting: str | None = None
        self.program: str | None = None
        self.rank_hosts: dict[int, str] = {}
        self.groups: set[str] = set()
        self.step: tuple[int, int, int, str] | None = None

    def feed(self, line: str) -> None:
        """Take the next line, without its prefix."""
        if line.lstrip().startswith("#"):
            self._comment(line.strip())
        elif _ROW_START.match(line):
            self._row(line)
        elif self._table is None and (found := _PROGRAM.findall(line)):
            self.program = f"{found[-1]}_perf"

    def finish(self) -> None:
        """The output has ended."""
        if self._table is not None:
            self._end(
                "the output ends before the program's end"
                if self._table.footer
                else "the output ends before the lines below the table"
            )

    def _comment(self, line: str) -> None:
        if (starting := _STARTING.match(line)) is not None:
            self.finish()
            self._forget()
            self.starting = starting[1]
        elif (rank := _RANK.match(line)) is not None:
            if int(rank[1]) in self.rank_hosts:
                self._forget()
            self.rank_hosts[int(rank[1])] = rank[3]
            self.groups.add(rank[2] or "0")
        elif (step := _STEP.match(line)) is not None:
            self.step = (int(step[1]), int(step[2]), int(step[3]), step[4])
        elif {"size", "count", "type", "busbw"} <= set(line.lstrip("#").split()):
            self.finish()
            self._begin(line.lstrip("#").split())
        elif self._table is not None:
            self._below(self._table, line)

    def _begin(self, names: list[str]) -> None:
        self._table = _Table(names, self)
        self._tables.append(self._table)
        if names[-1] == "timestamp":
            names = names[:-1]
        first = names.index("type") + 1 if "type" in names else 0
        middle, figures = names[first:-8], names[-8:]
        if "cputime" in names:
            self._table.problems.append("has the processor's time (-C), not that of the transfer")
        elif names[:3] != ["size", "count", "type"] or tuple(figures) != _FIGURES:
            self._table.problems.append(
                f"its columns are {' '.join(names)}; expected size count type redop root, then"
                " time algbw busbw #wrong twice"
            )
        elif middle not in (["redop", "root"], ["redop"], ["root"], []):
            self._table.problems.append(f"its columns are {' '.join(names)}")

    def _below(self, table: _Table, line: str) -> None:
        if (bounds := _OUT_OF_BOUNDS.match(line)) is not None:
            table.out_of_bounds = int(bounds[1])
            if (int(bounds[1]) == 0) != (bounds[2] == "OK"):
                table.problems.append(f"contradicts itself: {line.lstrip('# ')}")
        elif (average := _AVERAGE.match(line)) is not None:
            table.footer = True
            if table.out_of_bounds is None:
                table.problems.append("has no line of out of bounds values")
            table.average = _significant(average[1])
            if table.average is None:
                table.problems.append(f"its mean is {average[1]!r}")
            if not table.must_conclude:
                self._end(None)
        elif (concluded := _CONCLUDED.match(line)) is not None:
            why = None if table.footer else "the lines below the table are missing"
            if concluded[1] != table.program:
                why = f"began as {table.program} and ends as {concluded[1]}"
            self._end(why)

    def _row(self, line: str) -> None:
        if self._table is None or self._table.footer:
            if self._table is None:
                self._table = _Table((), self)
                self._tables.append(self._table)
                self._table.problems.append("the line with the names of its columns is missing")
            else:
                self._table.problems.append("has rows below its mean")
        row = _parse_row(line, self._table.columns)
        if isinstance(row, TableRow):
            self._table.rows.append(row)
        else:
            self._table.problems.append(f"{row}: {' '.join(line.split())[:100]}")

    def _end(self, problem: str | None) -> None:
        assert self._table is not None
        if problem is not None:
            self._table.problems.append(problem)
        self._table = None
        self._forget()

    def _forget(self) -> None:
        """What stood above a table is not that of the next."""
        self.starting = self.program = self.step = None
        self.rank_hosts, self.groups = {}, set()


def _bounded(table: CollectiveTable) -> CollectiveTable:
    return replace(
        table, problems=table.problems[:_MOST_PROBLEMS], doubts=table.doubts[:_MOST_PROBLEMS]
    )


def _parse_row(line: str, columns: Sequence[str]) -> TableRow | str:
    """The row, or why it cannot be read."""
    words = line.split()
    if len(words) > 2 and _TIMESTAMP.fullmatch(words[-2]):
        words = words[:-2]
    if any(_E_NOTATION.fullmatch(word) for word in words):
        return "a number in e-notation has too few digits to check"
    size, count, kind, *rest = words
    middle, figures = rest[:-8], rest[-8:]
    root: int | None = None
    if middle and re.fullmatch(r"-?\d+", middle[-1]):
        root = int(middle.pop())
    if len(figures) != 8 or len(middle) > 1 or ("root" in columns and root is None):
        return "a row has another number of columns"
    timings = [_timing(figures[:4]), _timing(figures[4:])]
    if timings[0] is None or timings[1] is None or len(size) > 18 or len(count) > 18:
        return "a row has a value that is not a number as nccl-tests prints it"
    operation = middle[0] if middle else ""
    return TableRow(int(size), int(count), kind, operation, root, timings[0], timings[1])


def _timing(words: Sequence[str]) -> PrintedTiming | None:
    figures = zip(_TWO_DECIMALS_BELOW.values(), words[:3], strict=True)
    numbers = [_row_number(word, below) for below, word in figures]
    wrong = words[3]
    if None in numbers or not (wrong == "N/A" or re.fullmatch(r"\d{1,18}", wrong)):
        return None
    time, alg, bus = (number for number in numbers if number is not None)
    return PrintedTiming(time, alg, bus, None if wrong == "N/A" else int(wrong))


def _row_number(word: str, two_decimals_below: float) -> PrintedNumber | None:
    """A number of a row; None where a digit is missing or was added."""
    number, decimals = _printed(word), len(word.partition(".")[2])
    if number is None:
        return None
    least = 2 if number.value < two_decimals_below else int(number.value < _ONE_DECIMAL_BELOW)
    return number if least <= decimals <= 2 else None


def _printed(word: str) -> PrintedNumber | None:
    """A number with the precision of its digits."""
    decimals = len(word.partition(".")[2])
    if len(word) > 24 or _NUMBER.fullmatch(word) is None:
        return None
    return PrintedNumber(float(word), 0.5 * 10.0**-decimals)


def _significant(word: str) -> PrintedNumber | None:
    """A number as %g prints it: six digits, without zeros at the end."""
    if (number := _printed(word)) is None:
        return None
    whole = len(word.partition(".")[0].lstrip("0"))
    return PrintedNumber(number.value, 0.5 * 10.0 ** (whole - 6))


# JSON


def _json_table(text: bytes) -> CollectiveTable:
    """The table of a document of -J (version 3)."""
    empty = CollectiveTable(collective=None, ranks=None, hosts=(), rows=())
    try:
        document = json.loads(text)
        rows = tuple(_json_row(row) for row in document["results"])
        average = document["average_bus_bandwidth"]["bandwidth"]
        bounds = int(document["out_of_bounds"]["count"])
        if "end_time" not in document:
            raise ValueError("the document has no end_time: the program did not end")
        program = _program_of(document.get("args") or ())
        config = document.get("config") or {}
        hosts = _json_hosts(config)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        missing = f"has no {error}" if isinstance(error, KeyError) else str(error)
        return replace(empty, problems=(f"is not the JSON of nccl-tests: {missing[:200]}",))
    table = replace(
        empty,
        collective=program,
        ranks=len(hosts) or None,
        hosts=tuple(dict.fromkeys(hosts)),
        rows=rows,
    )
    factor = config.get("step_factor")
    found = checked(
        table,
        average=_exact(average),
        out_of_bounds=bounds,
        factor=float(factor) if isinstance(factor, int) else None,
    )
    return _bounded(found)


def _json_row(row: dict[str, Any]) -> TableRow:
    size, count = row["size"], row["count"]
    root = int(str(row["root"]).strip() or "-1")
    if not isinstance(size, int) or not isinstance(count, int) or row["type"] not in TYPE_BYTES:
        raise ValueError(f"a row of {size!r} bytes, {count!r} elements, type {row['type']!r}")
    first = row["out_of_place"]
    second = row.get("in_place")
    if first is None:
        raise ValueError("a row has no results out of place")
    return TableRow(
        size,
        count,
        row["type"],
        str(row["redop"]).strip(),
        root,
        _json_timing(first),
        None if second is None else _json_timing(second),
    )


def _json_timing(timing: dict[str, Any]) -> PrintedTiming:
    if "time" not in timing:
        raise ValueError("has the processor's time (-C), not that of the transfer")
    wrong = timing["nwrong"]
    return PrintedTiming(
        _exact(timing["time"]),
        _exact(timing["alg_bw"]),
        _exact(timing["bus_bw"]),
        None if wrong is None else int(float(wrong)),
    )


def _exact(value: Any) -> PrintedNumber:
    """A number as %lf prints it."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e18:
        raise ValueError(f"{value!r} is not a number")
    return PrintedNumber(float(value), 0.5e-6)


def _program_of(words: Iterable[Any]) -> str | None:
    for word in words:
        if (named := _PROGRAM.search(str(word))) is not None:
            return named[1]
    return None


def _json_hosts(config: dict[str, Any]) -> list[str]:
    """By rank, where each process has one rank: of several, only the first is listed."""
    if config.get("nthreads") != 1 or config.get("ngpus") != 1:
        return []
    return [str(device["hostname"]) for device in config.get("devices") or ()]
