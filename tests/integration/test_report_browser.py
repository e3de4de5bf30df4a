"""The report of `drillyard report`, opened in headless Chromium: drawn right, without a request, on
any screen.

`.ci/tools/packages` installs the browser; DRILLYARD_CHROMIUM names another one.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from tests.integration.opened_report import TIMEOUT_SECONDS, Opened, opening, reads
from tests.unit.reporting import runs

from drillyard.reporting.page import SCRIPTS, render
from drillyard.reporting.run_content import read_run_directory
from drillyard.telemetry import read_metrics

ASSETS = files("drillyard.reporting") / "assets"
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_run(tmp_path_factory.mktemp("report") / "trial")


@pytest.fixture(scope="module")
def report(run_directory: Path) -> Path:
    """report.html as the command writes it."""
    command = [sys.executable, "-m", "drillyard", "report", str(run_directory)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(str(run_directory / "report.html"))
    return run_directory / "report.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    named = os.environ.get("DRILLYARD_CHROMIUM")
    program = next(
        (found for name in ([named] if named else PROGRAMS) if (found := shutil.which(name))), None
    )
    assert program is not None, "no Chromium: .ci/tools/packages installs it"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program, timeout=TIMEOUT_SECONDS * 1000
        )
        yield browser
        browser.close()


@pytest.fixture
def open_report(browser: Browser, report: Path) -> Iterator[Callable[..., Opened]]:
    with opening(browser, report) as open_one:
        yield open_one


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_curve_is_drawn_where_its_values_are(open_report, scheme):
    opened = open_report(color_scheme=scheme)
    specs = opened.page.evaluate("charts.map(({ spec }) => spec)")
    assert {spec["name"] for spec in specs} >= {"loss", "step-time", "tokens", "mfu", "memory"}
    for spec in specs:
        for number, series in enumerate(spec["series"]):
            colour = "rgb({}, {}, {})".format(*opened.colour(series["colour"]))
            points = [
                point for point in zip(series["x"], series["y"], strict=True) if None not in point
            ]
            strokes = opened.strokes(spec["name"], number, points)
            assert all(colour in covering for covering in strokes), (spec["name"], series["label"])


def test_points_read_back_from_the_page_equal_the_log(open_report, run_directory):
    opened = open_report()
    records = {record["step"]: record for record in read_metrics(run_directory)}
    finite = {step: record for step, record in records.items() if math.isfinite(record["loss"])}
    assert opened.drawn("loss", 0) == {step: record["loss"] for step, record in finite.items()}
    for chart, name in {
        "step-time": "step_seconds",
        "tokens": "tokens_per_second_per_gpu",
        "mfu": "mfu",
        "memory": "memory_gib",
        "gradient": "grad_norm",
    }.items():
        assert opened.drawn(chart, 0) == {step: record[name] for step, record in records.items()}
    assert opened.drawn("step-time", 1) == runs.STALLS


def test_a_path_agrees_with_the_labels_of_its_axis(open_report):
    """Heights of the path against a line through two ticks: linear, and by their logarithms."""
    opened = open_report()
    path = opened.paths("loss", 2)
    heights, values = opened.scale("loss")
    expected = [value + 0.1 for value in map(runs.loss_of, (40, 80, 120, 160))]
    assert between(heights, values, path) == pytest.approx(expected, abs=0.02)
    opened.page.locator("#loss .log").click()
    assert opened.page.locator("#loss .log").get_attribute("aria-pressed") == "true"
    heights, values = opened.scale("loss")
    logarithms = between(heights, list(map(math.log, values)), opened.paths("loss", 2))
    assert logarithms == pytest.approx(list(map(math.log, expected)), abs=0.02)
    assert "log scale" in opened.chart("loss").inner_html()


def between(
    heights: list[float], values: list[float], path: list[tuple[float, float]]
) -> list[float]:
    """The values at the heights of a path, by the lowest and the highest tick."""
    slope = (values[-1] - values[0]) / (heights[-1] - heights[0])
    return [values[0] + (y - heights[0]) * slope for _, y in path]


def test_a_step_without_a_value_is_a_gap(open_report):
    opened = open_report()
    curve = opened.chart("loss").locator('path.curve[data-series="0"]')
    before, after = re.findall("M[^M]+", curve.get_attribute("d") or "")
    ((x, _),) = opened.places("loss", [(runs.NOT_FINITE, 1.0)])
    assert float(before.split("L")[-1].split()[0]) < x < float(after[1:].split()[0])


def test_pointing_at_a_chart_reads_all_charts_there(open_report):
    opened = open_report()
    opened.point_at("loss", 57)
    tip = opened.page.locator("#loss .tip")
    reads(tip, re.compile(r"Step 57\b"))
    reads(tip, f"Loss {runs.loss_of(57):.6g}")
    # The curve of the evaluations has no point there: its nearest one, with its own step.
    reads(tip, f"Held out: questions {runs.loss_of(40) + 0.1:.6g} (step 40)")
    reads(opened.page.locator("#memory .tip"), "141.5")
    (place,) = opened.places("loss", [(57, runs.loss_of(57))])
    dot = opened.chart("loss").locator("circle").first
    assert [float(dot.get_attribute(key) or "nan") for key in ("cx", "cy")] == pytest.approx(place)
    opened.page.mouse.move(1, 1)
    opened.wait_until("[...document.querySelectorAll('.tip')].every((tip) => tip.hidden)")


def test_a_curve_is_hidden_and_shown_by_its_name_in_the_legend(open_report):
    opened = open_report()
    stall = opened.page.locator("#step-time .legend button", has_text="Stall")
    dots = opened.chart("step-time").locator('path[data-series="1"]')
    assert dots.count() == 1
    high = max(opened.scale("loss")[1])
    stall.click()
    assert stall.get_attribute("aria-pressed") == "false" and dots.count() == 0
    opened.point_at("step-time", 12)
    tip = opened.page.locator("#step-time .tip")
    reads(tip, "Step time 50 s")
    assert "Stall" not in tip.inner_text()
    # Without the higher curve the axis fits the others.
    for name in ("Loss", "Mean of 3 steps"):
        opened.page.locator("#loss .legend button", has_text=name).first.click()
    assert max(opened.scale("loss")[1]) < high
    stall.click()
    assert stall.get_attribute("aria-pressed") == "true" and dots.count() == 1


def test_a_logarithmic_scale_is_offered_where_every_value_is_positive(browser, tmp_path):
    chart = {**SMALL_CHART, "series": [{**SMALL_SERIES, "y": [0.0, 1.0, 2.0]}]}
    assert drawn_alone(browser, tmp_path, chart).locator(".log").count() == 0
    assert drawn_alone(browser, tmp_path, SMALL_CHART).locator(".log").count() == 1


SMALL_SERIES: dict[str, Any] = {
    "label": "Loss",
    "x": [1, 2, 3],
    "y": [3.0, 2.0, 1.0],
    "colour": "--series-1",
    "style": "line",
}
SMALL_CHART: dict[str, Any] = {
    "name": "loss",
    "axis": "Loss",
    "unit": "number",
    "logarithmic": False,
    "levels": [],
    "marks": [],
    "series": [SMALL_SERIES],
}


def drawn_alone(browser: Browser, tmp_path: Path, chart: dict[str, Any]) -> Page:
    """A page with one chart, drawn by the report's scripts."""
    scripts = "".join((ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS)
    (tmp_path / "chart.html").write_text(
        "<!doctype html><main style='width: 600px'><figure id=loss><span class=tools></span>"
        "<div class=plot><svg></svg><div class=tip></div></div></figure></main>"
        f"<script type='application/json' id=charts>{json.dumps([chart])}</script>"
        f"<script>{scripts}</script>",
        encoding="utf-8",
    )
    page = browser.new_page()
    page.goto((tmp_path / "chart.html").as_uri())
    return page


def test_100_000_points_make_a_path_as_long_as_the_screen_is_wide(browser, tmp_path):
    steps = range(1, 100_001)
    values = [math.sin(step) for step in steps]
    values[77_777] = 5.0
    series = {**SMALL_SERIES, "x": list(steps), "y": values}
    page = drawn_alone(browser, tmp_path, {**SMALL_CHART, "series": [series]})
    path = page.locator("path.curve").get_attribute("d") or ""
    points = [(float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.]+)", path)]
    assert 500 < len(points) <= 4 * 502
    # The one peak is drawn, at its own step and value.
    x, y = page.evaluate("[charts[0].xScale.pixel(77778), charts[0].yScale.pixel(5)]")
    assert min(points, key=lambda point: point[1]) == pytest.approx((x, y), abs=0.06)
    # Zoomed, every point in view is drawn, and one on either side.
    page.evaluate("zoomTo(70000, 70100)")
    path = page.locator("path.curve").get_attribute("d") or ""
    assert len(re.findall("[ML]", path)) == 103
    page.close()


@pytest.mark.parametrize(
    "values",
    [[1.7e308, -1.7e308, 0.0], [5e-324, 1.0, 1.7e308], [1e16, 1e16 + 2, 1e16 + 4], [7.0] * 3],
)
def test_any_values_are_drawn_without_an_error(browser, tmp_path, values):
    chart = {**SMALL_CHART, "series": [{**SMALL_SERIES, "y": values}]}
    page = drawn_alone(browser, tmp_path, chart)
    for button in [None, *page.locator(".log").all()]:
        if button is not None:
            button.click()
        path = page.locator("path.curve").get_attribute("d") or ""
        assert path.count("L") == 2 and not re.search("NaN|Infinity", page.inner_html("svg")), path
    page.close()


def test_dragging_zooms_every_chart_and_a_button_shows_the_whole_run_again(open_report):
    opened = open_report()
    reset = opened.page.get_by_role("button", name="Whole run").first
    assert opened.view() == (1, 160) and reset.is_hidden()

    def drag() -> None:
        opened.point_at("loss", 41)
        opened.page.mouse.down()
        opened.point_at("loss", 81)
        assert opened.chart("loss").locator(".selection").count() == 1
        opened.page.mouse.up()

    drag()
    assert opened.view() == pytest.approx((41, 81), abs=0.5)
    assert opened.chart("loss").locator(".selection").count() == 0
    for name in ("loss", "memory", "rate"):
        steps = opened.steps_shown(name)
        assert len(steps) >= 3 and all(40 <= step <= 82 for step in steps)
    # The scale fits the values in view.
    assert max(opened.scale("loss")[1]) < runs.loss_of(40) + 0.2
    reset.click()
    assert opened.view() == (1, 160)
    drag()
    opened.point_at("loss", 60)
    opened.chart("loss").dblclick()
    assert opened.view() == (1, 160) and reset.is_hidden()


def test_the_arrow_keys_read_a_chart_and_plus_and_minus_zoom_it(open_report):
    opened = open_report()
    opened.chart("step-time").focus()
    tip = opened.page.locator("#step-time .tip")
    for _ in range(13):
        opened.page.keyboard.press("ArrowRight")
    reads(tip, re.compile(r"Step 13\b"))
    opened.page.keyboard.press("ArrowLeft")
    reads(tip, re.compile(r"Step 12\b"))
    reads(tip, "50 s")
    assert tip.get_attribute("role") == "status"
    assert opened.page.locator(".tip[role]").count() == 1
    opened.page.keyboard.press("+")
    low, high = opened.view()
    assert high - low == pytest.approx(159 / 2) and low < 12 < high
    opened.page.keyboard.press("-")
    assert opened.view() == (1, pytest.approx(160))
    for key, step in {"End": 160, "PageUp": 140, "Home": 1, "PageDown": 21}.items():
        opened.page.keyboard.press(key)
        reads(tip, re.compile(rf"Step {step}\b"))
    opened.page.keyboard.press("+")
    opened.page.keyboard.press("Escape")
    assert opened.view() == (1, 160)


@pytest.mark.parametrize("javascript", [True, False])
def test_nothing_scrolls_sideways(open_report, javascript):
    opened = open_report(java_script_enabled=javascript)
    devtools = opened.page.context.new_cdp_session(opened.page)
    if javascript:
        opened.page.evaluate(
            "document.querySelectorAll('details').forEach((one) => { one.open = true; })"
        )
    for width in (320, 390, 768, 1280):
        opened.page.set_viewport_size({"width": width, "height": 844})
        if javascript:
            opened.wait_until(
                "charts.every((chart) => chart.width === chart.svg.parentElement.clientWidth)"
            )
        # The browser's own measure, which needs no script of the page.
        assert devtools.send("Page.getLayoutMetrics")["cssContentSize"]["width"] <= width, width


def test_without_javascript_the_same_stands_in_pictures_and_tables(open_report):
    opened = open_report(java_script_enabled=False)
    assert opened.page.locator(".hint").first.is_hidden()
    held_out = opened.chart("loss").locator("path.joined").get_attribute("d") or ""
    heights = [float(y) for y in re.findall(r"[\d.]+ ([\d.]+)", held_out)]
    assert len(heights) == 4 and heights == sorted(heights)
    assert opened.chart("loss").is_visible()
    table = opened.page.locator("#loss table")
    assert table.is_visible()
    row = table.locator("tr", has=opened.page.get_by_role("rowheader", name="40", exact=True))
    expected = ["40", f"{runs.loss_of(40):.4f}", f"{runs.loss_of(40) + 0.1:.4f}"]
    assert [float(cell) for cell in row.locator("th, td").all_inner_texts()] == [
        float(text) for text in expected
    ]
    stalls = opened.page.locator("#step-time tr", has_text="stall")
    assert [text.split()[0] for text in stalls.all_inner_texts()][-2:] == ["12", "130"]


def test_dark_mode_is_dark_and_paper_is_light(open_report):
    opened = open_report(color_scheme="dark")

    def brightness() -> float:
        text = opened.page.evaluate(
            "getComputedStyle(document.querySelector('.card')).backgroundColor"
        )
        return sum(map(int, re.findall(r"\d+", text)[:3])) / 3

    assert brightness() < 60
    opened.page.emulate_media(media="print", color_scheme="dark")
    assert brightness() > 240
    assert opened.page.pdf(format="A4").startswith(b"%PDF")


def test_names_of_a_run_are_shown_as_they_are_written(browser, tmp_path):
    evil = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
    directory = runs.write_run(tmp_path / "trial", steps=60)
    events = directory / "events.jsonl"
    events.write_text(events.read_text().replace('"questions"', json.dumps(evil)))
    page = browser.new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(dialog.message))
    (tmp_path / "page.html").write_text(render(read_run_directory(directory)), encoding="utf-8")
    page.goto((tmp_path / "page.html").as_uri())
    page.locator("#loss .plot > svg").focus()
    page.keyboard.press("End")
    reads(page.locator("#loss .tip"), f"Held out: {evil}")
    reads(page.locator("#loss .legend"), f"Held out: {evil}")
    assert page.locator("img").count() == 0 and problems == []
    page.close()


def test_a_script_that_is_not_ours_does_not_run(browser, report, tmp_path):
    text = report.read_text(encoding="utf-8")
    (tmp_path / "page.html").write_text(
        text.replace("<main>", "<main><script>window.foreign = 1</script>"), encoding="utf-8"
    )
    page = browser.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    assert page.evaluate("[typeof foreign, charts.length > 5]") == ["undefined", True]
    page.close()


def test_every_text_stands_out_from_its_ground(open_report):
    """Contrast of at least 4.5 to 1 (WCAG 2.2, 1.4.3)."""
    opened = open_report()
    for scheme in ("light", "dark"):
        opened.page.emulate_media(color_scheme=scheme)
        for ink in ("--ink", "--muted", "--good", "--warning", "--bad", "--accent"):
            for ground in ("--card", "--paper"):
                assert contrast(opened.colour(ink), opened.colour(ground)) >= 4.5, (
                    scheme,
                    ink,
                    ground,
                )


def contrast(first: tuple[int, int, int], second: tuple[int, int, int]) -> float:
    """The ratio of the relative luminances of two colours."""

    def luminance(colour: tuple[int, int, int]) -> float:
        linear = [
            c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def test_the_command_needs_no_torch(run_directory, tmp_path):
    program = (
        "import json, sys\nfrom drillyard.cli.main import main\ntry: main(['report',"
        f" {str(run_directory)!r}, '--output', {str(tmp_path / 'own.html')!r}])\nexcept SystemExit"
        " as end: assert not end.code, end.code\nprint(json.dumps(sorted(name for name in"
        " ('torch', 'transformers', 'pyarrow') if name in sys.modules)))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == []
    assert (tmp_path / "own.html").is_file()
