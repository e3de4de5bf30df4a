"""A curve in a few rows of a terminal, drawn with Braille dots: two columns and four rows of them in each character.

Each column of dots shows the mean of its share of the values, joined to its neighbour by a vertical stroke. Terminals
without Unicode get `*`, one column and one row in each character.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

_BLANK: Final = 0x2800
_DOTS: Final = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The bits of a Braille character: by column, from the top."""


def sparkline(values: Sequence[float], width: int, height: int, *, unicode: bool = True) -> list[str]:
    """`height` lines of `width` characters; values that are not finite are left out. All blank without any value."""
    columns, rows = (width * 2, height * 4) if unicode else (width, height)
    heights = _heights(_means(values, columns), rows)
    dots = [[False] * columns for _ in range(rows)]
    previous: int | None = None
    for column, level in enumerate(heights):
        if level is None:
            continue
        start = level if previous is None else previous + (level > previous) - (level < previous)
        for row in range(min(start, level), max(start, level) + 1):
            dots[rows - 1 - row][column] = True
        previous = level
    if not unicode:
        return ["".join("*" if dot else " " for dot in row) for row in dots]
    return ["".join(_character(dots, line, place) for place in range(width)) for line in range(height)]


def _character(dots: list[list[bool]], line: int, place: int) -> str:
    code = _BLANK
    for column in range(2):
        for row in range(4):
            if dots[line * 4 + row][place * 2 + column]:
                code |= _DOTS[column][row]
    return chr(code)


def _means(values: Sequence[float], columns: int) -> list[float]:
    """The mean of the finite values of each of `columns` equal shares; fewer values are joined by straight lines."""
    if 1 < len(values) < columns:
        return [_between(values, column * (len(values) - 1) / (columns - 1)) for column in range(columns)]
    means = []
    for column in range(columns):
        start = column * len(values) // columns
        share = values[start : max(start + 1, (column + 1) * len(values) // columns)]
        finite = [value for value in share if math.isfinite(value)]
        means.append(math.fsum(finite) / len(finite) if finite else math.nan)
    return means


def _between(values: Sequence[float], place: float) -> float:
    """The value at a fractional place; NaN where a neighbour that counts is not finite."""
    left = min(int(place), len(values) - 2)
    share = place - left
    if share in (0.0, 1.0):
        return values[left + round(share)]
    return values[left] * (1 - share) + values[left + 1] * share


def _heights(means: Sequence[float], rows: int) -> list[int | None]:
    finite = [value for value in means if math.isfinite(value)]
    if not finite:
        return [None] * len(means)
    low, high = min(finite), max(finite)
    # Divided before it is multiplied: (rows - 1) / span overflows where the span is next to nothing.
    span = high - low or 1.0
    return [round((value - low) / span * (rows - 1)) if math.isfinite(value) else None for value in means]
