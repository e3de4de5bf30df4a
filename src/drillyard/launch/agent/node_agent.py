"""Base of leader and follower: their use of the fence, and the conditions under which they leave
the run."""

from __future__ import annotations

import signal
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from drillyard.supervise.launch_contract import EXIT_FAILED
from drillyard.supervise.process_identity import Process
from drillyard.supervise.stop_requests import StopRequests

from .fence import Epochs, Lease
from .messages import StopMessage
from .node_command import NodeCommand
from .scheduler_env import Allocation


@dataclass(eq=False)
class AgentExit(Exception):
    code: int


@dataclass(repr=False)
class NodeAgent(ABC):
    """Agent of one node in a start of a run. `_start`: the submission, and the number of this start
    of it."""

    _node: NodeCommand
    _me: Process
    _secret: bytes
    _start: dict[str, str]
    _allocation: Allocation

    def __post_init__(self) -> None:
        node = self._node
        self._job = job = node.job
        self._directory = Path(job.launch_directory)
        self._epochs = Epochs(self._directory)
        self._lease = Lease(
            self._epochs, node.rank, self._me, node.token, job.lease_seconds, node.reaper.notify
        )
        # SIGCHLD, so that the loop wakes when the command ends.
        self._stop = StopRequests(signal.SIGCHLD)

    @abstractmethod
    def run(self) -> int:
        """Take part in the run until it is over for this node; returns the exit code."""

    def _require_directory(self) -> None:
        """Raise AgentExit if the launch directory is gone, once everything of this node has
        ended."""
        if self._lease.directory_gone:
            gone = (
                f"{self._job.launch_directory} is gone: what runs of {self._job.run} here is ended"
            )
            # The log is gone too.
            print(f"error: {gone}", file=sys.stderr, flush=True)
            self._end_command(0.0)
            raise AgentExit(EXIT_FAILED)

    @abstractmethod
    def _leave_to(self, newer_epoch: int) -> None:
        """End this node's command, as the run was started again; raises AgentExit or
        ConnectionLost."""

    def _look_at_fence(self) -> None:
        self._require_directory()
        if self._lease.fenced_by is not None:
            self._leave_to(self._lease.fenced_by)
        # The command has outlived its lease; the reaper does the same.
        elif self._node.busy and self._lease.silent_seconds > self._job.lease_seconds / 2:
            self._node.kill(
                f"{self._job.launch_directory} could not be written for half of lease_seconds"
            )

    def _end_command(self, seconds: float) -> None:
        """End everything of this node that SIGKILL can end; SIGKILL comes after `seconds`."""
        self._node.stop(StopMessage(signal.SIGTERM if seconds else signal.SIGKILL, seconds))
        while self._node.busy:
            if self._lease.fenced_by is not None:
                self._node.kill()
            self._node.tick()
            time.sleep(0.02)
