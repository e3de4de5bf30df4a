"""Processes left by a start are exactly those that have its mark; phase files say which faults are
pending."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from drillyard.faults.disturbed_run import (
    MARK_VARIABLE,
    FaultSettings,
    PhaseFiles,
    is_marked,
    new_mark,
    run_once,
)
from drillyard.faults.plan import FAULT_KINDS, Fault, PlannedRun, RunShape, draw_faults
from drillyard.supervise.reaper import kill_marked_processes, marked_processes

SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]
FULL = Fault(1, "disk-full", "shards", 0, 0, 8, 0.5)
KILL = Fault(2, "kill", "step", 1, 1, 13, 0.5)
FLIP = Fault(3, "flip", "step", 0, 0, 17, 0.5)
AGAIN = Fault(4, "kill", "resume", None, 1, 22, 0.5)
PLANNED = PlannedRun("chaos-01", (FULL, KILL, FLIP, AGAIN))


def started(**environment: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(SLEEPER, env={**os.environ, **environment}, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    return process


def test_only_processes_with_the_mark_are_found_and_killed() -> None:
    mark = new_mark()
    ours, unmarked, other = (
        started(**{MARK_VARIABLE: mark}),
        started(),
        started(**{MARK_VARIABLE: new_mark()}),
    )
    try:
        assert [is_marked(process.pid, mark) for process in (ours, unmarked, other)] == [
            True,
            False,
            False,
        ]
        assert marked_processes(mark, MARK_VARIABLE) == [ours.pid]
        kill_marked_processes(mark, MARK_VARIABLE)
        assert ours.wait(10) == -signal.SIGKILL
        assert marked_processes(mark, MARK_VARIABLE) == []
        assert unmarked.poll() is None and other.poll() is None
    finally:
        for process in (ours, unmarked, other):
            process.kill()
            process.communicate()


@pytest.mark.parametrize("mark", ["", "1", "chaos"])
def test_a_short_mark_is_refused(mark: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        is_marked(os.getpid(), mark)
    with pytest.raises(AssertionError), (tmp_path / "log").open("wb") as log:
        run_once(["touch", str(tmp_path / "started")], mark, log)
    assert not (tmp_path / "started").exists()


def test_a_process_left_by_a_start_is_reported_and_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drillyard.faults.disturbed_run._GONE_WITHIN_SECONDS", 0.2)
    # In the middle of exec a process has no environment to be found by.
    leave = f"""
import pathlib, subprocess
child = subprocess.Popen({SLEEPER!r}, start_new_session=True)
while not pathlib.Path("/proc", str(child.pid), "environ").read_bytes():
    pass
"""
    mark = new_mark()
    with (tmp_path / "log").open("ab") as log:
        start = run_once([sys.executable, "-c", leave], mark, log)
    assert start.exit_code == 0
    assert len(start.left_running) == 1 and "time.sleep(60)" in start.left_running[0]


def test_a_start_that_hangs_is_killed(tmp_path: Path) -> None:
    with (tmp_path / "log").open("ab") as log:
        start = run_once(SLEEPER, new_mark(), log, timeout_seconds=0.5)
    assert start.hung and start.exit_code == -signal.SIGKILL


def phases_in(
    directory: Path, ballast: Path | None = None, planned: PlannedRun = PLANNED
) -> PhaseFiles:
    phases = PhaseFiles(directory / "phases")
    phases.write_settings(FaultSettings(planned, directory / "checkpoints", 0.1, 1000, ballast))
    return phases


def test_settings_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert phases_in(tmp_path).settings() == FaultSettings(
        PLANNED, tmp_path / "checkpoints", 0.1, 1000, None
    )
    assert phases_in(tmp_path, tmp_path / "ballast").settings().ballast == tmp_path / "ballast"
    for planned in draw_faults(FAULT_KINDS, 30, 3, RunShape(60, 4, 2)):
        assert phases_in(tmp_path, planned=planned).settings().planned == planned


def test_an_attempt_has_the_faults_up_to_the_first_that_ends_it(tmp_path: Path) -> None:
    phases = phases_in(tmp_path)
    assert phases.pending(PLANNED) == [FULL, KILL]
    phases.put(FULL, "hit")
    assert not phases.is_complete(FULL), (
        "the kill that follows waits until the failed save is verified"
    )
    phases.put(FULL, "after")
    assert phases.pending(PLANNED) == [KILL]
    phases.put(KILL, "hit", step=13)
    assert phases.pending(PLANNED) == [FLIP]
    phases.put(FLIP, "hit")
    assert phases.pending(PLANNED) == [AGAIN]
    phases.put(AGAIN, "hit")
    assert phases.pending(PLANNED) == [AGAIN], "its second part strikes in the next attempt"
    phases.put(AGAIN, "again")
    assert phases.pending(PLANNED) == []


def test_a_phase_has_its_time_and_fields(tmp_path: Path) -> None:
    phases = phases_in(tmp_path)
    assert phases.get(KILL, "hit") is None
    phases.put(KILL, "hit", step=13, complete=[8, 12])
    hit = phases.get(KILL, "hit")
    assert (
        hit is not None
        and hit["step"] == 13
        and hit["complete"] == [8, 12]
        and hit["time"].endswith("Z")
    )
