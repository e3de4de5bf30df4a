"""Later starts of the ranks that no step number shows: a run that was resumed at the step after its last.

The idea: what a program prints when it starts (its banner, a loaded checkpoint, a launcher's word of a failure) tells
of a restart where it comes after steps. Each rank's own words count for its own lines, so that any interleaving of
ranks gives the same; a rank that says nothing (Megatron-LM's steps are printed by the last rank, its banner by the
first) goes by what the others say. Of these the first sign of each is that of the first start, unless its time is after
a step.

Limits: by the lines of one file. A restart that says nothing and goes on at the next step is not seen, except where
the log's own clock of the run begins anew (`elapsed_seconds`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from drillyard.loglines.prefixes import Origin
from drillyard.measurement.lanes import Lane
from drillyard.measurement.parsed_log import NO_TIME, Mark

_SIGNS: Final = frozenset({"run_start", "round_start", "resume", "restart", "failure"})
Sign = tuple[Origin, Mark]


def start_rows(lanes: Iterable[Lane], marks: Iterable[Sign]) -> list[NDArray[np.int64]]:
    """For each lane the rows with which a later start begins, by the marks of all sources.

    Row 0 is among them where its source tells of a start before it.
    """
    signs = [(origin, mark) for origin, mark in marks if mark.kind in _SIGNS]
    return [_rows(lane, [sign for sign in signs if sign[1].file == lane.file]) for lane in lanes]


def _rows(lane: Lane, signs: Sequence[Sign]) -> NDArray[np.int64]:
    lines, times = lane.column("line"), lane.column("time_us")
    if not signs or lines is None:
        return np.zeros(0, np.int64)
    own = [mark for origin, mark in signs if origin == lane.origin]
    rows = {_row(mark, lines, times) for mark in own or _of_others(signs, times)}
    if any(_row(mark, lines, times) == 0 for _, mark in signs):
        rows.add(0)
    return np.array(sorted(row for row in rows if row < len(lines)), np.int64)


def _of_others(signs: Sequence[Sign], times: NDArray[np.int64] | None) -> list[Mark]:
    """What others say of later starts."""
    first_step = NO_TIME if times is None else int(times[0])
    heard: set[Origin] = set()
    later = []
    for origin, mark in signs:
        told = first_step != NO_TIME and mark.time_us is not None and mark.time_us > first_step
        if told or origin in heard or mark.kind in ("restart", "failure"):
            later.append(mark)
        heard.add(origin)
    return later


def _row(mark: Mark, lines: NDArray[np.int64], times: NDArray[np.int64] | None) -> int:
    """The first row after a sign. Where launchers merge what ranks print, steps done before it may come after it."""
    row = int(np.searchsorted(lines, mark.line))
    if times is None or mark.time_us is None:
        return row
    later = times[row:] >= mark.time_us
    later |= times[row:] == NO_TIME
    return row + int(later.argmax()) if later.any() else row
