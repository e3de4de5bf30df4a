"""Commands and ranks, started as forks of a process that has imported what they import.

The imports take a process four seconds of a core with torch (COMPUTING: `train` and the like, and
their ranks) and half a second without (PLAIN: all other commands), and a test starts three
processes or more. With `ForkedStarts`, `subprocess` asks a server of that kind (fork_server.py),
which has imported everything and computed nothing, for each process that has a `kind_of`. The
kernel makes the fork a child of the process that asked (CLONE_PARENT): its id, exit code, group,
descriptors, PR_SET_PDEATHSIG and entries in /proc are those of a process that was started. A
command that computes has a server of its own, forked when it begins, and its ranks are children of
the command. What plain commands start, agents of launched runs for example, is started for real.

A process is started for real, as ever, wherever a fork could differ: a variable that is
`read_at_import` has another value than while the server imported; limits, control group, user,
signals, priority or namespaces, but that of mounts, are others than the server's; code is to run
in the child before its program; or the kernel does not let this user do it. What differs all the
same: forks of one server share its hash seed, have everything in memory from the first line on,
and do not free their objects one by one at the end. Hence `STARTED_FOR_REAL`, some of each kind of
run:

| started for real | what |
|---|---|
| test_train.py | two ranks from start to end, one of them killed; torchrun |
| test_signals.py | a stop while ranks import, torchrun |
| test_supervise*.py, test_standby.py, test_watchdog.py | a supervisor and its ranks |
| test_nodes.py | supervisors of two nodes |
| test_chaos.py | `chaos` and the run that it disturbs |
| test_eval_export.py | `eval` of a model on one and on two ranks, `export` |
| test_memory_faults.py, test_startup_estimate.py | memory, time of imports |
| test_out_of_memory.py | a fault planted at Python's start |
| test_gcsfuse.py | a run on a bucket, from kill to resume |
| test_trackers.py, test_api.py; test_remote_data.py with a hub | other services and callers |
| launch/test_user.py, test_secrets.py, test_slurm_status.py | launching and looking at a run |
| provision/test_interruption.py, test_whole_life.py | `cluster` killed at a step, a whole life |
| everywhere | what launchers start: agents, supervisors, ranks; of held.py, the supervisors |

`forked` does the same within a block, for tests of other groups.
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
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

STARTED_FOR_REAL = {
    "test_train.py::test_a_killed_rank_costs_one_restart_and_no_bit",
    "test_train.py::test_one_rank_of_torchrun_is_one_rank_of_the_run_and_rare_logging_changes_no_bit",
    "test_signals.py::test_a_stop_before_the_first_step_ends_promptly_and_leaves_whole_caches",
    "test_signals.py::test_under_torchrun_the_event_tells_that_a_stopped_run_is_saved",
    "test_nodes.py::test_a_killed_rank_of_two_nodes_costs_one_restart_and_no_bit[c10d-1]",
    "test_chaos.py::test_a_run_that_fails_undisturbed_is_reported_with_its_error",
    "test_eval_export.py::test_a_models_loss_is_that_of_its_last_evaluation",
    "test_eval_export.py::test_two_ranks_and_a_checkpoint_give_the_same_figures_and_answers",
    "test_eval_export.py::test_an_exported_checkpoint_is_final_to_the_bit_and_needs_no_drillyard",
    "test_memory_faults.py",
    "test_out_of_memory.py",
    "test_startup_estimate.py",
    "test_gcsfuse.py::test_a_run_on_a_bucket_is_killed_in_mid_save_and_resumes_to_the_bit",
    "test_trackers.py",
    "test_api.py",
    "launch/test_user.py",
    "launch/test_secrets.py",
    "launch/test_slurm_status.py",
    "provision/test_interruption.py::"
    "test_killed_at_any_step_up_ends_in_the_same_state_and_down_in_nothing",
    "provision/test_whole_life.py",
}
"""Files of tests, and single tests, with all their parameters or with some."""
_ROOT = Path(__file__).resolve().parents[2]
COMPUTING, PLAIN, PROBES = "computing", "plain", "probes"
_PROBE = re.compile(r"/.*/acceptance/torch_(devices|collective|training)\.py")
_COMMANDS = dict.fromkeys(("train", "data", "eval", "export", "generate", "chaos"), COMPUTING)
_COMMANDS |= dict.fromkeys(("accept", "checkpoint", "cluster", "diff", "estimate"), PLAIN)
_COMMANDS |= dict.fromkeys(("hardware", "image", "init", "launch", "metrics", "report"), PLAIN)
_COMMANDS |= dict.fromkeys(("runs", "schema", "watch"), PLAIN)
_MODULES = {"drillyard", "drillyard.faults.injection_points"}
_SCRIPTS = {str(Path(__file__).with_name("held.py"))}
_COMPUTING_SCRIPTS = {
    str(_ROOT / "tests/security" / name) for name in ("called_commands.py", "small_model.py")
}
_PLAIN_MODULES = {"tests.integration.provision.run_command"}
"""What is no command of drillyard's and imports what those do."""
_MAY_DIFFER = re.compile(
    r"(LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|(DRILLYARD|ACCEPTANCE)_\w+|PYTHONUNBUFFERED"
    r"|TORCHINDUCTOR_CACHE_DIR|PYTEST_CURRENT_TEST|PYTEST_XDIST_\w+|COLUMNS|LINES"
    r"|STORAGE_EMULATOR_HOST|AWS_\w+|PWD|OLDPWD|SHLVL|_"
)
"""Variables that nothing reads while what computes is imported."""
_READ_EARLY = re.compile(r"_?PYTHON\w*|LC_\w+|LANG(UAGE)?|LD_\w+|MALLOC_\w+|TZ|\w+_NUM_THREADS")
"""Variables that the interpreter and libraries of C read."""
_INHERITED = {"Umask", "Uid", "Gid", "Groups", "SigBlk", "SigIgn", "CapEff", "CapBnd", "NoNewPrivs"}
_INHERITED |= {"Seccomp", "Cpus_allowed"}
_NETWORK = re.compile(r"--net=(/.*)")


def kind_of(command: Sequence[str]) -> str | None:
    """COMPUTING for a command of drillyard's that imports torch or a rank of one, PLAIN for
    another command of drillyard's and what imports the same, PROBES for a probe of acceptance with
    torch, None for what is no fork."""
    command = _own_words(command)[0]
    if len(command) == 2 and _PROBE.fullmatch(command[1]):
        return PROBES
    if len(command) < 2 or command[0] != sys.executable:
        return None
    if command[1] in _COMPUTING_SCRIPTS:
        return COMPUTING
    if len(command) < 3:
        return None
    if command[1] == "-m" and command[2] in _PLAIN_MODULES:
        return PLAIN
    if command[1] == "-m" and command[2] in _MODULES:
        rest = list(command[3:])
    elif command[1] in _SCRIPTS:
        rest = list(command[2:])
    else:
        return None
    # What the programs that wrap `train` take comes first.
    rest = rest[rest.index("--") + 1 :] if "--" in rest[:2] else rest
    return _COMMANDS.get(rest[0]) if rest else None


def _own_words(command: Sequence[str]) -> tuple[Sequence[str], str]:
    """A command without the words that enter a network (`nsenter --net=FILE -- ...`), and FILE."""
    if command[0] == "nsenter" and (network := _NETWORK.fullmatch(command[1])):
        return (command[3:], network[1]) if command[2] == "--" else (command, "")
    return command, ""


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


def read_at_import(environment: Mapping[str, str], recorded: Set[str] | None) -> dict[str, str]:
    """The part of an environment that has to be the server's; `recorded`: the variables that its
    imports have read (None: not recorded, which `_MAY_DIFFER` knows).

    sysconfig makes a directory of HOME that nothing uses; the fork sees to what Kubernetes' client
    makes of KUBECONFIG.
    """
    return {
        name: value
        for name, value in environment.items()
        if (
            not _MAY_DIFFER.fullmatch(name)
            if recorded is None
            else (name in recorded - {"HOME", "KUBECONFIG"}) or _READ_EARLY.fullmatch(name)
        )
    }


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
    imported with, `recorded` what it read of that."""

    def __init__(
        self,
        connection: socket.socket,
        environment: Mapping[str, str],
        recorded: Set[str] | None = None,
    ) -> None:
        self._connection = connection
        self._recorded = recorded
        self._environment = read_at_import(environment, recorded)
        self._circumstances = circumstances()
        self._owner = os.getpid()
        self._turn = threading.Lock()

    def close(self) -> None:
        """End the server, but not its forks."""
        self._connection.close()

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
            and self._environment == read_at_import(environment, self._recorded)
            and self._circumstances == circumstances()
        )
        if not fits:
            return None
        streams = {0: stdin, 1: stdout, 2: stderr}
        given = {target: target if fd == -1 else fd for target, fd in streams.items()}
        given |= {fd: fd for fd in kept if fd != error_pipe}
        given = {target: fd for target, fd in given.items() if _is_open(fd)}
        words, network = _own_words([os.fsdecode(word) for word in command])
        request = {
            "command": words,
            "enters_network": bool(network),
            "environment": environment,
            "directory": directory,
            "descriptors": list(given),
            "new_session": bool(new_session),
            "group": group,
            "dies_with": None if before is None else os.getpid(),
        }
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            held.enter_context(self._turn)
            entered = [path for path in (network, "/proc/self/ns/mnt") if path]
            spaces = [held.enter_context(open(path)).fileno() for path in entered]
            descriptors = [*given.values(), *spaces]
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


def install(server: Callable[[str], ForkServer | None]) -> None:
    """Let `subprocess` of this process ask `server(kind)` for what is of a kind."""
    otherwise = subprocess._fork_exec  # type: ignore[attr-defined]

    def forked_or_started(*arguments: Any) -> int:
        if (kind := kind_of([os.fsdecode(word) for word in arguments[0]])) is not None:
            asked = server(kind)
            pid = None if asked is None else asked.start(arguments)
            if pid is not None:
                return pid
        return int(otherwise(*arguments))

    subprocess._fork_exec = forked_or_started  # type: ignore[attr-defined]


class ForkedStarts:
    """The starts of a process, a test session for example: those of `kinds` are forks while they
    are `wanted`."""

    def __init__(self, *kinds: str) -> None:
        self.wanted = False
        self._kinds = kinds
        self._servers: dict[str, ForkServer | None] = {}
        self._turn = threading.Lock()
        install(self._present_server)

    def _present_server(self, kind: str) -> ForkServer | None:
        if not self.wanted or kind not in self._kinds:
            return None
        with self._turn:
            if kind not in self._servers:
                self._servers[kind] = _started_server(kind)
            return self._servers[kind]

    def close(self) -> None:
        """End the servers; what starts from now on is started for real."""
        self.wanted = False
        for server in filter(None, self._servers.values()):
            server.close()


@contextlib.contextmanager
def forked(*kinds: str) -> Iterator[None]:
    """Have the starts of `kinds` be forks meanwhile, of servers that import in the environment of
    the first start."""
    starts = ForkedStarts(*kinds)
    starts.wanted = True
    try:
        yield
    finally:
        starts.close()


def _started_server(kind: str) -> ForkServer | None:
    """Start this process's server of a kind; None where the kernel does not let it work."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.fork_server", str(theirs.fileno()), kind],
            cwd=_ROOT,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
    atexit.register(process.wait)
    atexit.register(ours.close)
    environment = inherited_environment()
    if not (ready := ours.recv(1 << 16)):
        return None
    recorded = json.loads(ready)
    return ForkServer(ours, environment, None if recorded is None else {*recorded})
