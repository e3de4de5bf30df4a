"""TCP bandwidth to another node and back, counted where the data arrive: what a sender hands over
may still be in its buffers.

One process sends by a few connections at a time. Its figure is the best fifth of a second: other
work on the hosts makes the rest slower, never faster.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from typing import Any

from .mesh_server import WINDOW_SECONDS, greeting, received, send_for

_CONNECT_SECONDS = 5.0
_ANSWER_BYTES = 1 << 16


def probe(arguments: dict[str, Any]) -> dict[str, Any]:
    """Both directions, one after the other, in GB/s: `forward` to the only one of `peers`,
    `backward` from it. `seconds` each, by `streams` connections."""
    (peer,) = arguments["peers"]
    seconds, streams = float(arguments.get("seconds", 1.0)), int(arguments.get("streams", 4))
    forward = _best(_all(streams, lambda: _forward(peer, seconds)))
    backward = _best(_all(streams, lambda: _backward(peer, seconds)))
    return {
        "peer": peer["rank"],
        "forward_gb_per_s": forward,
        "backward_gb_per_s": backward,
        "slower_gb_per_s": min(forward, backward),
    }


def _connect(peer: dict[str, Any], asked: dict[str, Any]) -> socket.socket:
    connected = socket.create_connection(
        (peer["address"], peer["mesh_port"]), timeout=_CONNECT_SECONDS
    )
    try:
        if greeting(connected, _CONNECT_SECONDS).get("node") != peer["rank"]:
            raise ValueError("another program answers there")
        connected.sendall(json.dumps(asked).encode() + b"\n")
    except BaseException:
        connected.close()
        raise
    return connected


def _forward(peer: dict[str, Any], seconds: float) -> list[int]:
    with _connect(peer, {"receive": seconds}) as connected:
        # The other side counts from the first byte that arrives, so it ends later.
        send_for(connected, seconds + _CONNECT_SECONDS)
        connected.settimeout(_CONNECT_SECONDS)
        counts = json.loads(connected.makefile("rb").readline(_ANSWER_BYTES))["bytes"]
    return [int(each) for each in counts]


def _backward(peer: dict[str, Any], seconds: float) -> list[int]:
    with _connect(peer, {"send": seconds + 0.5}) as connected:
        counts = received(connected, seconds)
    if not any(counts):
        raise ConnectionError("ended the connection and sent nothing")
    return counts


def _all(streams: int, carry: Callable[[], list[int]]) -> list[list[int]]:
    """The counts of every connection. Raises the first error of one."""
    counts: list[list[int]] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            counts.append(carry())
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return counts


def _best(counts: list[list[int]]) -> float:
    """The two windows in a row that carried most. The first is left out: buffers fill in it."""
    sums = [sum(windows) for windows in zip(*counts)][1:]
    pairs = [sums[at] + sums[at + 1] for at in range(len(sums) - 1)] or [0]
    return float(max(pairs) / (2 * WINDOW_SECONDS) / 1e9)
