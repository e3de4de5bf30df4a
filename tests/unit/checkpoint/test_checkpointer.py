"""The Checkpointer in one process: earlier formats, keeping, saving once, what a state may hold,
errors of the disk."""

from __future__ import annotations

import dataclasses
import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.facts import says

from drillyard.errors import UserError
from drillyard.training.checkpoint import checkpointer as checkpointer_module
from drillyard.training.checkpoint import dcp_storage, loading
from drillyard.training.checkpoint.checkpointer import Checkpointer
from drillyard.training.checkpoint.dcp_planners import flatten, unflatten_into
from drillyard.training.checkpoint.index_reader import read_index
from drillyard.training.checkpoint.inventory import list_checkpoints
from drillyard.training.checkpoint.loading import load_checkpoint, read
from drillyard.training.checkpoint.verification import verify

FORMATS = Path(__file__).parent


def make(run: Path, **settings: Any) -> tuple[Checkpointer, list[tuple[str, Any]]]:
    events: list[tuple[str, Any]] = []
    defaults: dict[str, Any] = {
        "keep": 2,
        "keep_best": True,
        "asynchronous": True,
        "identity": {"name": "a"},
    }
    checkpointer = Checkpointer(
        run / "checkpoints",
        **{**defaults, **settings},
        on_event=lambda name, **fields: events.append((name, fields["step"])),
    )
    return checkpointer, events


def steps(run: Path) -> list[int]:
    return [info.step for info in list_checkpoints(run) if info.complete]


@pytest.mark.parametrize("version", [1])
def test_a_checkpoint_of_every_earlier_format_is_loaded(version: int) -> None:
    state: dict[str, Any] = {
        "model": {"w": torch.zeros(5, 3)},
        "optimizer": {"step": torch.tensor(0.0)},
        "note": None,
        "random.00001": torch.zeros(4, dtype=torch.uint8),
    }
    loaded = load_checkpoint(FORMATS / f"format-{version}", state)
    assert loaded.info.manifest is not None and loaded.info.manifest.format_version == version
    assert (
        loaded.metadata["held_out_loss"] == 1.25
        and loaded.metadata["world_size"] == 2
        and loaded.step == 10
    )
    assert torch.equal(state["model"]["w"], torch.arange(15.0).reshape(5, 3))
    assert state["optimizer"]["step"] == 10 and state["note"] == "ten"
    assert state["random.00001"].tolist() == [1, 2, 3, 4]


def test_a_torch_that_is_too_old_for_a_checkpoint_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    info = list_checkpoints(FORMATS / "format-1")[0]
    assert info.manifest is not None
    later = dataclasses.replace(
        info, manifest=dataclasses.replace(info.manifest, torch_version="99.1.0+cu130")
    )
    state = {"model": {"w": torch.zeros(5, 3)}}
    assert read(later, state, None, None).step == 10, (
        "a later torch may write what this one can read"
    )
    index = read_index(info.path, info.manifest)
    tensors = {
        name: dataclasses.replace(tensor, dtype="float3_e1m1")
        for name, tensor in index.tensors.items()
    }
    monkeypatch.setattr(
        loading, "read_index", lambda *_: dataclasses.replace(index, tensors=tensors)
    )
    with pytest.raises(UserError, match=r"float3_e1m1.*torch 99\.1\.0\+cu130.*torch 99\.1\.0"):
        read(later, state, None, None)


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    checkpointer, events = make(tmp_path)
    for step, loss in [(1, 3.0), (2, 1.0), (3, 2.0), (4, float("nan")), (5, 2.0)]:
        checkpointer.save(step, {"w": torch.zeros(2)}, metadata={"held_out_loss": loss})
    checkpointer.close()
    assert steps(tmp_path) == [2, 4, 5]
    assert [step for name, step in events if name == "checkpoint_removed"] == [1, 3]


def test_a_loss_measured_after_the_save_decides_which_is_the_best(tmp_path: Path) -> None:
    checkpointer, events = make(tmp_path, keep=1)
    for step, loss in [(1, 3.0), (2, 1.0), (3, 2.0)]:
        checkpointer.save(step, {"w": torch.zeros(2)}, metadata={})
        checkpointer.record_held_out_loss(step, loss)
    checkpointer.close()
    assert steps(tmp_path) == [2, 3]
    assert [step for name, step in events if name == "checkpoint_removed"] == [1]
    checkpointer.record_held_out_loss(3, 0.5)
    (last,) = list_checkpoints(tmp_path)
    assert (last.step, last.held_out_loss) == (3, 0.5)
    assert {verdict.verdict for verdict in verify(last)} == {"ok"}


def test_going_back_to_the_last_step_sets_aside_what_lies_ahead(tmp_path: Path) -> None:
    checkpointer, _ = make(tmp_path)
    for step in (3, 6):
        checkpointer.save(step, {"w": torch.full((2,), float(step))}, metadata={}, wait=True)
    checkpointer.close()
    again, events = make(tmp_path)
    state = {"w": torch.zeros(2)}
    assert again.load(state, tmp_path / "checkpoints/step-00000003") is not None
    again.save(3, state, metadata={}, wait=True)
    assert steps(tmp_path) == [3, 6]
    again.close()
    again.end_at(3)
    assert steps(tmp_path) == [3] and events == [("checkpoint_abandoned", 6)]


def test_a_checkpoint_that_a_load_found_damaged_does_not_count_as_kept(tmp_path: Path) -> None:
    def flip(step: int) -> None:
        (shard,) = (tmp_path / f"checkpoints/step-{step:08}").glob("*.distcp")
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)

    def load_and_save(expected: int, *saved: int) -> None:
        again, _ = make(tmp_path, keep_best=False)
        state = {"w": torch.zeros(2)}
        loaded = again.load(state)
        assert (
            loaded is not None and loaded.step == expected and state["w"].tolist() == [expected] * 2
        )
        for step in saved:
            again.save(step, {"w": torch.full((2,), float(step))}, metadata={}, wait=True)
        again.close()

    checkpointer, _ = make(tmp_path, keep_best=False)
    for step in (1, 2):
        checkpointer.save(step, {"w": torch.full((2,), float(step))}, metadata={}, wait=True)
    checkpointer.close()
    flip(2)
    load_and_save(1, 3)
    # 3 and 1 are the two that can be used: 2 stays beside them.
    assert steps(tmp_path) == [1, 2, 3]
    flip(3)
    # 2 is written again and then counts; what lies ahead of it is set aside.
    load_and_save(1, 2)
    assert steps(tmp_path) == [1, 2]
    load_and_save(2, 4)
    assert steps(tmp_path) == [2, 4]


def test_a_step_on_disk_is_not_saved_again(tmp_path: Path) -> None:
    checkpointer, events = make(tmp_path, keep=1)
    checkpointer.save(7, {"w": torch.zeros(2)}, metadata={})
    checkpointer.save(7, {"w": torch.ones(2)}, metadata={}, wait=True)
    checkpointer.close()
    again, events_again = make(tmp_path, keep=1)
    state = {"w": torch.ones(2)}
    again.load(state)
    again.save(7, state, metadata={}, wait=True)
    again.close()
    assert state["w"].tolist() == [0, 0] and events == [("checkpoint", 7)] and events_again == []


def test_what_interrupted_attempts_left_is_removed_at_the_first_save_and_damaged_ones_stay(
    tmp_path: Path,
) -> None:
    checkpointer, _ = make(tmp_path, keep=5)
    for step in (1, 2, 3):
        checkpointer.save(step, {"w": torch.zeros(2)}, metadata={})
    checkpointer.close()
    one, two, _ = (info.path for info in list_checkpoints(tmp_path))
    (one / "manifest.json").unlink()
    (two / ".metadata").unlink()
    checkpointer, events = make(tmp_path, keep=5)
    assert len(list_checkpoints(tmp_path)) == 3  # a start alone deletes nothing
    checkpointer.save(4, {"w": torch.zeros(2)}, metadata={})
    checkpointer.close()
    assert events == [("checkpoint_removed", 1), ("checkpoint", 4)]
    assert [(i.step, i.status) for i in list_checkpoints(tmp_path)] == [
        (2, "damaged"),
        (3, "complete"),
        (4, "complete"),
    ]


def test_views_strides_dtypes_scalars_and_objects_come_back(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "view": base[1:3, ::2],
        "transposed": base.t(),
        "bf16": base.to(torch.bfloat16),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(base.clone()),
        "nested": {"list": [1, {"a": 2}], "none": None, "dict": {}},
    }
    for asynchronous in (True, False):
        run = tmp_path / str(asynchronous)
        run.mkdir()
        checkpointer, _ = make(run, asynchronous=asynchronous)
        checkpointer.save(1, state, metadata={})
        target = {
            k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else v for k, v in state.items()
        }
        target["nested"] = {"list": None, "none": 1, "dict": None}
        assert checkpointer.load(target) is not None
        checkpointer.close()
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(target[key], value) and target[key].dtype == value.dtype, key
        assert target["nested"] == state["nested"]


def test_names_that_collide_are_refused_and_flattening_is_undone() -> None:
    with pytest.raises(ValueError, match=r"a\.b"):
        flatten({"a": {"b": 1}, "a.b": 2})
    state: dict[str, Any] = {"a": {"b": 1, "c": {}}, "d": [1]}
    flat = flatten(state)
    assert flat == {"a.b": 1, "a.c": {}, "d": [1]}
    unflatten_into(state, {"a.b": 5, "a.c": {"x": 1}, "d": None})
    assert state == {"a": {"b": 5, "c": {"x": 1}}, "d": None}


class FailingFile(dcp_storage.io.FileIO):
    """A file on a disk that has room for so many bytes, or that cannot be closed."""

    room = 0
    fails_at_close = False
    without_room = OSError(errno.ENOSPC, "No space left on device")

    def write(self, data: Any) -> int:
        part = memoryview(data)[: FailingFile.room]
        if not part:
            raise FailingFile.without_room
        FailingFile.room -= len(part)
        return super().write(part)

    def close(self) -> None:
        failing = not self.closed and self.writable() and FailingFile.fails_at_close
        super().close()
        if failing:
            raise OSError(errno.EIO, "Input/output error")


def test_a_quota_that_is_used_up_fails_the_save_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    checkpointer = Checkpointer(
        tmp_path / "checkpoints", keep=2, keep_best=True, asynchronous=True, identity={},
        on_event=lambda name, **fields: seen.append({"event": name, **fields}),
    )  # fmt: skip
    state = {"w": torch.arange(600_000.0)}
    checkpointer.save(1, state, metadata={}, wait=True)
    monkeypatch.setattr(dcp_storage.io, "FileIO", FailingFile)
    monkeypatch.setattr(FailingFile, "without_room", OSError(errno.EDQUOT, "Disk quota exceeded"))
    for step, room in enumerate((0, 1_500_000), start=2):
        FailingFile.room = room
        checkpointer.save(step, state, metadata={}, wait=True)
        assert not (tmp_path / "checkpoints" / f"step-{step:08d}").exists(), (
            "it would use up the quota for nothing"
        )
    monkeypatch.undo()
    (info,) = list_checkpoints(tmp_path)
    assert info.step == 1 and all(verdict.verdict == "ok" for verdict in verify(info))
    checkpointer.save(4, state, metadata={}, wait=True)
    checkpointer.close()
    assert [(line["event"], line["step"]) for line in seen] == [
        ("checkpoint", 1), ("checkpoint_failed", 2), ("checkpoint_failed", 3), ("checkpoint", 4),
    ]  # fmt: skip
    for reason in (line["reason"] for line in seen if line["event"] == "checkpoint_failed"):
        assert says(reason, "Disk quota exceeded")
        assert says(reason, "keeping 3 ... room for 4")


def test_a_write_that_fails_at_any_byte_or_at_closing_fails_the_save_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.arange(600_000.0), "note": "x" * 1000}
    checkpointer, events = make(tmp_path)
    checkpointer.save(1, state, metadata={}, wait=True)
    size = list_checkpoints(tmp_path)[0].bytes
    monkeypatch.setattr(dcp_storage.io, "FileIO", FailingFile)
    rooms = [0, 1, 1000, 1_500_000, size - 2500, size - 1500]
    for step, room in enumerate(rooms, start=2):
        FailingFile.room = room
        checkpointer.save(step, state, metadata={}, wait=True)
    FailingFile.room, FailingFile.fails_at_close = 10**9, True
    checkpointer.save(20, state, metadata={}, wait=True)
    FailingFile.fails_at_close = False
    checkpointer.save(30, state, metadata={}, wait=True)
    checkpointer.close()
    failed = [step for name, step in events if name == "checkpoint_failed"]
    assert failed == [*range(2, 2 + len(rooms)), 20] and checkpointer.saves_failed == len(failed)
    assert [(i.step, i.status) for i in list_checkpoints(tmp_path)] == [
        (1, "complete"),
        (30, "complete"),
    ]
    assert all(v.verdict == "ok" for info in list_checkpoints(tmp_path) for v in verify(info))


@pytest.mark.parametrize("before_the_manifest", [True, False])
def test_ranks_lost_before_the_manifest_cost_the_save_and_after_it_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before_the_manifest: bool
) -> None:
    save = checkpointer_module.save_state_dict

    def lose_the_others(*args: Any, **settings: Any) -> None:
        if not before_the_manifest:
            save(*args, **settings)
        raise RuntimeError("Connection closed by peer")

    checkpointer, events = make(tmp_path)
    checkpointer.save(1, {"w": torch.zeros(2)}, metadata={}, wait=True)
    monkeypatch.setattr(checkpointer_module, "save_state_dict", lose_the_others)
    checkpointer.save(2, {"w": torch.zeros(2)}, metadata={})
    checkpointer.close()
    assert steps(tmp_path) == ([1] if before_the_manifest else [1, 2])
    assert events[-1] == ("checkpoint_failed" if before_the_manifest else "checkpoint", 2)


def test_a_path_that_holds_no_checkpoint_says_so_and_what_to_name(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match=r"no checkpoint; .*step-00000050"):
            load_checkpoint(path, {})
    (tmp_path / "not-a-directory").write_text("")
    with pytest.raises(UserError, match="no checkpoint"):
        load_checkpoint(tmp_path / "not-a-directory", {})
    (tmp_path / "checkpoints" / "step-00000010").mkdir(parents=True)
    with pytest.raises(UserError, match="no manifest"):
        load_checkpoint(tmp_path, {})


def test_accept_can_refuse_before_the_state_is_touched(tmp_path: Path) -> None:
    def refuse(metadata: dict[str, Any]) -> None:
        raise UserError(f"not from step {metadata['step']} of {metadata['world_size']} rank")

    state = {"model": {"w": torch.zeros(5, 3)}}
    with pytest.raises(UserError, match="step 10 of 2 rank"):
        load_checkpoint(FORMATS / "format-1", state, accept=refuse)
    assert not state["model"]["w"].any()


class ClaimLost(Exception):
    """Stands for the end of a process whose run another start has claimed."""


class Claim:
    """What a Checkpointer calls before it writes. `lost`: another start has the run."""

    lost = False

    def __call__(self) -> None:
        if self.lost:
            raise ClaimLost


def content(run: Path) -> dict[str, bytes]:
    """Every file of the run's checkpoints."""
    return {str(path): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def losing_at(run: Path, event: str, **settings: Any) -> tuple[Checkpointer, Claim]:
    """A checkpointer that loses its claim right after an event of the second save."""
    claim = Claim()

    def lose(name: str, **fields: Any) -> None:
        claim.lost = claim.lost or (name == event and fields["step"] > 1)

    given: dict[str, Any] = {"keep": 1, "keep_best": True, "asynchronous": True, **settings}
    made = Checkpointer(
        run / "checkpoints", **given, identity={}, on_event=lose, before_write=claim
    )
    made.save(1, {"w": torch.zeros(2)}, metadata={}, wait=True)
    return made, claim


def test_without_its_claim_it_deletes_no_checkpoint(tmp_path: Path) -> None:
    made, _ = losing_at(tmp_path, "checkpoint")
    with pytest.raises(ClaimLost):
        made.save(2, {"w": torch.zeros(2)}, metadata={}, wait=True)
    assert steps(tmp_path) == [1, 2], "step 1 is not kept, and is the new start's now"


def test_without_its_claim_it_sets_no_checkpoint_aside(tmp_path: Path) -> None:
    made, claim = losing_at(tmp_path, "none", keep=9)
    made.save(3, {"w": torch.zeros(2)}, metadata={}, wait=True)
    made.step_on_disk, claim.lost = 1, True
    with pytest.raises(ClaimLost):
        made.end_at(1)
    assert steps(tmp_path) == [1, 3]


def test_without_its_claim_a_save_changes_no_file(tmp_path: Path) -> None:
    made, claim = losing_at(tmp_path, "none")
    before, claim.lost = content(tmp_path), True
    with pytest.raises(ClaimLost):
        made.save(2, {"w": torch.zeros(2)}, metadata={}, wait=True)
    assert content(tmp_path) == before


def test_a_rank_looks_at_the_claim_right_before_it_writes_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file has the name of the one that the new start's rank writes at the same step."""
    made, claim = losing_at(tmp_path, "none")
    prepared = dcp_storage.CheckpointWriter.prepare_global_plan

    def then_lost(self: Any, plans: Any) -> Any:
        found = prepared(self, plans)
        claim.lost = True
        return found

    monkeypatch.setattr(dcp_storage.CheckpointWriter, "prepare_global_plan", then_lost)
    with pytest.raises(ClaimLost):
        made.save(2, {"w": torch.zeros(2)}, metadata={}, wait=True)
    assert not list(tmp_path.rglob("step-00000002/*"))


def test_without_its_claim_it_writes_no_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, claim = losing_at(tmp_path, "none")
    visible = dcp_storage._require_visible

    def then_lost(*arguments: Any) -> None:
        visible(*arguments)
        claim.lost = True

    monkeypatch.setattr(dcp_storage, "_require_visible", then_lost)
    with pytest.raises(ClaimLost):
        made.save(2, {"w": torch.zeros(2)}, metadata={}, wait=True)
    assert steps(tmp_path) == [1]


def test_without_its_claim_it_puts_no_held_out_loss_beside_a_checkpoint(tmp_path: Path) -> None:
    made, claim = losing_at(tmp_path, "none")
    made.close()
    before, claim.lost = content(tmp_path), True
    with pytest.raises(ClaimLost):
        made.record_held_out_loss(1, 0.5)
    assert content(tmp_path) == before


def test_without_its_claim_it_leaves_what_interrupted_saves_left(tmp_path: Path) -> None:
    made, claim = losing_at(tmp_path, "none")
    part = tmp_path / "checkpoints/step-00000009/__0_0.distcp"
    part.parent.mkdir()
    part.write_bytes(b"the new start is writing it")
    claim.lost = True
    made.remove_leftovers()
    made.close()
    assert part.exists()
