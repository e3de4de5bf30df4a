"""The leader's listening socket, and the connections on it that are not authenticated yet.

Any host on the network can connect, so the cost of unauthenticated peers is bounded: `MAX_UNAUTHENTICATED` connections
of `HANDSHAKE_LINE_BYTES` each (for a moment `_NEW_PER_CALL` more), a check every `_PAUSE_SECONDS` while none makes
progress, and none of the last `_RESERVED_FILES` descriptors. A new connection replaces the oldest one that has sent
nothing. Connections that cannot be accepted now wait in the kernel's queue.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
import time
from typing import Any

from drillyard.supervise.sockets import Pollable

from .protocol import (
    HANDSHAKE_LINE_BYTES,
    NUM_PORTS,
    Connection,
    ConnectionLost,
    derive_key,
    read_some,
    seal,
    unseal,
)

MAX_UNAUTHENTICATED = 64
"""Enough also for 1,000 nodes that join at once: a handshake takes milliseconds, and the others wait in the queue."""
_NEW_PER_CALL = 32
_PAUSE_SECONDS = 0.01
_HANDSHAKE_SECONDS = 10.0
_ANSWER_SECONDS = 1.0
"""A peer that sent its hello and then nothing for so long may be replaced by another one."""
_RESERVED_FILES = 64
"""Descriptors that unauthenticated peers never get: for logs, pipes of ranks, state files."""
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Handshake:
    """The leader's side of a handshake: a connection that has yet to be authenticated."""

    def __init__(self, sock: socket.socket, secret: bytes, silence_seconds: float) -> None:
        sock.setblocking(False)
        self.accepted_at = time.monotonic()
        self.hello: dict[str, Any] = {}
        """The node's description of itself; authentic, but during the handshake it may be a replay."""
        self._socket = sock
        self._secret = secret
        self._silence_seconds = silence_seconds
        self._received = b""
        self._connection: Connection | None = None

    def fileno(self) -> int:
        """For `wait_for`."""
        return self._socket.fileno()

    @property
    def connection(self) -> Connection:
        """To the node that sent the hello."""
        assert self._connection is not None
        return self._connection

    def advance(self) -> bool:
        """Read what has come; whether the other side is authenticated now. Raises ConnectionLost."""
        if self._connection is not None:
            # The first line under the new keys proves that the hello was not a repetition.
            return bool(self._connection.receive())
        self._received += read_some(self._socket, HANDSHAKE_LINE_BYTES)
        hello, newline, rest = self._received.partition(b"\n")
        if rest or len(hello) > HANDSHAKE_LINE_BYTES:
            raise ConnectionLost("not a hello")
        if newline:
            self._answer(hello)
        return False

    def close(self) -> None:
        """End it."""
        self._socket.close()

    def _answer(self, hello: bytes) -> None:
        self.hello = unseal(derive_key(self._secret, "hello"), 0, hello)
        content = {"nonce": os.urandom(16).hex(), "port": self._socket.getsockname()[1]}
        answer = seal(derive_key(self._secret, "answer", hello), 0, content)
        try:
            sent = self._socket.send(answer + b"\n")
        except OSError as error:
            raise ConnectionLost(str(error)) from None
        if sent <= len(answer):
            raise ConnectionLost("the other side reads nothing")
        keys = (derive_key(self._secret, purpose, hello, answer) for purpose in ("leader", "node"))
        self._connection = Connection(self._socket, self._silence_seconds, *keys)


class Listener:
    """Listens from the moment it is made. Raises OSError when all its ports are taken."""

    def __init__(self, first_port: int, secret: bytes, silence_seconds: float) -> None:
        self._server = _listen(first_port)
        self._secret = secret
        self._silence_seconds = silence_seconds
        self._handshakes: list[Handshake] = []
        self._paused_until = 0.0
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._num_descriptors = None if limit == resource.RLIM_INFINITY else limit - _RESERVED_FILES

    @property
    def sources(self) -> list[Pollable]:
        """For `wait_for`; none during a pause."""
        return [] if self._pause_seconds > 0 else [self._server, *self._handshakes]

    def wait_seconds(self, seconds: float) -> float:
        """How long to wait at most, of `seconds`, before the next call of `authenticated`."""
        return min(seconds, self._pause_seconds or seconds)

    def authenticated(self) -> list[Handshake]:
        """Connections authenticated since the last call; errors of the network are not raised."""
        if self._pause_seconds > 0:
            return []
        self._accept()
        waiting, self._handshakes = self._handshakes, []
        done: list[Handshake] = []
        progress = False
        for peer in waiting:
            had_said_hello = bool(peer.hello)
            try:
                authenticated = peer.advance()
                if not authenticated and time.monotonic() > peer.accepted_at + _HANDSHAKE_SECONDS:
                    raise ConnectionLost("no handshake in time")
            except (OSError, ConnectionLost):
                peer.close()
                continue
            progress = progress or authenticated or bool(peer.hello) != had_said_hello
            (done if authenticated else self._handshakes).append(peer)
        self._evict()
        if not progress:
            # Strangers alone must not keep the leader busy.
            self._paused_until = time.monotonic() + _PAUSE_SECONDS
        return done

    def close(self) -> None:
        """Stop listening, and close the connections that are not authenticated."""
        for peer in self._handshakes:
            peer.close()
        self._server.close()

    @property
    def _pause_seconds(self) -> float:
        return max(0.0, self._paused_until - time.monotonic())

    def _accept(self) -> None:
        for _ in range(MAX_UNAUTHENTICATED + _NEW_PER_CALL - len(self._handshakes)):
            try:
                accepted = self._server.accept()[0]
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _OUT_OF_RESOURCES:
                    return
                # accept(2): errors of the new connection's network are reported here; the next one may be well.
                continue
            # The kernel gives out the lowest free number.
            if self._num_descriptors is not None and accepted.fileno() >= self._num_descriptors:
                accepted.close()
                continue
            self._handshakes.append(Handshake(accepted, self._secret, self._silence_seconds))

    def _evict(self) -> None:
        """Close connections over the limit: the oldest without a hello first, then those without a timely answer."""
        late = time.monotonic() - _ANSWER_SECONDS
        excess = len(self._handshakes) - MAX_UNAUTHENTICATED
        silent = [peer for peer in self._handshakes if not peer.hello]
        slow = [peer for peer in self._handshakes if peer.hello and peer.accepted_at < late]
        for peer in (silent + slow)[: max(0, excess)]:
            peer.close()
            self._handshakes.remove(peer)


def _listen(first_port: int) -> socket.socket:
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
