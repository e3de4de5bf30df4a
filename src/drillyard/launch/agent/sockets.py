"""Waiting for several descriptors at once, and ports for rendezvous."""

from __future__ import annotations

import random
import select
import socket
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol


class Source(Protocol):
    """Something that can be waited for."""

    def fileno(self) -> int:
        """Its descriptor."""


def wait_for(sources: Sequence[Source], seconds: float) -> set[int]:
    """The descriptors of `sources` that can be read, once there are any or `seconds` have passed.

    poll, because a leader of a thousand nodes has more descriptors than select knows.
    """
    poll = select.poll()
    for source in sources:
        poll.register(source.fileno(), select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(seconds * 1000)}


def free_port(used: Collection[int]) -> int:
    """A port on which nobody listens, below the range from which the kernel takes outgoing ports. Raises OSError.

    So no connection of another program takes it between this look and the moment when a rank listens on it.
    """
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    candidates = [port for port in range(min(15_000, first_outgoing // 2), first_outgoing) if port not in used]
    random.SystemRandom().shuffle(candidates)
    for port in candidates:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError("no free TCP port below the range of outgoing ports")
