"""A run directory from somebody else, full of links: pruning and reporting change nothing outside
of it.

Fetching is in test_fetch.py, carrying in test_sync.py, what its config names in
test_received_config.py, exporting is in tests/integration/test_export_directories.py.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from tests.unit.checkpoint.made import make_checkpoint

from drillyard.cli import main as cli
from drillyard.telemetry import append_event


def snapshot(directory: Path) -> dict[str, str]:
    """Every file (mode and digest), link and directory below a directory."""
    found = {}
    for path in sorted(directory.rglob("*")):
        message = f"-> {os.readlink(path)}" if path.is_symlink() else ""
        message += hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path)] = f"{path.lstat().st_mode:o} {message}"
    return found


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """What is the user's own: among it an empty file and a checkpoint."""
    place = tmp_path / "outside"
    make_checkpoint(place / "own", 1)
    (place / "empty").touch()
    (place / "notes").write_text("mine")
    (place / "directory").mkdir()
    return place


@pytest.fixture
def run(tmp_path: Path, outside: Path) -> Path:
    place = tmp_path / "received"
    for step in (5, 6, 7):
        make_checkpoint(place, step)
    append_event(place, "run_started")
    return place


def call(*arguments: object) -> int:
    """The exit code of a command."""
    with pytest.raises(SystemExit) as left:
        cli.main([str(word) for word in arguments])
    return int(left.value.code or 0)


OWN_CHECKPOINT = "own/checkpoints/step-00000001"
LINKS = {
    "checkpoints/step-00000001": OWN_CHECKPOINT,
    "checkpoints/step-00000002": "directory",
    "checkpoints/step-00000003": "notes",
    "checkpoints/step-00000004": "missing",
    "checkpoints/step-00000004.partial": "directory",
    "checkpoints/.step-00000004.tmp": OWN_CHECKPOINT,
    "checkpoints/step-00000005/deeper": "directory",
    "checkpoints/step-00000005/notes": "notes",
    "checkpoints/step-00000006/manifest.json.new": "empty",
    "checkpoints/..name": "directory",
    "checkpoints/a name\nwith a line": "directory",
}


@pytest.mark.parametrize("name", LINKS)
def test_pruning_deletes_nothing_outside_of_the_run(run: Path, outside: Path, name: str) -> None:
    (run / name).symlink_to(outside / LINKS[name])
    before = snapshot(outside)

    call("checkpoint", "prune", run, "--keep", 1, "--left-overs")

    assert snapshot(outside) == before
    assert (run / "checkpoints" / "step-00000007").is_dir()
    assert not (run / "checkpoints" / "step-00000006").exists()


@pytest.mark.parametrize("name", ["logs", "logs/.holder.json", "launch"])
@pytest.mark.parametrize("target", ["empty", "notes", "directory", "missing"])
def test_commands_that_hold_a_run_directory_make_nothing_outside_of_it(
    run: Path, outside: Path, name: str, target: str
) -> None:
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).symlink_to(outside / target)
    before = snapshot(outside)

    call("checkpoint", "prune", run, "--keep", 1)

    assert snapshot(outside) == before


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
@pytest.mark.parametrize("target", ["empty", "notes", "missing", "directory/new"])
def test_a_report_is_not_written_through_a_link_that_came_with_the_run(
    run: Path, outside: Path, target: str, overwrite: list[str]
) -> None:
    (run / "report.html").symlink_to(outside / target)
    before = snapshot(outside)

    assert call("report", run, *overwrite) == 2

    assert snapshot(outside) == before
    (run / "report.html").unlink()
    assert call("report", run, *overwrite) == 0
