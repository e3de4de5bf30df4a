"""A rank's side of supervision: when its own work is a heartbeat, and answers to signals from its
first moment on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drillyard.supervise import rank_supervision
from drillyard.supervise.launch_contract import (
    EXIT_RECORD,
    FailureElsewhere,
    write_failure_elsewhere,
)
from drillyard.supervise.rank_supervision import RankSupervision, did_work, tick_seconds, work_done
from drillyard.supervise.stop_requests import SignalInbox
from drillyard.telemetry.events import read_events

WATCHDOG = 0.4
TICK = tick_seconds(WATCHDOG)


class Inbox(SignalInbox):
    """An inbox that leaves the signals of this process alone; those of `waiting` are in it from the
    start."""

    waiting: tuple[signal.Signals, ...] = ()
    opened: Inbox

    def __enter__(self) -> Inbox:
        type(self).opened = self
        if self.waiting:
            self.receive(*self.waiting)
        return self

    def receive(self, *numbers: signal.Signals) -> None:
        self._writer.send(bytes(numbers))

    def __exit__(self, *exception: object) -> None:
        pass


@pytest.fixture
def inbox(monkeypatch: pytest.MonkeyPatch) -> type[Inbox]:
    class OfThisTest(Inbox):
        pass

    monkeypatch.setattr(rank_supervision, "SignalInbox", OfThisTest)
    monkeypatch.setattr(
        rank_supervision, "faulthandler", Mock()
    )  # that of this process stays as it is
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("DRILLYARD_SUPERVISED", "1")
    return OfThisTest


@pytest.fixture
def side(inbox: type[Inbox], tmp_path: Path) -> Iterator[RankSupervision]:
    side = RankSupervision(tmp_path, WATCHDOG, attempt=0, is_claimed=True)
    yield side
    side.close()


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def work_until(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_work_counts_in_a_phase_that_takes_long_without_steps(side: RankSupervision) -> None:
    side.begin("export", "working")
    begun = side.signs.last().at
    deadline = time.monotonic() + 20
    while side.signs.last().at == begun:
        assert time.monotonic() < deadline
        work_until(TICK)


def test_work_does_not_count_in_training(side: RankSupervision) -> None:
    side.begin("training", "strict")
    begun = side.signs.last().at
    work_until(10 * TICK)
    assert side.signs.last().at == begun


def test_a_phase_within_another_leaves_it_as_it_was(side: RankSupervision) -> None:
    side.begin("training", "strict")
    with side.during("evaluation"):
        assert side.signs.last().phase == "evaluation"
    begun = side.signs.last().at
    assert side.signs.last().phase == "training"
    work_until(5 * TICK)
    assert side.signs.last().at == begun


@given(st.floats(0, 1e6), st.integers(0, 10**15), st.floats(0.01, 1e5))
def test_waiting_is_no_work_and_a_busy_core_or_disk_is(
    cpu: float, count: int, seconds: float
) -> None:
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


@pytest.mark.parametrize("another_failed", [False, True])
def test_a_stop_signal_is_answered_however_early_it_comes(
    inbox: type[Inbox], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, another_failed: bool
) -> None:
    inbox.waiting = (signal.SIGTERM,)
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    monkeypatch.setenv(EXIT_RECORD, str(tmp_path / "record.json"))
    if another_failed:
        write_failure_elsewhere(
            tmp_path / "record.json", FailureElsewhere("lost node 1", None, None)
        )
    side = RankSupervision(tmp_path, 0, attempt=3, is_claimed=True)
    wait_until(lambda: exits)
    side.close()
    assert exits == [85]
    # That the run is interrupted is said only where somebody has asked it to stop.
    message = [] if another_failed else [("signal", 3), ("end", 3)]
    assert [(event["event"], event["round"]) for event in read_events(tmp_path)] == message


def test_a_failed_read_of_the_work_done_does_not_end_the_answers_to_signals(
    inbox: type[Inbox], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read = Mock(side_effect=OSError("/proc/self/io"))
    monkeypatch.setattr(rank_supervision, "work_done", read)
    side = RankSupervision(tmp_path, WATCHDOG, attempt=0, is_claimed=True)
    side.answer("note")
    wait_until(lambda: read.call_count >= 3)
    inbox.opened.receive(signal.SIGTERM)
    wait_until(lambda: side.received == signal.SIGTERM)
    side.close()


def test_a_rank_with_nothing_to_save_leaves_although_its_events_hang(
    inbox: type[Inbox], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    exits: list[int] = []
    hang = threading.Event()
    before = threading.enumerate()
    monkeypatch.setattr(os, "_exit", exits.append)
    monkeypatch.setattr(rank_supervision, "_SECONDS_TO_WRITE", 0.1)
    monkeypatch.setattr(rank_supervision, "append_event", lambda *_, **__: hang.wait())
    inbox.waiting = (signal.SIGTERM,)
    side = RankSupervision(tmp_path, 600, attempt=0, is_claimed=True)
    wait_until(lambda: exits)
    side.close()
    hang.set()
    # No thread of this test may meet the real os._exit.
    for thread in threading.enumerate():
        if thread.name == "supervision" and thread not in before:
            thread.join(20)
    assert exits[0] == 85


def test_stacks_are_written_while_an_answer_waits_for_a_hung_disk(
    inbox: type[Inbox], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    exits: list[int] = []
    faulthandler = Mock()
    begun, hang = threading.Event(), threading.Event()

    def append(*_: object, **__: object) -> None:
        begun.set()
        hang.wait()

    monkeypatch.setattr(os, "_exit", exits.append)
    monkeypatch.setattr(rank_supervision, "faulthandler", faulthandler)
    monkeypatch.setattr(rank_supervision, "append_event", append)
    monkeypatch.setattr(rank_supervision, "_SECONDS_TO_WRITE", 60)
    side = RankSupervision(tmp_path, WATCHDOG, attempt=0, is_claimed=True)
    side.answer("note")
    inbox.opened.receive(signal.SIGTERM)
    wait_until(lambda: side.received)
    main = threading.Thread(target=side.answer, args=("leave",))
    main.start()
    try:
        assert begun.wait(20)
        time.sleep(5 * TICK)
        inbox.opened.receive(signal.SIGUSR2)
        wait_until(lambda: faulthandler.dump_traceback.called)
    finally:
        hang.set()
        main.join()
        side.close()
    assert exits == [85]


@pytest.mark.parametrize(
    ("rank", "local_rank", "shown"), [(2, 0, True), (3, 1, False), (0, 0, False)]
)
def test_a_further_node_shows_heartbeats_while_it_waits_for_the_first(
    inbox: type[Inbox],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    rank: int,
    local_rank: int,
    shown: bool,
) -> None:
    """Rank 0 may tokenise for hours, watched by its own supervisor."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    side = RankSupervision(tmp_path, WATCHDOG, attempt=0, is_claimed=True)
    side.begin("data", "waiting")
    begun = side.signs.last().at
    if shown:
        wait_until(lambda: side.signs.last().at > begun)
    else:
        work_until(10 * TICK)
        assert side.signs.last().at == begun
    side.close()
