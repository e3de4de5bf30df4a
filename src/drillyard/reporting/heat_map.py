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
from typing import Final

from drillyard import formatting
from drillyard.reporting.content import Table

MOST_NODES: Final = 64
_SIDE, _MOST_CELL, _LABELS = 520, 64, 90
_LISTED: Final = 16


@dataclass(frozen=True, slots=True)
class Cell:
    """A pair. `shade` from 0, the better end, to 1; None: the pair was not measured."""

    x: float
    y: float
    row: str
    column: str
    value: float | None
    shade: float | None
    title: str


@dataclass(frozen=True, slots=True)
class HeatMap:
    """The picture: cells of `cell` pixels, labels left of and below them."""

    name: str
    title: str
    summary: str
    note: str
    unit: str
    cell: float
    width: float
    height: float
    cells: list[Cell]
    rows: list[tuple[float, str]]
    columns: list[tuple[float, str]]
    table: Table


def heat_map(
    name: str,
    title: str,
    unit: str,
    nodes: Sequence[str],
    values: Sequence[Sequence[float | None]],
    *,
    higher_is_better: bool,
) -> HeatMap | None:
    """The picture; None where no pair has a value, or there is only one pair."""
    measured = sorted(
        (
            (value, nodes[i], nodes[j])
            for i, j in combinations(range(len(nodes)), 2)
            if (value := _finite(values[i][j])) is not None
        ),
        key=lambda pair: pair[0] if higher_is_better else -abs(pair[0]),
    )
    if not measured or len(nodes) < 3:
        return None
    shown = _shown(nodes, measured)
    worst, best = measured[0][0], measured[-1][0]
    ends = (worst, best) if higher_is_better else (abs(worst), abs(best))
    cell = min(_MOST_CELL, _SIDE / len(shown))
    every = max(1, math.ceil(14 / cell))
    at = {node: place for place, node in enumerate(nodes)}
    cells = [
        _cell(
            row,
            column,
            values[at[row]][at[column]],
            unit,
            ends,
            x * cell,
            y * cell,
            higher_is_better,
        )
        for y, row in enumerate(shown)
        for x, column in enumerate(shown)
        if row != column
    ]
    labels = [((place + 0.5) * cell, node) for place, node in enumerate(shown)][::every]
    side = cell * len(shown)
    text = f"worst {_text(worst, unit)} ({measured[0][1]} and {measured[0][2]})"
    left_out = len(nodes) - len(shown)
    return HeatMap(
        name=name,
        title=title,
        summary=f"{title}: {text}, best {_text(best, unit)}",
        note=f"{left_out} nodes whose values are better are not drawn." if left_out else "",
        unit=unit,
        cell=round(cell, 2),
        width=round(_LABELS + side + 4, 1),
        height=round(side + _LABELS, 1),
        cells=cells,
        rows=labels,
        columns=labels,
        table=_table(title, unit, measured),
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _shown(nodes: Sequence[str], measured: Sequence[tuple[float, str, str]]) -> list[str]:
    """All nodes, or those of the worst pairs, in their own order."""
    if len(nodes) <= MOST_NODES:
        return list(nodes)
    kept: dict[str, None] = {}
    for _, one, other in measured:
        for node in (one, other):
            if len(kept) < MOST_NODES:
                kept[node] = None
    return [node for node in nodes if node in kept]


def _cell(
    row: str,
    column: str,
    value: float | None,
    unit: str,
    ends: tuple[float, float],
    x: float,
    y: float,
    signed: bool,
) -> Cell:
    value = _finite(value)
    shade = None
    if value is not None:
        worst, best = ends
        placed = value if signed else abs(value)
        shade = 0.0 if best == worst else round((best - placed) / (best - worst), 3)
    said = "not measured" if value is None else _text(value, unit)
    return Cell(round(x, 2), round(y, 2), row, column, value, shade, f"{row} and {column}: {said}")


def _text(value: float, unit: str) -> str:
    return f"{formatting.number(value)} {unit}".strip()


def _table(title: str, unit: str, measured: Sequence[tuple[float, str, str]]) -> Table:
    """The worst pairs; all of them where they are few."""
    rows = [(one, other, formatting.number(value, 6)) for value, one, other in measured[:_LISTED]]
    left_out = len(measured) - len(rows)
    caption = f"{title}, the worst {len(rows)} of {len(measured)} pairs" if left_out else title
    value = f"Value, {unit}" if unit else "Value"
    return Table(("Node", "Node", value), rows, numbers_from=2, caption=caption)
