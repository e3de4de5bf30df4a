"""What a host tells for launchers without a scheduler: its image, the runs on it, and runs whose leader it has lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drillyard.launch import agent
from drillyard.launch.agent import facts, identity, index
from drillyard.launch.agent.job import Job
from drillyard.launch.handles import Handle
from drillyard.launch.hosts.launcher import run_status
from drillyard.launch.show import next_steps

INSPECT = '#!/bin/sh\ncase "$1" in version) exit {version} ;; image) echo {id}; exit {image} ;; esac\n'


@pytest.mark.parametrize(
    ("version", "image", "identity", "error"),
    [(0, 0, "sha256:1", None), (0, 1, None, None), (1, 0, None, "docker version: fails; does its service run?")],
)
def test_an_image_is_here_has_to_be_pulled_or_cannot_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, image: int, identity: str | None, error: str | None
) -> None:
    (tmp_path / "docker").write_text(INSPECT.format(version=version, image=image, id="sha256:1"))
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    told = facts.image_facts("some/image:1")
    assert told["id"] == identity
    assert told["error"] == (error and f"{tmp_path}/{error}")


def test_without_docker_and_podman_an_image_cannot_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert facts.image_facts("some/image:1")["error"] == "neither docker nor podman is installed"


def job_in(directory: Path, platform: str = "ssh") -> Job:
    """A job whose launch directory is there."""
    job = Job("r", "c", platform, 1, 1, str(directory), str(directory / "launch"), ["sleep", "1000"])
    (directory / "launch").mkdir()
    (directory / "launch" / "job.json").write_text(job.as_json())
    return job


def test_runs_are_seen_by_the_agents_that_live_here(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    before = facts.active_runs()
    code = str(Path(agent.__file__).parent)
    words = [sys.executable, code, "run", "--job", f"{job.launch_directory}/job.json", "--quiet"]
    running = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    try:
        mine = {"run": "r", "cluster": "c", "launch_directory": job.launch_directory}
        deadline = time.monotonic() + 30
        while mine not in facts.active_runs():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert mine not in before
    finally:
        running.terminate()
        running.wait()
    assert mine not in facts.active_runs()


@pytest.mark.parametrize(("platform", "state"), [("ssh", "failed"), ("local", "failed"), ("slurm", "running")])
def test_a_leader_of_an_earlier_boot_is_gone_where_no_scheduler_can_have_moved_it(
    tmp_path: Path, platform: str, state: str
) -> None:
    job = job_in(tmp_path, platform)
    leader = {**identity.running_process(os.getpid()).as_json(), "machine": "an-earlier-boot/1"}
    told = {"state": "running", "platform": platform, "cluster": "c", "run": "r", "nodes": 1, "agent": leader}
    (tmp_path / "launch" / "state.json").write_text(json.dumps(told))
    seen = {"entry": None, **index.look(job.launch_directory)}
    status = run_status(Handle(platform, "c", "r"), seen)
    assert status.state == state
    if state == "failed":
        assert status.reason is not None and status.reason.startswith("agent gone: ")
        assert [step for step in next_steps(status) if f"runs resume {platform}://c/r" in step]
