"""Goodput of any framework's log: its steps and events as the moments of `drillyard.goodput`, where
the sum is.

A Drillyard run directory is taken by its events, as the trainer does for summary.json, so both give
the same figures. For other logs steps and events are merged in the order of their lines (of their
time stamps, where they come from different files), and what a log states less clearly than our
events is read as follows:

- Wall time is from the first time stamp to the last, or `job_start` to `job_end`. What comes before
  the first line belongs to start-up, what comes after the last step is unknown unless events say
  more.
- An attempt starts with its first time stamp. Where the log shows no failure before it, the gap is
  unknown.
- A failure without a time stamp of its own (a traceback between stamped lines) is put at the last
  stamp of its attempt.
- A save or evaluation of which only the end is logged has taken the seconds that the line says. One
  of which only the beginning is logged before the next step is not counted: its end is not known.
- The first step of an attempt follows on the step that its resume names, else on the one a logging
  interval before.
- A duration that is a moving average is not that of one step: the time stamps alone count.

Limits: no time stamps, no goodput. With time stamps in whole seconds each category is off by up to
a second per event.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from drillyard.errors import UserError
from drillyard.goodput import Goodput, Moment, Overlay, account
from drillyard.measurement.gpu_counts import gpus_by_attempt
from drillyard.measurement.parsed_log import LONGEST_SECONDS, NO_TIME, LogEvent, ParsedLog, Steps
from drillyard.telemetry.events import INTERRUPTIONS
from drillyard.telemetry.events import goodput as goodput_of_events


def goodput_of_log(
    log: ParsedLog, job_start_us: int | None = None, job_end_us: int | None = None
) -> Goodput | None:
    """The account of a run; None where its steps carry no time stamps.

    The job's start and end (UTC microseconds) are those that the scheduler states; None: by the
    log. Raises UserError for a job that starts after the log's first time stamp, or ends before its
    last.
    """
    if log.run_directory is not None and job_start_us is None and job_end_us is None:
        from drillyard.telemetry.events import read_events

        if events := read_events(log.run_directory):
            return goodput_of_events(events)
    if not log.steps.has("time_us"):
        return None
    first, last = _wall(log, job_start_us, job_end_us)
    tick = log.clock.resolution_us if log.clock.resolution_us > 1 else 0
    return replace(
        account(_moments(log, first, last), tick_microseconds=tick),
        restarts=max(len(log.attempts) - 1, 0),
    )


def _wall(log: ParsedLog, start_us: int | None, end_us: int | None) -> tuple[int, int]:
    """The first and the last moment. The last may be the earlier one where the clock was set
    back."""
    stamped = log.steps.time_us[log.steps.time_us != NO_TIME]
    first = int(stamped[0]) if log.clock.first_time_us is None else log.clock.first_time_us
    last = int(stamped[-1]) if log.clock.last_time_us is None else log.clock.last_time_us
    if start_us is not None and start_us > first:
        raise UserError(
            "--job-start is after the first time stamp of the log; is its time zone right"
            " (--timezone)?"
        )
    if end_us is not None and end_us < last:
        raise UserError(
            "--job-end is before the last time stamp of the log; is its time zone right"
            " (--timezone)?"
        )
    return first if start_us is None else start_us, last if end_us is None else end_us


def _moments(log: ParsedLog, first: int, last: int) -> Iterator[Moment]:
    """All that happened, in order, from the start of the run to its last time stamp."""
    yield Moment(first, "run_start")
    stamped = log.steps.time_us != NO_TIME
    steps = log.steps if stamped.all() else log.steps.select(stamped)
    events: dict[int, list[LogEvent]] = {}
    for event in log.events:
        events.setdefault(event.attempt, []).append(event)
    starts = {attempt.number: attempt for attempt in log.attempts}
    gpus = gpus_by_attempt(log)
    # How many steps apart neighbouring rows of an attempt usually are.
    gaps = np.diff(steps.step)[np.diff(steps.attempt) == 0]
    interval = max(int(np.median(gaps)), 1) if len(gaps) else 1
    lowest = min(int(steps.step.min()) - 1, 0) if len(steps) else 0
    latest = first
    for number in sorted({*events, *starts, *np.unique(steps.attempt).tolist()}):
        start = starts.get(number)
        first_row, last_row = np.searchsorted(steps.attempt, [number, number + 1])
        rows = steps.select(slice(int(first_row), int(last_row)))
        ours = events.get(number, [])
        placed = _placed(ours, None if start is None else start.last_time_us)
        begun = None if start is None else start.first_time_us
        if (
            number > 0
            and not _start_is_logged(rows, placed, begun)
            and (begun is not None or len(rows))
        ):
            yield Moment(_beginning(latest, begun, rows), "round_start", num_gpus=gpus.get(number))
        for item in _attempt(rows, placed, _position(rows, ours, interval, lowest)):
            latest = item.at
            yield item._replace(num_gpus=gpus[number]) if number in gpus else item
    yield Moment(max(last, latest), "over")


def _start_is_logged(rows: Steps, placed: list[tuple[int, LogEvent]], begun: int | None) -> bool:
    """Whether events no later than the beginning of an attempt show how the one before ended."""
    return any(
        place == 0
        and event.kind in ("restart", "failure", "waiting")
        and (begun is None or time_us <= begun)
        for place, (time_us, event) in zip(_places(rows, placed), placed, strict=True)
    )


def _beginning(latest: int, begun: int | None, rows: Steps) -> int:
    """Begin of an attempt. Not before the last that is known of the one before, whose other ranks
    may have gone on, unless its steps show a clock that was set back. Where no line comes before
    its first step: when that began."""
    if not len(rows):
        assert begun is not None
        return begun
    first = int(rows.time_us[0])
    if begun is None or begun >= first:
        (step,) = _step_moments(rows, 0, 1)
        begun = first - round((step.seconds or 0) * max(int(rows.window_steps[0]), 1) * 1e6)
    return latest if begun < latest <= first else begun


def _placed(events: Sequence[LogEvent], at_failure: int | None) -> list[tuple[int, LogEvent]]:
    """The events of an attempt that mean something and have a time, each with it; those of several
    files by time."""
    placed = []
    for event in events:
        time_us = at_failure if event.time_us is None and event.kind == "failure" else event.time_us
        if time_us is not None and event.kind in INTERRUPTIONS:
            placed.append((time_us, event))
    if len({event.file for _, event in placed}) > 1:
        placed.sort(key=lambda one: one[0])
    return placed


def _position(rows: Steps, events: Sequence[LogEvent], interval: int, lowest: int) -> int | None:
    """The step on which the first row of an attempt follows."""
    if not len(rows):
        return None
    first = int(rows.step[0])
    before = max(first - max(int(rows.window_steps[0]), int(rows.stands_for[0]), interval), lowest)
    resumed = [event.step for event in events if event.kind == "resume" and event.step is not None]
    return next((step for step in reversed(resumed) if before <= step < first), before)


def _attempt(
    rows: Steps, events: list[tuple[int, LogEvent]], position: int | None
) -> Iterator[Moment]:
    """The rows and events of one attempt in the order in which they happened."""
    done = 0

    def up_to(until: int) -> Iterator[Moment]:
        if done == 0 and until > 0 and position is not None:
            yield Moment(int(rows.time_us[0]), "resume", position)
        yield from _step_moments(rows, done, until)

    for until, moment in _without_doubles(
        zip(_places(rows, events), events, strict=True), len(rows)
    ):
        yield from up_to(until)
        done = max(done, until)
        yield moment
    yield from up_to(len(rows))


def _step_moments(rows: Steps, begin: int, end: int) -> Iterator[Moment]:
    """Rows `begin` to `end` - 1 as moments; `seconds` that cannot be those of a step are left
    out."""
    columns = (rows.time_us, rows.step, rows.window_steps, rows.seconds, rows.seconds_precision)
    for at, step, window, seconds, slack in zip(
        *(column[begin:end].tolist() for column in columns), strict=True
    ):
        if window and 0 <= seconds < LONGEST_SECONDS:
            yield Moment(at, "step", step, seconds, None, slack)
        else:
            yield Moment(at, "step", step)


def _places(rows: Steps, events: list[tuple[int, LogEvent]]) -> list[int]:
    """For each event, how many rows come before it: by line within a file, by time between
    files."""
    places, place = [], 0
    in_order = bool((np.diff(rows.line) > 0).all())
    for time_us, event in events:
        if in_order and len(rows) and bool((rows.file == event.file).all()):
            before = int(np.searchsorted(rows.line, event.line))
        else:
            before = int(
                np.searchsorted(
                    rows.time_us, time_us, "left" if event.kind == "restart" else "right"
                )
            )
        place = max(place, before)
        places.append(place)
    return places


def _without_doubles(
    placed: Iterable[tuple[int, tuple[int, LogEvent]]], num_rows: int
) -> list[tuple[int, Moment]]:
    """The events as moments with the number of rows before each. Of what several ranks print the
    first beginning and the last end are kept; a beginning without an end before the next step is
    dropped."""
    kept: list[tuple[int, Moment] | None] = []
    begun: dict[Overlay, int] = {}
    ended: dict[Overlay, tuple[int, int | None]] = {}
    for place, (time_us, event) in placed:
        kind, overlay = INTERRUPTIONS[event.kind]
        seconds = (
            event.seconds
            if event.seconds is not None and 0 <= event.seconds < LONGEST_SECONDS
            else None
        )
        for name, index in list(begun.items()):
            item = kept[index]
            if item is not None and item[0] < place:
                kept[begun.pop(name)] = None
        if overlay is None:
            begun.clear()
            ended.clear()
        elif kind == "begin":
            if overlay in begun:
                continue
            begun[overlay] = len(kept)
            ended.pop(overlay, None)
        else:
            earlier, of_step = ended.get(overlay, (-1, None))
            item = None if earlier < 0 else kept[earlier]
            if (
                item is not None
                and item[0] == place
                and of_step == event.step
                and overlay not in begun
            ):
                kind, kept[earlier] = item[1].kind, None
            elif begun.pop(overlay, None) is None:
                kind = "done"
            ended[overlay] = len(kept), event.step
        kept.append((place, Moment(time_us, kind, None, seconds, overlay)))
    for index in begun.values():
        item = kept[index]
        if item is not None and item[0] < num_rows:
            kept[index] = None
    return [item for item in kept if item is not None]
