"""Processes left by a start: exactly those that have its mark."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from drillyard.faults.disturbed_run import MARK_VARIABLE, kill_marked, new_mark, processes_with, run_once

SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]


def started(**environment: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(SLEEPER, env={**os.environ, **environment}, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    return process


def test_only_processes_with_the_mark_are_found_and_killed() -> None:
    mark = new_mark()
    ours, unmarked, other = started(**{MARK_VARIABLE: mark}), started(), started(**{MARK_VARIABLE: new_mark()})
    try:
        assert processes_with(mark) == [ours.pid]
        kill_marked(mark)
        assert ours.wait(10) == -signal.SIGKILL
        assert processes_with(mark) == []
        assert unmarked.poll() is None and other.poll() is None
    finally:
        for process in (ours, unmarked, other):
            process.kill()
            process.communicate()


@pytest.mark.parametrize("mark", ["", "1", "chaos"])
def test_a_short_mark_is_refused(mark: str) -> None:
    with pytest.raises(AssertionError):
        processes_with(mark)


def test_a_process_left_by_a_start_is_reported_and_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drillyard.faults.disturbed_run._GONE_WITHIN_SECONDS", 0.2)
    leave = f"import subprocess; subprocess.Popen({SLEEPER!r}, start_new_session=True)"
    mark = new_mark()
    with (tmp_path / "log").open("ab") as log:
        start = run_once([sys.executable, "-c", leave], mark, log)
    assert start.exit_code == 0
    assert len(start.left_running) == 1 and "time.sleep(60)" in start.left_running[0]


def test_a_start_that_hangs_is_killed(tmp_path: Path) -> None:
    with (tmp_path / "log").open("ab") as log:
        start = run_once(SLEEPER, new_mark(), log, timeout_seconds=0.5)
    assert start.hung and start.exit_code == -signal.SIGKILL
