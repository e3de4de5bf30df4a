"""Free ports, waiting for several descriptors, and the limit of open files.

Shipped with the agents of launched runs (launch/agent): standard library only, nothing newer than
Python 3.9.
"""

from __future__ import annotations

import contextlib
import random
import resource
import select
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol


class Pollable(Protocol):
    def fileno(self) -> int:
        """Its descriptor."""


def can_bind(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", port))
        return True
    return False


def free_port(used: set[int]) -> int:
    """A free port, not in `used`, to which it is added. Raises OSError where there is none.

    It is below the range from which the kernel takes outgoing ports: so no connection of another
    program takes it before rank 0 listens on it.
    """
    first_outgoing = int(
        Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0]
    )
    candidates = [
        port for port in range(min(15_000, first_outgoing // 2), first_outgoing) if port not in used
    ]
    random.SystemRandom().shuffle(candidates)
    for port in candidates:
        if can_bind(port):
            used.add(port)
            return port
    raise OSError(
        "no free TCP port below the range of outgoing ports; end some servers of this host"
    )


def wait_for(sources: Sequence[Pollable], seconds: float) -> set[int]:
    """The descriptors of `sources` that can be read, once there are any or `seconds` have passed.

    poll, because a leader of a thousand nodes has more descriptors than select can take.
    """
    poll = select.poll()
    for source in sources:
        poll.register(source.fileno(), select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(seconds * 1000)}


def allow_open_files(count: int) -> None:
    """Raise this process's soft limit of open files to `count`, as far as the hard limit lets
    it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    # Some kernels refuse a limit that they report as allowed; nodes beyond it are then reported as
    # missing.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
