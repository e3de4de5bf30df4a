"""What `--sync` carries keeps its modes, leads nowhere else, and replaces no edited file without
keeping it."""

from __future__ import annotations

import os
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest
from tests.security.trees import snapshot
from tests.unit.launch.requests import WORKLOAD, cluster, planned, request

from drillyard.launch.slurm import launcher as slurm_launcher
from drillyard.launch.sync_archive import CARRIED_LIST
from drillyard.programs import Programs


@pytest.fixture
def project(tmp_path: Path, outside: Path) -> Path:
    place = tmp_path / "project"
    (place / "lib" / "deep").mkdir(parents=True)
    (place / "lib" / "a.py").write_text("a")
    (place / "run.sh").write_text("")
    (place / "run.sh").chmod(0o755)
    (place / ".env").write_text("TOKEN=1")
    (place / ".env").chmod(0o600)
    (place / "key").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n")
    (place / "-rf name with\nline").write_text("odd")
    (place / "lib" / "b.py").symlink_to("a.py")
    (place / "latest").symlink_to("lib")
    (place / "loop").symlink_to("loop")
    for name, target in LINKS_OUT.items():
        (place / name).symlink_to(target.format(outside=outside, project=place))
    os.mkfifo(place / "pipe")
    return place


LINKS_OUT = {
    "out": "{outside}/escaped.txt",
    "out-relative": "../outside/escaped.txt",
    "out-directory": "{outside}",
    "out-dangling": "../nothing",
    "absolute": "{project}/lib/a.py",
    "lib/deep/up": "../../lib/../../outside/escaped.txt",
    "by-another-link": "latest/../../outside/escaped.txt",
    "root": "/",
}


@pytest.mark.parametrize("git", [False, True])
def test_what_is_carried_keeps_its_modes_and_leads_nowhere_else(
    project: Path, tmp_path: Path, git: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    if git:
        subprocess.run(["git", "init", "-q", project], check=True)
        subprocess.run(["git", "-C", project, "add", "-A"], check=True)
    before = snapshot(tmp_path, tmp_path / "cluster")

    carry(project, tmp_path / "cluster")

    assert snapshot(tmp_path, tmp_path / "cluster") == before
    there = {}
    for path in sorted((tmp_path / "cluster").rglob("*")):
        name = str(path.relative_to(tmp_path / "cluster"))
        there[name] = (
            f"-> {os.readlink(path)}"
            if path.is_symlink()
            else f"{stat.S_IMODE(path.stat().st_mode):o}"
        )
    assert {
        name: found
        for name, found in there.items()
        if name not in ("lib", "lib/deep") and not name.startswith(CARRIED_LIST)
    } == {
        "-rf name with\nline": "644",
        ".env": "600",
        "key": "644",
        "latest": "-> lib",
        "lib/a.py": "644",
        "lib/b.py": "-> a.py",
        "loop": "-> loop",
        "run.sh": "755",
    }
    said = capsys.readouterr().err
    assert "'.env', 'key'" in said
    assert f"outside of {project}" in said


def carry(project: Path, there: Path) -> subprocess.CompletedProcess[str]:
    """What --sync does."""
    asked = request(
        cluster("slurm", slurm=f"{{directory: {there}}}"), WORKLOAD, sync=True, here=str(project)
    )
    (step,) = [each for each in planned(asked).steps if each.stage == "carry"]
    archive = slurm_launcher.archive_of_directory(project, Programs())
    done = subprocess.run(step.argv, input=archive, capture_output=True, check=True, umask=0o022)
    return subprocess.CompletedProcess(step.argv, 0, done.stdout.decode(), done.stderr.decode())


def test_files_that_were_edited_on_the_cluster_are_kept_before_they_are_replaced(
    project: Path, tmp_path: Path
) -> None:
    there = tmp_path / "cluster"
    assert carry(project, there).stderr == ""
    assert carry(project, there).stderr == ""
    edited = {"lib/a.py": "edited", "run.sh": "edited too", "-rf name with\nline": "odd"}
    for name in edited:
        (there / name).write_text(edited[name])
    (there / "user_file.py").write_text("made there")
    (project / "run.sh").unlink()

    said = carry(project, there).stderr

    assert f"2 files in {there}" in said
    (kept,) = there.glob(".drillyard-replaced-*.tar.gz")
    assert kept.name in said
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    with tarfile.open(kept) as archive:
        assert {name.removeprefix("./") for name in archive.getnames()} == {"lib/a.py", "run.sh"}
        assert archive.extractfile("./lib/a.py").read() == b"edited"
    assert (there / "lib" / "a.py").read_text() == "a"
    assert not (there / "run.sh").exists()
    assert (there / "user_file.py").read_text() == "made there"
    assert carry(project, there).stderr == ""


def test_what_another_directory_has_copied_stays(project: Path, tmp_path: Path) -> None:
    there, other = tmp_path / "cluster", tmp_path / "other"
    other.mkdir()
    (other / "theirs.py").write_text("theirs")
    (other / "later-deleted.py").write_text("theirs")
    carry(other, there)
    carry(project, there)
    (other / "later-deleted.py").unlink()

    carry(other, there)
    carry(project, there)

    assert (there / "theirs.py").read_text() == "theirs"
    assert (there / "lib/a.py").is_file()
    assert not (there / "later-deleted.py").exists()
