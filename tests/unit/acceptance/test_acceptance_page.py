"""The page of an acceptance: what it says, what it draws, and that it asks for nothing."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest
from tests.unit.acceptance.documents import (
    BAD,
    CURVE,
    NAMES,
    SIZES,
    bandwidth_of,
    document,
    points,
    result,
)

from drillyard.acceptance.acceptance_page import MOST_ROWS, render_acceptance
from drillyard.reporting.bandwidth_curve import HEIGHT, LEFT, WIDTH, bandwidth_curve
from drillyard.reporting.heat_map import MOST_NODES, heat_map


class Tags(HTMLParser):
    """Every tag with its attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def having(self, tag: str, attribute: str) -> list[dict[str, str | None]]:
        return [each for name, each in self.found if name == tag and attribute in each]


def test_the_page_has_no_script_and_no_address_and_is_the_same_each_time() -> None:
    page = render_acceptance(document(), "my-cluster")
    tags = Tags(page)
    assert "script" not in {name for name, _ in tags.found}
    assert not re.search(r"(?:src|href)=\"(?!data:,\")", page) and "://" not in page
    assert "&lt;script&gt;" in page
    assert page == render_acceptance(document(), "my-cluster")


def test_points_and_cells_have_the_documents_values() -> None:
    tags = Tags(render_acceptance(document(), "my-cluster"))
    drawn = [
        (float(p["data-bytes"]), float(p["data-value"]))
        for p in tags.having("circle", "data-value")
    ]  # type: ignore[arg-type]
    assert drawn == list(zip(SIZES, CURVE, strict=True)) * 2  # of the pass and of the recorded one
    cells = {
        (each["data-row"], each["data-column"]): float(each["data-value"] or "nan")
        for each in tags.having("rect", "data-value")
        if each["data-row"] != each["data-column"]
    }
    for i, j in ((BAD, 1), (2, 9), (9, 2), (0, 11)):
        assert cells[NAMES[i], NAMES[j]] == bandwidth_of(i, j)
    unknown = [each for each in tags.having("rect", "data-row") if each.get("class") == "unknown"]
    missing = sum(bandwidth_of(i, j) is None for i in range(12) for j in range(12) if i != j)
    assert len(unknown) == missing


def test_the_bad_node_and_what_to_do_come_first() -> None:
    page = render_acceptance(document(), "my-cluster")
    culprits, to_do, results = (
        page.index(f'id="{name}"') for name in ("culprits", "todo", "results")
    )
    assert culprits < page.index("take it out") < to_do < results
    healthy = document(culprits=[], results=[result()], verdict="pass")
    page = render_acceptance(healthy, "my-cluster")
    assert 'id="culprits"' not in page and 'id="todo"' not in page and 'status good">pass' in page


def test_every_result_has_its_status_early_and_its_reason() -> None:
    page = render_acceptance(document(), "my-cluster")
    table = page[page.index('id="results"') :]
    headers = re.findall(r"<th scope=\"col\">([^<]+)", table[: table.index("</thead>")])
    assert headers[:2] == ["Test", "Status"] and "Reason" in headers
    skipped = result("skipped", reason="does not apply here", threshold=None)
    page = render_acceptance(document(results=[skipped]), "my-cluster")
    assert "does not apply here" in page[page.index('id="results"') :]


def test_the_source_of_a_threshold_is_there_once() -> None:
    named = result(reason="277 GB/s, at least 251 (a row, 2026-01-31)", reference_series=[])
    for each in (named, result(reference_series=[])):
        page = render_acceptance(document(results=[each]), "c")
        assert page[: page.index('id="curves"')].count("a row, 2026-01-31") == 1


def test_results_with_the_same_remedy_are_one_task() -> None:
    failed = [result("fail", reason=f"GPU {gpu} is slow", action="a remedy") for gpu in range(7)]
    page = render_acceptance(document(results=failed), "c")
    tasks = page[page.index('id="todo"') : page.index('id="results"')]
    assert tasks.count("a remedy") == 1 and "GPU 3 is slow" in tasks and "and 3 more" in tasks


def test_a_thousand_nodes_stay_a_page() -> None:
    many = document(results=[result(reason=f"r{number}") for number in range(MOST_ROWS + 500)])
    page = render_acceptance(many, "my-cluster")
    assert "500 more results are in acceptance.json." in page
    assert len(page) < 3_000_000


@pytest.mark.parametrize(
    "measured",
    [[], [(1024.0, 5.0)], [(0.0, 1.0), (1024.0, 5.0)], [(1024.0, 0.0), (2048.0, float("nan"))]],
)
def test_what_cannot_be_drawn_is_not(measured: list[tuple[float, float]]) -> None:
    assert bandwidth_curve("c", "t", measured) is None


def test_a_curve_is_where_its_values_are() -> None:
    """On logarithmic axes a doubling is the same distance everywhere."""
    measured = [(2.0**power, 2.0 ** (power / 2)) for power in range(10, 20)]
    drawn = bandwidth_curve("c", "t", measured, [(2.0**15, 100.0)], limit=64.0)
    assert drawn is not None
    xs, ys = [dot.x for dot in drawn.dots], [dot.y for dot in drawn.dots]
    steps = {round(b - a, 0) for a, b in pairwise(xs)}
    assert len(steps) == 1 and xs[0] == LEFT and xs[-1] < WIDTH
    assert all(after < before for before, after in pairwise(ys))
    assert all(0 < y < HEIGHT for y in ys)
    # 64 = 2**6 is the value at 2**12 bytes.
    assert drawn.limit == ys[2]
    assert [row[2] for row in drawn.table.rows if row[2]] == ["100.000"]


def test_equal_values_and_one_size_of_reference_are_drawn() -> None:
    drawn = bandwidth_curve("c", "t", [(1024.0, 7.0), (2048.0, 7.0)], [(1024.0, 7.0)])
    assert drawn is not None and len({dot.y for dot in drawn.dots}) == 1 and drawn.reference


def shades(nodes: int, values: Any, **more: Any) -> dict[tuple[str, str], float | None]:
    names = [f"n{number}" for number in range(nodes)]
    drawn = heat_map("m", "t", "GB/s", names, values, **more)
    assert drawn is not None
    return {(cell.row, cell.column): cell.shade for cell in drawn.cells}


def test_the_worst_cell_is_darkest_whichever_way_is_better() -> None:
    values = [[None, 1.0, -9.0], [1.0, None, 4.0], [-9.0, 4.0, None]]
    higher = shades(3, values, higher_is_better=True)
    assert (higher["n0", "n2"], higher["n1", "n2"]) == (1.0, 0.0)
    lower = shades(3, values, higher_is_better=False)
    assert (lower["n0", "n2"], lower["n0", "n1"]) == (1.0, 0.0)


def test_nodes_of_one_name_are_different_nodes() -> None:
    values = [[None, 1.0, 2.0], [1.0, None, 3.0], [2.0, 3.0, None]]
    drawn = heat_map("m", "t", "GB/s", ["a", "a", "b"], values, higher_is_better=True)
    assert drawn is not None
    assert [cell.value for cell in drawn.cells] == [1.0, 2.0, 1.0, 3.0, 2.0, 3.0]


def test_a_value_in_one_direction_only_is_in_range_and_in_the_table() -> None:
    values = [[None, None, 2.0], [9.0, None, 3.0], [5.0, 3.0, None]]
    drawn = heat_map("m", "t", "s", ["a", "b", "c"], values, higher_is_better=False)
    assert drawn is not None
    cells = {(cell.row, cell.column): cell.shade for cell in drawn.cells}
    assert cells["b", "a"] == 1.0 and cells["a", "b"] is None
    assert all(shade is None or 0 <= shade <= 1 for shade in cells.values())
    assert [row[:2] for row in drawn.table.rows] == [("a", "b"), ("a", "c"), ("b", "c")]


def test_a_map_of_many_nodes_shows_the_worst() -> None:
    nodes = MOST_NODES + 30
    values = [
        [None if i == j else (1.0 if 90 in (i, j) else 9.0) for j in range(nodes)]
        for i in range(nodes)
    ]
    assert ("n90", "n0") in shades(nodes, values, higher_is_better=True)


def test_fewer_than_three_nodes_or_no_values_give_no_map() -> None:
    assert (
        heat_map("m", "t", "", ["a", "b"], [[None, 1.0], [1.0, None]], higher_is_better=True)
        is None
    )
    empty: list[list[float | None]] = [[None] * 3] * 3
    assert heat_map("m", "t", "", ["a", "b", "c"], empty, higher_is_better=True) is None


def test_the_curve_beside_its_reference_is_named_by_its_source() -> None:
    page = render_acceptance(document(results=[result(series=points())]), "c")
    assert "a row, 2026-01-31" in page and 'class="reference"' in page
