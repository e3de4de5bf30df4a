"""When to save: the published values, and what holds for any run."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.unit.estimation.requests import daly_wall_seconds

from drillyard.estimation.checkpoint_interval import (
    SaveSchedule,
    choose_schedule,
    daly_interval,
    expected_wall_seconds,
    first_order_ettr,
    least_interval_steps,
    young_interval,
)

HOUR, DAY = 3600.0, 86_400.0
MTBF = st.floats(60.0, 1e7)


@pytest.mark.parametrize(
    ("blocking", "mtbf", "young", "daly", "efficiency"),
    [
        (5, 3.09 * HOUR, 333.5, 330.2, 0.944),
        (30, 3.09 * HOUR, 817.0, 797.1, 0.904),
        (300, 3.09 * HOUR, 2583, 2387, 0.764),
        (60, 7.9 * HOUR, 1847, 1808, 0.927),
    ],
)
def test_the_checked_values(blocking, mtbf, young, daly, efficiency):
    assert young_interval(blocking, mtbf) == pytest.approx(young, rel=3e-4)
    assert daly_interval(blocking, mtbf) == pytest.approx(daly, rel=3e-4)
    wall = daly_wall_seconds(1.0, daly_interval(blocking, mtbf), blocking, 300, mtbf)
    assert 1 / wall == pytest.approx(efficiency, abs=6e-4)


@pytest.mark.parametrize(
    ("nodes", "interval", "blocking", "ettr"),
    [(2048, HOUR, 300, 0.624), (1536, young_interval(10, DAY / (1536 * 6.5e-3)), 10, 0.919)],
)
def test_the_two_published_ettr_figures(nodes, interval, blocking, ettr):
    assert first_order_ettr(nodes * 6.5e-3 / DAY, 300, interval, blocking) == pytest.approx(
        ettr, abs=5e-4
    )


def test_beyond_its_range_the_interval_is_the_time_between_failures():
    assert daly_interval(200, 100) == 100
    assert daly_interval(250, 100) == 100
    assert daly_interval(199.999999, 100) == pytest.approx(88.9, abs=0.1)


def test_a_job_that_never_fails_has_no_best_interval_and_saves_once_at_the_end():
    assert daly_interval(10, math.inf) == math.inf
    schedule = chosen(steps=1000, mtbf_seconds=math.inf)
    assert (schedule.interval_steps, schedule.saves) == (1000, 1)
    assert expected_wall_seconds(schedule, 300, math.inf) == 1000 * 10 + 5 + 0


def chosen(**settings):
    usual = {
        "steps": 100_000,
        "step_seconds": 10.0,
        "blocking_seconds": 5.0,
        "drain_seconds": 0.0,
        "restart_seconds": 300.0,
        "mtbf_seconds": 3.09 * HOUR,
    }
    return choose_schedule(**{**usual, **settings})


def test_the_interval_is_daly_s_in_whole_steps():
    assert chosen().interval_steps == 33  # 330.2 s
    assert chosen(step_seconds=1.0).interval_steps == 330


def test_a_slow_drain_sets_the_interval_rounded_up():
    assert chosen(drain_seconds=1001.0).interval_steps == 101


def test_a_run_shorter_than_the_interval_saves_once_at_the_end():
    assert chosen(steps=20).interval_steps == 20
    assert chosen(steps=20, drain_seconds=500.0).interval_steps == 20


def test_saves_of_a_short_run_are_spread_evenly():
    """1,278 s of work: 254 s would make six saves, the last one for a few seconds of work."""
    got = chosen(
        steps=2556,
        step_seconds=0.5,
        blocking_seconds=20.0,
        restart_seconds=0.0,
        mtbf_seconds=1800.0,
    )
    assert (got.interval_steps, got.saves) == (512, 5)


def test_a_free_save_is_made_every_step():
    assert chosen(blocking_seconds=0.0).interval_steps == 1


def test_the_last_save_is_made_even_where_the_interval_does_not_divide_the_run():
    schedule = SaveSchedule(
        steps=10, step_seconds=2.0, interval_steps=4, blocking_seconds=1.0, drain_seconds=3.0
    )
    assert (schedule.saves, schedule.failure_free_seconds) == (3, 20 + 3 + 3)


@given(MTBF, st.floats(1e-3, 0.5), st.floats(0.0, 1e4))
def test_daly_is_as_good_as_the_true_optimum(mtbf, share, restart):
    """Up to saves of half the time between failures: within 0.5 % of the least wall time, found by
    bisection."""
    blocking = share * mtbf

    def slope(tau):  # of log(wall): zero where e^((tau+C)/M) (1 - tau/M) = 1
        return math.expm1((tau + blocking) / mtbf) * (1 - tau / mtbf) - tau / mtbf

    low, high = 0.0, mtbf
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) > 0 else (low, middle)
    assume(restart / mtbf < 500)
    least = daly_wall_seconds(1.0, low, blocking, restart, mtbf)
    assert least <= daly_wall_seconds(
        1.0, daly_interval(blocking, mtbf), blocking, restart, mtbf
    ) * (1 + 1e-12)
    assert (
        daly_wall_seconds(1.0, daly_interval(blocking, mtbf), blocking, restart, mtbf)
        <= least * 1.005
    )


@given(MTBF, st.floats(1e-6, 1e-3))
def test_young_and_daly_agree_where_saves_are_short(mtbf, share):
    assert young_interval(share * mtbf, mtbf) == pytest.approx(
        daly_interval(share * mtbf, mtbf), rel=0.04
    )


SCHEDULES = st.builds(
    SaveSchedule,
    steps=st.integers(1, 5000),
    step_seconds=st.floats(0.1, 100.0),
    interval_steps=st.integers(1, 500),
    blocking_seconds=st.floats(0.0, 100.0),
    drain_seconds=st.floats(0.0, 1000.0),
)


@given(SCHEDULES, st.floats(0.0, 3600.0), st.floats(3600.0, 1e8))
def test_equal_intervals_without_a_drain_take_daly_s_time(schedule, restart, mtbf):
    even = replace(schedule, steps=schedule.interval_steps * 7, drain_seconds=0.0)
    expected = daly_wall_seconds(
        even.work_seconds, even.interval_seconds, even.blocking_seconds, restart, mtbf
    )
    assert expected_wall_seconds(even, restart, mtbf) == pytest.approx(expected, rel=1e-9)


@given(SCHEDULES, st.floats(0.0, 3600.0), st.floats(1000.0, 1e8), st.floats(1.01, 10.0))
def test_time_grows_with_failures_restart_and_drain(schedule, restart, mtbf, more):
    wall = expected_wall_seconds(schedule, restart, mtbf)
    rounded = wall * (1 - 1e-12)
    assert wall >= schedule.failure_free_seconds * (1 - 1e-12)
    assert expected_wall_seconds(schedule, restart, mtbf / more) >= rounded
    assert expected_wall_seconds(schedule, restart * more, mtbf) >= rounded
    slower = replace(schedule, drain_seconds=schedule.drain_seconds * more)
    assert expected_wall_seconds(slower, restart, mtbf) >= rounded


@given(SCHEDULES, st.floats(1e10, 1e14))
def test_rare_failures_leave_the_failure_free_time(schedule, mtbf):
    assert expected_wall_seconds(schedule, 300, mtbf) == pytest.approx(
        schedule.failure_free_seconds, rel=1e-3
    )


def test_a_run_that_never_ends_takes_for_ever():
    assert expected_wall_seconds(SaveSchedule(10, 1e6, 10, 1.0, 0.0), 300, 60) == math.inf


@given(
    st.integers(1, 3000),
    st.floats(0.5, 60.0),
    st.floats(0.0, 60.0),
    st.floats(0.0, 600.0),
    st.floats(0.0, 1800.0),
    st.floats(1800.0, 1e7),
)
def test_no_other_interval_is_noticeably_better(steps, step, blocking, drain, restart, mtbf):
    """Of all that are allowed. What is left to gain is what is not worth a change, and Daly's own
    approximation."""
    got = choose_schedule(
        steps=steps,
        step_seconds=step,
        blocking_seconds=blocking,
        drain_seconds=drain,
        restart_seconds=restart,
        mtbf_seconds=mtbf,
    )
    least = least_interval_steps(step, drain, steps)
    assert least <= got.interval_steps <= steps
    wall = expected_wall_seconds(got, restart, mtbf)
    assume(math.isfinite(wall))
    best = min(
        expected_wall_seconds(replace(got, interval_steps=count), restart, mtbf)
        for count in range(least, steps + 1)
    )
    assert wall <= best * 1.01
    for count in (got.interval_steps // 2, got.interval_steps * 2):
        if least <= count <= steps:
            assert wall <= expected_wall_seconds(
                replace(got, interval_steps=count), restart, mtbf
            ) * (1 + 5e-3)


@pytest.mark.parametrize(
    ("step", "drain", "steps", "least"),
    [
        (10.0, 0.0, 100, 1),
        (10.0, 10.0, 100, 1),
        (10.0, 10.1, 100, 2),
        (10.0, 95.0, 100, 10),
        (10.0, 95.0, 4, 4),
    ],
)
def test_a_save_is_on_storage_before_the_next_begins(
    step: float, drain: float, steps: int, least: int
) -> None:
    assert least_interval_steps(step, drain, steps) == least


@pytest.mark.parametrize(
    ("steps", "interval"),
    # Daly's interval is 33 steps; of a short run the last interval is not left short.
    [(20, 20), (34, 34), (35, 35), (50, 25), (67, 34), (68, 34), (100, 34), (1000, 33)],
)
def test_a_short_run_is_cut_into_even_intervals(steps: int, interval: int) -> None:
    assert chosen(steps=steps).interval_steps == interval
    assert chosen(steps=steps, drain_seconds=1000.0).interval_steps == min(
        steps, max(100, interval)
    )
