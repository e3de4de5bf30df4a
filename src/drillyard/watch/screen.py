"""The live screen for a terminal of 80 x 24 or more, as a pure function of the run and the time.

screen(run, now_us, width=80, height=24)     # a rich renderable of exactly that size
text_lines(run, now_us)                      # the same figures as plain lines
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from rich.align import Align
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from drillyard import formatting
from drillyard.reporting.event_text import EventText, figure_text
from drillyard.telemetry.console import ACCURACIES
from drillyard.telemetry.events import utc_time
from drillyard.watch.live_run import LiveRun

MOST_HEIGHT: Final = 48
FIGURE_ROWS: Final = 4
STYLES: Final = {"good": "green", "note": "dim", "warning": "yellow", "failure": "bold red"}
PHASE_STYLES: Final = {
    "completed": "bold green",
    "running": "bold green",
    "interrupted": "bold yellow",
    "stopping": "bold yellow",
    "failed": "bold red",
    "restarting": "bold yellow",
}


def screen(
    run: LiveRun, now_us: int, *, width: int, height: int, hint: str = "", unicode: bool = True
) -> RenderableType:
    """The run in `height` (at least 20) lines of `width` (at least 60) characters, `hint` in the
    last one."""
    height = min(max(height, 20), MOST_HEIGHT)
    room = height - 3 - FIGURE_ROWS - 1
    loss_height = max(6, room // 2 + room % 2)
    return Group(
        _header(run, now_us),
        _progress(run, now_us),
        _loss(run, width, loss_height, unicode),
        Text(""),
        _figures(run, now_us),
        _events(run, room - loss_height),
        Text(hint, style="dim", no_wrap=True, overflow="ellipsis"),
    )


def text_lines(run: LiveRun, now_us: int) -> list[str]:
    """The figures of the screen as lines of `label  value`."""
    rows = [("Run", f"{run.name}: {run.phase}, {_steps(run)}"), *figures(run, now_us)]
    width = max(len(label) for label, _ in rows) + 2
    return [f"{label:<{width}}{value}" for label, value in rows]


def figures(run: LiveRun, now_us: int) -> list[tuple[str, str]]:
    """Label and value of the eight figures; a dash for an unknown one."""
    return [
        ("Step time", _step_time(run)),
        ("Tokens/s", _tokens_per_second(run)),
        _mfu(run),
        (
            "Memory",
            (
                f"{formatting.number(run.memory_gib)} GiB per {run.device}"
                if run.memory_gib is not None
                else "-"
            ),
        ),
        ("Goodput", _goodput(run)),
        ("Cost", _cost(run, now_us)),
        ("Held out", _held_out(run)),
        ("Restarts", f"{run.restarts} ({formatting.plural(run.failures, 'failure')})"),
    ]


def progress_line(run: LiveRun, now_us: int) -> str:
    """One line for logs: `step 40 of 100 | loss 3.078 | 37.9 ms | 3,375 tokens/s/GPU | 2:05 min
    left`."""
    parts = [_steps(run)]
    if run.losses:
        parts.append(f"loss {formatting.number(run.losses[-1])}")
    seconds, rate = run.median("step_seconds"), run.median("tokens_per_second_per_gpu")
    if seconds is not None and rate is not None:
        parts += [
            f"{formatting.duration(seconds)} a step",
            f"{formatting.number(rate)} tokens/s/{run.device}",
        ]
    if (mfu := run.median("mfu")) is not None:
        parts.append(f"MFU {formatting.percent(mfu)}")
    if (dollars := run.dollars(now_us)) is not None:
        parts.append(formatting.dollars(dollars))
    if (left := run.seconds_left(now_us)) is not None:
        parts.append(f"{formatting.duration(left)} left")
    return " | ".join(parts)


def event_line(one: EventText) -> str:
    """`2026-01-31 12:00:00 step 40: Evaluation: rows: loss 3.036`, in UTC."""
    step = "" if one.step is None else f"step {one.step:,}: "
    time = "" if one.time_us is None else f"{utc_time(one.time_us):%Y-%m-%d %H:%M:%S} "
    return f"{time}{step}{one.text}"


def _header(run: LiveRun, now_us: int) -> RenderableType:
    devices = formatting.plural(run.num_gpus, run.device) if run.num_gpus else ""
    hardware = f"{devices} ({run.accelerator})" if run.accelerator else devices
    name = Text.assemble(
        (run.name, "bold"), "  ", (run.phase, PHASE_STYLES.get(run.phase, "bold cyan"))
    )
    if (silent := run.silent_seconds(now_us)) is not None:
        name.append(f"  silent for {formatting.duration(silent)}", style="bold yellow")
    wall = run.wall_seconds(now_us)
    right = "  ".join(
        part for part in (hardware, formatting.duration(wall) if wall is not None else "") if part
    )
    left_column = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    row = Table.grid(left_column, Column(no_wrap=True, justify="right"), expand=True)
    row.add_row(name, Text(right, style="dim"))
    return row


def _progress(run: LiveRun, now_us: int) -> RenderableType:
    parts = [_steps(run)]
    if run.total_steps:
        parts.append(formatting.percent(min(1.0, run.step / run.total_steps)))
    if (left := run.seconds_left(now_us)) is not None:
        parts.append(f"{formatting.duration(left)} left, until {_clock(now_us, left)}")
    row = Table.grid(
        Column(ratio=1), Column(no_wrap=True, justify="right"), expand=True, padding=(0, 2, 0, 0)
    )
    bar = ProgressBar(
        total=run.total_steps or 1, completed=run.step if run.total_steps else 0, width=None
    )
    row.add_row(bar, Text("  ".join(parts)))
    return row


def _loss(run: LiveRun, width: int, height: int, unicode: bool) -> RenderableType:
    """The loss over all logged steps, with its range at the left."""
    finite = [loss for loss in run.losses if math.isfinite(loss)]
    if not finite:
        waiting = Align.center(Text("no step yet", style="dim"), vertical="middle")
        return Panel(waiting, title="loss", title_align="left", height=height, border_style="dim")
    last, low = run.losses[-1], min(finite)
    labels = [formatting.number(max(finite)), formatting.number(low)]
    margin = max(map(len, labels)) + 1
    inner = height - 2
    lines = sparkline(run.losses, max(10, width - 4 - margin), inner, unicode=unicode)
    body = Text(no_wrap=True)
    for number, line in enumerate(lines):
        label = labels[0] if number == 0 else labels[1] if number == inner - 1 else ""
        body.append(f"{label:>{margin - 1}} ", style="dim").append(line, style="cyan")
        body.append("\n" if number < inner - 1 else "")
    lowest = run.steps[run.losses.index(low)]
    return Panel(
        body,
        title=Text.assemble("loss ", (formatting.number(last), "bold")),
        title_align="left",
        subtitle=Text(f"lowest {formatting.number(low)} at step {lowest:,}", style="dim"),
        subtitle_align="right",
        height=height,
        border_style="dim",
    )


def _figures(run: LiveRun, now_us: int) -> RenderableType:
    rows = figures(run, now_us)
    grid = Table.grid(expand=True, padding=(0, 1, 0, 0))
    for _ in range(2):
        grid.add_column(no_wrap=True, style="dim")
        grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for left, right in zip(rows[:FIGURE_ROWS], rows[FIGURE_ROWS:], strict=True):
        grid.add_row(*(Text(cell) for cell in (*left, *right)))
    return grid


def _events(run: LiveRun, height: int) -> RenderableType:
    """The last events, the newest at the bottom."""
    shown = list(run.events)[-(height - 2) :]
    time_column, step_column = Column(no_wrap=True, style="dim"), Column(no_wrap=True, style="dim")
    text_column = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    grid = Table.grid(time_column, step_column, text_column, expand=True, padding=(0, 1, 0, 0))
    for one in shown:
        step = "" if one.step is None else f"step {one.step:,}"
        time = "" if one.time_us is None else f"{utc_time(one.time_us):%H:%M:%S}"
        grid.add_row(time, step, Text(one.text, style=STYLES[one.level]))
    return Panel(grid, title="events (UTC)", title_align="left", height=height, border_style="dim")


def _steps(run: LiveRun) -> str:
    return f"step {run.step:,}" + (f" of {run.total_steps:,}" if run.total_steps else "")


def _step_time(run: LiveRun) -> str:
    median, p95 = run.median("step_seconds"), run.percentile_95()
    if median is None:
        return "-"
    return formatting.duration(median) + (
        f" (p95 {formatting.duration(p95)})" if p95 is not None else ""
    )


def _tokens_per_second(run: LiveRun) -> str:
    rate, gpus = run.median("tokens_per_second_per_gpu"), run.gpus_of_speed
    if rate is None or not gpus:
        return "-"
    return f"{formatting.number(rate)} per {run.device}, {formatting.number(rate * gpus)} in all"


def _mfu(run: LiveRun) -> tuple[str, str]:
    """MFU; TFLOP/s where no peak is known."""
    mfu, tflops = run.median("mfu"), run.median("tflops_per_gpu")
    formula = f" ({run.formula})" if run.formula else ""
    if mfu is not None:
        return "MFU", formatting.percent(mfu) + formula
    return (
        "TFLOP/s",
        "-" if tflops is None else f"{formatting.number(tflops)} per {run.device}{formula}",
    )


def _goodput(run: LiveRun) -> str:
    if run.account is None or run.account.goodput is None:
        return "-"
    seconds = run.account.seconds()
    lost = {name: spent for name, spent in seconds.items() if name != "productive" and spent}
    most = max(lost, key=lambda name: lost[name], default=None)
    note = (
        f", {most} {formatting.percent(lost[most] / math.fsum(seconds.values()))}"
        if most is not None
        else ""
    )
    return formatting.percent(run.account.goodput) + note


def _cost(run: LiveRun, now_us: int) -> str:
    dollars = run.dollars(now_us)
    if dollars is None:
        return "- (--price-per-gpu-hour)" if run.price is None else "-"
    per_million = (
        f", {formatting.dollars(dollars / run.tokens * 1e6)}/M tokens" if run.tokens else ""
    )
    return f"{formatting.dollars(dollars)}{per_million}"


def _held_out(run: LiveRun) -> str:
    """The last figure of each kind, an accuracy first."""
    names = sorted(
        run.held_out,
        key=lambda name: (name.rpartition(".")[2] not in ACCURACIES, not name.endswith(".loss")),
    )
    if not names:
        return "-"
    part, _, measure = names[0].rpartition(".")
    step, value = run.held_out[names[0]]
    short = ACCURACIES.get(measure, "").partition(" ")[0]
    written = f"{short} {formatting.percent(value)}" if short else figure_text(measure, value)
    return f"{written}, {part}" if part else f"{written} at step {step:,}"


def _clock(now_us: int, seconds: float) -> str:
    """The local time after that many seconds, with the day if it is not today."""
    end = utc_time(now_us + round(seconds * 1e6)).astimezone()
    same_day = end.date() == utc_time(now_us).astimezone().date()
    return f"{end:%H:%M}" if same_day else f"{end:%d %b %H:%M}"


_BLANK: Final = 0x2800
_DOTS: Final = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The bits of a Braille character by column, from the top."""


def sparkline(
    values: Sequence[float], width: int, height: int, *, unicode: bool = True
) -> list[str]:
    """A curve as `height` lines of `width` characters; blank without finite values.

    Braille characters have two columns and four rows of dots; terminals without Unicode get `*`,
    one per character. Each column shows the mean of its share of the values, joined to its
    neighbour by a vertical stroke.
    """
    dots = _DOTS if unicode else ((1,),)
    columns, rows = width * len(dots), height * len(dots[0])
    cells = [[0] * width for _ in range(height)]
    previous: int | None = None
    for column, level in enumerate(_heights(_means(values, columns), rows)):
        if level is None:
            continue
        start = level if previous is None else previous + (level > previous) - (level < previous)
        for row in range(rows - 1 - max(start, level), rows - min(start, level)):
            cells[row // len(dots[0])][column // len(dots)] |= dots[column % len(dots)][
                row % len(dots[0])
            ]
        previous = level
    return [
        "".join(chr(_BLANK + cell) if unicode else " *"[cell] for cell in line) for line in cells
    ]


def _means(values: Sequence[float], columns: int) -> list[float]:
    """The mean of the finite values of each of `columns` equal shares; fewer values are joined by
    straight lines."""
    if 1 < len(values) < columns:
        places = np.arange(columns) * (len(values) - 1) / (columns - 1)
        between: list[float] = np.interp(places, np.arange(len(values)), values).tolist()
        return between
    means = []
    for column in range(columns):
        start = column * len(values) // columns
        share = values[start : max(start + 1, (column + 1) * len(values) // columns)]
        finite = [value for value in share if math.isfinite(value)]
        means.append(math.fsum(finite) / len(finite) if finite else math.nan)
    return means


def _heights(means: Sequence[float], rows: int) -> list[int | None]:
    finite = [value for value in means if math.isfinite(value)]
    if not finite:
        return [None] * len(means)
    low, high = min(finite), max(finite)
    # Divide first: (rows - 1) / span overflows for a tiny span.
    span = high - low or 1.0
    return [
        round((value - low) / span * (rows - 1)) if math.isfinite(value) else None
        for value in means
    ]
