"""The page: one file that needs nothing else and says everything in HTML too."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest
from tests.facts import says
from tests.unit.reporting import runs
from tests.unit.reporting.test_charts import long

from drillyard.errors import UserError
from drillyard.reporting.content import Point
from drillyard.reporting.event_text import EventText
from drillyard.reporting.page import MOST_EVENTS, render, write_report
from drillyard.reporting.run_content import read_run_directory

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Reader(HTMLParser):
    """Collects tags and texts, and insists that every tag is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["script"], ["style"]):
            self.text += data


@pytest.fixture(scope="module")
def content(run_directory):
    return read_run_directory(run_directory)


@pytest.fixture(scope="module")
def page(content):
    return render(content)


def test_the_same_run_gives_the_same_bytes(content, page):
    assert render(content) == page


def test_nothing_outside_of_the_page_is_named(page):
    reader = Reader(page)
    for tag, attributes in reader.tags:
        assert tag not in ("img", "iframe", "object", "embed")
        assert "src" not in attributes
        assert attributes.get("href", "data:,") == "data:,"
    assert "@import" not in page and not re.search(r"url\(", page)
    policy = next(
        a["content"] for _, a in reader.tags if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'")


def test_no_script_but_ours_may_run(page):
    reader = Reader(page)
    (policy,) = (
        a["content"] for _, a in reader.tags if a.get("http-equiv") == "Content-Security-Policy"
    )
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.S)
    checksum = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert rules["script-src"] == f"'sha256-{checksum}'"
    assert not [name for _, a in reader.tags for name in a if name.startswith("on")]


def test_every_chart_has_a_place_a_sentence_and_a_table(page):
    specs = json.loads(
        re.search(r'<script type="application/json" id="charts">(.*?)</script>', page, re.S)[1]
    )
    reader = Reader(page)
    places = [a["id"] for tag, a in reader.tags if tag == "figure"]
    assert [spec["name"] for spec in specs] == places
    pictures = [a for tag, a in reader.tags if tag == "svg"]
    assert len(pictures) == len(specs)
    assert all(picture["role"] == "img" and picture["aria-label"] for picture in pictures)
    assert sum(tag == "table" for tag, _ in reader.tags) >= len(specs) + 3


def test_figures_stand_in_the_text(page):
    text = " ".join(Reader(page).text.split())
    for part in (
        "16 GPUs (b200)",
        "rank 11 died by SIGKILL",
        "Recomputation",
        "questions: SQL execution accuracy",
    ):
        assert part in text
    assert "training: {steps: 160}" in text


def test_texts_of_the_run_cannot_become_markup(content):
    evil = "</script><script>alert(1)</script><b>"
    changed = dataclasses.replace(content, title=evil, documents=[(evil, evil)])
    changed.evaluations[f"{evil}.loss"] = content.evaluations["questions.loss"]
    page = render(changed)
    del changed.evaluations[f"{evil}.loss"]
    assert "<script>alert" not in page and "<b>" not in page
    Reader(page)


def test_a_run_without_a_step_has_a_page(tmp_path):
    page = render(read_run_directory(runs.write_run(tmp_path / "trial", steps=0)))
    assert "No step has been logged yet." in Reader(page).text


def test_events_have_the_time_since_the_run_began(content):
    seconds = {0: "+0:00:00", 59: "+0:00:59", 3600: "+1:00:00", 90_061: "+25:01:01", -5: "+0:00:00"}
    events = [
        EventText(content.begin_us + each * 1_000_000, "failure", "failure", "it failed")
        for each in seconds
    ]
    text = Reader(render(dataclasses.replace(content, events=events))).text
    assert re.findall(r"\+\d+:\d\d:\d\d", text) == list(seconds.values())


@pytest.mark.parametrize("more", [0, 1, 2])
def test_of_many_events_the_middle_is_left_out_and_counted(content, more):
    number = MOST_EVENTS + more
    events = [
        EventText(None, "failure", "failure", f"it was number {each}") for each in range(number)
    ]
    text = Reader(render(dataclasses.replace(content, events=events))).text
    assert text.count("it was number") == MOST_EVENTS
    assert says(text, f"it was number {number - 1}")
    assert says(text, "in the middle not listed") == (more > 0)
    assert says(text, "1 event in the middle not listed") == (more == 1)


def test_a_run_of_100_000_steps_is_a_small_file(content):
    assert len(render(long(content, 100_000)).encode()) < 1_000_000


def test_a_run_of_20_000_evaluations_is_a_small_file_with_the_lowest_of_them(content):
    steps = range(1, 20_001)
    values = {step: 2.0 + step % 7 for step in steps} | {12_345: 1.25}
    many = {
        name: [Point(step, values[step]) for step in steps]
        for name in ("rows.loss", "rows.exact_match", "other.exact_match")
    }
    page = render(dataclasses.replace(content, evaluations=many))
    assert len(page.encode()) < 1_000_000
    assert "12345" in page and "200 of 20,000 evaluations" in page


def test_a_report_replaces_the_one_before_and_leaves_nothing_beside_it(tmp_path):
    one, two = (f"<title>{name} · run report</title>" for name in ("one", "two"))
    write_report(tmp_path / "report.html", one)
    write_report(tmp_path / "report.html", two)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert (tmp_path / "report.html").read_text().startswith(two + "\n<!--")


def test_a_place_that_cannot_be_written_is_the_users_to_change(tmp_path):
    with pytest.raises(UserError, match="--output"):
        write_report(tmp_path / "missing" / "report.html", "page")
