"""What an attempt wrote to the run directory: the summary, its last step, anything new.

Files are compared with how they were when the attempt began and not with this host's clock: on a network file system
the times of files are another machine's.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from drillyard.telemetry.events import EVENTS_FILE
from drillyard.telemetry.metrics import METRICS_FILE

_TAIL_BYTES = 256 * 1024

Stamp = tuple[int, int, int] | None


def _stamp(path: Path) -> Stamp:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


class ProgressFiles:
    """Changes in the run directory since this object was made, at the start of an attempt."""

    def __init__(self, run_directory: Path) -> None:
        self._events = run_directory / EVENTS_FILE
        self._summary = run_directory / "summary.json"
        self._summary_before = _stamp(self._summary)
        events = _stamp(self._events)
        self._events_size = events[2] if events else 0
        self._progress = [self._events, run_directory / METRICS_FILE]
        self._last_seen: list[Stamp] = []
        self.changed()

    def summary_written(self) -> bool:
        """Whether this attempt wrote summary.json, the last thing that a run does."""
        now = _stamp(self._summary)
        return now is not None and now != self._summary_before

    def changed(self) -> bool:
        """Whether a rank wrote an event or a metric since the last call. Lines of logs are no progress."""
        seen = [_stamp(path) for path in self._progress]
        changed = seen != self._last_seen
        self._last_seen = seen
        return changed

    def last_step(self) -> int | None:
        """The last step of this attempt in events.jsonl; None: it did not get to its first."""
        try:
            with open(self._events, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._events_size, size - _TAIL_BYTES))
                lines = file.read().splitlines()
        except OSError:
            return None
        step: int | None = None
        for line in lines:
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict) and event.get("event") in ("first_step", "step"):
                step = event.get("step", 0 if step is None else step)
        return step
