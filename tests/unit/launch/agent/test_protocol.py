"""Handshake a leader, and what an authenticated connection accepts."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from drillyard.launch.agent.listener import Handshake, Listener
from drillyard.launch.agent.protocol import (
    Connection,
    ConnectionLost,
    derive_key,
    join,
    seal,
    unseal,
)
from drillyard.supervise.sockets import free_port

SECRET = b"of this run"


class Leader(threading.Thread):
    """A listener that tells the epoch 7 to all who are authenticated."""

    def __init__(self, port: int, secret: bytes) -> None:
        super().__init__(daemon=True)
        self.listener = Listener(port, secret, 5.0)
        self.joined: list[Handshake] = []
        self.over = False

    def run(self) -> None:
        while not self.over:
            for peer in self.listener.authenticated():
                # First what the test looks at, then what it waits for.
                self.joined.append(peer)
                peer.connection.send(epoch=7)
            time.sleep(0.005)
        self.listener.close()


@pytest.fixture
def ports() -> Iterator[tuple[int, list[Leader]]]:
    leaders: list[Leader] = []
    yield free_port(set()), leaders
    for leader in leaders:
        leader.over = True
        leader.join(10)


def listen(ports: tuple[int, list[Leader]], secret: bytes = SECRET) -> Leader:
    leader = Leader(ports[0], secret)
    ports[1].append(leader)
    leader.start()
    return leader


def described(node: int = 1) -> dict[str, Any]:
    return {"node": node, "host": "b"}


def pair(silence_seconds: float = 5.0) -> tuple[Connection, Connection]:
    """A node's and a leader's end of one connection."""
    node, leader = socket.socketpair()
    return Connection(node, silence_seconds, b"n", b"l"), Connection(
        leader, silence_seconds, b"l", b"n"
    )


def test_a_node_that_knows_the_secret_joins(ports: tuple[int, list[Leader]]) -> None:
    leader = listen(ports)
    connection, epoch = join("127.0.0.1", ports[0], SECRET, described(4), 60.0)
    assert epoch == 7 and leader.joined[0].hello["node"] == 4
    connection.close()


def test_a_leader_of_another_run_is_passed_over(ports: tuple[int, list[Leader]]) -> None:
    other = listen(ports, b"of another run")
    ours = listen(ports)
    connection, _ = join("127.0.0.1", ports[0], SECRET, described(), 60.0)
    assert len(ours.joined) == 1 and other.joined == []
    connection.close()


def test_a_node_without_the_secret_stays_outside(ports: tuple[int, list[Leader]]) -> None:
    leader = listen(ports)
    with pytest.raises(ConnectionLost):
        join("127.0.0.1", ports[0], b"guessed", described(), 5.0)
    assert leader.joined == []


def test_a_repeated_hello_proves_nothing(ports: tuple[int, list[Leader]]) -> None:
    leader = listen(ports)
    hello = seal(derive_key(SECRET, "hello"), 0, {**described(), "nonce": "n"}) + b"\n"
    heard = seal(derive_key(b"guessed", "node", "n", "n"), 0, {"join": 1}) + b"\n"
    for after in (heard, hello):
        raw = socket.create_connection(("127.0.0.1", ports[0]), timeout=10)
        raw.sendall(hello)
        assert raw.recv(4096).endswith(b"\n")
        raw.sendall(after)
        assert raw.recv(4096) == b""
        raw.close()
    assert leader.joined == []


def test_nonsense_is_turned_away(ports: tuple[int, list[Leader]]) -> None:
    listen(ports)
    for nonsense in (
        b"GET / HTTP/1.1\r\n",
        b"[]\n",
        b'{"hello": {"node": 1}}\n',
        b"\xff\xfe\n",
        b"\n",
        b" \n",
    ):
        raw = socket.create_connection(("127.0.0.1", ports[0]), timeout=10)
        raw.sendall(nonsense)
        assert raw.recv(4096) == b""
        raw.close()


def test_nobody_listens() -> None:
    with pytest.raises(ConnectionLost):
        join("127.0.0.1", free_port(set()), SECRET, described(), 5.0)


def test_a_key_is_of_the_secret_the_purpose_and_each_nonce() -> None:
    keys = [
        derive_key(b"s", "node", "a", "b"),
        derive_key(b"t", "node", "a", "b"),
        derive_key(b"s", "leader", "a", "b"),
        derive_key(b"s", "node", "ab"),
        derive_key(b"s", "node", "b", "a"),
    ]
    assert len(set(keys)) == len(keys)


def test_messages_arrive_whole_and_beats_are_not_messages() -> None:
    one, other = pair()
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


def test_what_follows_the_awaited_message_is_kept() -> None:
    one, other = pair()
    one.send(epoch=7)
    one.send(leave=0)
    assert other.wait_for_message(5) == {"epoch": 7}
    assert other.receive() == [{"leave": 0}]


LINES = [seal(b"l", number, {"number": number}) for number in range(3)]


@pytest.mark.parametrize(
    "lines",
    [
        [LINES[0], LINES[0]],
        [LINES[1]],
        [LINES[0], LINES[2]],
        [seal(b"n", 0, {"number": 0})],
        [b'{"number": 0}'],
        [b" " + LINES[0]],
    ],
    ids=["repeated", "first left out", "one left out", "sent back", "without MAC", "moved"],
)
def test_a_line_that_was_not_sent_as_this_one_ends_the_connection(lines: list[bytes]) -> None:
    raw, node = socket.socketpair()
    connection = Connection(node, 5.0, b"n", b"l")
    raw.sendall(b"\n".join(lines) + b"\n")
    with pytest.raises(ConnectionLost, match="not from this run"):
        connection.receive()


def test_a_change_of_any_byte_is_seen() -> None:
    line = seal(b"k", 3, {"start": {"port": 20000}})
    assert unseal(b"k", 3, line) == {"start": {"port": 20000}}
    for place in range(len(line)):
        with pytest.raises(ConnectionLost):
            unseal(b"k", 3, line[:place] + bytes([line[place] ^ 1]) + line[place + 1 :])


def test_silence_is_a_loss_and_only_authentic_lines_end_it() -> None:
    raw, node = socket.socketpair()
    connection = Connection(node, 0.05, b"n", b"l")
    raw.sendall(b"half a line")
    time.sleep(0.1)
    connection.receive()
    with pytest.raises(ConnectionLost, match="silent"):
        connection.beat()
