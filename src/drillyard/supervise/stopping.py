"""Signals in a rank: heard at once, whatever its main thread is doing.

SIGTERM and SIGUSR1 ask a rank to stop. Python runs handlers in the main thread, between two bytecodes: a rank that
waits in a store, joins the others or sits in a hung collective would hear nothing. So the number is written to a socket
by the interpreter's C handler, and a thread of ours acts on it, in one of three ways:

- `leave`: the rank has trained nothing in this round that is not saved (imports, tokenising, loading, compiling; after
  the last checkpoint, evaluation and export). It ends at once with 85: the same command starts it again, and nothing
  was lost. Caches and checkpoints are whole at any moment, because their manifests are written last;
- `note`: in training. The request is kept for the ranks to agree on (training/callbacks.py); a second one ends the rank
  at once with 128 + N. One that follows within two seconds is the same request, delivered to a supervisor and to its
  ranks alike;
- `ignore`: all is saved and the rank is on its way out.

SIGUSR2 asks for the Python stacks of all threads, on standard error. The same thread writes them, as it holds the
interpreter's lock meanwhile: a C handler that walks the frames of threads while these run may crash the process.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import Literal

from drillyard.supervise.attempt import EXIT_CHECKPOINTED
from drillyard.supervise.signals import RANK_STOP_SIGNALS, SECONDS_OF_ONE_REQUEST, STACKS_SIGNAL, SignalInbox

StopAction = Literal["leave", "note", "ignore"]


class StopSignals:
    """Listens for stop signals from the moment it is made, in the main thread. `on_leave` is called before an exit 85,
    `on_note` when a request is noted."""

    def __init__(self, on_leave: Callable[[signal.Signals], None], on_note: Callable[[], None]) -> None:
        self.received: signal.Signals | None = None
        self._received_at = 0.0
        self._on_leave = on_leave
        self._on_note = on_note
        self._answer: StopAction = "leave"
        self._lock = threading.Lock()
        self._inbox = SignalInbox((*RANK_STOP_SIGNALS, STACKS_SIGNAL))
        self._inbox.__enter__()
        # A forked child would write its signals into our socket.
        os.register_at_fork(after_in_child=lambda: self._inbox.__exit__())
        threading.Thread(target=self._listen, name="stop-signals", daemon=True).start()

    def answer(self, by: StopAction) -> None:
        """From now on signals are answered so; one that was noted before is acted on if `by` is `leave`."""
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
                    self._hear(number)

    def _hear(self, number: signal.Signals) -> None:
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
