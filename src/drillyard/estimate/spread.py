"""How much a simulated figure varies, and how well its mean is known: Student's interval, without scipy.

The quantile of Student's distribution is Hill's expansion around the normal one (Abramowitz and Stegun 26.7.5, four
terms): off by less than 0.1 % from 4 degrees of freedom on, so at least five values are needed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

CONFIDENCE: Final = 0.95


@dataclass(frozen=True, slots=True)
class Spread:
    """`mean` with its 95 % confidence interval `low` to `high`; `deviation` and percentiles are those of one run."""

    mean: float
    deviation: float
    low: float
    high: float
    percentile_5: float
    percentile_95: float
    count: int


def spread(values: Sequence[float]) -> Spread:
    """The spread of at least five values."""
    assert len(values) >= 5
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    half = student_quantile((1 + CONFIDENCE) / 2, len(values) - 1) * deviation / math.sqrt(len(values))
    ordered = sorted(values)
    return Spread(mean, deviation, mean - half, mean + half, _at(ordered, 0.05), _at(ordered, 0.95), len(values))


def student_quantile(probability: float, degrees: int) -> float:
    """The quantile of Student's distribution with at least 4 degrees of freedom."""
    z = statistics.NormalDist().inv_cdf(probability)
    return (
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * degrees**4)
    )


def _at(ordered: Sequence[float], share: float) -> float:
    """The value at `share` of the way through sorted values, between neighbours in proportion."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
