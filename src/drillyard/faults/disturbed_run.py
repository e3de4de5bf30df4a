"""One disturbed run from its first start to its end: what a patient user would do, and nothing more.

The run is `drillyard train` with its usual options. Where a fault kills the supervisor, or SIGTERM makes the run save
and exit with 85, the same command is given again; every other end is the run's own, and is told. After each end
nothing may be left running: processes are known by a mark in their environment, wherever they have gone.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from drillyard.faults.mark_files import MarkFiles
from drillyard.faults.plan import PlannedRun
from drillyard.supervise import EXIT_CHECKPOINTED
from drillyard.telemetry.events import utc_now

MARK_VARIABLE = "DRILLYARD_CHAOS"
_GONE_WITHIN_SECONDS = 15.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class ProcessRun:
    """One start of the command: when, how it ended (negative: a signal), what it left running."""

    time: str
    exit_code: int
    left_running: list[str]
    hung: bool = False


@dataclass
class RunHistory:
    """How a run went, seen from outside. `stopped` says why it was given up, if it was."""

    starts: list[ProcessRun] = field(default_factory=list)
    seconds: float = 0.0
    stopped: str = ""

    @property
    def exit_code(self) -> int:
        """That of the last start."""
        return self.starts[-1].exit_code


def run_until_done(
    command: Sequence[str], case: PlannedRun, marks: MarkFiles, output: Path, patience_seconds: float
) -> RunHistory:
    """Run `command` under the faults of `case`, starting it again where a fault asks for that.

    A start that takes longer than `patience_seconds` is ended and told as hanging.
    """
    course = RunHistory()
    begun = time.monotonic()
    answered: set[int] = set()
    with output.open("ab") as log:
        while True:
            start = run_once(command, new_mark(), log, patience_seconds)
            course.starts.append(start)
            if start.exit_code == 0:
                break
            if start.hung:
                course.stopped = f"no end within {patience_seconds:.0f} s"
                break
            if not _asked_for(start.exit_code, case, marks, answered):
                course.stopped = f"the command ended with exit code {start.exit_code}"
                break
    course.seconds = time.monotonic() - begun
    return course


def _asked_for(exit_code: int, case: PlannedRun, marks: MarkFiles, answered: set[int]) -> bool:
    """Whether a fault that has struck since the last start explains this end."""
    if exit_code == EXIT_CHECKPOINTED:
        wanted = [fault for fault in case.faults if fault.kind == "term" and marks.get(fault, "hit")]
        phases = [fault.number * 10 for fault in wanted]
    elif exit_code == -signal.SIGKILL:
        phases = [
            fault.number * 10 + number
            for fault in case.faults
            for number, phase in enumerate(fault.phases)
            if fault.target is None and fault.kind == "kill" and marks.get(fault, phase)
        ]
    else:
        return False
    new = set(phases) - answered
    answered |= new
    return bool(new)


def new_mark() -> str:
    """A mark for the processes of one start that nothing else on this host has."""
    return f"{os.getpid()}-{secrets.token_hex(8)}"


def run_once(command: Sequence[str], mark: str, log: IO[bytes], patience_seconds: float | None = None) -> ProcessRun:
    """One start of `command`, to its end and to that of everything it has started, which all inherit `mark`."""
    started = utc_now()
    with _started(command, mark, log) as process:
        try:
            process.wait(patience_seconds)
            hung = False
        except subprocess.TimeoutExpired:
            process.kill()
            hung = True
        code = process.wait()
    left = [] if hung else _still_running(mark)
    kill_marked(mark)
    return ProcessRun(started, code, left, hung)


@contextmanager
def _started(command: Sequence[str], mark: str, log: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """The process of `command`, which does not outlive the body: an interrupted chaos leaves no run behind."""
    process = subprocess.Popen(
        list(command),
        env={**os.environ, MARK_VARIABLE: mark},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
            kill_marked(mark)


def _still_running(mark: str) -> list[str]:
    """What is left of a run after a moment for its guardian, as command lines."""
    deadline = time.monotonic() + _GONE_WITHIN_SECONDS
    while (left := processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return [_command_line(pid) for pid in left]


def processes_with(mark: str) -> list[int]:
    """Ids of the other processes whose environment carries exactly this mark, which `new_mark` made."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if pid != os.getpid() and is_marked(pid, mark)]


def is_marked(pid: int, mark: str) -> bool:
    """Whether process `pid` is there and carries exactly this mark."""
    assert len(mark) >= 16, "an empty or short mark could be anybody's"
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False  # it has ended, or is another user's
    return os.fsencode(f"{MARK_VARIABLE}={mark}") in environment.split(b"\0")


def kill_marked(mark: str) -> None:
    """SIGKILL whatever is left of the start with this mark, and nothing else."""
    for pid in processes_with(mark):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return f"process {pid}"


def train_command(config: Path, settings: Sequence[str], num_ranks: int, max_restarts: int) -> list[str]:
    """What follows `drillyard`: `train`, its options, and the settings that make this run one of a campaign."""
    sets = [argument for setting in settings for argument in ("--set", setting)]
    # Faults are armed when a process starts, and those that stand by do not know their round then.
    return [
        "train", str(config), "--nproc-per-node", str(num_ranks), "--max-restarts", str(max_restarts), "--no-standby",
        "--console", "none", *sets,
    ]  # fmt: skip


def plain_command(train: Sequence[str]) -> list[str]:
    """`drillyard train ...` as it is."""
    return [sys.executable, "-m", "drillyard", *train]


def disturbed_command(train: Sequence[str], marks: MarkFiles) -> list[str]:
    """The same, through the way in that arms the faults."""
    return [sys.executable, "-m", "drillyard.faults.entry_point", str(marks.directory), "--", *train]
