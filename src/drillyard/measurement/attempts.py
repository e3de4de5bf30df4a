"""Which attempt a mark belongs to, and when each attempt began and ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from drillyard.goodput import CLOCK_TOLERANCE
from drillyard.loglines.prefixes import Origin
from drillyard.measurement.parsed_log import NO_TIME, LoggedAttempt, Mark, Steps
from drillyard.measurement.waits import LONGEST_SECONDS

_BEGINNINGS: Final = frozenset({"run_start", "round_start", "restart", "resume"})
Times = tuple[int | None, int | None]


def assign_marks(marks: Sequence[tuple[Origin, Mark]], steps: Steps) -> list[Mark]:
    """Marks with their attempts, in the order of attempts and of the log.

    A mark belongs to the attempt whose steps surround it; between the last step of one attempt and the first of the
    next, to the next from the first sign of a start on. Marks of files without steps are placed by their time. What
    every rank prints counts once: the same kind, step and attempt within a second is the lowest rank's.
    """
    if not marks:
        return []
    starts = _starts(steps)
    if len(starts) < 2:
        placed = [mark for _, mark in marks]
    else:
        placed = [replace(mark, attempt=_attempt(mark, steps, starts)) for _, mark in marks]
        placed = _from_start_on(placed, steps, starts)
    ordered = sorted(placed, key=lambda mark: (mark.attempt, mark.file, mark.line))
    return _once(ordered)


def _starts(steps: Steps) -> list[int]:
    """The rows at which attempts begin."""
    if not len(steps):
        return []
    return np.flatnonzero(np.append(True, np.diff(steps.attempt) > 0)).tolist()


def split_at_starts(steps: Steps, starts: Sequence[int]) -> Steps:
    """`steps` with another attempt also where one of the times of `starts` lies between two of them: a run that goes on
    at the step after its last shows it in no number of its lines. For logs that tell every start and time every step.
    """
    begun = np.searchsorted(np.sort(np.array(starts, np.int64)), steps.time_us, side="right")
    attempt = np.cumsum(np.append(False, (np.diff(steps.attempt) > 0) | (np.diff(begun) > 0)))
    return replace(steps, attempt=attempt.astype(steps.attempt.dtype))


def _attempt(mark: Mark, steps: Steps, starts: list[int]) -> int:
    """The last attempt whose first step is before the mark."""
    if mark.attempt:
        return mark.attempt
    found = 0
    for row in starts:
        attempt = int(steps.attempt[row])
        if int(steps.file[row]) == mark.file:
            before = int(steps.line[row]) <= mark.line
        else:
            time = int(steps.time_us[row])
            timed = time != NO_TIME and mark.time_us is not None
            before = time <= (mark.time_us or 0) if timed else int(steps.file[row]) < mark.file
        if before:
            found = attempt
    alone = [int(steps.attempt[row]) for row in starts if int(steps.file[row]) == mark.file]
    return max(found, alone[0]) if alone else found


def _from_start_on(marks: list[Mark], steps: Steps, starts: list[int]) -> list[Mark]:
    """Move marks behind an attempt's last step to the next attempt, from the first that is a sign of a start."""
    lasts = {int(steps.attempt[row - 1]): row - 1 for row in starts[1:]}
    result = []
    moved: set[tuple[int, int]] = set()
    for mark in sorted(marks, key=lambda mark: (mark.file, mark.line)):
        last = lasts.get(mark.attempt)
        behind = last is not None and int(steps.file[last]) == mark.file and int(steps.line[last]) < mark.line
        key = (mark.file, mark.attempt)
        if behind and (mark.kind in _BEGINNINGS or key in moved):
            moved.add(key)
            mark = replace(mark, attempt=mark.attempt + 1)
        result.append(mark)
    return result


def _once(marks: list[Mark]) -> list[Mark]:
    """Without what further ranks said of the same thing."""
    kept: list[Mark] = []
    latest: dict[tuple[str, int | None, int], Mark] = {}
    for mark in marks:
        key = (mark.kind, mark.step, mark.attempt)
        before = latest.get(key)
        same = before is not None and before.rank != mark.rank and _near(before, mark)
        if not same:
            kept.append(mark)
            latest[key] = mark
        elif before is not None and (mark.rank or 0) < (before.rank or 0):
            kept[kept.index(before)] = latest[key] = mark
    return kept


def _near(first: Mark, second: Mark) -> bool:
    if first.time_us is None or second.time_us is None:
        return True
    return abs(first.time_us - second.time_us) <= 1_000_000


def goes_back(times: NDArray[np.int64]) -> bool:
    """Whether a clock was set back among `times` in the order of the log, NO_TIME left out."""
    known = times[times != NO_TIME]
    return bool((np.diff(known) < -CLOCK_TOLERANCE).any())


def _in_order(steps: Steps, row: int, end: int, files: Mapping[int, Times]) -> Times:
    """The first and the last stamp of rows `row` to `end` by the order of the lines, those of their files where the
    rows are the first or the last of them."""
    known = steps.time_us[row : end + 1]
    known = known[known != NO_TIME]
    first, last = int(known[0]), int(known[-1])
    first_file, last_file = int(steps.file[row]), int(steps.file[end])
    if not row or int(steps.file[row - 1]) != first_file:
        first = files.get(first_file, (None, None))[0] or first
    if end + 1 == len(steps) or int(steps.file[end + 1]) != last_file:
        last = files.get(last_file, (None, None))[1] or last
    return first, last


def find_attempts(
    steps: Steps, marks: Sequence[Mark], files: Mapping[int, Times], *, clock_restarts: bool = False
) -> list[LoggedAttempt]:
    """The attempts of a run. `files` holds the first and last time stamp of each source.

    The first and last attempt in a file reach to its first and last stamp; with `clock_restarts` a later one began when
    its `elapsed_seconds` were 0.
    """
    starts = _starts(steps)
    attempts = []
    for index, row in enumerate(starts):
        end = starts[index + 1] - 1 if index + 1 < len(starts) else len(steps) - 1
        number = int(steps.attempt[row])
        own = steps.time_us[row : end + 1]
        times = own[own != NO_TIME].tolist()
        times += [mark.time_us for mark in marks if mark.attempt == number and mark.time_us is not None]
        first_file, last_file = int(steps.file[row]), int(steps.file[end])
        if not index or int(steps.file[row - 1]) != first_file:
            times += [time for time in files.get(first_file, (None, None))[:1] if time is not None]
        if end + 1 == len(steps) or int(steps.file[end + 1]) != last_file:
            times += [time for time in files.get(last_file, (None, None))[1:] if time is not None]
        elapsed = float(steps.elapsed_seconds[row])
        if clock_restarts and index and own[0] != NO_TIME and 0 <= elapsed < LONGEST_SECONDS:
            times.append(int(own[0]) - round(elapsed * 1e6))
        first, last = (min(times), max(times)) if times else (None, None)
        if goes_back(steps.time_us[row : end + 1]):
            # The lowest stamp is not the earliest one: the order of the lines tells.
            first, last = _in_order(steps, row, end, files)
        attempts.append(LoggedAttempt(number, first, last, first_file, int(steps.line[row])))
    return attempts
