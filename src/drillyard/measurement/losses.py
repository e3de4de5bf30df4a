"""The loss of a run: where it began and ended, how low it came, what evaluations found, and the
steps that were skipped or not finite.

Of a step that was done again its last occurrence counts: that one led to the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from drillyard.measurement.parsed_log import NONFINITE, SKIPPED, ParsedLog
from drillyard.measurement.step_times import last_rows
from drillyard.telemetry.console import flatten


class Flagged(NamedTuple):
    """A step that was skipped or is not finite, and where its line is; `steps` of them, up to this
    one, where a line counts several."""

    step: int
    place: str
    steps: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Losses:
    """`step` and `loss` are the finite losses of the steps that led to the model, by step."""

    step: NDArray[np.int64]
    loss: NDArray[np.float64]
    skipped: tuple[Flagged, ...]
    nonfinite: tuple[Flagged, ...]

    @property
    def first(self) -> float | None:
        return float(self.loss[0]) if len(self.loss) else None

    @property
    def last(self) -> float | None:
        return float(self.loss[-1]) if len(self.loss) else None

    @property
    def lowest(self) -> float | None:
        return float(self.loss.min()) if len(self.loss) else None

    @property
    def lowest_step(self) -> int | None:
        return int(self.step[int(self.loss.argmin())]) if len(self.loss) else None

    def curve(self, points: int) -> list[tuple[int, float]]:
        """At most `points` of the losses, evenly along the steps, the first and the last among
        them."""
        if len(self.loss) <= points:
            chosen = np.arange(len(self.loss))
        else:
            chosen = np.rint(np.linspace(0, len(self.loss) - 1, points)).astype(np.intp)
        return list(zip(self.step[chosen].tolist(), self.loss[chosen].tolist(), strict=True))


class HeldOut(NamedTuple):
    """A figure of the evaluations: its last value and, for a loss, its lowest, each with its step
    if that is known."""

    last: float
    last_step: int | None
    lowest: float | None
    lowest_step: int | None


def held_out(log: ParsedLog) -> dict[str, HeldOut]:
    """Results of the evaluations by dotted names such as `rows.loss`; values that are not finite
    are left out."""
    found: dict[str, HeldOut] = {}
    for event in (event for event in log.events if event.kind == "evaluation"):
        for name, value in flatten(dict(event.values)).items():
            if not math.isfinite(value):
                continue
            lowest, step = (
                (found[name].lowest, found[name].lowest_step) if name in found else (None, None)
            )
            if "loss" in name.split(".")[-1] and (lowest is None or value <= lowest):
                lowest, step = value, event.step
            found[name] = HeldOut(value, event.step, lowest, step)
    return found


def losses(log: ParsedLog) -> Losses:
    steps = log.steps
    rows = last_rows(steps)
    rows = rows[np.isfinite(steps.loss[rows])]
    return Losses(
        steps.step[rows],
        steps.loss[rows],
        _flagged(log, SKIPPED, steps.skipped_steps),
        _flagged(log, NONFINITE, steps.nonfinite_steps),
    )


def flagged_steps(flagged: Sequence[Flagged]) -> int:
    """How many steps they are."""
    return sum(one.steps for one in flagged)


def _flagged(log: ParsedLog, bit: int, counts: NDArray[np.int32]) -> tuple[Flagged, ...]:
    rows = np.flatnonzero(log.steps.flags & bit)
    return tuple(
        Flagged(int(log.steps.step[row]), log.place(row), max(int(counts[row]), 1))
        for row in rows.tolist()
    )
