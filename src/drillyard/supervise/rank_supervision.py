"""A rank's side of supervision: its heartbeat, its answer to stop signals, and its stacks on request.

Set up before anything that takes long is imported, so that a signal in the first seconds is answered too. Python runs
signal handlers in the main thread, between two bytecodes: a rank that waits in a store, joins the others or sits in a
hung collective would not run them. So the interpreter's C handler writes the number to a socket, and a thread acts on
it. SIGQUIT dumps the stacks from C, without the interpreter's lock: walking the frames of running threads may crash
the process, so it is the supervisor's second try only.
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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

from drillyard.errors import UserError
from drillyard.supervise.heartbeat import heartbeat_writer
from drillyard.supervise.launch_contract import EXIT_CHECKPOINTED, failure_elsewhere
from drillyard.supervise.progress_monitor import ProgressMonitor, stacks_file, tick_seconds
from drillyard.supervise.stop_requests import (
    INSISTING_STACKS_SIGNAL,
    RANK_STOP_SIGNALS,
    SECONDS_OF_ONE_REQUEST,
    STACKS_SIGNAL,
    SignalInbox,
)
from drillyard.telemetry.events import EventName, append_event

StopAction = Literal["leave", "note", "ignore"]


class StopSignals:
    """Answers stop signals from the moment it is made, in the main thread, in one of three ways:

    - `leave`: nothing trained in this attempt is unsaved (imports, tokenising, loading, compiling; after the last
      checkpoint, evaluation and export). Call `on_leave` and exit with 85 at once: the same command starts again, and
      caches and checkpoints are whole at any moment, because their manifests are written last.
    - `note`: in training. Keep the request for the ranks to agree on (training/callbacks.py) and call `on_note`; a
      second one, more than two seconds later, exits with 128 + N at once.
    - `ignore`: all is saved and the rank is about to exit.

    SIGUSR2 writes the Python stacks of all threads to standard error, whatever the answer.
    """

    def __init__(self, on_leave: Callable[[signal.Signals], None], on_note: Callable[[], None]) -> None:
        self.received: signal.Signals | None = None
        self._received_at = 0.0
        self._on_leave = on_leave
        self._on_note = on_note
        self._answer: StopAction = "leave"
        self._lock = threading.Lock()
        self._inbox = SignalInbox(*RANK_STOP_SIGNALS, STACKS_SIGNAL)
        self._inbox.__enter__()
        # A forked child would write its signals into our socket.
        os.register_at_fork(after_in_child=lambda: self._inbox.__exit__())
        threading.Thread(target=self._listen, name="stop-signals", daemon=True).start()

    def answer(self, by: StopAction) -> None:
        """Answer signals so from now on; `leave` also acts on one that was noted before."""
        with self._lock:
            self._answer = by
            if by == "leave" and self.received is not None:
                self._leave(self.received)

    def _listen(self) -> None:
        while True:
            select.select([self._inbox], [], [])
            for number in self._inbox.take():
                if number == STACKS_SIGNAL:
                    faulthandler.dump_traceback(all_threads=True)
                    continue
                with self._lock:
                    self._act_on(number)

    def _act_on(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._answer == "leave":
            self._leave(number)
        elif self._answer == "note" and self.received is None:
            self.received, self._received_at = number, now
            self._on_note()
        elif self._answer == "note" and now - self._received_at > SECONDS_OF_ONE_REQUEST:
            os._exit(128 + number)

    def _leave(self, number: signal.Signals) -> None:
        self._on_leave(number)
        os._exit(EXIT_CHECKPOINTED)


@dataclass
class RankSupervision:
    """`watch` shows what this rank does, `stops` has the requests to stop. `owns_directory`: whether the run directory
    is known to be this run's, so that events may be written there; `attempt`: the number that they carry."""

    watch: ProgressMonitor
    owns_directory: bool
    attempt: int
    stops: StopSignals = field(init=False)


def start_supervision(
    run_directory: Path, watchdog_seconds: float, *, attempt: int, is_claimed: bool
) -> RankSupervision:
    """Start the heartbeat and the answer to stop signals; call it first in a rank's main thread.

    Under a supervisor (DRILLYARD_SUPERVISED) the rank does not judge itself. `is_claimed`: see `owns_directory`.
    """
    faulthandler.enable()
    faulthandler.register(INSISTING_STACKS_SIGNAL, all_threads=True)
    rank = int(os.environ["RANK"])

    def write_event(event: EventName, **fields: object) -> None:
        if rank == 0 and side.owns_directory:
            # A full disk takes no event; the exit code still says it.
            with contextlib.suppress(UserError):
                append_event(run_directory, event, round=side.attempt, rank=0, **fields)

    def on_leave(number: signal.Signals) -> None:
        if failure_elsewhere() is None:
            # Else another node's failure is why, and the supervisor writes that.
            write_event("signal", signal=number.name)
            write_event("end", status="interrupted")
        sys.stderr.write(f"drillyard: {number.name}: nothing of this attempt to save; start again (exit code 85)\n")

    def on_hang(message: str, ends: bool) -> IO[str]:
        if ends:
            write_event("failure", reason=message, failed_rank=rank, exit_code=1)
        return stacks_file(run_directory, rank, message)

    judge = 0.0 if os.environ.get("DRILLYARD_SUPERVISED") == "1" else watchdog_seconds
    watch = ProgressMonitor(heartbeat_writer(os.environ), tick_seconds(watchdog_seconds), judge, on_hang)
    side = RankSupervision(watch, owns_directory=is_claimed or attempt > 0, attempt=attempt)
    # Last, as a signal may come at once, and `write_event` needs `side`.
    side.stops = StopSignals(on_leave, watch.asked_to_stop)
    return side
