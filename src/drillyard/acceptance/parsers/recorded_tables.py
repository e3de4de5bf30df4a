"""Tables of collectives in recorded text: output of nccl-tests, or a page with a table of message
sizes, bandwidths and times, in Markdown:

    #### NCCL AllReduce Bandwidth (16 GPUs across 2 nodes)

    | Message Size | Bandwidth | Latency |
    |--------------|-----------|---------|
    | 1 GB | 434.99 GB/s | 4.520 ms |

The heading names the collective, and the number of GPUs. Such a page does not say whether 1 GB is
2^30, 1000 * 2^20 or 10^9 bytes, and whether the bandwidth is algbw or busbw: the time decides, and
where it fits none or several, the table has a problem. Wrong results are not mentioned there: only
the bandwidth is judged.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from drillyard.acceptance.parsers.collective_table import (
    CollectiveTable,
    PrintedNumber,
    PrintedTiming,
    TableRow,
    checked,
)
from drillyard.acceptance.parsers.nccl_tests import parse_nccl_tests
from drillyard.hardware.bandwidths import bus_factor

_HEADING: Final = re.compile(r"#{1,6}\s+(.*)")
_COLLECTIVES: Final = (
    ("reduce_scatter", r"reduce[\s_-]?scatter"),
    ("all_reduce", r"all[\s_-]?reduce"),
    ("all_gather", r"all[\s_-]?gather"),
    ("alltoall", r"all[\s_-]?to[\s_-]?all"),
)
_RANKS: Final = re.compile(r"(\d{1,6})\s+(?:GPUs|ranks|accelerators)", re.IGNORECASE)
_CELL: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z/]+)")
_COLUMNS: Final = {
    "bytes": re.compile(r"(?:message )?size", re.IGNORECASE),
    "bus": re.compile(r"(?:bus ?)?bandwidth|busbw", re.IGNORECASE),
    "time": re.compile(r"latency|time", re.IGNORECASE),
}
_TIMES: Final = {"us": 1.0, "ms": 1e3, "s": 1e6}
_UNITS: Final = {
    "KB": (1 << 10, 1000), "MB": (1 << 20, 10**6), "GB": (1 << 30, 1000 << 20, 10**9),
    "KiB": (1 << 10,), "MiB": (1 << 20,), "GiB": (1 << 30,),
}  # fmt: skip
_MOST_READINGS: Final = 64


def parse_tables(text: bytes) -> list[CollectiveTable]:
    """All tables of collectives in the text, in order."""
    return parse_nccl_tests(text) or list(_page_tables(text.decode("utf-8", "replace")))


def _page_tables(text: str) -> Iterator[CollectiveTable]:
    heading, columns = "", None
    rows: list[list[str]] = []
    for line in itertools.chain(text.splitlines(), [""]):
        if line.strip().startswith("|"):
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            if columns is None:
                columns = _columns(cells)
                rows = []
            elif not all(re.fullmatch(r":?-+:?", cell) for cell in cells):
                rows.append(cells)
            continue
        if columns:
            yield _page_table(heading, columns, rows)
        columns = None
        if (found := _HEADING.match(line)) is not None:
            heading = found[1]


def _columns(cells: Sequence[str]) -> dict[str, int]:
    """Place of each column; empty where this is another table."""
    places = {
        name: place
        for name, pattern in _COLUMNS.items()
        for place, cell in enumerate(cells)
        if pattern.fullmatch(cell)
    }
    return places if len(places) == len(_COLUMNS) == len(cells) else {}


def _page_table(
    heading: str, columns: dict[str, int], lines: Sequence[Sequence[str]]
) -> CollectiveTable:
    named = [name for name, how in _COLLECTIVES if re.search(how, heading, re.IGNORECASE)]
    ranks = _RANKS.search(heading)
    table = CollectiveTable(
        collective=named[0] if len(named) == 1 else None,
        ranks=int(ranks[1]) if ranks else None,
        hosts=(),
        rows=(),
    )
    if table.collective is None or table.ranks is None or table.ranks < 2:
        why = f"its heading does not name one collective and the number of GPUs: {heading[:100]!r}"
        return replace(table, problems=(why,))
    try:
        cells = [_cells(columns, line) for line in lines]
    except ValueError as error:
        return replace(table, problems=(str(error),))
    readings = [
        reading
        for reading in itertools.islice(_readings(table, cells), _MOST_READINGS)
        if not reading.problems and len(reading.rows) == len(cells)
    ]
    if len(readings) != 1:
        why = (
            "its times and bandwidths fit no size of these names"
            if not readings
            else "it does not say which sizes it means: several fit"
        )
        return replace(table, problems=(why,))
    return readings[0]


_Cells = tuple[int, str, PrintedNumber, PrintedNumber]


def _cells(columns: dict[str, int], line: Sequence[str]) -> _Cells:
    """Number and unit of the size, GB/s, microseconds."""
    found = [_CELL.fullmatch(cell) for cell in line]
    if len(line) != len(columns) or None in found:
        raise ValueError(f"a row is not size, bandwidth and time: {' | '.join(line)[:100]}")
    size, bus, time = (found[columns[name]] for name in ("bytes", "bus", "time"))
    assert size is not None and bus is not None and time is not None
    if size[2] not in _UNITS or "." in size[1] or bus[2] != "GB/s" or time[2] not in _TIMES:
        raise ValueError(f"a row has other units: {' | '.join(line)[:100]}")
    return int(size[1]), size[2], _printed(bus[1], 1.0), _printed(time[1], _TIMES[time[2]])


def _printed(word: str, unit: float) -> PrintedNumber:
    decimals = len(word.partition(".")[2])
    return PrintedNumber(float(word) * unit, 0.5 * 10.0**-decimals * unit)


def _readings(table: CollectiveTable, lines: Sequence[_Cells]) -> Iterator[CollectiveTable]:
    """The table, for each meaning of its units and of its bandwidth."""
    assert table.collective is not None and table.ranks is not None
    factor = bus_factor(table.collective, table.ranks)
    units = list(dict.fromkeys(unit for _, unit, _, _ in lines))
    for meaning in itertools.product(*(_UNITS[unit] for unit in units)):
        size_of = dict(zip(units, meaning, strict=True))
        for is_bus in (True, False):
            rows = []
            for number, unit, given, time in lines:
                bus = given if is_bus else PrintedNumber(given.value * factor, given.half * factor)
                alg = PrintedNumber(bus.value / factor, bus.half / factor)
                timing = PrintedTiming(time, alg, bus, 0)
                rows.append(TableRow(number * size_of[unit], None, "", "", None, timing, None))
            yield checked(replace(table, rows=tuple(rows)))
