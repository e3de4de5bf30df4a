"""The nodes of a run as their leader deals with them: its own command, and those of other agents over a connection."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Any

from .borrowed import launched
from .node import Node
from .wire import Connection, ConnectionLost

_SECONDS_TO_SAY_GOODBYE = 2.0


class Member:
    """One node of the run."""

    ready = False
    """Nothing of an earlier round runs there, and a command may be started."""
    connection: Connection | None = None

    def start(self, epoch: int, round_number: int, address: str, port: int) -> None:
        """Start the command of a round."""
        raise NotImplementedError

    def stop(
        self, number: int, patience_seconds: float, why: str | None, elsewhere: launched.FailureElsewhere | None
    ) -> None:
        """Send it a signal, and kill it after a while. `why`: it is at fault; `elsewhere`: another node is."""
        raise NotImplementedError

    def turn(self, on_request: Callable[[int, bool], None]) -> list[dict[str, Any]]:
        """Look what happened: the ends of commands; stop requests are handed on. Raises ConnectionLost."""
        raise NotImplementedError

    def leave(self, code: int) -> None:
        """Have its agent exit."""

    def close(self) -> None:
        """Have no more to do with it."""


class LocalMember(Member):
    """The leader's own node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.ready = True

    def start(self, epoch: int, round_number: int, address: str, port: int) -> None:
        self.ready = False
        self._node.start(epoch, round_number, address, port)

    def stop(
        self, number: int, patience_seconds: float, why: str | None, elsewhere: launched.FailureElsewhere | None
    ) -> None:
        self._node.stop(number, patience_seconds, why, elsewhere)

    def turn(self, on_request: Callable[[int, bool], None]) -> list[dict[str, Any]]:
        self._node.tick()
        if self.ready or self._node.report is None:
            return []
        self.ready = True
        return [self._node.report]


class RemoteMember(Member):
    """A node whose agent has joined. It becomes ready when it says so, and with the end of each round."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._connection = connection
        self._failed: ConnectionLost | None = None

    def start(self, epoch: int, round_number: int, address: str, port: int) -> None:
        self.ready = False
        self._send(start={"epoch": epoch, "round": round_number, "address": address, "port": port})

    def stop(
        self, number: int, patience_seconds: float, why: str | None, elsewhere: launched.FailureElsewhere | None
    ) -> None:
        told = {"signal": int(number), "patience_seconds": patience_seconds, "why": why}
        self._send(stop={**told, "elsewhere": None if elsewhere is None else dataclasses.asdict(elsewhere)})

    def turn(self, on_request: Callable[[int, bool], None]) -> list[dict[str, Any]]:
        if self._failed is not None:
            raise self._failed
        ends = []
        for message in self._connection.receive():
            if "ready" in message:
                self.ready = True
            elif "exited" in message:
                self.ready = True
                ends.append(message["exited"])
            elif "asked" in message:
                on_request(int(message["asked"]["signal"]), bool(message["asked"]["insisted"]))
        self._connection.flush()
        self._connection.beat()
        return ends

    def leave(self, code: int) -> None:
        self._send(leave=code)
        deadline = time.monotonic() + _SECONDS_TO_SAY_GOODBYE
        with contextlib.suppress(ConnectionLost):
            while self._connection.wants_to_write and time.monotonic() < deadline:
                self._connection.flush()
                time.sleep(0.01)
        self._connection.close()

    def close(self) -> None:
        self._connection.close()

    def _send(self, **message: Any) -> None:
        # A loss is told in the next turn, where the leader reckons with it.
        try:
            self._connection.send(**message)
        except ConnectionLost as lost:
            self._failed = lost
