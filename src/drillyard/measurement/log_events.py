"""Interpretation of a log's events: later starts of the ranks, the attempt of each event, and when
training waited.

Later starts: a run that resumes at the step after its last one shows the restart in no step number.
What a program prints when it starts (its banner, a loaded checkpoint, a launcher's failure message)
means a restart where it comes after steps. Each rank's own lines count for that rank, so any
interleaving of ranks gives the same; a rank that prints none (Megatron-LM's steps are printed by
the last rank, its banner by the first) follows the others. The first message of each kind is that
of the first start, unless its time is after a step. A restart that prints nothing and continues at
the next step is not seen, except where the log's own clock of the run restarts (`elapsed_seconds`).

Waits: saves and evaluations, each once, with how long they took. Several ranks may report the same
save: it lasts from the first beginning to the last end. Saves that are written while training
continues are counted apart: their time is that of the writing, not of waiting.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from drillyard.goodput import CLOCK_TOLERANCE
from drillyard.loglines.prefixes import Origin
from drillyard.measurement.lanes import Lane
from drillyard.measurement.parsed_log import (
    LONGEST_SECONDS,
    NO_TIME,
    LogEvent,
    LoggedAttempt,
    ParsedLog,
    Steps,
)

_SIGNS: Final = frozenset({"run_start", "round_start", "resume", "restart", "failure"})
_BEGINNINGS: Final = frozenset({"run_start", "round_start", "restart", "resume"})
Sign = tuple[Origin, LogEvent]
Times = tuple[int | None, int | None]
WaitKind = Literal["checkpoint", "evaluation", "export"]


@dataclass(frozen=True, slots=True)
class Wait:
    """Training waited for `what`. Times in UTC microseconds; None without time stamps."""

    what: WaitKind
    seconds: float | None
    step: int | None
    begin_us: int | None
    end_us: int | None


def start_rows(lanes: Iterable[Lane], events: Iterable[Sign]) -> list[NDArray[np.int64]]:
    """For each lane the rows with which a later start begins, by the events of all sources; row 0
    where its source has a start before it."""
    signs = [(origin, event) for origin, event in events if event.kind in _SIGNS]
    return [_rows(lane, [sign for sign in signs if sign[1].file == lane.file]) for lane in lanes]


def _rows(lane: Lane, signs: Sequence[Sign]) -> NDArray[np.int64]:
    lines, times = lane.column("line"), lane.column("time_us")
    if not signs or lines is None:
        return np.zeros(0, np.int64)
    own = [event for origin, event in signs if origin == lane.origin]
    rows = {_row(event, lines, times) for event in own or _of_others(signs, times)}
    if any(_row(event, lines, times) == 0 for _, event in signs):
        rows.add(0)
    return np.array(sorted(row for row in rows if row < len(lines)), np.int64)


def _of_others(signs: Sequence[Sign], times: NDArray[np.int64] | None) -> Iterator[LogEvent]:
    first_step = NO_TIME if times is None else int(times[0])
    seen: set[Origin] = set()
    for origin, event in signs:
        after_a_step = (
            first_step != NO_TIME and event.time_us is not None and event.time_us > first_step
        )
        if after_a_step or origin in seen or event.kind in ("restart", "failure"):
            yield event
        seen.add(origin)


def _row(event: LogEvent, lines: NDArray[np.int64], times: NDArray[np.int64] | None) -> int:
    """The first row after a sign. Where launchers merge what ranks print, steps done before it may
    come after it."""
    row = int(np.searchsorted(lines, event.line))
    if times is None or event.time_us is None:
        return row
    later = times[row:] >= event.time_us
    later |= times[row:] == NO_TIME
    return row + int(later.argmax()) if later.any() else row


def assign_events(events: Sequence[tuple[Origin, LogEvent]], steps: Steps) -> list[LogEvent]:
    """Events with their attempts, in the order of attempts and of the log.

    An event belongs to the attempt whose steps surround it; between two attempts, to the next one
    from the first sign of a start on. Events of files without steps are placed by their time. What
    every rank prints counts once: the same kind, step and attempt within a second is the lowest
    rank's.
    """
    starts = _starts(steps)
    placed = [event for _, event in events]
    if len(starts) > 1:
        placed = [replace(event, attempt=_attempt(event, steps, starts)) for event in placed]
        placed = list(_from_start_on(placed, steps, starts))
    return _once(sorted(placed, key=lambda event: (event.attempt, event.file, event.line)))


def _starts(steps: Steps) -> list[int]:
    if not len(steps):
        return []
    return np.flatnonzero(np.append(True, np.diff(steps.attempt) > 0)).tolist()


def split_at_starts(steps: Steps, starts: Sequence[int]) -> Steps:
    """`steps` with another attempt also where one of the times of `starts` lies between two of
    them. For logs that log every start and the time of every step."""
    begun = np.searchsorted(np.sort(np.array(starts, np.int64)), steps.time_us, side="right")
    attempt = np.cumsum(np.append(False, (np.diff(steps.attempt) > 0) | (np.diff(begun) > 0)))
    return replace(steps, attempt=attempt.astype(steps.attempt.dtype))


def _attempt(event: LogEvent, steps: Steps, starts: list[int]) -> int:
    """The last attempt whose first step is before the event."""
    if event.attempt:
        return event.attempt
    found = 0
    for row in starts:
        attempt = int(steps.attempt[row])
        if int(steps.file[row]) == event.file:
            before = int(steps.line[row]) <= event.line
        else:
            time = int(steps.time_us[row])
            timed = time != NO_TIME and event.time_us is not None
            before = time <= (event.time_us or 0) if timed else int(steps.file[row]) < event.file
        if before:
            found = attempt
    alone = [int(steps.attempt[row]) for row in starts if int(steps.file[row]) == event.file]
    return max(found, alone[0]) if alone else found


def _from_start_on(events: list[LogEvent], steps: Steps, starts: list[int]) -> Iterator[LogEvent]:
    """Move events behind an attempt's last step to the next attempt, from the first that is a sign
    of a start."""
    lasts = {int(steps.attempt[row - 1]): row - 1 for row in starts[1:]}
    moved: set[tuple[int, int]] = set()
    for event in sorted(events, key=lambda event: (event.file, event.line)):
        last = lasts.get(event.attempt)
        behind = (
            last is not None
            and int(steps.file[last]) == event.file
            and int(steps.line[last]) < event.line
        )
        key = (event.file, event.attempt)
        if behind and (event.kind in _BEGINNINGS or key in moved):
            moved.add(key)
            event = replace(event, attempt=event.attempt + 1)
        yield event


def _once(events: list[LogEvent]) -> list[LogEvent]:
    """Without what further ranks print of the same thing."""
    kept: list[LogEvent] = []
    latest: dict[tuple[str, int | None, int], LogEvent] = {}
    for event in events:
        key = (event.kind, event.step, event.attempt)
        before = latest.get(key)
        same = before is not None and before.rank != event.rank and _near(before, event)
        if not same:
            kept.append(event)
            latest[key] = event
        elif before is not None and (event.rank or 0) < (before.rank or 0):
            kept[kept.index(before)] = latest[key] = event
    return kept


def _near(first: LogEvent, second: LogEvent) -> bool:
    if first.time_us is None or second.time_us is None:
        return True
    return abs(first.time_us - second.time_us) <= 1_000_000


def goes_back(times: NDArray[np.int64]) -> bool:
    """Whether a clock was set back among `times` in the order of the log, NO_TIME left out."""
    return bool((np.diff(times[times != NO_TIME]) < -CLOCK_TOLERANCE).any())


def find_attempts(
    steps: Steps,
    events: Sequence[LogEvent],
    files: Mapping[int, Times],
    *,
    clock_restarts: bool = False,
) -> list[LoggedAttempt]:
    """The attempts of a run. `files` holds the first and last time stamp of each source.

    The first and last attempt in a file reach to its first and last stamp; with `clock_restarts` a
    later one began when its `elapsed_seconds` were 0.
    """
    attempts = []
    for row, after in itertools.pairwise([*_starts(steps), len(steps)]):
        number, own = int(steps.attempt[row]), steps.time_us[row:after]
        stamps = own[own != NO_TIME].tolist()
        file, last_file = int(steps.file[row]), int(steps.file[after - 1])
        opens = files.get(file, (None, None))[0] if not row or steps.file[row - 1] != file else None
        closes = (
            files.get(last_file, (None, None))[1]
            if after == len(steps) or steps.file[after] != last_file
            else None
        )
        if goes_back(own):
            # The lowest stamp is not the earliest one: use the order of the lines.
            attempts.append(LoggedAttempt(number, opens or stamps[0], closes or stamps[-1]))
            continue
        times = [
            *stamps,
            opens,
            closes,
            *(event.time_us for event in events if event.attempt == number),
        ]
        elapsed = float(steps.elapsed_seconds[row])
        if clock_restarts and row and own[0] != NO_TIME and 0 <= elapsed < LONGEST_SECONDS:
            times.append(int(own[0]) - round(elapsed * 1e6))
        known = [time for time in times if time is not None]
        attempts.append(LoggedAttempt(number, min(known, default=None), max(known, default=None)))
    return attempts


def find_waits(log: ParsedLog) -> list[Wait]:
    """All saves and evaluations that training waited for, in the order of the log."""
    found: list[Wait] = []
    for what in ("checkpoint", "evaluation", "export"):
        begun: LogEvent | None = None
        last: LogEvent | None = None
        for event in log.events:
            if event.kind == f"{what}_begin":
                begun = begun or event
            elif event.kind == f"{what}_end":
                if begun is None and found and last is not None and _same(last, event):
                    earlier = found.pop()
                    found.append(_wait(what, event, earlier.begin_us))
                else:
                    found.append(_wait(what, event, None if begun is None else begun.time_us))
                begun, last = None, event
            elif event.kind in ("failure", "restart", "end"):
                begun = None
    return sorted(found, key=lambda wait: -math.inf if wait.end_us is None else wait.end_us)


def _same(one: LogEvent, other: LogEvent) -> bool:
    """Whether two ends are of the same save or evaluation, printed by two ranks."""
    return (
        one.step is not None
        and one.step == other.step
        and one.attempt == other.attempt
        and one.rank != other.rank
    )


def _wait(what: WaitKind, end: LogEvent, begin_us: int | None) -> Wait:
    seconds = (
        end.seconds if end.seconds is not None and 0 <= end.seconds < LONGEST_SECONDS else None
    )
    if begin_us is None and end.time_us is not None and seconds is not None:
        begin_us = end.time_us - round(seconds * 1e6)
    if begin_us is not None and end.time_us is not None and end.time_us >= begin_us:
        seconds = (
            (end.time_us - begin_us) / 1e6
            if seconds is None
            else max(seconds, (end.time_us - begin_us) / 1e6)
        )
    return Wait(what, seconds, end.step, begin_us, end.time_us)


def written_seconds(log: ParsedLog) -> list[float]:
    """The seconds that asynchronous saves took (`checkpoint`), where the log has them."""
    return [
        event.seconds
        for event in log.events
        if event.kind == "checkpoint"
        and event.seconds is not None
        and 0 <= event.seconds < LONGEST_SECONDS
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
