"""Step times: which durations are trusted, what is left out, and what is never said of windows and
averages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.measurement.made import NEW_YEAR, SECOND, run_log, stamps

from drillyard.measurement.parsed_log import LogEvent
from drillyard.measurement.step_times import measure_step_times, quantiles

STEADY = [10.0 + (index * 7 % 5) / 100 for index in range(20)]


@given(
    st.lists(st.tuples(st.floats(0.001, 1e6), st.integers(1, 5)), min_size=1, max_size=40),
    st.lists(st.floats(0, 1), min_size=1, max_size=3),
)
def test_weighted_quantiles_are_those_of_the_repeated_values(rows, shares):
    values, weight = (np.array(column) for column in zip(*rows, strict=True))
    repeated = np.repeat(values, weight)
    assert quantiles(values, weight, tuple(shares)) == pytest.approx(
        np.quantile(repeated, shares).tolist()
    )


def test_the_first_step_of_every_attempt_and_slow_ones_after_it_are_warm_up():
    seconds = [60.0, 15.0, 12.0, *STEADY, 45.0, *STEADY]
    log = run_log(seconds=seconds, attempt=[0] * 23 + [1] * 21)
    times = measure_step_times(log).times
    assert (times.basis, times.left_out, times.steps) == ("steps", 4, 40)
    assert times.p50 == pytest.approx(np.median(STEADY))
    assert (times.highest, times.first_step) == (10.04, 4)


def test_a_slow_step_in_the_middle_is_no_warm_up():
    seconds = [11.0, *STEADY[:5], 30.0, *STEADY]
    times = measure_step_times(run_log(seconds=seconds)).times
    assert (times.left_out, times.highest) == (1, 30.0)
    assert times.slow_fraction == pytest.approx(1 / 26)


def test_a_run_that_slows_down_keeps_its_first_half():
    assert measure_step_times(run_log(seconds=[1.0, *[1.0] * 10, *[2.0] * 10])).times.left_out == 1


def test_a_range_is_taken_as_it_is():
    times = measure_step_times(
        run_log(seconds=[60.0, 15.0, *STEADY]), start_step=2, end_step=4
    ).times
    assert (times.steps, times.left_out, times.p50) == (3, 19, 10.02)
    assert (times.first_step, times.last_step) == (2, 4)


def test_a_range_without_steps_has_no_times():
    found = measure_step_times(run_log(seconds=STEADY), start_step=500)
    assert (found.times.typical, found.kept, found.times.left_out) == (None, None, 20)


def test_one_step_alone_is_better_than_nothing():
    times = measure_step_times(run_log(seconds=[12.0])).times
    assert (times.p50, times.p95, times.jitter) == (12.0, 12.0, None)


def test_percentiles_and_jitter_of_single_steps():
    times = measure_step_times(run_log(seconds=STEADY), start_step=0).times
    assert (times.p95, times.p99) == pytest.approx(tuple(np.quantile(STEADY, [0.95, 0.99])))
    assert times.jitter == pytest.approx(1.4826 * 0.01 / 10.02)


def test_windows_have_a_median_and_say_nothing_of_single_steps():
    times = measure_step_times(
        run_log(seconds=STEADY, step=list(range(10, 210, 10)), window_steps=[10] * 20)
    ).times
    assert (times.basis, times.window_steps) == ("windows", 10)
    assert times.p50 == pytest.approx(np.median(STEADY[1:]))
    assert (times.p95, times.p99, times.jitter, times.slow_fraction) == (None, None, None, None)


def test_a_moving_average_is_replaced_by_the_time_stamps():
    # NeMo's timing runs five steps behind: steps 46 and 47 took 59.3 and 261.4 s and show as 31.65
    # and 32.47.
    true = [*STEADY[:10], 59.3, 261.4, *STEADY[:8]]
    log = run_log(
        seconds=[10.0] * 10 + [31.65, 32.47] + [30.0] * 8,
        window_steps=[0] * 20,
        time_us=stamps(true),
    )
    found = measure_step_times(log)
    assert (found.times.basis, found.times.window_steps) == ("time stamps", 1)
    assert found.times.p50 == pytest.approx(np.median(true[1:]))
    assert [stall.step for stall in found.stalls] == [11, 12]


def test_a_moving_average_without_stamps_is_called_one():
    found = measure_step_times(run_log(seconds=[*STEADY[:19], 90.0], window_steps=[0] * 20))
    assert (found.times.basis, found.times.p95, found.stalls) == ("moving averages", None, ())


def test_saves_between_two_stamps_are_taken_off():
    true = [10.0] * 20
    time_us = stamps([*true[:10], 40.0, *true[11:]])
    save = LogEvent("checkpoint_end", time_us[9] + 30 * SECOND, 0, 21, step=10, seconds=30.0)
    assert measure_step_times(run_log(events=[save], time_us=time_us)).times.highest == 10.0
    assert measure_step_times(run_log(time_us=time_us)).times.highest == 40.0


def test_printed_precision_is_carried():
    times = measure_step_times(run_log(seconds=[0.06] * 30, seconds_precision=[0.005] * 30)).times
    assert times.precision_seconds == 0.005
    assert times.relative_precision == pytest.approx(0.083, abs=0.001)


def test_durations_of_one_digit_give_way_to_finer_time_stamps():
    true = [0.0612 + (index % 3) / 10_000 for index in range(30)]
    coarse = {"seconds": [0.06] * 30, "seconds_precision": [0.005] * 30, "time_us": stamps(true)}
    times = measure_step_times(run_log(**coarse)).times
    assert times.basis == "time stamps"
    assert times.p50 == pytest.approx(0.0613)
    assert measure_step_times(run_log(**coarse, resolution_us=SECOND)).times.basis == "steps"


def test_stamps_in_whole_seconds_are_compared_over_many_steps():
    time_us = [time // SECOND * SECOND for time in stamps([0.37] * 1000)]
    times = measure_step_times(run_log(time_us=time_us, resolution_us=SECOND)).times
    assert times.p50 == pytest.approx(0.37, rel=0.015)
    assert times.window_steps > 1
    assert times.p95 is None


def test_a_progress_bars_clock_is_better_than_nothing():
    times = measure_step_times(
        run_log(elapsed_seconds=[float(second) for second in range(6, 600, 6)])
    ).times
    assert (times.basis, times.p50) == ("progress clock", 6.0)


def test_only_the_time_of_the_whole_loop_gives_a_mean():
    log = run_log(
        loss=[2.0, 1.0], step=[10, 60], facts={"train_runtime_seconds": 364.5}, format="hf_trainer"
    )
    times = measure_step_times(log).times
    assert (times.basis, times.mean, times.p50, times.steps) == ("whole run", 364.5 / 60, None, 60)
    assert times.typical == times.mean


def test_nothing_that_tells_time_gives_none():
    assert measure_step_times(run_log(loss=[2.0, 1.0])).times.typical is None


def test_stalls_are_over_three_medians_with_their_lines():
    seconds = [99.0, *STEADY]
    seconds[8], seconds[12] = 30.3, 29.9
    stalls = measure_step_times(run_log(seconds=seconds, time_us=stamps(seconds))).stalls
    assert [(stall.step, stall.seconds, stall.place) for stall in stalls] == [
        (9, 30.3, "run.log:19")
    ]
    assert stalls[0].time_us == NEW_YEAR + round(sum(seconds[:9]) * SECOND)


def test_folded_rows_count_as_many_steps():
    log = run_log(step=[1, 10, 11], seconds=[5.0, 1.0, 2.0], stands_for=[1, 9, 1])
    times = measure_step_times(log).times
    assert (times.steps, times.p50, times.mean) == (10, 1.0, 1.1)
