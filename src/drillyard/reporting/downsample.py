"""Which points of a long curve to draw, so that a report of a million steps is a small file that looks the same.

The idea: a chart is a few hundred columns of pixels wide. The points are divided into buckets of equally many, and of
each bucket the lowest and the highest are kept: every peak and every dip stays, at its own step and with its own value.
A mean would hide the spikes that one looks for. Cost: O(N), some ten milliseconds for a million points.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MOST_POINTS = 3_000
"""Points of a drawn curve: more than the widest screen has columns, about 100 KB of JSON."""


def downsample(values: NDArray[np.float64], most: int = MOST_POINTS) -> NDArray[np.intp]:
    """Indices of at most `most` (>= 4) points to draw, rising: all, or the lowest and highest of each bucket.

    The first and the last are always among them. NaN is never lowest nor highest.
    """
    length = len(values)
    if length <= most:
        return np.arange(length)
    edges = np.linspace(0, length, (most - 2) // 2 + 1).astype(np.intp)
    starts = edges[:-1]
    lowest = np.where(np.isnan(values), np.inf, values)
    highest = np.where(np.isnan(values), -np.inf, values)
    kept = {0, length - 1}
    for start, end in zip(starts, edges[1:], strict=True):
        kept.add(int(start + np.argmin(lowest[start:end])))
        kept.add(int(start + np.argmax(highest[start:end])))
    return np.array(sorted(kept))


def evenly_spaced(length: int, most: int) -> NDArray[np.intp]:
    """Indices of at most `most` (>= 2) rows at equal distances, the first and the last among them: for tables."""
    if length <= most:
        return np.arange(length)
    return np.unique(np.linspace(0, length - 1, most).round().astype(np.intp))


def centred_mean(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """The mean of the finite values among `window` (odd) neighbours of each; fewer at both ends; NaN where none is."""
    finite = np.isfinite(values)
    sums = np.concatenate(([0.0], np.cumsum(np.where(finite, values, 0.0))))
    counts = np.concatenate(([0], np.cumsum(finite)))
    places = np.arange(len(values))
    start = np.maximum(places - window // 2, 0)
    end = np.minimum(places + window // 2 + 1, len(values))
    number = counts[end] - counts[start]
    with np.errstate(invalid="ignore"):
        return np.where(number > 0, (sums[end] - sums[start]) / np.maximum(number, 1), np.nan)
