"""How well a mean is known."""

from __future__ import annotations

import random

import pytest

from drillyard.estimate.spread import spread, student_quantile


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(4, 2.776), (5, 2.571), (9, 2.262), (19, 2.093), (29, 2.045), (100, 1.984)]
)
def test_student_s_quantiles_are_those_of_the_tables(degrees, quantile):
    assert student_quantile(0.975, degrees) == pytest.approx(quantile, rel=1e-3)


def test_a_spread_of_five_values():
    got = spread([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (got.mean, got.count) == (3.0, 5)
    assert got.deviation == pytest.approx(1.5811, rel=1e-4)
    assert (got.low, got.high) == pytest.approx((3 - 1.963, 3 + 1.963), rel=1e-3)
    assert (got.percentile_5, got.percentile_95) == pytest.approx((1.2, 4.8))


def test_the_interval_holds_the_true_mean_in_19_of_20_samples():
    draws = random.Random(1)
    spreads = [spread([draws.gauss(7, 2) for _ in range(8)]) for _ in range(2000)]
    assert sum(one.low <= 7 <= one.high for one in spreads) / 2000 == pytest.approx(0.95, abs=0.015)
