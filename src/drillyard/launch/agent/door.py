"""Where the leader lets nodes in: a listening socket, and guests that have yet to prove that they know the secret."""

from __future__ import annotations

import socket
import time

from .sockets import Source
from .wire import ConnectionLost, Guest, listen

_GREETING_SECONDS = 10.0


class Door:
    """Open from the moment it is made. Raises OSError when all its ports are taken."""

    def __init__(self, first_port: int, secret: bytes, silence_seconds: float) -> None:
        self._server = listen(first_port)
        self._secret = secret
        self._silence_seconds = silence_seconds
        self._guests: list[tuple[Guest, float]] = []

    @property
    def sources(self) -> list[Source]:
        """For `wait_for`."""
        return [self._server, *(guest.connection for guest, _ in self._guests)]

    def proven(self) -> list[Guest]:
        """Guests that have proved themselves since the last call; those that cannot, or say nothing, are sent away."""
        now = time.monotonic()
        for accepted in self._accepted():
            self._guests.append((Guest(accepted, self._secret, self._silence_seconds), now + _GREETING_SECONDS))
        waiting, proven = self._guests, []
        self._guests = []
        for guest, deadline in waiting:
            try:
                if guest.hear(guest.connection.receive()):
                    proven.append(guest)
                elif now > deadline:
                    raise ConnectionLost("says nothing")
                else:
                    self._guests.append((guest, deadline))
            except ConnectionLost:
                guest.connection.close()
        return proven

    def close(self) -> None:
        """Let nobody in any more."""
        for guest, _ in self._guests:
            guest.connection.close()
        self._server.close()

    def _accepted(self) -> list[socket.socket]:
        accepted = []
        while True:
            try:
                accepted.append(self._server.accept()[0])
            except OSError:
                return accepted
