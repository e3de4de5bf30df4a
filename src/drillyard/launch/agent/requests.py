"""Requests to stop: signals to this agent, and what another node's agent heard.

Signals within two seconds are one request (schedulers send several, to an agent and to others alike); a later one ends
everything at once. SIGCHLD is listened to as well, so that the loop wakes when the command ends.
"""

from __future__ import annotations

import signal
import time

from .shared_modules import signals

PATIENCE_AFTER_FAILURE_SECONDS = 5.0
"""When a round has failed its state is on disk already: what still runs gets this long after SIGTERM."""
START_SECONDS = 600.0
"""How long agents wait for each other at the start where `join_seconds` is 0: no second chance for lost nodes."""


class StopRequests:
    """What was asked from outside. Use it with `with`, in the main thread."""

    def __init__(self) -> None:
        self._inbox = signals.SignalInbox((*signals.STOP_SIGNALS, signal.SIGCHLD))
        self.first: signal.Signals | None = None
        self.insisted = False
        """Whether it was asked again, later: everything is to end at once."""
        self._own_at: float | None = None
        self.at = 0.0
        """When the first came, monotonic."""

    def __enter__(self) -> StopRequests:
        self._inbox.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._inbox.__exit__(*exception)

    def fileno(self) -> int:
        """Readable when a signal has come."""
        return self._inbox.fileno()

    def take(self) -> list[signal.Signals]:
        """The stop signals since the last call; `first` and `insisted` know of them then."""
        heard: list[signal.Signals] = [number for number in self._inbox.take() if number != signal.SIGCHLD]
        now = time.monotonic()
        for number in heard:
            if self._own_at is None:
                self._own_at = now
            self.hear_of(number, insisted=now - self._own_at > signals.SECONDS_OF_ONE_REQUEST)
        return heard

    def hear_of(self, number: int, insisted: bool) -> None:
        """Hear of a request that came to another agent. Whether it was the second is known there: what comes to two
        agents at different times is one request to the run."""
        if self.first is None:
            self.first, self.at = signal.Signals(number), time.monotonic()
        self.insisted = self.insisted or insisted

    @property
    def forwarded(self) -> int:
        """The signal that a command gets for the first request."""
        assert self.first is not None
        return signals.FORWARDED_AS.get(self.first, self.first)
