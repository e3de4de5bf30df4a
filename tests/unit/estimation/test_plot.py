"""The scatter of cost against time, in characters and as SVG."""

from __future__ import annotations

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from drillyard.estimation.plot import HEIGHT, WIDTH, Dot, Plot, scale_of, svg_plot, terminal_plot

SVG = "{http://www.w3.org/2000/svg}"
positive = st.floats(1e-6, 1e12)
dots = st.lists(st.builds(Dot, positive, positive, st.text(), st.booleans()), min_size=1, max_size=30)


def plot(*found: Dot) -> Plot:
    return Plot("a & b", "hours for <1> tokens", "$", found)


def test_the_cheapest_is_at_the_bottom_and_the_fastest_at_the_left() -> None:
    lines = terminal_plot(plot(Dot(1, 100, "", True), Dot(10, 10, "", True), Dot(10, 100, "", False))).splitlines()
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
def test_the_svg_is_well_formed_and_has_every_point_with_its_label_inside_the_sheet(found: list[Dot]) -> None:
    printable = [Dot(dot.x, dot.y, dot.label if dot.label.isprintable() else "label", dot.on_front) for dot in found]
    root = ElementTree.fromstring(svg_plot(plot(*printable)))
    circles = root.findall(f"{SVG}circle")
    assert sorted(circle[0].text or "" for circle in circles) == sorted(dot.label for dot in printable)
    assert all(0 < float(circle.get("cx", 0)) < WIDTH and 0 < float(circle.get("cy", 0)) < HEIGHT for circle in circles)
    line = root.find(f"{SVG}polyline")
    assert line is not None and len((line.get("points") or "").split()) == sum(dot.on_front for dot in printable)


@given(st.lists(positive, min_size=1))
def test_a_scale_holds_its_values_with_room(values: list[float]) -> None:
    scale = scale_of(values)
    assert all(0 < scale.place(value) < 1 for value in values)
    ticks = scale.ticks()
    assert len(ticks) >= 2 and all(scale.low <= tick <= scale.high for tick in ticks)
    assert len(ticks) <= 25
