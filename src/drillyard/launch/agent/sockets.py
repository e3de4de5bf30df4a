"""Waiting for several descriptors at once, and ports for rendezvous."""

from __future__ import annotations

import contextlib
import random
import resource
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


def allow_open_files(count: int) -> None:
    """Have so many open files be allowed, where the soft limit of this process is lower and the hard one lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    # Some kernels refuse what they say to allow; then nodes beyond the limit are told as missing.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
