"""The picture of a chart that the page shows without its scripts."""

from __future__ import annotations

import re

import pytest

from drillyard.reporting.charts import Chart, Series
from drillyard.reporting.content import Table
from drillyard.reporting.still_chart import SIZE, STILL_POINTS, WIDE_SIZE, still_chart

WIDTH, HEIGHT = SIZE
LEFT, RIGHT, TOP, BOTTOM = 78.0, WIDTH - 22.0, 20.0, HEIGHT - 48.0


def chart(*series, **more):
    return Chart("loss", "Loss", "Loss", list(series), Table((), []), "", **more)


def numbers(path):
    return [tuple(map(float, pair)) for pair in re.findall(r"([\d.]+) ([\d.]+)", path)]


def test_a_curve_runs_from_corner_to_corner():
    still = still_chart(chart(Series("Loss", [1, 2, 3], [0.0, 1.0, 2.0], "--series-1")))
    ((_, path),) = still.curves
    assert numbers(path) == [(LEFT, BOTTOM), ((LEFT + RIGHT) / 2, (TOP + BOTTOM) / 2), (RIGHT, TOP)]
    assert (still.lowest, still.highest) == ("0", "2.0000")
    assert (still.first_step, still.last_step) == ("1", "3")


def test_equal_ratios_are_equal_heights_on_a_logarithmic_scale():
    series = Series("Step time", [1, 2, 3], [1.0, 10.0, 100.0], "--series-1")
    ((_, path),) = still_chart(chart(series, logarithmic=True)).curves
    assert numbers(path)[1][1] == (TOP + BOTTOM) / 2


@pytest.mark.parametrize(
    ("values", "shape"),
    [
        ([1.0, 2.0, None, 3.0, 4.0], "MLML"),
        ([1.0, None, 2.0, None, None], "MhMh"),
        ([None, 1.0, 2.0, 3.0, None], "MLL"),
    ],
)
def test_a_missing_value_breaks_the_line_and_a_point_alone_is_a_dot(values, shape):
    ((_, path),) = still_chart(chart(Series("Loss", list(range(5)), values, "--series-1"))).curves
    assert "".join(re.findall("[A-Za-z]", path)) == shape


def test_points_are_dots_levels_and_marks_lie_within():
    lines = Series("Loss", [0, 10], [1.0, 3.0], "--series-1")
    dots = Series("Stall", [5], [2.0], "--bad", "points")
    still = still_chart(chart(lines, dots, levels={"median": 2.0, "3 x": 9.0}, marks=[5, 99]))
    assert [path for _, path in still.dots] == [f"M{(LEFT + RIGHT) / 2:.1f} 103.5h.1"]
    assert still.levels == [103.5] and still.marks == [(LEFT + RIGHT) / 2]
    assert [series.label for series, _ in still.curves] == ["Loss"]


@pytest.mark.parametrize("values", [[1.7e308, -1.7e308], [5e-324, 1.0], [2.0, 2.0]])
def test_coordinates_of_any_values_are_finite(values):
    series = Series("Loss", [1, 2**62], values, "--series-1")
    for wide in (False, True):
        ((_, path),) = still_chart(chart(series), wide).curves
        width, height = WIDE_SIZE if wide else SIZE
        assert len(numbers(path)) == 2
        assert all(0 <= x <= width and 0 <= y <= height for x, y in numbers(path))


def test_a_long_curve_is_a_short_path():
    series = Series("Loss", list(range(3_000)), [float(n % 7) for n in range(3_000)], "--series-1")
    ((_, path),) = still_chart(chart(series)).curves
    assert len(numbers(path)) <= STILL_POINTS and len(path) < 8_000
