"""What somebody meets who launches for the first time: typing errors, secrets, plans applied by
hand, failed ranks."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.facts import says
from tests.integration.launch.desk import Desk

from drillyard.launch.agent.job import run_token
from drillyard.supervise.reaper import RUN_MARK, end_marked_processes, marked_processes

VALUE = "the-value-of-the-secret"


@pytest.fixture
def desk(tmp_path: Path) -> object:
    """A user who runs on this machine; nothing of his runs is left at the end."""
    desk = Desk(tmp_path / "desk", {"name": "here", "platform": "local", "processes_per_node": 1})
    yield desk
    for run in tmp_path.glob("desk/runs/*"):
        end_marked_processes(run_token(str(run / "launch")), RUN_MARK)


def test_a_host_that_was_mistyped_once_is_not_asked_ever_after(desk: Desk) -> None:
    run = desk.write_run("typed", {"command": ["true"]})
    wrong = desk.directory / "wrong.yaml"
    wrong.write_text(
        "name: wrong\nplatform: ssh\nprocesses_per_node: 1\nssh: {hosts: [no-such-host.invalid]}\n"
    )
    refused = desk.say("launch", run, "--cluster", wrong)
    assert refused.returncode == 2 and "nothing was started" in refused.stderr, refused.stderr
    handle = desk.launch(run, "--wait").splitlines()[0]
    listed = desk.say("runs", "list")
    assert handle in listed.stdout
    assert listed.returncode == 0 and "wrong" not in listed.stderr, listed.stderr


def test_a_plan_is_applied_by_hand_and_finds_its_secrets_in_the_environment(
    desk: Desk, tmp_path: Path
) -> None:
    command = ["bash", "-c", 'echo "the secret has ${#TOKEN} letters"']
    run = desk.write_run(
        "by-hand", {"command": command, "environment": {"TOKEN": "${env:MY_TOKEN}"}}
    )
    assert desk.say("launch", run, "--output", tmp_path / "out").returncode == 0
    apply = ["sh", str(tmp_path / "out" / "apply.sh")]
    environment = {name: desk.environment[name] for name in ("HOME", "PATH")}
    without = subprocess.run(apply, env=environment, capture_output=True, text=True)
    assert without.returncode != 0 and says(without.stderr, "MY_TOKEN ... nothing was sent")
    assert not (desk.directory / "runs").exists()
    applied = subprocess.run(
        apply, env=environment | {"MY_TOKEN": VALUE}, capture_output=True, text=True
    )
    assert applied.returncode == 0 and "cat:" not in applied.stderr, applied.stderr
    assert desk.say("runs", "wait", "by-hand").returncode == 0
    assert f"the secret has {len(VALUE)} letters" in desk.say("runs", "logs", "by-hand").stdout


def test_a_secret_is_in_one_file_that_only_its_owner_reads_while_the_run_goes_on_and_in_no_output(
    desk: Desk,
) -> None:
    script = "stat -c 'its mode is %a' runs/secret/launch/secrets.json; exit 3"
    run = desk.write_run(
        "secret", {"command": ["bash", "-c", script], "environment": {"TOKEN": "${env:MY_TOKEN}"}}
    )
    missing = desk.say("launch", run)
    assert missing.returncode == 2 and says(
        missing.stderr, "${env:MY_TOKEN}; not set ... export MY_TOKEN="
    )
    desk.environment["MY_TOKEN"] = VALUE
    handle = desk.launch(run, "--max-failures", "0")
    assert desk.say("runs", "wait", handle).returncode == 1
    holders = [
        path
        for path in desk.directory.rglob("*")
        if path.is_file() and VALUE.encode() in path.read_bytes()
    ]
    assert holders == []
    assert "its mode is 600" in desk.say("runs", "logs", handle).stdout
    shown = [
        ["launch", run, "--dry-run", "--explain"],
        ["runs", "status", handle],
        ["runs", "logs", handle],
    ]
    shown += [["runs", "artifacts", handle], ["runs", "status", handle, "--json"]]
    output = [desk.say(*arguments) for arguments in shown]
    assert all(VALUE not in each.stdout + each.stderr for each in output)
    assert "secret" not in {path.rpartition("/")[2] for path in output[3].stdout.split()}


def test_a_cancelled_run_is_not_said_to_be_over_because_of_an_earlier_failure(desk: Desk) -> None:
    script = (
        'if [ -e again ]; then sleep 1000; else touch again; echo "the first attempt broke"; exit'
        " 7; fi"
    )
    handle = desk.launch(desk.write_run("twice", {"command": ["bash", "-c", script]}))
    desk.wait_for(handle, lambda status: status["round"] == 1 and status["state"] == "running")
    assert desk.say("runs", "cancel", handle).returncode == 0
    status = desk.say("runs", "status", handle).stdout
    first, *others = status.splitlines()
    assert "cancelled" in first and "exit code 7" not in first
    assert any(line.split()[0] == "failure" and "exit code 7" in line for line in others), status
    assert "agent gone" not in status


def test_a_run_whose_directory_was_deleted_is_cancelled(desk: Desk) -> None:
    handle = desk.launch(desk.write_run("deleted", {"command": ["bash", "-c", "cd /; sleep 1000"]}))
    desk.wait_for(handle, lambda status: status["state"] == "running")
    run = desk.directory / "runs" / "deleted"
    run.rename(run.with_name("away"))
    shutil.rmtree(run.with_name("away"), ignore_errors=True)
    seen = json.loads(desk.say("runs", "status", handle, "--json").stdout)
    assert seen["state"] == "failed" and says(seen["reason"], f"{run}/launch ... not there")
    cancelled = desk.say("runs", "cancel", handle)
    assert cancelled.returncode == 0, cancelled.stderr
    assert cancelled.stdout == f"{handle}  cancelled\n"
    assert marked_processes(run_token(str(run / "launch")), RUN_MARK) == []


def test_the_whole_of_a_plan_is_reported_once(desk: Desk) -> None:
    run = desk.write_run("command", {"command": ["true"]})
    two = desk.directory / "two.yaml"
    two.write_text(
        "name: two\nplatform: ssh\nnodes: 2\nprocesses_per_node: 1\nssh: {hosts: [a, b]}\n"
    )
    warnings = json.loads(desk.say("launch", run, "--cluster", two, "--dry-run", "--json").stdout)[
        "warnings"
    ]
    assert len(warnings) == len(set(warnings)) == 1 and "storage.directory" in warnings[0]
