"""Stopping on request, at a step on which all ranks agree.

SIGTERM or SIGUSR1 to any rank is noted there (supervise/stopping.py). Each step starts an asynchronous all-reduce of
its number between CPUs and reads the result of the one started a step earlier: by then it has long arrived, so nobody
waits, no device is synchronised, and every rank sees the same answer at the same step. Forwards of an evaluation ask
in the same way, so that a long one ends early and what was trained is saved within the launcher's patience.
"""

from __future__ import annotations

import signal
from datetime import timedelta

import torch
import torch.distributed as dist

from drillyard.parallel.ranks import COLLECTIVE_TIMEOUT
from drillyard.supervise.stopping import StopSignals


class StopRequest:
    """Whether somebody asked this run to stop; the same answer on every rank at every call of `agreed`.

    `signals`: what this rank hears; None: nothing, as in a test that trains without processes of its own.
    """

    def __init__(
        self, world_size: int, signals: StopSignals | None = None, timeout: timedelta = COLLECTIVE_TIMEOUT
    ) -> None:
        self.signals = signals
        self._group: dist.ProcessGroup | None = None
        if world_size > 1:
            group = dist.new_group(backend="gloo", timeout=timeout)
            assert isinstance(group, dist.ProcessGroup)
            self._group = group
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._pending: dist.Work | None = None
        self._agreed: signal.Signals | None = None

    @property
    def received(self) -> signal.Signals | None:
        """The stop signal that came to this rank or was agreed on, if any."""
        return self._agreed or (self.signals.received if self.signals else None)

    def agreed(self) -> bool:
        """Call alike on every rank: True on all of them one call after the first one was asked."""
        if self._group is None:
            return self.received is not None
        if self._pending is not None:
            self._pending.wait()
            number = int(self._flag.item())
            self._agreed = signal.Signals(number) if number else None
        self._flag.fill_(self.received or 0)
        self._pending = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return self._agreed is not None

    def close(self) -> None:
        """Wait for what is under way."""
        if self._pending is not None:
            self._pending.wait()
