"""Agents in trouble: full disks, a fence that must hold, stops in the wrong moment."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.facts import says
from tests.integration.disks import MIB, Tmpfs
from tests.integration.launch.agents import (
    TELL,
    WAIT,
    Agents,
    Make,
    codes,
    free_port_range,
    until,
)

from drillyard.launch.agent import index, protocol
from drillyard.launch.agent.exit_report import make_report
from drillyard.launch.agent.fence import Epochs, Lease
from drillyard.launch.prepared_run import agent_files
from drillyard.supervise import reaper
from drillyard.supervise.process_identity import Process, process_of
from drillyard.supervise.reaper import AGENT_MARK

ELSEWHERE = Process("n7", "another boot/another namespace", 1, 1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Tmpfs]:
    """4 MiB under the first run that is made."""
    disk = Tmpfs(tmp_path / "run 0", 4 * MIB)
    disk.mount()
    yield disk
    disk.unmount()


def test_nothing_starts_while_an_earlier_start_renews_its_lease(make: Make) -> None:
    agents = make(TELL, lease_seconds=2)
    epochs = Epochs(agents.launch)
    earlier = Lease(epochs, 3, ELSEWHERE, "token", 2.0, lambda: None)
    earlier.claim(
        epochs.open({"leader": ELSEWHERE.as_json(), "submission": "lost", "attempt": "0"})
    )
    agent = agents.run()
    reason = until(lambda: agents.lines("commands") or agents.state.get("reason"))
    assert says(reason, "waits ... earlier start ... ended: 0001.node-3 on n7")
    # Twice as long as a silent lease would be waited for.
    time.sleep(4)
    assert agents.lines("commands") == [] and agents.state["state"] == "starting"
    earlier.release()
    assert codes([agent]) == [0] and len(agents.lines("commands")) == 1


def test_an_agent_without_guardian_ends_a_command_whose_lease_runs_out(make: Make) -> None:
    agents = make(f"{TELL}; trap '' TERM; while true; do sleep 0.05; done", lease_seconds=3)
    agent = agents.run()
    command = int(until(lambda: agents.lines("commands"))[0].split()[2])
    document = json.loads((agents.launch / "epochs" / "0001.node-0.alive").read_text())
    ours = reaper.marked_processes(document["token"], AGENT_MARK)
    (watcher,) = set(agents.marked()) - set(ours)
    os.kill(watcher, signal.SIGKILL)
    (agents.launch / "epochs").rename(agents.launch / "unreachable")
    until(lambda: not Path(f"/proc/{command}").exists(), seconds=30)
    assert agent.poll() is None
    until(lambda: says(agents.log(0).splitlines(), "not be written ... lease_seconds"))


def test_a_state_that_cannot_be_read_is_said_and_begun_again(make: Make) -> None:
    agents = make("true")
    (agents.launch / "state.json").write_text("")
    assert codes([agents.run(0, "--submission", "a")]) == [0]
    assert agents.state["state"] == "succeeded"
    assert says(agents.log(0).splitlines(), "state.json ... counted from 0")


def test_counted_restarts_wait_longer_each_time_and_a_stop_ends_the_pause(make: Make) -> None:
    agents = make('date +%s.%N >> "$RUN/begun"; exit 9', max_failures=9)
    agent = agents.run()
    until(lambda: "again in 4 s" in (agents.state.get("reason") or ""))
    begun = [float(line) for line in agents.lines("begun")]
    assert len(begun) == 3
    assert begun[1] - begun[0] >= 1 and begun[2] - begun[1] >= 2
    assert agents.state["state"] == "restarting" and "counted: 3 of 9" in agents.state["reason"]
    agent.terminate()
    assert agent.wait(60) == 85
    assert len(agents.lines("begun")) == 3
    assert says(agents.state["reason"], "SIGTERM before the attempt")


def test_stop_works_on_a_full_disk(make: Make, small_disk: Tmpfs) -> None:
    agents = make(f"{TELL}; while true; do sleep 0.05; done")
    started = agents.start(0)
    until(lambda: agents.lines("commands"))
    small_disk.fill()
    message = agents.stop()
    assert (message["left"], message["state"]) == ([], "cancelled")
    assert agents.marked() == [] and not process_of(started["agent"]).alive
    seen = index.look({"launch_directory": str(agents.launch)})
    assert (seen["state"]["state"], seen["cancelled"]) == ("cancelled", True)
    words = ["--job", str(agents.job), "--submission", "first", "--node-rank", "0", "--leader", "x"]
    assert agents.call("run", *words).returncode == 130


def test_the_end_of_a_run_is_reported_on_a_full_disk(make: Make, small_disk: Tmpfs) -> None:
    agents = make(f"{TELL}; {WAIT}")
    agent = agents.run()
    until(lambda: agents.lines("commands"))
    (agents.directory / "finish.later").touch()
    small_disk.fill()
    (agents.directory / "finish.later").rename(agents.directory / "finish")
    assert codes([agent]) == [0]
    assert agents.state["state"] == "succeeded"


@pytest.mark.parametrize("deleted", ["run directory", "launch directory"])
def test_a_run_whose_directory_is_deleted_ends_with_all_its_processes(
    make: Make, deleted: str
) -> None:
    agents = make(
        f"cd /; {TELL}; trap '' TERM; while true; do sleep 0.05; done", 2, lease_seconds=2
    )
    started = [agents.start(node) for node in range(2)]
    until(lambda: len(agents.lines("commands")) == 2)
    processes = [process_of(each[who]) for each in started for who in ("agent", "keeper")]
    with open(agents.launch / "agent-0.log", encoding="utf-8") as log:
        _delete(agents.directory if deleted == "run directory" else agents.launch)
        until(lambda: not agents.marked() and not any(each.alive for each in processes), seconds=60)
        assert says(log.read().splitlines()[-1:], f"error: {agents.launch} ... gone: ... tiny")


def test_a_directory_that_comes_back_in_time_costs_the_run_only_its_round(make: Make) -> None:
    agents = make(f"{TELL}; sleep 600", lease_seconds=8)
    agent = agents.run()
    until(lambda: agents.lines("commands"))
    agents.launch.rename(agents.directory / "away")
    time.sleep(3)
    (agents.directory / "away").rename(agents.launch)
    time.sleep(8)
    assert agent.poll() is None


def test_a_run_whose_directory_is_recreated_ends_and_leaves_the_new_one_alone(
    make: Make, tmp_path: Path
) -> None:
    agents = make(f"cd /; {TELL}; trap '' TERM; while true; do sleep 0.05; done", lease_seconds=600)
    old = agents.run(0, "--submission", "old")
    command = int(until(lambda: agents.lines("commands"))[0].split()[2])
    agents.launch.rename(tmp_path / "old")
    # Long before its lease would have run out, a start with the same number of its epoch.
    Agents(agents.directory, f"{TELL}; {WAIT}")
    new = agents.run(0, "--submission", "new")
    until(lambda: len(agents.lines("commands")) == 2)
    assert codes([old]) == [1] and not Path(f"/proc/{command}").exists()
    assert (agents.state["submission"], agents.state["state"]) == ("new", "running")
    assert (agents.launch / "epochs" / "0001.node-0.alive").exists()
    (agents.directory / "finish").touch()
    assert codes([new]) == [0]


def test_a_node_that_comes_when_the_run_is_over_leaves_with_its_code(make: Make) -> None:
    agents = make("true", 2)
    late = agents.run(1, "--submission", "a")
    state = {"submission": "a", "attempt": "0", "state": "failed", "exit_code": 2, "epoch": 1}
    until(
        lambda: (
            (agents.launch / "node-1.log").exists() and says(agents.log(1), "node 1 cannot join")
        )
    )
    assert late.poll() is None
    # An end of another start is not this one's.
    (agents.launch / "state.json").write_text(json.dumps({**state, "attempt": "1"}))
    time.sleep(2)
    assert late.poll() is None
    (agents.launch / "state.json").write_text(json.dumps(state))
    assert codes([late]) == [2]


def test_stop_needs_nothing_of_the_launch_directory(make: Make, tmp_path: Path) -> None:
    agents = make(f"cd /; {TELL}; setsid sleep 600 & sleep 600", lease_seconds=600)
    started = agents.start(0)
    until(lambda: agents.lines("commands"))
    (tmp_path / "agent").mkdir()
    for file in agent_files():
        (tmp_path / file.path).write_text(file.content)
    _delete(agents.directory)
    argv = [
        sys.executable,
        str(tmp_path / "agent"),
        "stop",
        "--launch-directory",
        str(agents.launch),
    ]
    ended = subprocess.run(argv, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    respawner = process_of(started["keeper"])
    message = {"agents": [{"process": respawner.pid, "ended": "asked"}], "left": [], "state": None}
    assert json.loads(ended.stdout) == message
    assert agents.marked() == [] and not respawner.alive


def _delete(directory: Path) -> None:
    """As `rm -rf`, at once: an agent may be writing into it."""
    directory.rename(directory.with_name(f"{directory.name} deleted"))
    shutil.rmtree(directory.with_name(f"{directory.name} deleted"), ignore_errors=True)


def test_two_stops_at_once_leave_nothing(make: Make) -> None:
    agents = make(f"{TELL}; setsid sleep 600 & sleep 600", 2)
    for node in range(2):
        agents.start(node)
    until(lambda: len(agents.lines("commands")) == 2)
    words = ["stop", "--launch-directory", str(agents.launch), "--patience", "60"]
    argv = [sys.executable, str(agents.launch / "agent"), *words]
    stops = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    document = [json.loads(each.communicate(timeout=90)[0]) for each in stops]
    assert [(each["left"], each["state"]) for each in document] == [([], "cancelled")] * 2
    assert agents.marked() == []


@pytest.mark.parametrize("moment", ["gathering", "pause"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_while_nothing_runs_is_answered_at_once(
    make: Make, moment: str, number: int
) -> None:
    agents = make("exit 1", 2 if moment == "gathering" else 1, max_failures=20)
    agent = agents.run()
    waits = "waits for node 1" if moment == "gathering" else "again in 8 s"
    until(lambda: waits in (agents.state.get("reason") or ""))
    begun = agents.state["round"]
    agent.send_signal(number)
    assert codes([agent]) == [85]
    assert agents.state["round"] == begun, "nothing was started meanwhile"


def test_a_respawner_that_is_asked_to_end_starts_no_agent_again(make: Make) -> None:
    agents = make(f"{TELL}; sleep 600")
    respawner = process_of(agents.start(0)["keeper"])
    assert respawner is not None
    until(lambda: agents.lines("commands"))
    for _ in range(4):
        # Each of them makes the respawner's pause longer.
        agent = until(lambda: process_of(_announced(agents).get("agent")))
        os.kill(agent.pid, signal.SIGKILL)
        until(lambda agent=agent: process_of(_announced(agents).get("agent")) != agent)
    agent = process_of(_announced(agents)["agent"])
    os.kill(agent.pid, signal.SIGKILL)
    until(lambda: says((agents.launch / "agent-0.log").read_text(), "again in 8.0 s"))
    os.kill(respawner.pid, signal.SIGTERM)
    until(lambda: not respawner.alive)
    assert process_of(_announced(agents)["agent"]) == agent


def _announced(agents: Agents) -> dict[str, Any]:
    (path,) = (agents.launch / "agents").glob("*.json")
    return dict(json.loads(path.read_text()))


def test_a_reference_that_submission_did_not_resolve_is_refused(make: Make) -> None:
    agents = make(
        'test "$A-$B" = value-{}',
        environment={"A": "${env:KNOWN}", "B": "{}", "RUN": "{run_directory}"},
    )
    (agents.launch / "secrets.json").write_text('{"KNOWN": "value"}')
    assert codes([agents.run()]) == [0]
    (agents.launch / "secrets.json").write_text("{}")
    ended = agents.call("run", "--job", str(agents.job), "--node-rank", "0", "--leader", "x")
    assert ended.returncode == 2 and "error: " in ended.stderr
    assert "KNOWN" in ended.stderr and "secrets.json" in ended.stderr


def test_words_of_a_command_reach_it_as_they_were_given(make: Make) -> None:
    words = [
        '{"nodes": 2, "x": {"y": "{}"}}',
        "{nodes}",
        "{unknown}",
        "a b",
        "$HOME",
        "{{node_rank}}",
    ]
    code = "import json, sys; open(sys.argv[1] + '/words', 'w').write(json.dumps(sys.argv[2:]))"
    agents = make("", command=["python3", "-c", code, "{run_directory}", *words])
    assert codes([agents.run()]) == [0]
    (line,) = agents.lines("words")
    assert json.loads(line) == [
        '{"nodes": 2, "x": {"y": "{}"}}',
        "1",
        "{unknown}",
        "a b",
        "$HOME",
        "{0}",
    ]


def test_two_hundred_nodes_join_at_once(make: Make) -> None:
    agents = make("true", 201, lease_seconds=60)
    (agents.launch / "secret").write_text("known")
    # As on a host whose limit of open files is the kernel's old one, scaled down to this crowd.
    limited = (
        f"ulimit -S -n 128; exec {sys.executable} '{agents.launch}/agent' run --job '{agents.job}'"
        " --quiet"
    )
    leader = subprocess.Popen(
        ["bash", "-c", f"{limited} --node-rank 0 --leader 127.0.0.1 --submission a"]
    )
    agents.started.append(leader)
    until(lambda: agents.state)
    port = json.loads(agents.job.read_text())["port"]
    ended: list[int] = []
    followers = [
        threading.Thread(target=_follow, args=(port, node, ended)) for node in range(1, 201)
    ]
    for each in followers:
        each.start()
    assert leader.wait(120) == 0
    for each in followers:
        each.join(30)
    assert ended == [0] * 200
    assert len(agents.state["hosts"]) == 201


def _follow(port: int, node: int, ended: list[int]) -> None:
    """A node whose commands end well at once."""
    reported = {"submission": "a", "attempt": "0", "node": node, "host": f"n{node}"}
    while True:
        try:
            connection, _ = protocol.join("127.0.0.1", port, b"known", reported, 60.0)
            break
        except protocol.ConnectionLost:
            time.sleep(0.2)
    connection.send(ready=1)
    while True:
        time.sleep(0.1)
        connection.beat()
        for message in connection.receive():
            if "start" in message:
                report = make_report(node, f"n{node}", 0, {}, "", asked=False, why=None)
                connection.send(exited={**report, "left": []})
            if "leave" in message:
                ended.append(message["leave"])
                return


def test_a_port_range_that_is_taken_is_said(make: Make) -> None:
    port = free_port_range()
    takers = [socket.create_server(("", each)) for each in range(port, port + 16)]
    agents = make("true", 2, port=port)
    assert codes([agents.run(0)]) == [1]
    assert says(agents.state["reason"], f"ports {port} to {port + 15} ... taken")
    for each in takers:
        each.close()
