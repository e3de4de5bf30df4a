"""Thinned curves keep their ends, their peaks and their dips."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drillyard.reporting.tables import centred_mean, downsample, evenly_spaced

FLOATS = st.floats(-1e6, 1e6) | st.just(float("nan"))


@given(st.lists(FLOATS, min_size=1, max_size=400), st.integers(5, 60))
def test_a_thinned_curve_has_the_same_ends_and_the_same_range(values, most):
    curve = np.array(values)
    rows = downsample(curve, most)
    finite = np.flatnonzero(np.isfinite(curve))
    assert len(rows) <= most
    assert (np.diff(rows) > 0).all()
    if len(finite) * 2 > len(curve):
        assert rows[0] == 0 and rows[-1] == len(curve) - 1
    elif len(finite):
        assert rows[0] == finite[0] and rows[-1] == finite[-1]
    if len(finite):
        assert np.nanmax(curve[rows]) == np.nanmax(curve)
        assert np.nanmin(curve[rows]) == np.nanmin(curve)


@settings(max_examples=40)
@given(st.lists(st.floats(-1e6, 1e6), min_size=50, max_size=400), st.integers(8, 40))
def test_every_bucket_keeps_its_peak_and_its_dip(values, most):
    curve = np.array(values)
    rows = set(downsample(curve, most).tolist())
    edges = np.linspace(0, len(curve), (most - 2) // 2 + 1).astype(int)
    if len(curve) > most:
        for start, end in itertools.pairwise(edges):
            kept = [curve[row] for row in range(start, end) if row in rows]
            assert max(kept) == curve[start:end].max() and min(kept) == curve[start:end].min()


def test_a_thinned_curve_keeps_its_gaps():
    curve = np.sin(np.arange(10_000.0))
    curve[[0, 5_000, 5_001, 9_000]] = np.nan
    rows = downsample(curve, 600)
    missing = rows[np.isnan(curve[rows])].tolist()
    assert {0, 5_000, 9_000} <= set(missing) <= {0, 5_000, 5_001, 9_000}


def test_a_short_curve_is_kept_whole():
    assert downsample(np.arange(2000.0)).tolist() == list(range(2000))


def test_rows_of_a_table_are_at_equal_distances_and_have_both_ends():
    assert evenly_spaced(5, 21).tolist() == [0, 1, 2, 3, 4]
    rows = evenly_spaced(1001, 21)
    assert rows.tolist() == list(range(0, 1001, 50))


@given(st.lists(FLOATS, min_size=1, max_size=80), st.integers(0, 10).map(lambda half: 2 * half + 1))
def test_the_mean_is_that_of_the_finite_neighbours(values, window):
    means = centred_mean(np.array(values), window)
    for place, mean in enumerate(means.tolist()):
        share = [v for v in values[max(0, place - window // 2) : place + window // 2 + 1] if v == v]
        if share:
            assert mean == pytest.approx(sum(share) / len(share), abs=1e-4)
        else:
            assert mean != mean
