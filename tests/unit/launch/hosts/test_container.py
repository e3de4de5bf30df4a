"""Runs in containers on hosts with Docker or Podman: the agent's script, run with a runtime that
tells."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.unit.launch.requests import WORKLOAD, request

from drillyard.launch.hosts.plan import volume_options
from drillyard.launch.launcher import launcher_for
from drillyard.launch.plan import Plan, Program

CLUSTER = """
name: pair
platform: ssh
nodes: 2
processes_per_node: 8
image: nvcr.io/nvidia/pytorch:25.12-py3
mounts: [/data, '/scratch:/tmp/scratch:ro']
environment: {NCCL_DEBUG: INFO}
ssh: {hosts: [a, b]}
"""
RUN = WORKLOAD.replace("workload: {", "workload: {environment: {TOKEN: '${env:TOKEN}'}, ")


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    asked = request(
        CLUSTER.replace("hosts: [a, b]", f"hosts: [a, b], directory: {tmp_path}/project"), RUN
    )
    return launcher_for(asked.cluster).plan(asked)


def started(plan: Plan, tmp_path: Path, runtime: str, left: str = "") -> list[list[str]]:
    """The calls of the runtime, when node 1's command is started where only that one is
    installed. `left`: containers that it lists."""
    calls, fakes = tmp_path / "calls", tmp_path / "bin"
    fakes.mkdir()
    (fakes / runtime).write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" END >>{calls}\ncase "$1" in ps) echo "{left}" ;; rm) ;;'
        " *) exit 85 ;; esac\n"
    )
    (fakes / runtime).chmod(0o755)
    for program in ("id", "mkdir", "hostname"):
        (fakes / program).symlink_to(
            next(p for p in ("/usr/bin/" + program, "/bin/" + program) if os.path.exists(p))
        )
    script = tmp_path / "container.sh"
    script.write_text(plan.file("container.sh").content)
    command = json.loads(plan.file("job.json").content)["command"]
    done = subprocess.run(
        ["/bin/sh", str(script), *command[2:]],
        env={"PATH": str(fakes), "NODE_RANK": "1"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 85, done.stderr
    return [call.split("\n")[:-1] for call in calls.read_text().split("END\n")[:-1]]


def test_the_agent_starts_a_script_that_becomes_the_container(plan: Plan) -> None:
    job = json.loads(plan.file("job.json").content)
    assert job["command"] == [
        "sh",
        "{launch_directory}/container.sh",
        "all_reduce_perf",
        "-b",
        "8M",
    ]
    assert job["working_directory"] is None and job["profile_script"] is None


def test_the_container_has_a_name_is_removed_first_and_its_exit_code_is_the_programs(
    plan: Plan, tmp_path: Path
) -> None:
    listed, removed, ran = started(plan, tmp_path, "docker", left="1a2b 3c4d")
    # Not by its name, which a container of another user may have.
    label = f"drillyard.node={plan.launch_directory}/1"
    assert listed == ["ps", "--all", "--quiet", "--filter", f"label={label}"]
    assert removed == ["rm", "--force", "1a2b", "3c4d"]
    assert ran[ran.index("--label") + 1] == label
    assert ran[:3] == ["run", "--name", "drillyard-pair-nccl-1"]
    assert ran[-4:] == ["nvcr.io/nvidia/pytorch:25.12-py3", "all_reduce_perf", "-b", "8M"]
    assert {"--rm", "--init"} <= {*ran}
    assert ran[ran.index("--user") + 1] == f"{os.getuid()}:{os.getgid()}"
    assert ran[ran.index("--network") + 1] == ran[ran.index("--ipc") + 1] == "host"


def test_the_container_sees_the_run_the_project_and_the_mounts(plan: Plan, tmp_path: Path) -> None:
    _, ran = started(plan, tmp_path, "docker")
    seen = [ran[at + 1] for at, word in enumerate(ran) if word == "--volume"]
    project = f"{tmp_path}/project"
    assert seen == [
        f"{project}/runs:{project}/runs",
        f"{project}:{project}",
        "/data:/data",
        "/scratch:/tmp/scratch:ro",
    ]
    assert ran[ran.index("--workdir") + 1] == project


def test_values_of_the_environment_are_named_and_not_reported(plan: Plan, tmp_path: Path) -> None:
    _, ran = started(plan, tmp_path, "docker")
    named = {ran[at + 1] for at, word in enumerate(ran) if word == "--env"}
    assert {"NODE_RANK", "MASTER_ADDR", "DRILLYARD_EXIT_RECORD", "NCCL_DEBUG", "TOKEN"} <= named
    # What ends a killed command's processes finds them by these.
    assert {"DRILLYARD_RUN", "DRILLYARD_AGENT"} <= named
    assert [name for name in named if "=" in name] == ["HOME=/tmp"]


def test_podman_keeps_the_user_by_its_own_means(plan: Plan, tmp_path: Path) -> None:
    _, ran = started(plan, tmp_path, "podman")
    assert ran[ran.index("--userns") + 1] == "keep-id" and "--user" not in ran


def test_without_a_runtime_the_run_is_refused_and_not_tried_again(
    plan: Plan, tmp_path: Path
) -> None:
    script = tmp_path / "container.sh"
    script.write_text(plan.file("container.sh").content)
    environment = {"PATH": str(tmp_path), "NODE_RANK": "0"}
    done = subprocess.run(
        ["/bin/sh", str(script), "x"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "neither docker nor podman is installed" in done.stderr


def test_volumes_of_every_form() -> None:
    options = [f"--volume {volume}" for volume in ("/a:/a", "/a:/b", "/a:/a:ro", "/a:/b:ro")]
    assert list(volume_options(["/a", "/a:/b", "/a:ro", "/a:/b:ro"])) == options


def test_every_host_is_asked_for_the_image(plan: Plan) -> None:
    checks = [step for step in plan.steps if isinstance(step, Program) and step.stage == "check"]
    assert len(checks) == 2
    assert all("--image nvcr.io/nvidia/pytorch:25.12-py3" in step.argv[-1] for step in checks)
