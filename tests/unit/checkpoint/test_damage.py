"""Every byte and every length: no damage to a checkpoint passes what stands before the first use of
a file.

The functions tried are the loader's own: `list_directory` (what the coordinator judges by) and
then, file by file, `require_undamaged` (what every rank does before it unpickles the index and
before it reads a tensor). Each takes a tenth of a millisecond, so all bytes are tried; a sample
goes through the whole load, and the ranks' part of it is in tests/distributed.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.facts import says

from drillyard.errors import UserError
from drillyard.training.checkpoint import dcp_storage
from drillyard.training.checkpoint.checkpointer import Checkpointer
from drillyard.training.checkpoint.dcp_storage import DamagedCheckpoint, require_undamaged
from drillyard.training.checkpoint.inventory import CheckpointInfo, inspect, list_checkpoints

FILES = ["manifest.json", ".metadata", "__0_0.distcp"]


def state_of(value: float) -> dict[str, Any]:
    return {"w": torch.full((4,), value)}


def checkpointer_of(run: Path, events: list[tuple[str, str]] | None = None) -> Checkpointer:
    def record(name: str, **fields: Any) -> None:
        if events is not None and "reason" in fields:
            events.append((name, fields["reason"]))

    settings: dict[str, Any] = {
        "keep": 5,
        "keep_best": False,
        "asynchronous": False,
        "identity": {"name": "tiny"},
    }
    return Checkpointer(run / "checkpoints", **settings, on_event=record)


@pytest.fixture(scope="module")
def two_saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("tiny")
    checkpointer = checkpointer_of(run)
    for step in (10, 20):
        checkpointer.save(step, state_of(float(step)), metadata={"held_out_loss": 1.0})
    checkpointer.close()
    return run


@pytest.fixture
def run(two_saves: Path, tmp_path: Path) -> Path:
    """A run with checkpoints of steps 10 and 20, of under 3 KB each."""
    return Path(shutil.copytree(two_saves, tmp_path / "run"))


@pytest.fixture
def newest(run: Path) -> Path:
    return run / "checkpoints" / "step-00000020"


def first_problem(newest: Path) -> str:
    """What the loader finds before it uses anything of the checkpoint; empty when it would use
    it."""
    info = inspect(newest)
    assert info is not None
    if not info.complete:
        return info.reason
    assert info.manifest is not None
    for name in FILES[1:]:
        try:
            require_undamaged(info.path, name, info.manifest)
        except DamagedCheckpoint as damage:
            return str(damage)
    return ""


def loaded_value(run: Path) -> tuple[float, list[tuple[str, str]]]:
    """Load for real, into other values: what is in the tensor then, and the messages."""
    events: list[tuple[str, str]] = []
    state = state_of(-1.0)
    checkpointer = checkpointer_of(run, events)
    checkpointer.load(state)
    checkpointer.close()
    assert torch.equal(state["w"], state["w"][:1].expand(4))
    return float(state["w"][0]), events


def put(path: Path, position: int, byte: int) -> None:
    """Change one byte in its place: thousands of times faster than writing the whole file."""
    with path.open("r+b") as file:
        file.seek(position)
        file.write(bytes([byte]))


def test_undamaged_the_newest_is_loaded(run: Path, newest: Path) -> None:
    assert first_problem(newest) == ""
    assert loaded_value(run) == (20.0, [])


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_byte_is_noticed_and_its_file_named(newest: Path, name: str) -> None:
    good = (newest / name).read_bytes()
    assert len(good) > 300
    for position, byte in enumerate(good):
        put(newest / name, position, byte ^ (1 << position % 8))
        assert name in first_problem(newest), position
        put(newest / name, position, byte)
    assert first_problem(newest) == ""


@pytest.mark.parametrize("name", FILES)
def test_every_length_that_a_file_can_be_cut_to_is_noticed(newest: Path, name: str) -> None:
    for length in reversed(range((newest / name).stat().st_size)):
        os.truncate(newest / name, length)
        assert name in first_problem(newest), length


@pytest.mark.parametrize("name", FILES)
def test_every_tail_that_zeros_can_take_the_place_of_is_noticed(newest: Path, name: str) -> None:
    """As after a power failure: the size of the file is there, its last pages never reached the
    disk."""
    good = (newest / name).read_bytes()
    for position in reversed(range(len(good.rstrip(b"\0")))):
        put(newest / name, position, 0)
        assert name in first_problem(newest), position


@pytest.mark.parametrize("name", FILES)
def test_damage_anywhere_makes_the_whole_load_return_the_values_of_the_older_one(
    run: Path, newest: Path, name: str
) -> None:
    good = (newest / name).read_bytes()
    draw = random.Random(11)
    flipped = draw.sample(range(len(good)), 30)
    cases = [good[:at] + bytes([good[at] ^ 0x40]) + good[at + 1 :] for at in flipped]
    cases += [good[:length] for length in draw.sample(range(len(good)), 10)]
    for damaged in cases:
        (newest / name).write_bytes(damaged)
        value, events = loaded_value(run)
        assert value == 10.0
        ((event, reason),) = events
        assert event == "checkpoint_damaged" and "step-00000020" in reason and name in reason


def info_of(path: Path) -> CheckpointInfo:
    info = inspect(path)
    assert info is not None
    return info


@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_is_damage_and_not_waited_for(newest: Path, name: str) -> None:
    (newest / name).unlink()
    (newest / name).mkdir()
    assert info_of(newest).status == "damaged" and says(
        info_of(newest).reason, f"{name} ... directory"
    )
    (newest / name).rmdir()
    (newest / name).symlink_to(newest / "gone")
    assert info_of(newest).status == "damaged" and says(
        info_of(newest).reason, f"{name} ... link to nothing"
    )
    (newest / name).unlink()
    os.mkfifo(newest / name)
    assert info_of(newest).status == "damaged" and says(
        info_of(newest).reason, f"{name} ... regular file"
    )


def test_a_link_within_the_checkpoint_or_of_all_of_it_is_as_good_as_the_files(
    run: Path, newest: Path, tmp_path: Path
) -> None:
    (newest / "__0_0.distcp").rename(newest / "elsewhere")
    (newest / "__0_0.distcp").symlink_to("elsewhere")
    assert loaded_value(run) == (20.0, [])
    newest.rename(tmp_path / "whole")
    newest.symlink_to(tmp_path / "whole")
    assert loaded_value(run) == (20.0, [])


def test_a_checkpoint_that_is_a_link_to_nothing_or_a_file_is_damaged_not_absent(
    run: Path, newest: Path
) -> None:
    shutil.rmtree(newest)
    newest.symlink_to(run / "unmounted")
    assert info_of(newest).status == "damaged" and says(info_of(newest).reason, "link to nothing")
    assert loaded_value(run)[0] == 10.0
    newest.unlink()
    newest.write_text("")
    assert info_of(newest).status == "damaged" and says(
        info_of(newest).reason, "file, not a directory"
    )
    assert loaded_value(run)[0] == 10.0


def test_when_all_are_damaged_the_start_is_refused_and_nothing_is_deleted(run: Path) -> None:
    for info in list_checkpoints(run):
        (info.path / ".metadata").write_bytes(b"")
    before = {path: path.stat().st_size for path in run.rglob("*") if path.is_file()}
    checkpointer = checkpointer_of(run)
    with pytest.raises(
        UserError, match=r"none of its 2 checkpoints.*step-00000020: \.metadata has 0"
    ):
        checkpointer.load(state_of(0.0))
    checkpointer.close()
    assert before == {path: path.stat().st_size for path in run.rglob("*") if path.is_file()}


def test_an_interrupted_first_save_is_no_reason_to_refuse(run: Path) -> None:
    for info in list_checkpoints(run):
        (info.path / "manifest.json").unlink()
    checkpointer = checkpointer_of(run)
    assert checkpointer.load(state_of(0.0)) is None  # no event says that one was ever complete
    checkpointer.close()


class FlippingFile(dcp_storage.io.FileIO):
    """A disk that stores something else than it was given, and says nothing."""

    def write(self, data: Any) -> int:
        return super().write(bytes(memoryview(data)[:-1]) + b"?")


def test_a_save_that_does_not_read_back_as_written_fails_and_the_older_ones_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str]] = []
    checkpointer = checkpointer_of(tmp_path, events)
    checkpointer.keep = 1
    checkpointer.save(1, state_of(1.0), metadata={})
    with monkeypatch.context() as patched:
        patched.setattr(dcp_storage.io, "FileIO", FlippingFile)
        checkpointer.save(2, state_of(2.0), metadata={})
    assert [(info.step, info.status) for info in list_checkpoints(tmp_path)] == [(1, "complete")]
    assert [name for name, _ in events] == ["checkpoint_failed"] and says(
        events[0][1], "other bytes"
    )
    checkpointer.save(3, state_of(3.0), metadata={})
    checkpointer.close()
    assert [info.step for info in list_checkpoints(tmp_path)] == [3]
    assert loaded_value(tmp_path)[0] == 3.0
