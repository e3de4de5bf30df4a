"""How the agents of a run talk: JSON lines over TCP, joined by a secret, with a heartbeat in both directions.

Node 0 listens on the first free one of 16 ports; the others try them in turn. Both sides prove that they know the run's
secret (HMAC-SHA256 over both sides' random numbers) before anything else is said, so the leader of another run, or
any other program that listens there, is never joined. What is said later is not signed: whoever can rewrite TCP streams
between the nodes of a cluster can do worse to a training run. No commands travel, only round numbers, ports and ends.

Either side that hears nothing for half of `lease_seconds` takes the other for lost. (TCP's own keepalive would wait for
the retransmissions of what is on its way, many minutes.)
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

NUM_PORTS = 16
_CONNECT_SECONDS = 3.0
_LONGEST_LINE = 1 << 20


class ConnectionLost(Exception):
    """The other side is gone, or what it says is not our language."""


class Refused(Exception):
    """The leader is this run's and does not want this node: its words."""


class Connection:
    """Messages over a socket that is never waited for. Silence of `silence_seconds` is a loss."""

    def __init__(self, sock: socket.socket, silence_seconds: float) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._silence_seconds = silence_seconds
        self._received = b""
        self._unsent = b""
        self._heard_at = self._beat_at = time.monotonic()

    def fileno(self) -> int:
        """For `select`."""
        return self._socket.fileno()

    @property
    def wants_to_write(self) -> bool:
        """Whether something waits until the other side reads."""
        return bool(self._unsent)

    def send(self, **message: Any) -> None:
        """Send a message. Raises ConnectionLost."""
        self._unsent += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send on what waits. Raises ConnectionLost."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            if len(self._unsent) > _LONGEST_LINE:
                raise ConnectionLost("the other side reads nothing") from None
        except OSError as error:
            raise ConnectionLost(str(error)) from None

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have come, heartbeats left out. Raises ConnectionLost."""
        messages: list[dict[str, Any]] = []
        try:
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return messages
        except OSError as error:
            raise ConnectionLost(str(error)) from None
        if not data:
            raise ConnectionLost("closed by the other side")
        self._heard_at = time.monotonic()
        *lines, self._received = (self._received + data).split(b"\n")
        if len(self._received) > _LONGEST_LINE:
            raise ConnectionLost("a line without end")
        for line in lines:
            messages.append(_message(line))
        return [message for message in messages if "beat" not in message]

    def beat(self) -> None:
        """Show life when it is time to, and see whether the other side does. Raises ConnectionLost."""
        now = time.monotonic()
        if now - self._heard_at > self._silence_seconds:
            raise ConnectionLost(f"silent for {now - self._heard_at:.0f} s")
        if now - self._beat_at >= self._silence_seconds / 5:
            self._beat_at = now
            self.send(beat=1)

    def close(self) -> None:
        """Send what can be sent at once, and end."""
        with contextlib.suppress(ConnectionLost):
            self.flush()
        self._socket.close()


def _message(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        raise ConnectionLost("not a line of JSON") from None
    if not isinstance(message, dict):
        raise ConnectionLost("not a message")
    return message


def new_nonce() -> str:
    """A number that is used once."""
    return os.urandom(16).hex()


def proof(secret: bytes, *words: str) -> str:
    """What only those who know the secret can say about `words`."""
    return hmac.new(secret, "\0".join(words).encode(errors="replace"), hashlib.sha256).hexdigest()


def same(proof_a: object, proof_b: str) -> bool:
    """Whether a proof is right."""
    return isinstance(proof_a, str) and hmac.compare_digest(proof_a.encode(errors="replace"), proof_b.encode())


def listen(first_port: int) -> socket.socket:
    """A listening socket on the first free port of the range, on all interfaces. Raises OSError when all are taken."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    last: OSError | None = None
    for port in range(first_port, first_port + NUM_PORTS):
        try:
            server = socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=1024)
        except OSError as error:
            last = error
            continue
        server.setblocking(False)
        return server
    raise OSError(f"ports {first_port} to {first_port + NUM_PORTS - 1} are all taken ({last})")


def join(
    leader: str,
    first_port: int,
    secret: bytes,
    told: dict[str, Any],
    silence_seconds: float,
    interrupted: Callable[[], bool] = lambda: False,
) -> tuple[Connection, int]:
    """Find the leader of this run and join it as the node that `told` describes; its connection and epoch.

    A host that answers nothing costs three seconds per port; `interrupted` is asked before each.
    Raises ConnectionLost when the leader is on none of the ports, and Refused.
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
            epoch = _shake_hands(sock, secret, told)
            return Connection(sock, silence_seconds), epoch
        except (OSError, ConnectionLost) as error:
            last = f"{leader} port {port}: {error}"
            sock.close()
        except Refused:
            sock.close()
            raise
    raise ConnectionLost(last)


def _shake_hands(sock: socket.socket, secret: bytes, told: dict[str, Any]) -> int:
    ours = new_nonce()
    lines = _Lines(sock)
    lines.send({"hello": {**told, "nonce": ours}})
    answer = lines.next()
    theirs = str(answer.get("nonce"))
    if not same(answer.get("proof"), proof(secret, "leader", ours, theirs)):
        raise ConnectionLost("somebody else listens there")
    lines.send({"proof": proof(secret, "node", str(told["node"]), ours, theirs)})
    answer = lines.next()
    if "refused" in answer:
        raise Refused(str(answer["refused"]))
    return int(answer["epoch"])


class _Lines:
    """A conversation line by line, before the connection is one: each side waits for the other's answer."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def send(self, message: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def next(self) -> dict[str, Any]:
        # Byte by byte, so that nothing of the line after it is taken.
        line = b""
        deadline = time.monotonic() + _CONNECT_SECONDS
        while not line.endswith(b"\n"):
            byte = self._socket.recv(1)
            if not byte or len(line) > 4096 or time.monotonic() > deadline:
                raise ConnectionLost("no answer")
            line += byte
        return _message(line)


class Guest:
    """The leader's side of joining: a connection that has yet to prove itself."""

    def __init__(self, sock: socket.socket, secret: bytes, silence_seconds: float) -> None:
        self.connection = Connection(sock, silence_seconds)
        self.told: dict[str, Any] = {}
        self._secret = secret
        self._ours = new_nonce()

    def hear(self, messages: Sequence[dict[str, Any]]) -> bool:
        """Whether the other side has proved itself now; `told` is what it says of itself. Raises ConnectionLost."""
        for message in messages:
            if not self.told:
                self._greet(message)
                continue
            expected = proof(self._secret, "node", str(self.told["node"]), str(self.told["nonce"]), self._ours)
            if not same(message.get("proof"), expected):
                raise ConnectionLost("does not know the secret")
            return True
        return False

    def _greet(self, message: dict[str, Any]) -> None:
        told = message.get("hello")
        if not isinstance(told, dict) or not isinstance(told.get("node"), int) or "nonce" not in told:
            raise ConnectionLost("not a node of this run")
        self.told = told
        self.connection.send(nonce=self._ours, proof=proof(self._secret, "leader", str(told["nonce"]), self._ours))
