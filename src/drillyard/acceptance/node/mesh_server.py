"""What every node offers the others for the probes of scope `mesh`: its clock and an echo over UDP,
and over TCP a port that says whose it is and takes data in.

Anybody who can reach the node may use it: an answer is never longer than its question, data are
thrown away, and connections are few and short.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import threading
import time
from typing import Any

from .messages import HELLO_SECONDS, listen, pause, read_line

QUESTION = struct.Struct("!4sQ28x")
"""A question over UDP: `time` or `size`, and its number. `size` has more bytes after it."""
ANSWER = struct.Struct("!4sQqdd")
"""The same, then: the node's rank for `time`, else the bytes that came; the wall clock when the
question was read, and when the answer was written."""
assert QUESTION.size >= ANSWER.size

_MOST_CONNECTIONS = 256
_CONNECTION_SECONDS = 30.0
_LINGER_SECONDS = 2.0
_BLOCK_BYTES = 1 << 20
WINDOW_SECONDS = 0.1


class MeshServer:
    """The servers of one node, in threads of its program. `port` is one that the kernel chose, for
    UDP and TCP; `rendezvous_port` the job's own, None while this node does not listen on it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._slots = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        listener, datagrams = _one_port()
        self.port = int(listener.getsockname()[1])
        self.rendezvous_port: int | None = None
        threading.Thread(target=self._echo, args=(datagrams,), daemon=True).start()
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def listen_also(self, port: int) -> None:
        """Listen on the job's own port, too, unless another program does: node 0 may be on the same
        host."""
        if self.rendezvous_port is None:
            with contextlib.suppress(OSError):
                listener = listen(port)
                self.rendezvous_port = port
                threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _echo(self, datagrams: socket.socket) -> None:
        while True:
            try:
                data, peer = datagrams.recvfrom(65535)
                read_at = time.time()
                if len(data) < QUESTION.size:
                    continue
                kind, number = QUESTION.unpack_from(data)
                said = self._rank if kind == b"time" else len(data)
                datagrams.sendto(ANSWER.pack(kind, number, said, read_at, time.time()), peer)
            except OSError:
                pause(0.01)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connected, _ = listener.accept()
            except OSError:
                pause(0.1)
                continue
            if not self._slots.acquire(blocking=False):
                connected.close()
                continue
            threading.Thread(target=self._serve, args=(connected,), daemon=True).start()

    def _serve(self, connected: socket.socket) -> None:
        try:
            with connected, contextlib.suppress(OSError):
                connected.settimeout(_CONNECTION_SECONDS)
                connected.sendall(json.dumps({"node": self._rank}).encode() + b"\n")
                self._carry(connected, *_request(read_line(connected, HELLO_SECONDS)))
        finally:
            self._slots.release()

    def _carry(self, connected: socket.socket, asked: str, seconds: float) -> None:
        """`receive`: take data in for so many seconds, then tell how many came; `send`: send."""
        if asked == "receive":
            counts = received(connected, seconds)
            connected.sendall(json.dumps({"bytes": counts}).encode() + b"\n")
            # Closed with data unread, the connection would be reset before the answer is read.
            received(connected, _LINGER_SECONDS)
        elif asked == "send":
            send_for(connected, seconds)


def _request(line: bytes) -> tuple[str, float]:
    """What a line asks for, and for how many seconds; nothing for a line that is not a request."""
    try:
        ((asked, seconds),) = json.loads(line).items()
        return asked, min(max(0.0, float(seconds)), _CONNECTION_SECONDS)
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return "", 0.0


def greeting(connected: socket.socket, seconds: float) -> dict[str, Any]:
    """What the program at the other end says of itself. Raises OSError, and ValueError for another
    program."""
    line = read_line(connected, seconds)
    if not line:
        raise ConnectionError("ended the connection: another program, or too many connections")
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise ValueError("another program answers there")
    return said


def received(connected: socket.socket, seconds: float) -> list[int]:
    """Take data in for `seconds` from the first byte on; returns the bytes of each tenth of a
    second."""
    room = bytearray(_BLOCK_BYTES)
    counts = [connected.recv_into(room, 1)]
    if not counts[0]:
        return counts
    began = time.monotonic()
    while (passed := time.monotonic() - began) < seconds:
        connected.settimeout(seconds - passed + 0.01)
        try:
            count = connected.recv_into(room)
        except OSError:
            break
        if not count:
            break
        at = int((time.monotonic() - began) / WINDOW_SECONDS)
        counts += [0] * (at + 1 - len(counts))
        counts[at] += count
    counts += [0] * (int(seconds / WINDOW_SECONDS + 0.5) - len(counts))
    connected.settimeout(_CONNECTION_SECONDS)
    return counts


def send_for(connected: socket.socket, seconds: float) -> None:
    """Send for `seconds`, or until the other side says something or ends the connection."""
    ends_at = time.monotonic() + seconds
    block = bytes(_BLOCK_BYTES)
    with contextlib.suppress(OSError):
        ready = select.poll()
        ready.register(connected, select.POLLIN | select.POLLOUT)
        while (left := ends_at - time.monotonic()) > 0:
            found = ready.poll(left * 1000)
            if any(events & ~select.POLLOUT for _, events in found):
                return
            if found:
                connected.send(block)


def _one_port() -> tuple[socket.socket, socket.socket]:
    """A free port, for TCP and UDP alike."""
    for _ in range(50):
        listener = listen(0)
        datagrams = socket.socket(listener.family, socket.SOCK_DGRAM)
        if listener.family == socket.AF_INET6:
            datagrams.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            datagrams.bind(("", listener.getsockname()[1]))
            return listener, datagrams
        except OSError:
            listener.close()
            datagrams.close()
    raise OSError("found no port that is free for both TCP and UDP")
