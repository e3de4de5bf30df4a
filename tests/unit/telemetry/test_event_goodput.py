"""Goodput: categories sum to wall time exactly on any events, and equal the truth of simulated
runs."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drillyard.goodput import CATEGORIES
from drillyard.telemetry.events import EventName, goodput

EPOCH = datetime(2026, 1, 31, 23, 59, 59, tzinfo=UTC)


def at(microseconds: int, event: str, **fields) -> dict:
    moment = EPOCH + timedelta(microseconds=microseconds)
    return {
        "time": moment.isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "event": event,
        **fields,
    }


any_event = st.builds(
    lambda time, name, fields: at(time, name, **fields),
    st.integers(-10_000_000, 10_000_000_000),
    st.sampled_from([*sorted(get_args(EventName)), "something_else"]),
    st.fixed_dictionaries(
        {},
        optional={"step": st.integers(0, 30), "step_seconds": st.floats(0, 1e4, allow_nan=False)},
    ),
)


@given(st.lists(any_event, max_size=40), st.booleans())
@settings(max_examples=300)
def test_any_events_at_all_sum_to_wall_time(events, in_order):
    if in_order:
        events = sorted(events, key=lambda event: datetime.fromisoformat(event["time"]))
    result = goodput(events)
    times = result.times
    assert sum(times.values()) == result.wall_microseconds
    assert all(isinstance(value, int) and value >= 0 for value in times.values())
    if in_order and events:
        first, last = (datetime.fromisoformat(events[i]["time"]) for i in (0, -1))
        assert timedelta(microseconds=result.wall_microseconds) == last - first
        assert result.clock_steps_back == 0


@dataclass
class Simulation:
    """A run that knows the truth: a clock, the events it writes, and what each microsecond was
    spent on."""

    events: list[dict] = field(default_factory=list)
    clock: int = 0
    truth: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0))
    steps: list[tuple[int, bool, str | None]] = field(
        default_factory=list
    )  # microseconds, done before, launch

    def emit(self, name: str, **fields) -> None:
        self.events.append(at(self.clock, name, **fields))

    def spend(self, microseconds: int, category: str | None) -> None:
        self.clock += microseconds
        if category:
            self.truth[category] += microseconds

    def account_for_steps(self, timed: bool) -> None:
        later = [duration for duration, _, launch in self.steps if launch is None]
        median = statistics.median_low(later) if later else None
        for duration, redone, launch in self.steps:
            own = min(duration, median) if launch and median else duration
            if launch and median is None and not timed:
                own = 0  # nothing tells the first step from the launch
            if launch:
                self.truth[launch] += duration - own
            usable = own if redone or median is None else min(own, 3 * median)
            self.truth["recomputation" if redone else "productive"] += usable
            self.truth["stalled"] += own - usable


duration = st.integers(1, 50_000_000)


@pytest.mark.slow
@given(data=st.data(), timed=st.booleans())
@settings(max_examples=200)
def test_simulated_runs_are_accounted_for_to_the_microsecond(data, timed):
    run, highest, saved, total = Simulation(), 0, 0, data.draw(st.integers(1, 15))
    save_every, evaluate_every = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    redone, attempts = 0, 0
    run.emit("run_start")
    while True:
        launch = "restart" if run.steps else "startup"
        attempts += 1
        run.spend(data.draw(duration), launch)
        run.emit("round_start")
        run.spend(data.draw(duration), launch)
        if saved:
            run.emit("resume", step=saved)
        if data.draw(st.booleans()):
            run.emit("evaluation_begin", step=saved)
            run.spend(data.draw(duration), "evaluation")
            run.emit("evaluation_end", step=saved)
            run.spend(data.draw(duration), launch)
        step, cut_save = saved, False
        fails_at = data.draw(st.none() | st.integers(saved + 1, total)) if attempts < 4 else None
        first = True
        while step < total and step + 1 != fails_at:
            waited = data.draw(st.integers(0, 1000)) if timed else 0
            if first:
                run.spend(waited, launch)
            else:
                run.spend(waited, "unknown")
            took = data.draw(
                st.sampled_from(
                    [900_000, 1_000_000, 1_100_000, 9_000_000] if timed else [1_000_000]
                )
            )
            run.spend(took, None)
            step += 1
            run.steps.append((took, step <= highest, launch if first else None))
            redone += step <= highest
            highest, first = max(highest, step), False
            run.emit(
                "step", step=step, window_steps=1, **({"step_seconds": took / 1e6} if timed else {})
            )
            if step % save_every == 0:
                run.emit("checkpoint_begin", step=step)
                run.spend(data.draw(duration), "checkpoint")
                cut_save = step + 1 == fails_at and data.draw(st.booleans())
                if cut_save:
                    break
                run.emit("checkpoint_end", step=step)
                saved = step
            if step % evaluate_every == 0:
                run.emit("evaluation_begin", step=step)
                run.spend(data.draw(duration), "evaluation")
                run.emit("evaluation_end", step=step)
                run.emit("evaluation", step=step, results={})
        if fails_at is None:
            break
        if not cut_save:
            run.spend(
                data.draw(duration),
                (("restart" if run.steps else "startup") if first else "recomputation"),
            )
        run.emit("failure", reason="killed")
        if data.draw(st.booleans()):
            run.spend(data.draw(duration), "restart" if run.steps else "startup")
            run.emit("waiting", reason="no capacity")
            run.spend(data.draw(duration), "waiting")
        else:
            run.spend(data.draw(duration), "restart" if run.steps else "startup")
        run.emit("restart")
    run.emit("export_begin", step=total)
    run.spend(data.draw(duration), "checkpoint")
    run.emit("export_end", step=total)
    run.spend(data.draw(duration), "unknown")
    run.emit("end", status="completed")
    run.account_for_steps(timed)

    result = goodput(run.events)
    assert result.times == run.truth
    assert result.wall_microseconds == run.clock
    assert (result.steps_redone, result.restarts) == (redone, attempts - 1)
    assert result.goodput == run.truth["productive"] / run.clock


def test_a_window_done_again_in_part_counts_in_part():
    # Logged every 10 steps; killed after step 20, resumed from step 15, next logged at step 25.
    second = 1_000_000
    events = [
        at(0, "run_start"),
        at(0, "round_start"),
        at(10 * second, "step", step=10, window_steps=10, step_seconds=1.0),
        at(20 * second, "step", step=20, window_steps=10, step_seconds=1.0),
        at(23 * second, "failure"),
        at(24 * second, "round_start"),
        at(30 * second, "resume", step=15),
        at(40 * second, "step", step=25, window_steps=10, step_seconds=1.0),
        at(40 * second, "end", status="completed"),
    ]
    result = goodput(events)
    assert result.times["productive"] == 25 * second
    assert result.times["recomputation"] == (3 + 5) * second
    assert result.times["restart"] == 7 * second
    assert result.steps_redone == 5


def test_a_checkpoint_inside_a_window_keeps_its_steps_at_a_failure():
    second = 1_000_000
    events = [
        at(0, "round_start"),
        at(10 * second, "step", step=10, window_steps=10, step_seconds=1.0),
        at(15 * second, "checkpoint_begin", step=15),
        at(16 * second, "checkpoint_end", step=15),
        at(18 * second, "failure"),
    ]
    result = goodput(events)
    assert (result.times["productive"], result.times["checkpoint"]) == (15 * second, second)
    assert result.times["recomputation"] == 2 * second


def test_a_kill_nobody_saw_leaves_an_unknown_gap_and_a_pause_is_waiting():
    second = 1_000_000
    events = [
        at(0, "run_start"),
        at(10 * second, "step", step=1),
        at(11 * second, "step", step=2),
        at(100 * second, "run_start"),  # the whole host was gone in between
        at(105 * second, "resume", step=2),
        at(106 * second, "step", step=3),
        at(106 * second, "end", status="interrupted"),
        at(500 * second, "run_start"),
        at(505 * second, "resume", step=3),
        at(506 * second, "step", step=4),
    ]
    times = goodput(events).times
    assert (times["unknown"], times["waiting"]) == (89 * second, 394 * second)
    assert (times["startup"], times["restart"], times["productive"]) == (
        9 * second,
        10 * second,
        4 * second,
    )


def test_a_clock_that_steps_back_is_reported_and_costs_no_time():
    second = 1_000_000
    events = [
        at(0, "round_start"),
        at(10 * second, "step", step=1),
        at(11 * second, "step", step=2),
        at(-3000 * second, "step", step=3),
        at(-2999 * second, "step", step=4),
    ]
    result = goodput(events)
    assert result.clock_steps_back == 1
    assert result.wall_microseconds == 12 * second


def test_no_events_have_no_goodput():
    assert goodput([]).goodput is None
