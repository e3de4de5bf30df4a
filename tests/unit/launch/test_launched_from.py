"""Two projects of one user whose runs have one name: which commands take that name for the run of
the other."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.launch.hosts.test_launcher_submit import RUNNING, Hosts, failed, known, made
from tests.unit.launch.requests import WORKLOAD, cluster, request
from tests.unit.launch.slurm.test_launcher import Controller

from drillyard.errors import UserError
from drillyard.launch import run_changes
from drillyard.launch.cluster_registry import Clusters, clusters_to_search
from drillyard.launch.launched_from import (
    LaunchedFrom,
    NameGiven,
    record_of,
    recorded,
    this_directory,
)
from drillyard.launch.launcher import Launcher, launcher_for
from drillyard.launch.plan import Plan
from drillyard.launch.slurm.launcher import SlurmLauncher

RECORD = "launched-from.json"
HANDLE = "slurm://c/nccl"


@pytest.fixture
def projects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Two directories of a user who has launched nothing."""
    for name in ("STATE", "CONFIG", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    for name in ("a/below", "b"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path / "a", tmp_path / "b"


def submitted(storage: Path) -> tuple[Controller, SlurmLauncher, Plan]:
    """A Slurm cluster with a run that was launched from the working directory."""
    controller = Controller()
    asked = request(cluster(storage=f"{{directory: {storage}}}"), WORKLOAD)
    launcher = SlurmLauncher(asked.cluster, controller)
    plan = launcher.plan(asked)
    run_changes.submit(launcher, plan)
    return controller, launcher, plan


def given() -> NameGiven:
    return NameGiven(this_directory())


@pytest.mark.parametrize(
    ("here", "is_covered"),
    [
        (LaunchedFrom("/p", "one", 7), True),
        (LaunchedFrom("/p/below", "one", 8), True),
        (LaunchedFrom("/pp", "one", 7), False),
        (LaunchedFrom("/", "one", 1), False),
        (LaunchedFrom("", "one", 7), False),
    ],
)
def test_a_directory_covers_itself_and_what_is_below(here: LaunchedFrom, is_covered: bool) -> None:
    assert LaunchedFrom("/p", "one", 7).covers(here) is is_covered


def test_on_another_host_the_same_path_counts_where_it_is_the_same_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here = this_directory()
    assert here.inode == os.stat(tmp_path).st_ino
    shared, other = (
        replace(here, host="login-2", inode=inode) for inode in (here.inode, here.inode + 1)
    )
    assert shared.covers(here) and not other.covers(here)
    # A project that was cloned again on the same host.
    assert replace(here, inode=here.inode + 1).covers(here)
    assert "login-2" in other.seen_from(here) and "login-2" not in here.seen_from(here)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"directory": 1, "host": "h", "inode": 1}'])
def test_a_damaged_record_is_that_of_no_directory(text: str) -> None:
    found = recorded(text)
    assert found is not None and not found.covers(this_directory())
    assert recorded("") is None
    assert recorded(record_of(this_directory()).content) == this_directory()


def test_a_directory_whose_name_is_no_text_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / os.fsdecode(b"caf\xe9")
    odd.mkdir()
    monkeypatch.chdir(odd)
    found = recorded(record_of(this_directory()).content.encode())
    assert found is not None and found.covers(this_directory())
    # The directory goes away: no command is given there.
    odd.rmdir()
    assert not found.covers(this_directory())


def test_a_plan_does_not_depend_on_the_directory(
    projects: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = []
    for project in projects:
        monkeypatch.chdir(project)
        asked = request(cluster(storage="{directory: /mnt}"), WORKLOAD)
        plans.append(launcher_for(asked.cluster).plan(asked))
    assert plans[0] == plans[1]
    assert RECORD not in {file.path for file in plans[0].files}


CHANGES: list[tuple[str, Callable[[Launcher[Any], NameGiven | None], object]]] = [
    ("cancel", lambda launcher, by: run_changes.cancel(launcher, "nccl", given=by)),
    ("resume", lambda launcher, by: run_changes.resume(launcher, "nccl", given=by)),
]


@pytest.mark.parametrize(("command", "change"), CHANGES)
def test_a_bare_name_changes_no_run_of_another_directory(
    projects: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: str,
    change: Callable[[Launcher[Any], NameGiven | None], object],
) -> None:
    here, elsewhere = projects
    monkeypatch.chdir(here)
    controller, launcher, _ = submitted(tmp_path)
    before = dict(controller.jobs)
    if command == "resume":
        before["1"] = controller.jobs["1"] = "FAILED"
    monkeypatch.chdir(elsewhere)
    with pytest.raises(UserError) as refused:
        change(launcher, given())
    assert str(here) in str(refused.value)
    assert str(refused.value).endswith(f"drillyard runs {command} {HANDLE}")
    assert controller.jobs == before
    # The same with the handle, as it advises.
    change(launcher, None)
    assert controller.jobs != before


@pytest.mark.parametrize("replaces", [False, True])
def test_a_launch_of_the_same_name_elsewhere_is_refused_with_the_directory(
    projects: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    replaces: bool,
) -> None:
    here, elsewhere = projects
    monkeypatch.chdir(here)
    controller, launcher, plan = submitted(tmp_path)
    monkeypatch.chdir(elsewhere)
    with pytest.raises(UserError) as refused:
        run_changes.submit(launcher, plan, replace=replaces)
    said = str(refused.value)
    assert f"launched from {here}" in said and "--replace" not in said
    assert controller.jobs == {"1": "PENDING"}
    # The remedy that it names, and the launch after it.
    remedy = re.search(r"drillyard runs cancel (\S+)", said)
    assert remedy is not None
    (found,) = Clusters([launcher.cluster]).find([remedy[1]])
    assert found.given is None and run_changes.cancel(launcher, found.handle.run, given=found.given)
    run_changes.submit(launcher, plan, replace=replaces)
    assert controller.jobs == {"1": "CANCELLED", "2": "PENDING"}
    assert f"launched from {here}" in capsys.readouterr().err
    # The name belongs to this directory now.
    assert run_changes.cancel(launcher, "nccl", given=given()).before is None
    monkeypatch.chdir(here)
    with pytest.raises(UserError, match=re.escape(str(elsewhere))):
        run_changes.cancel(launcher, "nccl", given=given())


def test_below_the_directory_it_is_the_same_project(
    projects: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(projects[0])
    controller, launcher, plan = submitted(tmp_path)
    monkeypatch.chdir("below")
    with pytest.raises(UserError, match="--replace"):
        run_changes.submit(launcher, plan)
    run_changes.submit(launcher, plan, replace=True)
    assert controller.jobs == {"1": "CANCELLED", "2": "PENDING"}
    assert run_changes.cancel(launcher, "nccl", given=given()).before is None
    assert capsys.readouterr().err == ""
    # It was launched from below last, so above it its bare name is not enough.
    monkeypatch.chdir("..")
    with pytest.raises(UserError, match="below"):
        run_changes.cancel(launcher, "nccl", given=given())


def test_a_run_without_a_record_is_changed_from_anywhere_and_one_with_a_damaged_record_is_not(
    projects: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(projects[0])
    controller, launcher, plan = submitted(tmp_path)
    record = Path(plan.launch_directory, RECORD)
    record.write_text("half of i")
    with pytest.raises(UserError, match=RECORD):
        run_changes.cancel(launcher, "nccl", given=given())
    record.unlink()
    monkeypatch.chdir(projects[1])
    run_changes.submit(launcher, plan, replace=True)
    assert controller.jobs == {"1": "CANCELLED", "2": "PENDING"}


def test_every_run_of_a_sweep_has_the_record(
    projects: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(projects[0])
    setting = cluster(storage=f"{{directory: {tmp_path}}}")
    asked = [request(setting, WORKLOAD.replace("nccl", name)) for name in ("one", "two")]
    launcher = SlurmLauncher(asked[0].cluster, Controller())
    plans = launcher.plan_sweep(asked)
    run_changes.submit(launcher, plans[0])
    for plan in plans:
        found = recorded(Path(plan.launch_directory, RECORD).read_text())
        assert found is not None and found.directory == str(projects[0])


@pytest.mark.parametrize("user", [os.getuid(), os.getuid() + 1])
def test_without_the_head_host_a_run_of_another_directory_or_user_is_left_alone(
    projects: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, user: int
) -> None:
    monkeypatch.chdir(projects[0])
    origin = this_directory().as_json()
    there = {"run": "nccl", "cluster": "many", "launch_directory": "/p/runs/nccl/launch"}
    there |= {"user": user, "launched_from": origin}  # type: ignore[dict-item]
    hosts = Hosts(known=known(RUNNING))
    hosts.answers["check", "n1"] = {"runs": [there], "user": os.getuid()}
    hosts.says["list", "n0"] = failed("ssh: connect to host n0: timed out", 255)
    launcher, _ = made(hosts)
    monkeypatch.chdir(projects[1])
    with pytest.raises(UserError):
        run_changes.cancel(launcher, "nccl", given=given())
    assert "stop" not in hosts.verbs()
    with pytest.raises(UserError, match="repeat the command"):
        run_changes.cancel(launcher, "nccl")
    assert ("stop" in hosts.verbs()) is (user == os.getuid())


def test_a_handle_is_meant_everywhere_and_a_name_here(
    projects: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, _ = projects
    monkeypatch.chdir(here)
    Path("my cluster.yaml").write_text(cluster(storage="{directory: /mnt}").strip())
    by_name, by_handle = clusters_to_search(Path("my cluster.yaml")).find(["nccl", HANDLE])
    assert by_handle.given is None
    assert by_name.given == NameGiven(
        this_directory(), f" --cluster {shlex.quote(str(Path('my cluster.yaml').absolute()))}"
    )
