"""The charts of a report as values: their curves, marks and levels, and the same as a table.

The page's scripts draw a chart from its JSON (`as_json`); without them the page shows a still
picture (still_chart.py) and the table. Long curves are reduced to their peaks and dips (tables.py),
with the full precision of the log. A logged step without a value breaks the line.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from drillyard import formatting
from drillyard.goodput import STALL_FACTOR
from drillyard.reporting.content import Content, Curves, Floats, Point, Table
from drillyard.reporting.event_text import measure_label
from drillyard.reporting.tables import (
    MOST_POINTS,
    Unit,
    cell,
    centred_mean,
    curve_table,
    downsample,
    evaluations_caption,
    evaluations_shown,
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


class Series(NamedTuple):
    """A curve by its own steps, ascending; a value of None breaks the line. `colour` is a custom
    property of the style sheet.

    `line` and `faint` are curves, `joined` a curve with its points shown, `points` points alone.
    """

    label: str
    x: list[int]
    y: list[float | None]
    colour: str
    style: Style = "line"


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart over steps. `axis` is the title of its values' axis, `summary` what it shows in a
    sentence, `note` its conditions."""

    name: str
    title: str
    axis: str
    series: list[Series]
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
        """The chart for the page's scripts."""
        return {
            "name": self.name,
            "axis": self.axis,
            "series": [series._asdict() for series in self.series],
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
    found.append(
        _plain(
            content,
            "tokens",
            rate,
            curves.tokens_per_second_per_gpu,
            "--series-2",
            axis=f"tokens/s per {content.device}",
        )
    )
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
            content,
            "memory",
            f"Memory, GiB per {content.device}",
            curves.memory_gib,
            "--series-4",
            axis=f"GiB per {content.device}",
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
        [*_loss_lines(curves), *_held_out_lines(held_out), *_skipped_line(curves)],
        table=loss_table(curves, held_out),
        summary=_course("Loss", curves, curves.loss),
        note=_drawn(curves.loss) + skips,
    )


def _loss_lines(curves: Curves) -> Iterator[Series]:
    """The loss; faint under its mean where there are many steps."""
    x, y = _points(curves, curves.loss)
    if len(curves.step) < SMOOTH_FROM:
        yield Series("Loss", x, y, "--series-1")
        return
    window = len(curves.step) // 50 | 1
    mean = centred_mean(curves.loss, window)
    yield Series("Loss", x, y, "--series-1-faint", "faint")
    yield Series(f"Mean of {window} steps", *_points(curves, mean), "--series-1")


def _held_out_lines(parts: Mapping[str, Sequence[Point]]) -> Iterator[Series]:
    for number, (name, points) in enumerate(parts.items()):
        part = name.rpartition(".")[0] or "loss"
        yield _evaluated(f"Held out: {part}", points, number)


def _evaluated(label: str, points: Sequence[Point], number: int) -> Series:
    """The curve of a figure of the evaluations; of two at one step the later one is drawn, of many
    the highs and lows."""
    by_step = sorted(dict(points).items())
    shown = by_step
    if len(by_step) > MOST_POINTS:
        shown = [by_step[row] for row in downsample(np.array([value for _, value in by_step]))]
    return Series(
        label,
        [step for step, _ in shown],
        [value if math.isfinite(value) else None for _, value in shown],
        _held_out_colour(number),
        "joined",
    )


def _held_out_colour(number: int) -> str:
    return f"--held-out-{number % 4 + 1}"


def _skipped_line(curves: Curves) -> Iterator[Series]:
    """Marks at the bottom of the chart."""
    if skipped := curves.step[~curves.finite][:MOST_MARKED].tolist():
        floor = float(curves.loss[np.isfinite(curves.loss)].min())
        yield Series("Skipped, not finite", skipped, [floor] * len(skipped), "--bad", "points")


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
        by_step = [dict(points) for points in parts.values()]
        rows = [
            (f"{step:,}", *(cell(values.get(step), unit) for values in by_step))
            for step in evaluations_shown(x)
        ]
        last = ", ".join(f"{part} {cell(points[-1].value, unit)}" for part, points in parts.items())
        yield _chart(
            content,
            f"evaluation-{number}",
            f"{label}, held out",
            [_evaluated(part, points, place) for place, (part, points) in enumerate(parts.items())],
            axis=label,
            table=Table(("Step", *parts), rows, caption=evaluations_caption(len(x))),
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
    lines = list(_step_time_lines(curves))
    shown = [value for line in lines for value in line.y if value is not None]
    logarithmic = min(shown) > 0 and max(shown) > LOGARITHMIC_FROM * median
    levels = {"median": median, f"{STALL_FACTOR} x median": STALL_FACTOR * median}
    return _chart(
        content,
        "step-time",
        "Step time",
        lines,
        table=step_time_table(curves),
        summary=_course("Step time", curves, times, "seconds"),
        note=_drawn(times)
        + ("Logarithmic scale. " if logarithmic else "")
        + _step_time_note(curves),
        unit="seconds",
        logarithmic=logarithmic,
        # One median is not the usual time of steps on different numbers of GPUs.
        levels=levels if np.isfinite(median) and curves.gpus is None else {},
    )


def _step_time_lines(curves: Curves) -> Iterator[Series]:
    times, waits, stalls = curves.step_seconds, curves.data_seconds, curves.stalls
    yield Series("Step time", *_points(curves, times), "--series-1")
    if np.isfinite(waits).any() and np.nanmax(waits) > NOTABLE_WAIT * curves.median_seconds:
        yield Series("Waiting for data", *_points(curves, waits), "--series-4")
    if len(stalls):
        longest = np.sort(stalls[np.argsort(-times[stalls], kind="stable")][:MOST_MARKED])
        x, y = curves.step[longest].tolist(), times[longest].tolist()
        yield Series("Stall", x, y, "--bad", "points")


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
    axis: str = "",
    note: str = "",
    unit: Unit = "number",
) -> Chart | None:
    """A chart of one curve; None where it has no value."""
    curves = content.curves
    if not np.isfinite(values).any():
        return None
    label = title.partition(",")[0]
    return _chart(
        content,
        name,
        title,
        [Series(label, *_points(curves, values), colour)],
        axis=axis,
        table=curve_table(curves, label, values, unit),
        summary=_course(label, curves, values, unit),
        note=_drawn(values) + (f"{note}." if note else ""),
        unit=unit,
    )


def _points(curves: Curves, values: Floats) -> tuple[list[int], list[float | None]]:
    """The points of a curve to draw, None where a logged step has no finite value."""
    rows = downsample(values)
    y = [value if math.isfinite(value) else None for value in values[rows].tolist()]
    return curves.step[rows].tolist(), y


def _chart(
    content: Content,
    name: str,
    title: str,
    series: list[Series],
    *,
    axis: str = "",
    **more: Any,
) -> Chart:
    return Chart(name, title, axis or title, series, marks=content.resumed, **more)


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


def _drawn(values: Floats) -> str:
    """Say what a reduced curve shows; empty where every value is drawn."""
    shown = int(np.isfinite(values[downsample(values)]).sum())
    if shown == (known := int(np.isfinite(values).sum())):
        return ""
    return f"Drawn: the highs and lows of {known:,} logged steps ({shown:,} of them). "
