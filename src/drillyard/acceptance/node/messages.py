"""Messages between node 0 and the others: JSON objects, one per line, of bounded length."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from typing import Any

MOST_BYTES = 16 << 20
"""Of one message: an observation of a thousand ranks has about 1 MB."""


class NodeConnection:
    """A connected socket that carries messages. Any thread may send."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._lines = connected.makefile("rb")
        self._sending = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        """Raises OSError where the other side is gone."""
        with self._sending:
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """The next message; None at the end. Raises OSError, and ValueError for what is not a
        message."""
        line = self._lines.readline(MOST_BYTES)
        if not line.endswith(b"\n"):
            if len(line) == MOST_BYTES:
                raise ValueError("a message is too long")
            return None
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("a message is not a JSON object")
        return message

    def close(self) -> None:
        """End the connection, also for a thread that receives."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
