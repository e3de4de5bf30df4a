"""The scatter of cost against time, in characters and as SVG."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drillyard.estimation.plot import (
    HEIGHT,
    MANY_DOTS,
    WIDTH,
    Dot,
    Plot,
    _Scale,
    scale_of,
    svg_plot,
    terminal_plot,
)

SVG = "{http://www.w3.org/2000/svg}"
positive = st.floats(1e-6, 1e12)
dots = st.lists(
    st.builds(Dot, positive, positive, st.text(), st.booleans()), min_size=1, max_size=30
)


def plot(*found: Dot) -> Plot:
    return Plot("a & b", "hours for <1> tokens", "$", found)


def test_the_cheapest_is_at_the_bottom_and_the_fastest_at_the_left() -> None:
    lines = terminal_plot(
        plot(Dot(1, 100, "", True), Dot(10, 10, "", True), Dot(10, 100, "", False))
    ).splitlines()
    rows = [line.partition("|")[2] for line in lines if "|" in line]
    (top,) = [row for row in rows if "." in row]
    assert top.index("o") < top.index(".")
    (bottom,) = [row for row in rows if "o" in row and "." not in row]
    assert rows.index(bottom) > rows.index(top)
    assert bottom.index("o") == top.index(".")
    assert "hours for <1> tokens" in lines[-1]


def test_a_point_of_the_front_is_never_hidden() -> None:
    assert "o" in terminal_plot(plot(Dot(1, 1, "", True), Dot(1, 1, "", False))).partition("\n")[2]


@given(dots)
def test_any_points_make_a_plot_of_one_size(found: list[Dot]) -> None:
    lines = terminal_plot(plot(*found), columns=40, rows=8).splitlines()
    assert sum("|" in line for line in lines) == 8
    assert max(len(line.partition("|")[2]) for line in lines) <= 40


@given(dots)
def test_the_svg_is_well_formed_and_has_every_point_with_its_label_inside_the_sheet(
    found: list[Dot],
) -> None:
    printable = [
        Dot(dot.x, dot.y, dot.label if dot.label.isprintable() else "label", dot.on_front)
        for dot in found
    ]
    root = ElementTree.fromstring(svg_plot(plot(*printable)))
    circles = root.findall(f"{SVG}circle")
    assert sorted(circle[0].text or "" for circle in circles) == sorted(
        dot.label for dot in printable
    )
    assert all(
        0 < float(circle.get("cx", 0)) < WIDTH and 0 < float(circle.get("cy", 0)) < HEIGHT
        for circle in circles
    )
    line = root.find(f"{SVG}polyline")
    assert line is not None and len((line.get("points") or "").split()) == sum(
        dot.on_front for dot in printable
    )


@given(st.lists(positive, min_size=1))
def test_a_scale_holds_its_values_with_room(values: list[float]) -> None:
    scale = scale_of(values)
    assert all(0 < scale.place(value) < 1 for value in values)
    ticks = scale.ticks()
    assert len(ticks) >= 2 and all(scale.low <= tick <= scale.high for tick in ticks)
    assert len(ticks) <= 25


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (1, 8, [1, 2, 5]),
        (1, 7.9, [2, 4, 6]),
        (10, 11, [10, 10.5, 11]),
        (10, 25, [10, 15, 20, 25]),
        (3, 1e3, [5, 10, 20, 50, 100, 200, 500, 1000]),
        (3, 1e4, [10, 100, 1000, 1e4]),
        (2, 3e5, [10, 100, 1000, 1e4, 1e5]),
    ],
)
def test_ticks_of_short_and_long_axes(low: float, high: float, ticks: list[float]) -> None:
    assert _Scale(low, high).ticks() == pytest.approx(ticks)


def test_an_axis_has_room_around_its_values() -> None:
    assert scale_of([20.0, 10.0]) == pytest.approx((10 / 1.08, 20 * 1.08))
    assert scale_of([1.0, 1e6]) == pytest.approx((1 / 1e6**0.06, 1e6 * 1e6**0.06))


def test_points_of_a_front_are_larger_and_many_points_smaller() -> None:
    few = plot(*[Dot(n, 1, "", n == 1) for n in range(1, MANY_DOTS + 1)])
    many = plot(*few.dots, Dot(MANY_DOTS + 1, 1, "", False))
    for drawn, radii in ((few, ["5.0", "3.5"]), (many, ["3.5", "2"])):
        circles = ElementTree.fromstring(svg_plot(drawn)).findall(f"{SVG}circle")
        # The front is drawn last, over the others.
        assert [circles[-1].get("r"), circles[0].get("r")] == radii


def test_where_points_are_drawn() -> None:
    """Two corners of the scale: 6 % of the ratio is left around them on each side."""
    lines = terminal_plot(
        plot(Dot(1, 100, "", True), Dot(1e6, 1, "", False)), columns=41, rows=11
    ).splitlines()
    found = [(row, line.partition("|")[2]) for row, line in enumerate(lines) if "|" in line]
    places = {
        mark: (row, cells.index(mark)) for row, cells in found for mark in "o." if mark in cells
    }
    assert places == {"o": (2, 2), ".": (10, 38)}
    assert len(found) == 11
