"""Checkpoints on several ranks: equal bits under any layout, saving beside training, damage and failures agreed on.

Starting ranks costs seconds, so all that two (or four) ranks do is done in one start, by a fixture; tests judge it.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import RankFailed, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from drillyard.errors import UserError
from drillyard.training.checkpoint import Checkpointer, list_checkpoints, load_checkpoint, storage, verify
from drillyard.training.checkpoint.storage import CheckpointWriter

# Rows that divide by no number of ranks, fewer rows than ranks (empty shards), a scalar's worth, and a wide one.
SHAPES = {"embedding": (17, 6), "norm": (3,), "bias": (1,), "wide": (8, 33)}


class Recorder:
    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, name: str, **fields: Any) -> None:
        self.events.append((name, fields))

    def named(self, name: str) -> list[dict[str, Any]]:
        return [fields for event, fields in self.events if event == name]


def full_value(name: str, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()) * 1000 + step)
    return torch.randn(SHAPES[name], generator=generator)


def sharded(full: torch.Tensor, replicate: int) -> DTensor:
    """The rank's part of `full`, as FSDP2 (one axis) or HSDP (two) would hold it, made without communication."""
    world = dist.get_world_size()
    if replicate == 1:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
        placements: tuple[Any, ...] = (Shard(0),)
        part = dist.get_rank()
    else:
        mesh = init_device_mesh("cpu", (replicate, world // replicate), mesh_dim_names=("replicate", "shard"))
        placements = (Replicate(), Shard(0))
        part = mesh.get_local_rank("shard")
    parts = world // replicate
    chunks = list(full.chunk(parts))
    local = chunks[part].clone() if part < len(chunks) else full.new_empty(0, *full.shape[1:])
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def make_state(step: int, replicate: int, *, random: bool = True) -> dict[str, Any]:
    state: dict[str, Any] = {
        "model": {name: sharded(full_value(name, step), replicate) for name in SHAPES},
        "optimizer": {"step": torch.tensor(float(step)), "groups": [{"lr": 0.1 * step}]},
        "step": step,
    }
    if random:
        state[f"random.{dist.get_rank():05d}"] = torch.arange(5, dtype=torch.uint8) + dist.get_rank()
    return state


def emptied(state: dict[str, Any]) -> dict[str, Any]:
    for value in state["model"].values():
        value.to_local().fill_(-1.0)
    state["optimizer"] = {"step": torch.tensor(-1.0), "groups": None}
    state["step"] = None
    return state


def differences(state: dict[str, Any], step: int, replicate: int) -> list[str]:
    """Names of the entries whose bits are not those of `make_state(step)`."""
    wanted = make_state(step, replicate)
    found = [n for n in SHAPES if not torch.equal(state["model"][n].to_local(), wanted["model"][n].to_local())]
    found += [] if torch.equal(state["optimizer"]["step"], wanted["optimizer"]["step"]) else ["optimizer.step"]
    found += [] if state["optimizer"]["groups"] == wanted["optimizer"]["groups"] else ["optimizer.groups"]
    return found + ([] if state["step"] == step else ["step"])


def make_checkpointer(run: Path, events: Recorder, **settings: Any) -> Checkpointer:
    defaults: dict[str, Any] = {"keep": 3, "keep_best": True, "asynchronous": True, "identity": {"name": "test"}}
    return Checkpointer(run / "checkpoints", **{**defaults, **settings}, on_event=events)


# -- what four ranks do ----------------------------------------------------------------------------


def load_layout(run: Path, step: int, replicate: int) -> list[str]:
    """Load into a state of other values under this layout; names of entries whose bits are not those saved."""
    state = emptied(make_state(step, replicate, random=False))
    checkpointer = make_checkpointer(run, Recorder())
    assert checkpointer.load(state) is not None
    checkpointer.close()
    return differences(state, step, replicate)


def save_layout(run: Path, step: int, replicate: int) -> None:
    checkpointer = make_checkpointer(run, Recorder())
    checkpointer.save(step, make_state(step, replicate), metadata={})
    checkpointer.close()


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
    """What four ranks saved and what two ranks saved, on two ranks; this rank's own random state comes back too."""
    save_layout(folder / "fsdp2", 20, 1)
    runs = [("fsdp2", 20), ("fsdp4", 30), ("hsdp2x2", 40)]
    found = {f"{run} as {2 // r} shards": load_layout(folder / run, step, r) for run, step in runs for r in (1, 2)}
    key = f"random.{dist.get_rank():05d}"
    random_state = {key: torch.zeros(5, dtype=torch.uint8)}
    checkpointer = make_checkpointer(folder / "fsdp2", Recorder())
    checkpointer.load(random_state)
    checkpointer.close()
    wanted = torch.arange(5, dtype=torch.uint8) + dist.get_rank()
    return {**found, "random": [] if torch.equal(random_state[key], wanted) else [key]}


def save_while_changing(folder: Path) -> dict[str, Any]:
    """Save, overwrite the state at once many times, save again while the first save is being written; then load all."""
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
        checkpointer.load(loaded, step)
        found += differences(loaded, step, 1)
    checkpointer.close()
    return {"found": found, "events": [name for name, _ in events.events], "blocked": checkpointer.blocked_seconds}


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
    assert [i.step for i in checkpointer.candidates()] == [10]
    CheckpointWriter.write_data = written  # type: ignore[method-assign]
    checkpointer.save(30, make_state(30, 1), metadata={})
    assert checkpointer.wait() is True
    checkpointer.close()
    return events.events


def go_back(folder: Path) -> list[tuple[str, int]]:
    """Save 10, 20 and 30; start again from 10, save 15: what lay ahead is set aside, then deleted."""
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


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def swap(directory: Path) -> None:
    first, second = directory / "__0_0.distcp", directory / "__1_0.distcp"
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


FILES = ["__0_0.distcp", "__1_0.distcp", ".metadata", "manifest.json"]
Damage = tuple[str, Callable[[Path], Any]]
DAMAGE: dict[str, Damage] = {
    **{f"flipped {name}": (name, lambda d, n=name: flip(d / n)) for name in FILES},
    **{f"cut {name}": (name, lambda d, n=name: (d / n).write_bytes((d / n).read_bytes()[:-1])) for name in FILES},
    **{f"emptied {name}": (name, lambda d, n=name: (d / n).write_bytes(b"")) for name in FILES},
    **{f"missing {name}": (name, lambda d, n=name: (d / n).unlink()) for name in FILES[:3]},
    "longer manifest": ("manifest.json", lambda d: append(d / "manifest.json")),
    "swapped shards": ("__0_0.distcp", swap),
}


def load_damaged(folder: Path) -> dict[str, tuple[int, list[str], list[str]]]:
    """For each damage to the newest checkpoint: the step really loaded, wrong entries, and the reasons told."""
    good = folder / "good"
    for step in (10, 20):
        save_layout(good, step, 1)
    outcomes = {}
    for label, (_, damage) in DAMAGE.items():
        run = folder / label.replace(" ", "-")
        if dist.get_rank() == 0:
            shutil.copytree(good, run)
            damage(run / "checkpoints" / "step-00000020")
        dist.barrier()
        events = Recorder()
        checkpointer = make_checkpointer(run, events)
        state = emptied(make_state(10, 1))
        loaded = checkpointer.load(state)
        checkpointer.close()
        assert loaded is not None
        reasons = [fields["reason"] for fields in events.named("checkpoint_damaged")]
        outcomes[label] = (loaded.step, differences(state, 10, 1), reasons)
    return outcomes


def refused(run: Path, state: dict[str, Any], source: int | Path | None = None) -> str:
    checkpointer = make_checkpointer(run, Recorder())
    with pytest.raises(UserError) as refusal:
        checkpointer.load(state, source)
    checkpointer.close()
    return str(refusal.value)


def load_in_vain(folder: Path) -> dict[str, str]:
    good, bad = folder / "good", folder / "bad"
    if dist.get_rank() == 0:
        shutil.copytree(good, bad)
        for info in list_checkpoints(bad):
            flip(info.path / "__1_0.distcp")
    dist.barrier()
    state = make_state(10, 1)
    checkpointer = make_checkpointer(folder / "nowhere", Recorder())
    assert checkpointer.load(state) is None
    checkpointer.close()
    return {
        "none left": refused(bad, state),
        "by step": refused(bad, state, 20),
        "by path": refused(bad, state, bad),
        "nowhere": refused(bad, state, bad / "nowhere"),
        "unknown key": refused(good, {**state, "model": {"extra": sharded(torch.zeros(4, 4), 1)}}),
        "other shape": refused(good, {**state, "model": {"wide": sharded(torch.zeros(8, 34), 1)}}),
    }


def on_two_ranks(folder: Path) -> dict[str, Any]:
    scenarios = (load_all_layouts, save_while_changing, fail_on_one_rank, go_back, load_damaged, load_in_vain)
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
    for run, step in [("fsdp2", 20), ("fsdp4", 30), ("hsdp2x2", 40)]:  # one process, whole tensors, no process group
        state = {"model": {name: torch.zeros(shape) for name, shape in SHAPES.items()}, "step": None}
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


def test_an_asynchronous_save_holds_the_values_of_its_moment(folder: Path, two_ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["save_while_changing"] for rank in two_ranks)
    assert first["found"] == second["found"] == []
    assert first["events"] == ["checkpoint"] * 3 and second["events"] == []
    assert first["blocked"] > 0
    checkpoints = list_checkpoints(folder / "changing")
    assert [(i.step, i.complete) for i in checkpoints] == [(10, True), (20, True), (30, True)]
    assert all(v.verdict == "ok" for info in checkpoints for v in verify(info))


def test_a_save_that_fails_on_one_rank_fails_on_all_and_the_next_one_goes_well(
    folder: Path, two_ranks: list[dict[str, Any]]
) -> None:
    events, others = (rank["fail_on_one_rank"] for rank in two_ranks)
    assert [name for name, _ in events] == ["checkpoint", "checkpoint_failed", "checkpoint", "checkpoint_removed"]
    assert "rank 1: OSError: [Errno 28] No space left on device" in events[1][1]["reason"]
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
    assert [(i.step, i.status) for i in list_checkpoints(folder / "back")] == [(10, "complete"), (15, "complete")]


@pytest.mark.parametrize("label", DAMAGE)
def test_damage_to_any_file_is_noticed_named_and_the_older_checkpoint_used_by_all(
    label: str, two_ranks: list[dict[str, Any]]
) -> None:
    (step, wrong, reasons), (other_step, other_wrong, _) = (rank["load_damaged"][label] for rank in two_ranks)
    assert (step, wrong, other_step, other_wrong) == (10, [], 10, [])
    assert len(reasons) == 1 and "step-00000020" in reasons[0] and DAMAGE[label][0] in reasons[0]


def test_a_start_is_refused_when_every_checkpoint_is_damaged_or_the_one_asked_for_is(
    two_ranks: list[dict[str, Any]],
) -> None:
    for messages in (rank["load_in_vain"] for rank in two_ranks):
        assert "none of its 2 checkpoints can be used" in messages["none left"]
        assert "__1_0.distcp: wrong checksum" in messages["none left"]
        assert "step-00000020/__1_0.distcp: wrong checksum" in messages["by step"]
        assert "step-00000020/__1_0.distcp: wrong checksum" in messages["by path"]
        assert "nowhere: there is no checkpoint" in messages["nowhere"]


def test_a_state_that_does_not_fit_is_an_error_and_no_reason_for_an_older_checkpoint(
    two_ranks: list[dict[str, Any]],
) -> None:
    for messages in (rank["load_in_vain"] for rank in two_ranks):
        assert "does not fit this model" in messages["unknown key"] and "model.extra" in messages["unknown key"]
        assert "does not fit this model" in messages["other shape"] and "model.wide" in messages["other shape"]


# -- a rank that is killed in the middle of a save -------------------------------------------------


def die_in_the_middle_of_a_save(run: Path, dying_rank: int) -> None:
    """Rank 1 dies when its shard is on disk; rank 0 when all shards and `.metadata` are, before the manifest."""
    checkpointer = make_checkpointer(run, Recorder())
    checkpointer.save(10, make_state(10, 1), metadata={}, wait=True)
    if dist.get_rank() == dying_rank:
        written = CheckpointWriter.write_data

        def write_then_die(*args: Any) -> Any:
            written(*args)
            os._exit(9)

        if dying_rank == 0:
            storage.write_manifest = lambda *_: os._exit(9)
        else:
            CheckpointWriter.write_data = write_then_die  # type: ignore[method-assign]
    checkpointer.save(20, make_state(20, 1), metadata={})
    assert checkpointer.wait() is False
    time.sleep(60)  # the other rank's death is what must end the round


@pytest.mark.parametrize("dying_rank", [0, 1])
def test_a_rank_killed_in_the_middle_of_a_save_leaves_the_earlier_checkpoint(tmp_path: Path, dying_rank: int) -> None:
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
    assert [(i.step, i.status) for i in list_checkpoints(tmp_path)] == [(10, "complete"), (30, "complete")]
