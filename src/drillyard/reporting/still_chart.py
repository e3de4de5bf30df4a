"""A chart as a still picture: what the page shows until its scripts draw, and without them.

The curves over the whole run, the levels and the marks as SVG paths in pixels of a picture of the
size that the scripts draw too; of the scales only the ends are named. At most `STILL_POINTS` points
a curve: some 5 KB of path.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from drillyard.reporting.charts import Chart, Series
from drillyard.reporting.tables import cell, downsample

STILL_POINTS: Final = 500
LEFT, RIGHT, TOP, BOTTOM = 78, 22, 12, 40
"""The margins of a plot in pixels, as in `assets/chart.js` and `assets/page.html`."""
WIDE_SIZE: Final = (1200, 300)
SIZE: Final = (590, 235)

Place = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class StillChart:
    """Paths are values of the attribute `d`; coordinates are pixels from the top left."""

    width: int
    height: int
    lowest: str
    highest: str
    first_step: str
    last_step: str
    curves: list[tuple[Series, str]]
    dots: list[tuple[Series, str]]
    levels: list[float]
    marks: list[float]


def still_chart(chart: Chart, wide: bool = False) -> StillChart:
    """The picture of a chart with at least one finite value."""
    width, height = WIDE_SIZE if wide else SIZE
    steps = [step for series in chart.series for step in series.x]
    first, last = min(steps), max(steps)
    values = [value for series in chart.series for value in series.y if value is not None]
    low, high = min(values), max(values)
    x = _scale(first, last, LEFT, width - RIGHT)
    y = _scale(low, high, height - BOTTOM - 8, TOP + 8, chart.logarithmic)
    return StillChart(
        width,
        height,
        lowest=cell(low, chart.unit),
        highest=cell(high, chart.unit),
        first_step=f"{first:,}",
        last_step=f"{last:,}",
        curves=[
            (series, line_path(series, x, y)) for series in chart.series if series.style != "points"
        ],
        dots=[
            (series, dots_path(series, x, y))
            for series in chart.series
            if series.style in ("joined", "points")
        ],
        levels=[round(y(value), 1) for value in chart.levels.values() if low <= value <= high],
        marks=[round(x(step), 1) for step in chart.marks if first <= step <= last],
    )


def _scale(low: float, high: float, start: float, end: float, logarithmic: bool = False) -> Place:
    """The mapping of [low, high] to pixels; of a single value to the middle. Halves keep the
    difference of two finite numbers finite."""

    def bend(value: float) -> float:
        return math.log10(value) if logarithmic else value / 2

    begin, span = bend(low), bend(high) - bend(low)
    if not span:
        return lambda _: (start + end) / 2
    return lambda value: start + (bend(value) - begin) / span * (end - start)


def line_path(series: Series, x: Place, y: Place) -> str:
    """The line through the points, broken at each None; a point between two breaks is a dot."""
    points = _reduced(series)
    ends = [-1, *(place for place, (_, value) in enumerate(points) if value is None), len(points)]
    return "".join(_segment(points[start + 1 : end], x, y) for start, end in pairwise(ends))


def _segment(points: list[tuple[int, float | None]], x: Place, y: Place) -> str:
    pairs = [f"{x(step):.1f} {y(value):.1f}" for step, value in points if value is not None]
    if not pairs:
        return ""
    return f"M{'L'.join(pairs)}" + ("h.1" if len(pairs) == 1 else "")


def dots_path(series: Series, x: Place, y: Place) -> str:
    """Lines of no length at the points: their round ends show."""
    return "".join(
        f"M{x(step):.1f} {y(value):.1f}h.1" for step, value in _reduced(series) if value is not None
    )


def _reduced(series: Series) -> list[tuple[int, float | None]]:
    """At most `STILL_POINTS` points of a series, as (step, value)."""
    points = list(zip(series.x, series.y, strict=True))
    if len(points) <= STILL_POINTS:
        return points
    values = np.array([math.nan if value is None else value for value in series.y])
    return [points[row] for row in downsample(values, STILL_POINTS).tolist()]
