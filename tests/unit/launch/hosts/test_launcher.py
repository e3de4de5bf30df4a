"""What a host tells for launchers without a scheduler: its image, the runs on it, and runs whose
leader it has lost."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drillyard import host_probe
from drillyard.launch import agent
from drillyard.launch.agent import host_check, index
from drillyard.launch.agent.job import Job
from drillyard.launch.hosts.launcher import run_status
from drillyard.launch.run_status import Handle, RunStatus
from drillyard.launch.status_text import next_steps
from drillyard.supervise import process_identity

INSPECT = (
    '#!/bin/sh\ncase "$1" in version) exit {version} ;; image) echo {id}; exit {image} ;; esac\n'
)


@pytest.mark.parametrize(
    ("version", "image", "identity", "error"),
    [
        (0, 0, "sha256:1", None),
        (0, 1, None, None),
        (1, 0, None, "docker version: fails; does its service run?"),
    ],
)
def test_an_image_is_here_has_to_be_pulled_or_cannot_be_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: int,
    image: int,
    identity: str | None,
    error: str | None,
) -> None:
    (tmp_path / "docker").write_text(INSPECT.format(version=version, image=image, id="sha256:1"))
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    message = host_probe.image_facts("some/image:1")
    assert message["id"] == identity
    assert message["error"] == (error and f"{tmp_path}/{error}")


def test_without_docker_and_podman_an_image_cannot_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (
        host_probe.image_facts("some/image:1")["error"] == "neither docker nor podman is installed"
    )


def entry_of(directory: Path, platform: str) -> dict[str, str]:
    """The run in the index, as launchers have always written it: a scheduler's has the job."""
    return {
        "launch_directory": str(directory / "launch"),
        **({"job_id": "7"} if platform == "slurm" else {}),
    }


def job_in(directory: Path, platform: str = "ssh") -> Job:
    """A job whose launch directory is there."""
    job = Job(
        "r", "c", platform, 1, 1, str(directory), str(directory / "launch"), ["sleep", "1000"]
    )
    (directory / "launch").mkdir(exist_ok=True)
    (directory / "launch" / "job.json").write_text(job.as_json())
    return job


def test_runs_are_seen_by_the_agents_that_live_here(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    before = host_check.active_runs()
    code = str(Path(agent.__file__).parent)
    words = [sys.executable, code, "run", "--job", f"{job.launch_directory}/job.json", "--quiet"]
    running = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    try:
        mine = {"run": "r", "cluster": "c", "launch_directory": job.launch_directory}
        mine |= {"user": os.getuid(), "launched_from": ""}
        deadline = time.monotonic() + 30
        while mine not in host_check.active_runs():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert mine not in before
    finally:
        running.terminate()
        running.wait()
    assert mine not in host_check.active_runs()


def seen_status(
    directory: Path, platform: str, leader: process_identity.Process, **changes: object
) -> RunStatus:
    """The status of a run whose state.json was last written when its first attempt began."""
    job_in(directory, platform)
    common = {"run": "r", "cluster": "c", "platform": platform, "nodes": 1, "epoch": 1, "round": 0}
    message = {**common, "state": "running", "reason": None, "agent": leader.as_json(), **changes}
    (directory / "launch" / "state.json").write_text(json.dumps(message))
    return run_status(
        Handle(platform, "c", "r"), {"entry": None, **index.look(entry_of(directory, platform))}
    )


DEAD = process_identity.Process(process_identity.node_name(), "an-earlier-boot/1", 1, 1)


@pytest.mark.parametrize(
    ("leader", "state"), [(DEAD, "failed"), (process_identity.this_process(), "restarting")]
)
def test_a_cause_that_did_not_reach_the_state_is_read_from_the_nodes_reports(
    tmp_path: Path, leader: process_identity.Process, state: str
) -> None:
    exits = tmp_path / "launch" / "exits"
    words = (
        "exit code 2; error: cannot export to /r/final: No space left on device: free space there"
    )
    report = {
        "node": 0,
        "host": "h",
        "rank": None,
        "exit_code": 2,
        "status": 2,
        "reason": words,
        "lines": ["error: x"],
    }
    report |= {"lost_peer": False, "asked": False, "has_record": False, "ended_at": 5.0}
    effect = {
        **report,
        "node": 1,
        "status": 1,
        "reason": "lost",
        "lost_peer": True,
        "ended_at": 4.0,
    }

    def write() -> None:
        exits.mkdir(parents=True)
        (exits / "0001-0000.node-0.json").write_text(json.dumps(report))
        (exits / "0001-0000.node-1.json").write_text(json.dumps(effect))
        (exits / "0001-0001.node-0.json").write_text("")

    status = seen_status(tmp_path, "local", leader)
    write()
    assert status.failure is None or status.failure.reason.startswith("agent gone")
    seen = index.look(entry_of(tmp_path, "local"))
    status = run_status(Handle("local", "c", "r"), {"entry": None, **seen})
    assert (status.state, status.reason) == (state, words)
    assert status.failure is not None and (status.failure.exit_code, status.failure.lines) == (
        2,
        ("error: x",),
    )


def lease_of(directory: Path, seconds_ago: float) -> None:
    """The lease of node 0 as it was renewed last."""
    (directory / "launch" / "epochs").mkdir(parents=True)
    lease = directory / "launch" / "epochs" / "0001.node-0.alive"
    lease.touch()
    at = lease.stat().st_mtime - seconds_ago
    os.utime(lease, (at, at))


@pytest.mark.parametrize("platform", ["ssh", "slurm"])
@pytest.mark.parametrize(
    ("seconds_ago", "directory_is", "state", "words"),
    [
        (5.0, "read-only", "running", None),
        (11.0, "read-only", "restarting", "cannot be written to: Read-only file system"),
        (11.0, "full", "running", None),
        (15.0, "fine", "running", None),
        (25.0, "fine", "restarting", "has not renewed its lease for 2"),
        # The clock of the file server is ahead.
        (-300.0, "fine", "running", None),
        (-300.0, "read-only", "restarting", "cannot be written to: Read-only file system"),
    ],
)
def test_a_run_whose_leader_cannot_renew_its_lease_is_not_running(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    platform: str,
    seconds_ago: float,
    directory_is: str,
    state: str,
    words: str | None,
) -> None:
    def refuse(**options: object) -> None:
        number = {"read-only": errno.EROFS, "full": errno.ENOSPC}[directory_is]
        raise OSError(number, os.strerror(number))

    job_in(tmp_path, platform)
    lease_of(tmp_path, seconds_ago)
    if directory_is != "fine":
        monkeypatch.setattr("tempfile.NamedTemporaryFile", refuse)
    status = seen_status(tmp_path, platform, process_identity.this_process())
    assert status.state == state
    assert status.reason is None if words is None else words in str(status.reason)
    assert not list((tmp_path / "launch").glob(".look-*"))
    # A lease that was released, by an earlier version and by this one: nothing runs.
    lease = tmp_path / "launch" / "epochs" / "0001.node-0.alive"
    lease.with_suffix(".gone").touch()
    assert seen_status(tmp_path, platform, process_identity.this_process()).state == "running"
    lease.with_suffix(".gone").unlink()
    lease.unlink()
    status = seen_status(tmp_path, platform, process_identity.this_process())
    if directory_is != "read-only":
        assert status.state == "running"
    else:
        # What was written a moment before the disk failed may be lost.
        assert status.state == "restarting" and "cannot be written to: Read-only" in str(
            status.reason
        )
        over = seen_status(tmp_path, platform, process_identity.this_process(), state="succeeded")
        assert over.state == "succeeded" and not over.reason


@pytest.mark.parametrize("seconds_ago", [0.0, 700.0])
def test_a_run_that_ended_where_nothing_can_be_written_has_failed_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds_ago: float
) -> None:
    def refuse(**options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    job_in(tmp_path)
    lease_of(tmp_path, seconds_ago)
    monkeypatch.setattr("tempfile.NamedTemporaryFile", refuse)
    status = seen_status(tmp_path, "ssh", DEAD)
    assert status.state == "failed" and status.failure is not None
    assert status.failure.reason.startswith(
        f"{tmp_path}/launch cannot be written to: Read-only file system"
    )


@pytest.mark.parametrize(
    ("platform", "state"), [("ssh", "failed"), ("local", "failed"), ("slurm", "running")]
)
def test_a_leader_of_an_earlier_boot_is_gone_where_no_scheduler_can_have_moved_it(
    tmp_path: Path, platform: str, state: str
) -> None:
    job_in(tmp_path, platform)
    leader = {
        **process_identity.running_process(os.getpid()).as_json(),
        "machine": "an-earlier-boot/1",
    }
    message = {
        "state": "running",
        "platform": platform,
        "cluster": "c",
        "run": "r",
        "nodes": 1,
        "agent": leader,
    }
    (tmp_path / "launch" / "state.json").write_text(json.dumps(message))
    seen = {"entry": None, **index.look(entry_of(tmp_path, platform))}
    status = run_status(Handle(platform, "c", "r"), seen)
    assert status.state == state
    if state == "failed":
        assert status.reason is not None and status.reason.startswith("agent gone: ")
        assert [step for step in next_steps(status) if f"runs resume {platform}://c/r" in step]
