"""Watching a run that was launched somewhere: its files are mirrored here, and the watch follows the mirror.

A thread asks the launcher for what metrics.jsonl and events.jsonl have gained (`Launcher.read`) and at times for the
run's state: a run that was cancelled or lost says nothing of its end itself. The screen never waits for the cluster,
and one that does not answer for a while is asked again. Only whole lines are mirrored, so a torn line that the trainer
mends when it goes on is never seen in two versions.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from drillyard.errors import UserError
from drillyard.launch.launcher import Launcher
from drillyard.launch.run_status import RunStatus
from drillyard.reporting.gpu_price import CLUSTER_FILE, GpuPrice, gpu_price
from drillyard.telemetry.events import EVENTS_FILE
from drillyard.telemetry.metrics import METRICS_FILE
from drillyard.watch.watcher import FollowedRun

STATUS_SECONDS = 5.0
MIRRORED = (EVENTS_FILE, METRICS_FILE)


class RunMirror:
    """The growing files of a run in a directory here."""

    def __init__(self, launcher: Launcher, run: str, directory: Path) -> None:
        self.directory = directory
        self.status: RunStatus | None = None
        self._launcher = launcher
        self._run = run
        self._offsets = dict.fromkeys(MIRRORED, 0)
        self._left = threading.Event()
        self._thread: threading.Thread | None = None
        self._over_and_read = False

    @property
    def over_and_read(self) -> bool:
        """Whether the run is over and all that it had written by then is here."""
        return self._over_and_read

    def copy(self) -> None:
        """Fetch what the files have gained. Raises UserError where the cluster cannot be reached."""
        for name in MIRRORED:
            while data := self._launcher.read(self._run, name, self._offsets[name]):
                whole = data[: data.rfind(b"\n") + 1]
                if not whole:
                    break
                with (self.directory / name).open("ab") as file:
                    file.write(whole)
                self._offsets[name] += len(whole)

    def fetch_once(self, name: str) -> None:
        """Copy a file that does not change, where the run has it."""
        data = self._launcher.read(self._run, name, 0)
        if data:
            (self.directory / name).write_bytes(data)

    def keep_up(self, seconds: float) -> None:
        """Copy again and again, in a thread that ends with `leave`."""
        self._thread = threading.Thread(target=self._keep_up, args=(seconds,), daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Copy no more."""
        self._left.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def _keep_up(self, seconds: float) -> None:
        asked = -STATUS_SECONDS
        while not self._left.wait(seconds):
            # Not reached now, reached later: the screen says for how long the run has been silent.
            with contextlib.suppress(UserError):
                if time.monotonic() - asked >= STATUS_SECONDS:
                    self.status = self._launcher.status(self._run)
                    asked = time.monotonic()
                over = self.status is not None and self.status.state.over
                self.copy()
                self._over_and_read = over


class LaunchedRun(FollowedRun):
    """A run whose files are mirrored; its scheduler's word counts where its own files do not tell an end."""

    def __init__(self, mirror: RunMirror, price: GpuPrice | None = None) -> None:
        super().__init__(mirror.directory, price)
        self._mirror = mirror

    def poll(self) -> None:
        """Take what is new."""
        super().poll()
        status = self._mirror.status
        if self._mirror.over_and_read and status is not None and not self.run.over:
            self.run.over = True
            self.run.phase = "completed" if status.state == "succeeded" else str(status.state)

    @property
    def ended(self) -> bool:
        """Whether the run is over. Between two rounds it is not: its scheduler says so."""
        return self._mirror.over_and_read and super().ended


@contextlib.contextmanager
def mirror_run(launcher: Launcher, run: str, price: float | None, seconds: float) -> Iterator[LaunchedRun]:
    """A launched run to watch, its mirror refreshed every so often. Raises UserError where it writes no events."""
    with TemporaryDirectory(prefix="drillyard-watch-") as temporary:
        directory = Path(temporary, run)
        directory.mkdir()
        mirror = RunMirror(launcher, run, directory)
        mirror.copy()
        mirror.fetch_once(CLUSTER_FILE)
        followed = LaunchedRun(mirror, gpu_price(directory, price))
        mirror.keep_up(seconds)
        try:
            yield followed
        finally:
            mirror.leave()
