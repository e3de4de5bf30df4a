"""A curve of bandwidth over message size on two logarithmic axes, beside its reference and its
limit: the picture as paths, and the points with their exact values.

The picture needs no script: each point says its values in its title.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from drillyard import formatting
from drillyard.reporting.content import Table

WIDTH, HEIGHT = 590, 285
LEFT, RIGHT, TOP, BOTTOM = 64, 18, 14, 44
_MOST_X_TICKS: Final = 7

Points = Sequence[tuple[float, float]]
"""(bytes, GB/s), both above zero."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A measured point, in pixels, with the values that it stands for."""

    x: float
    y: float
    bytes: float
    gb_per_s: float
    title: str


@dataclass(frozen=True, slots=True)
class BandwidthCurve:
    """The picture of one result. Paths are values of the attribute `d`."""

    name: str
    title: str
    summary: str
    measured: str
    reference: str
    reference_label: str
    limit: float | None
    limit_label: str
    dots: list[CurvePoint]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    table: Table
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    base: int = HEIGHT - BOTTOM


def bandwidth_curve(
    name: str,
    title: str,
    measured: Points,
    reference: Points = (),
    *,
    reference_label: str = "Reference",
    limit: float | None = None,
    limit_label: str = "Limit",
) -> BandwidthCurve | None:
    """The picture; None where fewer than two measured points can be drawn."""
    shown = _drawable(measured)
    if len(shown) < 2:
        return None
    compared = _drawable(reference)
    every = [*shown, *compared]
    heights = [value for _, value in every] + ([limit] if limit else [])
    x = _Scale(min(size for size, _ in every), max(size for size, _ in every), LEFT, WIDTH - RIGHT)
    y = _Scale(min(heights) / 1.3, max(heights) * 1.3, HEIGHT - BOTTOM, TOP)
    largest, best = shown[-1][0], shown[-1][1]
    return BandwidthCurve(
        name=name,
        title=title,
        summary=(
            f"{title}: {formatting.number(best)} GB/s at {formatting.size(largest)}, the largest"
            " message"
        ),
        measured=_path(shown, x, y),
        reference=_path(compared, x, y) if len(compared) > 1 else _mark(compared, x, y),
        reference_label=reference_label if compared else "",
        limit=None if not limit else round(y.pixel(limit), 1),
        limit_label=limit_label,
        dots=[
            CurvePoint(
                round(x.pixel(size), 1),
                round(y.pixel(value), 1),
                size,
                value,
                f"{formatting.size(size)}: {formatting.number(value)} GB/s",
            )
            for size, value in shown
        ],
        x_ticks=_size_ticks(x),
        y_ticks=_rate_ticks(y),
        table=_table(title, shown, compared),
    )


class _Scale:
    """A logarithmic mapping of [low, high] to pixels; of a single value to the middle."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high = low, high
        self._begin, self._span = math.log2(low), math.log2(high) - math.log2(low)
        self._start, self._end = start, end

    def pixel(self, value: float) -> float:
        share = (math.log2(value) - self._begin) / self._span if self._span else 0.5
        return self._start + share * (self._end - self._start)


def _drawable(points: Points) -> list[tuple[float, float]]:
    return sorted(
        (size, value)
        for size, value in points
        if size > 0 and value > 0 and math.isfinite(size) and math.isfinite(value)
    )


def _path(points: Points, x: _Scale, y: _Scale) -> str:
    return "M" + "L".join(f"{x.pixel(size):.1f} {y.pixel(value):.1f}" for size, value in points)


def _mark(points: Points, x: _Scale, y: _Scale) -> str:
    """A reference of one size: a short line at its place."""
    return "".join(f"M{x.pixel(size) - 9:.1f} {y.pixel(value):.1f}h18" for size, value in points)


def _size_ticks(x: _Scale) -> list[tuple[float, str]]:
    first, last = math.ceil(math.log2(x.low) - 1e-9), math.floor(math.log2(x.high) + 1e-9)
    every = max(1, math.ceil((last - first + 1) / _MOST_X_TICKS))
    powers = range(first, last + 1, every)
    return [(round(x.pixel(2.0**power), 1), _binary_size(power)) for power in powers]


def _binary_size(power: int) -> str:
    """2**power bytes, such as 64 MiB."""
    unit = min(power // 10, 4)
    return f"{2 ** (power - 10 * unit)} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


def _rate_ticks(y: _Scale) -> list[tuple[float, str]]:
    """One, two and five of each decade; only powers of ten where those are too many."""
    first, last = math.floor(math.log10(y.low)), math.ceil(math.log10(y.high))
    digits = (1, 2, 5) if last - first <= 3 else (1,)
    values = [digit * 10.0**power for power in range(first, last + 1) for digit in digits]
    return [
        (round(y.pixel(value), 1), f"{value:,.10g}") for value in values if y.low <= value <= y.high
    ]


def _table(title: str, measured: Points, reference: Points) -> Table:
    known = dict(reference)
    rows = [
        (
            formatting.size(size),
            formatting.number(value, 6),
            *((formatting.number(known[size], 6) if size in known else "",) if known else ()),
        )
        for size, value in measured
    ]
    headers = ("Message", "GB/s", *(("Reference, GB/s",) if known else ()))
    return Table(headers, rows, caption=title)
