"""Content of a report as one value: the page is a function of it.

`run_content.py` fills it from a run directory, `log_content.py` from the log of any framework.
Unknown values are NaN in a curve and absent elsewhere, never zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from drillyard.goodput import STALL_FACTOR
from drillyard.reporting.event_text import EventText, Level

Floats = NDArray[np.float64]

CATEGORIES: Final = {
    "productive": "steps that led to the model",
    "startup": "until the first step, and its excess over the median",
    "checkpoint": "training waited for a save",
    "evaluation": "training waited for an evaluation",
    "stalled": f"the part of steps beyond {STALL_FACTOR} x the median",
    "recomputation": "steps repeated after a failure",
    "restart": "from a failure to the next step",
    "waiting": "nothing could run: queued, or between two starts",
    "unknown": "not in the log, never counted as productive",
}
"""The categories of goodput in drawing order, with their meaning."""

COUNTS: Final = frozenset(
    {
        *("tokens", "sequences", "samples", "questions", "judged", "unjudged"),
        *("correct", "wrong", "invalid", "timeout", "rows_at_fault", "too_long"),
    }
)
"""Figures of an evaluation that count what was evaluated and are no result."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Curves:
    """The logged steps that led to the model: columns of one length N, `step` ascending; NaN where
    a value is unknown.

    With windows (`window_steps` > 1) times and rates are means over so many steps. `warm_up` marks
    the first logged step of each attempt and those that compiled: they are drawn, and are no
    stalls. `finite` is False where loss or gradient were not, so that the step changed nothing.
    """

    step: NDArray[np.int64]
    loss: Floats
    step_seconds: Floats
    data_seconds: Floats
    tokens_per_second_per_gpu: Floats
    tflops_per_gpu: Floats
    mfu: Floats
    memory_gib: Floats
    learning_rate: Floats
    grad_norm: Floats
    warm_up: NDArray[np.bool_]
    finite: NDArray[np.bool_]
    window_steps: int = 1
    gpus: NDArray[np.int64] | None = None
    """The number of GPUs of each step, where it changed."""

    def on(self, gpus: int) -> Curves:
        """The steps on this number of GPUs."""
        if self.gpus is None:
            return self
        kept = self.gpus == gpus
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(
            self,
            **{name: column[kept] for name, column in columns.items() if name != "window_steps"},
        )

    @property
    def median_seconds(self) -> float:
        """The median time of a step without warm-up; NaN where no step has a time."""
        times = self.step_seconds[~self.warm_up]
        times = times[np.isfinite(times)]
        return float(np.median(times)) if len(times) else float("nan")

    @property
    def stalls(self) -> NDArray[np.intp]:
        """Indices of the steps after warm-up that took over `STALL_FACTOR` times the median of the
        steps on as many GPUs."""
        usual = np.full(len(self.step), np.nan if self.gpus is not None else self.median_seconds)
        for number in [] if self.gpus is None else np.unique(self.gpus).tolist():
            usual[self.gpus == number] = self.on(number).median_seconds
        return np.flatnonzero(~self.warm_up & (self.step_seconds > STALL_FACTOR * usual))


class Tile(NamedTuple):
    """A headline figure and its conditions."""

    label: str
    value: str
    note: str = ""


class Point(NamedTuple):
    """The value of a figure at a step."""

    step: int
    value: float


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of texts under headers; the columns from `numbers_from` on are aligned as numbers."""

    headers: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    numbers_from: int = 1
    caption: str = ""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Content:
    """Everything that the report of one run shows.

    `device` is "GPU", or "rank" for a run directory without a known accelerator. `begin_us` is the
    run's first event (UTC, microseconds since 1970), None in logs without time stamps. `resumed`
    are the steps that later attempts resumed from. `evaluations` has the values of each figure by
    its dotted name (`rows.loss`). `goodput` are seconds by category, empty without time stamps.
    `mfu_note` is the basis of MFU or TFLOP/s, and why there is no MFU. `missing` lists what is not
    shown and how to get it, `warnings` what is doubtful.
    """

    title: str
    source: str
    subtitle: str
    status: str
    status_level: Level
    device: str
    begin_us: int | None
    end_us: int | None
    curves: Curves
    tiles: list[Tile]
    mfu_note: str
    goodput: dict[str, float] = field(default_factory=dict)
    goodput_note: str = ""
    resumed: list[int] = field(default_factory=list)
    evaluations: dict[str, list[Point]] = field(default_factory=dict)
    events: list[EventText] = field(default_factory=list)
    checkpoints: Table | None = None
    estimate: Table | None = None
    environment: list[tuple[str, str]] = field(default_factory=list)
    resolved: Table | None = None
    documents: list[tuple[str, str]] = field(default_factory=list)
    """Names and texts of its config files."""
    missing: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
