"""What strangers who connect to a node's ports cost: little, for a short time, and never
the job."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from drillyard.acceptance.node import members, mesh_server, probe_tcp_bandwidth, worker
from drillyard.acceptance.node.members import JobMembers
from drillyard.acceptance.node.mesh_server import MeshServer
from drillyard.acceptance.node.messages import listen
from drillyard.acceptance.node.probe_network import _ports
from drillyard.acceptance.node.worker import NodePlace, join

SECRET = b"of the run"
SECONDS = 0.4
"""For a message of a stranger here."""
MOST_SECONDS = 12.0
"""Until a stranger is gone, on a busy machine."""
LINES = [
    b"\n", b"null\n", b"[]\n", b"7\n", b'"x"\n', b"{}\n", b"\xff\xfe\n", b"[" * 4000 + b"\n",
    b'{"a":' * 800 + b"1" + b"}" * 800 + b"\n", b'{"joins": true}\n', b'{"joins": -1}\n',
    b'{"joins": 1e400}\n', b'{"joins": 1, "mesh_port": 7, "proof": "\\ud800"}\n',
    b'{"joins": 1, "mesh_port": [], "rendezvous_port": {}}\n', b'{"receive": null}\n',
    b'{"receive": [1]}\n', b'{"receive": NaN}\n', b'{"receive": -1e999}\n', b'{"send": {}}\n',
    b'{"send": 1' + b"0" * 400 + b"}\n", b'{"send": "x"}\n', b'{"send": true, "receive": 3}\n',
    b'{"other": 1}\n', b"GET / HTTP/1.1\r\n\r\n",
]  # fmt: skip


@pytest.fixture
def raised(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What threads raised: nothing may print a traceback or end a server's thread."""
    seen: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    for module in (members, mesh_server):
        monkeypatch.setattr(module, "HELLO_SECONDS", SECONDS, raising=False)
    return seen


def connect(port: int) -> socket.socket:
    connected = socket.create_connection(("127.0.0.1", port), timeout=10)
    while not connected.recv(1).endswith(b"\n"):
        pass
    return connected


def seconds_until_closed(connected: socket.socket, send: Callable[[], object]) -> float:
    """How long the other side keeps a connection on which `send` is called again and again."""
    began = time.monotonic()
    with connected, contextlib.suppress(ConnectionError):
        connected.settimeout(0.05)
        while time.monotonic() - began < 20:
            with contextlib.suppress(TimeoutError):
                if not connected.recv(1 << 16):
                    break
            send()
    return time.monotonic() - began


def cost_of_strangers(port: int) -> Iterator[float]:
    """Seconds for which each of some strangers is kept."""
    draw = random.Random(7)
    slow = connect(port)
    yield seconds_until_closed(slow, lambda: slow.send(b"x"))
    endless = connect(port)
    yield seconds_until_closed(endless, lambda: endless.send(b"x" * 100_000))
    silent = connect(port)
    yield seconds_until_closed(silent, lambda: None)
    for line in [*LINES, *(draw.randbytes(draw.randint(1, 6000)) for _ in range(20))]:
        odd = connect(port)
        with contextlib.suppress(OSError):
            odd.sendall(line)
            odd.shutdown(socket.SHUT_WR)
        yield seconds_until_closed(odd, lambda: None)


def place(port: int) -> NodePlace:
    return NodePlace(1, 2, 1, "127.0.0.1", port)


def test_strangers_are_sent_away_and_the_nodes_still_join(raised: list[Any]) -> None:
    listener = listen(0)
    port = listener.getsockname()[1]
    job = JobMembers(2, listener, SECRET)
    waits = threading.Thread(target=job.wait, args=(60.0,), daemon=True)
    waits.start()
    assert max(cost_of_strangers(port)) < MOST_SECONDS
    crowd = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(150)]
    connection = join(place(port), 20.0, SECRET, MeshServer(1))
    assert job.present() == [1] and job.identities[1]["address"] == "127.0.0.1"
    connection.close()
    for each in crowd:
        each.close()
    job.stop_waiting()
    waits.join(10)
    assert not waits.is_alive() and raised == []


def test_who_is_not_node_0_is_left(raised: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A program at node 0's port that sends a byte now and then does not hold a node for ever."""
    monkeypatch.setattr(worker, "LEFT_BEHIND_SECONDS", SECONDS)
    stranger = socket.create_server(("127.0.0.1", 0))

    def drip() -> None:
        with contextlib.suppress(OSError):
            while True:
                kept.append(stranger.accept()[0])
                threading.Thread(target=drip_to, args=(kept[-1],), daemon=True).start()

    def drip_to(connected: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connected.send(b"x")
                time.sleep(0.05)

    kept: list[socket.socket] = []
    threading.Thread(target=drip, daemon=True).start()
    began = time.monotonic()
    with pytest.raises(OSError):
        join(place(stranger.getsockname()[1]), SECONDS, b"", MeshServer(1))
    assert time.monotonic() - began < MOST_SECONDS
    stranger.close()
    for each in kept:
        each.close()


def test_a_node_s_server_survives_strangers(raised: list[Any]) -> None:
    server = MeshServer(3)
    assert max(cost_of_strangers(server.port)) < MOST_SECONDS
    with connect(server.port) as asking:
        asking.sendall(b'{"send": 0.1}\n')
        assert asking.recv(1)
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.connect(("127.0.0.1", server.port))
    draw = random.Random(7)
    for size in (0, 1, 43, 44, 45, 9000):
        datagrams.send(draw.randbytes(size))
    (found,) = _ports(peer(3, server.port))
    assert found["error"] is None and raised == []


def peer(rank: int, port: int) -> dict[str, Any]:
    return {"rank": rank, "address": "127.0.0.1", "mesh_port": port, "rendezvous_port": None}


@pytest.mark.parametrize(
    "said",
    [b"", b"x\n", b"[]\n", b'{"node": 4}\n', b'{"node": 3}\n',
     b'{"node": 3}\n{"bytes": null}\n', b'{"node": 3}\n{"bytes": [1e999]}\n'],
)  # fmt: skip
def test_no_bandwidth_is_made_up_of_another_program(said: bytes, raised: list[Any]) -> None:
    """Neither of one that took the port, nor of a server whose connections strangers hold."""
    stranger = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                with stranger.accept()[0] as accepted:
                    accepted.sendall(said)
                    accepted.shutdown(socket.SHUT_WR)
                    while accepted.recv(1 << 20):
                        pass

    threading.Thread(target=answer, daemon=True).start()
    arguments = {"peers": [peer(3, stranger.getsockname()[1])], "seconds": 0.2, "streams": 2}
    with pytest.raises((OSError, ValueError, TypeError, KeyError, OverflowError)):
        probe_tcp_bandwidth.probe(arguments)
    stranger.close()
    assert raised == []


def test_bandwidth_of_a_node_is_measured(raised: list[Any]) -> None:
    server = MeshServer(3)
    arguments = {"peers": [peer(3, server.port)], "seconds": 0.5, "streams": 2}
    found = probe_tcp_bandwidth.probe(json.loads(json.dumps(arguments)))
    assert found["slower_gb_per_s"] > 0 and raised == []
