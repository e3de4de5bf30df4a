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
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright
from tests.unit.reporting import runs

from drillyard.telemetry import read_metrics

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT_SECONDS = 240
NEAR = 48
"""By how much a channel of a drawn pixel may differ from the curve's colour: the edges of lines are
smoothed."""


@dataclass
class Opened:
    """A page, and all that the browser said and asked for while it was open."""

    page: Page
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def wait_until(self, condition: str) -> None:
        """Wait for a JavaScript condition. Playwright's own wait runs `eval` in the page, which its
        policy forbids."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not self.page.evaluate(f"() => {condition}"):
            assert time.monotonic() < deadline, condition
            self.page.wait_for_timeout(20)

    def colours_around(self, chart: str, series: int, points: list[int]) -> list[list[list[int]]]:
        """For each point of a curve: the pixels of the chart's canvas around it, as [red, green,
        blue, alpha]."""
        return self.page.evaluate(
            """([name, series, points]) => {
                const plot = drillyard.plots.get(name);
                const { width, height } = plot.ctx.canvas;
                const copy = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
                copy.drawImage(plot.ctx.canvas, 0, 0);
                return points.map((point) => {
                    const x = Math.round(plot.valToPos(plot.data[0][point], "x", true));
                    const y = Math.round(plot.valToPos(plot.data[series][point], "y", true));
                    const pixels = copy.getImageData(x - 2, y - 2, 5, 5).data;
                    return Array.from({ length: 25 }, (_, i) => Array.from(pixels.slice(4 * i, 4 * i + 4)));
                });
            }""",  # noqa: E501
            [chart, series, points],
        )

    def drawn(self, chart: str, series: int) -> dict[int, float]:
        """The points of a curve as the chart library holds them, by step."""
        steps, values = self.page.evaluate(
            "([name, series]) => [drillyard.plots.get(name).data[0],"
            " drillyard.plots.get(name).data[series]]",
            [chart, series],
        )
        return {step: value for step, value in zip(steps, values, strict=True) if value is not None}

    def colour(self, name: str) -> tuple[int, int, int]:
        """A colour of the style sheet as it holds now."""
        text = self.page.evaluate(
            f"getComputedStyle(document.documentElement).getPropertyValue('{name}').trim()"
        )
        return int(text[1:3], 16), int(text[3:5], 16), int(text[5:7], 16)


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
    """Open the report; options are those of a browser context. At the end nothing may have gone
    wrong in any page."""
    pages: list[Opened] = []

    def open_one(width: int = 1280, height: int = 900, **options: Any) -> Opened:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        context.set_default_timeout(TIMEOUT_SECONDS * 1000)
        page = context.new_page()
        opened = Opened(page)
        pages.append(opened)
        page.on("console", lambda message: opened.problems.append(message.text))
        page.on("pageerror", lambda error: opened.problems.append(str(error)))
        page.on("request", lambda request: opened.requests.append(request.url))
        page.goto(report.as_uri())
        if options.get("java_script_enabled", True):
            # Two frames on, every chart has the size of its place.
            page.evaluate(
                "() => new Promise((done) => requestAnimationFrame(() =>"
                " requestAnimationFrame(done)))"
            )
        return opened

    yield open_one
    for opened in pages:
        opened.page.context.close()
        assert opened.problems == []
        assert opened.requests == [report.as_uri()]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_curve_is_drawn_where_its_values_are(open_report, scheme):
    opened = open_report(color_scheme=scheme)
    specs = opened.page.evaluate("drillyard.specs")
    assert {spec["name"] for spec in specs} >= {"loss", "step-time", "tokens", "mfu", "memory"}
    for spec in specs:
        for number, series in enumerate(spec["series"], start=1):
            # Where curves cross, the later one hides the earlier.
            wanted = [opened.colour(later["colour"]) for later in spec["series"][number - 1 :]]
            points = [place for place, value in enumerate(series["values"]) if value is not None]
            chosen = points[:: max(1, len(points) // 12)]
            drawn = [
                near(pixels, wanted)
                for pixels in opened.colours_around(spec["name"], number, chosen)
            ]
            assert all(drawn), (spec["name"], series["label"], chosen, drawn)


def near(pixels: list[list[int]], wanted: list[tuple[int, int, int]]) -> bool:
    """Whether any of the pixels has one of the colours."""
    return any(
        pixel[3] > 128 and max(abs(a - b) for a, b in zip(pixel, colour, strict=False)) <= NEAR
        for pixel in pixels
        for colour in wanted
    )


def test_points_read_back_from_the_page_equal_the_log(open_report, run_directory):
    opened = open_report()
    records = {record["step"]: record for record in read_metrics(run_directory)}
    finite = {step: record for step, record in records.items() if math.isfinite(record["loss"])}
    assert opened.drawn("loss", 1) == {step: record["loss"] for step, record in finite.items()}
    for chart, name in {
        "step-time": "step_seconds",
        "tokens": "tokens_per_second_per_gpu",
        "mfu": "mfu",
        "memory": "memory_gib",
        "gradient": "grad_norm",
    }.items():
        assert opened.drawn(chart, 1) == {step: record[name] for step, record in records.items()}
    assert opened.drawn("step-time", 2) == runs.STALLS


def test_pointing_at_a_chart_reads_all_charts_there(open_report):
    opened = open_report()
    place = opened.page.locator('.plot[data-chart="loss"] .u-over')
    place.scroll_into_view_if_needed()
    box = place.bounding_box()
    offset = opened.page.evaluate('drillyard.plots.get("loss").valToPos(57, "x")')
    opened.page.mouse.move(box["x"] + offset, box["y"] + box["height"] / 2)
    legend = opened.page.locator('.plot[data-chart="loss"] .u-legend')
    reads(legend, f"{runs.loss_of(57):.6g}")
    reads(legend, re.compile(r"Step\s+57\b"))
    reads(opened.page.locator('.plot[data-chart="memory"] .u-legend'), "141.5")


def reads(place: Locator, text: str | re.Pattern[str]) -> None:
    """The text stands there, or soon does: a browser draws when it comes to it."""
    expect(place).to_contain_text(text, use_inner_text=True, timeout=TIMEOUT_SECONDS * 1000)


def test_dragging_zooms_every_chart_and_a_button_shows_the_whole_run_again(open_report):
    opened = open_report()
    ranges = (
        '[...drillyard.plots.values()].map((plot) => [plot.scales.x.min, plot.scales.x.max].join("'
        ' to "))'
    )
    place = opened.page.locator('.plot[data-chart="loss"] .u-over')
    place.scroll_into_view_if_needed()
    box = place.bounding_box()
    opened.page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 50)
    opened.page.mouse.down()
    opened.page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 50, steps=4)
    opened.page.mouse.up()
    opened.wait_until(f"new Set({ranges}).size === 1 && {ranges}[0] !== '1 to 160'")
    (zoomed,) = set(opened.page.evaluate(ranges))
    first, last = map(float, zoomed.split(" to "))
    assert 30 < first < 50 and 70 < last < 90
    opened.page.get_by_role("button", name="Whole run").first.click()
    opened.wait_until(f"{ranges}.every((range) => range === '1 to 160')")


def test_the_arrow_keys_read_a_chart(open_report):
    opened = open_report()
    opened.page.locator('.plot[data-chart="step-time"]').focus()
    for _ in range(12):
        opened.page.keyboard.press("ArrowRight")
    legend = opened.page.locator('.plot[data-chart="step-time"] .u-legend')
    reads(legend, re.compile(r"Step\s+12\b"))
    reads(legend, "50 s")


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
                "[...drillyard.plots.values()].every((plot) => plot.width <="
                " plot.root.parentElement.clientWidth)"
            )
        # The browser's own measure, which needs no script of the page.
        assert devtools.send("Page.getLayoutMetrics")["cssContentSize"]["width"] <= width, width


def test_without_javascript_the_same_stands_in_tables(open_report):
    opened = open_report(java_script_enabled=False)
    assert opened.page.locator(".plot").first.is_hidden()
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
