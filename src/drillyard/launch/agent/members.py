"""Nodes of a run as the leader sees them: its own NodeCommand, and those of other agents."""

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
class RemoteMember:
    """Command of another node, by way of its agent; the methods are those of NodeCommand.
    `_on_request` gets the stop requests of that node."""

    _node: int
    connection: Connection
    _on_request: Callable[[int, bool], None]
    busy: bool = True
    """True until its agent reports that it is ready, and during an attempt."""

    def start(self, start: StartMessage) -> None:
        self.busy = True
        self._send(start=asdict(start))

    def stop(self, stop: StopMessage) -> None:
        fields = asdict(stop)
        self._send(stop={"patience_seconds": fields.pop("grace_seconds"), **fields})

    def tick(self) -> list[dict[str, Any]]:
        """Return reports of ended commands. Raises ConnectionLost."""
        ends = []
        for message in self.connection.receive():
            if "ready" in message:
                self.busy = False
            elif "exited" in message:
                ends.append(parse_report(message["exited"], self._node))
                self.busy = False
            elif "asked" in message:
                self._on_request(*parse_request(message["asked"]))
        self.connection.beat()
        return ends

    def leave(self, code: int) -> None:
        self._send(leave=code)
        deadline = time.monotonic() + _SECONDS_TO_SAY_GOODBYE
        with contextlib.suppress(ConnectionLost):
            while not self.connection.flush() and time.monotonic() < deadline:
                time.sleep(0.01)
        self.connection.close()

    def _send(self, **message: Any) -> None:
        # The next tick raises it again, where the leader expects it.
        with contextlib.suppress(ConnectionLost):
            self.connection.send(**message)


@dataclass(repr=False)
class Members:
    """The nodes that have joined, node 0 from the beginning. `start`: the start of the submission
    that they must name; `hosts`: the names that the scheduler gave them."""

    _job: Job
    here: dict[int, NodeCommand | RemoteMember]
    _hosts: dict[int, str]
    _start: dict[str, str]
    _secret: bytes
    _on_request: Callable[[int, bool], None]
    _listener: Listener | None = None

    def listen(self) -> None:
        """Let other nodes join from now on. Raises OSError when no port is free."""
        allow_open_files(2 * self._job.nodes + 2 * MAX_UNAUTHENTICATED + _OTHER_FILES)
        self._listener = Listener(self._job.port, self._secret, self._job.lease_seconds / 2)

    @property
    def sources(self) -> list[Pollable]:
        handshakes = [] if self._listener is None else self._listener.sources
        return [*handshakes, *(each.connection for each in self._remote())]

    def named(self, nodes: Iterable[int]) -> dict[int, str]:
        """Map nodes to their hosts; an empty name where none is known."""
        return {node: self._hosts.get(node, "") for node in nodes}

    def admit(self, epoch: int) -> None:
        """Add the nodes that have authenticated, and send them the epoch or the reason why they are
        refused."""
        for peer in [] if self._listener is None else self._listener.authenticated():
            refusal = self._refusal(peer)
            # If the node is gone, the next tick drops it, and the node joins again.
            with contextlib.suppress(ConnectionLost):
                peer.connection.send(
                    **({"epoch": epoch} if refusal is None else {"refused": refusal})
                )
            if refusal is None:
                node = peer.hello["node"]
                self.here[node] = RemoteMember(node, peer.connection, self._on_request)
                self._hosts[node] = peer.hello["host"]
            else:
                peer.connection.close()

    def lose(self, node: int) -> None:
        """Drop a node and close its connection; it may join again."""
        if isinstance(member := self.here.pop(node), RemoteMember):
            member.connection.close()

    def dismiss(self, code: int) -> None:
        """Make the other agents exit with a code, and stop listening."""
        for member in self._remote():
            member.leave(code)
        if self._listener is not None:
            self._listener.close()

    def _remote(self) -> list[RemoteMember]:
        return [each for each in self.here.values() if isinstance(each, RemoteMember)]

    def _refusal(self, peer: Handshake) -> str | None:
        node, host = peer.hello.get("node"), peer.hello.get("host")
        if not self._start.items() <= peer.hello.items():
            return "this agent belongs to another start of the run"
        if not isinstance(node, int) or not 0 < node < self._job.nodes:
            return f"there is no node {node} in a run of {self._job.nodes}"
        if not is_host(host):
            return (
                f"{str(host)[:100]!r} is no host name: use letters, digits, dots, hyphens and"
                " underscores"
            )
        if node in self.here:
            return f"node {node} is here already, on {self._hosts[node]}"
        return None
