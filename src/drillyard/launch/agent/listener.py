"""The leader's listening socket, and the connections on it that are not authenticated yet.

Any host on the network can connect, so the cost of unauthenticated peers is bounded:
`MAX_UNAUTHENTICATED` connections of `HANDSHAKE_LINE_BYTES` each (for a moment `_NEW_PER_CALL`
more), a pause of `_PAUSE_SECONDS` where none makes progress, and none of the last `_RESERVED_FILES`
descriptors. A new connection replaces the oldest one that has sent nothing. Connections that cannot
be accepted now wait in the kernel's queue.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
import time
from typing import Any

from drillyard.supervise.sockets import Pollable, wait_for

from .protocol import NUM_PORTS, Connection, ConnectionLost, derive_key

MAX_UNAUTHENTICATED = 64
"""Enough also for 1,000 nodes that join at once: a handshake takes milliseconds, and the others
wait in the queue."""
_NEW_PER_CALL = 32
_PAUSE_SECONDS = 0.01
_HANDSHAKE_SECONDS = 10.0
_ANSWER_SECONDS = 1.0
"""Time after its hello from which a silent peer may be replaced by another one."""
_RESERVED_FILES = 64
"""Descriptors that unauthenticated peers never get: for logs, pipes of ranks, state files."""
_NONE_NOW = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of accept(2): no connection waits, or it cannot be accepted now."""


class Handshake:
    """Leader side of a handshake: a connection that has yet to be authenticated."""

    def __init__(self, sock: socket.socket, secret: bytes, silence_seconds: float) -> None:
        self.accepted_at = time.monotonic()
        self.hello: dict[str, Any] = {}
        """The node's description of itself; authentic, but during the handshake it may be a
        replay."""
        self._socket = sock
        self._secret = secret
        self._silence_seconds = silence_seconds
        self.connection = self._connect(b"", derive_key(secret, "hello"))

    def advance(self) -> bool:
        """Read what has come; returns whether the other side is authenticated now. Raises
        ConnectionLost."""
        messages = self.connection.receive()
        if self.hello:
            # The first line under the new keys proves that the hello was not a replay.
            return bool(messages)
        if messages:
            self.hello = messages[0]
            nonce, own = str(self.hello.get("nonce")), os.urandom(16).hex()
            answer = self._connect(derive_key(self._secret, "answer", nonce), b"")
            answer.send(nonce=own, port=self._socket.getsockname()[1])
            keys = (derive_key(self._secret, each, nonce, own) for each in ("leader", "node"))
            self.connection = self._connect(*keys)
        return False

    def _connect(self, sending_key: bytes, receiving_key: bytes) -> Connection:
        return Connection(self._socket, self._silence_seconds, sending_key, receiving_key)


class Listener:
    """Listening socket of the leader, open once it is made. Raises OSError when all its ports are
    taken."""

    def __init__(self, first_port: int, secret: bytes, silence_seconds: float) -> None:
        self._server = _listen(first_port)
        self._secret = secret
        self._silence_seconds = silence_seconds
        self._handshakes: list[Handshake] = []
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._num_descriptors = None if limit == resource.RLIM_INFINITY else limit - _RESERVED_FILES

    @property
    def sources(self) -> list[Pollable]:
        return [self._server, *(peer.connection for peer in self._handshakes)]

    def authenticated(self) -> list[Handshake]:
        """Connections authenticated since the last call; errors of the network are not raised."""
        refused = self._accept()
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
                peer.connection.close()
                continue
            progress = progress or authenticated or bool(peer.hello) != had_said_hello
            (done if authenticated else self._handshakes).append(peer)
        self._evict()
        if not progress and (waiting or refused or wait_for([self._server], 0)):
            # Unauthenticated peers, or connections that cannot be accepted now, must not keep the
            # leader busy.
            time.sleep(_PAUSE_SECONDS)
        return done

    def close(self) -> None:
        for peer in self._handshakes:
            peer.connection.close()
        self._server.close()

    def _accept(self) -> bool:
        """Accept connections; returns whether one was closed at once, as no descriptor is left for
        it."""
        refused = False
        for _ in range(MAX_UNAUTHENTICATED + _NEW_PER_CALL - len(self._handshakes)):
            try:
                accepted = self._server.accept()[0]
            except OSError as error:
                if error.errno in _NONE_NOW:
                    break
                # accept(2): errors of the new connection's network are reported here; the next one
                # may be healthy.
                continue
            # The kernel gives out the lowest free number.
            if self._num_descriptors is not None and accepted.fileno() >= self._num_descriptors:
                accepted.close()
                refused = True
                continue
            self._handshakes.append(Handshake(accepted, self._secret, self._silence_seconds))
        return refused

    def _evict(self) -> None:
        """Close connections over the limit: the oldest without a hello first, then those without a
        timely answer."""
        late = time.monotonic() - _ANSWER_SECONDS
        excess = len(self._handshakes) - MAX_UNAUTHENTICATED
        silent = [peer for peer in self._handshakes if not peer.hello]
        slow = [peer for peer in self._handshakes if peer.hello and peer.accepted_at < late]
        for peer in (silent + slow)[: max(0, excess)]:
            peer.connection.close()
            self._handshakes.remove(peer)


def _listen(first_port: int) -> socket.socket:
    """Listen on the first free port of the range, on all interfaces. Raises OSError when all are
    taken."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    last: OSError | None = None
    for port in range(first_port, first_port + NUM_PORTS):
        try:
            server = socket.create_server(
                ("", port), family=family, dualstack_ipv6=both, backlog=1024
            )
            server.setblocking(False)
            return server
        except OSError as error:
            last = error
    raise OSError(f"ports {first_port} to {first_port + NUM_PORTS - 1} are all taken ({last})")
