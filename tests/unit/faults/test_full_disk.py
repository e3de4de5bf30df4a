"""A disk that is full for one save: told by the system, and gone when the save has failed."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from drillyard.faults import full_disk
from drillyard.faults.injection_points import RankFaults
from drillyard.faults.mark_files import FaultSettings, MarkFiles
from drillyard.faults.plan import Fault, PlannedRun

FULL = Fault(1, "disk-full", "manifest", 0, 0, 0, 0.5)
SHARD_BYTES = 200_000


@pytest.fixture
def armed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RankFaults:
    marks = MarkFiles(tmp_path / "marks")
    marks.write_orders(FaultSettings(PlannedRun("chaos-01", (FULL,)), tmp_path / "checkpoints", 0.1, SHARD_BYTES, None))
    armed = RankFaults(marks, marks.orders(), 0)
    monkeypatch.setattr(armed, "complete", lambda: [_Checkpoint(tmp_path)])
    monkeypatch.setattr(full_disk, "verify", lambda info: [])
    return armed


class _Checkpoint:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.step = 4


def test_a_limit_on_file_sizes_stands_for_the_disk_until_the_save_has_failed(
    armed: RankFaults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced: dict[str, Any] = {}

    def write(directory: Path) -> None:
        (directory / "shard").write_bytes(bytes(SHARD_BYTES))

    originals: dict[str, Any] = {"write_manifest": write, "Checkpointer._failed": lambda *arguments: None}
    monkeypatch.setattr(
        full_disk, "patch_function", lambda module, name, make: replaced.update({name: make(originals[name])})
    )
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    full_disk.fill_disk(armed, FULL)
    directory = tmp_path / "step-00000008"
    directory.mkdir()
    try:
        with pytest.raises(OSError) as failure:
            replaced["write_manifest"](directory)
        assert failure.value.errno == errno.EFBIG
        assert os.path.getsize(directory / "shard") <= SHARD_BYTES // 2
        replaced["Checkpointer._failed"]()
        assert resource.getrlimit(resource.RLIMIT_FSIZE) == before
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    hit, after = armed.marks.get(FULL, "hit"), armed.marks.get(FULL, "after")
    assert hit is not None and hit["detail"] == {"save": 8} and hit["complete"] == [4]
    assert after is not None and (after["newest"], after["damaged"]) == (4, [])
    replaced["write_manifest"](directory)
    assert os.path.getsize(directory / "shard") == SHARD_BYTES, "it strikes once"
