"""Whether the agents of a run could meet: the node that would lead listens as a leader does, and
the others join it, over the ports and by the protocol of a run."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence
from typing import Any

from drillyard.supervise.sockets import wait_for

from .listener import Listener
from .protocol import Connection, ConnectionLost, join

_SILENCE_SECONDS = 10.0
_JOIN_SECONDS = 12.0
"""Nodes begin at slightly different times; a firewall that drops packets costs three seconds a
port."""
_LATER_SECONDS = 8.0
"""A node that begins so much later than the others is one that does not answer."""
_PAUSE_SECONDS = 0.3


def lead(first_port: int, secret: bytes, others: int, seconds: float) -> dict[str, Any]:
    """Let `others` nodes join, for so many seconds, or until none has come for a while after the
    last: how many did, or why none could."""
    try:
        listener = Listener(first_port, secret, _SILENCE_SECONDS)
    except OSError as error:
        return {"joined": None, "error": str(error)}
    joined: list[Connection] = []
    deadline = last = time.monotonic() + seconds
    try:
        while len(joined) < others and (left := deadline - time.monotonic()) > 0:
            wait_for(listener.sources, left)
            for peer in listener.authenticated():
                with contextlib.suppress(OSError, ConnectionLost):
                    peer.connection.send(epoch=0)
                joined.append(peer.connection)
                deadline = min(last, time.monotonic() + _LATER_SECONDS)
    finally:
        for each in joined:
            each.close()
        listener.close()
    return {"joined": len(joined), "error": None}


def follow(leader: Sequence[str], first_port: int, secret: bytes) -> dict[str, Any]:
    """Join the leader, as one of its names that resolves: whether it worked, else why not."""
    name = next((each for each in leader if _resolves(each)), leader[0])
    deadline = time.monotonic() + _JOIN_SECONDS
    last = ""
    while time.monotonic() < deadline:
        try:
            connection, _ = join(
                name, first_port, secret, {}, _SILENCE_SECONDS, lambda: time.monotonic() > deadline
            )
            connection.close()
            return {"joined": 1, "error": None}
        except ConnectionLost as error:
            last = str(error) or last
        time.sleep(_PAUSE_SECONDS)
    return {"joined": None, "error": last}


def _resolves(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except OSError:
        return False
