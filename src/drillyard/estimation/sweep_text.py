"""A sweep as text: the table, its Pareto front as a plot in characters, and the same plot as SVG.

A small sweep is shown whole, in the order of its axes; of a large one only the Pareto front, the
fastest point first, with the number of all. Impossible combinations are counted by their reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from drillyard.errors import UserError
from drillyard.estimation.efficiency import BANDS
from drillyard.estimation.estimate_text import STYLES
from drillyard.estimation.plot import Dot, Plot, svg_plot, terminal_plot
from drillyard.estimation.sweep import SweepEstimate, SweepResult
from drillyard.formatting import (
    rounded_count,
    rounded_dollars,
    rounded_duration,
    rounded_percent,
    three_digits,
)
from drillyard.safe_files import write_output

MOST_ROWS = 40
MOST_REASONS = 5


def sweep_text(swept: SweepResult, run: str) -> RenderableType:
    """The table, the plot, and the reasons of impossible combinations."""
    possible = [point for point in swept.points if point.estimate is not None]
    shown = possible if len(possible) <= MOST_ROWS else swept.front
    parts: list[RenderableType] = [Text(_heading(swept, run), style="bold"), Text()]
    if shown:
        parts += [_table(swept, shown), Text()]
        parts += [
            Text(
                "GiB and tokens/s: per GPU; GiB: higher end, all else: middle of the range; *:"
                " Pareto front"
            )
        ]
    parts += [Text(line) for line in _on_classes(possible)]
    if any(point.unverified for point in possible):
        parts += [
            Text(
                "some of these rest on values without a primary source; --explain of one run names"
                " them"
            )
        ]
    if len(shown) < len(possible):
        fitting = sum(
            point.estimate.verdict == "fits" for point in possible if point.estimate is not None
        )
        parts += [
            Text(
                f"{len(shown)} of {len(possible)} runs are shown, the Pareto front; {fitting} fit;"
                " --json has all"
            )
        ]
    parts += [Text(line) for line in _refusals(swept)]
    if len(_dots(swept)) > 1:
        parts += [Text(), Text(terminal_plot(plot_of(swept, run)))]
    return Group(*parts)


def _on_classes(possible: list[SweepEstimate]) -> Iterator[str]:
    """A caution where points are drawn from different measured runs, whose trainers differ too."""
    timed = [
        point.estimate.step_time
        for point in possible
        if point.estimate is not None and point.estimate.step_time
    ]
    classes = dict.fromkeys(str(one.run_class) for one in timed if one.rows)
    if len(classes) > 1 and not any(one.basis == "calibration" for one in timed):
        share = round(100 * (BANDS["class"] - 1))
        yield f"speeds rest on other measured runs for each of: {'; '.join(classes)}"
        yield (
            f"between these, what differs by less than {share} % may be the trainers of those runs,"
            " not the setting"
        )


def plot_of(swept: SweepResult, run: str) -> Plot:
    """Cost against time of all that fits, or may; the front marked. UserError where nothing is to
    be drawn."""
    dots = _dots(swept)
    if not dots:
        raise UserError(
            "nothing of the sweep fits and has a time and a cost, so there is nothing to draw"
        )
    work = f"{rounded_count(swept.tokens)} tokens"
    y_title = "cost in $" if swept.cost_unit == "$" else "GPU-hours"
    return Plot(f"{run}: cost against time of {work}", f"hours for {work}", y_title, dots)


def write_svg(plot: Plot, path: Path, *, overwrite: bool = False) -> None:
    """Write `plot` to `path`. Without `overwrite` only an earlier, unedited plot is replaced, else
    UserError."""
    try:
        write_output(path, svg_plot(plot).encode(), overwrite=overwrite)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None


def _dots(swept: SweepResult) -> list[Dot]:
    """List the points that fit, or may fit, and have a time and a cost."""
    return [
        Dot(point.hours, point.cost, _label(swept, point), point.on_front)
        for point in swept.points
        if point.hours and point.cost and point.estimate is not None
        if point.estimate.verdict != "does not fit"
    ]


def _heading(swept: SweepResult, run: str) -> str:
    failures = "with saves and failures" if swept.with_failures else "without saves and failures"
    return (
        f"{run}: {len(swept.points):,} combinations, each for {rounded_count(swept.tokens)} tokens,"
        f" {failures}"
    )


def _table(swept: SweepResult, shown: list[SweepEstimate]) -> Table:
    """A line for each point: the higher end of its memory, the middle of every other range."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    for axis in swept.axes:
        table.add_column(axis.key.replace("_", "\n"), justify="right", no_wrap=True)
    cost = "cost" if swept.cost_unit == "$" else "GPU-hours"
    if swept.decides_recomputation:
        table.add_column("recom-\nputed", no_wrap=True)
    for heading in ("GPUs", "GiB", "", "step", "tokens/s", "MFU", "time", cost, ""):
        table.add_column(heading, justify="right", no_wrap=True)
    for point in shown:
        table.add_row(
            *(Text(str(point.values[axis.key])) for axis in swept.axes), *_cells(swept, point)
        )
    return table


def _cells(swept: SweepResult, point: SweepEstimate) -> Iterator[RenderableType]:
    one = point.estimate
    assert one is not None
    timed, memory = one.step_time, one.memory
    if swept.decides_recomputation:
        yield one.setup.activation_checkpointing
    yield f"{one.request.target.num_gpus:,}"
    yield "-" if memory is None else three_digits(memory.total.high.value)
    yield Text(one.verdict, style=STYLES[one.verdict].removeprefix("bold "))
    bound, least = ("<", ">") if point.is_bound else ("", "")
    if timed is None:
        yield from ("-", "-", "-")
    else:
        yield f"{least}{rounded_duration(timed.seconds.middle)}"
        yield f"{bound}{three_digits(timed.tokens_per_second_per_gpu.middle)}"
        yield "-" if timed.mfu is None else f"{bound}{rounded_percent(timed.mfu.middle)}"
    yield "-" if point.hours is None else f"{least}{rounded_duration(point.hours * 3600)}"
    write = rounded_dollars if swept.cost_unit == "$" else three_digits
    yield "-" if point.cost is None else f"{least}{write(point.cost)}"
    yield Text("*", style="bold") if point.on_front else ""


def _refusals(swept: SweepResult) -> Iterator[str]:
    """Count the combinations that cannot be, and those that the trainer refuses, by reason; the
    commonest first."""
    refused = Counter(
        reason
        for point in swept.points
        if point.estimate is not None
        for reason in point.estimate.refusals
    )
    for reason, times in refused.most_common(MOST_REASONS):
        yield f"{times:,} are refused by `drillyard train`: {reason}"
    reasons = Counter(point.refusal for point in swept.points if point.estimate is None)
    for reason, times in reasons.most_common(MOST_REASONS):
        yield f"{times:,} cannot be: {reason}"
    if len(reasons) > MOST_REASONS:
        rest = sum(times for _, times in reasons.most_common()[MOST_REASONS:])
        yield f"{rest:,} cannot be for {len(reasons) - MOST_REASONS} other reasons; --json has all"


def _label(swept: SweepResult, point: SweepEstimate) -> str:
    values = ", ".join(f"{key} {value}" for key, value in point.values.items())
    assert point.hours is not None and point.cost is not None
    cost = (
        rounded_dollars(point.cost)
        if swept.cost_unit == "$"
        else f"{three_digits(point.cost)} GPU-hours"
    )
    return f"{values}: {rounded_duration(point.hours * 3600)}, {cost}"
