"""What somebody without the run's secret can do to the agents of a run: cost little, and change
nothing.

With real agents, in tests/integration/launch/test_agent_strangers.py: strangers at the port, a
flood of connections and of large greetings, a program that took the first port and relays, a relay
that changes one byte. What an authenticated connection accepts is in
tests/unit/launch/agent/test_protocol.py.
"""

from __future__ import annotations

import errno
import math
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.module_time import set_time

from drillyard.launch.agent import listener as listening
from drillyard.launch.agent import messages, protocol
from drillyard.launch.agent.exit_report import make_report
from drillyard.launch.agent.listener import MAX_UNAUTHENTICATED, Handshake, Listener
from drillyard.launch.agent.protocol import ConnectionLost, derive_key, seal

SECRET = b"of this run"
HELLO = seal(derive_key(SECRET, "hello"), 0, {"node": 1, "host": "n1", "nonce": "n"}) + b"\n"


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    monkeypatch.setattr(listening, "_PAUSE_SECONDS", 0.0)
    made = Listener(0, SECRET, 5.0)
    yield made
    made.close()


@pytest.fixture
def port(listener: Listener) -> int:
    return port_of(listener)


def port_of(listener: Listener) -> int:
    return int(listener._server.getsockname()[1])


class Strangers:
    """Connections that never become authenticated."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.sockets: list[socket.socket] = []

    def connect(self, count: int, said: bytes = b"") -> None:
        for _ in range(count):
            self.sockets.append(socket.create_connection(("127.0.0.1", self._port), timeout=10))
            self.sockets[-1].sendall(said)

    def num_open(self) -> int:
        """How many the leader has not closed."""
        return sum(not _closed(each) for each in self.sockets)

    def close(self) -> None:
        for each in self.sockets:
            each.close()


def _closed(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        while sock.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


@pytest.fixture
def strangers(port: int) -> Iterator[Strangers]:
    made = Strangers(port)
    yield made
    made.close()


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_silent_connections_are_bounded_and_the_oldest_is_closed_first(
    listener: Listener, strangers: Strangers
) -> None:
    before = num_descriptors()
    strangers.connect(4 * MAX_UNAUTHENTICATED)
    for _ in range(20):
        assert listener.authenticated() == []
        assert num_descriptors() - before - len(strangers.sockets) <= 1.5 * MAX_UNAUTHENTICATED
    closed = [_closed(each) for each in strangers.sockets]
    assert closed == [True] * (3 * MAX_UNAUTHENTICATED) + [False] * MAX_UNAUTHENTICATED


def test_a_node_joins_among_strangers(listener: Listener, strangers: Strangers, port: int) -> None:
    strangers.connect(2 * MAX_UNAUTHENTICATED)
    node = socket.create_connection(("127.0.0.1", port), timeout=10)
    node.sendall(HELLO)
    for _ in range(10):
        listener.authenticated()
    strangers.connect(2 * MAX_UNAUTHENTICATED)
    for _ in range(10):
        listener.authenticated()
    # It has said hello, so it is not one of the silent ones.
    assert not _closed(node)
    node.close()


@pytest.mark.parametrize(
    "said", [b"x" * 4097, b"x" * 100_000, b"x\n" * 10, HELLO * 2, HELLO[:-2] + b"!\n"]
)
def test_what_is_not_one_short_authentic_line_ends_the_connection(
    listener: Listener, strangers: Strangers, said: bytes
) -> None:
    strangers.connect(1, said)
    deadline = time.monotonic() + 10
    while strangers.num_open() and time.monotonic() < deadline:
        assert listener.authenticated() == []
    assert strangers.num_open() == 0


def test_a_line_stays_short_until_the_repetition_of_a_hello_is_excluded(
    listener: Listener, strangers: Strangers
) -> None:
    strangers.connect(1, HELLO)
    deadline = time.monotonic() + 10
    (sock,) = strangers.sockets
    while not (answer := _received(sock)) and time.monotonic() < deadline:
        listener.authenticated()
    assert answer.endswith(b"\n")
    sock.setblocking(True)
    sock.sendall(b"x" * 10_000)
    while strangers.num_open() and time.monotonic() < deadline:
        assert listener.authenticated() == []
    assert strangers.num_open() == 0


def _received(sock: socket.socket) -> bytes:
    sock.setblocking(False)
    try:
        return sock.recv(4096)
    except BlockingIOError:
        return b""


class BrokenServer:
    """A listening socket whose accept() fails as accept(2) says that it may."""

    def __init__(self, server: socket.socket, errors: list[int]) -> None:
        self._server = server
        self._errors = errors

    def fileno(self) -> int:
        return self._server.fileno()

    def accept(self) -> Any:
        if self._errors:
            raise OSError(self._errors.pop(0), "planted")
        return self._server.accept()

    def close(self) -> None:
        self._server.close()


@pytest.mark.parametrize(
    "number",
    [
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOBUFS,
        errno.ECONNABORTED,
        errno.EPROTO,
        errno.EHOSTUNREACH,
    ],
)
def test_an_error_of_accept_ends_nothing(
    listener: Listener, strangers: Strangers, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    server = BrokenServer(listener._server, [number] * 3)
    monkeypatch.setattr(listener, "_server", server)
    strangers.connect(1, b"x\n")
    deadline = time.monotonic() + 10
    while strangers.num_open() and time.monotonic() < deadline:
        assert listener.authenticated() == []
    assert strangers.num_open() == 0 and not server._errors


def test_strangers_never_get_the_last_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = num_descriptors() + 10
    monkeypatch.setattr(
        resource, "getrlimit", lambda which: (limit + listening._RESERVED_FILES, 4096)
    )
    listener = Listener(0, SECRET, 5.0)
    strangers = Strangers(port_of(listener))
    strangers.connect(30)
    for _ in range(3):
        listener.authenticated()
    assert all(each.fileno() < limit for each in listener._handshakes)
    assert strangers.num_open() < 10
    strangers.close()
    listener.close()


def test_strangers_alone_do_not_keep_the_leader_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    set_time(monkeypatch, "drillyard.launch.agent.listener", sleep=pauses.append)
    listener = Listener(0, SECRET, 5.0)
    assert listener.authenticated() == [] and pauses == []
    strangers = Strangers(port_of(listener))
    strangers.connect(1, b"x")
    assert listener.authenticated() == [] and pauses == [0.01]
    strangers.close()
    listener.close()


def test_connections_that_get_no_descriptor_do_not_keep_the_leader_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    set_time(monkeypatch, "drillyard.launch.agent.listener", sleep=pauses.append)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (70, 70))
    listener = Listener(0, SECRET, 5.0)
    strangers = Strangers(port_of(listener))
    strangers.connect(1, b"x")
    assert listener.authenticated() == [] and pauses == [0.01]
    strangers.close()
    listener.close()


def test_a_port_that_is_not_the_leaders_own_is_a_relay(
    listener: Listener, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "NUM_PORTS", 1)
    squatter = socket.create_server(("127.0.0.1", 0))
    joined: list[Handshake] = []

    def relay() -> None:
        node, leader = (
            squatter.accept()[0],
            socket.create_connection(("127.0.0.1", port), timeout=10),
        )
        leader.sendall(node.recv(4096))
        while not (answer := _received(leader)):
            joined.extend(listener.authenticated())
        node.sendall(answer)
        # The node leaves without another word.
        leader.sendall(node.recv(4096))
        leader.close()

    thread = threading.Thread(target=relay)
    thread.start()
    with pytest.raises(ConnectionLost, match=f"relay.*leader.* {port}"):
        protocol.join(
            "127.0.0.1", squatter.getsockname()[1], SECRET, {"node": 1, "host": "n1"}, 5.0
        )
    thread.join(10)
    assert not thread.is_alive() and joined == listener.authenticated() == []
    squatter.close()


HOSTILE = ["$(id)", "a b", "a;b", "-oProxyCommand=x", "a\nb", "", "é", "x" * 300, 7, None]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_host_name_has_nothing_that_a_shell_reads_otherwise(text: object) -> None:
    assert not messages.is_host(text)


@pytest.mark.parametrize("text", ["n1", "gpu_07.cluster.local", "10.0.0.1", "fe80::1", "A-1"])
def test_host_names_and_addresses_are_known(text: str) -> None:
    assert messages.is_host(text)


START = {"epoch": 1, "attempt": 0, "port": 20000}
STOP = {"signal": 15, "patience_seconds": 5.0, "why": None, "elsewhere": None}


@pytest.mark.parametrize(
    ("parse", "content"),
    [
        *(
            (messages.parse_start, {**START, "port": port})
            for port in (0, 65536, "22", True, 1.5, None)
        ),
        (messages.parse_start, {**START, "address": "$(id)"}),
        (messages.parse_start, {**START, "attempt": "../../x"}),
        *((messages.parse_start, {**START, "epoch": epoch}) for epoch in (0, 10**400)),
        (messages.parse_start, [1]),
        *((messages.parse_stop, {**STOP, "signal": number}) for number in (0, 19, 999, "15")),
        *(
            (messages.parse_stop, {**STOP, "patience_seconds": text})
            for text in ("5", -1, 10**400, math.nan, math.inf)
        ),
        (
            messages.parse_stop,
            {**STOP, "elsewhere": {"reason": 1, "rank": None, "exit_code": None}},
        ),
        (messages.parse_stop, {**STOP, "elsewhere": {"reason": "x"}}),
        (messages.parse_request, {"signal": 9, "insisted": False}),
        (messages.parse_request, {"signal": 15}),
        (messages.parse_leave, "0"),
        (messages.parse_leave, None),
    ],
)
def test_a_message_with_anything_else_ends_its_connection(parse: Any, content: object) -> None:
    assert messages.parse_start(START).attempt == 0 and messages.parse_stop(STOP).signal == 15
    with pytest.raises(ConnectionLost):
        parse(content)


def test_a_report_is_of_the_node_that_sends_it() -> None:
    report = {**make_report(2, "n2", 1, {}, "words", asked=False, why=None), "left": []}
    assert messages.parse_report(report, 2) == report
    for wrong in ({**report, "node": 1}, {**report, "status": "1"}, {**report, "more": 1}):
        with pytest.raises(ConnectionLost):
            messages.parse_report(wrong, 2)
