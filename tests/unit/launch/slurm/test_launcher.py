"""Submitting to Slurm and stopping there: a list of jobs plays the controller."""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pytest
from tests.unit.launch.requests import WORKLOAD, cluster, request

from drillyard.cli.main import main
from drillyard.errors import UserError
from drillyard.launch import run_changes
from drillyard.launch.agent import index, submit
from drillyard.launch.plan import Plan
from drillyard.launch.slurm.launcher import SlurmLauncher
from drillyard.programs import Programs, Result


@dataclass
class Controller(Programs):
    """Slurm's commands. `before` has what happens just before one of that name runs for the first
    time; `submit` is the program that submits. Programs of the agent run in this process, as a
    Python takes longer than all the rest."""

    jobs: dict[str, str] = field(default_factory=dict)
    """The state of each job, by its id."""
    before: dict[str, Callable[[], object]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    agents_end: bool = True
    """Whether a job's agents end, and with them the job, when they hear a signal."""
    others: set[str] = field(default_factory=set)
    """Jobs of other programs."""
    refusal: str = ""
    """What sbatch says instead of taking a job."""

    def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float | None = None
    ) -> Result:
        words = [word for word in argv if word != "env" and not word.startswith("SLURM_")]
        name = "submit" if "submit" in words else words[0]
        self.calls.append(" ".join(words))
        happens = self.before.pop(name, None)
        if happens is not None:
            happens()
        if name == "squeue":
            rows = [
                f"{job}|{state}|None|1|2|N/A|2||main|/s|"
                + ("(null)" if job in self.others else "slurm://c/nccl")
                for job, state in self.jobs.items()
            ]
            return Result(tuple(argv), 0, "".join(f"{row}\n" for row in rows), "")
        if name == "submit":
            return self._submit(argv, words[words.index("submit") + 1 :], stdin)
        if name == "scancel":
            if "--signal=TERM" not in words or self.agents_end:
                self.jobs[words[-1]] = "CANCELLED"
            return Result(tuple(argv), 0, "", "")
        if words[-3:-1] == ["list", "--cluster"]:
            return Result(tuple(argv), 0, json.dumps(self.listed()), "")
        return super().run(argv, stdin=stdin, timeout=timeout)

    def _submit(self, argv: Sequence[str], words: Sequence[str], stdin: bytes) -> Result:
        message = {
            name.removeprefix("--").replace("-", "_"): value
            for name, value in zip(*[iter(words)] * 2, strict=True)
        }
        out, errors = io.StringIO(), io.StringIO()
        with (
            tempfile.TemporaryDirectory() as sent,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(errors),
            mock.patch.object(submit.subprocess, "run", self._sbatch),
            tarfile.open(fileobj=io.BytesIO(stdin)) as archive,
        ):
            # Python 3.11.4 and later have filters; 3.14 filters unless asked otherwise.
            archive.extractall(
                sent, **({"filter": "tar"} if hasattr(tarfile, "tar_filter") else {})
            )
            code = submit.submit(argparse.Namespace(**{"after": None, "sent": sent} | message))
        return Result(tuple(argv), code, out.getvalue(), errors.getvalue())

    def _sbatch(self, argv: Sequence[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert argv[:2] == ["sbatch", "--parsable"]
        if self.refusal:
            print(self.refusal, file=sys.stderr)
            return subprocess.CompletedProcess(argv, 1, "")
        self.jobs[str(len(self.jobs) + 1)] = "PENDING"
        return subprocess.CompletedProcess(argv, 0, f"{len(self.jobs)}\n")

    def listed(self) -> list[dict[str, object]]:
        """What the agent tells of the index."""
        entries = [
            json.loads(path.read_text())
            for path in sorted(index.index_directory().glob("c/*.json"))
        ]
        return [{"entry": entry, **index.look(entry)} for entry in entries]


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Controller:
    """One whose user has an index of no runs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return Controller()


def made(controller: Controller, directory: Path) -> tuple[SlurmLauncher, Plan]:
    """A user's launcher and plan: each has its own, as two processes do."""
    asked = request(cluster(storage=f"{{directory: {directory}}}"), WORKLOAD)
    launcher = SlurmLauncher(asked.cluster, controller)
    return launcher, launcher.plan(asked)


def test_a_run_that_goes_on_is_not_submitted_again(controller: Controller, tmp_path: Path) -> None:
    launcher, plan = made(controller, tmp_path)
    assert str(run_changes.submit(launcher, plan)) == "slurm://c/nccl"
    listed = [path for path, _ in launcher.artifacts("nccl")]
    assert "launch/job.sbatch" in listed and not [
        path for path in listed if "secret" in path or "index" in path
    ]
    with pytest.raises(UserError, match=r"is queued already \(job 1\)"):
        run_changes.submit(launcher, plan)
    run_changes.submit(launcher, plan, replace=True)
    assert controller.jobs == {"1": "CANCELLED", "2": "PENDING"}
    (entry,) = controller.listed()
    assert entry["entry"].items() >= {"job_id": "2", "run": "nccl", "nodes": 2}.items()  # type: ignore[attr-defined]


@pytest.mark.parametrize("how", ["submit", "replace", "resume"])
def test_a_launch_before_which_another_one_submitted_changes_nothing(
    controller: Controller, tmp_path: Path, how: str
) -> None:
    (first, plan), (second, _) = made(controller, tmp_path), made(controller, tmp_path)
    secret = tmp_path / "runs" / "nccl" / "launch" / "secret"
    written = []

    def launch(launcher: SlurmLauncher) -> None:
        run_changes.resume(launcher, "nccl") if how == "resume" else run_changes.submit(
            launcher, plan, replace=how == "replace"
        )

    if how == "resume":
        run_changes.submit(second, plan)
        controller.jobs["1"] = "FAILED"
    before = len(controller.jobs)

    def another() -> None:
        launch(second)
        written.append(secret.read_text())

    controller.before["submit"] = another
    words = rf"being launched by another drillyard \(job {before + 1}\); nothing was submitted"
    with pytest.raises(UserError, match=words):
        launch(first)
    assert len(controller.jobs) == before + 1 and [secret.read_text()] == written


def test_a_head_host_without_locks_submits_and_says_so(
    controller: Controller,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        submit.fcntl, "flock", mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available"))
    )
    launcher, plan = made(controller, tmp_path)
    run_changes.submit(launcher, plan)
    assert (
        list(controller.jobs) == ["1"]
        and capsys.readouterr().err.count("drillyard: no lock on ") == 1
    )


def test_what_sbatch_refuses_is_reported_and_can_be_launched_again(
    controller: Controller, tmp_path: Path
) -> None:
    launcher, plan = made(controller, tmp_path)
    controller.refusal = "sbatch: error: invalid partition specified: x"
    with pytest.raises(
        UserError, match=r"(?s)invalid partition specified: x\n.*sinfo -s lists the partitions"
    ):
        run_changes.submit(launcher, plan)
    assert controller.jobs == {} and controller.listed() == []
    controller.refusal = ""
    run_changes.submit(launcher, plan)
    assert list(controller.jobs) == ["1"]


def test_a_sweep_is_refused_where_one_of_its_runs_was_submitted_meanwhile(
    controller: Controller, tmp_path: Path
) -> None:
    setting = cluster(storage=f"{{directory: {tmp_path}}}")
    asked = [request(setting, WORKLOAD.replace("nccl", name)) for name in ("one", "two")]
    sweep, single = (SlurmLauncher(asked[0].cluster, controller) for _ in range(2))
    plans = sweep.plan_sweep(asked)
    controller.before["submit"] = lambda: run_changes.submit(single, single.plan(asked[1]))
    with pytest.raises(UserError, match="is being launched by another"):
        run_changes.submit(sweep, plans[0])
    assert len(controller.jobs) == 1 and not (tmp_path / "runs" / "one").exists()
    controller.jobs["1"] = "FAILED"
    run_changes.submit(sweep, plans[0])
    assert sorted(entry["entry"]["job_id"] for entry in controller.listed()) == ["2_0", "2_1"]  # type: ignore[index]
    launches = [tmp_path / "runs" / name / "launch" for name in ("one", "two")]
    assert {(launch / "secret").read_text() for launch in launches} == {
        (launches[0] / "secret").read_text()
    }
    assert all((launch / "agent" / "__main__.py").exists() for launch in launches)
    assert not (launches[0] / "points").exists() and not (launches[0] / "index").exists()
    assert json.loads((launches[1] / "job.json").read_text())["run"] == "two"


def running(controller: Controller, directory: Path, stop_seconds: object) -> SlurmLauncher:
    """The launcher of a run whose agents have met."""
    launcher, plan = made(controller, directory)
    run_changes.submit(launcher, plan)
    launch = Path(plan.launch_directory)
    job = json.loads((launch / "job.json").read_text())
    (launch / "job.json").write_text(json.dumps(job | {"stop_seconds": stop_seconds}))
    (launch / "state.json").write_text(
        json.dumps({"submission": "1", "state": "running", "nodes": 2})
    )
    controller.jobs["1"] = "RUNNING"
    return launcher


def scancels(controller: Controller) -> list[str]:
    return [call for call in controller.calls if call.startswith("scancel")]


def test_a_cancelled_run_ends_by_itself_so_that_no_killwait_cuts_its_saving(
    controller: Controller, tmp_path: Path
) -> None:
    launcher = running(controller, tmp_path, 1000.0)
    done = run_changes.cancel(launcher, "nccl")
    assert (done.status.state, done.before) == ("cancelled", None)
    assert scancels(controller) == ["scancel --signal=TERM 1"]
    again = run_changes.cancel(launcher, "nccl")
    assert (again.status.state, again.before) == ("cancelled", "cancelled")


def test_a_run_that_does_not_end_in_its_time_is_ended_by_slurm(
    controller: Controller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drillyard.launch.slurm.launcher.AFTER_STOP_SECONDS", 0.0)
    controller.agents_end = False
    done = run_changes.cancel(running(controller, tmp_path, 0.0), "nccl")
    assert done.status.state == "cancelled"
    assert scancels(controller) == ["scancel --signal=TERM 1", "scancel 1"]


def test_a_run_whose_job_json_is_damaged_is_cancelled_too(
    controller: Controller, tmp_path: Path
) -> None:
    launcher = running(controller, tmp_path, "soon")
    assert run_changes.cancel(launcher, "nccl").status.state == "cancelled"


def test_a_job_that_waits_is_cancelled_at_once(controller: Controller, tmp_path: Path) -> None:
    launcher, plan = made(controller, tmp_path)
    run_changes.submit(launcher, plan)
    assert run_changes.cancel(launcher, "nccl").status.state == "cancelled"
    assert scancels(controller) == ["scancel 1"]


@pytest.mark.parametrize("replaces", [False, True])
def test_a_job_that_was_given_the_id_of_the_index_again_is_left_alone(
    controller: Controller, tmp_path: Path, replaces: bool
) -> None:
    launcher, plan = made(controller, tmp_path)
    run_changes.submit(launcher, plan)
    # The controller was reset, and counts from 1.
    controller.others.add("1")
    controller.jobs["1"] = "RUNNING"
    assert launcher.status("nccl").state == "failed"
    if replaces:
        run_changes.submit(launcher, plan, replace=True)
    else:
        run_changes.cancel(launcher, "nccl")
    assert scancels(controller) == [] and controller.jobs["1"] == "RUNNING"


@pytest.mark.parametrize("command", ["cancel", "resume"])
def test_a_bare_name_means_the_run_of_this_directory_and_a_handle_every_run(
    controller: Controller,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "a")
    launcher, plan = made(controller, tmp_path)
    run_changes.submit(launcher, plan)
    monkeypatch.chdir(tmp_path / "b")
    for replaces in (False, True):
        with pytest.raises(UserError, match=f"launched from {tmp_path}/a"):
            run_changes.submit(launcher, plan, replace=replaces)
    if command == "resume":
        controller.jobs["1"] = "FAILED"
    before = dict(controller.jobs)
    monkeypatch.setattr("drillyard.launch.cluster_registry.launcher_for", lambda _: launcher)
    Path("c.yaml").write_text(cluster(storage=f"{{directory: {tmp_path}}}").strip())

    def exit_code(words: str) -> object:
        with pytest.raises(SystemExit) as ended:
            main(words.split())
        return ended.value.code

    assert exit_code(f"runs {command} nccl --cluster c.yaml") == 2
    assert controller.jobs == before
    said = capsys.readouterr().err
    advised = f"runs {command} slurm://c/nccl --cluster {Path('c.yaml').absolute()}"
    assert f"launched from {tmp_path}/a" in said and f"drillyard {advised}" in said
    assert exit_code(advised) == 0 and controller.jobs != before
