"""Protocol between the agents of a run: authenticated JSON lines over TCP, with a heartbeat in both
directions.

Node 0 listens on the first free one of 16 ports; the others try them in turn. Every line is `MAC
JSON`: HMAC-SHA256 over the line's number and its JSON, under a key that only those who know the
run's secret can derive.

| line | from | its key is derived from the secret and | content |
|---|---|---|---|
| hello | node | nothing else | which node this is, and a nonce |
| answer | leader | the node's nonce | another nonce, and the port that the leader listens on |
| 0, 1, ... | node | both nonces | `join`, then messages |
| 0, 1, ... | leader | both nonces | the epoch or a refusal, then messages |

So a line that is unauthenticated, changed, repeated, dropped, moved, sent back or taken from
another connection has a wrong MAC: it ends that connection, and the node joins again. The port in
the answer reveals a program that took an earlier port and relays. Nothing is encrypted
(docs/security.md says why): messages contain attempt numbers, ports, and results of commands.
Either side considers the other lost after half of `lease_seconds` without a message.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from drillyard.supervise.sockets import wait_for

NUM_PORTS = 16
HANDSHAKE_LINE_BYTES = 4096
"""The longest line of a peer that is not authenticated yet. A hello has less than 600 bytes."""
_LONGEST_LINE = 1 << 20
_READ_BYTES = 1 << 16
_CONNECT_SECONDS = 3.0


class ConnectionLost(Exception):
    """The connection is lost, or the other side is not of this run."""


class JoinRefused(ConnectionLost):
    """The leader of this run does not accept this node; its reason."""


class Connection:
    """Non-blocking messages over a socket. Silence of `silence_seconds` is a loss.

    Lines may be long only after the first authentic one.
    """

    def __init__(
        self, sock: socket.socket, silence_seconds: float, sending_key: bytes, receiving_key: bytes
    ) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._silence_seconds = silence_seconds
        self._sending_key = sending_key
        self._receiving_key = receiving_key
        self._num_sent = self._num_received = 0
        self._received = b""
        self._unsent = b""
        self._received_at = self._beat_at = time.monotonic()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, **message: Any) -> None:
        """Send a message. Raises ConnectionLost."""
        self._unsent += seal(self._sending_key, self._num_sent, message) + b"\n"
        self._num_sent += 1
        self.flush()

    def flush(self) -> bool:
        """Send queued lines; returns whether all are sent. Raises ConnectionLost."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            if len(self._unsent) > _LONGEST_LINE:
                raise ConnectionLost("the other side reads nothing") from None
        except OSError as error:
            raise ConnectionLost(str(error)) from None
        return not self._unsent

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have come, without heartbeats. Raises ConnectionLost."""
        if b"\n" not in self._received:
            self._read()
        return [message for message in iter(self._next, None) if "beat" not in message]

    def wait_for_message(self, seconds: float) -> dict[str, Any]:
        """Return the next message; later ones stay for `receive`. Raises ConnectionLost where none
        comes in time."""
        deadline = time.monotonic() + seconds
        while (message := self._next()) is None:
            if (left := deadline - time.monotonic()) <= 0:
                raise ConnectionLost("no answer")
            wait_for([self], left)
            self._read()
        return message

    def beat(self) -> None:
        """Send queued lines, and a heartbeat when one is due. Raises ConnectionLost, also for a
        silent other side."""
        self.flush()
        now = time.monotonic()
        if now - self._received_at > self._silence_seconds:
            raise ConnectionLost(f"silent for {now - self._received_at:.0f} s")
        if now - self._beat_at >= self._silence_seconds / 5:
            self._beat_at = now
            self.send(beat=1)

    def close(self) -> None:
        """Send what can be sent at once, and close."""
        with contextlib.suppress(ConnectionLost):
            self.flush()
        self._socket.close()

    def _read(self) -> None:
        longest = _LONGEST_LINE if self._num_received else HANDSHAKE_LINE_BYTES
        try:
            data = self._socket.recv(min(longest, _READ_BYTES))
        except BlockingIOError:
            return
        except OSError as error:
            raise ConnectionLost(str(error)) from None
        if not data:
            raise ConnectionLost("closed by the other side")
        self._received += data
        if len(self._received) > longest and b"\n" not in self._received:
            raise ConnectionLost(f"a line of more than {longest} bytes")

    def _next(self) -> dict[str, Any] | None:
        line, newline, rest = self._received.partition(b"\n")
        if not newline:
            return None
        message = unseal(self._receiving_key, self._num_received, line)
        self._received = rest
        self._num_received += 1
        # Only an authentic line shows that the other side is alive.
        self._received_at = time.monotonic()
        return message


def seal(key: bytes, number: int, message: dict[str, Any]) -> bytes:
    """Encode a message as line `number` of a connection, without its newline."""
    text = json.dumps(message).encode()
    return _mac(key, number, text) + b" " + text


def unseal(key: bytes, number: int, line: bytes) -> dict[str, Any]:
    """Decode line `number`. Raises ConnectionLost where the key's owner did not send it as that
    line."""
    mac, _, text = line.partition(b" ")
    if not hmac.compare_digest(mac, _mac(key, number, text)):
        raise ConnectionLost("a line that is not from this run, or was changed on its way")
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        raise ConnectionLost("not a line of JSON") from None
    if not isinstance(message, dict):
        raise ConnectionLost("not a message")
    return message


def _mac(key: bytes, number: int, text: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + text, "sha256").hex().encode()


def derive_key(secret: bytes, purpose: str, *nonces: str) -> bytes:
    """Derive the key for `purpose`, bound to the nonces of the handshake so far."""
    return hmac.digest(secret, json.dumps(["drillyard-agent", purpose, *nonces]).encode(), "sha256")


def join(
    leader: str,
    first_port: int,
    secret: bytes,
    described: dict[str, Any],
    silence_seconds: float,
    interrupted: Callable[[], bool] = lambda: False,
) -> tuple[Connection, int]:
    """Find the leader of this run and join it as the node that is `described`; returns its
    connection and epoch.

    A host that answers nothing costs three seconds per port; `interrupted` is called before each.
    Raises ConnectionLost when the leader is on none of the ports; JoinRefused when it is, and
    refuses.
    """
    last = ""
    for port in range(first_port, first_port + NUM_PORTS):
        if interrupted():
            break
        try:
            sock = socket.create_connection((leader, port), timeout=_CONNECT_SECONDS)
        except OSError as error:
            last = f"{leader}: {error}"
            if isinstance(error, socket.gaierror):
                break
            continue
        try:
            return _shake_hands(sock, secret, described, silence_seconds)
        except (OSError, ConnectionLost) as error:
            sock.close()
            if isinstance(error, JoinRefused):
                raise
            last = f"{leader} port {port}: {error}"
    raise ConnectionLost(last)


def _shake_hands(
    sock: socket.socket, secret: bytes, described: dict[str, Any], silence_seconds: float
) -> tuple[Connection, int]:
    nonce = os.urandom(16).hex()
    keys = derive_key(secret, "hello"), derive_key(secret, "answer", nonce)
    connection = Connection(sock, silence_seconds, *keys)
    connection.send(**described, nonce=nonce)
    answer = connection.wait_for_message(_CONNECT_SECONDS)
    if (port := answer.get("port")) != sock.getpeername()[1]:
        # A relay could delay or cut messages at any time.
        raise ConnectionLost(
            f"another program listens there and relays to the leader on port {port}"
        )
    nonces = nonce, str(answer.get("nonce"))
    keys = derive_key(secret, "node", *nonces), derive_key(secret, "leader", *nonces)
    connection = Connection(sock, silence_seconds, *keys)
    connection.send(join=1)
    answer = connection.wait_for_message(_CONNECT_SECONDS)
    if "refused" in answer:
        raise JoinRefused(str(answer["refused"]))
    if not isinstance(epoch := answer.get("epoch"), int):
        raise ConnectionLost("no epoch")
    return connection, epoch
