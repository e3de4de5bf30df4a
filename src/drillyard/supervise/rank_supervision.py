"""Supervision inside a rank: its heartbeat, its answers to stop signals and stack requests.

Set up before any slow import, so that a signal in the first seconds is answered too. Python runs
signal handlers in the main thread, between two bytecodes: a rank that waits in a store, joins the
others or sits in a hung collective would not run them. So the interpreter's C handler writes the
number to a socket, and the thread that sends heartbeats acts on it. SIGQUIT dumps the stacks from
C, without the interpreter's lock: walking the frames of running threads may crash the process, so
it is the supervisor's second try only.

Whether a rank makes progress is judged by its supervisor alone (attempt.py). One that another
program has started, such as torchrun, is ended by the limit of its collectives.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from drillyard.errors import UserError
from drillyard.supervise.heartbeat import heartbeat_writer
from drillyard.supervise.launch_contract import EXIT_CHECKPOINTED, failure_elsewhere
from drillyard.supervise.stop_requests import (
    INSISTING_STACKS_SIGNAL,
    RANK_STOP_SIGNALS,
    SECONDS_OF_ONE_REQUEST,
    STACKS_SIGNAL,
    SignalInbox,
)
from drillyard.telemetry.events import EventName, append_event

Kind = Literal["strict", "working", "waiting"]
"""Rules for progress, by phase:

- strict: training. Only steps and forwards count; a rank that waits in a collective has no
  heartbeat;
- working: long work without steps (imports, tokenising, loading, compiling, saving, exporting). The
  process's own work counts: a twentieth of a core, or 1 MB/s read or written, since the last look.
  (A GPU rank may spin in a collective; there the collective timeout is the limit.)
- waiting: for another rank, which is watched itself. The first rank of a further node shows
  heartbeats all the time, as its supervisor does not see those of rank 0, which may tokenise for
  hours.
"""
StopAction = Literal["leave", "note", "ignore"]
"""The answer to a stop signal:

- leave: nothing trained in this attempt is unsaved (imports, tokenising, loading, compiling; after
  the last checkpoint, evaluation and export). Exit with 85 at once: the same command starts again,
  and caches and checkpoints are intact at any moment, because their manifests are written last.
- note: in training. Keep the request for the ranks to agree on (training/callbacks.py); a second
  one, more than two seconds later, exits with 128 + N at once.
- ignore: all is saved and the rank is about to exit.
"""

_LEAST_CORES = 0.05
_LEAST_BYTES_PER_SECOND = 1e6
_LONGEST_TICK_SECONDS = 5.0
_SECONDS_TO_WRITE = 5.0
"""For the last events of a rank that ends itself; a hung disk may never take them."""


class RankSupervision:
    """Create it first of all in a rank's main thread. `is_claimed`: the run directory is known to
    be this run's.

    `signs`: the heartbeat. `received`: the stop signal that was noted. `owns_directory`: whether
    events may be written to the run directory; `attempt`: the number that they carry.
    """

    def __init__(
        self, run_directory: Path, watchdog_seconds: float, *, attempt: int, is_claimed: bool
    ) -> None:
        faulthandler.enable()
        faulthandler.register(INSISTING_STACKS_SIGNAL, all_threads=True)
        self.signs = heartbeat_writer(os.environ)
        self.received: signal.Signals | None = None
        self.owns_directory = is_claimed or attempt > 0
        self.attempt = attempt
        self._run_directory = run_directory
        self._rank = int(os.environ["RANK"])
        self._is_first_of_further_node = self._rank != 0 and os.environ.get("LOCAL_RANK") == "0"
        self._kind: Kind = "working"
        self._answer: StopAction = "leave"
        self._received_at = 0.0
        self._closed = False
        self._tick_seconds = tick_seconds(watchdog_seconds)
        self._lock = threading.Lock()
        self._inbox = SignalInbox(*RANK_STOP_SIGNALS, STACKS_SIGNAL)
        self._inbox.__enter__()
        # A forked child would write its signals into our socket.
        os.register_at_fork(after_in_child=lambda: self._inbox.__exit__())
        threading.Thread(target=self._run, name="supervision", daemon=True).start()

    def begin(self, phase: str, kind: Kind) -> None:
        self._kind = kind
        self.signs.begin(phase)

    @contextlib.contextmanager
    def during(self, phase: str, kind: Kind = "working") -> Iterator[None]:
        """A phase within another, which continues afterwards."""
        outer, outer_kind = self.signs.last().phase, self._kind
        self.begin(phase, kind)
        try:
            yield
        finally:
            self.begin(outer, outer_kind)

    def answer(self, by: StopAction) -> None:
        """Set the answer to stop signals from now on; `leave` also acts on one that was noted
        before."""
        with self._lock:
            self._answer = by
            if by == "leave" and self.received is not None:
                self._leave(self.received)

    def close(self) -> None:
        """Stop watching: the rank is about to exit."""
        self._closed = True

    def _run(self) -> None:
        looked, work = time.monotonic(), (0.0, 0)
        with contextlib.suppress(OSError):
            work = work_done()
        while not self._closed:
            select.select(
                [self._inbox], [], [], max(0.0, looked + self._tick_seconds - time.monotonic())
            )
            for number in self._inbox.take():
                self._act_on(number)
            now = time.monotonic()
            seconds = now - looked
            if seconds < self._tick_seconds:
                continue
            looked = now
            # If this process was stopped or starved meanwhile, its lack of work proves nothing.
            if seconds > 3 * self._tick_seconds + 1 or (
                self._kind == "waiting" and self._is_first_of_further_node
            ):
                self.signs.show()
            elif self._kind == "working":
                # A read of /proc may fail; this thread must still answer signals.
                with contextlib.suppress(OSError):
                    before, work = work, work_done()
                    if did_work(before, work, seconds):
                        self.signs.show()

    def _act_on(self, number: signal.Signals) -> None:
        if number == STACKS_SIGNAL:
            _in_thread(faulthandler.dump_traceback)
            return
        now = time.monotonic()
        with self._lock:
            if self._answer == "leave":
                self._leave(number)
            elif self._answer == "note" and self.received is None:
                self.received, self._received_at = number, now
            elif self._answer == "note" and now - self._received_at > SECONDS_OF_ONE_REQUEST:
                os._exit(128 + number)

    def _leave(self, number: signal.Signals) -> None:
        def report() -> None:
            if failure_elsewhere() is None:
                # Else another node's failure is the reason, and the supervisor writes that.
                self._write_event("signal", signal=number.name)
                self._write_event("end", status="interrupted")
            sys.stderr.write(
                f"drillyard: {number.name}: nothing of this attempt to save; start again (exit code"
                " 85)\n"
            )

        _in_thread(report, _SECONDS_TO_WRITE)
        os._exit(EXIT_CHECKPOINTED)

    def _write_event(self, event: EventName, **fields: object) -> None:
        if self._rank == 0 and self.owns_directory:
            # A full disk loses the event; the exit code still reports it.
            with contextlib.suppress(UserError):
                append_event(self._run_directory, event, round=self.attempt, rank=0, **fields)


def _in_thread(write: Callable[[], None], seconds: float = 0.0) -> None:
    """Write in a thread, since a hung disk can block forever, and wait up to `seconds` for its
    end."""
    thread = threading.Thread(target=write, name="supervision output", daemon=True)
    # RuntimeError: this user's limit of threads.
    with contextlib.suppress(RuntimeError):
        thread.start()
        thread.join(seconds)


def work_done() -> tuple[float, int]:
    """CPU seconds of this process and its ended children, and bytes that it has read and written,
    files or sockets. Raises OSError."""
    times = os.times()
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return sum(times[:4]), int(counts["rchar"]) + int(counts["wchar"])


def did_work(before: tuple[float, int], after: tuple[float, int], seconds: float) -> bool:
    """Whether a process worked between two looks at `work_done`, `seconds` apart."""
    cores = (after[0] - before[0]) / seconds
    return cores >= _LEAST_CORES or (after[1] - before[1]) / seconds >= _LEAST_BYTES_PER_SECOND


def tick_seconds(watchdog_seconds: float) -> float:
    """Seconds between a rank's looks at its work: a 20th of the watchdog's limit, and at most 5."""
    return (
        min(_LONGEST_TICK_SECONDS, max(0.05, watchdog_seconds / 20))
        if watchdog_seconds
        else _LONGEST_TICK_SECONDS
    )
