"""Signals as something to wait for: noted by the interpreter, read from a descriptor beside all others."""

from __future__ import annotations

import signal
import socket
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
RANK_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

# Asks a rank for the Python stacks of its threads; a rank that has no handler for it ends, as it was to anyway.
STACKS_SIGNAL = signal.SIGUSR2
# Asks again, of a rank that did not answer: one whose interpreter is held by code that never gives it back.
INSISTING_STACKS_SIGNAL = signal.SIGQUIT

SECONDS_OF_ONE_REQUEST = 2.0
"""Stop signals that follow the first within this time are the same request. A terminal that closes sends SIGHUP from
the kernel and from its shell, systemd sends SIGTERM and SIGHUP, a wrapper passes on what its group got as well."""

# Ranks stop on SIGTERM and SIGUSR1 (finish the step, save, exit with 85); Ctrl-C or a closed terminal asks the same.
FORWARDED_AS = {signal.SIGINT: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM}


class SignalInbox:
    """The signals of `numbers` that this process received, to be read in its loop. Use it with `with`, in the main
    thread.

    SIGHUP stays ignored where it is (nohup).
    """

    def __init__(self, numbers: tuple[signal.Signals, ...] = STOP_SIGNALS) -> None:
        self._numbers = numbers
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def __enter__(self) -> SignalInbox:
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._previous = {
            number: signal.signal(number, _noted)
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
        """Readable when a signal has come."""
        return self._reader.fileno()

    def take(self) -> list[signal.Signals]:
        """The signals since the last call, in order."""
        try:
            numbers = self._reader.recv(4096)
        except BlockingIOError:
            return []
        return [signal.Signals(number) for number in numbers if number in self._numbers]


def _noted(number: int, frame: FrameType | None) -> None:
    """The wake-up descriptor has told already."""
