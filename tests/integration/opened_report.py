"""A report in headless Chromium, and what its charts show: paths, ticks, values and colours."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Locator, Page, expect

TIMEOUT_SECONDS = 240


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

    def chart(self, name: str) -> Locator:
        return self.page.locator(f"#{name} .plot > svg")

    def strokes(self, name: str, series: int, points: list[tuple[int, float]]) -> list[list[str]]:
        """For each point of a chart: the colours of the curve's lines and dots that cover it."""
        return self.page.evaluate(
            """([name, series, points]) => {
                const { svg, xScale, yScale } = charts.find((one) => one.spec.name === name);
                const paths = [...svg.querySelectorAll(`path[data-series="${series}"]`)];
                return points.map(([x, y]) => {
                    const point = new DOMPoint(xScale.pixel(x), yScale.pixel(y));
                    const covering = paths.filter((path) => path.isPointInStroke(point));
                    return covering.map((path) => getComputedStyle(path).stroke);
                });
            }""",
            [name, series, points],
        )

    def places(self, name: str, points: list[tuple[int, float]]) -> list[tuple[float, float]]:
        """Where the scales of a chart put points, in pixels from its top left."""
        return self.page.evaluate(
            """([name, points]) => {
                const chart = charts.find((one) => one.spec.name === name);
                return points.map(([x, y]) => [chart.xScale.pixel(x), chart.yScale.pixel(y)]);
            }""",
            [name, points],
        )

    def paths(self, name: str, series: int, kind: str = "curve") -> list[tuple[float, float]]:
        """The points of a curve's path, in pixels."""
        path = self.chart(name).locator(f'path.{kind}[data-series="{series}"]').first
        return [
            (float(x), float(y))
            for x, y in re.findall(r"([\d.-]+) ([\d.-]+)", path.get_attribute("d") or "")
        ]

    def scale(self, name: str) -> tuple[list[float], list[float]]:
        """The pixels and the values of the labelled ticks of a chart's axis of values."""
        ticks = self.chart(name).locator("text.value")
        heights = [float(tick.get_attribute("y") or "nan") for tick in ticks.all()]
        return heights, [float(re.sub("[^0-9.e-]", "", text)) for text in ticks.all_text_contents()]

    def view(self) -> tuple[float, float]:
        """The range of steps that all charts show."""
        low, high = self.page.evaluate("[view.low, view.high]")
        return low, high

    def steps_shown(self, name: str) -> list[int]:
        """The labels of a chart's axis of steps."""
        texts = self.chart(name).locator("text.step").all_text_contents()
        return [int(text.replace(",", "")) for text in texts]

    def drawn(self, name: str, series: int) -> dict[int, float]:
        """The points of a curve as the page holds them, by step."""
        steps, values = self.page.evaluate(
            """([name, series]) => {
                const { x, y } = charts.find((one) => one.spec.name === name).spec.series[series];
                return [x, y];
            }""",
            [name, series],
        )
        return {step: value for step, value in zip(steps, values, strict=True) if value is not None}

    def point_at(self, name: str, step: int) -> None:
        """Move the mouse over the chart to a step."""
        chart = self.chart(name)
        chart.scroll_into_view_if_needed()
        box = chart.bounding_box()
        assert box is not None
        ((x, _),) = self.places(name, [(step, 1.0)])
        self.page.mouse.move(box["x"] + x, box["y"] + box["height"] / 2)

    def colour(self, name: str) -> tuple[int, int, int]:
        """A colour of the style sheet as it holds now."""
        text = self.page.evaluate(
            f"getComputedStyle(document.documentElement).getPropertyValue('{name}').trim()"
        )
        return int(text[1:3], 16), int(text[3:5], 16), int(text[5:7], 16)


def reads(place: Locator, text: str | re.Pattern[str]) -> None:
    """The text stands there, or soon does: a browser draws when it comes to it."""
    expect(place).to_contain_text(text, use_inner_text=True, timeout=TIMEOUT_SECONDS * 1000)


@contextmanager
def opening(browser: Browser, file: Path) -> Iterator[Callable[..., Opened]]:
    """A function that opens the page in `file`; its options are those of a browser context. At the
    end nothing may have gone wrong in any page, and none may have asked for anything."""
    pages: list[Opened] = []

    def open_one(width: int = 1280, height: int = 900, **options: Any) -> Opened:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        context.set_default_timeout(TIMEOUT_SECONDS * 1000)
        opened = Opened(context.new_page())
        pages.append(opened)
        opened.page.on("console", lambda message: opened.problems.append(message.text))
        opened.page.on("pageerror", lambda error: opened.problems.append(str(error)))
        opened.page.on("request", lambda request: opened.requests.append(request.url))
        opened.page.goto(file.as_uri())
        if options.get("java_script_enabled", True):
            # Two frames on, every chart has the size of its place.
            opened.page.evaluate(
                "() => new Promise((done) => requestAnimationFrame(() =>"
                " requestAnimationFrame(done)))"
            )
        return opened

    yield open_one
    for opened in pages:
        opened.page.context.close()
        assert opened.problems == []
        assert opened.requests == [file.as_uri()]
