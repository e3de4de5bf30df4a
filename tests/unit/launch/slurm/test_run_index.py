"""Looks at the runs of a Slurm cluster while these are submitted, noted and ended."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from drillyard.launch import file_server
from drillyard.launch.agent import index
from drillyard.launch.run_status import RunStatus, State
from drillyard.launch.slurm.commands import Slurm
from drillyard.programs import Host, Programs, Result
from drillyard.supervise.process_identity import running_process


@dataclass
class Cluster(Programs):
    """A queue and an index with one run. `happens` has what takes place just before the command of
    that number."""

    directory: Path
    jobs: dict[str, str] = field(default_factory=dict)
    """The state of each job, by its id."""
    others: list[str] = field(default_factory=list)
    """Lines of squeue about jobs that are not ours."""
    entry: dict[str, Any] | None = None
    happens: dict[int, Callable[[], object]] = field(default_factory=dict)
    commands: int = 0

    def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float | None = None
    ) -> Result:
        self.happens.get(self.commands, lambda: None)()
        self.commands += 1
        said = ""
        if "squeue" in argv:
            rows = [
                f"{job}|{state}|None|1|2|N/A|2||main|{self.launch}/job.sbatch|slurm://c/r"
                for job, state in self.jobs.items()
            ] + self.others
            said = "".join(f"{row}\n" for row in rows)
        elif "list" in argv:
            listed = [] if self.entry is None else [{"entry": self.entry, **index.look(self.entry)}]
            said = json.dumps(listed)
        return Result(tuple(argv), 0, said, "")

    @property
    def launch(self) -> Path:
        return self.directory / "launch"

    def submit(self, job_id: str) -> None:
        """sbatch; the note is made later."""
        self.jobs[job_id] = "PENDING"

    def note(self, job_id: str) -> None:
        self.entry = {
            "run": "r",
            "cluster": "c",
            "platform": "slurm",
            "launch_directory": str(self.launch),
        }
        self.entry |= {
            "run_directory": str(self.directory),
            "nodes": 2,
            "job_id": job_id,
            "submitted_at": 5.0,
        }

    def write_state(self, job_id: str, state: str, **more: Any) -> None:
        self.launch.mkdir(exist_ok=True)
        message = {"submission": job_id, "state": state, "nodes": 2, "since": 1.0, **more}
        (self.launch / "state.json").write_text(json.dumps(message))

    def look(self) -> list[RunStatus]:
        return [known.status for known in Slurm("c", Host(), self).runs()]


@pytest.mark.parametrize("noted_at", range(5))
@pytest.mark.parametrize("submitted_at", range(4))
@pytest.mark.parametrize("before", ["nothing", "failed", "forgotten"])
def test_a_run_that_is_submitted_while_somebody_looks_has_not_failed(
    tmp_path: Path, before: str, submitted_at: int, noted_at: int
) -> None:
    cluster = Cluster(tmp_path)
    if before != "nothing":
        cluster.note("1")
        cluster.write_state("1", "failed", reason="exit code 3", exit_code=3)
    if before == "failed":
        cluster.jobs["1"] = "FAILED"
    if noted_at < submitted_at:
        noted_at = submitted_at + 1
    cluster.happens[submitted_at] = lambda: cluster.submit("2")
    note = cluster.happens.get(noted_at, lambda: None)
    cluster.happens[noted_at] = lambda: (note(), cluster.note("2"))
    for status in cluster.look():
        # It waits, or this is the end of the submission before.
        assert status.state is State.queued or (
            status.reason == "exit code 3" and status.native["job_id"] == "1"
        )


def test_what_a_run_wrote_about_its_end_while_somebody_looked_is_read(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, {"1": "RUNNING"})
    cluster.note("1")
    cluster.write_state("1", "running")

    def ends() -> None:
        failure = {
            "reason": "rank 1: exit code 3",
            "rank": 1,
            "node": "n2",
            "exit_code": 3,
            "lines": ["ValueError: x"],
        }
        cluster.write_state(
            "1", "failed", reason="rank 1: exit code 3", exit_code=1, failure=failure
        )
        cluster.jobs["1"] = "FAILED"

    cluster.happens[1] = ends
    (status,) = cluster.look()
    assert status.failure is not None and (status.failure.reason, status.failure.rank) == (
        "rank 1: exit code 3",
        1,
    )


def test_an_agent_that_ended_with_its_job_while_somebody_looked_and_could_not_write_it_is_gone(
    tmp_path: Path,
) -> None:
    with subprocess.Popen(["sleep", "100"]) as agent:
        cluster = Cluster(tmp_path, {"1": "RUNNING"})
        cluster.note("1")
        cluster.write_state(
            "1", "running", platform="slurm", agent=running_process(agent.pid).as_json()
        )

        def ends() -> None:
            agent.kill()
            agent.wait()
            cluster.jobs["1"] = "FAILED"

        cluster.happens[1] = ends
        (status,) = cluster.look()
    assert status.state is State.failed
    assert status.reason is not None and status.reason.startswith("agent gone: ")


def test_a_disk_that_fails_under_a_run_does_not_hide_what_slurm_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(tmp_path, {"1": "FAILED"})
    cluster.note("1")
    cluster.write_state("1", "failed", reason="exit code 3", exit_code=3)
    (tmp_path / "launch/ended.json").write_text("{}")
    read = file_server.read

    def failing(path: str, *rest: Any) -> Any:
        if path.endswith("ended.json"):
            raise OSError(errno.EBADMSG, os.strerror(errno.EBADMSG))
        return read(path, *rest)

    monkeypatch.setattr(file_server, "read", failing)
    (status,) = cluster.look()
    assert (status.state, status.reason) == (State.failed, "exit code 3")


@pytest.mark.parametrize("jobs", [{}, {"1": "FAILED"}, {"1": "RUNNING"}])
@pytest.mark.parametrize("change", [{"state": "dancing"}, {"since": "soon"}, {"at": "soon"}])
def test_damaged_records_of_a_run_do_not_hide_it(
    tmp_path: Path, jobs: dict[str, str], change: dict[str, Any]
) -> None:
    cluster = Cluster(tmp_path, jobs)
    cluster.note("1")
    cluster.write_state("1", "failed")
    damaged = json.dumps({"submission": "1", "state": "failed", **change})
    for name in ("state.json", "ended.json"):
        (tmp_path / "launch" / name).write_text(damaged)
    (status,) = cluster.look()
    assert status.state is (State.starting if "RUNNING" in jobs.values() else State.failed)


def test_a_job_that_is_not_ours_may_have_any_comment(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, {"1": "RUNNING"})
    cluster.note("1")
    for number, comment in enumerate(("slurm://c/Foo", "slurm://c/", "slurm://c/mine", "x")):
        cluster.others.append(f"{number + 2}|RUNNING|None|1|2|N/A|2|n1|main|(null)|{comment}")
    assert [(status.handle.run, status.native["job_id"]) for status in cluster.look()] == [
        ("r", "1")
    ]
