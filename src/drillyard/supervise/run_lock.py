"""Run lock: one supervisor at a time in a run directory, by a lock on logs/ that the kernel
releases with its owner.

A crash on this host leaves nothing stale. A file server, however, keeps the lock of a dead host for
as long as that host's lease, so under a launcher, which itself keeps two starts of a run apart,
such a lock is waited for. The owner writes its identity and its activity to logs/.holder.json, for
the messages of those that wait or are refused. Waiting for a live process of this machine that
trains is useless; anything else ends by itself. File systems without locks do not keep two runs
apart.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from drillyard.errors import UserError
from drillyard.guarded_files import read_json
from drillyard.safe_files import close_quietly, make_directory, replace_file
from drillyard.supervise.console_output import MESSAGES
from drillyard.supervise.launch_contract import is_launched
from drillyard.supervise.process_identity import (
    Process,
    process_of,
    read_kernel_file,
    stat_fields,
    this_process,
)

TRAINS = "trains"
"""Activity of a supervisor in its run directory, until its run is over."""
_OWNER_FILE = ".holder.json"
_WAIT_SECONDS = 5.0
"""For a live owner: it may just have been asked to end."""
_WAIT_SECONDS_AFTER_KILL = 20.0
"""For an owner of this machine that was killed: its reaper, which holds the lock too, ends the rest
within ten seconds (reaper.py)."""
_WAIT_SECONDS_LAUNCHED = 180.0
"""Under a launcher, for an owner on another host: a file server holds the lock of a host that
died for as long as that host's lease (Linux nfsd: 90 s), and a refusal here would end the run
for good."""
_WAIT_SECONDS_LAUNCHED_WITH_WORK = 3600.0
"""Under a launcher, for an owner that does not train: `checkpoint prune` reads terabytes, on
whatever host."""
_PF_EXITING = 0x4
"""Flag of a process that has begun to exit (Linux, include/linux/sched.h)."""
_SECONDS_BETWEEN_LOOKS = 1.0


@dataclass(frozen=True)
class LockOwner:
    """Recorded owner of a run lock."""

    process: Process
    since: float
    """Unix seconds."""
    does: str
    """`TRAINS`, or a phrase that follows `which`: "prunes its checkpoints"."""

    @property
    def trains(self) -> bool:
        """Whether it keeps the lock for as long as a run takes."""
        return self.does == TRAINS

    @property
    def is_seen_to_live(self) -> bool:
        """Whether it is a live process of this machine, neither being killed nor exiting, however
        long that takes."""
        return self.process.here and self.process.alive and not _is_being_killed(self.process.pid)

    def __str__(self) -> str:
        gone = self.process.here and not self.is_seen_to_live
        which = ", which was killed" if gone else "" if self.trains else f", which {self.does}"
        return (
            f"process {self.process.pid} on {self.process.host} since"
            f" {_time_of_day(self.since)}{which}"
        )


@contextlib.contextmanager
def open_logs(run_directory: Path) -> Iterator[int]:
    """Create a run's logs/ if it is missing; yields a descriptor of it. Raises UserError."""
    logs = run_directory / "logs"
    try:
        make_directory(logs, parents=True)
        descriptor = os.open(logs, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise UserError(
            f"{logs}: cannot be created ({error.strerror}); choose another `output`"
        ) from None
    try:
        yield descriptor
    finally:
        close_quietly(descriptor)


@contextlib.contextmanager
def exclusive_run_lock(
    run_directory: Path, say: Callable[[str], None] = MESSAGES.say, does: str = TRAINS
) -> Iterator[int]:
    """Hold the lock of a run directory; yields its descriptor, which a process may inherit to hold
    the lock as well.

    `say` gets a message at once about the owner and the end of the wait; `does`: see LockOwner.
    Raises UserError where a run is active there.
    """
    with open_logs(run_directory) as descriptor:
        _wait_for_lock(run_directory, descriptor, say)
        record = run_directory / "logs" / _OWNER_FILE
        _write_owner(record, does)
        try:
            yield descriptor
        finally:
            owner = lock_owner(run_directory)
            if owner is None or owner.process == this_process():
                with contextlib.suppress(OSError):
                    record.unlink()


def lock_owner(run_directory: Path) -> LockOwner | None:
    try:
        record = read_json(run_directory / "logs" / _OWNER_FILE)
        process = process_of(record)
        return (
            None
            if process is None
            else LockOwner(process, float(record["since"]), str(record["does"]))
        )
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _wait_for_lock(run_directory: Path, descriptor: int, say: Callable[[str], None]) -> None:
    begun, begun_at = time.monotonic(), time.time()
    look_at = begun
    owner: LockOwner | None = None
    last_text = ""
    while not _try_lock(descriptor):
        now = time.monotonic()
        if now >= look_at:
            look_at = now + _SECONDS_BETWEEN_LOOKS
            found = lock_owner(run_directory)
            if found != owner:
                # The time starts again for each owner, known or not.
                begun, begun_at, owner = now, time.time(), found
            seconds = _wait_seconds_for(owner)
            who = str(owner) if owner is not None else "by whom is not known"
            text = (
                f"{run_directory}: is held ({who}); waits for it until"
                f" {_time_of_day(begun_at + seconds)} at most"
            )
            if text != last_text:
                last_text = text
                say(text)
        if now - begun > seconds:
            why = "a run is active in it" if owner is None or owner.trains else "is held"
            raise UserError(
                f"{run_directory}: {why} ({who}); wait for its end, or choose another `name`"
            )
        time.sleep(0.05)


def _wait_seconds_for(owner: LockOwner | None) -> float:
    if is_launched() and owner is not None and not owner.trains:
        return _WAIT_SECONDS_LAUNCHED_WITH_WORK
    if owner is not None and owner.is_seen_to_live:
        return _WAIT_SECONDS
    if is_launched():
        return _WAIT_SECONDS_LAUNCHED
    return _WAIT_SECONDS_AFTER_KILL if owner is not None and owner.process.here else _WAIT_SECONDS


def _is_being_killed(pid: int) -> bool:
    """Whether a process that may still be there is being killed, or is exiting, or is gone."""
    return is_exiting(read_kernel_file(f"/proc/{pid}/status"), stat_fields(pid))


def is_exiting(status: str, stat: Sequence[str]) -> bool:
    """Whether, by /proc/PID/status and `stat_fields`, a process has SIGKILL pending or has begun to
    exit: then the kernel takes the signal out of the pending ones."""
    pending = [
        line.split()[1] for line in status.splitlines() if line.startswith(("SigPnd:", "ShdPnd:"))
    ]
    exiting = not status or not stat or int(stat[6]) & _PF_EXITING
    return bool(exiting) or any(int(signals, 16) >> (signal.SIGKILL - 1) & 1 for signals in pending)


def _write_owner(record: Path, does: str) -> None:
    """Record this process as the owner. On a full disk no record is better than that of an earlier
    owner."""
    content = {**this_process().as_json(), "since": time.time(), "does": does}
    try:
        replace_file(record, f"{json.dumps(content)}\n".encode())
    except OSError:
        with contextlib.suppress(OSError):
            record.unlink()


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True


def _time_of_day(seconds: float) -> str:
    return time.strftime("%H:%M:%S UTC", time.gmtime(seconds))
