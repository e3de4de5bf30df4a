"""File systems that fill up and fail: a save is reported as failed, the earlier checkpoint stays
whole, and saving goes on once the disk is well.

Mounts disks of a few MB, which needs root.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import run_ranks
from tests.facts import says
from tests.integration.disks import MIB, LoopDisk, Tmpfs

from drillyard.training.checkpoint.checkpointer import Checkpointer
from drillyard.training.checkpoint.inventory import list_checkpoints
from drillyard.training.checkpoint.loading import load_checkpoint
from drillyard.training.checkpoint.verification import verify

Events = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Tmpfs]:
    disk = Tmpfs(tmp_path / "disk", 8 * MIB)
    disk.mount()
    yield disk
    disk.unmount()


@pytest.fixture
def failing_disk(tmp_path: Path) -> Iterator[tuple[LoopDisk, LoopDisk]]:
    """A disk, and the one that its image lies on."""
    lower = LoopDisk(tmp_path / "lower", 48 * MIB, tmp_path)
    lower.make()
    upper = LoopDisk(tmp_path / "upper", 32 * MIB, lower.place)
    upper.make()
    yield upper, lower
    upper.unmount()
    lower.unmount()


def state_of(value: float, megabytes: float) -> dict[str, Any]:
    """A tensor of this rank's own."""
    return {f"w.{dist.get_rank()}": torch.full((int(megabytes * 2**18),), value)}


def checkpointer_on(disk: Path, events: Events, keep: int) -> Checkpointer:
    return Checkpointer(
        disk / "checkpoints",
        keep=keep,
        keep_best=False,
        asynchronous=True,
        identity={},
        on_event=lambda name, **fields: events.append((name, fields)),
    )


def saved(checkpointer: Checkpointer, step: int, megabytes: float = 1.0, notes: str = "") -> bool:
    """Whether a save of `step`, filled with that number, goes well."""
    checkpointer.save(step, state_of(float(step), megabytes), metadata={"notes": notes})
    return checkpointer.wait()


def on_first_rank(action: Any) -> Any:
    """Do something on rank 0 while the others wait."""
    result = action() if dist.get_rank() == 0 else None
    dist.barrier()
    return result


def left_in(disk: Path) -> list[str]:
    return sorted(path.name for path in (disk / "checkpoints").iterdir())


def fill_the_disk(disk: Tmpfs) -> tuple[Events, list[Any]]:
    """Failures for want of room for a shard (20), for the manifest (30), and at a limit on file
    sizes (50)."""
    events: Events = []
    left: list[Any] = []
    checkpointer = checkpointer_on(disk.place, events, keep=1)
    assert saved(checkpointer, 10)
    assert not saved(checkpointer, 20, megabytes=6 if dist.get_rank() == 1 else 1)
    left.append(on_first_rank(lambda: left_in(disk.place)))
    ballast = on_first_rank(lambda: disk.fill(leave=2 * MIB + 48 * 1024))
    assert not saved(checkpointer, 30, notes="x" * 200_000)
    left.append(on_first_rank(lambda: left_in(disk.place)))
    on_first_rank(lambda: ballast.unlink())
    assert saved(checkpointer, 40)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB // 2, most))
    assert not saved(checkpointer, 50)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    # Room for exactly one more than is kept.
    on_first_rank(lambda: disk.fill(leave=2 * MIB + 256 * 1024))
    assert saved(checkpointer, 60)
    checkpointer.close()
    return events, left


def test_a_full_disk_fails_the_save_and_never_the_training(small_disk: Tmpfs) -> None:
    (events, left), (of_others, _) = run_ranks(fill_the_disk, 2, small_disk)
    assert [(name, fields["step"]) for name, fields in events] == [
        ("checkpoint", 10),
        ("checkpoint_failed", 20),
        ("checkpoint_failed", 30),
        ("checkpoint", 40),
        ("checkpoint_removed", 10),
        ("checkpoint_failed", 50),
        ("checkpoint", 60),
        ("checkpoint_removed", 40),
    ]
    assert of_others == []
    assert left == [["step-00000010"], ["step-00000010"]], (
        "what was written of a failed save is gone at once"
    )
    shard, manifest, limit = (
        fields["reason"] for name, fields in events if name == "checkpoint_failed"
    )
    # Rank 1 wants more than there is; whether rank 0's part finds room before that one takes all,
    # nobody decides.
    assert says(
        shard,
        "rank 1: OSError: [Errno 28] ... free space ... keeping 1 ... room for 2 ... untouched",
    )
    assert manifest.startswith("rank 0: OSError: [Errno 28] ")
    assert limit.startswith("rank 0: OSError: [Errno 27] ")
    assert says(limit, "; rank 1: OSError: [Errno 27] ... ulimit -f")
    (info,) = list_checkpoints(small_disk.place)
    assert info.step == 60 and all(v.verdict == "ok" for v in verify(info))


def break_the_disk(upper: LoopDisk, lower: LoopDisk) -> tuple[Events, list[Any]]:
    """I/O errors of the device (20) and a file system that turns read-only (40); after each the
    disk is well again."""
    events: Events = []
    good: list[Any] = []
    checkpointer = checkpointer_on(upper.place, events, keep=2)

    def look() -> list[int]:
        found = list_checkpoints(upper.place)
        return [
            info.step
            for info in found
            if info.complete and all(v.verdict == "ok" for v in verify(info))
        ]

    def repair() -> None:
        upper.unmount()
        lower.unmount()
        lower.mount()
        upper.check()
        upper.mount()

    assert saved(checkpointer, 10)
    on_first_rank(lower.abort)
    assert not saved(checkpointer, 20)
    good.append(on_first_rank(look))
    on_first_rank(repair)
    assert saved(checkpointer, 30)
    on_first_rank(upper.abort)
    assert not saved(checkpointer, 40)
    good.append(on_first_rank(look))
    on_first_rank(repair)
    good.append(on_first_rank(look))
    assert saved(checkpointer, 50)
    checkpointer.close()
    return events, good


def test_a_failing_or_read_only_disk_leaves_the_earlier_checkpoints(
    failing_disk: tuple[LoopDisk, LoopDisk],
) -> None:
    (events, good), _ = run_ranks(break_the_disk, 2, *failing_disk)
    message = [
        (name, fields["step"])
        for name, fields in events
        if name in ("checkpoint", "checkpoint_failed")
    ]
    assert message == [
        ("checkpoint", 10),
        ("checkpoint_failed", 20),
        ("checkpoint", 30),
        ("checkpoint_failed", 40),
        ("checkpoint", 50),
    ]
    device, read_only = (fields["reason"] for name, fields in events if name == "checkpoint_failed")
    assert says(device, "[Errno 5] ... dmesg")
    assert says(read_only, "[Errno 30] ... writable")
    assert good == [[10], [10, 30], [10, 30]]
    upper, _ = failing_disk
    assert [info.step for info in list_checkpoints(upper.place)] == [30, 50]
    state = {"w": {"0": torch.zeros(2**18), "1": torch.zeros(2**18)}}
    load_checkpoint(upper.place, state)
    assert all(bool((tensor == 50.0).all()) for tensor in state["w"].values())
