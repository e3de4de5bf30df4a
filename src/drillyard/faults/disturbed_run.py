"""One disturbed run, from its first start to its end, restarted as a user would restart it.

If a fault kills the supervisor, or SIGTERM makes the run save and exit with code 85, the same
command is started again; any other end is final and reported. After each start no process may be
left: they are found by a mark in their environment. A full disk is simulated by a tmpfs in a mount
namespace of this process and its children.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from pydantic import TypeAdapter

from drillyard.errors import UserError
from drillyard.faults.plan import Fault, PlannedRun
from drillyard.supervise.launch_contract import EXIT_CHECKPOINTED
from drillyard.supervise.reaper import kill_marked_processes, marked_processes
from drillyard.telemetry.events import utc_now

MARK_VARIABLE = "DRILLYARD_CHAOS"
_GONE_WITHIN_SECONDS = 15.0
_POLL_SECONDS = 0.05
_LARGEST_TMPFS_BYTES = 4 * 1024**3
_CLONE_NEWNS = 0x00020000
_MS_REC_PRIVATE = 0x4000 | 0x40000
_MNT_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class FaultSettings:
    """Settings of a disturbed run that its ranks need.

    `step_seconds`: the median step of the undisturbed run; `shard_bytes`: the size of its smallest
    shard; `ballast`: the file that fills the small disk, or None where a limit on file sizes
    simulates a full disk.
    """

    planned: PlannedRun
    checkpoints: Path
    step_seconds: float
    shard_bytes: int
    ballast: Path | None


class PhaseFiles:
    """Small files through which the processes of a disturbed run and `drillyard chaos` communicate.

        case.json             the planned run and its settings, written before the first start
        NUMBER.PHASE.json     a fault has reached this phase; written before it strikes
        rank-N.pid            the process that is rank N now

    Each file is renamed into place, so a SIGKILL right after does not damage it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write_settings(self, settings: FaultSettings) -> None:
        """Create the directory with the settings."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._write("case.json", asdict(settings))

    def settings(self) -> FaultSettings:
        """The settings that `write_settings` wrote."""
        return TypeAdapter(FaultSettings).validate_json((self.directory / "case.json").read_bytes())

    def put(self, fault: Fault, phase: str, **fields: Any) -> None:
        """Record that `fault` has reached `phase`, with the time."""
        self._write(f"{fault.number}.{phase}.json", {"time": utc_now(), **fields})

    def get(self, fault: Fault, phase: str) -> dict[str, Any] | None:
        """What was recorded at a phase, or None if the fault has not reached it."""
        try:
            return dict(json.loads((self.directory / f"{fault.number}.{phase}.json").read_text()))
        except FileNotFoundError:
            return None

    def reached(self, planned: PlannedRun) -> dict[tuple[int, str], dict[str, Any]]:
        """What was recorded at all phases that were reached, by (fault number, phase)."""
        named = [(fault, phase) for fault in planned.faults for phase in (*fault.phases, "after")]
        return {
            (fault.number, phase): found
            for fault, phase in named
            if (found := self.get(fault, phase)) is not None
        }

    def is_complete(self, fault: Fault) -> bool:
        """Whether `fault` has done all that it does to a running rank. A full disk ends when
        checkpoints are verified; the next start flips the bit of a flip."""
        last = (
            "again" if fault.place == "resume" else "after" if fault.kind == "disk-full" else "hit"
        )
        return self.get(fault, last) is not None

    def pending(self, planned: PlannedRun) -> list[Fault]:
        """The faults of this attempt: those not complete, up to the first that ends an attempt."""
        found: list[Fault] = []
        for fault in planned.faults:
            if not self.is_complete(fault):
                found.append(fault)
                if fault.restarts:
                    break
        return found

    def put_pid(self, rank: int) -> None:
        """Record that this process is `rank`."""
        self._write(f"rank-{rank}.pid", os.getpid())

    def pid(self, rank: int) -> int:
        """The process that is `rank`."""
        return int((self.directory / f"rank-{rank}.pid").read_text())

    def _write(self, name: str, value: Any) -> None:
        draft = self.directory / f".{name}.{os.getpid()}"
        draft.write_text(json.dumps(value, default=str))
        draft.replace(self.directory / name)


@dataclass(frozen=True)
class ProcessRun:
    """One start of the command: its exit code (negative: a signal) and the command lines of
    processes it left."""

    exit_code: int
    left_running: list[str]
    hung: bool = False


@dataclass
class RunHistory:
    """Processes that the starts of a run left running, and why the run was given up: empty if it
    ended well."""

    left_running: list[str] = field(default_factory=list)
    stopped: str = ""


def run_until_done(
    command: Sequence[str],
    planned: PlannedRun,
    phases: PhaseFiles,
    output: Path,
    timeout_seconds: float,
) -> RunHistory:
    """Run `command` under the faults of `planned`; start it again when a fault explains its end."""
    history = RunHistory()
    handled: set[tuple[int, str]] = set()
    with output.open("ab") as log:
        while True:
            start = run_once(command, new_mark(), log, timeout_seconds)
            history.left_running += start.left_running
            explained = set(_phases_that_explain(start.exit_code, planned, phases))
            if start.hung:
                history.stopped = f"no end within {timeout_seconds:.0f} s"
            elif start.exit_code != 0 and explained <= handled:
                history.stopped = f"the command ended with exit code {start.exit_code}"
            if start.exit_code == 0 or history.stopped:
                return history
            handled |= explained


def _phases_that_explain(
    exit_code: int, planned: PlannedRun, phases: PhaseFiles
) -> Iterator[tuple[int, str]]:
    """(number, phase) of each fault that has struck and ends the command with this exit code."""
    for fault in planned.faults:
        if exit_code == EXIT_CHECKPOINTED and fault.kind == "term" and phases.get(fault, "hit"):
            yield fault.number, "hit"
        if exit_code == -signal.SIGKILL and fault.kind == "kill" and fault.target is None:
            yield from ((fault.number, phase) for phase in fault.phases if phases.get(fault, phase))


def new_mark() -> str:
    """A mark for the processes of one start that no other process on this host has."""
    return f"{os.getpid()}-{secrets.token_hex(8)}"


def run_once(
    command: Sequence[str], mark: str, log: IO[bytes], timeout_seconds: float | None = None
) -> ProcessRun:
    """Run `command` to its end or an exception; wait for the processes that it started and kill
    those that are left."""
    assert len(mark) >= 16, "an empty or short mark could belong to any process"
    process = subprocess.Popen(
        list(command),
        env={**os.environ, MARK_VARIABLE: mark},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    left, hung = [], False
    try:
        process.wait(timeout_seconds)
        left = _still_running(mark)
    except subprocess.TimeoutExpired:
        hung = True
    finally:
        process.kill()
        code = process.wait()
        kill_marked_processes(mark, MARK_VARIABLE)
    return ProcessRun(code, left, hung)


def _still_running(mark: str) -> list[str]:
    """Command lines of the processes that are left once the watchdog has had time to kill them."""
    deadline = time.monotonic() + _GONE_WITHIN_SECONDS
    while (left := marked_processes(mark, MARK_VARIABLE)) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return [_command_line(pid) for pid in left]


def is_marked(pid: int, mark: str) -> bool:
    """Whether process `pid` exists and has exactly this mark."""
    assert len(mark) >= 16, "an empty or short mark could belong to any process"
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False  # it has ended, or belongs to another user
    return os.fsencode(f"{MARK_VARIABLE}={mark}") in environment.split(b"\0")


def _command_line(pid: int) -> str:
    try:
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")
            .strip()
        )
    except OSError:
        return f"process {pid}"


def train_command(
    config: Path, settings: Sequence[str], num_ranks: int, max_restarts: int
) -> list[str]:
    """The arguments of `drillyard` that train the config with these settings."""
    sets = [argument for setting in settings for argument in ("--set", setting)]
    # Faults are installed when a process starts, and a standby does not know its attempt yet.
    return [
        "train",
        str(config),
        "--nproc-per-node",
        str(num_ranks),
        "--max-restarts",
        str(max_restarts),
        "--no-standby",
        "--console",
        "none",
        *sets,
    ]


def disturbed_command(train: Sequence[str], phases: PhaseFiles) -> list[str]:
    """`drillyard train ...` through the module that installs the faults."""
    return [
        sys.executable,
        "-m",
        "drillyard.faults.injection_points",
        str(phases.directory),
        "--",
        *train,
    ]


def can_mount(size_bytes: int) -> bool:
    """Whether this process may mount a tmpfs of this size. If so, it is in its own mount namespace
    from now on."""
    memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size_bytes > min(_LARGEST_TMPFS_BYTES, memory // 4) or _libc.unshare(_CLONE_NEWNS) != 0:
        return False
    return bool(_libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC_PRIVATE), None) == 0)


@contextlib.contextmanager
def mounted_tmpfs(directory: Path, size_bytes: int) -> Iterator[None]:
    """Create `directory` and mount a tmpfs of `size_bytes` there; call `can_mount` first. Raises
    UserError."""
    directory.mkdir(parents=True)
    if (
        _libc.mount(
            b"tmpfs", os.fsencode(directory), b"tmpfs", ctypes.c_ulong(0), b"size=%d" % size_bytes
        )
        != 0
    ):
        raise UserError(
            f"{directory}: cannot mount a small file system: {os.strerror(ctypes.get_errno())}"
        )
    try:
        yield
    finally:
        _libc.umount2(os.fsencode(directory), _MNT_DETACH)  # even if a process still uses it
