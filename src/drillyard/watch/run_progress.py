"""How far a launched run is, from the ends of its own files: for `runs status`, which looks once.

Two reads of the events and one of the metrics, whatever their size: the beginning of the events tells how many steps
there will be, the ends of both how far the run is and at what speed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from drillyard.errors import UserError
from drillyard.launch.launcher import Launcher
from drillyard.launch.remote_files import READ_BYTES
from drillyard.telemetry.events import EVENTS_FILE, is_event
from drillyard.telemetry.jsonlines import decode
from drillyard.telemetry.metrics import METRICS_FILE, is_step
from drillyard.watch.live_run import LiveRun
from drillyard.watch.screen import progress_line

_TAIL_BYTES: Final = 64 << 10


@dataclass(frozen=True)
class Progress:
    """Where a run stands."""

    line: str
    """For people: `step 40 of 100 | loss 3.078 | ... | 2:05 min left`."""
    step: int
    total_steps: int | None
    loss: float | None
    seconds_left: float | None

    def as_json(self) -> dict[str, Any]:
        """Its fields but the line."""
        return {
            "step": self.step,
            "total_steps": self.total_steps,
            "loss": self.loss,
            "seconds_left": self.seconds_left,
        }


def read_progress(launcher: Launcher, run: str) -> Progress | None:
    """How far the run is; None where it has written nothing about itself, or where its directory cannot be read."""
    try:
        events = launcher.read(run, EVENTS_FILE, 0)
        if len(events) == READ_BYTES:
            events += b"\n" + launcher.read(run, EVENTS_FILE, -_TAIL_BYTES)
        metrics = launcher.read(run, METRICS_FILE, -_TAIL_BYTES)
    except UserError:
        return None
    live = LiveRun(run)
    for event in _records(events):
        if is_event(event):
            live.add_event(event)
    for record in _records(metrics):
        if is_step(record):
            live.add_metrics(record)
    if not events and not metrics:
        return None
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
    """Whole lines; the first of a tail, the last of a file that is written to, and what joins two reads may be torn."""
    for line in text.split(b"\n"):
        record = decode(line)
        if record is not None:
            yield record
