"""The tables of a report, for readers without JavaScript, on paper or with a screen reader; and
which points to draw.

A table shows a few rows of a curve at equal distances. A chart is a few hundred pixels wide, so of
a long curve the lowest and highest point of equal buckets are drawn: every peak and dip keeps its
own step and value, and the report of a million steps is a small file. Cost: O(N), some ten
milliseconds for a million points.

A step without a value is drawn as a gap, so each bucket keeps one of those too. A figure that at
least half of the logged steps lack is logged less often than the others; its points are joined.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from drillyard import formatting
from drillyard.formatting import duration, number, percent
from drillyard.reporting.content import Content, Curves, Floats, Point, Table
from drillyard.reporting.event_text import measure_label
from drillyard.telemetry.console import ACCURACIES
from drillyard.telemetry.events import ODD_VALUE

TABLE_ROWS = 21
EVALUATION_ROWS = 200
MOST_POINTS = 2_000
"""Points of a drawn curve: two for each column of pixels of the widest chart, some 50 KB of
JSON, so that a page with all charts stays under 1 MB."""

Unit = Literal["number", "seconds", "fraction"]


def downsample(values: Floats, most: int = MOST_POINTS) -> NDArray[np.intp]:
    """Ascending indices of at most `most` (>= 5) points to draw: all, or the lowest, the highest
    and the first without a finite value of each bucket.

    The first and the last are always among them. Of a figure that is logged less often than the
    others only finite points are drawn.
    """
    finite = np.isfinite(values)
    places = np.flatnonzero(finite) if 2 * finite.sum() <= len(values) else np.arange(len(values))
    if len(places) <= most:
        return places
    missing = ~finite[places]
    buckets = (most - 2) // (3 if missing.any() else 2)
    edges = np.linspace(0, len(places), buckets + 1).astype(np.intp)
    lowest = np.where(missing, np.inf, values[places])
    highest = np.where(missing, -np.inf, values[places])
    kept = {0, len(places) - 1}
    for start, end in pairwise(edges.tolist()):
        kept.add(int(start + np.argmin(lowest[start:end])))
        kept.add(int(start + np.argmax(highest[start:end])))
        if missing[start:end].any():
            kept.add(int(start + np.argmax(missing[start:end])))
    return places[sorted(kept)]


def evenly_spaced(length: int, most: int = TABLE_ROWS) -> NDArray[np.intp]:
    """Indices of at most `most` (>= 2) rows at equal distances, the first and the last among
    them."""
    if length <= most:
        return np.arange(length)
    return np.unique(np.linspace(0, length - 1, most).round().astype(np.intp))


def centred_mean(values: Floats, window: int) -> Floats:
    """The mean of the finite values among `window` (odd) neighbours of each; fewer at both ends;
    NaN without any."""
    finite = np.isfinite(values)
    sums = np.concatenate(([0.0], np.cumsum(np.where(finite, values, 0.0))))
    counts = np.concatenate(([0], np.cumsum(finite)))
    places = np.arange(len(values))
    start = np.maximum(places - window // 2, 0)
    end = np.minimum(places + window // 2 + 1, len(values))
    used = counts[end] - counts[start]
    with np.errstate(invalid="ignore"):
        return np.where(used > 0, (sums[end] - sums[start]) / np.maximum(used, 1), np.nan)


def evaluation_table(content: Content) -> Table | None:
    """The first, last, lowest and highest value of every figure of the evaluations, with their
    steps."""
    rows = []
    for name, points in content.evaluations.items():
        part, _, measure = name.rpartition(".")
        unit = unit_of(measure)
        finite = [point for point in points if math.isfinite(point.value)] or points
        low, high = (
            min(finite, key=lambda point: point.value),
            max(finite, key=lambda point: point.value),
        )
        ends = (
            f"{cell(point.value, unit)} (step {point.step:,})"
            for point in (points[0], points[-1], low, high)
        )
        label = measure_label(measure)
        rows.append((f"{part}: {label}" if part else label, *ends))
    return Table(("Figure", "First", "Last", "Lowest", "Highest"), rows) if rows else None


def unit_of(measure: str) -> Unit:
    """The unit of a measure of evaluations."""
    return "fraction" if measure in ACCURACIES else "number"


def evaluations_shown(steps: list[int]) -> list[int]:
    """At most `EVALUATION_ROWS` of the steps after which something was evaluated, at equal
    distances."""
    return [steps[place] for place in evenly_spaced(len(steps), EVALUATION_ROWS)]


def evaluations_caption(number: int) -> str:
    """What a table leaves out of so many evaluations; empty where it shows all."""
    return f"{EVALUATION_ROWS} of {number:,} evaluations" if number > EVALUATION_ROWS else ""


def loss_table(curves: Curves, held_out: dict[str, list[Point]]) -> Table:
    """The training loss at equal distances and at evaluations, of many at equal distances too, with
    the held-out losses."""
    by_step = {name.rpartition(".")[0] or "loss": dict(points) for name, points in held_out.items()}
    evaluated = sorted({step for points in by_step.values() for step in points})
    all_evaluated = len(evaluated)
    evaluated = evaluations_shown(evaluated)
    shown = curves.step[evenly_spaced(len(curves.step))].tolist()
    losses = dict(zip(curves.step.tolist(), curves.loss.tolist(), strict=True))
    rows = [
        (
            f"{step:,}",
            cell(losses.get(step)),
            *(cell(points.get(step)) for points in by_step.values()),
        )
        for step in sorted({*evaluated, *shown})
    ]
    return Table(
        ("Step", "Loss", *(f"Held out: {part}" for part in by_step)),
        rows,
        caption=", ".join(filter(None, (_caption(curves), evaluations_caption(all_evaluated)))),
    )


def step_time_table(curves: Curves) -> Table:
    """Rows at equal distances, and the ten longest stalls."""
    stalls = curves.stalls
    longest = stalls[np.argsort(-curves.step_seconds[stalls], kind="stable")][:10]
    stalled = set(stalls.tolist())
    rows = [
        (
            f"{curves.step[row]:,}",
            duration(curves.step_seconds[row]),
            "first or compiling" if curves.warm_up[row] else "stall" if row in stalled else "",
        )
        for row in np.union1d(evenly_spaced(len(curves.step)), longest).tolist()
    ]
    caption = _caption(curves)
    if len(longest):
        caption += f", with {'the longest' if len(stalls) > len(longest) else 'all'} stalls"
    return Table(("Step", "Step time", ""), rows, caption=caption)


def curve_table(curves: Curves, label: str, values: Floats, unit: Unit = "number") -> Table:
    """A curve at equal distances."""
    rows = [
        (f"{curves.step[row]:,}", cell(values[row], unit))
        for row in evenly_spaced(len(curves.step))
    ]
    return Table(("Step", label), rows, caption=_caption(curves))


def _caption(curves: Curves) -> str:
    length = len(curves.step)
    if length > TABLE_ROWS:
        return f"{TABLE_ROWS} of {length:,} logged steps"
    return f"All {formatting.plural(length, 'logged step')}"


def cell(value: float | None, unit: Unit = "number") -> str:
    """A value in a table; empty for None."""
    if value is None:
        return ""
    return (
        percent(value)
        if unit == "fraction"
        else duration(value)
        if unit == "seconds"
        else number(value, 5)
    )


def estimate_table(event: Mapping[str, Any], curves: Curves, device: str) -> Table | None:
    """Estimated and actual memory and step time, from the last event `estimate` (None for {}: there
    is none).

    The verdict says whether the estimated range holds the actual value, or by how much it is
    missed.
    """
    if not event:
        return None
    missing = event.get("missing") or {}
    try:
        rows = [
            _memory_row(event.get("memory_gib"), curves, device, missing.get("memory")),
            _step_time_row(
                event.get("step_seconds"), curves.median_seconds, missing.get("step_seconds")
            ),
        ]
    except ODD_VALUE:
        rows = [
            (
                "Memory and step time",
                "unknown: the event estimate has a value that no run writes",
                "",
                "",
            )
        ]
    return Table(
        ("Figure", "Estimated", "Actual", ""),
        [row for row in rows if row is not None],
        numbers_from=4,
    )


def _memory_row(
    estimated: Mapping[str, Any] | None, curves: Curves, device: str, missing: str | None
) -> tuple[str, ...] | None:
    """The estimate is of all memory of a GPU; logged is what its allocator gave, or the whole
    process on a CPU."""
    label = f"Memory per {device}, most"
    known = curves.memory_gib[np.isfinite(curves.memory_gib)]
    most = float(known.max()) if len(known) else None
    actual = (
        "-" if most is None else f"{_gib(most)} {'allocated' if device == 'GPU' else 'resident'}"
    )
    if estimated is None:
        return None if missing is None else (label, f"not estimated: {missing}", actual, "")
    text = _range(estimated, _gib)
    if estimated.get("available") is not None:
        text += f" of {_gib(float(estimated['available']))}"
    if most is None:
        return label, text, actual, ""
    if device != "GPU":
        return label, text, actual, "not comparable: the process and its libraries are counted too"
    verdict = _verdict(most, float(estimated["low"]), float(estimated["high"]))
    if most < float(estimated["low"]):
        verdict += "; the estimate also holds CUDA context, NCCL buffers and fragmentation"
    return label, text, actual, verdict


def _step_time_row(
    estimated: Mapping[str, Any] | None, seconds: float, missing: str | None
) -> tuple[str, ...] | None:
    known = math.isfinite(seconds)
    label, actual = "Step time, median", duration(seconds) if known else "-"
    if estimated is None:
        return None if missing is None else (label, f"not estimated: {missing}", actual, "")
    low, high = float(estimated["low"]), float(estimated["high"])
    if estimated.get("is_bound"):
        # No measured run is like this one: only the lower end is known.
        verdict = (
            ""
            if not known
            else "above the bound"
            if seconds >= low
            else _verdict(seconds, low, low)
        )
        return label, f"at least {duration(low)}", actual, verdict
    return label, _range(estimated, duration), actual, _verdict(seconds, low, high) if known else ""


def _gib(amount: float) -> str:
    return f"{number(amount)} GiB"


def _range(estimated: Mapping[str, Any], write: Callable[[float], str]) -> str:
    return formatting.extent([float(estimated["low"]), float(estimated["high"])], write)


def _verdict(actual: float, low: float, high: float) -> str:
    """Within the range, or how far from its nearest end."""
    if low <= actual <= high:
        return "as estimated"
    end = low if actual < low else high
    return f"{percent(abs(actual / end - 1))} {'more' if actual > end else 'less'} than estimated"
