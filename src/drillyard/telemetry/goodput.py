"""Goodput: where the wall time of a run went, from its events alone, across all restarts.

The idea: the time between two neighbouring events belongs to exactly one category, or is split between two whose parts
add up to it. All sums are in integer microseconds, so the categories sum to wall time exactly, on any list of events.

| category | what it holds |
|---|---|
| startup | until the first step of the run, and what that step took over the median step (compiling, warming up) |
| productive | steps, each up to 3 times the median; a step done again never counts twice |
| stalled | what a step took beyond 3 times the median |
| recomputation | steps done again after a resume, and the one in flight at a failure |
| checkpoint | training waited for a save (the blocking part of asynchronous ones), or `final/` was written |
| evaluation | training waited for an evaluation |
| restart | from a failure (or a later start) to the first step of the new round, with its excess over the median |
| waiting | nothing ran because nothing could or should: after `end` or `waiting`, until the next start |
| unknown | the rest: never counted as productive. A kill that nobody witnessed leaves its gap here |

A step's own time is its `step_seconds` where the event has it, never more than the time since the event before; the
rest of that time is unknown. Without `step_seconds` all of it is the step's, and the first step after a launch is taken
for a median one (none, if there is no other step). Goodput is productive over wall time.

Limits: with `logging.every_steps: N` the window in flight at a failure counts as recomputation as a whole. A clock that
steps back by more than a second is carried on from where it was (`clock_steps_back` counts these); the time it hid is
not seen.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final

from drillyard.telemetry.events import event_microseconds

STALL_FACTOR: Final = 3
"""A step longer than this many medians is a stall from there on."""

_CLOCK_TOLERANCE: Final = 1_000_000
"""Microseconds by which neighbouring lines may be out of order, as several processes append to one file."""

_PROGRESS: Final = frozenset({"step", "first_step", "checkpoint_begin", "evaluation_begin"})
_OVERLAYS: Final = {"checkpoint": "checkpoint", "evaluation": "evaluation", "export": "checkpoint"}


@dataclass(slots=True)
class Times:
    """Microseconds by category."""

    startup: int = 0
    productive: int = 0
    stalled: int = 0
    recomputation: int = 0
    checkpoint: int = 0
    evaluation: int = 0
    restart: int = 0
    waiting: int = 0
    unknown: int = 0

    def add(self, category: str, microseconds: int) -> None:
        setattr(self, category, getattr(self, category) + microseconds)


CATEGORIES: Final = tuple(item.name for item in fields(Times))


@dataclass(frozen=True, slots=True)
class Goodput:
    """The account of a run: `times` in microseconds sums to `wall_microseconds` exactly."""

    wall_microseconds: int
    times: Times
    restarts: int
    steps_redone: int
    clock_steps_back: int

    @property
    def goodput(self) -> float | None:
        """Productive over wall time; None for a run without any duration."""
        return self.times.productive / self.wall_microseconds if self.wall_microseconds else None

    def seconds(self) -> dict[str, float]:
        """Seconds by category."""
        return {name: microseconds / 1e6 for name, microseconds in asdict(self.times).items()}


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Steps done between two marks of progress. `own` microseconds were theirs; `redone` of the steps had been done."""

    own: int
    steps: int
    redone: int
    launch: str | None
    """The category of the launch that this stretch ended; None when it followed other steps."""
    timed: bool
    """Whether `own` was measured; otherwise it is all of the time since the mark before, a launch included."""


@dataclass(slots=True)
class _Account:
    """The state of a run while its events are read in order."""

    times: Times = field(default_factory=Times)
    stretches: list[_Stretch] = field(default_factory=list)
    phase: str = "waiting"
    """waiting, launch, training, or the category of an overlay (checkpoint, evaluation)."""
    under: str = "launch"
    """The phase to which an overlay returns."""
    pending: int = 0
    """Microseconds in launch or training since the last mark of progress."""
    position: int = 0
    """Steps completed in this round, the checkpoint's included."""
    highest: int = 0
    """Steps completed in any round."""

    @property
    def launch(self) -> str:
        return "restart" if self.stretches else "startup"

    def drop_pending(self, category: str) -> None:
        """No step will account for the pending time: it goes to `category`."""
        self.times.add(category, self.pending)
        self.pending = 0

    def elapse(self, microseconds: int, name: str) -> None:
        """Account for the time before an event, by the phase it ends."""
        unwitnessed = (name == "run_start" and self.phase == "launch") or (
            name in ("run_start", "round_start") and self.phase not in ("launch", "waiting")
        )
        if unwitnessed:
            self.drop_pending("unknown")
            self.times.add("unknown", microseconds)
        elif self.phase == "waiting" and name == "end":
            # Rank 0 has said so before the supervisor: the ranks were shutting down.
            self.times.add("unknown", microseconds)
        elif self.phase in ("launch", "training"):
            self.pending += microseconds
        else:
            self.times.add(self.phase, microseconds)

    def enter(self, event: Mapping[str, Any]) -> None:
        """Change the phase as an event says."""
        name, step = event["event"], event.get("step")
        if (
            name in _PROGRESS
            and isinstance(step, int)
            and step > self.position
            and self.phase in ("launch", "training")
        ):
            self.progress(step, event.get("step_seconds"))
        if name in ("run_start", "round_start", "restart", "failure"):
            self.leave("recomputation")
            self.phase = "launch"
            self.position = 0
        elif name == "resume" and isinstance(step, int):
            self.position = step
        elif name in ("end", "waiting"):
            self.leave("unknown")
            self.phase = "waiting"
        elif name.endswith("_begin") and name.removesuffix("_begin") in _OVERLAYS:
            if self.phase in ("launch", "training"):
                self.under = self.phase
            self.phase = _OVERLAYS[name.removesuffix("_begin")]
        elif name.endswith("_end") and self.phase == _OVERLAYS.get(name.removesuffix("_end")):
            self.phase = self.under

    def leave(self, training_category: str) -> None:
        """The round is over: what was in flight goes to `training_category`, or to the launch that did not finish."""
        in_training = self.phase == "training" or (self.phase not in ("launch", "waiting") and self.under == "training")
        self.drop_pending(training_category if in_training else self.launch)

    def progress(self, step: int, step_seconds: float | None) -> None:
        """Steps up to `step` are completed: the pending time is theirs as far as they account for it."""
        steps = step - self.position
        own = self.pending if step_seconds is None else min(self.pending, round(step_seconds * 1e6) * steps)
        launch = self.launch if self.phase == "launch" else None
        self.times.add(launch or "unknown", self.pending - own)
        redone = max(0, min(step, self.highest) - self.position)
        self.stretches.append(_Stretch(own, steps, redone, launch, step_seconds is not None))
        self.pending, self.position, self.highest = 0, step, max(step, self.highest)
        self.phase = "training"

    def settle_steps(self) -> None:
        """Divide the time of all steps, now that the median is known."""
        later = [stretch.own // stretch.steps for stretch in self.stretches if stretch.launch is None]
        median = statistics.median_low(later) if later else None
        for stretch in self.stretches:
            own = stretch.own
            if stretch.launch is not None and (median is not None or not stretch.timed):
                own = min(own, (median or 0) * stretch.steps)
                self.times.add(stretch.launch, stretch.own - own)
            again = own * stretch.redone // stretch.steps
            new = own - again
            limit = new if median is None else median * STALL_FACTOR * (stretch.steps - stretch.redone)
            self.times.add("recomputation", again)
            self.times.add("productive", min(new, limit))
            self.times.add("stalled", max(0, new - limit))


def goodput(events: Iterable[Mapping[str, Any]]) -> Goodput:
    """The account of a run from its events (see events.py) in the order they were written."""
    account = _Account()
    start = cursor = None
    offset = clock_steps_back = starts = rounds = 0
    for event in events:
        moment = event_microseconds(event) + offset
        if start is None or cursor is None:
            start = cursor = moment
        if moment < cursor - _CLOCK_TOLERANCE:
            offset += cursor - moment
            clock_steps_back += 1
        moment = max(moment, cursor)
        account.elapse(moment - cursor, event["event"])
        account.enter(event)
        cursor = moment
        starts += event["event"] == "run_start"
        rounds += event["event"] == "round_start"
    account.leave("unknown")
    account.settle_steps()
    return Goodput(
        wall_microseconds=0 if start is None or cursor is None else cursor - start,
        times=account.times,
        restarts=max(0, (rounds or starts) - 1),
        steps_redone=sum(stretch.redone for stretch in account.stretches),
        clock_steps_back=clock_steps_back,
    )
