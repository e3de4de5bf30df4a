"""Start of ranks and of standby processes, in a way that they can always be ended. Linux >= 5.3.

Each rank leads a session of its own, so a Ctrl-C in the terminal reaches only the supervisor, and a
kill of the group reaches what the rank has started. The kernel kills a rank when the thread that
started it ends (PR_SET_PDEATHSIG), so start ranks from the main thread. A process descriptor
(pidfd) becomes readable when the rank ends, and signals sent through it never hit a recycled id.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from drillyard.errors import UserError
from drillyard.supervise.heartbeat import Heartbeat
from drillyard.supervise.process_identity import process_state, read_kernel_file

_PR_SET_PDEATHSIG = 1
_STATES = {
    "T": "stopped by a signal (SIGSTOP)",
    "t": "stopped by a debugger",
    "D": "in an uninterruptible wait for a device or a file system",
}
_libc = ctypes.CDLL(None, use_errno=True)
STANDBY = "DRILLYARD_STANDBY"
"""In a standby rank's environment: the descriptor of the socket on which it waits for its
attempt."""
_SECONDS_TO_END = 5.0
_Waiting = tuple[subprocess.Popen[bytes], socket.socket]


@dataclass(frozen=True)
class NodePlacement:
    """Place of a node among the `count` nodes of a run, each with a supervisor, and the address
    where all ranks meet.

    Whatever started the supervisors starts all of them again, so a supervisor of several makes one
    attempt only. That of node 0 writes the run's events and locks its directory.
    """

    count: int = 1
    rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    """None: a free port of this host, a new one in each attempt; only for a single node."""

    @property
    def is_first(self) -> bool:
        """Whether rank 0 is here, and with it the run's events and directory."""
        return self.rank == 0


ONE_NODE = NodePlacement()


def start_process(
    command: Sequence[str],
    environment: Mapping[str, str],
    stdout: int,
    stderr: int,
    keep_open: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a process that leads its own session and is killed when this thread ends. Raises
    OSError."""
    parent = os.getpid()

    def die_with_parent() -> None:
        """Run in the child between fork and exec; the parent may have ended already. Safe after a
        fork because the supervisor has no other thread, which is why its progress bar refreshes
        from its loop."""
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        preexec_fn=die_with_parent,
        pass_fds=keep_open,
    )


@dataclass(repr=False)
class Standby(contextlib.AbstractContextManager["Standby"]):
    """Ranks started ahead, with everything imported, so that a restart does not wait for imports.

    Importing torch takes a rank seconds on a local disk and minutes when thousands of ranks read a
    shared one. So once an attempt trains, start one process per rank that imports and then waits.
    The next attempt sends each its environment and its output over a socket. One that has died is
    replaced by an ordinary start. Cost: host memory for the imported code (about 0.4 GB per rank),
    and CPU time once per attempt, which slows training where ranks have no cores to spare. Use it
    with `with`, in the main thread.
    """

    _command: Sequence[str]
    _environments: Sequence[Mapping[str, str]]
    _waiting: dict[str, _Waiting] = field(default_factory=dict)

    def __exit__(self, *exception: object) -> None:
        for number in list(self._waiting):
            self._dismiss(self._waiting.pop(number))

    @property
    def pids(self) -> list[int]:
        return [process.pid for process, _ in self._waiting.values()]

    def start(self) -> str | None:
        """Start one process for every rank that has none; returns why one could not be started, if
        so."""
        try:
            for environment in self._environments:
                if environment["RANK"] not in self._waiting:
                    self._waiting[environment["RANK"]] = self._started(environment)
        except OSError as error:
            return str(error)
        return None

    def _started(self, environment: Mapping[str, str]) -> _Waiting:
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as unless_started:
            unless_started.callback(ours.close)
            complete = {**environment, STANDBY: str(theirs.fileno())}
            process = start_process(
                self._command,
                complete,
                subprocess.DEVNULL,
                subprocess.DEVNULL,
                keep_open=[theirs.fileno()],
            )
            unless_started.pop_all()
        return process, ours

    def take(
        self, environment: Mapping[str, str], stdout: int, stderr: int
    ) -> subprocess.Popen[bytes] | None:
        """Start the attempt in the process that waits for this rank, and return it; None where
        there is none."""
        waiting = self._waiting.pop(environment["RANK"], None)
        if waiting is None:
            return None
        try:
            with waiting[1] as connection:
                socket.send_fds(connection, [b"."], [stdout, stderr])
                connection.sendall(json.dumps(dict(environment)).encode())
        except OSError:
            # It died while it waited.
            self._dismiss(waiting)
            return None
        return waiting[0]

    def _dismiss(self, waiting: _Waiting) -> None:
        process, connection = waiting
        connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # A process in a kernel call, such as a read from a hung disk, ends when that returns; do
        # not wait for it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_SECONDS_TO_END)


class Rank:
    """One rank: its number, process id and descriptor, and its `returncode` once it was reaped.

    Its process is the standby process for it, else a new one.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        stdout: int,
        stderr: int,
        standby: Standby | None,
    ) -> None:
        self.number = int(environment["RANK"])
        ready = None if standby is None else standby.take(environment, stdout, stderr)
        try:
            self._process = ready or start_process(command, environment, stdout, stderr)
        except OSError as error:
            raise UserError(
                f"cannot start rank {self.number}, {command[0]}: {error.strerror}"
            ) from None
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
        """SIGKILL the rank and everything in its process group. Only before `reap`: until then its
        id is not reused."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> int:
        """Wait for the rank's end, end the rest of its group, and return its exit code (negative: a
        signal)."""
        # WNOWAIT leaves the dead leader in place, so that its group's id cannot belong to another
        # process yet.
        os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        self.kill_group()
        os.close(self.pidfd)
        return self._process.wait()


def await_turn(prepare: Callable[[], object]) -> None:
    """Wait for the attempt in a standby process, after calling `prepare`.

    On return the environment, standard output and standard error are those of the attempt. The
    process ends when its supervisor does.
    """
    with socket.socket(fileno=int(os.environ[STANDBY])) as connection:
        prepare()
        outputs = socket.recv_fds(connection, 1, 2)[1]
        message = connection.makefile("rb").read()
    if not message:
        os._exit(0)
    for ours, theirs in enumerate(outputs, start=1):
        os.dup2(theirs, ours)
        os.close(theirs)
    os.environ.clear()
    os.environ.update(json.loads(message))


def silence(rank: int, pid: int, heartbeat: Heartbeat, now: float) -> str:
    """Describe a rank that has made no progress; `now` is time.monotonic."""
    state = _STATES.get(process_state(pid))
    known = [state] if state else []
    if heartbeat.at:
        where = (
            heartbeat.phase
            if heartbeat.step is None
            else f"{heartbeat.phase} after step {heartbeat.step}"
        )
        known.append(f"{where}, last heartbeat {now - heartbeat.at:.1f} s ago")
    return f"rank {rank}" + (f": {'; '.join(known)}" if known else "")


def unkillable(rank: int, pid: int) -> str:
    """Describe a rank that SIGKILL has not ended: its process, its state, and where it is in the
    kernel."""
    letter, place = process_state(pid), read_kernel_file(f"/proc/{pid}/wchan")
    where = f", in {place} of the kernel" if place.strip("0") else ""
    state = (
        f"it is {_STATES.get(letter, f'in state {letter}')}{where}" if letter else "it is gone now"
    )
    return f"rank {rank}: process {pid} did not end after SIGKILL and is left behind; {state}"
