"""Strangers on the network of a run: at the leader's port, in a flood, and between the leader and a
node."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from pathlib import Path

import pytest
from tests.facts import says
from tests.integration.launch.agents import TELL, WAIT, Make, codes, until
from tests.integration.launch.relay import TO_LEADER, TO_NODE, Relay, in_own_network


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: n0\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\xfc\n",
        b"[" * 200_000 + b"\n",
        b'{"hello": {"node": 1, "nonce": "\\ud800"}}\n',
        b'{"hello": {"node": 1, "nonce": "n"}}\n{"proof": "\\ud800"}\n',
        b'{"hello": {"node": 1, "nonce": "n"}}\n{"proof": "0"}\n',
        b'{"hello": 1}\n',
        b"x" * 3_000_000,
        b"",
    ],
    ids=["http", "tls", "deep", "nonce", "proof", "wrong secret", "hello", "endless", "half open"],
)
def test_strangers_at_the_port_cost_nothing(make: Make, said: bytes) -> None:
    agents = make("true", 2)
    leader = agents.run(0)
    until(lambda: agents.state)
    port = json.loads(agents.job.read_text())["port"]
    stranger = until(lambda: _connected(port))
    stranger.settimeout(5)
    try:
        stranger.sendall(said)
    except OSError:
        assert len(said) > 1 << 20
    time.sleep(0.5)
    assert leader.poll() is None
    assert codes([leader, agents.run(1)]) == [0, 0]
    stranger.close()


def _connected(port: int) -> socket.socket | None:
    try:
        return socket.create_connection(("127.0.0.1", port), timeout=1)
    except OSError:
        return None


def test_a_flood_of_strangers_costs_a_leader_little_and_ends_no_run(make: Make) -> None:
    agents = make(f"{TELL}; {WAIT}", 2)
    leader = agents.run(
        0, wrapped=lambda argv: ["bash", "-c", 'ulimit -n 300; exec "$@"', "-", *argv]
    )
    until(lambda: agents.state)
    port = json.loads(agents.job.read_text())["port"]
    before = _memory_mib(leader.pid)
    silent = []
    for _ in range(500):
        with contextlib.suppress(OSError):
            silent.append(socket.create_connection(("127.0.0.1", port), timeout=1))
    for _ in range(60):
        # What is closed at once cannot be sent in full.
        with contextlib.suppress(OSError):
            silent.append(socket.create_connection(("127.0.0.1", port), timeout=1))
            silent[-1].settimeout(1)
            silent[-1].sendall(b"x" * 1_000_000)
    follower = agents.run(1)
    until(lambda: len(agents.lines("commands")) == 2)
    # 64 to 96 strangers, and what an agent has open without any.
    assert len(os.listdir(f"/proc/{leader.pid}/fd")) < 130
    assert _memory_mib(leader.pid) - before < 20
    (agents.directory / "finish").touch()
    assert codes([leader, follower]) == [0, 0]
    assert agents.state["round"] == 0
    for each in silent:
        each.close()


def _memory_mib(pid: int) -> float:
    """The most that a process has had in memory."""
    (peak,) = (
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    return int(peak.split()[1]) / 1024


def test_a_program_that_took_the_first_port_and_relays_cannot_rewrite_what_the_leader_says(
    make: Make,
) -> None:
    agents = make("echo {master_addr} {master_port} {round}; true", 2)
    port = json.loads(agents.job.read_text())["port"]
    rewritten = [b"127.0.0.1", f"$(touch '{agents.directory}/owned')".encode()]
    relay = Relay(
        port,
        port + 1,
        lambda direction, data: data.replace(*rewritten) if direction == TO_NODE else data,
    )
    relay.start()
    follower = agents.run(1)
    assert codes([agents.run(0), follower]) == [0, 0]
    assert not (agents.directory / "owned").exists()
    assert (agents.state["round"], agents.state["state"]) == (0, "succeeded")
    relay.close()


@pytest.mark.parametrize("direction", [TO_LEADER, TO_NODE])
def test_a_changed_byte_cuts_the_connection_within_a_lease_and_the_run_goes_on(
    make: Make, direction: str
) -> None:
    agents = make(f"{TELL}; {WAIT}", 2, lease_seconds=8)
    port = json.loads(agents.job.read_text())["port"]
    leader = agents.run(0, wrapped=in_own_network)
    until(lambda: agents.state)
    changes: list[str] = []

    def change(going: str, data: bytes) -> bytes:
        if going not in changes:
            return data
        changes.remove(going)
        # A heartbeat: its last character but two, so that it is JSON all the same.
        return data[:-3] + b"2" + data[-2:]

    relay = Relay(port, port, change, leader.pid)
    relay.start()
    follower = agents.run(1)
    until(lambda: len(agents.lines("commands")) == 2)
    changes.append(direction)
    until(lambda: not changes)
    logs = (lambda: agents.log(0)) if direction == TO_LEADER else (lambda: agents.log(1))
    until(lambda: says(logs().splitlines(), "lost: ... not from this run"))
    until(lambda: len(agents.lines("commands")) == 4)
    assert agents.state["failures"] == 0
    (agents.directory / "finish").touch()
    assert codes([leader, follower]) == [0, 0]
    assert agents.state["round"] == 1
    relay.close()
