"""Directories that another user owns or may write to are not launched into, and what a run writes
obeys the umask."""

from __future__ import annotations

import grp
import os
import pwd
import stat
import subprocess
from argparse import Namespace
from pathlib import Path

import pytest

from drillyard.config.load import save_resolved
from drillyard.config.run import WorkloadRunConfig
from drillyard.launch.agent import host_check
from drillyard.launch.agent.job import Job, UsageError
from drillyard.launch.agent.output_pump import open_log as open_node_log
from drillyard.launch.hosts.host_facts import HostAnswer, judge
from drillyard.programs import Result
from drillyard.supervise.console_output import open_log as open_rank_log
from drillyard.telemetry.jsonlines import LineFile

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
    names = ("directory", "base", "nonce", "write_nonce", "port", "python", "image", "project")
    options = dict.fromkeys((*names, "meet"))
    host_check.check(Namespace(launch_directory=str(launch), runs=False, **options))
    answer = HostAnswer("h0", Result(("sh",), 0, capsys.readouterr().out, ""), "", 0.0, 0.0)
    return judge(
        [answer], Job("a", "c", "ssh", 1, 1, str(launch.parent), str(launch), [], port=20000)
    )


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
    monkeypatch.setattr(
        grp, "getgrgid", lambda gid: grp.struct_group(("lab", "x", gid, ["me", "you"]))
    )
    launch.parent.chmod(mode)

    (problem,) = problems(launch, capsys)

    command = next(part for part in problem.split("; ") if part.startswith("chmod")).partition(",")[
        0
    ]
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
    launch: Path,
    foreign: set[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    foreign.add(launch.parent.parent)
    launch.parent.parent.chmod(0o2775)
    assert problems(launch, capsys) == []

    user = pwd.getpwuid(os.getuid())
    monkeypatch.setattr(
        grp, "getgrgid", lambda gid: grp.struct_group((user.pw_name, "x", user.pw_gid, []))
    )
    launch.parent.chmod(0o775)
    assert problems(launch, capsys) == []


def test_owners_and_modes_that_a_mount_makes_up_are_no_reason_to_refuse(
    launch: Path,
    foreign: set[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
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
    options = Namespace(
        cluster="c", sent=str(sent), launch_directory=str(launch), script="job.sbatch", after=None
    )
    foreign.add(launch.parent)

    with pytest.raises(UsageError, match="belongs to"):
        submit.submit(options)

    assert not (tmp_path / "called").exists()
    assert (launch / "job.sbatch").read_text() == ""
    foreign.clear()
    assert submit.submit(options) == 0
    assert (launch / "job.sbatch").read_text() == "new"


@pytest.mark.parametrize("umask", [0o002, 0o022, 0o027, 0o077])
def test_what_a_run_writes_has_the_modes_that_the_users_umask_gives(
    tmp_path: Path, umask: int
) -> None:
    before = os.umask(umask)
    try:
        save_resolved(
            WorkloadRunConfig.model_validate({"name": "a", "workload": {"command": ["true"]}}),
            tmp_path / "run.yaml",
        )
        os.close(open_rank_log(tmp_path / "rank-0.log", "round 0")[0])
        open_node_log(tmp_path / "node-0.log").close()
        LineFile(tmp_path / "metrics.jsonl", print).write("{}")
    finally:
        os.umask(before)

    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(
        ("run.yaml", "rank-0.log", "node-0.log", "metrics.jsonl"), 0o666 & ~umask
    )
