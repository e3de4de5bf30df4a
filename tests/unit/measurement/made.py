"""Run logs made of columns, for tests of what is computed from them."""

from __future__ import annotations

from typing import Any

from drillyard.measurement.parsed_log import (
    NO_TIME,
    LogClock,
    LogEvent,
    LogFacts,
    LoggedAttempt,
    ParsedLog,
    ReadSource,
    Steps,
)

SECOND = 1_000_000
NEW_YEAR = 1_798_761_600 * SECOND
"""2027-01-01T00:00:00Z in microseconds since 1970."""


def run_log(
    events: list[LogEvent] | None = None,
    facts: dict[str, Any] | None = None,
    format: str = "megatron",
    **columns,
):
    """A log with these columns of steps; `step` counts from 1 and `line` from 11 unless given.
    `resolution_us` is the clock's."""
    resolution_us = columns.pop("resolution_us", 1)
    length = len(next(iter(columns.values())))
    columns = {"step": list(range(1, length + 1)), "line": list(range(11, length + 11))} | columns
    steps = Steps.of(**columns)
    stamped = [int(time) for time in steps.time_us if time != NO_TIME]
    first, last = (stamped[0], stamped[-1]) if stamped else (None, None)
    numbers = sorted(set(steps.attempt.tolist()))
    attempts = []
    for number in numbers:
        times = [int(time) for time in steps.time_us[steps.attempt == number] if time != NO_TIME]
        attempts.append(
            LoggedAttempt(number, times[0] if times else None, times[-1] if times else None)
        )
    clock = LogClock("stated" if stamped else "none", first, last, resolution_us)
    return ParsedLog(
        steps,
        events or [],
        LogFacts(**(facts or {})),
        attempts,
        [ReadSource("run.log", format)],
        clock,
        format,
    )


def stamps(seconds: list[float], start_us: int = NEW_YEAR) -> list[int]:
    """The time stamps of steps of these durations, one after the other."""
    times, now = [], start_us
    for duration in seconds:
        now += round(duration * SECOND)
        times.append(now)
    return times
