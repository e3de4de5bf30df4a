"""Runs on two hosts by ssh: what each disturbance leads to, and that cancel leaves nothing on
either."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.facts import says
from tests.integration.conftest import Reference
from tests.integration.held import Holds
from tests.integration.launch.desk import Desk
from tests.integration.launch.sshd_hosts import SshHost, SshHosts, two_hosts
from tests.integration.tiny_run import STEPS, TIMEOUT_SECONDS, Run, write_config
from tests.integration.waiting import until

from drillyard.launch.prepared_run import port_of
from drillyard.launch.run_status import Handle

TITAN = """
import os, time
import torch.distributed as dist
dist.init_process_group("gloo")
total = 0
for step in range(1, 9):
    time.sleep(0.02)
    if dist.get_rank() == 0:
        print(f"[titan] 2026-11-21 10:00:{step:02} - root - INFO - step: {step:2}  loss: {12.5 - step:7.4f}  "
              f"grad_norm:  1.2500  memory:  0.50GiB(1.00%)  tps: {1000 + step}  tflops: 1.00  mfu: 0.10%", flush=True)
dist.destroy_process_group()
"""  # noqa: E501
"""A training script of somebody else, whose log is in the shape of torchtitan's."""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    """h0 and h1."""
    with two_hosts(tmp_path_factory.mktemp("hosts")) as both:
        yield both


@pytest.fixture
def desk(hosts: SshHosts, tmp_path: Path) -> Desk:
    """A user with a cluster of both hosts."""
    return Desk(tmp_path / "desk", cluster(hosts))


def cluster(hosts: SshHosts, **changes: Any) -> dict[str, Any]:
    """The cluster config of both hosts."""
    ssh = {
        "hosts": hosts.names,
        "config_file": str(hosts.config_file),
        "rendezvous_host": "127.0.0.1",
    }
    settings = {"name": "pair", "platform": "ssh", "nodes": 2, "processes_per_node": 1, "ssh": ssh}
    return settings | {"python": sys.executable} | changes


def find(host: SshHost, *words: str) -> int:
    """The one process of a host whose command line has all these words."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while True:
        found = [
            pid
            for pid, command in host.processes().items()
            if all(word in command for word in words)
        ]
        if len(found) == 1:
            return found[0]
        assert time.monotonic() < deadline, (words, host.processes())
        time.sleep(0.05)


def rank_of(host: SshHost, rank: int) -> int:
    """The process of a rank."""
    for pid in host.processes():
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if (
                f"RANK={rank}".encode() in environment
                and os.readlink(f"/proc/{pid}/fd/1") != os.devnull
            ):
                return pid
    raise AssertionError(host.processes())


def test_a_killed_rank_and_killed_agents_cost_restarts_and_no_bit(
    hosts: SshHosts, workplace: Path, reference: Reference, tmp_path: Path
) -> None:
    run = Run(write_config(workplace, "over-ssh", checkpoint={"every_steps": 5}))
    moments = {step: f"attempt-{number}-step-{step}" for number, step in enumerate((8, 14, 22))}
    holds = Holds(tmp_path, *moments.values())

    def held_at(step: int, saved: int) -> bool:
        checkpoints = [event["step"] for event in run.events("checkpoint")]
        return holds.reached(moments[step], 0, 1) and saved in checkpoints

    def reported_of(number: int, reason: str) -> bool:
        return any(
            each["round"] == number and each["reason"].startswith(reason)
            for each in run.events("failure")
        )

    python = holds.interpreter(tmp_path / "python")
    desk = Desk(tmp_path / "desk", cluster(hosts, python=python))
    handle = desk.launch(run.config)
    assert handle == "ssh://pair/over-ssh"
    h0, h1 = hosts.hosts
    # A rank is killed: all start again, which counts. Nobody is connected.
    until(lambda: held_at(8, saved=5), "attempt 0")
    hosts.close_connections()
    os.kill(rank_of(h1, 1), signal.SIGKILL)
    until(lambda: reported_of(0, "node 1 (h1): rank 1: killed by SIGKILL"), "the cause")
    holds.release(moments[8])
    # The agent of the second host is killed: its ranks end, its respawner starts it again, and
    # nothing is counted. Its rank is stopped first: else both ranks could train on, and save,
    # between the other's SIGTERM and its own end.
    until(lambda: held_at(14, saved=10), "attempt 1")
    os.kill(rank_of(h1, 1), signal.SIGSTOP)
    os.kill(find(h1, "agent run", "--node-rank 1"), signal.SIGKILL)
    until(lambda: reported_of(1, "lost node 1 (h1)"), "the loss")
    holds.release(moments[14])
    # The agent that leads is killed: the same.
    until(lambda: held_at(22, saved=20), "attempt 2")
    os.kill(rank_of(h0, 0), signal.SIGSTOP)
    os.kill(find(h0, "agent run", "--node-rank 0"), signal.SIGKILL)
    holds.release(moments[22])
    assert desk.say("runs", "wait", handle).returncode == 0
    status = desk.status(handle)
    assert (status["state"], status["failures"], status["hosts"]) == ("succeeded", 1, ["h0", "h1"])
    assert [start["round"] for start in run.events("round_start")] == [0, 1, 2, 3]
    # Node 0 did nothing wrong; but nobody has asked the run to stop.
    assert (
        [end["status"] for end in run.events("end") if end["status"] == "interrupted"]
        == run.events("signal")
        == []
    )
    assert [resumed["step"] for resumed in run.events("resume")] == [5, 10, 20]
    undisturbed = reference.run.figures()
    assert {step for step, _, _ in run.figures()} == set(range(1, STEPS + 1))
    assert all(figures == undisturbed[figures[0] - 1] for figures in run.figures())
    assert run.weights() == reference.run.weights()
    assert hosts.nothing_left(), hosts.processes()


def test_cancel_leaves_no_process_on_any_host_and_a_run_is_not_started_twice(
    hosts: SshHosts, desk: Desk
) -> None:
    stubborn = """setsid bash -c 'trap "" TERM; sleep 1000' & sleep 1000"""
    run = desk.write_run("stubborn", {"command": ["bash", "-c", stubborn]})
    handle = desk.launch(run)
    desk.wait_for(handle, lambda status: status["state"] == "running")
    refused = desk.say("launch", run)
    assert refused.returncode == 2 and says(refused.stderr, f"{handle}: ... running already")
    before = [find(host, "agent run") for host in hosts.hosts]
    assert desk.launch(run, "--replace") == handle
    desk.wait_for(handle, lambda status: status["state"] == "running")
    assert not {*before} & {*hosts.processes()}
    listed = desk.say("runs", "list")
    assert handle in listed.stdout and "running" in listed.stdout
    cancelled = desk.say("runs", "cancel", handle)
    assert cancelled.returncode == 0, cancelled.stderr
    assert desk.status(handle)["state"] == "cancelled"
    hosts.close_connections()
    assert hosts.nothing_left(), hosts.processes()
    assert desk.say("runs", "cancel", handle).returncode == 0


def test_cancel_without_the_head_host_ends_the_others_and_names_it(
    hosts: SshHosts, desk: Desk
) -> None:
    h0, h1 = hosts.hosts
    handle = desk.launch(desk.write_run("headless", {"command": ["sleep", "1000"]}))
    desk.wait_for(handle, lambda status: status["state"] == "running")
    h0.power_off()
    try:
        done = desk.say("runs", "cancel", handle)
    finally:
        h0.power_on()
    assert done.returncode == 2
    assert says(done.stderr, "h0: ... reached") and says(done.stderr, "headless ... stopped on h1")
    h1.cut_connections()
    assert hosts.nothing_left(), hosts.processes()
    # The head host is back: what it was doing is over, and is said to be.
    status = desk.status(handle)
    assert status["state"] in ("failed", "cancelled"), status


def test_who_follows_logs_hears_all_although_the_connection_is_cut(
    hosts: SshHosts, desk: Desk, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    script = (
        f"echo before $NODE_RANK; while [ ! -e {go} ]; do sleep 0.1; done; echo after $NODE_RANK"
    )
    handle = desk.launch(desk.write_run("talks", {"command": ["bash", "-c", script]}))
    follower = desk.start("runs", "logs", "-f", handle)
    assert follower.stdout is not None
    heard = []
    while not (
        any("before 0" in line for line in heard) and any("before 1" in line for line in heard)
    ):
        heard.append(follower.stdout.readline())
    hosts.close_connections()
    go.touch()
    rest, errors = follower.communicate(timeout=TIMEOUT_SECONDS)
    assert follower.returncode == 0, errors
    lines = ("".join(heard) + rest).splitlines()
    said = [f"{node}: {word} {node}" for word in ("before", "after") for node in (0, 1)]
    assert [lines.count(line) for line in said] == [1, 1, 1, 1], lines
    assert desk.status(handle)["state"] == "succeeded"


def test_a_script_of_torchrun_that_logs_as_torchtitan_is_launched_and_measured(
    hosts: SshHosts, desk: Desk, tmp_path: Path
) -> None:
    (desk.directory / "train.py").write_text(TITAN, encoding="utf-8")
    (desk.directory / ".gitignore").write_text("*.log\n")
    subprocess.run(["git", "init", "-q"], cwd=desk.directory, check=True)
    workload = {
        "command": ["python", "train.py"],
        "per": "gpu",
        "environment": {"GLOO_SOCKET_IFNAME": "lo"},
    }
    ssh = {"directory": str(tmp_path / "project")}
    settings = cluster(hosts)
    Desk(desk.directory, settings | {"ssh": settings["ssh"] | ssh})
    handle = desk.launch(desk.write_run("titan", workload), "--sync")
    assert desk.say("runs", "wait", handle).returncode == 0, desk.say("runs", "logs", handle).stdout
    assert (tmp_path / "project" / "train.py").read_text() == TITAN
    fetched = desk.say(
        "runs", "artifacts", handle, "launch/node-0.log", "--fetch", tmp_path / "here"
    )
    assert fetched.returncode == 0, fetched.stderr
    measured = desk.say("metrics", tmp_path / "here" / "launch" / "node-0.log", "--json")
    assert measured.returncode == 0, measured.stderr
    assert '"torchtitan"' in measured.stdout and "11.5" in measured.stdout
    # What is gone here is removed there; what was never carried stays.
    (desk.directory / "train.py").rename(desk.directory / "other.py")
    (tmp_path / "project" / "theirs.txt").touch()
    desk.write_run("titan", {"command": ["ls"]})
    desk.launch(desk.directory / "titan.yaml", "--sync")
    names = {path.name for path in (tmp_path / "project").iterdir()}
    assert {"other.py", "theirs.txt"} <= names and "train.py" not in names
    assert desk.say("runs", "wait", handle).returncode == 0


def test_all_that_is_wrong_is_reported_at_once_and_nothing_is_started(
    hosts: SshHosts, desk: Desk, tmp_path: Path
) -> None:
    h0 = hosts.hosts[0]
    # h1 has another directory under the path of the runs, no such Python, and h9 does not exist.
    for host in hosts.hosts:
        (host.directory / "private" / "runs").mkdir(exist_ok=True)
    python = h0.directory / "private" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    config = (
        hosts.config_file.read_text()
        + f"Host h9\n  HostName 127.0.0.1\n  Port {free_port_number()}\n"
    )
    (tmp_path / "ssh_config").write_text(config)
    settings = cluster(hosts, python=str(hosts.private / "python"), nodes=3)
    settings["ssh"] |= {"hosts": ["h0", "h1", "h9"], "config_file": str(tmp_path / "ssh_config")}
    broken = Desk(tmp_path / "broken", settings)
    run = write_config(
        desk.directory,
        "nowhere",
        output=str(hosts.private / "runs"),
        data__source=str(tmp_path / "x"),
    )
    first = port_of(Handle("ssh", "pair", "nowhere"))
    with contextlib.ExitStack() as taken:
        for port in range(first, first + 16):
            taken.enter_context(socket.create_server(("", port)))
        done = broken.say("launch", run)
    assert done.returncode == 2, done.stderr
    assert says(done.stderr, "nothing was started; 3 hosts")
    assert f"h0: ports {first} to {first + 15}" in done.stderr
    assert says(done.stderr, f"h1: {hosts.private}/python cannot run")
    assert says(done.stderr, "h9: ... reached: ssh: ... 127.0.0.1")
    unshared = Desk(tmp_path / "unshared", cluster(hosts))
    done = unshared.say("launch", run)
    assert done.returncode == 2 and says(
        done.stderr, f"h1: {hosts.private}/runs ... h0 ... storage.directory"
    )
    assert not any(
        (host.directory / "private" / "runs" / "nowhere").exists() for host in hosts.hosts
    )
    assert not list((h0.directory / "private" / "runs").iterdir())
    hosts.close_connections()
    assert hosts.nothing_left(), hosts.processes()


def test_ctrl_c_while_the_hosts_are_looked_at_starts_nothing(hosts: SshHosts, desk: Desk) -> None:
    slow = hosts.hosts[1].home / "bin" / "python3"
    slow.write_text(f'#!/bin/sh\ntouch "$HOME/asked"\nsleep 5\nexec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    try:
        launching = desk.start(
            "launch", desk.write_run("torn", {"command": ["sleep", "1000"]}), start_new_session=True
        )
        until((hosts.hosts[1].home / "asked").exists, "the check")
        os.killpg(launching.pid, signal.SIGINT)
        out, errors = launching.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        slow.unlink()
    assert launching.returncode == 130 and out == "", errors
    hosts.close_connections()
    assert hosts.nothing_left(), hosts.processes()
    assert "torn" not in desk.say("runs", "list").stdout


def free_port_number() -> int:
    """A port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_cluster_status_names_the_host_that_lacks_something(
    hosts: SshHosts, tmp_path: Path
) -> None:
    storage = tmp_path / "storage"
    storage.mkdir()
    desk = Desk(tmp_path / "desk", cluster(hosts, storage={"directory": str(storage)}))
    first, second = hosts.hosts

    def status() -> tuple[int, dict[tuple[str, str], list[str]]]:
        done = desk.say("cluster", "status", "cluster.yaml", "--json")
        found = json.loads(done.stdout)["findings"]
        assert list(storage.iterdir()) == [], "only the file of the look itself was written"
        wrong = [each for each in found if each["result"] in ("missing", "unknown")]
        return done.returncode, {(each["check"], each["text"]): each["nodes"] for each in wrong}

    assert status() == (0, {})
    read_only = f"mount --bind {storage} {storage} && mount -o remount,ro,bind {storage}"
    second.run("sh", "-c", read_only)
    try:
        code, wrong = status()
        ((check, text),) = wrong
        assert (code, check, wrong[check, text]) == (1, "storage", [second.name])
        assert "Read-only file system" in text
    finally:
        second.run("umount", str(storage))
    first.run("sh", "-c", read_only)
    second.unplug()
    try:
        code, wrong = status()
        named = [(check, nodes) for (check, _), nodes in wrong.items()]
        assert (
            code == 1 and ("hosts", [second.name]) in named and ("storage", [first.name]) in named
        )
        (text,) = (text for check, text in wrong if check == "hosts")
    finally:
        second.plug_in()
        first.run("umount", str(storage))
    # What it says to try fails as the look did, and works once the host is back.
    command = text[text.index("(try: ") + 6 :].rstrip(")")
    assert subprocess.run(command.split(), capture_output=True).returncode == 0
