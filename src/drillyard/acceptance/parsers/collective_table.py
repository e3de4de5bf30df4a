"""A table of a collective as a benchmark printed it, and whether it agrees with itself.

Every printed number stands for an interval of half a unit of its last digit to both sides. A row
agrees with itself where the intervals meet: algbw with bytes / time, busbw with algbw times the
collective's factor, bytes with count, type and ranks. The mean that nccl-tests prints below the
table is a checksum of its rows.

`problems` leave nothing to judge by. `doubts` forbid a pass and nothing else: a row below its
threshold that agrees with itself fails, whatever is wrong with the others. Those that do not
are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from drillyard.hardware.bandwidths import bus_factor

TYPE_BYTES: Final = {
    **dict.fromkeys(("int8", "uint8", "f8e4m3", "f8e5m2", "fp8_e4m3", "fp8_e5m2"), 1),
    **dict.fromkeys(("half", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float"), 4),
    **dict.fromkeys(("int64", "uint64", "double"), 8),
}
OPERATIONS: Final = frozenset({"sum", "prod", "max", "min", "avg", "mulsum", "all"})
ANY_RANKS: Final = 1 << 16
"""Stands for a number of ranks that the figures of a collective do not depend on; none is
larger."""
TWICE_ROUNDED: Final = 3.0
"""Times half a unit: figures that were computed from printed ones. They forbid a pass."""
_REGULAR_FROM: Final = 1 << 20
"""Smaller sizes are rounded to what the ranks can share."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How the rows of a collective look (src/*.cu of nccl-tests). `per_rank`: `count` is that of
    one rank. `operation`: it reduces; None: printed either way. `rooted`: it has a root.
    `in_place`: its results in place are checked."""

    per_rank: bool = False
    operation: bool | None = None
    rooted: bool = False
    in_place: bool = True


SHAPES: Final = {
    "all_reduce": Shape(operation=True),
    "all_gather": Shape(per_rank=True, operation=False),
    "reduce_scatter": Shape(per_rank=True, operation=True),
    "alltoall": Shape(per_rank=True, operation=False, in_place=False),
    "alltoallv": Shape(per_rank=True, in_place=False),
    "broadcast": Shape(operation=False, rooted=True),
    "reduce": Shape(operation=True, rooted=True),
    "gather": Shape(per_rank=True, operation=False, rooted=True),
    "scatter": Shape(per_rank=True, operation=False, rooted=True),
    "sendrecv": Shape(in_place=False),
    "hypercube": Shape(per_rank=True),
}
"""By collective: PROGRAM_perf without the ending."""


@dataclass(frozen=True, slots=True)
class PrintedNumber:
    """A number with half a unit of its last printed digit."""

    value: float
    half: float

    @property
    def low(self) -> float:
        return self.value - self.half

    @property
    def high(self) -> float:
        return self.value + self.half


@dataclass(frozen=True, slots=True)
class PrintedTiming:
    """Time in microseconds, bandwidths in GB/s; `wrong` elements, None: were not checked."""

    microseconds: PrintedNumber
    alg: PrintedNumber
    bus: PrintedNumber
    wrong: int | None


@dataclass(frozen=True, slots=True)
class TableRow:
    """One message size. `count` None: the table does not say."""

    bytes: int
    count: int | None
    type: str
    operation: str
    root: int | None
    out_of_place: PrintedTiming
    in_place: PrintedTiming | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTable:
    """One table. `collective` and `ranks` are None where neither the output nor its figures say.
    `hosts` are those of the ranks, in order, each once; empty where they are not printed."""

    collective: str | None
    ranks: int | None
    hosts: tuple[str, ...]
    rows: tuple[TableRow, ...]
    problems: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    wrong: int = 0
    """Elements that were computed wrongly, as the rows and the line below them say."""

    def bus_by_size(self) -> dict[int, float]:
        """busbw out of place in GB/s by bytes."""
        return {row.bytes: row.out_of_place.bus.value for row in self.rows}


def checked(
    table: CollectiveTable,
    *,
    average: PrintedNumber | None = None,
    out_of_bounds: int | None = None,
    factor: float | None = None,
) -> CollectiveTable:
    """The table with its collective and ranks, where they follow from the rows, and with all that
    contradicts itself. `average`: the printed mean of busbw; `out_of_bounds`: the printed count of
    wrong values; `factor`: between two sizes, as printed; None: this output does not have it."""
    if not table.rows:
        return replace(table, problems=(*table.problems, "has no rows"))
    table = _identified(table)
    problems, doubts = list(table.problems), list(table.doubts)
    contradicting: set[int] = set()
    ranks = table.ranks
    if ranks is None and table.collective is not None and _same_for_all_ranks(table.collective):
        ranks = ANY_RANKS
    if table.collective is None or ranks is None:
        problems.append("its figures do not say which collective it is of, and how many ranks")
        problems += [f"{_place(row)}: {why}" for row in table.rows for why in _unchecked(row, True)]
    else:
        shape = SHAPES[table.collective]
        for row in table.rows:
            why = [f"{_place(row)}: {each}" for each in row_problems(row, table.collective, ranks)]
            if why:
                contradicting.add(row.bytes)
            else:
                exact = row_problems(row, table.collective, ranks, slack=1.0)
                why = [f"{_place(row)}: {each}" for each in exact]
            doubts += [
                *why,
                *(f"{_place(row)}: {each}" for each in _unchecked(row, shape.in_place)),
            ]
    problems += _size_problems([row.bytes for row in table.rows], factor)
    timings = [timing for row in table.rows for timing in _timings(row)]
    if average is not None:
        mean = math.fsum(timing.bus.value for timing in timings) / len(timings)
        slack = math.fsum(timing.bus.half for timing in timings) / len(timings)
        if abs(mean - average.value) > slack + average.half:
            doubts.append(
                f"the mean of its rows is {mean:.3f} GB/s, and below them stands"
                f" {average.value:g}: rows are missing or changed"
            )
    wrong = sum(timing.wrong or 0 for timing in timings)
    if out_of_bounds is not None and (wrong > 0) != (out_of_bounds > 0):
        problems.append(f"has {wrong} wrong elements in its rows, and {out_of_bounds} below them")
    return replace(
        table,
        rows=tuple(row for row in table.rows if row.bytes not in contradicting),
        problems=tuple(problems),
        doubts=tuple(doubts),
        wrong=wrong,
    )


def _identified(table: CollectiveTable) -> CollectiveTable:
    """Collective and ranks, each as given or as the only one that most rows fit."""
    names = SHAPES if table.collective is None else (table.collective,)
    fits: dict[tuple[str, int], int] = {}
    for name in names:
        for ranks in _possible_ranks(table, name):
            fits[name, ranks] = sum(not any(row_problems(row, name, ranks)) for row in table.rows)
    most = max(fits.values(), default=0)
    best = [key for key, count in fits.items() if count == most and 2 * count > len(table.rows)]
    found = {name for name, _ in best}
    # One that is never judged does not make the others ambiguous.
    found = found - {"alltoallv", "hypercube"} or found
    checks = {row.in_place.wrong is not None for row in table.rows if row.in_place is not None}
    if len(found) > 1 and len(checks) == 1:
        found = {name for name in found if SHAPES[name].in_place in checks} or found
    collective = table.collective or (found.pop() if len(found) == 1 else None)
    counts = {count for name, count in best if name == collective} - {ANY_RANKS}
    only = counts.pop() if len(counts) == 1 else None
    return replace(table, collective=collective, ranks=table.ranks or only)


def _possible_ranks(table: CollectiveTable, collective: str) -> Iterable[int]:
    if table.ranks is not None:
        return (table.ranks,)
    row = next((row for row in reversed(table.rows) if row.bytes), table.rows[-1])
    size = TYPE_BYTES.get(row.type)
    if row.count is not None and SHAPES[collective].per_rank:
        # The size is that of all ranks.
        return (row.bytes // (row.count * size),) if size and row.count else ()
    alg, bus = row.out_of_place.alg, row.out_of_place.bus
    if _same_for_all_ranks(collective):
        return (ANY_RANKS,)
    if alg.low <= 0:
        return ()
    return [
        ranks
        for ranks in range(2, 4097)
        if alg.low * bus_factor(collective, ranks) <= bus.high
        and alg.high * bus_factor(collective, ranks) >= bus.low
    ]


def _same_for_all_ranks(collective: str) -> bool:
    factors = {bus_factor(collective, ranks) for ranks in (2, 3)}
    return len(factors) == 1 and not SHAPES[collective].per_rank


def row_problems(
    row: TableRow, collective: str, ranks: int, slack: float = TWICE_ROUNDED
) -> Iterator[str]:
    """What contradicts itself in a row."""
    shape = SHAPES[collective]
    if not 1 < ranks <= ANY_RANKS:
        yield f"{ranks} ranks"
        return
    if row.bytes == 0:
        yield "measured nothing; run with -b 1K or more"
        return
    if row.count is not None:
        size = TYPE_BYTES.get(row.type)
        if size is None:
            yield f"'{row.type}' is not a type"
        elif row.bytes != row.count * size * (ranks if shape.per_rank else 1):
            yield f"{row.count:,} elements of {row.type} on {ranks} ranks are another size"
        reduces = row.operation in OPERATIONS
        if not reduces and row.operation not in ("none", ""):
            yield f"'{row.operation}' is not an operation"
        elif shape.operation is not None and reduces != shape.operation:
            yield f"{collective} is not printed with '{row.operation or 'no operation'}'"
        if row.root is not None and (row.root >= 0) != shape.rooted:
            yield f"{collective} is not printed with root {row.root}"
        elif row.root is not None and not -1 <= row.root < ranks:
            yield f"{ranks} ranks have no root {row.root}"
    for where, timing in (("out of place", row.out_of_place), ("in place", row.in_place)):
        if timing is None:
            continue
        if (why := _timing_problem(row.bytes, timing, collective, ranks, slack)) is not None:
            yield f"{where}: {why}"


def _unchecked(row: TableRow, in_place: bool) -> Iterator[str]:
    """`in_place`: the collective's results in place are checked."""
    for where, timing in (("out of place", row.out_of_place), ("in place", row.in_place)):
        if timing is not None and timing.wrong is None and (where != "in place" or in_place):
            yield f"{where}: the results were not checked (N/A); run without -c 0"


def _timing_problem(
    size: int, timing: PrintedTiming, collective: str, ranks: int, slack: float
) -> str | None:
    """`slack`: how many times the rounding of a digit is accepted."""
    time, alg, bus = timing.microseconds, timing.alg, timing.bus
    if time.low <= 0:
        return "has no time"
    moved = size * (ranks - 1) / ranks if collective == "hypercube" else size
    alg_low, alg_high = alg.value - slack * alg.half, alg.value + slack * alg.half
    time_low, time_high = time.value - slack * time.half, time.value + slack * time.half
    if moved / time_high / 1e3 > alg_high or (time_low > 0 and moved / time_low / 1e3 < alg_low):
        rate = moved / time.value / 1e3
        return (
            f"{size:,} bytes in {time.value:g} us are {rate:.2f} GB/s, and algbw is {alg.value:g}"
        )
    factor = bus_factor(collective, ranks)
    room = slack * bus.half + 1e-9 * bus.value
    if alg_low * factor > bus.value + room or alg_high * factor < bus.value - room:
        return (
            f"algbw {alg.value:g} GB/s on {ranks} ranks is a busbw of {alg.value * factor:.2f},"
            f" and {bus.value:g} is printed"
        )
    return None


def _timings(row: TableRow) -> list[PrintedTiming]:
    return [row.out_of_place, *([row.in_place] if row.in_place else [])]


def _place(row: TableRow) -> str:
    return f"the row of {row.bytes:,} bytes"


def _size_problems(sizes: Sequence[int], factor: float | None) -> Iterator[str]:
    """Sizes ascend, by `factor` where it was printed."""
    pairs = list(pairwise(sizes))
    if any(later <= earlier for earlier, later in pairs):
        yield "its sizes do not ascend: rows are repeated, or of several types, operations or runs"
    elif factor is not None and any(
        abs(later / earlier - factor) > 0.01 * factor
        for earlier, later in pairs
        if earlier >= _REGULAR_FROM
    ):
        yield f"its sizes do not grow by the factor {factor:g}: rows are missing"
