"""A figure of every pair of nodes as a square of coloured cells, and its extremes as a table.

Cells are coloured by their place between the best and the worst value; each says its value and its
nodes. Where lower is better, such as a clock's offset, a value counts without its sign. A map of
more than `MOST_NODES` nodes shows those with the worst values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final, TypeGuard

from drillyard import formatting
from drillyard.reporting.content import Table

MOST_NODES: Final = 64
LABELS: Final = 90
"""Pixels left of the cells and below them."""
_SIDE, _MOST_CELL = 520, 64
_LISTED: Final = 16


@dataclass(frozen=True, slots=True)
class Cell:
    """A pair, in pixels of the picture. `shade` from 0, the better end, to 1; None: the pair was
    not measured."""

    x: float
    y: float
    row: str
    column: str
    value: float | None
    shade: float | None
    title: str


@dataclass(frozen=True, slots=True)
class HeatMap:
    """The picture: cells of `cell` pixels; `labels` are the names of nodes, and how far from the
    first cell's edge, of rows left of the cells and of columns below them."""

    name: str
    title: str
    summary: str
    note: str
    cell: float
    side: float
    cells: list[Cell]
    labels: list[tuple[float, str]]
    table: Table
    margin: int = LABELS


def heat_map(
    name: str,
    title: str,
    unit: str,
    nodes: Sequence[str],
    values: Sequence[Sequence[float | None]],
    *,
    higher_is_better: bool,
) -> HeatMap | None:
    """The picture; None where no pair has a value, or there is only one pair. Of a pair with a
    value in each direction the worse one counts."""

    def goodness(value: float) -> float:
        return value if higher_is_better else -abs(value)

    measured = sorted(
        (
            (min(found, key=goodness), i, j)
            for i, j in combinations(range(len(nodes)), 2)
            if (found := [each for each in (values[i][j], values[j][i]) if _is_finite(each)])
        ),
        key=lambda pair: goodness(pair[0]),
    )
    if not measured or len(nodes) < 3:
        return None
    shown = _shown(len(nodes), measured)
    worst, best = measured[0][0], measured[-1][0]
    span = goodness(best) - goodness(worst)
    cell = min(_MOST_CELL, _SIDE / len(shown))
    every = max(1, math.ceil(14 / cell))

    def drawn(x: int, y: int) -> Cell:
        row, column, value = nodes[shown[y]], nodes[shown[x]], values[shown[y]][shown[x]]
        shade, said = None, "not measured"
        if _is_finite(value):
            share = (goodness(best) - goodness(value)) / span if span else 0.0
            shade, said = round(min(max(share, 0.0), 1.0), 3), _text(value, unit)
        left, top = round(LABELS + x * cell, 2), round(y * cell, 2)
        return Cell(left, top, row, column, value, shade, f"{row} and {column}: {said}")

    places = range(len(shown))
    text = f"worst {_text(worst, unit)} ({nodes[measured[0][1]]} and {nodes[measured[0][2]]})"
    left_out = len(nodes) - len(shown)
    return HeatMap(
        name=name,
        title=title,
        summary=f"{title}: {text}, best {_text(best, unit)}",
        note=f"{left_out} nodes whose values are better are not drawn." if left_out else "",
        cell=round(cell, 2),
        side=round(cell * len(shown), 1),
        cells=[drawn(x, y) for y in places for x in places if x != y],
        labels=[(round((place + 0.5) * cell, 1), nodes[shown[place]]) for place in places[::every]],
        table=_table(title, unit, nodes, measured),
    )


def _is_finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _shown(nodes: int, measured: Sequence[tuple[float, int, int]]) -> list[int]:
    """All nodes, or those of the worst pairs, in order."""
    kept: dict[int, None] = {}
    for _, *pair in measured if nodes > MOST_NODES else ():
        kept.update(dict.fromkeys(pair[: MOST_NODES - len(kept)]))
    return sorted(kept) or list(range(nodes))


def _text(value: float, unit: str) -> str:
    return f"{formatting.number(value)} {unit}".strip()


def _table(
    title: str, unit: str, nodes: Sequence[str], measured: Sequence[tuple[float, int, int]]
) -> Table:
    """The worst pairs; all of them where they are few."""
    rows = [
        (nodes[one], nodes[other], formatting.number(value, 6))
        for value, one, other in measured[:_LISTED]
    ]
    left_out = len(measured) - len(rows)
    caption = f"{title}, the worst {len(rows)} of {len(measured)} pairs" if left_out else title
    value = f"Value, {unit}" if unit else "Value"
    return Table(("Node", "Node", value), rows, numbers_from=2, caption=caption)
