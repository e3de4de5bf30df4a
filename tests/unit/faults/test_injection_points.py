"""Injection points: each function exists, and the strike leaves what it must leave."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from drillyard.faults import injection_points
from drillyard.faults.disturbed_run import MARK_VARIABLE, FaultSettings, PhaseFiles, new_mark
from drillyard.faults.injection_points import RankFaults, find_attribute
from drillyard.faults.plan import FAULT_KINDS, Fault, PlannedRun, RunShape, draw_faults

FULL = Fault(1, "disk-full", "manifest", 0, 0, 0, 0.5)
SHARD_BYTES = 200_000


def faults_in(directory: Path, *planned: Fault) -> RankFaults:
    phases = PhaseFiles(directory / "phases")
    run = PlannedRun("chaos-01", planned)
    phases.write_settings(FaultSettings(run, directory / "checkpoints", 0.1, SHARD_BYTES, None))
    return RankFaults(phases, phases.settings(), 0)


class Patches:
    """Takes the wrappers of patched functions; `originals` are called in place of the real ones."""

    def __init__(self, **originals: Any) -> None:
        self.originals, self.wrappers = originals, defaultdict[str, list[Any]](list)

    def patch_function(self, module: str, name: str, wrapper: Any) -> None:
        assert callable(find_attribute(module, name)[2]) and callable(wrapper)
        self.wrappers[name].append(wrapper)

    def call(self, name: str, *arguments: Any) -> Any:
        function = self.originals.get(name, lambda *_: None)
        for wrapper in self.wrappers[name]:
            function = partial(wrapper, function)
        return function(*arguments)


@pytest.fixture
def patches(monkeypatch: pytest.MonkeyPatch) -> Patches:
    found = Patches()
    monkeypatch.setattr(injection_points, "patch_function", found.patch_function)
    return found


def test_every_patched_function_exists(tmp_path: Path, patches: Patches) -> None:
    faults = faults_in(tmp_path)
    faults.track_steps()
    for planned in draw_faults(FAULT_KINDS, 100, 0, RunShape(60, 4, 2)):
        for fault in planned.faults:
            faults.install(fault)
    assert set(patches.wrappers) == {
        "Trainer.train_step",
        "_HashingStream._write_now",
        "write_manifest",
        "write_durably",
        "remove_checkpoint",
        "_PartWriter.finish",
        "_write_manifest",
        "_finish",
        "export_directory.put_in_place",
        "CheckpointWriter.write_data",
        "Checkpointer._failed",
    }
    resume = Fault(1, "kill", "resume", 0, 0, 5, 0.5)
    faults.phases.put(resume, "hit")
    faults.install(resume)
    assert "run_rank" in patches.wrappers


def test_a_function_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(AttributeError, match=r"drillyard\.training\.trainer\.Trainer\.step_train"):
        find_attribute("drillyard.training.trainer", "Trainer.step_train")


def test_a_signal_never_reaches_a_process_without_the_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK_VARIABLE, new_mark())
    sleeper = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]
    with (
        subprocess.Popen(sleeper, stdout=subprocess.PIPE) as ours,
        subprocess.Popen(
            sleeper, stdout=subprocess.PIPE, env={**os.environ, MARK_VARIABLE: new_mark()}
        ) as other,
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


def test_half_a_manifest_is_half_of_its_bytes(
    tmp_path: Path, patches: Patches, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault(1, "kill", "manifest", 0, 0, 0, 0.5)
    faults = faults_in(tmp_path, fault)
    found: list[bytes] = []
    path = tmp_path / "step-00000004" / "manifest.json"
    path.parent.mkdir()
    monkeypatch.setattr(
        faults,
        "strike",
        lambda *_, **detail: found.extend(p.read_bytes() for p in path.parent.iterdir()),
    )
    faults.install(fault)
    patches.call("write_durably", path, b"0123456789")
    assert found == [b"01234"]


class _Checkpoint:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.step = 4


def test_a_limit_on_file_sizes_simulates_a_full_disk_until_the_save_has_failed(
    tmp_path: Path, patches: Patches, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = faults_in(tmp_path, FULL)
    monkeypatch.setattr(faults, "complete", lambda: [_Checkpoint(tmp_path)])
    monkeypatch.setattr(injection_points, "verify", lambda info: [])
    directory = tmp_path / "step-00000008"
    directory.mkdir()
    patches.originals["write_manifest"] = lambda path: (path / "shard").write_bytes(
        bytes(SHARD_BYTES)
    )
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    faults.install(FULL)
    try:
        with pytest.raises(OSError) as failure:
            patches.call("write_manifest", directory)
        assert failure.value.errno == errno.EFBIG
        assert os.path.getsize(directory / "shard") <= SHARD_BYTES // 2
        patches.call("Checkpointer._failed")
        assert resource.getrlimit(resource.RLIMIT_FSIZE) == before
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    hit, after = faults.phases.get(FULL, "hit"), faults.phases.get(FULL, "after")
    assert hit is not None and hit["detail"] == {"save": 8} and hit["complete"] == [4]
    assert after is not None and (after["newest"], after["damaged"]) == (4, [])
    patches.call("write_manifest", directory)
    assert os.path.getsize(directory / "shard") == SHARD_BYTES, "it strikes once"


def test_of_several_full_disks_in_one_attempt_each_is_freed_for_itself(
    tmp_path: Path, patches: Patches, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = Fault(2, "disk-full", "manifest", 0, 0, 0, 0.5)
    faults = faults_in(tmp_path, FULL, second)
    monkeypatch.setattr(faults, "complete", lambda: [_Checkpoint(tmp_path)])
    monkeypatch.setattr(injection_points, "verify", lambda info: [])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for fault in (FULL, second):
        faults.install(fault)
    try:
        for fault, step in ((FULL, 8), (second, 12)):
            assert faults.phases.get(fault, "hit") is None
            patches.call("write_manifest", tmp_path / f"step-{step:08}")
            assert faults.phases.get(fault, "after") is None
            patches.call("Checkpointer._failed")
            assert faults.phases.get(fault, "after") is not None and faults.phases.is_complete(
                fault
            )
            assert resource.getrlimit(resource.RLIMIT_FSIZE) == before
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
