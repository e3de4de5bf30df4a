"""Stopping on request, at a step on which all ranks agree.

SIGTERM or SIGUSR1 to any rank sets a flag there. Each step starts an asynchronous all-reduce of that flag between CPUs
and reads the result of the one started a step earlier: by then it has long arrived, so nobody waits, no device is
synchronised, and every rank sees the same answer at the same step. A second signal ends the process at once; one that
follows the first within two seconds is the same request, delivered to supervisor and ranks alike.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

import torch
import torch.distributed as dist

SECONDS_OF_ONE_REQUEST = 2.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Whether somebody asked this run to stop; the same answer on every rank at every step."""

    def __init__(self, world_size: int) -> None:
        self.received: signal.Signals | None = None
        self._received_at = 0.0
        self._group: dist.ProcessGroup | None = None
        if world_size > 1:
            group = dist.new_group(backend="gloo")
            assert isinstance(group, dist.ProcessGroup)
            self._group = group
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._pending: dist.Work | None = None
        self._previous = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._received_at = signal.Signals(number), now
        elif now - self._received_at > SECONDS_OF_ONE_REQUEST:
            os._exit(128 + number)

    def agreed(self) -> bool:
        """Call once per step on every rank: True on all of them a step after the first one was asked."""
        if self._group is None:
            return self.received is not None
        answer = False
        if self._pending is not None:
            self._pending.wait()
            answer = bool(self._flag.item())
        self._flag.fill_(int(self.received is not None))
        self._pending = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return answer

    def close(self) -> None:
        """Give the signals back."""
        if self._pending is not None:
            self._pending.wait()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
