"""Steps of lines that print none (HF Trainer): a logged line is never taken for a step without
evidence.

For the lines of each start, the first of these that holds:

1. the progress bar before each line, where it is one of training: its total is that of the run, as
   far as the log states that; or it is not finished yet. A bar that is finished while several lines
   follow belongs to another task (`Loading checkpoint shards: 30/30`); so does one with a
   description that names no training, unless it goes along with the lines;
2. every k-th step (with or without the first), the k that fits the epochs on the lines: these are
   steps / (steps in all / epochs in all). What the run has in all is stated in the log's header, or
   follows from its last line (duration x steps per second);
3. the k of which the whole run has as many lines.

Otherwise lines are numbered, and `ParsedLog.numbered_lines` is set: no duration is one of steps.

Cost: a few numpy operations per start.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from drillyard.loglines.prefixes import Origin
from drillyard.measurement.lanes import Lane
from drillyard.measurement.log_totals import Total, total_steps
from drillyard.measurement.parsed_log import LogEvent, LogFacts, ParsedLog

Ints = NDArray[np.int64]
_ADVICE: Final = "give --logging-steps"
_MOST_STRIDES: Final = 100_000
_SAME_STRIDE: Final = 0.02
"""Strides that differ by less are the same to any figure made of them."""
_EPOCH_UNIT: Final = 0.005
"""It rounded epochs to 2 decimals, whose last zeros are not printed."""


@dataclass(frozen=True, slots=True)
class _Lines:
    """The columns of one start's lines. `resumed` is the step that it resumed from; `last`: no
    later start follows."""

    columns: dict[str, NDArray[Any]]
    resumed: int
    last: bool

    @property
    def count(self) -> int:
        return len(self.columns["_line"])

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.columns[name]


def with_logging_steps(log: ParsedLog, logging_steps: int | None) -> ParsedLog:
    """The log with the steps of numbered lines, of which one is logged every `logging_steps`."""
    if logging_steps is None or not log.numbered_lines:
        return log
    steps = replace(
        log.steps,
        step=log.steps.step * logging_steps,
        window_steps=np.full(len(log.steps), logging_steps, np.int32),
    )
    warnings = [text for text in log.warnings if _ADVICE not in text]
    return replace(log, steps=steps, numbered_lines=False, warnings=warnings)


def number_steps(
    lanes: Sequence[Lane],
    starts: Sequence[Ints],
    facts: LogFacts,
    events: Iterable[tuple[Origin, LogEvent]],
) -> tuple[bool, list[str]]:
    """Set the steps of lines without one. `starts` has for each lane the rows with which a start
    begins. Returns whether lines had to be numbered, and what to say about it."""
    resumes = [event for _, event in events if event.kind == "resume" and event.step is not None]
    strides: set[int] = set()
    numbered = False
    for lane, rows in zip(lanes, starts, strict=True):
        if (marked := lane.column("_line")) is None:
            continue
        steps, elapsed = np.array(lane.column("step")), np.full(lane.length, np.nan)
        if (own := lane.column("elapsed_seconds")) is not None:
            elapsed = np.where(marked > 0, np.nan, own)
        for begin, end, lines in _segments(lane, rows, resumes):
            found = _steps_of(lines, facts)
            numbered |= found is None
            chosen, seconds, stride = found or (np.arange(1, lines.count + 1), None, 0)
            strides |= {stride} - {0}
            here = marked[begin:end] > 0
            steps[begin:end] = np.where(here, chosen, steps[begin:end])
            if seconds is not None:
                elapsed[begin:end] = np.where(here, seconds, elapsed[begin:end])
        lane.replace("step", steps)
        if own is not None or not np.isnan(elapsed).all():
            lane.replace("elapsed_seconds", elapsed)
    warnings = []
    if strides:
        each = " or ".join(f"{stride:,}" for stride in sorted(strides))
        warnings.append(
            f"HF Trainer lines carry no step: by their epochs and the log's totals one is logged"
            f" every {each} steps"
        )
    if numbered:
        warnings.append(
            "HF Trainer lines without a progress bar carry no step, and the log does not say how"
            " many steps lie between two of them: they are numbered 1, 2, 3, ... and are no steps;"
            f" {_ADVICE}"
        )
    return numbered, warnings


def _segments(
    lane: Lane, starts: Ints, resumes: Sequence[LogEvent]
) -> Iterable[tuple[int, int, _Lines]]:
    """The lines of each start: also where the epochs or the bar begin again."""
    columns = lane.columns()
    bar, line = columns.get("_bar_step"), columns["line"]
    epoch = columns.get("_epoch")
    new = np.zeros(lane.length, np.bool_)
    new[starts[starts < lane.length]] = True
    if epoch is not None:
        new[1:] |= epoch[1:] < epoch[:-1]
    elif bar is not None:
        new[1:] |= (bar[1:] < bar[:-1]) & (bar[1:] >= 0)
    new[0] = True
    begins = [*np.flatnonzero(new).tolist(), lane.length]
    before = 0
    for begin, end in itertools.pairwise(begins):
        own = [
            event.step or 0
            for event in resumes
            if event.file != lane.file or before < event.line < line[begin]
        ]
        before = int(line[end - 1])
        part = {name: values[begin:end] for name, values in columns.items()}
        yield begin, end, _Lines(part, own[-1] if own else 0, end == lane.length)


def _steps_of(lines: _Lines, facts: LogFacts) -> tuple[Ints, NDArray[Any] | None, int] | None:
    """Steps of the lines, their bar's seconds where it gives them, and the stride where that was
    inferred; None where nothing tells."""
    total = total_steps(facts)
    bar = _training_bar(lines, total)
    if bar is not None and bool((np.diff(bar) > 0).all()):
        return bar, lines["_bar_seconds"], 0
    if bar is not None and total is None:
        own = int(lines["_bar_total"][-1])
        total = Total(own, own)
    if total is not None and (stride := _stride(lines, total, facts)) is not None:
        step, first = stride
        return _grid(lines, step, first=first), None, step
    if bar is None:
        return None
    # Between two drawings of the bar: numbered on from it, but not beyond its end.
    index = np.arange(len(bar))
    again = np.append(False, np.diff(bar) == 0)
    steps = bar + index - np.maximum.accumulate(np.where(again, 0, index))
    return None if (steps > lines["_bar_total"]).any() else (steps, lines["_bar_seconds"], 0)


def _training_bar(lines: _Lines, total: Total | None) -> Ints | None:
    """The counts of the bar before each line where it is one of training; None otherwise."""
    if "_bar_step" not in lines.columns:
        return None
    count, totals = lines["_bar_step"], lines["_bar_total"]
    if (count < 0).any() or len(np.unique(totals)) > 1:
        return None
    fits = total is None or total.low <= totals[0] <= total.high
    described = lines.columns.get("_bar_described")
    if described is not None and described.any():
        # What it is called does not tell: it has to go along with the lines.
        return count if fits and len(np.unique(count)) > 1 else None
    if total is not None and fits:
        return count
    finished = bool((count == totals).all())
    return None if finished and (total is not None or lines.count > 1) else count


def _grid(lines: _Lines, stride: int, *, first: bool) -> Ints:
    """Every `stride`-th step since the start, with the `first` one too."""
    begin = (lines.resumed // stride + 1) * stride
    grid = begin + stride * np.arange(lines.count - first)
    return np.append(lines.resumed + 1, grid) if first else grid


def _stride(lines: _Lines, total: Total, facts: LogFacts) -> tuple[int, bool] | None:
    """After how many steps each a line is logged, and whether the first step is too; None where no
    or more than one number fits."""
    ended = facts.train_epochs is not None and lines.last
    expected, tolerance = _expected(lines, total, facts)
    if expected is None:
        if not ended:
            return None
        low = (total.low - lines.resumed) // (lines.count + 1) + 1
        high = (total.high - lines.resumed) // max(lines.count - 1, 1)
    else:
        reach = expected[-1] - lines.resumed
        low = math.floor((reach - tolerance[-1]) / lines.count)
        high = math.ceil((reach + tolerance[-1]) / max(lines.count - 1, 1))
    fitting: list[tuple[float, int, bool]] = []
    for stride in range(max(low, 1), min(high, max(low, 1) + _MOST_STRIDES) + 1):
        for first in (False, True) if stride > 1 else (False,):
            grid = _grid(lines, stride, first=first)
            if grid[-1] > total.high or (ended and grid[-1] + stride <= total.low):
                continue
            off = np.zeros(1) if expected is None else np.abs(grid - expected) / tolerance
            if off.max() <= 1:
                fitting.append((float(off.mean()), stride, first))
    if not fitting:
        return None
    strides = [stride for _, stride, _ in fitting]
    if max(strides) > min(strides) * (1 + _SAME_STRIDE):
        return None
    return min(fitting)[1:]


def _expected(
    lines: _Lines, total: Total, facts: LogFacts
) -> tuple[NDArray[np.float64] | None, NDArray[np.float64]]:
    """The steps that the epochs on the lines stand for, and how far off each may be."""
    epochs = facts.train_epochs or (facts.planned_epochs if facts.total_steps else None)
    unknown = np.zeros(0)
    if epochs is None or "_epoch" not in lines.columns or np.isnan(lines["_epoch"]).any():
        return None, unknown
    middle = (total.low + total.high) / 2
    per_epoch = middle / epochs
    unit = min(float(lines["_epoch_unit"].min()), _EPOCH_UNIT)
    error = (total.high - total.low) / 2 / middle + unit / epochs
    # Planned epochs are whole; the steps of one are not.
    error += 0 if facts.train_epochs is not None else 1 / per_epoch
    expected = lines["_epoch"] * per_epoch
    return expected, unit * per_epoch + expected * error + 0.5
