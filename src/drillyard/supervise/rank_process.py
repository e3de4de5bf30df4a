"""Starting a rank so that it can always be ended: sessions, parent-death signal, process descriptors, the guardian.

Each rank leads a session of its own, so a Ctrl-C in the terminal reaches only the supervisor, and a kill of the group
reaches what the rank has started. The kernel sends SIGKILL to a rank when the thread that started it ends
(PR_SET_PDEATHSIG), therefore ranks are started from the main thread. A process descriptor (pidfd) becomes readable when
the rank ends, which lets the supervisor sleep in `select`, and signals sent through it never hit a recycled id.

Linux only (>= 5.3).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from drillyard.errors import UserError
from drillyard.supervise import guardian

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def _die_with(parent: int) -> Callable[[], None]:
    """What the child runs between fork and exec: end when `parent` ends, even if it has ended already.

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

    `process` is one that stood by for it (standby.py); without one it is started. `left_behind`: SIGKILL has not ended
    it.
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
        # WNOWAIT leaves the dead leader in place, so that its group's id cannot belong to anybody else yet.
        os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        self.kill_group()
        os.close(self.pidfd)
        return self._process.wait()


class Reaper:
    """The process that ends what is left when the supervisor is gone; use it with `with`.

    `keep_open` are descriptors that it inherits: a lock on them is held until everything has ended.
    """

    def __init__(self, token: str, keep_open: Sequence[int] = ()) -> None:
        self._token = token
        read_end, self._write_end = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(guardian.__file__)), token],
            stdin=read_end,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=tuple(keep_open),
        )
        os.close(read_end)

    def __enter__(self) -> Reaper:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._write_end)
        self._process.wait()

    def end_all(self, spare: Collection[int] = ()) -> None:
        """End every process of the run that is still there, wherever it went, but those in `spare`."""
        guardian.end_marked_processes(self._token, spare)


def new_token() -> str:
    """A mark that no other supervisor of this host uses."""
    return f"{os.getpid()}-{time.time_ns()}"
