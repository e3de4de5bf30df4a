"""Stop signals: an inbox to wait on, and what they request of a run.

Shipped with the agents of launched runs (launch/agent): standard library only, nothing newer than
Python 3.9.
"""

from __future__ import annotations

import signal
import socket
import time

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
RANK_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
FORWARDED_AS = {signal.SIGINT: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM}
"""Ranks stop on SIGTERM and SIGUSR1 (finish the step, save, exit with 85); Ctrl-C and a closed
terminal ask for the same."""

STACKS_SIGNAL = signal.SIGUSR2
"""Request for the Python stacks of a rank's threads; a rank without a handler for it ends, as it
was about to."""
INSISTING_STACKS_SIGNAL = signal.SIGQUIT
"""Second request, to a rank that did not answer: one whose interpreter is held by code that never
releases it."""

SECONDS_OF_ONE_REQUEST = 2.0
"""Stop signals that follow the first within this time are the same request. A terminal that closes
sends SIGHUP from the kernel and from its shell, systemd sends SIGTERM and SIGHUP, a wrapper passes
on what its group got as well."""


class SignalInbox:
    """The signals of `numbers` that this process received, for a loop to read. Use it with `with`,
    in the main thread.

    SIGHUP stays ignored where it is (nohup).
    """

    def __init__(self, *numbers: signal.Signals) -> None:
        self._numbers = numbers
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def __enter__(self) -> SignalInbox:
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        # The interpreter writes the numbers to the wake-up descriptor; the handlers need do
        # nothing.
        self._previous = {
            number: signal.signal(number, lambda *_: None)
            for number in self._numbers
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
        }
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        """Descriptor that is readable when a signal has come."""
        return self._reader.fileno()

    def take(self) -> list[signal.Signals]:
        """The signals since the last call, in order."""
        try:
            numbers = self._reader.recv(4096)
        except BlockingIOError:
            return []
        return [signal.Signals(number) for number in numbers if number in self._numbers]


class StopRequests(SignalInbox):
    """Requests to stop a run: stop signals to this process, and those that another node's agent
    reports.

    `wake_on`: a further signal that only makes it readable.
    """

    def __init__(self, *wake_on: signal.Signals) -> None:
        super().__init__(*STOP_SIGNALS, *wake_on)
        self.first: signal.Signals | None = None
        self.at = 0.0
        """Time of the first, by time.monotonic."""
        self.insisted = False
        """Whether a second request came, more than SECONDS_OF_ONE_REQUEST later: end everything at
        once."""
        self._own_at = 0.0

    def __enter__(self) -> StopRequests:
        super().__enter__()
        return self

    def take(self) -> list[signal.Signals]:
        """The stop signals since the last call; updates `first` and `insisted`."""
        taken = [number for number in super().take() if number in STOP_SIGNALS]
        now = time.monotonic()
        for number in taken:
            self._own_at = self._own_at or now
            self.add(number, insisted=now - self._own_at > SECONDS_OF_ONE_REQUEST)
        return taken

    def add(self, number: int, insisted: bool) -> None:
        """Add a request that another agent received, first or again (`insisted`, by its own count):
        signals that come to two agents at different times are one request to the run."""
        if self.first is None:
            self.first, self.at = signal.Signals(number), time.monotonic()
        self.insisted = self.insisted or insisted
