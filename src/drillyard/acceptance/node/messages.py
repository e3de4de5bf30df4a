"""Messages between node 0 and the others: JSON objects, one per line, of bounded length.

Where the job's launch directory has a secret (that of its agents), both sides of a new connection
prove that they know it. Lines after that are neither signed nor encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import select
import socket
import stat
import threading
import time
from pathlib import Path
from typing import Any

MOST_BYTES = 16 << 20
"""Of one message of a node that has joined: an observation of a thousand ranks has about 1 MB."""
HELLO_BYTES = 4096
HELLO_SECONDS = 10.0
"""Of one message before."""
BEAT_SECONDS = 2.0
SILENT_SECONDS = 20.0
"""Without any message for so long, a node is lost."""


class NodeConnection:
    """A connected socket that carries messages. Any thread may send. Until both sides have joined,
    a message has `hello_seconds` in all and HELLO_BYTES."""

    def __init__(self, connected: socket.socket, hello_seconds: float = HELLO_SECONDS) -> None:
        self.socket = connected
        self._hello_seconds: float | None = hello_seconds
        connected.settimeout(hello_seconds)
        with contextlib.suppress(OSError):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lines = connected.makefile("rb")
        self._sending = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        """Raises OSError where the other side is gone, or reads nothing."""
        line = json.dumps(message).encode() + b"\n"
        with self._sending:
            self.socket.sendall(line)

    def joined(self, silent_seconds: float) -> None:
        """From now on messages may be long; after `silent_seconds` without a byte it is lost."""
        self._hello_seconds = None
        self.socket.settimeout(silent_seconds)

    def receive(self) -> dict[str, Any]:
        """The next message. Raises OSError where the connection ended or was silent for too long,
        and ValueError for what is not a message."""
        if self._hello_seconds is None:
            longest = MOST_BYTES
            line = self._lines.readline(longest)
        else:
            longest = HELLO_BYTES
            line = read_line(self.socket, self._hello_seconds)
        if not line.endswith(b"\n"):
            if len(line) == longest:
                raise ValueError("sent a message that is too long")
            raise ConnectionError("its connection ended")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            raise ValueError("sent something that is not a message") from None
        if not isinstance(message, dict):
            raise ValueError("sent something that is not a message")
        return message

    def close(self) -> None:
        """End the connection, also for a thread that receives."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def read_line(connected: socket.socket, seconds: float) -> bytes:
    """The next line, or what came of it before HELLO_BYTES or the end; nothing of what follows is
    read. Raises OSError where it is not complete within `seconds`, however slowly it comes."""
    deadline = time.monotonic() + seconds
    line = b""
    while not line.endswith(b"\n") and len(line) < HELLO_BYTES:
        left = deadline - time.monotonic()
        if left <= 0:
            raise socket.timeout("timed out")
        connected.settimeout(left)
        if not (byte := connected.recv(1)):
            break
        line += byte
    connected.settimeout(seconds)
    return line


def lost_reason(error: Exception, seconds: float = SILENT_SECONDS) -> str:
    """Why a connection is lost, as a clause about the node at its other end. `seconds`: the longest
    silence that was allowed."""
    if isinstance(error, (TimeoutError, socket.timeout)):
        return f"was silent for {seconds:.0f} s"
    if isinstance(error, ConnectionResetError):
        return "its connection ended"
    return str(error)


def shared_secret(launch_directory: Path) -> bytes:
    """The secret of the run's agents; empty where there is none."""
    path = launch_directory / "secret"
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return b""
            return file.read(HELLO_BYTES).strip()
    except OSError:
        return b""


def proof(secret: bytes, speaker: str, nonce: str) -> str:
    """What `speaker` sends to show that it knows the secret: an HMAC-SHA256 over the other side's
    nonce."""
    text = json.dumps(["drillyard-acceptance", speaker, nonce])
    return hmac.new(secret, text.encode(), "sha256").hexdigest()


def is_proof(found: object, secret: bytes, speaker: str, nonce: str) -> bool:
    """Whether `found` is what `proof` returns."""
    return isinstance(found, str) and hmac.compare_digest(
        found.encode(), proof(secret, speaker, nonce).encode()
    )


def pause(seconds: float) -> None:
    """Sleep, by a relative time: `time.sleep` waits for a moment of the clock, and fails where a
    program fakes that (a node's clock is what is tested here)."""
    select.select([], [], [], seconds)


def listen(port: int, backlog: int = 1024) -> socket.socket:
    """A socket that listens on all addresses, of both families where the host has both."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
            )
    return socket.create_server(("", port), backlog=backlog)


def plain_address(address: str) -> str:
    """An IPv4 address as such, where a socket of both families has it in IPv6's form."""
    return address[7:] if address.startswith("::ffff:") and "." in address else address
