"""Who has a run directory: one supervisor at a time, by a lock on its logs/ that the kernel drops with its last holder.

Nothing stale is left by a crash on this host. A file server, though, holds the lock of a host that died for as long as
that host's lease, so under a launcher, which keeps two starts of a run apart itself, such a lock is outwaited. Beside
the lock its holder writes itself down (logs/.holder.json): whoever waits or is refused says who it is, and where that
is a live process of this machine, waiting is of no use. File systems without locks do not keep two runs apart.
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
from drillyard.storage import close_quietly
from drillyard.supervise.launched import is_launched
from drillyard.supervise.output import say_on_stderr
from drillyard.supervise.process_identity import Process, process_of, this_process

_HOLDER = ".holder.json"
_PATIENCE_SECONDS = 5.0
"""For a holder that lives: it may just have been asked to end."""
_ENDING_PATIENCE_SECONDS = 20.0
"""For what a holder of this machine that was killed has left: its guardian, which holds the lock too, ends it within
ten seconds (guardian.py)."""
_LAUNCHED_PATIENCE_SECONDS = 180.0
"""Under a launcher, for a holder that nobody here can see: a file server holds the lock of a host that died for as long
as that host's lease (Linux nfsd: 90 s), and a refusal here would end the run for good."""
_SECONDS_BETWEEN_LOOKS = 1.0


@dataclass(frozen=True)
class Holder:
    """Who has a run directory, by its own word."""

    process: Process
    since: float
    """Unix seconds."""

    @property
    def is_seen_to_live(self) -> bool:
        """Whether it is a process of this machine that goes on: one that SIGKILL waits for in the kernel does not."""
        return self.process.here and self.process.alive and not _is_being_killed(self.process.pid)

    def __str__(self) -> str:
        gone = ", which was killed" if self.process.here and not self.is_seen_to_live else ""
        return f"process {self.process.pid} on {self.process.host} since {_time_of_day(self.since)}{gone}"


@contextlib.contextmanager
def logs_of(run_directory: Path) -> Iterator[int]:
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
def only_holder_of(run_directory: Path, say: Callable[[str], None] = say_on_stderr) -> Iterator[int]:
    """Hold the lock of a run directory; yields its descriptor, and whoever inherits that holds the lock as well.

    `say` is told at once what is waited for, and until when. Raises UserError where a run is active there.
    """
    with logs_of(run_directory) as descriptor:
        _wait_for_lock(run_directory, descriptor, say)
        record = run_directory / "logs" / _HOLDER
        _write_down(record)
        try:
            yield descriptor
        finally:
            with contextlib.suppress(OSError):
                record.unlink()


@contextlib.contextmanager
def hold_run_directory(run_directory: Path) -> Iterator[None]:
    """Keep runs out of a run directory while something in it is changed. UserError when one is active in it."""
    with only_holder_of(run_directory):
        yield


def holder_of(run_directory: Path) -> Holder | None:
    """Who has written itself down last as the holder and not taken leave; None where that is not known."""
    try:
        told = json.loads((run_directory / "logs" / _HOLDER).read_text(encoding="utf-8"))
        process = process_of(told)
        return None if process is None else Holder(process, float(told["since"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _wait_for_lock(run_directory: Path, descriptor: int, say: Callable[[str], None]) -> None:
    begun = time.monotonic()
    begun_at = time.time()
    looked_at = -_SECONDS_BETWEEN_LOOKS
    said = ""
    while not _try_lock(descriptor):
        waited = time.monotonic() - begun
        if waited - looked_at >= _SECONDS_BETWEEN_LOOKS:
            looked_at = waited
            holder = holder_of(run_directory)
            patience = _patience_for(holder)
            who = str(holder) if holder is not None else "by whom is not known"
            text = f"{run_directory}: is held ({who}); waits for it until {_time_of_day(begun_at + patience)} at most"
            if text != said:
                said = text
                say(text)
        if waited > patience:
            raise UserError(
                f"{run_directory}: a run is active in it ({who}); wait for its end, or choose another `name`"
            )
        time.sleep(0.05)


def _patience_for(holder: Holder | None) -> float:
    if holder is not None and holder.is_seen_to_live:
        return _PATIENCE_SECONDS
    if is_launched():
        return _LAUNCHED_PATIENCE_SECONDS
    return _ENDING_PATIENCE_SECONDS if holder is not None and holder.process.here else _PATIENCE_SECONDS


def _is_being_killed(pid: int) -> bool:
    """Whether SIGKILL has been sent to a process that is still there."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    pending = [line.split()[1] for line in status.splitlines() if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(int(signals, 16) >> (signal.SIGKILL - 1) & 1 for signals in pending)


def _write_down(record: Path) -> None:
    """Say who holds the lock from now on. On a disk that takes nothing, nobody is better than an earlier holder."""
    told = {**this_process().as_json(), "since": time.time()}
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
