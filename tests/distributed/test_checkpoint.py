"""Checkpoints on several ranks: equal bits under any layout, saving beside training, failures
agreed on.

Starting ranks costs seconds, so all that two (or four) ranks do is done in one start, by a fixture;
tests judge it.
"""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.checkpoint_case import (
    SHAPES,
    Recorder,
    differences,
    emptied,
    full_value,
    make_checkpointer,
    make_state,
    save_layout,
    sharded,
)
from tests.distributed.ranks import RankFailed, run_ranks

from drillyard.training.checkpoint import dcp_storage
from drillyard.training.checkpoint.dcp_storage import CheckpointWriter
from drillyard.training.checkpoint.inventory import list_checkpoints, step_directory_name
from drillyard.training.checkpoint.loading import load_checkpoint
from drillyard.training.checkpoint.verification import verify

# -- what four ranks do ----------------------------------------------------------------------------


def load_layout(run: Path, step: int, replicate: int) -> list[str]:
    """Load into a state of other values under this layout; names of entries whose bits are not
    those saved."""
    state = emptied(make_state(step, replicate, random=False))
    checkpointer = make_checkpointer(run, Recorder())
    assert checkpointer.load(state) is not None
    checkpointer.close()
    return differences(state, step, replicate)


def on_four_ranks(folder: Path) -> dict[str, list[str]]:
    save_layout(folder / "fsdp4", 30, 1)
    save_layout(folder / "hsdp2x2", 40, 2)
    checkpointer = make_checkpointer(folder / "replicas", Recorder(), asynchronous=False)
    checkpointer.save(1, {"w": sharded(torch.zeros(1024, 256), 2)}, metadata={})
    checkpointer.close()
    return {
        f"{run} as {4 // replicate} shards": load_layout(folder / run, step, replicate)
        for run, step in [("fsdp4", 30), ("hsdp2x2", 40)]
        for replicate in (1, 2)
    }


# -- what two ranks do -----------------------------------------------------------------------------


def load_all_layouts(folder: Path) -> dict[str, list[str]]:
    """What four ranks saved and what two ranks saved, on two ranks; this rank's own random state
    comes back too."""
    save_layout(folder / "fsdp2", 20, 1)
    runs = [("fsdp2", 20), ("fsdp4", 30), ("hsdp2x2", 40)]
    found = {
        f"{run} as {2 // r} shards": load_layout(folder / run, step, r)
        for run, step in runs
        for r in (1, 2)
    }
    key = f"random.{dist.get_rank():05d}"
    random_state = {key: torch.zeros(5, dtype=torch.uint8)}
    checkpointer = make_checkpointer(folder / "fsdp2", Recorder())
    checkpointer.load(random_state)
    checkpointer.close()
    wanted = torch.arange(5, dtype=torch.uint8) + dist.get_rank()
    return {**found, "random": [] if torch.equal(random_state[key], wanted) else [key]}


def save_while_changing(folder: Path) -> dict[str, Any]:
    """Save, overwrite the state at once many times, save again while the first save is being
    written; then load all."""
    events = Recorder()
    checkpointer = make_checkpointer(folder / "changing", events)
    state = make_state(10, 1)
    for step in (10, 20, 30):
        for name in SHAPES:
            state["model"][name].copy_(sharded(full_value(name, step), 1))
        state["optimizer"]["step"].fill_(float(step))
        state["optimizer"]["groups"][0]["lr"] = 0.1 * step
        state["step"] = step
        checkpointer.save(step, state, metadata={})
        for _ in range(20):
            for name in SHAPES:
                state["model"][name].to_local().mul_(1.5).add_(1.0)
            state["optimizer"]["step"].add_(1.0)
            state["optimizer"]["groups"][0]["lr"] += 1.0
    checkpointer.wait()
    found = []
    for step in (10, 20, 30):
        loaded = emptied(make_state(step, 1))
        checkpointer.load(loaded, checkpointer.directory / step_directory_name(step))
        found += differences(loaded, step, 1)
    checkpointer.close()
    return {"found": found, "events": [name for name, _ in events.events]}


def fail_on_one_rank(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    events = Recorder()
    checkpointer = make_checkpointer(folder / "failing", events, keep=1)
    checkpointer.save(10, make_state(10, 1), metadata={}, wait=True)
    written = CheckpointWriter.write_data
    if dist.get_rank() == 1:

        def disk_full(*_: Any) -> Any:
            raise OSError(errno.ENOSPC, "No space left on device", "__1_0.distcp")

        CheckpointWriter.write_data = disk_full  # type: ignore[method-assign]
    checkpointer.save(20, make_state(20, 1), metadata={})
    assert checkpointer.wait() is False
    latest = checkpointer.latest()
    assert latest is not None and latest.step == 10
    CheckpointWriter.write_data = written  # type: ignore[method-assign]
    checkpointer.save(30, make_state(30, 1), metadata={})
    assert checkpointer.wait() is True
    checkpointer.close()
    return events.events


def go_back(folder: Path) -> list[tuple[str, int]]:
    """Save 10, 20 and 30; start again from 10, save 15: what lay ahead is set aside, then
    deleted."""
    run = folder / "back"
    for step in (10, 20, 30):
        save_layout(run, step, 1)
    events = Recorder()
    checkpointer = make_checkpointer(run, events, keep=2, keep_best=False)
    checkpointer.load(make_state(10, 1), run / "checkpoints" / "step-00000010")
    checkpointer.save(10, make_state(10, 1), metadata={}, wait=True)  # on disk already
    checkpointer.save(15, make_state(15, 1), metadata={}, wait=True)
    checkpointer.close()
    return [(name, fields["step"]) for name, fields in events.events]


def on_two_ranks(folder: Path) -> dict[str, Any]:
    scenarios = (load_all_layouts, save_while_changing, fail_on_one_rank, go_back)
    return {scenario.__name__: scenario(folder) for scenario in scenarios}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def four_ranks(folder: Path) -> list[dict[str, list[str]]]:
    return run_ranks(on_four_ranks, 4, folder)


@pytest.fixture(scope="module")
def two_ranks(folder: Path, four_ranks: list[Any]) -> list[dict[str, Any]]:
    return run_ranks(on_two_ranks, 2, folder)


# -- facts -----------------------------------------------------------------------------------------


def test_every_layout_loads_the_bits_that_any_other_layout_saved(
    folder: Path, four_ranks: list[dict[str, list[str]]], two_ranks: list[dict[str, Any]]
) -> None:
    for rank in four_ranks + [rank["load_all_layouts"] for rank in two_ranks]:
        assert {layout: wrong for layout, wrong in rank.items() if wrong} == {}
    for run, step in [
        ("fsdp2", 20),
        ("fsdp4", 30),
        ("hsdp2x2", 40),
    ]:  # one process, whole tensors, no process group
        state = {
            "model": {name: torch.zeros(shape) for name, shape in SHAPES.items()},
            "step": None,
        }
        assert load_checkpoint(folder / run, state).step == state["step"] == step
        for name in SHAPES:
            assert torch.equal(state["model"][name], full_value(name, step))


def test_replicas_are_written_once(folder: Path, four_ranks: list[Any]) -> None:
    size = 1024 * 256 * 4
    (info,) = list_checkpoints(folder / "replicas")
    assert size < info.bytes < 1.1 * size
    assert info.manifest is not None
    shards = sorted(f.bytes for name, f in info.manifest.files.items() if name.endswith(".distcp"))
    assert len(shards) == 2 and shards[0] > size / 2  # and the two replicas share the writing


def test_an_asynchronous_save_holds_the_values_of_its_moment(
    folder: Path, two_ranks: list[dict[str, Any]]
) -> None:
    first, second = (rank["save_while_changing"] for rank in two_ranks)
    assert first["found"] == second["found"] == []
    assert first["events"] == ["checkpoint"] * 3 and second["events"] == []
    checkpoints = list_checkpoints(folder / "changing")
    assert [(i.step, i.complete) for i in checkpoints] == [(10, True), (20, True), (30, True)]
    assert all(v.verdict == "ok" for info in checkpoints for v in verify(info))


def test_a_save_that_fails_on_one_rank_fails_on_all_and_the_next_one_goes_well(
    folder: Path, two_ranks: list[dict[str, Any]]
) -> None:
    events, others = (rank["fail_on_one_rank"] for rank in two_ranks)
    assert [name for name, _ in events] == [
        "checkpoint",
        "checkpoint_failed",
        "checkpoint",
        "checkpoint_removed",
    ]
    assert "rank 1: OSError: [Errno 28] " in events[1][1]["reason"]
    assert events[3][1]["step"] == 10 and others == []
    assert [(i.step, i.status) for i in list_checkpoints(folder / "failing")] == [(30, "complete")]


def test_going_back_sets_aside_what_lay_ahead_and_saves_no_step_twice(
    folder: Path, two_ranks: list[dict[str, Any]]
) -> None:
    events = two_ranks[0]["go_back"]
    assert events == [
        ("checkpoint", 15),
        ("checkpoint_abandoned", 20),
        ("checkpoint_abandoned", 30),
        ("checkpoint_removed", 20),
        ("checkpoint_removed", 30),
    ]
    assert [(i.step, i.status) for i in list_checkpoints(folder / "back")] == [
        (10, "complete"),
        (15, "complete"),
    ]


# -- a rank that is killed in the middle of a save -------------------------------------------------


def die_in_the_middle_of_a_save(run: Path, dying_rank: int) -> None:
    """Rank 1 dies when its shard is on disk; rank 0 when all shards and `.metadata` are, before the
    manifest."""
    checkpointer = make_checkpointer(run, Recorder())
    checkpointer.save(10, make_state(10, 1), metadata={}, wait=True)
    if dist.get_rank() == dying_rank:
        written = CheckpointWriter.write_data

        def write_then_die(*args: Any) -> Any:
            written(*args)
            os._exit(9)

        if dying_rank == 0:
            dcp_storage.write_manifest = lambda *_: os._exit(9)
        else:
            CheckpointWriter.write_data = write_then_die  # type: ignore[method-assign]
    checkpointer.save(20, make_state(20, 1), metadata={})
    assert checkpointer.wait() is False
    time.sleep(1000)  # the other rank's death is what must end the attempt


@pytest.mark.parametrize("dying_rank", [0, 1])
def test_a_rank_killed_in_the_middle_of_a_save_leaves_the_earlier_checkpoint(
    tmp_path: Path, dying_rank: int
) -> None:
    with pytest.raises(RankFailed, match="exit code 9"):
        run_ranks(die_in_the_middle_of_a_save, 2, tmp_path, dying_rank)
    states = {info.step: info.status for info in list_checkpoints(tmp_path)}
    assert states[10] == "complete" and states.get(20, "incomplete") == "incomplete"
    if dying_rank == 0:
        assert (tmp_path / "checkpoints" / "step-00000020" / ".metadata").is_file()
    events = Recorder()
    state = {"model": {name: torch.zeros(shape) for name, shape in SHAPES.items()}}
    checkpointer = make_checkpointer(tmp_path, events)
    loaded = checkpointer.load(state)
    assert loaded is not None and loaded.step == 10
    assert all(torch.equal(state["model"][name], full_value(name, 10)) for name in SHAPES)
    checkpointer.save(30, state, metadata={}, wait=True)
    checkpointer.close()
    assert [(i.step, i.status) for i in list_checkpoints(tmp_path)] == [
        (10, "complete"),
        (30, "complete"),
    ]
