"""Watching a launched run of any framework: its merged log is kept up to date in a file here and measured as it grows.

What the framework logs is read by `measure`, as `drillyard metrics --follow` would; accelerator and number of GPUs come
from where the run was launched. The file is gone with the watch.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.live import Live

from drillyard.errors import UserError
from drillyard.hardware import Catalog
from drillyard.launch.launcher import Launcher
from drillyard.launch.request import LogSelection
from drillyard.measurement.read_logs import Tail
from drillyard.measurement.result_text import render_result
from drillyard.measurement.run_result import measure
from drillyard.measurement.user_facts import UserFacts

_NO_STEPS = "{run} is over, and no line of its log is a step as drillyard metrics knows them: drillyard runs logs {run}"


class LogMirror:
    """A run's merged log, written to a file by a thread until the run is over."""

    def __init__(self, launcher: Launcher, run: str, path: Path) -> None:
        self.path = path
        self.problem: UserError | None = None
        self._pieces = launcher.logs(run, LogSelection(follow=True))
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)
        path.touch()
        self._thread.start()

    @property
    def complete(self) -> bool:
        """Whether nothing more will come."""
        return not self._thread.is_alive()

    def wait(self, seconds: float) -> None:
        """So long, or until it is complete."""
        self._thread.join(seconds)

    def leave(self) -> None:
        """Write no more."""
        self._left.set()

    def _write(self) -> None:
        try:
            with self.path.open("ab") as file:
                for piece in self._pieces:
                    if self._left.is_set():
                        break
                    file.write(piece)
                    file.flush()
        except UserError as error:
            self.problem = error


def watch_log(
    launcher: Launcher, run: str, console: Console, asked: UserFacts, facts: Catalog, interval_seconds: float
) -> None:
    """Show what is measured, in place on a terminal, else again and again, until the run is over.

    Of a log that ends without a step only that is said: all that measuring it could tell is what is missing.
    Raises UserError where the log cannot be read.
    """
    with _mirrored(launcher, run) as log, Live(console=console, auto_refresh=False) as live:
        tail = Tail([log.path])
        while True:
            complete = log.complete
            records = tail.poll()
            if records is not None:
                result = measure(records, asked, facts)
                shown = render_result(result) if result.log.steps or not complete else _NO_STEPS.format(run=run)
                if console.is_terminal:
                    live.update(shown, refresh=True)
                else:
                    console.print(shown)
                # Gone before the next poll: its columns share the memory that grows there and would be copied.
                del records
            if complete:
                break
            log.wait(interval_seconds)
    if log.problem is not None:
        raise log.problem


@contextlib.contextmanager
def _mirrored(launcher: Launcher, run: str) -> Iterator[LogMirror]:
    with tempfile.TemporaryDirectory(prefix="drillyard-watch-", ignore_cleanup_errors=True) as directory:
        log = LogMirror(launcher, run, Path(directory, f"{run}.log"))
        try:
            yield log
        finally:
            log.leave()
