"""Estimate against actual: what a run said of itself before its first step (the event `estimate`), and what came.

A range that holds what came is a right one; otherwise the table says by how much it is missed. What a run could not
predict is there with its reason. Sources: estimation/startup_estimate.py writes the event, the logged steps are the
actual.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from drillyard import formatting
from drillyard.reporting.content import Curves, Table
from drillyard.telemetry.events import ODD_VALUE

HEADERS = ("Figure", "Estimated", "Actual", "")
Ends = Mapping[str, Any] | None
Row = tuple[str, ...]


def estimate_table(event: Mapping[str, Any], curves: Curves, device: str) -> Table | None:
    """The table, from the last event `estimate` ({} where there is none: then None)."""
    if not event:
        return None
    seconds = curves.median_seconds if np.isfinite(curves.median_seconds) else None
    try:
        missing = event.get("missing") or {}
        rows = [
            _memory(event.get("memory_gib"), curves, device, missing.get("memory")),
            _step_time(event.get("step_seconds"), seconds, missing.get("step_seconds")),
        ]
    except ODD_VALUE:
        rows = [("Memory and step time", "unknown: the event estimate has a value that no run writes", "", "")]
    return Table(HEADERS, [row for row in rows if row is not None], numbers_from=len(HEADERS))


def _memory(estimated: Ends, curves: Curves, device: str, missing: str | None) -> Row | None:
    """The estimate is of all that a GPU holds; logged is what its allocator gave, or the whole process on a CPU."""
    label = f"Memory per {device}, most"
    known = curves.memory_gib[np.isfinite(curves.memory_gib)]
    most = float(known.max()) if len(known) else None
    kind = "allocated" if device == "GPU" else "resident"
    came = "-" if most is None else f"{_gib(most)} {kind}"
    if estimated is None:
        return None if missing is None else (label, f"not predicted: {missing}", came, "")
    text = _range(estimated, _gib)
    if estimated.get("available") is not None:
        text += f" of {_gib(float(estimated['available']))}"
    if most is None:
        return label, text, came, ""
    if device != "GPU":
        return label, text, came, "not comparable: the process and its libraries are counted too"
    verdict = _verdict(most, float(estimated["low"]), float(estimated["high"]))
    if most < float(estimated["low"]):
        verdict += "; the estimate also holds CUDA context, NCCL buffers and fragmentation"
    return label, text, came, verdict


def _step_time(estimated: Ends, actual: float | None, missing: str | None) -> Row | None:
    label, came = "Step time, median", "-" if actual is None else formatting.duration(actual)
    if estimated is None:
        return None if missing is None else (label, f"not predicted: {missing}", came, "")
    low, high = float(estimated["low"]), float(estimated["high"])
    if estimated.get("is_bound"):
        # Nothing measured is like this run: only the better end is known.
        verdict = "" if actual is None else "above the bound" if actual >= low else _verdict(actual, low, low)
        return label, f"at least {formatting.duration(low)}", came, verdict
    return label, _range(estimated, formatting.duration), came, "" if actual is None else _verdict(actual, low, high)


def _gib(amount: float) -> str:
    return f"{formatting.number(amount)} GiB"


def _range(estimated: Mapping[str, Any], write: Callable[[float], str]) -> str:
    low, high = (write(float(estimated[end])) for end in ("low", "high"))
    return low if low == high else f"{low} to {high}"


def _verdict(actual: float, low: float, high: float) -> str:
    """Within the range, or how far from its nearest end."""
    if low <= actual <= high:
        return "as estimated"
    end = low if actual < low else high
    return f"{formatting.percent(abs(actual / end - 1))} {'more' if actual > end else 'less'} than estimated"
