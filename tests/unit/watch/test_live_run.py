"""The state of a run as its lines come in."""

from __future__ import annotations

import pytest
from tests.unit.measurement.changed_gpus import ONE_THEN_FOUR, TWO_THEN_ONE, write_changed_run
from tests.unit.reporting import runs

from drillyard.reporting.gpu_price import GpuPrice
from drillyard.reporting.summary import summarize
from drillyard.telemetry import read_metrics
from drillyard.telemetry.events import event_microseconds, read_events
from drillyard.telemetry.jsonlines import read_records
from drillyard.watch.live_run import RECENT_STEPS, LiveRun
from drillyard.watch.screen import text_lines


def followed(directory, until=None):
    """The run as it was when its event number `until` had been written."""
    events = read_events(directory)[:until]
    last = event_microseconds(events[-1])
    metrics = [
        r for r in read_records(directory / "metrics.jsonl") if event_microseconds(r) <= last
    ]
    run = LiveRun("trial")
    for event in events:
        run.add_event(event)
    for record in metrics:
        run.add_metrics(record)
    run.refresh_goodput()
    return run


def index_of(directory, name, which=0):
    places = [place for place, event in enumerate(read_events(directory)) if event["event"] == name]
    return places[which] + 1


def test_a_finished_run_agrees_with_its_summary(run_directory):
    run, summary = followed(run_directory), summarize(run_directory)
    assert (run.phase, run.over) == ("completed", True)
    assert (run.step, run.total_steps, run.num_gpus) == (summary["steps"], 160, summary["num_gpus"])
    assert (run.tokens, run.restarts, run.failures) == (
        summary["tokens"],
        summary["restarts"],
        summary["failures"],
    )
    assert run.account.goodput == summary["goodput"]
    assert run.wall_seconds(0) == summary["wall_seconds"]
    assert run.seconds_left(0) is None
    steps = read_metrics(run_directory)
    assert run.steps.tolist() == [record["step"] for record in steps]
    assert [repr(loss) for loss in run.losses] == [repr(record["loss"]) for record in steps]
    assert run.held_out["questions.sql_execution"] == (160, 0.8)


def test_a_failure_and_what_follows_are_reported_as_they_come(run_directory):
    failed = followed(run_directory, index_of(run_directory, "failure"))
    assert (failed.phase, failed.step, failed.failures) == ("failed", runs.FAILED_AFTER, 1)
    again = followed(run_directory, index_of(run_directory, "round_start", 1))
    assert (again.phase, again.restarts) == ("starting", 1)


def test_steps_done_again_take_the_place_of_what_they_replace(run_directory):
    cut = index_of(run_directory, "resume") + 3
    run = followed(run_directory, cut)
    assert run.steps.tolist() == list(range(1, run.step + 1))
    assert runs.RESUMED_FROM < run.step < runs.FAILED_AFTER
    assert run.tokens == run.step * runs.TOKENS


def test_speed_is_of_the_last_steps_of_this_attempt_without_its_first(run_directory):
    cut = index_of(run_directory, "resume") + 4
    run = followed(run_directory, cut)
    assert [record["step"] for record in run.speed] == list(
        range(runs.RESUMED_FROM + 2, run.step + 1)
    )
    assert run.median("step_seconds") < 15
    assert run.median("mfu") == pytest.approx(
        runs.TOKENS / 14.53 / 16 * runs.FLOPS_PER_TOKEN / runs.PEAK, rel=1e-2
    )


def test_the_time_left_is_at_the_pace_of_the_clock_saves_included(run_directory):
    cut = index_of(run_directory, "checkpoint", 1)
    run = followed(run_directory, cut)
    first, last = run.recent[1], run.recent[-1]
    pace = (
        (event_microseconds(last) - event_microseconds(first))
        / 1e6
        / (last["step"] - first["step"])
    )
    assert pace > run.median("step_seconds")
    assert run.seconds_left(run.last_us) == pytest.approx((160 - run.step) * pace)


def test_no_time_left_is_reported_before_three_steps(run_directory):
    cut = index_of(run_directory, "step", 1)
    assert followed(run_directory, cut).seconds_left(0) is None


def test_dollars_run_with_the_clock_and_stop_with_the_run(run_directory):
    run = followed(run_directory, index_of(run_directory, "step", 20))
    run.price = GpuPrice(9.0, "as given")
    hour = 3_600_000_000
    assert run.dollars(run.last_us + hour // 120) - run.dollars(run.last_us) == pytest.approx(
        16 * 9.0 / 120
    )
    over = followed(run_directory)
    over.price = run.price
    assert over.dollars(over.last_us) == over.dollars(over.last_us + hour)


def test_waiting_costs_nothing():
    run = LiveRun("trial", price=GpuPrice(3600.0, "as given"), num_gpus=1)
    for moment, name in (
        ("12:00:00", "run_start"),
        ("12:00:10", "waiting"),
        ("12:01:10", "run_start"),
    ):
        run.add_event({"time": f"2026-01-31T{moment}.000000Z", "event": name})
    run.refresh_goodput()
    assert run.dollars(run.last_us) == pytest.approx(10.0)


@pytest.mark.parametrize(("attempts", "gpu_seconds"), [(TWO_THEN_ONE, 122), (ONE_THEN_FOUR, 124)])
def test_each_second_costs_the_gpus_that_the_run_had(tmp_path, attempts, gpu_seconds):
    directory = write_changed_run(tmp_path / "run", *attempts)
    run = followed(directory)
    run.price = GpuPrice(3600.0, "as given")
    assert run.dollars(run.last_us) == pytest.approx(gpu_seconds)
    assert run.num_gpus == attempts[1].gpus


def test_a_start_on_other_gpus_counts_from_its_first_moment(tmp_path):
    directory = write_changed_run(tmp_path / "run", *TWO_THEN_ONE)
    run = followed(directory, index_of(directory, "round_start", 1))
    run.price = GpuPrice(3600.0, "as given")
    assert run.num_gpus == 1
    assert run.dollars(run.last_us) == pytest.approx(44 * 2)
    assert run.dollars(run.last_us + 10_000_000) == pytest.approx(44 * 2 + 10)
    # The speed shown is still that of two GPUs: 150 each.
    assert any("150.0 per GPU, 300.0 in all" in line for line in text_lines(run, run.last_us))
    metrics_first = LiveRun("trial")
    for record in read_records(directory / "metrics.jsonl"):
        metrics_first.add_metrics(record)
    for event in read_events(directory):
        metrics_first.add_event(event)
    assert metrics_first.num_gpus == 1
    assert any("200.0 per GPU, 200.0 in all" in line for line in text_lines(metrics_first, 0))


def test_a_run_that_says_nothing_any_more_is_silent(run_directory):
    run = followed(run_directory, index_of(run_directory, "step", 20))
    assert run.silent_seconds(run.last_us + 100_000_000) is None
    assert run.silent_seconds(run.last_us + 200_000_000) == 200
    assert run.seconds_left(run.last_us + 200_000_000) is None
    assert followed(run_directory).silent_seconds(2**60) is None


def test_without_a_price_nothing_is_said_to_cost(run_directory):
    assert followed(run_directory).dollars(0) is None


@pytest.mark.parametrize(
    ("steps", "counted"),
    [(2, 1), (RECENT_STEPS - 1, RECENT_STEPS - 2), (RECENT_STEPS, RECENT_STEPS)],
)
def test_speed_leaves_the_first_step_out_until_it_is_forgotten(steps, counted):
    run = LiveRun("trial")
    run.recent.extend({"step_seconds": float(step)} for step in range(steps))
    assert len(run.speed) == counted
    assert run.speed[0]["step_seconds"] == steps - counted
