"""The nodes of a run as their leader deals with them: its own command, and those of other agents over a connection."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from drillyard.supervise.sockets import Pollable, allow_open_files

from .job import Job
from .listener import MAX_UNAUTHENTICATED, Handshake, Listener
from .messages import StartMessage, StopMessage, is_host, parse_report, parse_request
from .node_command import NodeCommand
from .protocol import Connection, ConnectionLost

_SECONDS_TO_SAY_GOODBYE = 2.0
_OTHER_FILES = 128


@dataclass(eq=False)
class LocalMember:
    """The leader's own node. `address`: how the nodes reach it."""

    _node: NodeCommand
    _address: str
    connection: Connection | None = None
    ready: bool = True
    """Nothing of an earlier attempt runs there, and a command may be started."""

    def start(self, start: StartMessage) -> None:
        """Start the command of an attempt."""
        self.ready = False
        self._node.start(start, self._address)

    def stop(self, stop: StopMessage) -> None:
        """Send its command a signal, and kill it after a while. `why`: it is at fault; `elsewhere`: another node is."""
        self._node.stop(stop)

    def turn(self, on_request: Callable[[int, bool], None]) -> list[dict[str, Any]]:
        """Return reports of ended commands; pass stop requests on. Raises ConnectionLost."""
        self._node.tick()
        if self.ready or self._node.report is None:
            return []
        self.ready = True
        return [self._node.report]

    def leave(self, code: int) -> None:
        """Make its agent exit."""

    def close(self) -> None:
        """Close its connection."""


@dataclass(eq=False)
class RemoteMember:
    """A node whose agent has joined. It becomes ready when it says so, and with the end of each attempt."""

    _node: int
    connection: Connection
    ready: bool = False
    _failed: ConnectionLost | None = None

    def start(self, start: StartMessage) -> None:
        self.ready = False
        self._send(start=asdict(start))

    def stop(self, stop: StopMessage) -> None:
        self._send(stop=asdict(stop))

    def turn(self, on_request: Callable[[int, bool], None]) -> list[dict[str, Any]]:
        if self._failed is not None:
            raise self._failed
        ends = []
        for message in self.connection.receive():
            if "ready" in message:
                self.ready = True
            elif "exited" in message:
                ends.append(parse_report(message["exited"], self._node))
                self.ready = True
            elif "asked" in message:
                on_request(*parse_request(message["asked"]))
        self.connection.flush()
        self.connection.beat()
        return ends

    def leave(self, code: int) -> None:
        self._send(leave=code)
        deadline = time.monotonic() + _SECONDS_TO_SAY_GOODBYE
        with contextlib.suppress(ConnectionLost):
            while self.connection.wants_to_write and time.monotonic() < deadline:
                self.connection.flush()
                time.sleep(0.01)
        self.connection.close()

    def close(self) -> None:
        self.connection.close()

    def _send(self, **message: Any) -> None:
        # A loss is raised in the next turn, where the leader expects it.
        try:
            self.connection.send(**message)
        except ConnectionLost as lost:
            self._failed = lost


@dataclass(repr=False)
class Members:
    """The nodes that have joined, node 0 from the beginning. `start`: the submission and attempt that they must name;
    `hosts`: the names that the scheduler gave them."""

    _job: Job
    here: dict[int, LocalMember | RemoteMember]
    _hosts: dict[int, str]
    _start: dict[str, str]
    _secret: bytes
    _listener: Listener | None = None

    def listen(self) -> None:
        """Let other nodes join from now on. Raises OSError when no port is free."""
        allow_open_files(2 * self._job.nodes + 2 * MAX_UNAUTHENTICATED + _OTHER_FILES)
        self._listener = Listener(self._job.port, self._secret, self._job.lease_seconds / 2)

    @property
    def sources(self) -> list[Pollable]:
        """For `wait_for`."""
        handshakes = [] if self._listener is None else self._listener.sources
        return [*handshakes, *(each.connection for each in self.here.values() if each.connection)]

    def wait_seconds(self, seconds: float) -> float:
        """How long to wait at most, of `seconds`, before the next `admit`."""
        return seconds if self._listener is None else self._listener.wait_seconds(seconds)

    def named(self, nodes: Iterable[int]) -> dict[int, str]:
        """The nodes with their hosts; an empty name where none is known."""
        return {node: self._hosts.get(node, "") for node in nodes}

    def admit(self, epoch: int) -> None:
        """Add the nodes that have authenticated, and send them the epoch or the reason why they are refused."""
        for peer in [] if self._listener is None else self._listener.authenticated():
            refusal = self._refusal(peer)
            answer = {"epoch": epoch} if refusal is None else {"refused": refusal}
            try:
                peer.connection.send(**answer)
            except ConnectionLost as lost:
                # It went away before it was answered; it will join again.
                refusal = str(lost)
            if refusal is not None:
                peer.connection.close()
                continue
            node = peer.hello["node"]
            self.here[node] = RemoteMember(node, peer.connection)
            self._hosts[node] = peer.hello["host"]

    def lose(self, node: int) -> None:
        """Drop a node and close its connection; it may join again."""
        self.here.pop(node).close()

    def dismiss(self, code: int) -> None:
        """Make the other agents exit with a code, and stop listening."""
        for member in self.here.values():
            member.leave(code)
        if self._listener is not None:
            self._listener.close()

    def _refusal(self, peer: Handshake) -> str | None:
        node, host = peer.hello.get("node"), peer.hello.get("host")
        if {key: peer.hello.get(key) for key in self._start} != self._start:
            return "this agent belongs to another start of the run"
        if not isinstance(node, int) or not 0 < node < self._job.nodes:
            return f"there is no node {node} in a run of {self._job.nodes}"
        if not is_host(host):
            return f"{str(host)[:100]!r} is no host name: use letters, digits, dots, hyphens and underscores"
        if node in self.here:
            return f"node {node} is here already, on {self._hosts[node]}"
        return None
