"""How well a mean is known."""

from __future__ import annotations

import random

import pytest

from drillyard.estimation.confidence import sample_statistics, student_quantile


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(4, 2.776), (5, 2.571), (9, 2.262), (19, 2.093), (29, 2.045), (100, 1.984)]
)
def test_student_s_quantiles_are_those_of_the_tables(degrees, quantile):
    assert student_quantile(0.975, degrees) == pytest.approx(quantile, rel=1e-3)


def test_a_spread_of_five_values():
    got = sample_statistics([1.0, 2.0, 3.0, 4.0, 5.0])
    assert got.mean == 3.0
    assert 1 <= got.low < 3 < got.high
    assert (got.percentile_5, got.percentile_95) == pytest.approx((1.2, 4.8))


@pytest.mark.parametrize(("count", "low", "high"), [(1, 0.0253, 5.57), (4, 1.090, 10.24), (30, 20.24, 42.83)])
def test_of_equal_rare_events_it_is_the_exact_poisson_interval(count, low, high):
    """Garwood's tables. The lower quantile is an approximation from below."""
    number = 100_000
    got = sample_statistics([0.0] * (number - count) + [1.0] * count)
    assert got.high * number == pytest.approx(high, rel=0.01)
    assert low * 0.9 - 0.03 <= got.low * number <= low * 1.01


def test_a_value_of_known_probability_is_not_sampled():
    got = sample_statistics([2.0, 3.0, 3.0, 4.0, 8.0], known_share=0.75, known_value=0.0)
    assert (got.mean, got.percentile_5) == (1.0, 0.0)
    assert 0 < got.low < 1.0 < got.high
    assert got.percentile_95 == pytest.approx(4.8)
    certain = sample_statistics([], known_share=1.0, known_value=7.0)
    assert (certain.low, certain.mean, certain.high) == (7.0, 7.0, 7.0)


def test_what_was_not_seen_widens_the_far_end_only():
    drawn = [1.0] * 50 + [1.1] * 50
    without, some = (
        sample_statistics(drawn, known_share=0.0, known_value=0.0),
        sample_statistics(drawn, known_value=0.0, unseen=40.0),
    )
    assert some.low == without.low
    assert some.high > without.high + 40.0 / 100


def test_the_interval_holds_the_true_mean_in_19_of_20_samples():
    draws = random.Random(1)
    spreads = [sample_statistics([draws.gauss(7, 2) for _ in range(8)]) for _ in range(2000)]
    assert sum(one.low <= 7 <= one.high for one in spreads) / 2000 == pytest.approx(0.95, abs=0.015)
