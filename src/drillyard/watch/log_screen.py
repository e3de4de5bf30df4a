"""A growing log of any framework, measured again after each change: `metrics --follow`, and `runs watch` of a workload.

The merged log of a launched run is mirrored into a temporary file for that. Accelerator and number of GPUs come from
where the run was launched.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.live import Live

from drillyard.errors import UserError
from drillyard.hardware import Catalog
from drillyard.launch.launcher import Launcher
from drillyard.launch.request import LogSelection
from drillyard.measurement.parsed_log import ParsedLog
from drillyard.measurement.read_logs import Tail
from drillyard.measurement.result_text import render_result
from drillyard.measurement.run_result import measure
from drillyard.measurement.user_facts import UserFacts

POLL_SECONDS = 1.0


def follow_log(
    tail: Tail,
    facts: UserFacts,
    catalog: Catalog,
    console: Console,
    *,
    as_json: bool = False,
    is_complete: Callable[[], bool] = lambda: False,
    wait: Callable[[], None] = lambda: time.sleep(POLL_SECONDS),
    no_steps: str | None = None,
) -> None:
    """Show the measured run after each change, in place on a terminal, else one after the other (as JSON: one a line).

    Returns when the tail has ended or `is_complete`; `no_steps` is shown for a complete log without a step.
    """
    live = Live("waiting for the first lines", console=console, auto_refresh=False)

    def show(log: ParsedLog | None, complete: bool) -> None:
        if log is None:
            return
        result = measure(log, facts, catalog)
        if as_json:
            print(json.dumps(result.as_json(), ensure_ascii=False, allow_nan=False), flush=True)
            return
        shown = no_steps if no_steps and complete and not result.log.steps else render_result(result)
        if live.is_started:
            live.update(shown, refresh=True)
        else:
            console.print(shown)

    if console.is_terminal and not as_json:
        live.start(refresh=True)
    try:
        while True:
            complete = is_complete()
            # No reference to the log may survive until the next poll: its growing columns would be copied.
            show(tail.poll(), complete)
            if complete or tail.ended:
                return
            if not tail.behind:
                wait()
    finally:
        live.stop()


class LogMirror:
    """A run's merged log, written to a file by a thread until the run is over."""

    def __init__(self, launcher: Launcher, run: str, path: Path) -> None:
        self.path = path
        self.problem: UserError | None = None
        self._pieces = launcher.logs(run, LogSelection(follow=True))
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)
        path.touch()
        self._thread.start()

    @property
    def complete(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, seconds: float) -> None:
        """Wait for `seconds`, or until the log is complete."""
        self._thread.join(seconds)

    def stop(self) -> None:
        self._stopped.set()

    def _write(self) -> None:
        try:
            with self.path.open("ab") as file:
                for piece in self._pieces:
                    if self._stopped.is_set():
                        break
                    file.write(piece)
                    file.flush()
        except UserError as error:
            self.problem = error


def watch_log(
    launcher: Launcher, run: str, console: Console, facts: UserFacts, catalog: Catalog, interval_seconds: float
) -> None:
    """Follow the merged log of a launched run until it is over. Raises UserError where the log cannot be read."""
    with _mirrored(launcher, run) as mirror:
        follow_log(
            Tail([mirror.path]),
            facts,
            catalog,
            console,
            is_complete=lambda: mirror.complete,
            wait=lambda: mirror.wait(interval_seconds),
            no_steps=f"{run} is over, and its log has no step that drillyard metrics knows: drillyard runs logs {run}",
        )
    if mirror.problem is not None:
        raise mirror.problem


@contextlib.contextmanager
def _mirrored(launcher: Launcher, run: str) -> Iterator[LogMirror]:
    with tempfile.TemporaryDirectory(prefix="drillyard-watch-", ignore_cleanup_errors=True) as directory:
        mirror = LogMirror(launcher, run, Path(directory, f"{run}.log"))
        try:
            yield mirror
        finally:
            mirror.stop()
