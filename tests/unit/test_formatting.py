"""Numbers as people read them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drillyard import formatting


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0007, "0.700 ms"),
        (0.0379, "37.9 ms"),
        (14.54, "14.54 s"),
        (125, "2:05 min"),
        (11565, "3:12:45 h"),
        (357_120, "4 d 03:12 h"),
        (math.nan, "-"),
    ],
)
def test_durations(seconds, text):
    assert formatting.duration(seconds) == text


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0.00123, "$0.00123"),
        (0.992, "$0.992"),
        (12.3, "$12.30"),
        (1234.5, "$1,234.50"),
        (2.5e6, "$2.50 million"),
    ],
)
def test_dollars(amount, text):
    assert formatting.dollars(amount) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.424, "42.4%"), (0.0035, "0.35%"), (0, "0%"), (4e-5, "<0.01%"), (1, "100.0%")],
)
def test_shares(share, text):
    assert formatting.percent(share) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(812, "812 bytes"), (1142849, "1.09 MiB"), (140 * 2**30, "140 GiB")]
)
def test_sizes(num_bytes, text):
    assert formatting.size(num_bytes) == text


@given(st.floats(-1e300, 1e300), st.integers(3, 6))
def test_a_number_is_written_to_its_digits(value, digits):
    written = float(formatting.number(value, digits).replace(",", ""))
    assert written == pytest.approx(value, rel=10 ** (1 - digits), abs=1e-300)


def test_what_is_not_finite_is_a_word():
    assert [formatting.number(value) for value in (math.nan, math.inf, -math.inf)] == [
        "nan",
        "inf",
        "-inf",
    ]


def test_one_is_not_many():
    assert formatting.plural(1, "failure") == "1 failure"
    assert formatting.plural(1200, "failure") == "1,200 failures"
