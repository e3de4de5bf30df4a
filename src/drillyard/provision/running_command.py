"""A long-running program of provisioning: its output line by line, with limits, and with Ctrl-C
passed on to it instead of ending this process."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO

_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Limits:
    """How long commands may take, in seconds."""

    total: float = 3 * 3600.0
    """A control plane takes 10 minutes, a pool of many nodes an hour."""
    silent: float = 600.0
    """Without a line of output: running changes print one every 10 s, downloads of init none."""
    stop: float = 1200.0
    """From the first Ctrl-C until what is in progress has ended."""
    kill: float = 30.0
    """From SIGTERM to SIGKILL."""


class RunningCommand:
    """A program whose output is read, with limits, and with Ctrl-C passed on to it once."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        limits: Limits,
        report: Callable[[str], None],
        stops_first: Callable[[], list[int]] = list,
    ) -> None:
        self._stops_first = stops_first
        self._process, self._limits, self._report = process, limits, report
        self._requests = 0
        self._sent = 0
        self.late = ""
        """Which limit it has passed; empty: none."""

    @property
    def ended_in_order(self) -> bool:
        """Whether it ended by itself, or after being asked once."""
        return self._requests < 2 and not self.late and (self._process.poll() or 0) >= 0

    @property
    def was_stopped(self) -> bool:
        return self._requests > 0

    def lines(self, stdout: IO[bytes]) -> Iterator[str]:
        """Its lines of output as they come, until it has ended."""
        begun = last = time.monotonic()
        deadline: float | None = None
        buffer = b""
        with self._signals(), selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while True:
                if selector.select(_POLL_SECONDS):
                    if not (data := os.read(stdout.fileno(), 1 << 16)):
                        break
                    last = time.monotonic()
                    *complete, buffer = (buffer + data).split(b"\n")
                    yield from (line.decode(errors="replace") for line in complete)
                now = time.monotonic()
                deadline = self._pass_on(now, deadline)
                if deadline is None and (late := self._passed(begun, last, now)):
                    self.late, deadline = late, now + self._limits.kill
                    self._send(signal.SIGTERM)
                if deadline is not None and now > deadline:
                    self.kill()
                    break
            yield from ([buffer.decode(errors="replace")] if buffer else [])
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(self._limits.kill)

    def _passed(self, begun: float, last: float, now: float) -> str:
        if now - begun > self._limits.total:
            return f"not done after {self._limits.total:.0f} s"
        silent = now - last > self._limits.silent
        return f"no output for {self._limits.silent:.0f} s" if silent else ""

    def _pass_on(self, now: float, deadline: float | None) -> float | None:
        """Send on each request to stop; returns the time at which the command is killed."""
        if self._sent == self._requests:
            return deadline
        self._sent = self._requests
        self._send(signal.SIGINT)
        if self._requests > 1:
            # Terraform exits at once, without waiting for what is in progress.
            return now + self._limits.kill
        self._report(
            "stopping: what is in progress ends first, and the state is saved; Ctrl-C again stops"
            " at once"
        )
        return now + self._limits.stop

    def _send(self, number: signal.Signals) -> None:
        for pid in self._receivers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _receivers(self) -> list[int]:
        """Who is asked to stop: the program itself, or what it has started that must end first."""
        running = [self._process.pid] if self._process.poll() is None else []
        return self._stops_first() or running

    def kill(self) -> None:
        """Kill its whole group, if it still runs."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Count requests to stop instead of ending this process: its death would kill the program
        before it has saved the state."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def count(number: int, frame: object) -> None:
            self._requests += 1

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.getsignal(number) for number in numbers}
        for number, handler in before.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, count)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
