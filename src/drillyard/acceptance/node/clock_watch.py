"""Watches this node's clock during the whole job: steps of the wall clock, seen against the
monotonic one.

A clock that is slewed (chrony: at most 1/12, its default maxslewrate of 83333 ppm) changes its
difference from the monotonic clock slowly; a step changes it at once.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from .messages import pause

_LOOK_SECONDS = 0.1
_SLEW = 0.1
_SMALLEST_STEP = 0.005
_MOST_STEPS = 100
_SURE_SECONDS = 0.001
"""Longest time between two reads of the monotonic clock around one of the wall clock."""


class ClockWatch:
    """Looks at the clock until the process ends."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._steps: list[dict[str, float]] = []
        self._num_steps = 0
        threading.Thread(target=self._watch, daemon=True).start()

    def seen(self) -> dict[str, Any]:
        """`steps`: when each was seen, by the clock after it, and by how many seconds it changed
        the time (below 0: back)."""
        return {
            "seconds": time.monotonic() - self._began,
            "num_steps": self._num_steps,
            "steps": list(self._steps),
        }

    def _watch(self) -> None:
        before, looked_at, wall_before = _difference(), time.monotonic(), time.time()
        while True:
            pause(_LOOK_SECONDS)
            difference, now, wall = _difference(), time.monotonic(), time.time()
            change = difference - before
            if wall < wall_before:
                # Back it is, also where the other clock went back with it.
                change = min(change, wall - wall_before)
            if abs(change) > _SMALLEST_STEP + _SLEW * abs(now - looked_at):
                self._num_steps += 1
                if len(self._steps) < _MOST_STEPS:
                    self._steps.append({"at": wall, "seconds": change})
            before, looked_at, wall_before = difference, now, wall


def _difference() -> float:
    """Wall clock minus monotonic clock, read so close together that the process was not stopped in
    between; of several tries the closest."""
    closest, found = float("inf"), 0.0
    for _ in range(20):
        before = time.monotonic()
        wall = time.time()
        after = time.monotonic()
        if after - before < closest:
            closest, found = after - before, wall - (before + after) / 2
        if closest < _SURE_SECONDS:
            break
    return found
