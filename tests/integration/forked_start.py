"""Commands and ranks that import torch, started as forks of a process that has imported it.

The imports take a process four seconds of a core, and a test of a run starts three processes or
more. With `ForkedStarts`, `subprocess` asks a server (fork_server.py), which has imported
everything and computed nothing, for each process that `is_forkable`. The kernel makes the fork a
child of the process that asked (CLONE_PARENT): its id, exit code, group, descriptors,
PR_SET_PDEATHSIG and entries in /proc are those of a process that was started. A command has a
server of its own, forked when it begins, and its ranks are children of the command.

A process is started for real, as ever, wherever a fork could differ: a variable outside
`_MAY_DIFFER` has another value than while the server imported; limits, control group, user,
signals, priority or namespaces, but that of mounts, are others than the server's; code is to run
in the child before its program; or the kernel does not let this user do it. What differs all the
same: forks of one server share its hash seed, have torch in memory from the first line on, and do
not free their objects one by one at the end. Hence `STARTED_FOR_REAL`, some of each kind of run:

| started for real | what |
|---|---|
| test_train.py | two ranks from start to end, killed ranks, standby, the reference of other files |
| test_signals.py | signals at every stage of a run, two runs of one name, torchrun |
| test_supervise*.py, test_standby.py, test_watchdog.py | a supervisor and its ranks |
| test_nodes.py; launch, kubernetes | supervisors of several nodes; all that launchers start |
| test_chaos.py | faults that `chaos` injects |
| test_eval_export.py | `eval`, `export`, `generate` |
| test_memory_faults.py, test_startup_estimate.py, test_interrupt.py | memory, time of imports |
| test_out_of_memory.py | a fault planted at Python's start |
| test_gcsfuse.py, test_trackers.py, test_remote_data.py, test_api.py | other services and callers |
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

STARTED_FOR_REAL = {
    "test_train.py",
    "test_signals.py",
    "test_nodes.py",
    "test_chaos.py",
    "test_eval_export.py",
    "test_memory_faults.py",
    "test_out_of_memory.py",
    "test_startup_estimate.py",
    "test_interrupt.py",
    "test_gcsfuse.py",
    "test_trackers.py",
    "test_remote_data.py",
    "test_api.py",
}
_ROOT = Path(__file__).resolve().parents[2]
_COMMANDS = {"train", "eval", "export", "generate", "chaos"}
_MODULES = {"drillyard", "drillyard.faults.injection_points"}
_SCRIPTS = {str(Path(__file__).with_name("held.py"))}
_MAY_DIFFER = re.compile(
    r"(LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|DRILLYARD_\w+|PYTHONUNBUFFERED"
    r"|TORCHINDUCTOR_CACHE_DIR|PYTEST_CURRENT_TEST|PYTEST_XDIST_\w+|COLUMNS|LINES"
    r"|PWD|OLDPWD|SHLVL|_"
)
"""Variables that nothing reads while it is imported."""
_INHERITED = {"Umask", "Uid", "Gid", "Groups", "SigBlk", "SigIgn", "CapEff", "CapBnd", "NoNewPrivs"}
_INHERITED |= {"Seccomp", "Cpus_allowed"}
_real_fork_exec = subprocess._fork_exec  # type: ignore[attr-defined]


def is_forkable(command: Sequence[str]) -> bool:
    """Whether a command is one of drillyard's that import torch, or a rank of one."""
    if len(command) < 3 or command[0] != sys.executable:
        return False
    if command[1] == "-m" and command[2] in _MODULES:
        rest = list(command[3:])
    elif command[1] in _SCRIPTS:
        rest = list(command[2:])
    else:
        return False
    # What the programs that wrap `train` take comes first.
    rest = rest[rest.index("--") + 1 :] if "--" in rest[:2] else rest
    return bool(rest) and rest[0] in _COMMANDS


def circumstances() -> list[object]:
    """What a process inherits, beside its environment, its directory and what is mounted."""
    status = Path("/proc/thread-self/status").read_text().splitlines()
    return [
        *(line for line in status if line.partition(":")[0] in _INHERITED),
        *(
            os.readlink(f"/proc/self/ns/{name}")
            for name in sorted({*os.listdir("/proc/self/ns")} - {"mnt"})
        ),
        os.readlink("/proc/self/root"),
        (os.getsid(0), os.getpgrp()),
        Path("/proc/self/cgroup").read_text(),
        Path("/proc/self/oom_score_adj").read_text(),
        os.getpriority(os.PRIO_PROCESS, 0),
        Path("/proc/self/limits").read_text(),
    ]


def read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that has to be the server's."""
    return {name: value for name, value in environment.items() if not _MAY_DIFFER.fullmatch(name)}


def inherited_environment() -> dict[str, str]:
    """What a child gets from this process: libraries such as readline set variables that os.environ
    does not know."""
    environ, pairs = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ"), []
    while (pair := environ[len(pairs)]) is not None:
        pairs.append(pair)
    return parsed(pairs)


def parsed(pairs: Sequence[bytes]) -> dict[str, str]:
    """An environment from its NAME=VALUE."""
    named = (os.fsdecode(pair).partition("=") for pair in pairs)
    return {name: value for name, _, value in named}


class ForkServer:
    """A server as the process sees it whose children its forks are; `environment` is what it
    imported with."""

    def __init__(self, connection: socket.socket, environment: Mapping[str, str]) -> None:
        self._connection = connection
        self._environment = read_at_import(environment)
        self._circumstances = circumstances()
        self._owner = os.getpid()
        self._turn = threading.Lock()

    def start(self, arguments: Sequence[Any]) -> int | None:
        """What `_posixsubprocess.fork_exec(*arguments)` does; None where only that can do it."""
        (command, _, close_fds, kept, directory, variables) = arguments[:6]
        (stdin, _, _, stdout, _, stderr, _, error_pipe) = arguments[6:14]
        (_, new_session, group, gid, groups, uid, umask, before) = arguments[14:22]
        environment = inherited_environment() if variables is None else parsed(variables)
        directory = os.getcwd() if directory is None else os.fsdecode(directory)
        fits = (
            close_fds
            and (gid, groups, uid) == (None, None, None)
            and umask < 0
            and os.path.isdir(directory)
            and (before is None or _dies_with_parent(before))
            and self._owner == os.getpid()
            and self._environment == read_at_import(environment)
            and self._circumstances == circumstances()
        )
        if not fits:
            return None
        streams = {0: stdin, 1: stdout, 2: stderr}
        given = {target: target if fd == -1 else fd for target, fd in streams.items()}
        given |= {fd: fd for fd in kept if fd != error_pipe}
        given = {target: fd for target, fd in given.items() if _is_open(fd)}
        request = {
            "command": [os.fsdecode(word) for word in command],
            "environment": environment,
            "directory": directory,
            "descriptors": list(given),
            "new_session": bool(new_session),
            "group": group,
            "dies_with": None if before is None else os.getpid(),
        }
        with self._turn, open("/proc/self/ns/mnt") as mounts, contextlib.suppress(OSError):
            descriptors = [*given.values(), mounts.fileno()]
            socket.send_fds(self._connection, [json.dumps(request).encode()], descriptors)
            return int(self._connection.recv(64) or 0) or None
        return None


def _dies_with_parent(before: Callable[[], object]) -> bool:
    """Whether it is what drillyard does in the child: end it with the thread that starts it."""
    named = (before.__module__, before.__qualname__)
    return (
        named == ("drillyard.supervise.rank_process", "start_process.<locals>.die_with_parent")
        and threading.current_thread() is threading.main_thread()
    )


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def install(server: Callable[[], ForkServer | None]) -> None:
    """Let `subprocess` of this process ask `server()` for what is forkable."""

    def forked_or_started(*arguments: Any) -> int:
        if is_forkable([os.fsdecode(word) for word in arguments[0]]):
            asked = server()
            pid = None if asked is None else asked.start(arguments)
            if pid is not None:
                return pid
        return int(_real_fork_exec(*arguments))

    subprocess._fork_exec = forked_or_started  # type: ignore[attr-defined]


class ForkedStarts:
    """The starts of a test session: `wanted` says whether those of the present test are forks."""

    def __init__(self) -> None:
        self.wanted = False
        self._server: ForkServer | None = None
        self._is_tried = False
        install(self._present_server)

    def _present_server(self) -> ForkServer | None:
        if self.wanted and not self._is_tried:
            self._is_tried = True
            self._server = _started_server()
        return self._server if self.wanted else None


def _started_server() -> ForkServer | None:
    """Start the session's server; None where the kernel does not let it work."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.fork_server", str(theirs.fileno())],
            cwd=_ROOT,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
    atexit.register(process.wait)
    atexit.register(ours.close)
    server = ForkServer(ours, inherited_environment())
    return server if ours.recv(64) == b"ready" else None
