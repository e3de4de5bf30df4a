"""When a rank's own work is a sign of life, and when it is none."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drillyard.supervise.heartbeat import HeartbeatWriter
from drillyard.supervise.progress_monitor import ProgressMonitor, did_work, tick_seconds, work_done

TICK = 0.02


@pytest.fixture
def watch() -> Iterator[ProgressMonitor]:
    watch = ProgressMonitor(HeartbeatWriter(), TICK, 0, lambda message, ends: io.StringIO())
    yield watch
    watch.close()


def work_until(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_work_counts_in_a_phase_that_takes_long_without_steps(watch: ProgressMonitor) -> None:
    watch.begin("export", "working")
    begun = watch.signs.last().at
    deadline = time.monotonic() + 20
    while watch.signs.last().at == begun:
        assert time.monotonic() < deadline
        work_until(TICK)


def test_work_does_not_count_in_training(watch: ProgressMonitor) -> None:
    watch.begin("training", "strict")
    begun = watch.signs.last().at
    work_until(20 * TICK)
    assert watch.signs.last().at == begun


def test_a_phase_within_another_leaves_it_as_it_was(watch: ProgressMonitor) -> None:
    watch.begin("training", "strict")
    with watch.during("evaluation"):
        assert watch.signs.last().phase == "evaluation"
    begun = watch.signs.last().at
    assert watch.signs.last().phase == "training"
    work_until(10 * TICK)
    assert watch.signs.last().at == begun


@given(st.floats(0, 1e6), st.integers(0, 10**15), st.floats(0.01, 1e5))
def test_waiting_is_no_work_and_a_busy_core_or_disk_is(cpu: float, count: int, seconds: float) -> None:
    assert not did_work((cpu, count), (cpu, count), seconds)
    assert did_work((0, count), (0.5 * seconds, count), seconds)
    assert did_work((cpu, 0), (cpu, int(2e6 * seconds) + 1), seconds)
    # A thread that prints now and then is no work.
    assert not did_work((0, 0), (0.01 * seconds, int(1e4 * seconds)), seconds)


def test_work_is_counted_up() -> None:
    before = work_done()
    deadline = time.monotonic() + 20
    while work_done()[0] == before[0]:
        assert time.monotonic() < deadline
    assert work_done()[1] > before[1]


@given(st.floats(0.1, 1e6))
def test_a_rank_looks_at_itself_often_enough_for_its_limit(watchdog: float) -> None:
    assert 0 < tick_seconds(watchdog) <= max(0.05, watchdog / 20)
    assert tick_seconds(0) > 0
