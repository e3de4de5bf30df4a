"""The charts of a report as values: their curves, marks and levels, and the same as a table.

The page's script draws a chart from its JSON (`as_json`); without JavaScript the page shows the
table. Long curves are reduced to their peaks and dips (tables.py), drawn with the full precision of
the log.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from drillyard import formatting
from drillyard.goodput import STALL_FACTOR
from drillyard.reporting.content import Content, Curves, Floats, Point, Table
from drillyard.reporting.event_text import measure_label
from drillyard.reporting.tables import (
    Unit,
    cell,
    centred_mean,
    curve_table,
    downsample,
    loss_table,
    step_time_table,
    unit_of,
)

SMOOTH_FROM = 100
"""Logged steps from which a loss is drawn with its moving mean over a fiftieth of the run."""
MOST_MARKED = 500
NOTABLE_WAIT = 0.05
"""Share of the median step from which the longest wait for data gets a curve."""
LOGARITHMIC_FROM = 8.0
"""Step times are drawn on a logarithmic scale if the largest is this many medians: the rest would
be a flat line."""

OF_LOSS = frozenset({"perplexity", "bits_per_byte"})
"""Measures that are the held-out loss in another unit: in the table of evaluations only."""

Style = Literal["line", "faint", "joined", "points"]


class CurveLine(NamedTuple):
    """A curve by its own steps. `colour` is a custom property of the style sheet.

    `line` and `faint` are curves, `joined` a curve with its points shown, `points` points alone.
    """

    label: str
    values: dict[int, float]
    colour: str
    style: Style = "line"


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart over steps. `summary` is what it shows in a sentence, `note` its conditions."""

    name: str
    title: str
    x: list[int]
    series: list[dict[str, Any]]
    """The curves' fields, their values one for each step of `x` (None without one)."""
    table: Table
    summary: str
    note: str = ""
    unit: Unit = "number"
    logarithmic: bool = False
    levels: Mapping[str, float] = field(default_factory=dict)
    """Horizontal lines by label."""
    marks: list[int] = field(default_factory=list)
    """Steps that later attempts resumed from: vertical lines."""

    def as_json(self) -> dict[str, Any]:
        """The chart for the page's script."""
        return {
            "name": self.name,
            "x": self.x,
            "series": self.series,
            "unit": self.unit,
            "logarithmic": self.logarithmic,
            "levels": [{"label": label, "value": value} for label, value in self.levels.items()],
            "marks": self.marks,
        }


def charts(content: Content) -> list[Chart]:
    """All charts for which the run has values, in display order."""
    curves = content.curves
    found: list[Chart | None] = [_loss(content), *_measures(content), _step_time(content)]
    rate = f"Tokens per second per {content.device}"
    found.append(_plain(content, "tokens", rate, curves.tokens_per_second_per_gpu, "--series-2"))
    if np.isfinite(curves.mfu).any():
        found.append(
            _plain(
                content,
                "mfu",
                "MFU",
                curves.mfu,
                "--series-3",
                note=content.mfu_note,
                unit="fraction",
            )
        )
    else:
        title = f"TFLOP/s per {content.device}"
        found.append(
            _plain(
                content, "tflops", title, curves.tflops_per_gpu, "--series-3", note=content.mfu_note
            )
        )
    found += [
        _plain(
            content, "memory", f"Memory, GiB per {content.device}", curves.memory_gib, "--series-4"
        ),
        _plain(content, "gradient", "Gradient norm", curves.grad_norm, "--series-5"),
        _plain(content, "rate", "Learning rate", curves.learning_rate, "--series-6"),
    ]
    return [chart for chart in found if chart is not None]


def _loss(content: Content) -> Chart | None:
    """Training loss, its mean where there are many steps, the held-out losses, and the steps that
    were not finite."""
    curves = content.curves
    if not np.isfinite(curves.loss).any():
        return None
    rows = downsample(curves.loss)
    held_out = {
        name: points
        for name, points in content.evaluations.items()
        if name.rpartition(".")[2] == "loss"
    }
    skipped = int(np.count_nonzero(~curves.finite))
    skips = (
        f"{formatting.plural(skipped, 'logged step')} skipped: loss or gradient not finite."
        if skipped
        else ""
    )
    return _chart(
        content,
        "loss",
        "Loss",
        [*_loss_lines(curves, rows), *_held_out_lines(held_out), *_skipped_line(curves)],
        table=loss_table(curves, held_out),
        summary=_course("Loss", curves, curves.loss),
        note=_drawn(curves, rows) + skips,
    )


def _loss_lines(curves: Curves, rows: NDArray[np.intp]) -> Iterator[CurveLine]:
    """The loss; faint under its mean where there are many steps."""
    if len(curves.step) < SMOOTH_FROM:
        yield CurveLine("Loss", _at(curves, rows, curves.loss), "--series-1")
        return
    window = len(curves.step) // 50 | 1
    mean = centred_mean(curves.loss, window)
    yield CurveLine("Loss", _at(curves, rows, curves.loss), "--series-1-faint", "faint")
    yield CurveLine(f"Mean of {window} steps", _at(curves, rows, mean), "--series-1")


def _held_out_lines(parts: Mapping[str, Sequence[Point]]) -> Iterator[CurveLine]:
    for number, (name, points) in enumerate(parts.items()):
        part = name.rpartition(".")[0] or "loss"
        yield CurveLine(f"Held out: {part}", dict(points), _held_out_colour(number), "joined")


def _held_out_colour(number: int) -> str:
    return f"--held-out-{number % 4 + 1}"


def _skipped_line(curves: Curves) -> Iterator[CurveLine]:
    """Marks at the bottom of the chart."""
    if skipped := curves.step[~curves.finite][:MOST_MARKED].tolist():
        floor = float(curves.loss[np.isfinite(curves.loss)].min())
        yield CurveLine("Skipped, not finite", dict.fromkeys(skipped, floor), "--bad", "points")


def _measures(content: Content) -> Iterator[Chart]:
    """A chart for each measure of the evaluations but the loss, with a curve per part."""
    measures: dict[str, dict[str, list[Point]]] = {}
    for name, points in content.evaluations.items():
        part, _, measure = name.rpartition(".")
        if measure != "loss" and not (measure in OF_LOSS and f"{part}.loss" in content.evaluations):
            measures.setdefault(measure, {})[part or measure] = points
    for number, (measure, parts) in enumerate(measures.items(), start=1):
        label = measure_label(measure)
        label = label[0].upper() + label[1:]
        x = sorted(
            {
                point.step
                for points in parts.values()
                for point in points
                if math.isfinite(point.value)
            }
        )
        if not x:
            continue
        unit = unit_of(measure)
        rows = [
            (f"{step:,}", *(cell(dict(points).get(step), unit) for points in parts.values()))
            for step in x
        ]
        last = ", ".join(f"{part} {cell(points[-1].value, unit)}" for part, points in parts.items())
        yield _chart(
            content,
            f"evaluation-{number}",
            f"{label}, held out",
            [
                CurveLine(part, dict(points), _held_out_colour(place), "joined")
                for place, (part, points) in enumerate(parts.items())
            ],
            table=Table(("Step", *parts), rows),
            summary=f"{label} after step {max(x):,}: {last}.",
            unit=unit,
        )


def _step_time(content: Content) -> Chart | None:
    """Step time with its stalls, the median and the stall limit; and the wait for data where it is
    notable."""
    curves = content.curves
    times, median = curves.step_seconds, curves.median_seconds
    if not np.isfinite(times).any():
        return None
    rows = downsample(times)
    lines = list(_step_time_lines(curves, rows))
    shown = [value for line in lines for value in line.values.values()]
    logarithmic = min(shown) > 0 and max(shown) > LOGARITHMIC_FROM * median
    levels = {"median": median, f"{STALL_FACTOR} x median": STALL_FACTOR * median}
    return _chart(
        content,
        "step-time",
        "Step time",
        lines,
        table=step_time_table(curves),
        summary=_course("Step time", curves, times, "seconds"),
        note=_drawn(curves, rows)
        + ("Logarithmic scale. " if logarithmic else "")
        + _step_time_note(curves),
        unit="seconds",
        logarithmic=logarithmic,
        # One median is not the usual time of steps on different numbers of GPUs.
        levels=levels if np.isfinite(median) and curves.gpus is None else {},
    )


def _step_time_lines(curves: Curves, rows: NDArray[np.intp]) -> Iterator[CurveLine]:
    times, waits, stalls = curves.step_seconds, curves.data_seconds, curves.stalls
    yield CurveLine("Step time", _at(curves, rows, times), "--series-1")
    if np.isfinite(waits).any() and np.nanmax(waits) > NOTABLE_WAIT * curves.median_seconds:
        yield CurveLine("Waiting for data", _at(curves, downsample(waits), waits), "--series-4")
    if len(stalls):
        longest = stalls[np.argsort(-times[stalls], kind="stable")][:MOST_MARKED]
        yield CurveLine("Stall", _at(curves, longest, times), "--bad", "points")


def _step_time_note(curves: Curves) -> str:
    window = f"Means of {curves.window_steps} steps each. " if curves.window_steps > 1 else ""
    if not np.isfinite(curves.median_seconds):
        return window
    warm_up = int(curves.warm_up.sum())
    left_out = (
        f"{formatting.plural(warm_up, 'first or compiling step')} left out of the median. "
        if warm_up
        else ""
    )
    of = "" if curves.gpus is None else " of the steps on as many GPUs"
    return (
        f"{window}{left_out}{formatting.plural(len(curves.stalls), 'stall')} (over {STALL_FACTOR} x"
        f" the median{of})."
    )


def _plain(
    content: Content,
    name: str,
    title: str,
    values: Floats,
    colour: str,
    *,
    note: str = "",
    unit: Unit = "number",
) -> Chart | None:
    """A chart of one curve; None where it has no value."""
    curves = content.curves
    if not np.isfinite(values).any():
        return None
    rows = downsample(values)
    label = title.partition(",")[0]
    return _chart(
        content,
        name,
        title,
        [CurveLine(label, _at(curves, rows, values), colour)],
        table=curve_table(curves, label, values, unit),
        summary=_course(label, curves, values, unit),
        note=_drawn(curves, rows) + (f"{note}." if note else ""),
        unit=unit,
    )


def _at(curves: Curves, rows: Iterable[Any], values: Floats) -> dict[int, float]:
    return {int(curves.step[row]): float(values[row]) for row in rows if np.isfinite(values[row])}


def _chart(
    content: Content, name: str, title: str, lines: Iterable[CurveLine], **more: Any
) -> Chart:
    """A chart with all curves on the union of their steps; non-finite values are not drawn."""
    drawn = [
        (line, {step: value for step, value in line.values.items() if math.isfinite(value)})
        for line in lines
    ]
    x = sorted({step for _, values in drawn for step in values})
    series = [
        line._asdict() | {"values": [values.get(step) for step in x]} for line, values in drawn
    ]
    return Chart(name, title, x, series, marks=content.resumed, **more)


def _course(label: str, curves: Curves, values: Floats, unit: Unit = "number") -> str:
    """`Loss over 40 logged steps: first 6.1, last 3.08, lowest 3.07 at step 37, highest 6.1 at step
    1.`"""
    finite = np.flatnonzero(np.isfinite(values))
    low, high = finite[np.argmin(values[finite])], finite[np.argmax(values[finite])]
    texts = [cell(float(values[row]), unit) for row in (finite[0], finite[-1], low, high)]
    return (
        f"{label} over {formatting.plural(len(finite), 'logged step')}: first {texts[0]}, last"
        f" {texts[1]}, lowest {texts[2]} at step {curves.step[low]:,}, highest {texts[3]} at step"
        f" {curves.step[high]:,}."
    )


def _drawn(curves: Curves, rows: NDArray[np.intp]) -> str:
    """Say what a reduced curve shows; empty where every step is drawn."""
    if len(rows) == len(curves.step):
        return ""
    return (
        f"Drawn: the highs and lows of {len(curves.step):,} logged steps ({len(rows):,} of them). "
    )
