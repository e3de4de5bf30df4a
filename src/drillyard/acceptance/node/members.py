"""The nodes of a job as node 0 sees them: who has joined, who is lost and why.

Everybody who can reach the port may connect. Before a node has joined, its messages are short, it
has a few seconds, and only so many wait at the same time. Each rank joins once; a rank that is lost
stays out.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from typing import Any

from .messages import (
    BEAT_SECONDS,
    HELLO_SECONDS,
    SILENT_SECONDS,
    NodeConnection,
    is_proof,
    lost_reason,
    pause,
    plain_address,
    proof,
)

_MOST_STRANGERS = 64
"""Connections beside one per node that may wait to join."""
_MOST_CHARACTERS = 255
"""Of a name."""


class JobMembers:
    """Accepts nodes, receives what they send, and notices those that are lost. `events` has each
    message with the rank of its node, in order; None is the news that the node is lost, and of rank
    -1 that the job ends."""

    def __init__(self, nodes: int, listener: socket.socket, secret: bytes) -> None:
        self.nodes = nodes
        self.events: queue.SimpleQueue[tuple[int, dict[str, Any] | None]] = queue.SimpleQueue()
        self.identities: dict[int, dict[str, Any]] = {}
        self.lost: dict[int, str] = {}
        self.refused: dict[int, str] = {}
        """Ranks as which a second program wanted to join, and from where."""
        self._listener, self._secret = listener, secret
        self._connections: dict[int, NodeConnection] = {}
        self._heard_at: dict[int, float] = {}
        self._strangers: list[NodeConnection] = []
        self._joining = True
        self._changed = threading.Condition()

    def wait(self, seconds: float) -> list[int]:
        """Accept nodes until all are there or `seconds` have passed; returns the missing ranks."""
        threading.Thread(target=self._accept, daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()
        with self._changed:
            self._changed.wait_for(
                lambda: len(self.identities) == self.nodes or not self._joining, seconds
            )
            self._joining = False
            return [rank for rank in range(self.nodes) if rank not in self.identities]

    def stop_waiting(self) -> None:
        """End `wait`."""
        with self._changed:
            self._joining = False
            self._changed.notify_all()

    def present(self) -> list[int]:
        """Ranks of the nodes that have joined and are not lost."""
        with self._changed:
            return sorted(self._connections)

    def send(self, rank: int, message: dict[str, Any]) -> None:
        """Send a message; a node that cannot be reached is lost."""
        with self._changed:
            connection = self._connections.get(rank)
        if connection is None:
            self.events.put((rank, None))
            return
        try:
            connection.send(message)
        except OSError as error:
            self.lose(rank, lost_reason(error))

    def lose(self, rank: int, why: str) -> None:
        """Leave a node out from now on."""
        with self._changed:
            connection = self._connections.pop(rank, None)
            if connection is None:
                return
            self.lost[rank] = why
        # Should it run on later, it knows.
        _say(connection, {"left_out": why})
        connection.close()
        self.events.put((rank, None))

    def silent_seconds(self, rank: int) -> float:
        """How long nothing was heard from a node."""
        return time.monotonic() - self._heard_at.get(rank, 0.0)

    def end(self, code: int) -> None:
        """Tell the nodes that the job is over."""
        with self._changed:
            connections = list(self._connections.values())
        for connection in connections:
            _say(connection, {"end": code})

    def _beat(self) -> None:
        while True:
            for rank in self.present():
                self.send(rank, {"beat": 1})
            pause(BEAT_SECONDS)

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                pause(0.1)
                continue
            connection = NodeConnection(accepted, HELLO_SECONDS)
            with self._changed:
                self._strangers.append(connection)
                if len(self._strangers) > self.nodes + _MOST_STRANGERS:
                    self._strangers.pop(0).close()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: NodeConnection) -> None:
        rank: int | None = None
        with contextlib.suppress(OSError, ValueError, RecursionError):
            rank = self._greet(connection)
        with self._changed:
            if connection in self._strangers:
                self._strangers.remove(connection)
        if rank is None:
            connection.close()
            return
        try:
            while True:
                message = connection.receive()
                self._heard_at[rank] = time.monotonic()
                if "beat" not in message:
                    self.events.put((rank, message))
        except (OSError, ValueError) as error:
            self.lose(rank, lost_reason(error))

    def _greet(self, connection: NodeConnection) -> int | None:
        """The rank as which the other side joins; None where it is refused."""
        nonce = os.urandom(16).hex()
        connection.send({"node": 0, "nonce": nonce})
        hello = connection.receive()
        rank = hello.get("joins")
        if type(rank) is not int or not 0 <= rank < self.nodes:
            return None
        ports = hello.get("mesh_port"), hello.get("rendezvous_port")
        if not _is_port(ports[0]) or not (ports[1] is None or _is_port(ports[1])):
            return None
        if self._secret and not is_proof(hello.get("proof"), self._secret, f"node {rank}", nonce):
            connection.send({"refused": "does not know the secret of this run"})
            return None
        answer: dict[str, Any] = {"joined": rank}
        if self._secret:
            answer["proof"] = proof(self._secret, "node 0", str(hello.get("nonce")))
        peer = plain_address(connection.socket.getpeername()[0])
        with self._changed:
            if rank in self.identities or not self._joining:
                late = "the job began without it"
                why = f"a program at {peer} wanted to join as this node, too"
                if rank in self.identities:
                    late = "another program has joined as this node"
                    self.refused[rank] = why
                connection.send({"refused": late})
                return None
            connection.send(answer)
            connection.joined(SILENT_SECONDS)
            self.identities[rank] = {
                "rank": rank,
                "name": _printable(hello.get("name")),
                "address": peer,
                "host": _printable(hello.get("host")),
                "rack": _printable(hello.get("rack") or ""),
                "mesh_port": ports[0],
                "rendezvous_port": ports[1],
            }
            self._heard_at[rank] = time.monotonic()
            self._connections[rank] = connection
            if rank != 0 and 0 in self.identities:
                self._place_node_0(connection)
            elif rank == 0 and self._connections.keys() - {0}:
                self._place_node_0(self._connections[min(self._connections.keys() - {0})])
            self._changed.notify_all()
        return rank

    def _place_node_0(self, connection: NodeConnection) -> None:
        """Node 0 has joined by loopback; others reach it where this connection of theirs ended."""
        self.identities[0]["address"] = plain_address(connection.socket.getsockname()[0])


def _is_port(value: object) -> bool:
    return type(value) is int and 0 < value < 1 << 16


def _printable(name: object) -> str:
    """A name that a node gave itself, fit for a terminal."""
    return "".join(each for each in str(name) if each.isprintable())[:_MOST_CHARACTERS]


def _say(connection: NodeConnection, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        connection.socket.settimeout(1.0)
        connection.send(message)
