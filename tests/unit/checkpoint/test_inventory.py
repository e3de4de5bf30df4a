"""What lies in `checkpoints/`: judged by manifest and sizes, kept and deleted so that a good one
always remains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.checkpoint.made import CONTENT, make_checkpoint

from drillyard.errors import UserError
from drillyard.telemetry import append_event
from drillyard.training.checkpoint import inventory
from drillyard.training.checkpoint.inventory import (
    CheckpointInfo,
    best_checkpoint,
    completed_steps,
    list_checkpoints,
    newest_usable,
    prunable,
    remove_checkpoint,
    set_aside_checkpoint,
)
from drillyard.training.checkpoint.manifest import MANIFEST_NAME, Manifest
from drillyard.training.checkpoint.verification import verify


def test_a_run_directory_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path) == []
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "notes").mkdir()
    assert list_checkpoints(tmp_path) == []


def test_complete_checkpoints_are_listed_by_step_with_what_the_manifest_says(
    tmp_path: Path,
) -> None:
    for step in (100, 50, 123456789):
        make_checkpoint(tmp_path, step, held_out_loss=1.5)
    found = list_checkpoints(tmp_path)
    assert [info.step for info in found] == [50, 100, 123456789] and all(
        info.complete for info in found
    )
    assert found[0].bytes == sum(file.stat().st_size for file in found[0].path.iterdir())
    assert found[0].manifest is not None and found[0].manifest.identity == {"name": "a"}
    assert found[0].held_out_loss == 1.5
    assert found[0].created == "2026-01-31T12:00:00.000Z"


def test_without_a_manifest_it_is_incomplete_whatever_else_is_there(tmp_path: Path) -> None:
    (make_checkpoint(tmp_path, 50) / MANIFEST_NAME).unlink()
    (info,) = list_checkpoints(tmp_path)
    assert info.status == "incomplete" and info.metadata == {}
    assert [v.verdict for v in verify(info)] == ["missing"]


@pytest.mark.parametrize("name", CONTENT)
def test_missing_cut_and_changed_files_are_noticed_and_named(tmp_path: Path, name: str) -> None:
    path = make_checkpoint(tmp_path, 50)
    good = (path / name).read_bytes()

    def judged() -> tuple[str, str, list[tuple[str, str]]]:
        (info,) = list_checkpoints(tmp_path)
        return (
            info.status,
            info.reason,
            [(v.name, v.verdict) for v in verify(info) if v.verdict != "ok"],
        )

    (path / name).write_bytes(good[:-1])
    status, reason, verdicts = judged()
    assert (status, verdicts) == ("damaged", [(name, "wrong size")]) and name in reason
    (path / name).write_bytes(good[:-1] + b"?")
    assert judged() == (
        "complete",
        "",
        [(name, "wrong checksum")],
    )  # listing reads no content, verifying does
    (path / name).unlink()
    status, reason, verdicts = judged()
    assert (status, verdicts) == ("damaged", [(name, "missing")]) and name in reason
    (path / name).write_bytes(good)
    assert judged() == ("complete", "", [])


def test_a_file_that_the_manifest_does_not_name_is_reported_and_harmless(tmp_path: Path) -> None:
    (make_checkpoint(tmp_path, 50) / "notes.txt").write_text("mine")
    (info,) = list_checkpoints(tmp_path)
    (odd,) = [v for v in verify(info) if v.verdict != "ok"]
    assert info.complete and (odd.name, odd.verdict, odd.harmless) == (
        "notes.txt",
        "unexpected",
        True,
    )


def test_a_checkpoint_copied_under_another_step_is_damaged(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 50).rename(tmp_path / "checkpoints" / "step-00000060")
    (info,) = list_checkpoints(tmp_path)
    assert info.status == "damaged" and "step 50" in info.reason


def info_of(step: int, status: str, loss: float | None) -> CheckpointInfo:
    manifest = Manifest(step, 1, "", "", {}, metadata={"held_out_loss": loss})
    return CheckpointInfo(Path(f"step-{step:08d}"), step, status, "", 1, manifest)  # type: ignore[arg-type]


INFOS = st.lists(
    st.tuples(
        st.integers(0, 50),
        st.sampled_from(
            ["complete", "complete", "incomplete", "damaged", "abandoned", "later-format"]
        ),
        st.none() | st.floats(0, 9),
    ),
    unique_by=lambda item: item[0],
).map(lambda items: [info_of(*item) for item in sorted(items, key=lambda item: item[0])])


@given(INFOS, st.integers(1, 4), st.booleans())
def test_pruning_keeps_the_newest_and_the_best_and_touches_nothing_unfinished(
    infos: list[CheckpointInfo], keep: int, keep_best: bool
) -> None:
    gone = prunable(infos, keep, keep_best)
    complete = [info for info in infos if info.complete]
    left = [info for info in complete if info not in gone]
    assert left[-keep:] == complete[-keep:]
    assert all(info.status in ("complete", "abandoned") for info in gone)
    winner = best_checkpoint(complete)
    if keep_best and winner is not None:
        assert winner in left and all(
            winner.held_out_loss <= i.held_out_loss for i in complete if i.held_out_loss is not None
        )
    assert len(left) <= keep + keep_best
    assert left or not complete


def test_the_best_is_by_held_out_loss_and_the_newer_of_equals() -> None:
    infos = [info_of(1, "complete", 2.0), info_of(2, "complete", 1.0), info_of(3, "complete", 1.0)]
    assert best_checkpoint(infos) == infos[2]
    assert best_checkpoint([info_of(4, "damaged", 0.1), info_of(5, "complete", None)]) is None


def test_a_deletion_stopped_anywhere_leaves_an_incomplete_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink, removed = Path.unlink, 0

    def unlink_until(self: Path, missing_ok: bool = False) -> None:
        nonlocal removed
        if removed == allowed:
            raise OSError(5, "Input/output error")
        if self.exists():
            removed += 1
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink_until)
    for allowed in range(len(CONTENT) + 1):
        removed = 0
        path = make_checkpoint(tmp_path / str(allowed), 50)
        with pytest.raises(OSError, match="Input/output"):
            remove_checkpoint(path)
        (info,) = list_checkpoints(tmp_path / str(allowed))
        assert info.status == ("complete" if allowed == 0 else "incomplete")
    monkeypatch.undo()
    remove_checkpoint(path)
    remove_checkpoint(path)
    assert not path.exists()


def test_an_abandoned_checkpoint_is_out_of_use_until_its_manifest_is_renamed_back(
    tmp_path: Path,
) -> None:
    path = make_checkpoint(tmp_path, 50)
    set_aside_checkpoint(path)
    assert list_checkpoints(tmp_path)[0].status == "abandoned"
    (path / inventory.ABANDONED_NAME).rename(path / MANIFEST_NAME)
    assert list_checkpoints(tmp_path)[0].complete


def test_a_checkpoint_of_a_later_format_is_no_damage_and_stands_in_the_way_of_older_ones(
    tmp_path: Path,
) -> None:
    make_checkpoint(tmp_path, 10)
    make_checkpoint(tmp_path, 20, format_version=2)
    found = list_checkpoints(tmp_path)
    assert [info.status for info in found] == ["complete", "later-format"]
    assert [(v.name, v.verdict, v.harmless) for v in verify(found[1])] == [
        (MANIFEST_NAME, "later-format", False)
    ]
    with pytest.raises(UserError, match=r"step-00000020: manifest\.json: .*version 2 .*1"):
        newest_usable(found)
    make_checkpoint(tmp_path, 30)
    newest = newest_usable(list_checkpoints(tmp_path))
    assert newest is not None and newest.step == 30


def test_deleting_and_setting_aside_a_link_leave_what_it_leads_to(tmp_path: Path) -> None:
    theirs = make_checkpoint(tmp_path / "theirs", 50)
    (tmp_path / "ours" / "checkpoints").mkdir(parents=True)
    link = tmp_path / "ours" / "checkpoints" / "step-00000050"
    for take_away in (remove_checkpoint, set_aside_checkpoint):
        link.symlink_to(theirs)
        assert [info.status for info in list_checkpoints(tmp_path / "ours")] == ["complete"]
        take_away(link)
        assert list_checkpoints(tmp_path / "ours") == []
        assert [info.status for info in list_checkpoints(tmp_path / "theirs")] == ["complete"]


def test_a_deletion_takes_directories_inside_and_stops_at_links(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, 50)
    (path / "notes" / "deep").mkdir(parents=True)
    (tmp_path / "kept").mkdir()
    (path / "link").symlink_to(tmp_path / "kept")
    remove_checkpoint(path)
    assert not path.exists() and (tmp_path / "kept").is_dir()


def test_events_tell_which_steps_were_complete_and_still_should_be(tmp_path: Path) -> None:
    for event, step in [
        ("checkpoint", 1),
        ("checkpoint", 2),
        ("checkpoint_removed", 1),
        ("checkpoint", 3),
    ]:
        append_event(tmp_path, event, step=step)  # type: ignore[arg-type]
    append_event(tmp_path, "checkpoint_abandoned", step=3)
    append_event(tmp_path, "checkpoint_failed", step=4)
    assert completed_steps(tmp_path) == {2}
    append_event(tmp_path, "checkpoint", step=3)
    assert completed_steps(tmp_path) == {2, 3}
    assert completed_steps(tmp_path / "nowhere") == set()


def test_listing_needs_no_torch() -> None:
    code = (
        "import sys, drillyard.training.checkpoint.verification; sys.exit('torch' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": ":".join(sys.path)}
        ).returncode
        == 0
    )
