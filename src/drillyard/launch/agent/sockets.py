"""Waiting for several descriptors at once, and having enough of them."""

from __future__ import annotations

import contextlib
import resource
import select
from collections.abc import Sequence
from typing import Protocol


class Pollable(Protocol):
    """Something that can be waited for."""

    def fileno(self) -> int:
        """Its descriptor."""


def wait_for(sources: Sequence[Pollable], seconds: float) -> set[int]:
    """The descriptors of `sources` that can be read, once there are any or `seconds` have passed.

    poll, because a leader of a thousand nodes has more descriptors than select knows.
    """
    poll = select.poll()
    for source in sources:
        poll.register(source.fileno(), select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(seconds * 1000)}


def allow_open_files(count: int) -> None:
    """Have so many open files be allowed, where the soft limit of this process is lower and the hard one lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    # Some kernels refuse what they say to allow; then nodes beyond the limit are told as missing.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
