"""Starting a rank so that it can always be ended, and what it gets in its environment. Linux >= 5.3.

Each rank leads a session of its own, so a Ctrl-C in the terminal reaches only the supervisor, and a kill of the group
reaches what the rank has started. The kernel kills a rank when the thread that started it ends (PR_SET_PDEATHSIG), so
start ranks from the main thread. A process descriptor (pidfd) becomes readable when the rank ends, and signals sent
through it never hit a recycled id.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from drillyard.errors import UserError
from drillyard.supervise.heartbeat import Heartbeat
from drillyard.supervise.process_identity import process_state

_PR_SET_PDEATHSIG = 1
_STATES = {
    "T": "stopped by a signal (SIGSTOP)",
    "t": "stopped by a debugger",
    "D": "in an uninterruptible wait for a device or a file system",
}
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class NodePlacement:
    """A node's place among the `count` nodes of a run, each with a supervisor, and where all ranks meet.

    Whatever started the supervisors starts all of them again, so a supervisor of several makes one attempt only. That
    of node 0 writes the run's events and locks its directory.
    """

    count: int = 1
    rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    """None: a free port of this host, a new one in each attempt; only where it is the one node."""

    @property
    def is_first(self) -> bool:
        """Whether rank 0 is here, and with it the run's events and directory."""
        return self.rank == 0


ONE_NODE = NodePlacement()


def rank_environments(
    shared: Mapping[str, str], num_ranks: int, attempt: int, node: NodePlacement = ONE_NODE
) -> list[dict[str, str]]:
    """The environment of each of a node's `num_ranks` ranks in an attempt, lowest rank first."""
    common = {
        **shared,
        "WORLD_SIZE": str(node.count * num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": node.master_addr,
        "DRILLYARD_ROUND": str(attempt),
        "DRILLYARD_SUPERVISED": "1",
        # Lines reach the log when they are printed, also the last ones before a rank is killed.
        "PYTHONUNBUFFERED": "1",
    }
    first = node.rank * num_ranks
    return [{**common, "RANK": str(first + local), "LOCAL_RANK": str(local)} for local in range(num_ranks)]


def _die_with(parent: int) -> Callable[[], None]:
    """A function for the child between fork and exec: die with `parent`, even if that has ended already.

    Safe after a fork because the supervisor has no other thread, which is why its progress bar refreshes from its loop.
    """

    def prepare() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def start_process(
    command: Sequence[str], environment: Mapping[str, str], stdout: int, stderr: int, keep_open: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a process that leads a session of its own and ends when this thread does. Raises OSError."""
    return subprocess.Popen(
        list(command),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        preexec_fn=_die_with(os.getpid()),
        pass_fds=tuple(keep_open),
    )


class Rank:
    """One rank: its number, process id and descriptor, and its `returncode` once it was reaped.

    `process` is one that was started ahead (standby.py); without it the rank is started. `left_behind`: SIGKILL has not
    ended it.
    """

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        stdout: int,
        stderr: int,
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.number = number
        self.left_behind = False
        try:
            self._process = process or start_process(command, environment, stdout, stderr)
        except OSError as error:
            raise UserError(f"cannot start rank {number}, {command[0]}: {error.strerror}") from None
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.returncode

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the rank alone, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def kill_group(self) -> None:
        """SIGKILL the rank and everything in its process group. Only before `reap`: until then its id is not reused."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> int:
        """Wait for the rank's end, end the rest of its group, and return its exit code (negative: a signal)."""
        if self.returncode is not None:
            return self.returncode
        # WNOWAIT leaves the dead leader in place, so that its group's id cannot belong to another process yet.
        os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        self.kill_group()
        os.close(self.pidfd)
        return self._process.wait()


def silence(rank: int, pid: int, heartbeat: Heartbeat, now: float) -> str:
    """A line about a rank that has made no progress; `now` is time.monotonic."""
    state = _STATES.get(process_state(pid))
    words = [f"rank {rank}: {state}"] if state else [f"rank {rank}"]
    if heartbeat.at:
        where = heartbeat.phase if heartbeat.step is None else f"{heartbeat.phase} after step {heartbeat.step}"
        words.append(f"{where}, last heartbeat {now - heartbeat.at:.1f} s ago")
    return "; ".join(words) if state else ": ".join(words)


def unkillable(rank: int, pid: int) -> str:
    """A line about a rank that SIGKILL has not ended: its process, its state, and where it is in the kernel."""
    letter = process_state(pid)
    try:
        place = Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        place = ""
    where = f", in {place} of the kernel" if place.strip("0") else ""
    state = f"it is {_STATES.get(letter, f'in state {letter}')}{where}" if letter else "it is gone now"
    return f"rank {rank}: process {pid} did not end after SIGKILL and is left behind; {state}"
