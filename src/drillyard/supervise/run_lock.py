"""Who has a run directory: one supervisor at a time, by a lock on its logs/ that the kernel drops with its last holder.

Nothing stale is left by a crash on this host. A file server, though, holds the lock of a host that died for as long as
that host's lease, so under a launcher, which keeps two starts of a run apart itself, such a lock is outwaited. Beside
the lock its holder writes down itself and what it does (logs/.holder.json): whoever waits or is refused says so. For a
live process of this machine that trains, waiting is of no use; what does anything else is over by itself. File systems
without locks do not keep two runs apart.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from drillyard.errors import UserError
from drillyard.safe_files import close_quietly
from drillyard.supervise.console_output import print_message
from drillyard.supervise.launched import is_launched
from drillyard.supervise.process_identity import Process, process_of, this_process

TRAINS = "trains"
"""What a supervisor does in its run directory, until its run is over."""
_HOLDER = ".holder.json"
_PATIENCE_SECONDS = 5.0
"""For a holder that lives: it may just have been asked to end."""
_ENDING_PATIENCE_SECONDS = 20.0
"""For what a holder of this machine that was killed has left: its guardian, which holds the lock too, ends it within
ten seconds (guardian.py)."""
_LAUNCHED_PATIENCE_SECONDS = 180.0
"""Under a launcher, for a holder that nobody here can see: a file server holds the lock of a host that died for as long
as that host's lease (Linux nfsd: 90 s), and a refusal here would end the run for good."""
_LAUNCHED_PATIENCE_WITH_WORK_SECONDS = 3600.0
"""Under a launcher, for a holder that does not train: `checkpoint prune` reads terabytes, on whatever host."""
_PF_EXITING = 0x4
"""Of a process's flags: it has begun to end (Linux, include/linux/sched.h)."""
_SECONDS_BETWEEN_LOOKS = 1.0


@dataclass(frozen=True)
class LockOwner:
    """Who has a run directory, by its own word."""

    process: Process
    since: float
    """Unix seconds."""
    does: str
    """`TRAINS`, or what else, as what `which` begins: "prunes its checkpoints"."""

    @property
    def trains(self) -> bool:
        """Whether it has the run directory for as long as a run takes."""
        return self.does == TRAINS

    @property
    def is_seen_to_live(self) -> bool:
        """Whether it is a process of this machine that goes on: one that is being killed or is ending does not, however
        long the kernel holds it."""
        return self.process.here and self.process.alive and not _is_being_killed(self.process.pid)

    def __str__(self) -> str:
        gone = self.process.here and not self.is_seen_to_live
        which = ", which was killed" if gone else "" if self.trains else f", which {self.does}"
        return f"process {self.process.pid} on {self.process.host} since {_time_of_day(self.since)}{which}"


@contextlib.contextmanager
def open_logs(run_directory: Path) -> Iterator[int]:
    """The directory of a run's logs, made where it is not there; yields a descriptor of it. Raises UserError."""
    logs = run_directory / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(logs, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise UserError(f"{logs}: cannot be created ({error.strerror}); choose another `output`") from None
    try:
        yield descriptor
    finally:
        close_quietly(descriptor)


@contextlib.contextmanager
def exclusive_run_lock(
    run_directory: Path, say: Callable[[str], None] = print_message, does: str = TRAINS
) -> Iterator[int]:
    """Hold the lock of a run directory; yields its descriptor, and whoever inherits that holds the lock as well.

    `say` is told at once what is waited for, and until when; `does` is what others are told: see Holder. Raises
    UserError where a run is active there.
    """
    with open_logs(run_directory) as descriptor:
        _wait_for_lock(run_directory, descriptor, say)
        record = run_directory / "logs" / _HOLDER
        _write_down(record, does)
        try:
            yield descriptor
        finally:
            with contextlib.suppress(OSError):
                record.unlink()


@contextlib.contextmanager
def lock_run_directory(run_directory: Path, does: str) -> Iterator[None]:
    """Keep runs out of a run directory while something in it is changed; `does` says what, as what "which" begins.
    UserError when a run is active in it."""
    with exclusive_run_lock(run_directory, does=does):
        yield


def lock_owner(run_directory: Path) -> LockOwner | None:
    """Who has written itself down last as the holder and not taken leave; None where that is not known."""
    try:
        told = json.loads((run_directory / "logs" / _HOLDER).read_text(encoding="utf-8"))
        process = process_of(told)
        return None if process is None else LockOwner(process, float(told["since"]), str(told["does"]))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _wait_for_lock(run_directory: Path, descriptor: int, say: Callable[[str], None]) -> None:
    begun, begun_at = time.monotonic(), time.time()
    look_at = begun
    holder: LockOwner | None = None
    said = ""
    while not _try_lock(descriptor):
        now = time.monotonic()
        if now >= look_at:
            look_at = now + _SECONDS_BETWEEN_LOOKS
            found = lock_owner(run_directory)
            if found != holder:
                # Each holder, known or not, is waited for in its own right.
                begun, begun_at, holder = now, time.time(), found
            patience = _patience_for(holder)
            who = str(holder) if holder is not None else "by whom is not known"
            text = f"{run_directory}: is held ({who}); waits for it until {_time_of_day(begun_at + patience)} at most"
            if text != said:
                said = text
                say(text)
        if now - begun > patience:
            why = "a run is active in it" if holder is None or holder.trains else "is held"
            raise UserError(f"{run_directory}: {why} ({who}); wait for its end, or choose another `name`")
        time.sleep(0.05)


def _patience_for(holder: LockOwner | None) -> float:
    if is_launched() and holder is not None and not holder.trains:
        return _LAUNCHED_PATIENCE_WITH_WORK_SECONDS
    if holder is not None and holder.is_seen_to_live:
        return _PATIENCE_SECONDS
    if is_launched():
        return _LAUNCHED_PATIENCE_SECONDS
    return _ENDING_PATIENCE_SECONDS if holder is not None and holder.process.here else _PATIENCE_SECONDS


def _is_being_killed(pid: int) -> bool:
    """Whether a process that may still be there is being killed, or is ending."""
    try:
        status, stat = (
            Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace") for name in ("status", "stat")
        )
    except OSError:
        return True
    return is_exiting(status, stat)


def is_exiting(status: str, stat: str) -> bool:
    """Whether, by its files `status` and `stat` in /proc (proc(5)), a process has SIGKILL pending or has begun to end:
    then the kernel takes the signal out of the pending ones."""
    pending = [line.split()[1] for line in status.splitlines() if line.startswith(("SigPnd:", "ShdPnd:"))]
    # The command's name stands in brackets and may hold anything; the flags are field 9, the seventh after it.
    flags = int(stat[stat.rindex(")") + 2 :].split()[6])
    return bool(flags & _PF_EXITING) or any(int(signals, 16) >> (signal.SIGKILL - 1) & 1 for signals in pending)


def _write_down(record: Path, does: str) -> None:
    """Say who holds the lock from now on, and what for. On a disk that takes nothing, nobody is better than an earlier
    holder."""
    told = {**this_process().as_json(), "since": time.time(), "does": does}
    draft = record.with_name(f"{record.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        try:
            draft.write_text(json.dumps(told) + "\n", encoding="utf-8")
            os.replace(draft, record)
        except OSError:
            record.unlink(missing_ok=True)
            draft.unlink(missing_ok=True)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _time_of_day(seconds: float) -> str:
    return time.strftime("%H:%M:%S UTC", time.gmtime(seconds))
