"""A real file system that is full: the save is told as failed, the earlier checkpoint stays whole, and saving goes on.

Mounts a tmpfs of a few MB, which needs root.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import run_ranks

from drillyard.training.checkpoint import Checkpointer, list_checkpoints, load_checkpoint, verify

DISK_BYTES = 8 * 1024 * 1024


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def state_of(value: float, megabytes: float) -> dict[str, Any]:
    """A tensor of this rank's own."""
    return {f"w.{dist.get_rank()}": torch.full((int(megabytes * 2**18),), value)}


def fill(disk: Path, leave: int) -> Path:
    """A file that leaves only so many bytes free."""
    ballast = disk / "ballast"
    with ballast.open("wb") as file:
        statistics = os.statvfs(disk)
        file.write(bytes(statistics.f_bavail * statistics.f_frsize - leave))
    return ballast


def fill_the_disk(disk: Path) -> list[tuple[str, dict[str, Any]]]:
    """Save 10; fail to save 20 (no room for a shard) and 30 (room for the shards, none for the manifest); save 40."""
    events: list[tuple[str, dict[str, Any]]] = []
    checkpointer = Checkpointer(
        disk / "checkpoints",
        keep=1,
        keep_best=False,
        asynchronous=True,
        identity={},
        on_event=lambda name, **fields: events.append((name, fields)),
    )
    rank = dist.get_rank()
    assert checkpointer.save(10, state_of(1.0, 1), metadata={}) > 0 and checkpointer.wait()
    checkpointer.save(20, state_of(2.0, 6 if rank == 1 else 1), metadata={})
    assert checkpointer.wait() is False
    dist.barrier()
    ballast = fill(disk, 2 * 2**20 + 48 * 1024) if rank == 0 else None
    dist.barrier()
    notes = {"note": "x" * 200_000}
    checkpointer.save(30, state_of(3.0, 1), metadata=notes)
    assert checkpointer.wait() is False
    if ballast is not None:
        ballast.unlink()
    dist.barrier()
    checkpointer.save(40, state_of(4.0, 1), metadata={})
    assert checkpointer.wait() is True
    checkpointer.close()
    return events


def test_a_full_disk_fails_the_save_and_never_the_training(small_disk: Path) -> None:
    events, others = run_ranks(fill_the_disk, 2, small_disk)
    told = [(name, fields["step"]) for name, fields in events]
    assert told == [
        ("checkpoint", 10),
        ("checkpoint_failed", 20),
        ("checkpoint_failed", 30),
        ("checkpoint", 40),
        ("checkpoint_removed", 10),
    ]
    shard, manifest = events[1][1]["reason"], events[2][1]["reason"]
    assert shard.startswith("rank 1: OSError: [Errno 28] No space left on device")
    assert manifest.startswith("rank 0: OSError: [Errno 28] No space left on device")
    assert others == []
    (info,) = list_checkpoints(small_disk)
    assert info.step == 40 and all(v.verdict == "ok" for v in verify(info))
    state = {"w": {"0": torch.zeros(2**18), "1": torch.zeros(2**18)}}
    load_checkpoint(small_disk, state)
    assert all(bool((tensor == 4.0).all()) for tensor in state["w"].values())
