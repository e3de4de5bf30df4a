"""A scatter of cost against time with its Pareto front: for the terminal, and as SVG.

Both axes are logarithmic, since a sweep spans orders of magnitude. A plotting library would be many
times the size of all else that `estimate` imports, for some dots and two axes. The SVG is one file
of text without scripts or fonts of its own, and has each point's meaning as its tooltip.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from drillyard.formatting import three_digits

WIDTH, HEIGHT = 760, 460
LEFT, RIGHT, TOP, BOTTOM = 84, 24, 44, 56
COLUMNS, ROWS = 64, 16
SHORT_AXIS = 8
"""Up to this ratio of its ends an axis has even steps."""
MANY_DOTS = 200


@dataclass(frozen=True, slots=True)
class Dot:
    """A point of the plot; both coordinates are above 0. `label` says what it is."""

    x: float
    y: float
    label: str
    on_front: bool


@dataclass(frozen=True, slots=True)
class Plot:
    """Content of a plot: dots and the labels of the axes."""

    title: str
    x_title: str
    y_title: str
    dots: Sequence[Dot]


class _Scale(NamedTuple):
    """A logarithmic axis from `low` to `high`."""

    low: float
    high: float

    def place(self, value: float) -> float:
        """0 at the lower end, 1 at the upper."""
        return math.log(value / self.low) / math.log(self.high / self.low)

    def ticks(self) -> list[float]:
        """Round numbers within: even steps on a short axis, else 1, 2 and 5 of every decade, of
        many only the 1."""
        if self.high / self.low < SHORT_AXIS:
            return self._even_ticks()
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        steps = (1, 2, 5) if len(decades) <= 4 else (1,)
        found = (step * 10.0**decade for decade in decades for step in steps)
        return [tick for tick in found if self.low <= tick <= self.high]

    def _even_ticks(self) -> list[float]:
        """At least three multiples of 1, 2 or 5 times a power of ten."""
        step = 10.0 ** math.ceil(math.log10(self.high - self.low))
        for part in (2, 5, 10, 20, 50):
            first, last = math.ceil(self.low / step * part), math.floor(self.high / step * part)
            if last - first >= 2:
                return [number * step / part for number in range(first, last + 1)]
        return []


def scale_of(values: Sequence[float]) -> _Scale:
    """An axis with a little room around `values`, which are above 0."""
    low, high = min(values), max(values)
    room = max((high / low) ** 0.06, 1.08)
    return _Scale(low / room, high * room)


def terminal_plot(plot: Plot, columns: int = COLUMNS, rows: int = ROWS) -> str:
    """The plot in characters: `o` on the front, `.` elsewhere."""
    across, up = scale_of([dot.x for dot in plot.dots]), scale_of([dot.y for dot in plot.dots])
    grid = [[" "] * columns for _ in range(rows)]
    for dot in sorted(plot.dots, key=lambda one: one.on_front):
        column = round(across.place(dot.x) * (columns - 1))
        row = round((1 - up.place(dot.y)) * (rows - 1))
        grid[row][column] = "o" if dot.on_front else "."
    margins = {0: three_digits(up.high), rows - 1: three_digits(up.low)}
    margin = max(len(text) for text in margins.values())
    lines = [
        f"{margins.get(index, ''):>{margin}} |{''.join(row)}".rstrip()
        for index, row in enumerate(grid)
    ]
    ends = f"{three_digits(across.low)}{three_digits(across.high):>{columns - len(three_digits(across.low))}}"  # noqa: E501
    blank = " " * margin
    return "\n".join(
        [
            f"{plot.y_title} (o: Pareto front)",
            *lines,
            f"{blank} +{'-' * columns}",
            f"{blank}  {ends}",
            f"{blank}  {plot.x_title}",
        ]
    )


def svg_plot(plot: Plot) -> str:
    frame = _Frame(scale_of([dot.x for dot in plot.dots]), scale_of([dot.y for dot in plot.dots]))
    front = sorted((dot for dot in plot.dots if dot.on_front), key=lambda dot: dot.x)
    line = " ".join("{:.1f},{:.1f}".format(*frame.at(dot.x, dot.y)) for dot in front)
    middle_x, middle_y = (LEFT + WIDTH - RIGHT) // 2, (TOP + HEIGHT - BOTTOM) // 2
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
            ' font-family="sans-serif" font-size="12" fill="#222">'
        ),
        f"<title>{escape(plot.title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="24" font-size="15">{escape(plot.title)}</text>',
        *frame.lines(),
        (
            f'<text x="{middle_x}" y="{HEIGHT - 14}"'
            f' text-anchor="middle">{escape(plot.x_title)}</text>'
        ),
        (
            f'<text transform="translate(20 {middle_y}) rotate(-90)"'
            f' text-anchor="middle">{escape(plot.y_title)}</text>'
        ),
        f'<polyline points="{line}" fill="none" stroke="#c2410c" stroke-width="1.5"/>',
        *(
            frame.circle(dot, 2 if len(plot.dots) > MANY_DOTS else 3.5)
            for dot in sorted(plot.dots, key=lambda one: one.on_front)
        ),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


class _Frame(NamedTuple):
    """The two scales on the sheet of the SVG."""

    across: _Scale
    up: _Scale

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Position of a value in the sheet's coordinates: y grows downwards."""
        return (
            LEFT + self.across.place(x) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - self.up.place(y) * (HEIGHT - TOP - BOTTOM),
        )

    def lines(self) -> Iterator[str]:
        """The border, and a thin line with its figure at every tick."""
        bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
        for tick in self.across.ticks():
            x, _ = self.at(tick, self.up.low)
            yield f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="#e5e5e5"/>'
            yield (
                f'<text x="{x:.1f}" y="{bottom + 18}"'
                f' text-anchor="middle">{three_digits(tick)}</text>'
            )
        for tick in self.up.ticks():
            _, y = self.at(self.across.low, tick)
            yield f'<path d="M{LEFT} {y:.1f}H{right}" stroke="#e5e5e5"/>'
            yield (
                f'<text x="{LEFT - 8}" y="{y + 4:.1f}"'
                f' text-anchor="end">{three_digits(tick)}</text>'
            )
        yield f'<path d="M{LEFT} {TOP}H{right}V{bottom}H{LEFT}Z" fill="none" stroke="#999"/>'

    def circle(self, dot: Dot, radius: float) -> str:
        """A dot with its label as a tooltip; those of the front are larger."""
        x, y = self.at(dot.x, dot.y)
        radius, fill = (radius + 1.5, "#c2410c") if dot.on_front else (radius, "#94a3b8")
        label = escape(dot.label)
        return (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}"'
            f' fill="{fill}"><title>{label}</title></circle>'
        )
