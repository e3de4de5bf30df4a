"""The tables of a report: what its charts show, as rows for readers without a script, on paper or with a screen reader.

A curve is shown by a few rows at equal distances; the figures above the charts rest on all steps.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from drillyard import formatting
from drillyard.reporting.content import Content, Curves, Floats, Point, Table
from drillyard.reporting.downsample import evenly_spaced
from drillyard.reporting.event_text import measure_label

TABLE_ROWS = 21

Unit = Literal["number", "seconds", "fraction"]


def evaluation_table(content: Content) -> Table | None:
    """Every figure of the evaluations: its first and last value, its lowest and highest with their steps."""
    rows = []
    for name, points in content.evaluations.items():
        part, _, measure = name.rpartition(".")
        unit = unit_of(measure)
        finite = [point for point in points if math.isfinite(point.value)] or points
        low, high = min(finite, key=lambda point: point.value), max(finite, key=lambda point: point.value)
        ends = (f"{cell(point.value, unit)} (step {point.step:,})" for point in (points[0], points[-1], low, high))
        label = measure_label(measure)
        rows.append((f"{part}: {label}" if part else label, *ends))
    return Table(("Figure", "First", "Last", "Lowest", "Highest"), rows) if rows else None


def unit_of(measure: str) -> Unit:
    """How the values of a measure of evaluations are written."""
    return "fraction" if measure == "sql_execution" else "number"


def loss_table(curves: Curves, held_out: dict[str, list[Point]]) -> Table:
    """The training loss at equal distances and wherever there was an evaluation, with the held-out losses."""
    by_step = {name.rpartition(".")[0] or "loss": dict(points) for name, points in held_out.items()}
    evaluated = {step for points in by_step.values() for step in points}
    shown = curves.step[evenly_spaced(len(curves.step), TABLE_ROWS)].tolist()
    losses = dict(zip(curves.step.tolist(), curves.loss.tolist(), strict=True))
    rows = [
        (f"{step:,}", cell(losses.get(step)), *(cell(points.get(step)) for points in by_step.values()))
        for step in sorted(evaluated.union(shown))
    ]
    caption = _caption(curves, TABLE_ROWS)
    return Table(("Step", "Loss", *(f"Held out: {part}" for part in by_step)), rows, caption=caption)


def step_time_table(curves: Curves) -> Table:
    """Rows at equal distances, and the ten longest stalls."""
    stalls = curves.stalls
    longest = stalls[np.argsort(-curves.step_seconds[stalls], kind="stable")][:10]
    places = np.union1d(evenly_spaced(len(curves.step), TABLE_ROWS), longest)
    marked = set(stalls.tolist())
    rows = [
        (
            f"{curves.step[row]:,}",
            formatting.duration(curves.step_seconds[row]),
            "first or compiling" if curves.warm_up[row] else "stall" if row in marked else "",
        )
        for row in places.tolist()
    ]
    caption = _caption(curves, TABLE_ROWS)
    if len(longest):
        caption += f"; {'the longest' if len(stalls) > len(longest) else 'all'} stalls among them"
    return Table(("Step", "Step time", ""), rows, caption=caption)


def curve_table(curves: Curves, columns: dict[str, Floats], unit: Unit = "number") -> Table:
    """Curves at equal distances."""
    rows = [
        (f"{curves.step[row]:,}", *(cell(values[row], unit) for values in columns.values()))
        for row in evenly_spaced(len(curves.step), TABLE_ROWS)
    ]
    return Table(("Step", *columns), rows, caption=_caption(curves, TABLE_ROWS))


def _caption(curves: Curves, most: int) -> str:
    length = len(curves.step)
    return f"{most} of {length:,} logged steps" if length > most else f"All {formatting.plural(length, 'logged step')}"


def cell(value: float | None, unit: Unit = "number") -> str:
    """A value as it stands in a table; nothing for None."""
    if value is None:
        return ""
    if unit == "fraction":
        return formatting.percent(value)
    return formatting.duration(value) if unit == "seconds" else formatting.number(value, 5)
