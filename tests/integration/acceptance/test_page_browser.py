"""The page of an acceptance in headless Chromium: drawn right on any screen, without a request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from playwright.sync_api import Browser
from tests.integration.opened_report import Opened, opening
from tests.integration.test_report_browser import browser  # noqa: F401
from tests.unit.acceptance.documents import BAD, CURVE, NAMES, SIZES, bandwidth_of, document, result

from drillyard.acceptance.acceptance_page import render_acceptance


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("acceptance") / "acceptance.html"
    path.write_text(render_acceptance(document(), "my-cluster"), encoding="utf-8")
    return path


@pytest.fixture
def open_page(browser: Browser, file: Path) -> Iterator[Callable[..., Opened]]:  # noqa: F811
    with opening(browser, file) as open_one:
        yield open_one


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_map_is_coloured_from_best_to_worst(open_page, scheme):
    page = open_page(color_scheme=scheme).page

    def colour(i: int, j: int) -> str:
        place = f'rect[data-row="{NAMES[i]}"][data-column="{NAMES[j]}"]'
        return str(page.locator(place).first.evaluate("cell => getComputedStyle(cell).fill"))

    bad = {colour(BAD, 1), colour(2, BAD)}
    assert len(bad) == 1 and colour(2, 8) not in bad
    # Not measured: neither of the two ends.
    assert bandwidth_of(3, 4) is None and colour(3, 4) not in bad


def test_a_point_and_a_cell_read_back_equal_the_document(open_page):
    page = open_page().page
    points = page.locator("figure").first.locator("circle")
    assert [
        (float(each.get_attribute("data-bytes")), float(each.get_attribute("data-value")))
        for each in points.all()
    ] == list(zip(SIZES, CURVE, strict=True))
    cell = page.locator(f'rect[data-row="{NAMES[2]}"][data-column="{NAMES[8]}"]').first
    assert float(cell.get_attribute("data-value")) == bandwidth_of(2, 8)
    # On logarithmic axes equal factors are equal distances.
    boxes = [each.bounding_box() for each in points.all()]
    lefts = [box["x"] for box in boxes]
    steps = [after - before for before, after in pairwise(lefts)]
    assert max(steps) - min(steps) < 1.0


@pytest.mark.parametrize("scripts", [True, False])
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_scrolls_sideways_and_tables_are_there(open_page, width, scripts):
    page = open_page(width=width, java_script_enabled=scripts).page
    if scripts:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        hidden = (
            "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth)"
        )
        assert page.evaluate(f"{hidden}.map(e => e.getAttribute('aria-label'))") == []
    for state in page.locator("table.results td.state").all():
        box = state.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width
    assert page.locator("table.results tbody tr").count() == 6
    assert "31.50 GB/s" in page.locator("table.results").inner_text()
    assert page.locator("table").count() >= 4


def test_a_curve_alone_does_not_fill_the_width(browser, tmp_path):  # noqa: F811
    alone = document(results=[result()], matrices=[])
    (tmp_path / "one.html").write_text(render_acceptance(alone, "c"), encoding="utf-8")
    with opening(browser, tmp_path / "one.html") as open_one:
        page = open_one().page
        (box,) = (each.bounding_box() for each in page.locator(".curves figure").all())
        assert 500 < box["width"] < 800
