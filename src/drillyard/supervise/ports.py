"""Free ports for rendezvous. The agents of launched runs (launch/agent) take this file along: standard library only."""

from __future__ import annotations

import random
import socket
from collections.abc import Collection
from pathlib import Path


def free_port(used: Collection[int] = ()) -> int:
    """A port on which nobody listens, not in `used`, below the range from which the kernel takes outgoing ports.

    So no connection of another program takes it between this look and the moment when rank 0 listens on it. Raises
    OSError where there is none.
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
    raise OSError("no free TCP port below the range of outgoing ports; end some servers of this host")
