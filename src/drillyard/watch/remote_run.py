"""A launched run on the live screen: its files are mirrored here, and the watch follows the mirror.

A thread fetches what metrics.jsonl and events.jsonl have gained (`Launcher.read`), and at times the
run's state: a cancelled or lost run logs no end of its own. The screen never waits for the cluster,
and a failed request is repeated. Only whole lines are mirrored: the trainer may repair a torn last
line. `runs status` reads the ends of the files once.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console

from drillyard.errors import UserError
from drillyard.hardware import load_catalog
from drillyard.launch.agent.state_file import json_object
from drillyard.launch.launcher import Launcher
from drillyard.launch.remote_files import READ_BYTES, print_notice
from drillyard.launch.request import LogSelection
from drillyard.launch.run_status import RunStatus, State
from drillyard.launch.status_text import headline
from drillyard.reporting.gpu_price import CLUSTER_FILE, GpuPrice, gpu_price
from drillyard.telemetry.events import EVENTS_FILE, is_event, refusing_odd_values
from drillyard.telemetry.jsonlines import decode
from drillyard.telemetry.metrics import METRICS_FILE, is_step
from drillyard.watch.live_run import LiveRun
from drillyard.watch.screen import progress_line
from drillyard.watch.watcher import FollowedRun, watch_run

if TYPE_CHECKING:
    from drillyard.launch.cluster_registry import FoundRun

STATUS_SECONDS = 5.0
WAITING_SECONDS = 5.0
MIRRORED: Final = (EVENTS_FILE, METRICS_FILE)
_TAIL_BYTES: Final = 64 << 10


def watch_launched_run(
    found: FoundRun, console: Console, price: float | None, interval_seconds: float | None = None
) -> bool:
    """Show a launched run until it is over; returns whether it failed. Raises UserError for a run
    without output."""
    seconds = interval_seconds or (1.0 if console.is_terminal else 10.0)
    if not _wait_for_events(found):
        _watch_workload(found, console, price, seconds)
        return found.status().state is State.failed
    with mirror_run(found.launcher, found.handle.run, price, min(seconds, 2.0)) as followed:
        return watch_run(followed, console, interval_seconds).failed


def _wait_for_events(found: FoundRun) -> bool:
    """Wait for the run's first output: True for events of Drillyard's trainer, False for the log of
    a workload.

    Raises UserError for a run that is over without either.
    """
    run, last_state = found.handle.run, None
    while True:
        status = found.status()
        if found.launcher.read(run, EVENTS_FILE, 0):
            return True
        is_workload = "\nworkload:" in found.launcher.read(run, "launch/run.yaml", 0).decode(
            errors="replace"
        )
        if is_workload and next(found.launcher.logs(run, LogSelection(tail=1)), b""):
            return False
        now = headline(status, time.time())
        if status.state.over:
            raise UserError(
                f"{found.handle}: {now}, and it wrote nothing to watch; see drillyard runs status"
                f" {found.words}"
            )
        if status.state is not last_state:
            last_state = status.state
            print_notice(f"{found.handle}: {now}; waiting for its first output")
        time.sleep(WAITING_SECONDS)


def _watch_workload(found: FoundRun, console: Console, price: float | None, seconds: float) -> None:
    from drillyard.measurement.user_facts import UserFacts
    from drillyard.watch.log_screen import watch_log

    cluster, run = found.cluster, found.handle.run
    catalog = load_catalog(cluster.hardware)
    machine = None if cluster.machine is None else catalog.find_machine(cluster.machine)
    job = json_object(found.launcher.read(run, "launch/job.json", 0))
    nodes, per_node = (
        size if isinstance(size := job.get(name), int) else None
        for name in ("nodes", "processes_per_node")
    )
    facts = UserFacts(
        accelerator=None if machine is None else machine.accelerator,
        num_gpus=None if nodes is None or per_node is None else nodes * per_node,
        gpus_per_node=per_node,
        price_per_gpu_hour=price,
    )
    watch_log(found.launcher, run, console, facts, catalog, seconds, found.words)


class RunMirror:
    """The growing files of a run, copied to a local directory."""

    def __init__(self, launcher: Launcher[Any], run: str, directory: Path) -> None:
        self.directory = directory
        self.status: RunStatus | None = None
        self.is_complete = False
        """The run is over and all that it had written by then is here."""
        self._launcher = launcher
        self._run = run
        self._offsets = dict.fromkeys(MIRRORED, 0)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def copy(self) -> None:
        """Fetch what the files have gained. Raises UserError where the cluster cannot be
        reached."""
        for name in MIRRORED:
            while data := self._launcher.read(self._run, name, self._offsets[name]):
                whole = data[: data.rfind(b"\n") + 1]
                if not whole:
                    break
                with (self.directory / name).open("ab") as file:
                    file.write(whole)
                self._offsets[name] += len(whole)

    def start(self, seconds: float) -> None:
        """Copy every `seconds`, in a thread, until `stop`."""
        self._thread = threading.Thread(target=self._keep_copying, args=(seconds,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def _keep_copying(self, seconds: float) -> None:
        status_time = -STATUS_SECONDS
        while not self._stopped.wait(seconds):
            # An unreachable cluster is asked again: the screen says for how long the run has been
            # silent.
            with contextlib.suppress(UserError):
                if time.monotonic() - status_time >= STATUS_SECONDS:
                    self.status = self._launcher.status(self._run)
                    status_time = time.monotonic()
                over = self.status is not None and self.status.state.over
                self.copy()
                self.is_complete = over


class MirroredRun(FollowedRun):
    """A run whose files are mirrored. Its scheduler says that it is over where its own files do
    not."""

    def __init__(self, mirror: RunMirror, price: GpuPrice | None = None) -> None:
        super().__init__(mirror.directory, price)
        self._mirror = mirror

    def poll(self) -> None:
        super().poll()
        status = self._mirror.status
        if self._mirror.is_complete and status is not None and not self.run.over:
            self.run.over = True
            self.run.phase = "completed" if status.state == "succeeded" else str(status.state)

    @property
    def ended(self) -> bool:
        """Whether the run is over, also for its scheduler: between two attempts it is not."""
        return self._mirror.is_complete and super().ended


@contextlib.contextmanager
def mirror_run(
    launcher: Launcher[Any], run: str, price: float | None, seconds: float
) -> Iterator[MirroredRun]:
    """A launched run to watch, its mirror updated every `seconds`. Raises UserError where it writes
    no events."""
    with TemporaryDirectory(prefix="drillyard-watch-") as temporary:
        directory = Path(temporary, run)
        directory.mkdir()
        mirror = RunMirror(launcher, run, directory)
        mirror.copy()
        if cluster := launcher.read(run, CLUSTER_FILE, 0):
            (directory / CLUSTER_FILE).write_bytes(cluster)
        followed = MirroredRun(mirror, gpu_price(directory, price))
        mirror.start(seconds)
        try:
            yield followed
        finally:
            mirror.stop()


@dataclass(frozen=True)
class Progress:
    """Progress of a run. `line` is for people: `step 40 of 100 | loss 3.078 | ... | 2:05 min
    left`."""

    line: str
    step: int
    total_steps: int | None
    loss: float | None
    seconds_left: float | None

    def as_json(self) -> dict[str, Any]:
        """Its fields but the line."""
        return {
            name: getattr(self, name) for name in ("step", "total_steps", "loss", "seconds_left")
        }


def read_progress(launcher: Launcher[Any], run: str) -> Progress | None:
    """Read a run's progress by three reads; None if it has no events and metrics, or they cannot be
    read.

    The beginning of the events has the number of steps, the ends of both files the present step and
    speed.
    """
    try:
        events = launcher.read(run, EVENTS_FILE, 0)
        if len(events) == READ_BYTES:
            events += b"\n" + launcher.read(run, EVENTS_FILE, -_TAIL_BYTES)
        metrics = launcher.read(run, METRICS_FILE, -_TAIL_BYTES)
    except UserError:
        return None
    if not events and not metrics:
        return None
    try:
        with refusing_odd_values(run):
            return _progress_of(run, events, metrics)
    except UserError:
        return None


def _progress_of(run: str, events: bytes, metrics: bytes) -> Progress:
    live = LiveRun(run)
    for event in filter(is_event, _records(events)):
        live.add_event(event)
    for record in filter(is_step, _records(metrics)):
        live.add_metrics(record)
    now_us = time.time_ns() // 1000
    loss = live.losses[-1] if live.losses else None
    return Progress(
        line=progress_line(live, now_us),
        step=live.step,
        total_steps=live.total_steps,
        loss=None if loss is None or loss != loss else loss,
        seconds_left=live.seconds_left(now_us),
    )


def _records(text: bytes) -> Iterator[dict[str, Any]]:
    """The whole lines of `text`: those at its ends, and where two reads meet, may be torn."""
    return (record for line in text.split(b"\n") if (record := decode(line)) is not None)
