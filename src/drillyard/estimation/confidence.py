"""Variation of a simulated figure from run to run, and the confidence interval of its mean.

Two ranges must be kept apart: percentiles say where single runs lie, the 95 % confidence interval
where the mean lies. Failures cost rarely and much: of most runs nothing, of a few a wait of hours.
Student's interval around such a mean covers half of what it promises and passes 0 and 100 %. So two
things are done here:

- What is known exactly is not sampled. Runs without a failure have one outcome and a known
  probability (`known_value`, `known_share`); only the others are values of a sample (stratified
  sampling: W. G. Cochran, Sampling Techniques, 5).
- The mean distance of the sample from that outcome gets the gamma interval of M. P. Fay and E. J.
  Feuer, Statistics in Medicine 16 (1997) 791-801: the mean as a gamma variable of the same
  variance, at the upper end with one more event, as large as the largest. For a count of equal
  events it is the exact interval of a Poisson mean (Garwood 1936), for many events the normal one;
  it stays on its side of the known outcome.

Gamma quantiles are those of E. B. Wilson and M. M. Hilferty, PNAS 17 (1931) 684-688: the lower one
is below the exact one, the upper one off by less than 3 % from half an event on. Student's quantile
widens the variance of small samples; it is Hill's expansion (Abramowitz and Stegun 26.7.5, four
terms), off by less than 0.1 % from 4 degrees of freedom on, so at least five values are needed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

CONFIDENCE: Final = 0.95
LEAST_VALUES: Final = 5


@dataclass(frozen=True, slots=True)
class SampleStatistics:
    """`mean` with its 95 % confidence interval `low` to `high`; the percentiles are those of one
    run."""

    mean: float
    low: float
    high: float
    percentile_5: float
    percentile_95: float


def sample_statistics(
    values: Sequence[float],
    *,
    known_share: float = 0.0,
    known_value: float | None = None,
    unseen: float = 0.0,
) -> SampleStatistics:
    """The spread of a figure that is `known_value` with probability `known_share`, else drawn like
    `values`.

    At least five values, all on one side of the known one; none are needed where the known value is
    certain. `unseen`: how far a rare value that the sample happens not to hold may lie from the
    mean.
    """
    if known_share == 1:
        assert known_value is not None
        return SampleStatistics(*[known_value] * 5)
    drawn_share = 1 - known_share
    low, high = mean_interval(values, known_value, unseen)
    known = 0.0 if known_value is None else known_share * known_value
    return SampleStatistics(
        known + drawn_share * statistics.fmean(values),
        known + drawn_share * low,
        known + drawn_share * high,
        _percentile(values, 0.05, known_share, known_value),
        _percentile(values, 0.95, known_share, known_value),
    )


def mean_interval(
    values: Sequence[float], bound: float | None = None, unseen: float = 0.0
) -> tuple[float, float]:
    """The 95 % confidence interval of the mean of at least five values, all on one side of `bound`.

    Without a bound it is the end of the values that their longer tail points away from. `unseen` as
    in `spread`.
    """
    assert len(values) >= LEAST_VALUES
    mean, lowest, highest = statistics.fmean(values), min(values), max(values)
    if bound is None:
        bound = lowest if math.fsum((value - mean) ** 3 for value in values) >= 0 else highest
    assert bound <= lowest or bound >= highest
    sign, farthest = (1, highest) if bound <= lowest else (-1, lowest)
    distance = sign * (mean - bound)
    tail = (1 + CONFIDENCE) / 2
    widened = student_quantile(tail, len(values) - 1) / statistics.NormalDist().inv_cdf(tail)
    variance = statistics.variance(values, mean) / len(values) * widened**2
    one_more = max(sign * (farthest - mean), unseen) / len(values)
    ends = (
        bound + sign * gamma_quantile(1 - tail, distance, variance),
        bound + sign * gamma_quantile(tail, distance + one_more, variance + one_more**2),
    )
    return min(ends), max(ends)


def gamma_quantile(probability: float, mean: float, variance: float) -> float:
    """The quantile of a gamma distribution with this mean and variance, by Wilson and Hilferty's
    cube."""
    if mean <= 0 or variance <= 0:
        return max(mean, 0.0)
    ninth = variance / mean**2 / 9
    root = 1 - ninth + statistics.NormalDist().inv_cdf(probability) * math.sqrt(ninth)
    return float(mean * max(root, 0.0) ** 3)


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


def _percentile(
    values: Sequence[float], share: float, known_share: float, known_value: float | None
) -> float:
    """The value with `share` of all runs below it, between neighbours in proportion."""
    ordered = sorted(values)
    if known_value is not None:
        drawn_share = 1 - known_share
        known_first = known_value <= ordered[0]
        share = (share - known_share) / drawn_share if known_first else share / drawn_share
        if share < 0 or share > 1:
            return known_value
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
