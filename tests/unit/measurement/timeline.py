"""Timelines with known truth: what each microsecond of a made-up run was spent on, and the log that
the run leaves."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from drillyard.goodput import CATEGORIES
from drillyard.measurement.parsed_log import (
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


@dataclass
class Timeline:
    """A run that knows what each of its microseconds was spent on, and the log it leaves: rows,
    events, attempts."""

    clock: int = NEW_YEAR
    truth: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0))
    rows: list[dict] = field(default_factory=list)
    events: list[LogEvent] = field(default_factory=list)
    attempts: list[LoggedAttempt] = field(default_factory=list)
    steps: list[tuple[int, bool, str | None]] = field(
        default_factory=list
    )  # microseconds, done before, launch
    lines: int = 0
    highest: int = 0

    def line(self) -> int:
        self.lines += 1
        return self.lines

    def start(self) -> None:
        self.attempts.append(LoggedAttempt(len(self.attempts), self.clock, None))

    def spend(self, microseconds: int, category: str | None) -> None:
        self.clock += microseconds
        if category:
            self.truth[category] += microseconds

    def event(self, kind, **fields) -> None:
        attempt = len(self.attempts) - 1
        self.events.append(LogEvent(kind, self.clock, 0, self.line(), attempt=attempt, **fields))

    def step(
        self, number: int, microseconds: int, launch: str | None, timed: bool = True, **columns
    ) -> None:
        self.clock += microseconds
        self.steps.append((microseconds, number <= self.highest, launch))
        row = {
            "step": number,
            "time_us": self.clock,
            "attempt": len(self.attempts) - 1,
            "line": self.line(),
        }
        row |= {
            "again": number <= self.highest,
            "seconds": microseconds / 1e6 if timed else float("nan"),
        }
        self.rows.append(row | columns)
        self.highest = max(self.highest, number)

    def settle(self, timed: bool = True) -> dict[str, int]:
        """The truth, with the steps divided by the rules that the issue states."""
        later = [duration for duration, _, launch in self.steps if launch is None]
        median = statistics.median_low(later) if later else None
        for duration, again, launch in self.steps:
            own = min(duration, median) if launch and median else duration
            if launch and median is None and not timed:
                own = 0
            if launch:
                self.truth[launch] += duration - own
            usual = own if again or median is None else min(own, 3 * median)
            self.truth["recomputation" if again else "productive"] += usual
            self.truth["stalled"] += own - usual
        return self.truth

    def log(self, **clock) -> ParsedLog:
        columns = {
            name: [row[name] for row in self.rows] for name in (self.rows[0] if self.rows else ())
        }
        clock = {"zone": "stated", "first_time_us": NEW_YEAR, "last_time_us": self.clock} | clock
        steps = Steps.of(**columns)
        return ParsedLog(
            steps,
            self.events,
            LogFacts(),
            self.attempts,
            [ReadSource("run.log", "megatron")],
            LogClock(**clock),
            "megatron",
        )


def after_three_steps() -> Timeline:
    """A run that has started and done three steps of a second."""
    run = Timeline()
    run.start()
    for number in (1, 2, 3):
        run.step(number, SECOND, "startup" if number == 1 else None)
    return run
