"""Standby ranks: started ahead, with everything imported, so that a restart does not wait for it.

Importing torch takes a rank seconds on a local disk and minutes when thousands of ranks read a shared one. So once an
attempt trains, start one process per rank that imports and then waits. The next attempt sends each its environment and
its output over a socket. One that has died is replaced by an ordinary start. Cost: host memory for the imported code
(about 0.4 GB per rank), and CPU time once per attempt, which slows training where ranks have no cores to spare.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence

from drillyard.supervise.rank_process import start_process

STANDBY = "DRILLYARD_STANDBY"
"""In a rank's environment: the descriptor of the socket on which it waits for its attempt."""

SECONDS_TO_END = 5.0
_Waiting = tuple[subprocess.Popen[bytes], socket.socket]


class Standby:
    """The supervisor's side: the processes that wait. Use it with `with`, in the main thread."""

    def __init__(self, command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> None:
        self._command = command
        self._environments = environments
        self._waiting: dict[int, _Waiting] = {}

    def __enter__(self) -> Standby:
        return self

    def __exit__(self, *exception: object) -> None:
        for number in list(self._waiting):
            self._dismiss(self._waiting.pop(number))

    @property
    def pids(self) -> list[int]:
        """The processes that wait now."""
        return [process.pid for process, _ in self._waiting.values()]

    def start(self) -> str | None:
        """Start one process for every rank that has none; returns why one could not be started, if so."""
        for number, environment in enumerate(self._environments):
            if number not in self._waiting:
                try:
                    self._waiting[number] = self._started(environment)
                except OSError as error:
                    return str(error)
        return None

    def _started(self, environment: Mapping[str, str]) -> _Waiting:
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as unless_started:
            unless_started.callback(ours.close)
            complete = {**environment, STANDBY: str(theirs.fileno())}
            process = start_process(
                self._command, complete, subprocess.DEVNULL, subprocess.DEVNULL, keep_open=[theirs.fileno()]
            )
            unless_started.pop_all()
        return process, ours

    def take(
        self, number: int, environment: Mapping[str, str], stdout: int, stderr: int
    ) -> subprocess.Popen[bytes] | None:
        """Start the attempt in the process that waits for this rank, and return it; None where there is none."""
        waiting = self._waiting.pop(number, None)
        if waiting is None:
            return None
        try:
            with waiting[1] as connection:
                socket.send_fds(connection, [b"."], [stdout, stderr])
                connection.sendall(json.dumps(dict(environment)).encode())
        except OSError:
            # It has died while it waited.
            self._dismiss(waiting)
            return None
        return waiting[0]

    def _dismiss(self, waiting: _Waiting) -> None:
        process, connection = waiting
        connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # One in a call of the kernel, reading from a disk that hangs, ends when that returns; do not wait for it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_END)


def await_turn(prepare: Callable[[], object]) -> None:
    """A rank's side: in a standby process, call `prepare` and wait for its attempt; else return at once.

    On return the environment, standard output and standard error are those of the attempt. The process ends when its
    supervisor does.
    """
    descriptor = os.environ.get(STANDBY)
    if descriptor is None:
        return
    with socket.socket(fileno=int(descriptor)) as connection:
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
