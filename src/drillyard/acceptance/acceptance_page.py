"""The page of an acceptance: acceptance.json as one HTML file that needs no network, no other files
and no scripts.

First the verdict and the nodes at fault with their evidence and what to do; then the table of all
results, curves against their references, and heat maps of pairs. A content security policy forbids
every request and every script. The same document gives the same bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from drillyard import formatting
from drillyard.acceptance.acceptance_document import AcceptanceDocument, ResultEntry
from drillyard.acceptance.document_text import figure_text, results_table, threshold_text
from drillyard.control_characters import clean
from drillyard.reporting.bandwidth_curve import BandwidthCurve, bandwidth_curve
from drillyard.reporting.content import Tile
from drillyard.reporting.heat_map import HeatMap, heat_map
from drillyard.reporting.page import asset, environment
from drillyard.version import __version__

PAGE_FILE: Final = "acceptance.html"
MOST_CURVES: Final = 24
"""Curves on one page; those of failures come first."""
MOST_ROWS: Final = 1000
"""Results in the table of the page, the worst first: acceptance.json has all."""
MOST_LISTED: Final = 100
"""Of the nodes at fault, and of what is to be done."""
MOST_SEEN: Final = 4
"""Reasons in one row of what is to be done."""
LEVELS: Final = {
    "pass": "good",
    "warn": "warning",
    "fail": "failure",
    "incomplete": "warning",
    "skipped": "note",
    "recorded": "note",
}
"""How each status is coloured, as in the report of a run."""


@dataclass(frozen=True, slots=True)
class Row:
    """A result in the table."""

    result: ResultEntry
    where: str
    metric: str
    """Empty where it is the name of the check."""
    observed: str
    threshold: str
    source: str
    """Of the threshold, where the reason does not name it."""
    level: str


@dataclass(frozen=True, slots=True)
class Task:
    """What to do about results of one test, with what was seen of each."""

    title: str
    status: str
    action: str
    level: str
    seen: list[str]


def render_acceptance(document: AcceptanceDocument, title: str) -> str:
    """The page of a document. `title`: the cluster's name, or what was judged."""
    rows = [_row(each, where) for where, each in results_table(document)]
    return (
        environment()
        .get_template("acceptance.html")
        .render(
            d=document,
            title=clean(title),
            version=__version__,
            style_sheet=Markup(asset("report.css") + asset("acceptance.css")),
            level=LEVELS[document.verdict],
            levels=LEVELS,
            subtitle=_subtitle(document),
            times=_times(document),
            tiles=_tiles(document),
            rows=rows[:MOST_ROWS],
            rows_note=(
                f"{len(rows) - MOST_ROWS} more results are in acceptance.json."
                if len(rows) > MOST_ROWS
                else ""
            ),
            most_listed=MOST_LISTED,
            to_do=_tasks(rows),
            curves=list(_curves(document)),
            maps=list(_maps(document)),
        )
    )


def _row(result: ResultEntry, where: str) -> Row:
    source = result.threshold.source if result.threshold else ""
    return Row(
        result,
        where,
        "" if result.metric == result.check else result.metric,
        figure_text(result),
        threshold_text(result),
        "" if source in result.reason else source,
        LEVELS[result.status],
    )


def _tasks(rows: Sequence[Row]) -> list[Task]:
    """Results that do not pass, those of one test with the same action together."""
    tasks: dict[tuple[str, str, str], Task] = {}
    for row in rows:
        result = row.result
        if result.status in ("fail", "warn", "incomplete"):
            key = (result.title, result.status, result.action)
            tasks.setdefault(key, Task(*key, row.level, [])).seen.append(result.reason)
    for task in tasks.values():
        if (left_out := len(task.seen) - MOST_SEEN) > 0:
            task.seen[MOST_SEEN:] = [f"and {left_out} more"]
    return list(tasks.values())


def _subtitle(document: AcceptanceDocument) -> str:
    parts = [document.machine or "machine not named", f"level {document.level}"]
    if document.network_stack:
        parts.insert(1, f"network stack {document.network_stack}")
    if document.recorded:
        parts.append("judged from recorded files")
    return " · ".join(parts)


def _times(document: AcceptanceDocument) -> str:
    if document.started_at is None:
        return ""
    begin = document.started_at[:19].replace("T", " ")
    end = (document.ended_at or "")[11:19]
    return f"{begin} to {end} UTC" if end else f"{begin} UTC"


def _tiles(document: AcceptanceDocument) -> list[Tile]:
    joined = sum(node.joined for node in document.nodes)
    counts = Counter(each.status for each in document.results)
    bad = [each.name for each in document.culprits]
    others = [
        f"{counts[status]} {status}"
        for status in ("fail", "incomplete", "warn", "skipped", "recorded")
        if counts[status]
    ]
    return [
        Tile("Verdict", document.verdict),
        Tile("Nodes", f"{joined} of {len(document.nodes)}", "took part"),
        Tile("Nodes at fault", str(len(bad)), formatting.first_few(bad, 3) if bad else ""),
        Tile("Results that pass", str(counts["pass"]), ", ".join(others)),
    ]


def _curves(document: AcceptanceDocument) -> Iterator[BandwidthCurve]:
    """Failures first, then in the order of the document."""
    order = sorted(document.results, key=lambda each: each.status != "fail")
    drawn = 0
    for number, each in enumerate(order):
        if drawn == MOST_CURVES:
            return
        limit = each.threshold
        curve = bandwidth_curve(
            f"curve-{number}",
            f"{each.metric}: {', '.join(each.nodes[:4])}{' ...' if len(each.nodes) > 4 else ''}",
            [(point.bytes, point.gb_per_s) for point in each.series],
            [(point.bytes, point.gb_per_s) for point in each.reference_series],
            reference_label=limit.source if limit else "Reference",
            limit=limit.value if limit and limit.unit == "GB/s" else None,
            limit_label="Limit at the largest message",
        )
        if curve is not None:
            drawn += 1
            yield curve


def _maps(document: AcceptanceDocument) -> Iterator[HeatMap]:
    for number, each in enumerate(document.matrices):
        limits = [
            result.threshold.at_least
            for result in document.results
            if (result.check, result.metric) == (each.check, each.metric) and result.threshold
        ]
        drawn = heat_map(
            f"map-{number}",
            f"{each.check}: {each.metric}",
            each.unit,
            each.nodes,
            each.values,
            higher_is_better=limits[0] if limits else "/s" in each.unit,
        )
        if drawn is not None:
            yield drawn
