"""Joining a leader: who knows the secret and who does not."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from drillyard.launch.agent.door import Door
from drillyard.launch.agent.wire import Connection, ConnectionLost, Guest, join, proof, same
from drillyard.supervise.ports import free_port

SECRET = b"of this run"


class Leader(threading.Thread):
    """A door that welcomes whoever proves itself."""

    def __init__(self, port: int, secret: bytes) -> None:
        super().__init__(daemon=True)
        self.door = Door(port, secret, 5.0)
        self.joined: list[Guest] = []
        self.over = False

    def run(self) -> None:
        while not self.over:
            for guest in self.door.proven():
                # First what the test looks at, then what it waits for.
                self.joined.append(guest)
                guest.connection.send(epoch=7)
            time.sleep(0.005)
        self.door.close()


@pytest.fixture
def ports() -> Iterator[tuple[int, list[Leader]]]:
    leaders: list[Leader] = []
    yield free_port(()), leaders
    for leader in leaders:
        leader.over = True
        leader.join(10)


def open_door(ports: tuple[int, list[Leader]], secret: bytes = SECRET) -> Leader:
    leader = Leader(ports[0], secret)
    ports[1].append(leader)
    leader.start()
    return leader


def told(node: int = 1) -> dict[str, Any]:
    return {"node": node, "host": "b"}


def test_a_node_that_knows_the_secret_joins(ports: tuple[int, list[Leader]]) -> None:
    leader = open_door(ports)
    connection, epoch = join("127.0.0.1", ports[0], SECRET, told(4), 60.0)
    assert epoch == 7 and leader.joined[0].told["node"] == 4
    connection.close()


def test_a_leader_of_another_run_is_passed_over(ports: tuple[int, list[Leader]]) -> None:
    other = open_door(ports, b"of another run")
    ours = open_door(ports)
    connection, _ = join("127.0.0.1", ports[0], SECRET, told(), 60.0)
    assert len(ours.joined) == 1 and other.joined == []
    connection.close()


def test_a_node_without_the_secret_stays_outside(ports: tuple[int, list[Leader]]) -> None:
    leader = open_door(ports)
    with pytest.raises(ConnectionLost):
        join("127.0.0.1", ports[0], b"guessed", told(), 5.0)
    # One that does not care about the leader's proof fails by its own.
    raw = socket.create_connection(("127.0.0.1", ports[0]))
    raw.sendall(b'{"hello": {"node": 1, "nonce": "n"}}\n{"proof": "00"}\n')
    raw.settimeout(10)
    while raw.recv(4096):
        pass
    assert leader.joined == []


def test_nonsense_is_sent_away(ports: tuple[int, list[Leader]]) -> None:
    open_door(ports)
    for nonsense in (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"hello": {"node": "x"}}\n', b"\xff\xfe\n"):
        raw = socket.create_connection(("127.0.0.1", ports[0]))
        raw.settimeout(10)
        raw.sendall(nonsense)
        assert raw.recv(4096) == b""
        raw.close()


def test_nobody_listens() -> None:
    with pytest.raises(ConnectionLost):
        join("127.0.0.1", free_port(()), SECRET, told(), 5.0)


def test_proofs_are_of_all_words_and_the_secret() -> None:
    assert same(proof(b"s", "a", "b"), proof(b"s", "a", "b"))
    assert not same(proof(b"s", "ab"), proof(b"s", "a", "b"))
    assert not same(proof(b"t", "a", "b"), proof(b"s", "a", "b"))
    assert not same(None, proof(b"s", "a"))


def test_messages_arrive_whole_and_beats_are_not_messages() -> None:
    one, other = (Connection(each, 5.0) for each in socket.socketpair())
    one.send(beat=1)
    one.send(start={"round": 1})
    one.send(text="x" * 10_000)
    heard: list[dict[str, Any]] = []
    while len(heard) < 2:
        heard += other.receive()
    assert heard == [{"start": {"round": 1}}, {"text": "x" * 10_000}]
    one.close()
    with pytest.raises(ConnectionLost):
        other.receive()


def test_silence_is_a_loss() -> None:
    one, other = (Connection(each, 0.05) for each in socket.socketpair())
    time.sleep(0.1)
    with pytest.raises(ConnectionLost, match="silent"):
        one.beat()
    other.close()
