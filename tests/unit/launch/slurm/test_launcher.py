"""Submitting to Slurm and stopping there: the shell is real, and a list of jobs plays the controller."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.unit.launch.requests import WORKLOAD, cluster, request

from drillyard.errors import UserError
from drillyard.launch.agent import index
from drillyard.launch.claiming import CLAIM_SECONDS
from drillyard.launch.plan import Plan
from drillyard.launch.programs import Programs, Result
from drillyard.launch.slurm.launcher import SlurmLauncher
from drillyard.launch.states import State


@dataclass
class Controller(Programs):
    """Slurm's commands. `before` has what happens just before a command of that name runs for the first time."""

    jobs: dict[str, str] = field(default_factory=dict)
    """The state of each job, by its id."""
    before: dict[str, Callable[[], object]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    agents_end: bool = True
    """Whether a job's agents end, and with them the job, when they hear a signal."""

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float | None = None) -> Result:
        words = [word for word in argv if word != "env" and not word.startswith("SLURM_")]
        name = words[0]
        self.calls.append(" ".join(words))
        happens = self.before.pop(name, None)
        if happens is not None:
            happens()
        if name == "squeue":
            rows = [f"{job}|{state}|None|1|2|N/A|2||main|/s|slurm://c/nccl" for job, state in self.jobs.items()]
            return Result(tuple(argv), 0, "".join(f"{row}\n" for row in rows), "")
        if name == "sbatch":
            self.jobs[str(len(self.jobs) + 1)] = "PENDING"
            return Result(tuple(argv), 0, f"{len(self.jobs)}\n", "")
        if name == "scancel":
            if "--signal=TERM" not in words or self.agents_end:
                self.jobs[words[-1]] = "CANCELLED"
            return Result(tuple(argv), 0, "", "")
        if words[-3:-1] == ["list", "--cluster"]:
            return Result(tuple(argv), 0, json.dumps(self.listed()), "")
        return super().run(argv, stdin=stdin, timeout=timeout)

    def listed(self) -> list[dict[str, object]]:
        """What the agent tells of the index; in this process, as a Python of its own takes longer than all the rest."""
        entries = [json.loads(path.read_text()) for path in sorted(index.index_directory().glob("c/*.json"))]
        return [{"entry": entry, **index.look(entry["launch_directory"])} for entry in entries]


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


def test_while_one_launch_submits_another_one_of_the_name_is_refused(controller: Controller, tmp_path: Path) -> None:
    (first, plan), (second, _) = made(controller, tmp_path), made(controller, tmp_path)
    refusals = []

    def another() -> None:
        with pytest.raises(UserError) as told:
            second.submit(plan, replace=True)
        refusals.append(str(told.value))

    controller.before["sbatch"] = another
    assert str(first.submit(plan)) == "slurm://c/nccl"
    (refused,) = refusals
    assert "is being launched by another drillyard (submission " in refused and "nothing was submitted" in refused
    assert list(controller.jobs) == ["1"]
    listed = [path for path, _ in first.artifacts("nccl")]
    assert "launch/job.sbatch" in listed and not [path for path in listed if "secret" in path or "claim" in path]
    # The claim was released: what is refused now is a second run beside one that goes on.
    with pytest.raises(UserError, match=r"is queued already \(job 1\)"):
        second.submit(plan)


def test_who_has_looked_before_another_launch_submitted_looks_again(controller: Controller, tmp_path: Path) -> None:
    (first, plan), (second, _) = made(controller, tmp_path), made(controller, tmp_path)
    secret = tmp_path / "runs" / "nccl" / "launch" / "secret"
    written = []

    def another() -> None:
        second.submit(plan)
        written.append(secret.read_text())

    # The first look reads the index and then the queue; then comes the claim.
    controller.before["squeue"] = lambda: controller.before.update(sh=another)
    with pytest.raises(
        UserError, match=r"being launched by another drillyard \(job 1, queued\); nothing was submitted"
    ):
        first.submit(plan, replace=True)
    assert controller.jobs == {"1": "PENDING"}
    assert [secret.read_text()] == written


def aged(directory: Path) -> None:
    """Let the claim on the run be as old as one that has ended."""
    claim = directory / "state" / "drillyard" / "c" / "nccl.claim"
    whose, since, client = claim.read_text().split(" ", 2)
    claim.write_text(f"{whose} {int(since) - CLAIM_SECONDS} {client}")


@pytest.mark.parametrize("how", ["submit", "resume"])
def test_a_launch_that_was_away_until_another_had_its_claim_does_not_go_on(
    controller: Controller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    (first, plan), (second, _) = made(controller, tmp_path), made(controller, tmp_path)
    secret = tmp_path / "runs" / "nccl" / "launch" / "secret"
    written = []

    def launch(launcher: SlurmLauncher) -> None:
        launcher.submit(plan) if how == "submit" else launcher.resume("nccl")

    if how == "resume":
        second.submit(plan)
        controller.jobs["1"] = "FAILED"
    before = len(controller.jobs)

    def away(handles: object) -> None:
        aged(tmp_path)
        launch(second)
        written.append(secret.read_text())

    monkeypatch.setattr(first, "_require_free", away)
    with pytest.raises(UserError, match=r"the claim of this one has ended\); nothing was submitted"):
        launch(first)
    assert len(controller.jobs) == before + 1 and [secret.read_text()] == written


@pytest.mark.parametrize("how", ["submit", "resume"])
def test_a_slow_launch_keeps_its_claim(
    controller: Controller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    (first, plan), (second, _) = made(controller, tmp_path), made(controller, tmp_path)
    if how == "resume":
        first.submit(plan)
        controller.jobs["1"] = "FAILED"
    refusals = []

    def another() -> None:
        with pytest.raises(UserError, match="is being launched by another") as told:
            second.submit(plan)
        refusals.append(told.value)

    monkeypatch.setattr(first, "_require_free", lambda handles: aged(tmp_path))
    controller.before["sbatch"] = another
    first.submit(plan) if how == "submit" else first.resume("nccl")
    assert len(refusals) == 1 and controller.jobs[max(controller.jobs)] == "PENDING"


def test_a_head_host_without_locks_submits_and_says_so(
    controller: Controller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flock = tmp_path / "bin" / "flock"
    flock.parent.mkdir()
    flock.write_text("#!/bin/sh\nexit 71\n")
    flock.chmod(0o755)
    monkeypatch.setenv("PATH", f"{flock.parent}:{os.environ['PATH']}")
    launcher, plan = made(controller, tmp_path)
    launcher.submit(plan)
    assert list(controller.jobs) == ["1"] and capsys.readouterr().err.count("drillyard: no lock on ") == 1


def test_of_two_who_resume_one_submits(controller: Controller, tmp_path: Path) -> None:
    (first, plan), (second, _) = made(controller, tmp_path), made(controller, tmp_path)
    first.submit(plan)
    controller.jobs["1"] = "FAILED"
    refusals = []

    def another() -> None:
        with pytest.raises(UserError, match="is being launched by another") as told:
            second.resume("nccl")
        refusals.append(told.value)

    controller.before["sbatch"] = another
    first.resume("nccl")
    assert len(refusals) == 1 and list(controller.jobs) == ["1", "2"]
    # Whoever has seen that the run is over before another one resumed it looks again.
    controller.jobs["2"] = "FAILED"
    between = {"sh": lambda: second.resume("nccl")}
    controller.before["squeue"] = lambda: controller.before.update(between)
    with pytest.raises(UserError, match=r"is being launched by another drillyard \(job 3, queued\)"):
        first.resume("nccl")
    assert list(controller.jobs) == ["1", "2", "3"]


def test_a_claim_is_released_where_slurm_refuses_the_job(controller: Controller, tmp_path: Path) -> None:
    launcher, plan = made(controller, tmp_path)

    def down() -> None:
        raise UserError("sbatch: error: invalid partition specified")

    controller.before["sbatch"] = down
    with pytest.raises(UserError, match="invalid partition"):
        launcher.submit(plan)
    assert (tmp_path / "state" / "drillyard" / "c" / "nccl.claim").read_text() == ""
    launcher.submit(plan)
    assert list(controller.jobs) == ["1"]


def test_a_sweep_claims_the_names_of_all_its_runs(controller: Controller, tmp_path: Path) -> None:
    setting = cluster(storage=f"{{directory: {tmp_path}}}")
    asked = [request(setting, WORKLOAD.replace("nccl", name)) for name in ("one", "two")]
    sweep, single = (SlurmLauncher(asked[0].cluster, controller) for _ in range(2))
    plans = sweep.plan_sweep(asked)
    refusals = []

    def another() -> None:
        with pytest.raises(UserError, match="is being launched by another") as told:
            single.submit(single.plan(asked[1]))
        refusals.append(told.value)

    controller.before["sbatch"] = another
    sweep.submit(plans[0])
    assert len(refusals) == 1 and len(controller.jobs) == 1


def running(controller: Controller, directory: Path, stop_seconds: float) -> SlurmLauncher:
    """The launcher of a run whose agents have met."""
    launcher, plan = made(controller, directory)
    launcher.submit(plan)
    launch = Path(plan.launch_directory)
    job = json.loads((launch / "job.json").read_text())
    (launch / "job.json").write_text(json.dumps(job | {"stop_seconds": stop_seconds}))
    (launch / "state.json").write_text(json.dumps({"submission": "1", "state": "running", "nodes": 2}))
    controller.jobs["1"] = "RUNNING"
    return launcher


@dataclass
class Interrupted(Controller):
    """One with whose commands something happens in between: just before the command of that number, from 0."""

    happens: Callable[[], object] = lambda: None
    at: int = -1

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float | None = None) -> Result:
        self.at -= 1
        if self.at == -1:
            self.happens()
        return super().run(argv, stdin=stdin, timeout=timeout)


@pytest.mark.parametrize("moment", range(4))
@pytest.mark.parametrize("before", ["nothing", "failed", "forgotten"])
def test_a_run_that_is_submitted_while_somebody_looks_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int, before: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    controller = Interrupted()
    (first, plan), (second, _) = made(controller, tmp_path), made(controller, tmp_path)
    if before != "nothing":
        first.submit(plan)
        controller.jobs["1"] = "FAILED"
        ended = {"submission": "1", "state": "failed", "reason": "exit code 3", "nodes": 2, "exit_code": 3}
        (tmp_path / "runs" / "nccl" / "launch" / "state.json").write_text(json.dumps(ended))
    if before == "forgotten":
        # Job ids go on counting.
        del controller.jobs["1"]
        controller.jobs["0"] = "COMPLETED"
    controller.happens = lambda: first.submit(plan)
    controller.at = moment
    seen = [status for status in second.runs() if status.native["job_id"] != "0"]
    assert {status.state for status in seen} <= {State.queued, State.failed}
    for status in seen:
        # It waits, or this is the end of the submission before.
        assert status.state is State.queued or (status.reason == "exit code 3" and status.native["job_id"] == "1")


def test_what_a_run_wrote_about_its_end_while_somebody_looked_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    controller = Interrupted()
    launcher = running(controller, tmp_path, 0.0)

    def ends() -> None:
        failure = {"reason": "rank 1: exit code 3", "rank": 1, "node": "n2", "exit_code": 3, "lines": ["ValueError: x"]}
        ended = {"submission": "1", "state": "failed", "reason": "rank 1: exit code 3", "nodes": 2, "exit_code": 1}
        path = tmp_path / "runs" / "nccl" / "launch" / "state.json"
        path.write_text(json.dumps(ended | {"failure": failure}))
        controller.jobs["1"] = "FAILED"

    controller.before["squeue"] = ends
    status = launcher.status("nccl")
    assert status.failure is not None and (status.failure.reason, status.failure.rank) == ("rank 1: exit code 3", 1)


def scancels(controller: Controller) -> list[str]:
    return [call for call in controller.calls if call.startswith("scancel")]


def test_a_cancelled_run_ends_by_itself_so_that_no_killwait_cuts_its_saving(
    controller: Controller, tmp_path: Path
) -> None:
    launcher = running(controller, tmp_path, 1000.0)
    done = launcher.cancel("nccl")
    assert (done.status.state, done.before) == ("cancelled", None)
    assert scancels(controller) == ["scancel --signal=TERM 1"]
    again = launcher.cancel("nccl")
    assert (again.status.state, again.before) == ("cancelled", "cancelled")


def test_a_run_that_does_not_end_in_its_time_is_ended_by_slurm(
    controller: Controller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drillyard.launch.slurm.launcher._AFTER_STOP_SECONDS", 0.0)
    controller.agents_end = False
    done = running(controller, tmp_path, 0.0).cancel("nccl")
    assert done.status.state == "cancelled"
    assert scancels(controller) == ["scancel --signal=TERM 1", "scancel 1"]


def test_a_job_that_waits_is_cancelled_at_once(controller: Controller, tmp_path: Path) -> None:
    launcher, plan = made(controller, tmp_path)
    launcher.submit(plan)
    assert launcher.cancel("nccl").status.state == "cancelled"
    assert scancels(controller) == ["scancel 1"]
