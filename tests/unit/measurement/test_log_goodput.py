"""Goodput of logs: generated timelines with known truth are accounted for to the microsecond,
whatever events tell."""

from __future__ import annotations

import math
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.measurement.timeline import NEW_YEAR, SECOND, Timeline, after_three_steps

from drillyard import telemetry
from drillyard.config.run import RunConfig
from drillyard.errors import UserError
from drillyard.goodput import Moment, account
from drillyard.hardware import find_accelerator
from drillyard.measurement.log_goodput import goodput_of_log
from drillyard.measurement.parsed_log import NO_TIME, LogEvent, LoggedAttempt, ParsedLog
from drillyard.measurement.read_logs import read_logs
from drillyard.measurement.run_result import measure
from drillyard.reporting.summary import write_summary
from drillyard.telemetry import StepRecord, append_event


@pytest.fixture
def run_directory(tmp_path) -> Path:
    """Two attempts as the trainer and the supervisor log them: steps 1-4, a failure, resume from 2,
    steps 3-6."""
    directory = tmp_path / "trial"
    directory.mkdir()
    config = RunConfig.model_validate(
        {
            "name": "trial",
            "model": {"id": "some/model"},
            "data": {"source": "rows.jsonl", "sequence_length": 4096},
            "training": {"steps": 6, "optimizer": {"learning_rate": 1e-4}},
            "logging": {"tensorboard": False},
        }
    )
    append_event(directory, "run_start")
    for attempt, steps in ((0, (1, 2, 3, 4)), (1, (3, 4, 5, 6))):
        with telemetry.RunLog(
            directory, rank=0, config=config, console="none", attempt=attempt
        ) as log:
            log.event("round_start")
            log.parameters(70_000, 70_000, "6N", 420_000.0, find_accelerator("b200"))
            if attempt:
                log.event("resume", 2)
            for step in steps:
                time.sleep(0.01)
                log.step(StepRecord(step, 1.0 / step, 1e-4, None, 0.008, 16 * 4096, 16 * 4096, 16))
                with log.span("checkpoint", step):
                    time.sleep(0.002)
            if attempt:
                with log.span("export", 6):
                    time.sleep(0.005)
                time.sleep(0.005)
        append_event(directory, "end" if attempt else "failure", status="completed")
    return directory


def test_a_run_directory_has_the_figures_of_its_summary(run_directory):
    summary = write_summary(run_directory)
    got = measure(read_logs([run_directory])).as_json()
    for name in (
        "goodput",
        "wall_seconds",
        "seconds_by_category",
        "restarts",
        "steps_redone",
        "clock_steps_back",
    ):
        assert got[name] == summary[name], name
    assert summary["steps_redone"] == 2 and summary["restarts"] == 1
    assert got["mfu"] == pytest.approx(summary["mfu"], rel=1e-9)
    assert got["tokens_per_second_per_gpu"] == pytest.approx(
        summary["tokens_per_second_per_gpu"], rel=1e-9
    )


def test_the_steps_and_marks_of_a_run_directory_lead_to_the_same_sum_as_its_events(run_directory):
    log = read_logs([run_directory])
    by_events = goodput_of_log(log)
    log.run_directory = None
    by_log = goodput_of_log(log)
    assert by_log.times == pytest.approx(by_events.times, abs=1)
    assert by_log.restarts == by_events.restarts == 1


duration = st.integers(1, 50 * SECOND)
STEP_TIMES = st.sampled_from([900_000, SECOND, 1_100_000, 9 * SECOND])


@pytest.mark.slow
@given(data=st.data(), timed=st.booleans())
@settings(max_examples=200)
def test_generated_timelines_are_accounted_for_to_the_microsecond(data, timed):
    run, saved, total = (
        Timeline(),
        data.draw(st.sampled_from([-1, 0])),
        data.draw(st.integers(1, 15)),
    )
    run.highest = saved
    save_every, evaluate_every = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    while True:
        run.start()
        first, step = True, saved
        launch = "restart" if run.steps else "startup"
        run.spend(data.draw(duration), launch)
        if len(run.attempts) > 1:
            run.event("resume", step=saved)
        if data.draw(st.booleans()):
            run.event("evaluation_begin")
            run.spend(data.draw(duration), "evaluation")
            run.event("evaluation_end")
            run.spend(data.draw(duration), launch)
        fails_at = (
            data.draw(st.none() | st.integers(saved + 1, total)) if len(run.attempts) < 4 else None
        )
        while step < total and step + 1 != fails_at:
            step += 1
            took = data.draw(STEP_TIMES) if timed else SECOND
            run.step(step, took, launch if first else None, timed)
            first = False
            if step % save_every == 0:
                saved = step
                waited = data.draw(duration)
                if data.draw(st.booleans()):
                    run.event("checkpoint_begin", step=step, rank=0)
                    run.event("checkpoint_begin", step=step, rank=1)
                    run.spend(waited, "checkpoint")
                    run.event("checkpoint_end", step=step, rank=1)
                    run.spend(waited, "checkpoint")
                    run.event("checkpoint_end", step=step, rank=0)
                else:
                    run.spend(waited, "checkpoint")
                    run.event("checkpoint_end", step=step, seconds=waited / 1e6)
            if step % evaluate_every == 0 and step != total:
                waited = data.draw(duration)
                run.spend(waited, "evaluation")
                run.event("evaluation_end", seconds=waited / 1e6)
        if fails_at is None:
            break
        run.spend(data.draw(duration), launch if first else "recomputation")
        run.event("failure", text="killed")
        if data.draw(st.booleans()):
            run.spend(data.draw(duration), "restart" if run.steps else "startup")
            run.event("waiting")
            run.spend(data.draw(duration), "waiting")
        else:
            run.spend(data.draw(duration), "restart" if run.steps else "startup")
    run.event("end")

    truth, result = run.settle(timed), goodput_of_log(run.log())
    assert result.times == truth
    assert truth["unknown"] == 0
    assert result.wall_microseconds == run.clock - NEW_YEAR == sum(truth.values())
    assert result.restarts == len(run.attempts) - 1
    assert result.steps_redone == sum(again for _, again, _ in run.steps)


rows_of_steps = st.lists(
    st.tuples(
        st.integers(-3 * SECOND, 20 * SECOND),
        st.integers(0, 3),
        st.one_of(st.just(float("nan")), st.floats(0, 30)),
        st.floats(0, 0.5),
    ),
    max_size=30,
)


@given(rows_of_steps, st.sampled_from([0, 1000, SECOND]), st.integers(-5, 5))
@settings(max_examples=300)
def test_every_microsecond_has_one_category_whatever_the_steps_are(drawn, tick, position):
    steps, at, number = [], 0, position
    for after, advance, seconds, slack in drawn:
        at, number = at + after, number + advance
        steps.append(
            Moment(at, "step", number, None if math.isnan(seconds) else seconds, None, slack)
        )
    begin = [Moment(0, "run_start"), Moment(0, "resume", position)]
    again = [Moment(30 * SECOND, "failure"), Moment(31 * SECOND, "resume", position)]
    found = account([*begin, *steps, *again, *steps], tick_microseconds=tick)
    assert sum(found.times.values()) == found.wall_microseconds
    assert all(microseconds >= 0 for microseconds in found.times.values())


def steady(
    seconds: float, num_steps: int, tick_us: int = 1, precision: float = 0.0, **columns
) -> ParsedLog:
    """Steps of equal length from the first line on, stamped by a clock with this tick, printed to
    this precision."""
    unit = 2 * precision or 1e-9
    run = Timeline()
    run.start()
    for number in range(1, num_steps + 1):
        run.step(number, round(seconds * SECOND), None, **columns)
    for row in run.rows:
        row["time_us"] = row["time_us"] // tick_us * tick_us
        row |= {"seconds": round(seconds / unit) * unit, "seconds_precision": precision}
    return run.log(resolution_us=tick_us, last_time_us=run.rows[-1]["time_us"])


def test_rounded_durations_make_no_time_unknown():
    result = goodput_of_log(steady(14.5377, 100, precision=0.05))
    assert result.times["unknown"] == 0
    assert result.goodput > 0.98


@pytest.mark.parametrize(
    ("step_seconds", "precision"), [(0.3, 0.005), (0.7, 0.05), (1.6, 0.0), (14.5, 0.005)]
)
def test_stamps_in_whole_seconds_neither_stall_steps_nor_hide_them(step_seconds, precision):
    times = goodput_of_log(steady(step_seconds, 400, tick_us=SECOND, precision=precision)).times
    assert times["stalled"] == 0
    assert times["unknown"] <= 0.02 * 400 * step_seconds * SECOND
    assert times["productive"] == pytest.approx(400 * step_seconds * SECOND, rel=0.02)


def test_time_between_steps_that_nothing_explains_is_unknown():
    run = Timeline()
    run.start()
    for number in range(1, 6):
        run.spend(4 * SECOND, "unknown" if number > 1 else "startup")
        run.step(number, SECOND, "startup" if number == 1 else None)
    assert goodput_of_log(run.log()).times == run.settle()
    assert run.truth["unknown"] == 16 * SECOND


def test_a_gap_between_attempts_without_a_failure_is_unknown():
    run = after_three_steps()
    run.spend(90 * SECOND, "unknown")
    run.start()
    run.spend(5 * SECOND, "restart")
    for number in (3, 4):
        run.step(number, SECOND, "restart" if number == 3 else None)
    result = goodput_of_log(run.log())
    assert result.times == run.settle()
    assert (result.restarts, result.steps_redone) == (1, 1)


def test_the_first_line_of_an_attempt_may_be_its_first_step():
    run = after_three_steps()
    run.spend(90 * SECOND, "unknown")
    run.start()
    run.step(4, 5 * SECOND, "restart")
    run.attempts[1] = LoggedAttempt(1, run.clock, None)
    run.step(5, SECOND, None)
    assert goodput_of_log(run.log()).times == run.settle()


def test_a_failure_at_its_end_says_nothing_of_an_attempts_beginning():
    run = after_three_steps()
    run.spend(90 * SECOND, "unknown")
    run.start()
    run.spend(5 * SECOND, "restart")
    for number in (4, 5):
        run.step(number, SECOND, "restart" if number == 4 else None)
    run.spend(3 * SECOND, "recomputation")
    run.event("failure")
    assert goodput_of_log(run.log()).times == run.settle()


def test_other_ranks_of_the_attempt_before_may_go_on_after_the_next_began():
    run = after_three_steps()
    run.event("failure", text="rank 0")
    run.start()
    run.spend(5 * SECOND, "restart")
    run.events.append(
        LogEvent("failure", run.clock, 1, 7, attempt=0, text="rank 1 in a file of its own", rank=1)
    )
    run.step(4, SECOND, "restart")
    run.step(5, SECOND, None)
    result = goodput_of_log(run.log(last_time_us=run.clock - SECOND))
    assert result.times == run.settle()
    assert result.clock_steps_back == 0


def test_a_traceback_without_a_stamp_is_put_at_the_last_stamp_of_its_attempt():
    run = after_three_steps()
    run.spend(7 * SECOND, "recomputation")
    run.attempts[0] = LoggedAttempt(0, NEW_YEAR, run.clock)
    run.events.append(
        LogEvent(
            "failure", None, 0, run.line(), attempt=0, text="Traceback (most recent call last):"
        )
    )
    run.spend(60 * SECOND, "restart")
    run.start()
    run.step(3, SECOND, "restart")
    run.step(4, SECOND, None)
    assert goodput_of_log(run.log()).times == run.settle()


def test_a_save_of_which_only_the_beginning_is_said_is_not_counted_as_one():
    run = after_three_steps()
    run.event("checkpoint_begin", step=3)
    run.spend(30 * SECOND, "unknown")
    run.step(4, SECOND, None)
    assert goodput_of_log(run.log()).times == run.settle()
    assert goodput_of_log(run.log()).times["checkpoint"] == 0


def test_a_moving_average_says_nothing_about_one_step():
    log = steady(10.0, 20, window_steps=0)
    log.steps.seconds[:] = 2.0
    assert goodput_of_log(log).times["unknown"] == 0


def test_a_run_that_is_picked_up_at_step_1000_was_not_timed_before():
    run = Timeline(highest=1000)
    run.start()
    run.spend(100 * SECOND, "startup")
    for number in range(1010, 1060, 10):
        run.step(number, 10 * SECOND, "startup" if number == 1010 else None)
        run.rows[-1] |= {"seconds": 1.0, "window_steps": 10}
    result = goodput_of_log(run.log())
    assert (result.times["startup"], result.times["productive"]) == (100 * SECOND, 50 * SECOND)


def test_a_clock_that_steps_back_leaves_the_step_in_flight_unknown_and_is_counted():
    run = after_three_steps()
    run.spend(SECOND // 2, "unknown")
    run.event("checkpoint_end", seconds=0.0)
    run.clock -= 3600 * SECOND
    for number in (4, 5):
        run.step(number, SECOND, None)
    log = run.log(last_time_us=run.clock)
    result = goodput_of_log(log)
    assert result.clock_steps_back == 1
    assert result.times["unknown"] == SECOND // 2
    assert sum(result.times.values()) == result.wall_microseconds == 4.5 * SECOND


def test_the_job_may_have_begun_before_and_ended_after_its_lines():
    log = steady(1.0, 10)
    result = goodput_of_log(log, NEW_YEAR - 60 * SECOND, log.clock.last_time_us + 5 * SECOND)
    assert result.wall_microseconds == 75 * SECOND
    assert (result.times["startup"], result.times["unknown"], result.times["productive"]) == (
        60 * SECOND,
        5 * SECOND,
        10 * SECOND,
    )
    with pytest.raises(UserError, match="--job-start is after"):
        goodput_of_log(log, NEW_YEAR + 1)
    with pytest.raises(UserError, match="--job-end is before"):
        goodput_of_log(log, None, NEW_YEAR + 1)


def test_without_time_stamps_there_is_no_goodput():
    log = steady(1.0, 10)
    log.steps.time_us[:] = NO_TIME
    assert goodput_of_log(log) is None


def test_a_log_of_lines_that_tells_all_leaves_nothing_unknown(tmp_path):
    """A PerfLogger's log behind gcloud's prefix: two starts, a killed rank in between, a step done
    again."""
    clock, lines = datetime(2026, 1, 31, 23, 58, tzinfo=UTC), []

    def say(after_seconds: float, text: str) -> None:
        nonlocal clock
        clock += timedelta(seconds=after_seconds)
        stamp = clock.strftime("%Y-%m-%dT%H:%M:%S.%f") + "123Z"
        lines.append(f"INFO {stamp} [resource.labels.containerName: job] {text}\n")

    def step(number: int, seconds: float, after_seconds: float) -> None:
        say(
            after_seconds,
            f"Step: {number} | Time: {seconds:.2f}s | TFLOPs/s/GPU: 9.0 | Tokens/s/GPU: 9 |"
            " Loss: 1.0",
        )

    say(0, "[PerfLogger] Using 70.55B parameters for TFLOPs calculation.")
    step(1, 27.02, 30.5)
    for number in (2, 3, 4):
        step(number, 14.54, 14.537341)
    say(5.25, "failed (exitcode: -9) local_rank: 3 (pid: 77) of binary: /usr/bin/python")
    say(60.125, "[PerfLogger] Using 70.55B parameters for TFLOPs calculation.")
    step(3, 20.01, 40.75)
    for number in (4, 5):
        step(number, 14.54, 14.541987)
    path = tmp_path / "job.log"
    path.write_text("".join(lines))

    result = goodput_of_log(read_logs([path]))
    own, again = 14_537_341, 14_541_987
    assert result.times == {
        "startup": 30_500_000 - own,
        "productive": own + 3 * own + again,
        "stalled": 0,
        "recomputation": 5_250_000 + own + again,
        "checkpoint": 0,
        "evaluation": 0,
        "restart": 60_125_000 + 40_750_000 - own,
        "waiting": 0,
        "unknown": 0,
    }
    assert (result.restarts, result.steps_redone) == (1, 2)
