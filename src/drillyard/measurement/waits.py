"""When training waited: saves and evaluations, each once, with how long they took.

Several ranks may report the same save; what counts is from the first beginning to the last end. A line that gives only
a duration at its end tells as much. Saves that are written while training goes on are counted apart: their time is
that of the writing, not of waiting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from drillyard.measurement.parsed_log import Mark, ParsedLog

LONGEST_SECONDS: Final = 1e9
"""No step and no wait takes more than thirty years: such numbers are damage."""

WaitKind = Literal["checkpoint", "evaluation", "export"]


@dataclass(frozen=True, slots=True)
class Wait:
    """Training waited for `what`. Times in UTC microseconds; None without time stamps."""

    what: WaitKind
    seconds: float | None
    step: int | None
    begin_us: int | None
    end_us: int | None


def find_waits(log: ParsedLog) -> list[Wait]:
    """All saves and evaluations that training waited for, in the order of the log."""
    found: list[Wait] = []
    for what in ("checkpoint", "evaluation", "export"):
        begun: Mark | None = None
        last: Mark | None = None
        for mark in log.marks:
            if mark.kind == f"{what}_begin":
                begun = begun or mark
            elif mark.kind == f"{what}_end":
                if begun is None and found and last is not None and _same(last, mark):
                    earlier = found.pop()
                    found.append(_wait(what, mark, earlier.begin_us))
                else:
                    found.append(_wait(what, mark, None if begun is None else begun.time_us))
                begun, last = None, mark
            elif mark.kind in ("failure", "restart", "end"):
                begun = None
    return sorted(found, key=lambda wait: -math.inf if wait.end_us is None else wait.end_us)


def _same(one: Mark, other: Mark) -> bool:
    """Whether two ends are of the same save or evaluation, said by two ranks."""
    return one.step is not None and one.step == other.step and one.attempt == other.attempt and one.rank != other.rank


def _wait(what: WaitKind, end: Mark, begin_us: int | None) -> Wait:
    seconds = end.seconds if end.seconds is not None and 0 <= end.seconds < LONGEST_SECONDS else None
    if begin_us is None and end.time_us is not None and seconds is not None:
        begin_us = end.time_us - round(seconds * 1e6)
    if begin_us is not None and end.time_us is not None and end.time_us >= begin_us:
        seconds = (end.time_us - begin_us) / 1e6 if seconds is None else max(seconds, (end.time_us - begin_us) / 1e6)
    return Wait(what, seconds, end.step, begin_us, end.time_us)


def written_seconds(log: ParsedLog) -> list[float]:
    """How long the saves took to be complete that are logged when they are (`checkpoint`), where they say so."""
    return [
        mark.seconds
        for mark in log.marks
        if mark.kind == "checkpoint" and mark.seconds is not None and 0 <= mark.seconds < LONGEST_SECONDS
    ]


def overlap_microseconds(waited: Sequence[Wait], times: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each pair of neighbouring `times` how much of the time between them was waiting."""
    total = np.zeros(max(len(times) - 1, 0), dtype=np.int64)
    for wait in waited:
        if wait.begin_us is None or wait.end_us is None:
            continue
        first = max(int(np.searchsorted(times, wait.begin_us, "right")) - 1, 0)
        last = min(int(np.searchsorted(times, wait.end_us, "left")), len(times) - 1)
        for pair in range(first, last):
            shared = min(wait.end_us, int(times[pair + 1])) - max(wait.begin_us, int(times[pair]))
            total[pair] += max(shared, 0)
    return total
