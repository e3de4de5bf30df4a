"""Every place is a function that is there: one that was renamed is an error and not a fault that never strikes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from drillyard.faults import full_disk, injection_points
from drillyard.faults.mark_files import FaultSettings, MarkFiles
from drillyard.faults.monkeypatch import find_attribute
from drillyard.faults.plan import FAULT_KINDS, Fault, PlannedRun, RunShape, draw_faults


@pytest.fixture
def armed(tmp_path: Path) -> injection_points.RankFaults:
    marks = MarkFiles(tmp_path / "marks")
    marks.write_orders(FaultSettings(PlannedRun("chaos-01", ()), tmp_path / "checkpoints", 0.1, 1000, None))
    return injection_points.RankFaults(marks, marks.orders(), 0)


def test_all_that_is_replaced_is_there(armed: injection_points.RankFaults, monkeypatch: pytest.MonkeyPatch) -> None:
    found: set[str] = set()

    def only_look(module: str, name: str, make: Any) -> None:
        _, _, function = find_attribute(module, name)
        assert callable(function) and callable(make(function))
        found.add(name)

    monkeypatch.setattr(injection_points, "patch_function", only_look)
    monkeypatch.setattr(full_disk, "patch_function", only_look)
    armed.follow_steps()
    for case in draw_faults(FAULT_KINDS, 100, 0, RunShape(60, 4, 2)):
        for fault in case.faults:
            armed.place(fault)
    assert found == {
        "Trainer.train_step", "_HashingStream._write_now", "write_manifest", "write_durably", "remove_checkpoint",
        "_PartWriter.finish", "_write_manifest", "_finish", "_publish", "CheckpointWriter.write_data",
        "Checkpointer._failed",
    }  # fmt: skip
    armed.marks.put(Fault(1, "kill", "resume", 0, 0, 5, 0.5), "hit")
    armed.place(Fault(1, "kill", "resume", 0, 0, 5, 0.5))
    assert "run_rank" in found


def test_a_place_that_has_ceased_to_exist_is_an_error() -> None:
    with pytest.raises(AttributeError, match=r"replaces drillyard\.training\.trainer\.Trainer\.step_train, which is"):
        find_attribute("drillyard.training.trainer", "Trainer.step_train")


def test_a_signal_never_reaches_a_process_without_the_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    import signal
    import subprocess
    import sys

    from drillyard.faults.disturbed_run import MARK_VARIABLE, new_mark

    monkeypatch.setenv(MARK_VARIABLE, new_mark())
    sleeper = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]
    with (
        subprocess.Popen(sleeper, stdout=subprocess.PIPE) as ours,
        subprocess.Popen(sleeper, stdout=subprocess.PIPE, env={**os.environ, MARK_VARIABLE: new_mark()}) as other,
    ):
        try:
            for process in (ours, other):
                assert process.stdout is not None and process.stdout.readline() == b"up\n"
            injection_points._send(ours.pid, signal.SIGKILL)
            assert ours.wait(10) == -signal.SIGKILL
            with pytest.raises(ProcessLookupError):
                injection_points._send(other.pid, signal.SIGKILL)
            assert other.poll() is None
        finally:
            other.kill()


def test_half_a_manifest_is_half_of_its_bytes(tmp_path: Path) -> None:
    seen: list[bytes] = []
    path = tmp_path / "manifest.json.tmp"
    with path.open("wb") as file:
        injection_points._HalfWritten(file, lambda: seen.append(path.read_bytes())).write(b"0123456789")
    assert seen == [b"01234"]
