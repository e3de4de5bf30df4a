"""How numbers, ranges and bounds read."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drillyard.estimation.estimate_text import _expected_count as expected_count
from drillyard.estimation.estimate_text import _gpu_hours as gpu_hours
from drillyard.estimation.quantity import Range, number_range, quantity, time_range
from drillyard.formatting import (
    every_steps,
    extent,
    number_list,
    rounded_count,
    rounded_dollars,
    rounded_duration,
    rounded_percent,
    three_digits,
)
from drillyard.hardware import FactSource


def between(low: float, high: float, *, is_bound: bool = False, unverified: bool = False) -> Range:
    source = FactSource("somebody", None, unverified)
    return Range(
        quantity("x", low, "s", "", source), quantity("x", high, "s", "", source), is_bound
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (three_digits(0), "0"),
        (three_digits(12.345), "12.3"),
        (three_digits(1234.5), "1,234"),
        (three_digits(0.0123), "0.0123"),
        (three_digits(1.5e-5), "1.50e-05"),
        (rounded_dollars(0.5198), "$0.52"),
        (rounded_dollars(0.0123), "$0.012"),
        (rounded_dollars(12345.6), "$12,346"),
        (rounded_dollars(3.817e9), "$3.82 B"),
        (gpu_hours(360_064_475), "360 M"),
        (gpu_hours(7226), "7,226"),
        (rounded_percent(0.4243), "42.4%"),
        (rounded_percent(0.9987), "99.87%"),
        (rounded_percent(0.00012), "0.012%"),
        (rounded_percent(0.99996), ">99.99%"),
        (rounded_percent(1), "100.0%"),
        (rounded_count(70_553_706_496), "70.6 B"),
        (rounded_count(999), "999"),
        (rounded_count(1.5e13), "15 T"),
        (rounded_duration(0.0467), "46.7 ms"),
        (rounded_duration(45), "45 s"),
        (rounded_duration(90), "1.5 min"),
        (rounded_duration(7200), "2 h"),
        (rounded_duration(86_400 * 3), "3 days"),
    ],
)
def test_numbers_have_three_digits_and_a_fitting_unit(text: str, expected: str) -> None:
    assert text == expected


def test_both_ends_of_a_range_share_a_unit() -> None:
    assert time_range(between(50, 70)) == "0.833 to 1.17 min"
    assert time_range(between(12.301, 12.302)) == "12.3 s"
    assert number_range(between(1e9, 2e9), " GB/s", "at most", 1e9) == "1 to 2 GB/s"
    assert extent([3, 1, 2], three_digits) == "1 to 3"


def test_a_bound_is_called_one_and_a_doubt_is_marked() -> None:
    assert time_range(between(12.3, 12.3, is_bound=True)) == "at least 12.3 s"
    assert (
        number_range(between(5, 5, is_bound=True), " tokens/s", "at most") == "at most 5 tokens/s"
    )
    assert time_range(between(1, 2, unverified=True)) == "1 to 2 s?"


@given(st.floats(1e-2, 1e15))
def test_a_count_keeps_its_size(value: float) -> None:
    number, _, letter = rounded_count(value).partition(" ")
    scale = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[letter]
    assert float(number.replace(",", "")) * scale == pytest.approx(value, rel=6e-3)


@given(st.floats(1e-3, 1e9))
def test_a_time_keeps_its_size(value: float) -> None:
    match = re.fullmatch(r"([0-9.,e+-]+) (ms|s|min|h|days)", rounded_duration(value))
    assert match is not None
    scale = {"ms": 1e-3, "s": 1, "min": 60, "h": 3600, "days": 86_400}[match[2]]
    assert float(match[1].replace(",", "")) * scale == pytest.approx(value, rel=6e-3)


def test_expected_events_that_hardly_ever_happen_have_no_digits() -> None:
    assert [expected_count(value) for value in (0, 1.2e-4, 0.001, 0.155)] == [
        "0",
        "<0.001",
        "0.001",
        "0.155",
    ]


def test_intervals_and_lists_of_numbers_read_as_people_write_them() -> None:
    assert (every_steps("1"), every_steps("2 to 5")) == ("every step", "every 2 to 5 steps")
    assert (number_list([5, 1, 3, 4, 3]), number_list([7]), number_list([])) == ("1, 3-5", "7", "")
