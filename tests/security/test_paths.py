"""Hostile names, links and modes: files that are fetched, carried and launched stay within their directories.

Export and prune are in tests/integration/test_export_directories.py and tests/unit/training/checkpoint.
"""

from __future__ import annotations

import grp
import hashlib
import os
import pwd
import stat
import subprocess
import sys
import tarfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.unit.launch.requests import WORKLOAD, cluster, request

from drillyard.config import save_resolved
from drillyard.config.workload import WorkloadRunConfig
from drillyard.errors import UserError
from drillyard.launch.agent import facts
from drillyard.launch.agent.output import open_log as open_node_log
from drillyard.launch.agent.running import Mistake
from drillyard.launch.hosts.checks import Answer, Wanted, judge
from drillyard.launch.programs import Host, Programs, Result
from drillyard.launch.remote import LocalFiles, Piece, RemoteFiles, Wish, artifacts_of, copy_files, read_file
from drillyard.launch.slurm import launcher as slurm_launcher
from drillyard.launch.slurm.plan import plan_of
from drillyard.supervise.output import open_log as open_rank_log
from drillyard.telemetry.jsonlines import LineFile

HOSTILE_NAMES = [
    "../escaped.txt",
    "../../escaped.txt",
    "..",
    ".",
    "",
    "/",
    "{outside}/escaped.txt",
    "{outside}",
    "//{outside}/escaped.txt",
    "final/../../escaped.txt",
    "final/..",
    "final/../..",
    "./../escaped.txt",
    "a//../../escaped.txt",
    "logs//rank-0.log",
    "logs/./rank-0.log",
    "logs/",
    "linked/escaped.txt",
    "linked/deeper/escaped.txt",
    "file/below",
    "name\nwith a line",
    "name\x1b]0;title\x07",
    "name\x9b2J",
    "name\u202etxt.exe",
    "d/" * 150 + "name",
    "name\x00",
    "\x7f",
    "no text \ud800",
]


def snapshot(directory: Path, without: Path) -> dict[str, str]:
    """Every file (mode and digest), link and directory below `directory`, but those below `without`."""
    found = {}
    for parent, directories, files in os.walk(directory):
        directories[:] = [name for name in directories if Path(parent, name) != without]
        for path in (Path(parent, name) for name in [*directories, *files]):
            mode = f"{path.lstat().st_mode:o}"
            if path.is_symlink():
                found[str(path)] = f"{mode} -> {os.readlink(path)}"
            else:
                found[str(path)] = f"{mode} {hashlib.sha256(path.read_bytes()).hexdigest()}" if path.is_file() else mode
    return found


class HostileHost(LocalFiles):
    """Answers every request for a file."""

    def read(self, wishes: Sequence[Wish]) -> list[Piece | None]:
        return [Piece(b"evil", False, b"evil" if wish.offset == 0 else b"") for wish in wishes]


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    place = tmp_path / "outside"
    (place / "deeper").mkdir(parents=True)
    (place / "escaped.txt").write_text("mine")
    return place


@pytest.fixture
def destination(tmp_path: Path, outside: Path) -> Path:
    place = tmp_path / "fetched" / "run"
    place.mkdir(parents=True)
    (place / "linked").symlink_to(outside)
    (place / "file").write_text("")
    return place


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_fetched_name_never_leaves_the_destination(
    tmp_path: Path, outside: Path, destination: Path, name: str
) -> None:
    before = snapshot(tmp_path, destination)

    with pytest.raises(UserError):
        copy_files(HostileHost(), "/run", ["summary.json", name.format(outside=outside)], str(destination))

    assert snapshot(tmp_path, destination) == before
    assert sorted(path.name for path in destination.iterdir() if path.name != "summary.json") == ["file", "linked"]


def test_a_link_in_the_place_of_a_fetched_file_is_replaced_and_not_followed(outside: Path, destination: Path) -> None:
    (destination / "summary.json").symlink_to(outside / "escaped.txt")

    copy_files(HostileHost(), "/run", ["summary.json"], str(destination))

    assert (outside / "escaped.txt").read_text() == "mine"
    assert (destination / "summary.json").read_text() == "evil"
    assert not (destination / "summary.json").is_symlink()


@pytest.fixture
def run(tmp_path: Path, outside: Path) -> Path:
    """A run directory in which somebody has left links and a pipe."""
    place = tmp_path / "runs" / "a"
    (place / "launch").mkdir(parents=True)
    (place / "summary.json").write_text("{}")
    (place / "secret.txt").symlink_to(outside / "escaped.txt")
    (place / "logs").symlink_to(outside)
    (place / "launch" / "node-0.log").symlink_to(outside / "escaped.txt")
    os.mkfifo(place / "pipe")
    return place


def remote() -> RemoteFiles:
    class ThisMachine(Programs):
        def stream(self, argv: Sequence[str], *, asked: bool = False) -> Any:
            return super().stream(["sh", "-c", argv[-1]], asked=asked)

    return RemoteFiles(Host("login"), ThisMachine(), python=sys.executable)


@pytest.mark.parametrize("files", [LocalFiles(), remote()], ids=["here", "remote"])
def test_links_and_pipes_of_a_run_directory_are_neither_listed_nor_read(
    files: LocalFiles | RemoteFiles, run: Path, tmp_path: Path
) -> None:
    assert artifacts_of(files, str(run)) == [("summary.json", 2)]
    assert files.find([f"{run}/launch/node-*.log", f"{run}/*"]) == [(f"{run}/summary.json", 2)]
    assert read_file(files, f"{run}/secret.txt", 0) == b""
    assert read_file(files, f"{run}/pipe", 0) == b""
    for name in ("secret.txt", "logs/escaped.txt", "launch/node-0.log", "pipe"):
        with pytest.raises(UserError, match="is a link"):
            copy_files(files, str(run), [name], str(tmp_path / "fetched"))
    copy_files(files, str(run), ["summary.json"], str(tmp_path / "fetched"))
    fetched = [path.name for path in (tmp_path / "fetched").rglob("*") if not path.is_dir()]
    assert fetched == ["summary.json"]
    files.close()


def test_a_run_directory_that_is_itself_reached_by_a_link_is_read(run: Path, tmp_path: Path) -> None:
    (tmp_path / "storage").symlink_to(tmp_path / "runs")

    copy_files(LocalFiles(), str(tmp_path / "storage" / "a"), ["summary.json"], str(tmp_path / "fetched"))

    assert (tmp_path / "fetched" / "summary.json").read_text() == "{}"


ANSWERS = {
    "more bytes than asked for": '{"head": "", "anew": false, "bytes": 5000000}\n' + 5_000_000 * "x",
    "fewer than none": '{"head": "", "anew": false, "bytes": -1}\n',
    "no number of bytes": '{"head": "", "anew": false, "bytes": "all"}\n',
    "no bytes": "{}\n",
    "no head": '{"head": 1, "anew": false, "bytes": 0}\n',
    "a number": "1\n",
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
def test_an_answer_that_is_none_is_an_error(answer: str, tmp_path: Path) -> None:
    (tmp_path / "answer").write_text(answer)

    class Answering(Programs):
        def stream(self, argv: Sequence[str], *, asked: bool = False) -> Any:
            return super().stream(
                ["sh", "-c", 'cat "$0"; timeout 2 cat >/dev/null', str(tmp_path / "answer")], asked=asked
            )

    with pytest.raises(UserError, match="login: its files cannot be read"):
        read_file(RemoteFiles(Host("login"), Answering()), "/run/a", 0)


OTHER = 65534


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """Paths that are another user's. Only root could chown them."""
    others: set[Path] = set()
    lstat = Path.lstat

    def seen(path: Path) -> os.stat_result:
        status = lstat(path)
        return os.stat_result((*status[:4], OTHER, *status[5:])) if path in others else status

    monkeypatch.setattr(Path, "lstat", seen)
    return others


def problems(launch: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What is refused when a run is launched into a directory on a host."""
    options = dict.fromkeys(("directory", "nonce", "write_nonce", "port", "python", "image"))
    facts.check(Namespace(launch_directory=str(launch), runs=False, **options))
    answer = Answer("h0", Result(("sh",), 0, capsys.readouterr().out, ""), "", 0.0, 0.0)
    return judge([answer], Wanted("a", str(launch), 20000, "0"))


@pytest.fixture
def launch(tmp_path: Path) -> Path:
    place = tmp_path / "storage" / "runs" / "a" / "launch"
    (place / "agent").mkdir(parents=True)
    (place / "agent" / "leader.py").write_text("")
    (place / "job.sbatch").write_text("")
    return place


@pytest.mark.parametrize(
    "theirs", ["a", "a/launch", "a/launch/agent", "a/launch/agent/leader.py", "a/launch/job.sbatch"]
)
def test_what_another_user_owns_is_not_launched_into(
    launch: Path, foreign: set[Path], capsys: pytest.CaptureFixture[str], theirs: str
) -> None:
    assert problems(launch, capsys) == []

    foreign.add(launch.parent.parent / theirs)

    (problem,) = problems(launch, capsys)
    assert f"{launch.parent.parent / theirs}: belongs to" in problem
    assert str(OTHER) in problem


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o2775, 0o757])
def test_a_run_directory_that_others_may_write_to_is_refused_until_the_advice_is_followed(
    launch: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mode: int
) -> None:
    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group(("lab", "x", gid, ["me", "you"])))
    launch.parent.chmod(mode)

    (problem,) = problems(launch, capsys)

    command = next(part for part in problem.split("; ") if part.startswith("chmod")).partition(",")[0]
    subprocess.run(command.split(), check=True)
    assert problems(launch, capsys) == []


@pytest.mark.parametrize("above", ["storage", "storage/runs"])
def test_a_directory_in_which_every_user_may_rename_is_refused_until_it_is_sticky(
    launch: Path, tmp_path: Path, foreign: set[Path], capsys: pytest.CaptureFixture[str], above: str
) -> None:
    (tmp_path / above).chmod(0o777)

    (problem,) = problems(launch, capsys)

    assert f"chmod +t {tmp_path / above} " in problem
    subprocess.run(["chmod", "+t", tmp_path / above], check=True)
    assert problems(launch, capsys) == []
    # Now another user can still have been first there.
    below = launch.parent if above == "storage/runs" else launch.parent.parent
    foreign.add(below)
    (problem,) = problems(launch, capsys)
    assert f"{below}: belongs to" in problem


def test_a_run_directory_that_is_a_link_of_another_user_is_refused(
    launch: Path, tmp_path: Path, foreign: set[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    link = tmp_path / "storage" / "runs" / "b"
    link.symlink_to("a")
    assert problems(link / "launch", capsys) == []

    foreign.add(link)

    (problem,) = problems(link / "launch", capsys)
    assert f"{link}: belongs to" in problem


def test_a_project_of_a_group_and_a_users_own_group_are_no_reason_to_refuse(
    launch: Path, foreign: set[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign.add(launch.parent.parent)
    launch.parent.parent.chmod(0o2775)
    assert problems(launch, capsys) == []

    user = pwd.getpwuid(os.getuid())
    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group((user.pw_name, "x", user.pw_gid, [])))
    launch.parent.chmod(0o775)
    assert problems(launch, capsys) == []


def test_owners_and_modes_that_a_mount_makes_up_are_no_reason_to_refuse(
    launch: Path, foreign: set[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """NFS with root_squash, mounts of buckets."""
    foreign |= {launch.parent, launch, launch / "agent"}
    launch.parent.chmod(0o777)
    fstat = os.fstat

    def seen(descriptor: int) -> os.stat_result:
        status = fstat(descriptor)
        return os.stat_result((status[0] | 0o777, *status[1:4], OTHER, *status[5:]))

    assert len(problems(launch, capsys)) == 1
    monkeypatch.setattr(os, "fstat", seen)
    assert problems(launch, capsys) == []
    assert [path.name for path in launch.parent.iterdir()] == ["launch"]


def test_slurm_submits_nothing_from_a_directory_of_another_user(
    launch: Path, tmp_path: Path, foreign: set[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from drillyard.launch.agent import submit

    sent = tmp_path / "sent"
    sent.mkdir()
    for name in ("job.json", "job.sbatch"):
        (sent / name).write_text("new")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text(f"#!/bin/sh\necho $* >{tmp_path}/called; echo 12\n")
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    options = Namespace(cluster="c", sent=str(sent), launch_directory=str(launch), script="job.sbatch", after=None)
    foreign.add(launch.parent)

    with pytest.raises(Mistake, match="belongs to"):
        submit.submit(options)

    assert not (tmp_path / "called").exists()
    assert (launch / "job.sbatch").read_text() == ""
    foreign.clear()
    assert submit.submit(options) == 0
    assert (launch / "job.sbatch").read_text() == "new"


@pytest.mark.parametrize("umask", [0o002, 0o022, 0o027, 0o077])
def test_what_a_run_writes_has_the_modes_that_the_users_umask_gives(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        save_resolved(
            WorkloadRunConfig.model_validate({"name": "a", "workload": {"command": ["true"]}}), tmp_path / "run.yaml"
        )
        os.close(open_rank_log(tmp_path / "rank-0.log", "round 0")[0])
        open_node_log(tmp_path / "node-0.log").close()
        LineFile(tmp_path / "metrics.jsonl").write("{}")
    finally:
        os.umask(before)

    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(("run.yaml", "rank-0.log", "node-0.log", "metrics.jsonl"), 0o666 & ~umask)


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
        there[name] = f"-> {os.readlink(path)}" if path.is_symlink() else f"{stat.S_IMODE(path.stat().st_mode):o}"
    assert {name: told for name, told in there.items() if name not in ("lib", "lib/deep", ".drillyard-carried")} == {
        "-rf name with\nline": "644",
        ".env": "600",
        "key": "644",
        "latest": "-> lib",
        "lib/a.py": "644",
        "lib/b.py": "-> a.py",
        "loop": "-> loop",
        "run.sh": "755",
    }
    told = capsys.readouterr().err
    assert "'.env', 'key'" in told
    assert "lead out of" in told


def carry(project: Path, there: Path) -> subprocess.CompletedProcess[str]:
    """What --sync does."""
    asked = request(cluster("slurm", slurm=f"{{directory: {there}}}"), WORKLOAD, sync=True)
    (step,) = [each for each in plan_of(asked).steps if each.stage == "carry"]
    archive = slurm_launcher.archive_of_directory(project, Programs())
    done = subprocess.run(step.argv, input=archive, capture_output=True, check=True, umask=0o022)
    return subprocess.CompletedProcess(step.argv, 0, done.stdout.decode(), done.stderr.decode())


def test_files_that_were_edited_on_the_cluster_are_kept_before_they_are_replaced(project: Path, tmp_path: Path) -> None:
    there = tmp_path / "cluster"
    assert carry(project, there).stderr == ""
    assert carry(project, there).stderr == ""
    edited = {"lib/a.py": "edited", "run.sh": "edited too", "-rf name with\nline": "odd"}
    for name in edited:
        (there / name).write_text(edited[name])
    (there / "own.py").write_text("made there")
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
    assert (there / "own.py").read_text() == "made there"
    assert carry(project, there).stderr == ""
