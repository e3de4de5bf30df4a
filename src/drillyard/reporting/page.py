"""The page: a report's content as one HTML file that needs no network and no other files.

Charts are still pictures in the page (still_chart.py); our own scripts (`assets/*.js`) draw them
again as SVG that can be read, zoomed and rescaled. Everything is on the page as text and tables
too, for readers without JavaScript, on paper or with a screen reader. A content security policy
forbids every request, and every script but ours, by its checksum. The same content gives the same
bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from drillyard import formatting
from drillyard.errors import UserError
from drillyard.reporting.charts import Chart, charts
from drillyard.reporting.content import CATEGORIES, Content, Table
from drillyard.reporting.event_text import EventText
from drillyard.reporting.still_chart import still_chart
from drillyard.reporting.tables import evaluation_table
from drillyard.safe_files import describe_os_error, write_output
from drillyard.telemetry.events import utc_time
from drillyard.version import __version__

REPORT_FILE: Final = "report.html"
SCRIPTS: Final = ("scales.js", "curves.js", "chart.js", "report.js")
"""The scripts of the page in the order in which they use each other."""
GROUPS: Final = {
    "learning": ("Learning", ("loss", "evaluation-")),
    "speed": ("Speed", ("step-time", "tokens", "mfu", "tflops", "memory")),
    "optimizer": ("Optimizer", ("gradient", "rate")),
}
"""Sections of charts: their title, and the prefixes of their charts' names."""
MOST_EVENTS: Final = 200
MOST_ROUTINE: Final = 8
"""Checkpoints and evaluations are listed among the events of a short run only; each has a table of
its own."""


@dataclass(frozen=True, slots=True)
class CurveGroup:
    """A section of charts."""

    name: str
    title: str
    charts: list[Chart]
    evaluations: Table | None = None

    @property
    def wide(self) -> set[str]:
        """Charts over the whole width: the loss, and the last one of an odd number."""
        others = [chart.name for chart in self.charts if chart.name != "loss"]
        return {"loss", *(others[-1:] if len(others) % 2 else ())}


def write_report(path: Path, page: str, *, overwrite: bool = False) -> None:
    """Write `page` to `path` atomically. An unedited report is replaced, any other file only with
    `overwrite`.

    Raises UserError when it cannot be written.
    """
    try:
        write_output(path, page.encode("utf-8", "replace"), overwrite=overwrite)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written: {describe_os_error(error)}; --output FILE writes elsewhere"
        ) from error


def render(content: Content) -> str:
    """The page."""
    drawn, tiles = charts(content), len(content.tiles)
    data = json.dumps([chart.as_json() for chart in drawn], allow_nan=False, separators=(",", ":"))
    shares = _shares(content.goodput)
    events, note = _events(content)
    script = "".join(asset(name) for name in SCRIPTS)
    return (
        environment()
        .get_template("page.html")
        .render(
            c=content,
            version=__version__,
            style_sheet=Markup(asset("report.css")),
            script=Markup(script),
            script_checksum=b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            still_chart=still_chart,
            # Texts from logs are in the JSON: a `</script>` among them must not end it.
            data=Markup(data.replace("<", "\\u003c")),
            groups=_groups(drawn, evaluation_table(content)),
            # One row of up to five tiles, else two equal ones.
            tile_columns=max(1, tiles if tiles <= 5 else math.ceil(tiles / 2)),
            shares=shares,
            bar_label=", ".join(
                f"{share['label']} {share['percent']}" for share in shares if share["fraction"]
            ),
            wall=formatting.duration(sum(content.goodput.values())),
            times=_times(content),
            events=events,
            events_note=note,
        )
    )


@cache
def environment() -> Environment:
    """The templates of pages: texts are escaped, and an unknown name is an error."""
    return Environment(
        loader=FunctionLoader(asset),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@cache
def asset(name: str) -> str:
    """A file of assets/ as text."""
    return (files("drillyard.reporting") / "assets" / name).read_text(encoding="utf-8")


def _groups(drawn: Sequence[Chart], evaluations: Table | None) -> Iterator[CurveGroup]:
    for name, (title, prefixes) in GROUPS.items():
        members = [chart for chart in drawn if chart.name.startswith(prefixes)]
        table = evaluations if name == "learning" else None
        if members or table:
            yield CurveGroup(name, title, members, table)


def _shares(seconds: dict[str, float]) -> list[dict[str, Any]]:
    """All categories of goodput in drawing order, empty ones too."""
    wall = math.fsum(seconds.values())
    if not wall:
        return []
    return [
        {
            "name": name,
            "label": name.replace("startup", "start-up").capitalize(),
            "fraction": seconds.get(name, 0.0) / wall,
            "time": formatting.duration(seconds[name]) if seconds.get(name) else "0 s",
            "percent": formatting.percent(seconds.get(name, 0.0) / wall),
            "meaning": meaning,
        }
        for name, meaning in CATEGORIES.items()
    ]


def _times(content: Content) -> str:
    if content.begin_us is None or content.end_us is None:
        return ""
    begin, end = utc_time(content.begin_us), utc_time(content.end_us)
    last = f"{end:%H:%M:%S}" if end.date() == begin.date() else f"{end:%Y-%m-%d %H:%M:%S}"
    length = formatting.duration((content.end_us - content.begin_us) / 1e6)
    return f"{begin:%Y-%m-%d %H:%M:%S} to {last} UTC, {length}"


def _events(content: Content) -> tuple[list[dict[str, str]], str]:
    """The listed events, and a note on those left out: first routine ones, then the middle."""
    shown, note = content.events, ""
    routine = [one for one in shown if one.routine]
    if len(routine) > MOST_ROUTINE:
        shown = [one for one in shown if not one.routine]
        note = (
            f"{formatting.plural(len(routine), 'event')} of checkpoints and evaluations not"
            " listed. "
        )
    if (left_out := len(shown) - MOST_EVENTS) > 0:
        shown = [*shown[: MOST_EVENTS // 2], *shown[-MOST_EVENTS // 2 :]]
        note += f"{formatting.plural(left_out, 'event')} in the middle not listed."
    begin = content.begin_us if content.begin_us is not None else 0
    return [_row(one, begin) for one in shown], note


def _row(one: EventText, begin_us: int) -> dict[str, str]:
    """An event on the page: the time since the run began, and the time itself."""
    row = {
        "level": one.level,
        "step": "" if one.step is None else f"step {one.step:,}",
        "text": one.text,
    }
    if one.time_us is None:
        return {**row, "since": "", "iso": ""}
    hours, rest = divmod(max(0, one.time_us - begin_us) // 1_000_000, 3600)
    iso = utc_time(one.time_us).isoformat().replace("+00:00", "Z")
    return {**row, "since": f"+{hours}:{rest // 60:02}:{rest % 60:02}", "iso": iso}
