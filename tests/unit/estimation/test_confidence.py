"""How well a mean is known."""

from __future__ import annotations

import random

import pytest

from drillyard.estimation.confidence import (
    gamma_quantile,
    mean_interval,
    sample_statistics,
    student_quantile,
)


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(4, 2.776), (5, 2.571), (9, 2.262), (19, 2.093), (29, 2.045), (100, 1.984)],
)
def test_student_s_quantiles_are_those_of_the_tables(degrees, quantile):
    assert student_quantile(0.975, degrees) == pytest.approx(quantile, rel=1e-3)


def test_a_spread_of_five_values():
    got = sample_statistics([1.0, 2.0, 3.0, 4.0, 5.0])
    assert got.mean == 3.0
    assert 1 <= got.low < 3 < got.high
    assert (got.percentile_5, got.percentile_95) == pytest.approx((1.2, 4.8))


@pytest.mark.parametrize(
    ("count", "low", "high"), [(1, 0.0253, 5.57), (4, 1.090, 10.24), (30, 20.24, 42.83)]
)
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


@pytest.mark.parametrize(
    ("probability", "degrees", "quantile"),
    [(0.975, 4, 2.775582224236797), (0.975, 9, 2.262143575445635), (0.95, 30, 1.6972608782979899)],
)
def test_student_s_quantiles_have_all_four_terms_of_hill_s_expansion(
    probability, degrees, quantile
):
    assert student_quantile(probability, degrees) == pytest.approx(quantile, rel=1e-12)


@pytest.mark.parametrize(
    ("probability", "mean", "variance", "quantile"),
    [
        (0.975, 2, 3, 6.51596192335596),
        (0.025, 2, 3, 0.08639384746550496),
        (0.5, 1, 1, 0.7023319615912207),
        (0.025, 2, 40, 0),
        (0.5, 0, 3, 0),
        (0.5, -1, 3, 0),
        (0.5, 3, 0, 3),
        (0.9, 3, 0, 3),
    ],
)
def test_gamma_quantiles_by_wilson_and_hilferty(probability, mean, variance, quantile):
    assert gamma_quantile(probability, mean, variance) == pytest.approx(quantile, rel=1e-12)


SKEWED = [1.0, 2.0, 2.0, 3.0, 7.0]


@pytest.mark.parametrize(
    ("values", "bound", "unseen", "ends"),
    [
        (SKEWED, None, 0, (1.1865930100986963, 7.9395940776222425)),
        ([-value for value in SKEWED], None, 0, (-7.9395940776222425, -1.1865930100986963)),
        (SKEWED, 0.0, 0, (0.8212726733354438, 7.749753934666498)),
        (SKEWED, 8.0, 0, (-0.8067126686643178, 5.477017940821158)),
        (SKEWED, 0.0, 20, (0.8212726733354438, 17.48993011024765)),
        (SKEWED, 0.0, 4, (0.8212726733354438, 7.749753934666498)),
    ],
)
def test_the_interval_of_a_mean_on_either_side_of_what_is_known(values, bound, unseen, ends):
    assert mean_interval(values, bound, unseen) == pytest.approx(ends, rel=1e-9)


@pytest.mark.parametrize(
    ("share", "known", "mean", "percentiles"),
    [
        (0.25, 0.0, 2.25, (0, 5.933333333333)),
        (0.25, 1.0, 2.5, (1, 5.933333333333)),
        (0.25, 8.0, 4.25, (1.266666666667, 8)),
        (0.02, 0.0, 2.94, (1.122448979592, 6.183673469388)),
        (0.02, 8.0, 3.1, (1.204081632653, 6.510204081633)),
    ],
)
def test_percentiles_of_a_mixture_of_what_is_known_and_what_was_drawn(
    share, known, mean, percentiles
):
    got = sample_statistics(SKEWED, known_share=share, known_value=known)
    assert got.mean == pytest.approx(mean)
    assert (got.percentile_5, got.percentile_95) == pytest.approx(percentiles)


def test_what_is_certain_needs_no_values():
    got = sample_statistics([], known_share=1, known_value=0.5)
    assert {got.mean, got.low, got.high, got.percentile_5, got.percentile_95} == {0.5}
