"""A measured run for people: figures with their conditions, then what is missing and what is
doubtful."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from drillyard.formatting import count, significant
from drillyard.measurement.formats import format_title
from drillyard.measurement.gpu_counts import gpus_text
from drillyard.measurement.log_events import WaitKind
from drillyard.measurement.losses import flagged_steps
from drillyard.measurement.run_result import RunResult
from drillyard.measurement.speed import AS_PRINTED

Row = tuple[str, str]

_BARS: Final = "▁▂▃▄▅▆▇█"
_BAR_WIDTH: Final = 24
_MOST_LINES: Final = 5
_FEWEST_FOR_PERCENTILES: Final = 5
_COLOURS: Final = {
    "productive": "green",
    "startup": "blue",
    "checkpoint": "cyan",
    "evaluation": "cyan",
    "stalled": "yellow",
    "recomputation": "red",
    "restart": "red",
    "waiting": "magenta",
    "unknown": "bright_black",
}


def render_result(result: RunResult) -> RenderableType:
    """The whole result. What is not known has a line with the flag that would give it."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in _rows(result):
        table.add_row(label, Text(value))
    parts: list[RenderableType] = [Text(_heading(result), style="bold"), "", table]
    if result.goodput is not None and result.goodput.wall_microseconds:
        parts += ["", _goodput(result)]
    parts += _list("Not known", _missing(result), "yellow")
    parts += _list("Careful", list(result.warnings), "yellow")
    return Group(*parts)


def _list(title: str, items: list[str], style: str) -> list[RenderableType]:
    if not items:
        return []
    table = Table.grid(padding=(0, 1))
    for item in items:
        table.add_row(" ", "-", Text(item))
    return ["", Text(title, style=style), table]


def _heading(result: RunResult) -> str:
    log = result.log
    one, more = ("line", "lines") if log.numbered_lines else ("logged step", "logged steps")
    steps = f"{len(log.steps):,} {one if len(log.steps) == 1 else more}"
    starts = f", {len(log.attempts)} starts" if len(log.attempts) > 1 else ""
    ranks = f", {len(log.ranks)} ranks" if len(log.ranks) > 1 else ""
    return f"{result.name}: {format_title(log.format, 'no known format')}, {steps}{starts}{ranks}"


def _rows(result: RunResult) -> Iterator[Row]:
    yield from _time_rows(result)
    yield from _speed_rows(result)
    yield from _loss_rows(result)
    yield from _cost_rows(result)
    yield from _wait_rows(result, "checkpoint", "Saves")
    yield from _wait_rows(result, "evaluation", "Evaluations")
    stalls = result.timing.stalls
    for index, stall in enumerate(stalls[:_MOST_LINES]):
        yield (
            f"Stalls ({len(stalls)})" if index == 0 else "",
            f"step {stall.step}: {significant(stall.seconds)} s ({stall.place})",
        )
    for label, steps in (
        ("Skipped", result.losses.skipped),
        ("Not finite", result.losses.nonfinite),
    ):
        for index, (step, place, number) in enumerate(steps[:_MOST_LINES]):
            which = f"step {step}" if number == 1 else f"{number} up to step {step}"
            yield f"{label} ({flagged_steps(steps)})" if index == 0 else "", f"{which} ({place})"
    yield from _source_rows(result)


def _source_rows(result: RunResult) -> Iterator[Row]:
    """List what was read, how much of it was passed over, and the files that were not used, grouped
    by reason."""
    used = [source for source in result.log.sources if source.used]
    lines, passed_over = (
        sum(source.lines for source in used),
        sum(source.lines_passed_over for source in used),
    )
    files = f" in {len(used)} files" if len(used) > 1 else ""
    of = f", {passed_over:,} of them passed over" if passed_over else ""
    yield "Read", f"{lines:,} {'line' if lines == 1 else 'lines'}{files}{of}"
    for source in used:
        if source.unfinished_lines:
            yield "", f"{_short(result, source.name)}: a last line without its end is left out"
        if source.note:
            yield "", f"{_short(result, source.name)}: {source.note}"
    reasons: dict[str, list[str]] = {}
    for source in result.log.sources:
        if not source.used:
            reasons.setdefault(source.note, []).append(_short(result, source.name))
    for reason, names in reasons.items():
        more = f" and {len(names) - _MOST_LINES} more" if len(names) > _MOST_LINES else ""
        yield "", f"not {', '.join(names[:_MOST_LINES])}{more}: {reason}"


def _short(result: RunResult, name: str) -> str:
    """A source's name, without the run directory that the heading names."""
    directory = result.log.run_directory
    return name if directory is None else name.removeprefix(f"{directory}/")


def _time_rows(result: RunResult) -> Iterator[Row]:
    times = result.timing.times
    typical = times.typical
    if typical is None or times.mean is None:
        yield "Step time", "not known"
        return
    what = "median" if times.p50 is not None else "mean"
    precision = (
        f" +-{times.relative_precision:.0%} (as printed)" if times.relative_precision > 0.01 else ""
    )
    yield "Step time", f"{significant(typical)} s {what}{precision}"
    basis = {
        "steps": "",
        "windows": f"means over {times.window_steps} steps each, ",
        "time stamps": "from time stamps, ",
        "progress clock": "from the progress bar's clock, ",
        "moving averages": "moving averages, ",
        "whole run": "the whole run's, ",
    }[times.basis or "steps"]
    if times.basis in ("time stamps", "progress clock") and times.window_steps > 1:
        basis += f"means over {times.window_steps} steps each, "
    asked = result.asked.start_step is not None or result.asked.end_step is not None
    left = (
        f"; {times.left_out:,} left out{'' if asked else ' as warm-up'}" if times.left_out else ""
    )
    if times.on_other_gpus:
        on = "another number" if times.num_gpus is None else f"the last number, {times.num_gpus:,}"
        left = f", on {on}; {times.on_other_gpus:,} on other numbers of GPUs not counted{left}"
    which = (
        f"steps, {times.first_step} to {times.last_step}"
        if times.steps > 1
        else f"step, {times.last_step}"
    )
    yield "", f"{basis}{times.steps:,} {which}{left}"
    if times.p95 is not None and times.p99 is not None and times.steps >= _FEWEST_FOR_PERCENTILES:
        jitter = "" if times.jitter is None else f", jitter {times.jitter:.2%}"
        slow = f", {times.slow_fraction:.1%} over 1.5x the median" if times.slow_fraction else ""
        yield (
            "",
            (
                f"mean {significant(times.mean)}, p95 {significant(times.p95)}, p99"
                f" {significant(times.p99)}{jitter}{slow}"
            ),
        )


def _speed_rows(result: RunResult) -> Iterator[Row]:
    speed = result.speed
    gpus = f" on {gpus_text(speed.num_gpus_changes)} GPUs" if speed.num_gpus_changes else ""
    if speed.tokens_per_second_per_gpu is not None:
        of = f" (tokens by {speed.tokens_from})" if speed.tokens_from != "flags" else ""
        yield "Speed", f"{significant(speed.tokens_per_second_per_gpu)} tokens/s/GPU{gpus}{of}"
    if speed.tflops_per_gpu is not None:
        per_token = (
            ""
            if speed.flops_per_token is None
            else f", {significant(speed.flops_per_token / 1e9)} GFLOP a token"
        )
        model = "" if speed.parameters is None else f" of {count(speed.parameters)} parameters"
        yield (
            "",
            (
                f"{significant(speed.tflops_per_gpu)} TFLOP/s/GPU"
                f" {_by(speed.formula)}{model}{per_token}"
            ),
        )
    if speed.mfu is not None and speed.peak_flops is not None:
        assumed = {"default": " (assumed)", "log": "", "flag": ""}[speed.precision_from]
        peak = (
            f"{speed.peak_flops / 1e12:g} TFLOP/s: {speed.accelerator}, {speed.precision}{assumed}"
        )
        mfu = f"{speed.mfu:.2%}" if speed.mfu >= 0.001 else f"{significant(100 * speed.mfu)}%"
        yield "MFU", f"{mfu} {_by(speed.formula)} (peak {peak})"
    printed = [
        f"{significant(value * scale)}{unit}"
        for value, scale, unit in (
            (speed.printed_tokens_per_second_per_gpu, 1, " tokens/s/GPU"),
            (speed.printed_tflops_per_gpu, 1, " TFLOP/s/GPU"),
            (speed.printed_mfu, 100, "% MFU"),
        )
        if value is not None
    ]
    if printed:
        yield "As printed", ", ".join(printed)


def _by(formula: str | None) -> str:
    return AS_PRINTED if formula == AS_PRINTED else f"by {formula}"


def _loss_rows(result: RunResult) -> Iterator[Row]:
    losses = result.losses
    if losses.first is not None and losses.last is not None and losses.lowest is not None:
        lowest = (
            ""
            if losses.lowest == losses.last
            else f", lowest {losses.lowest:.4g} at step {losses.lowest_step}"
        )
        yield (
            "Loss",
            (
                f"{losses.first:.4g} to {losses.last:.4g}{lowest} "
                f" {sparkline([v for _, v in losses.curve(32)])}"
            ),
        )
    for index, (name, figure) in enumerate(list(result.held_out.items())[:_MOST_LINES]):
        at = "" if figure.last_step is None else f" after step {figure.last_step}"
        best = (
            ""
            if figure.lowest in (None, figure.last)
            else f", lowest {significant(figure.lowest or 0.0)}"
        )
        yield "Held out" if index == 0 else "", f"{name} {significant(figure.last)}{at}{best}"


def sparkline(values: list[float]) -> str:
    """Values as one line of bars, the lowest and the highest at the ends of the scale."""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1))] for value in values)


def _cost_rows(result: RunResult) -> Iterator[Row]:
    cost = result.cost
    parts = [
        f"${significant(value)}{unit}"
        for value, unit in (
            (cost.per_step, " a step"),
            (cost.per_million_tokens, " per million tokens"),
            (cost.so_far, " so far"),
        )
        if value is not None
    ]
    if parts:
        yield "Cost", f"{', '.join(parts)} (${cost.usd_per_gpu_hour:,.4g} per GPU-hour)"


def _wait_rows(result: RunResult, what: WaitKind, label: str) -> Iterator[Row]:
    found = [wait for wait in result.waits if wait.what == what]
    seconds = sorted(wait.seconds for wait in found if wait.seconds is not None)
    if seconds:
        middle = seconds[len(seconds) // 2]
        yield (
            label,
            (
                f"{len(found)}, training waited {significant(middle)} s (median),"
                f" {significant(seconds[-1])} s at most"
            ),
        )
    if what == "checkpoint" and result.written_seconds:
        written = sorted(result.written_seconds)
        yield (
            "" if seconds else label,
            f"{len(written)} written in {significant(written[len(written) // 2])} s (median)",
        )


def _goodput(result: RunResult) -> RenderableType:
    account = result.goodput
    assert account is not None
    wall = account.wall_microseconds
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    for _ in range(2):
        table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    seconds = wall / 1e6
    length = (
        f"{timedelta(seconds=round(seconds))} (h:mm:ss)"
        if seconds >= 100
        else f"{significant(seconds)} s"
    )
    restarts = f"{account.restarts} restart{'' if account.restarts == 1 else 's'}"
    table.add_row("Goodput", f"{account.goodput or 0:.1%}", "", f"of {length}, {restarts}")
    for name, microseconds in sorted(account.times.items(), key=lambda item: -item[1]):
        if microseconds:
            table.add_row(
                Text(f"  {name}", style="not bold"),
                f"{microseconds / wall:.1%}",
                f"{microseconds / 1e6:,.{1 if wall > 1e8 else 3}f} s",
                Text(
                    "█" * max(round(_BAR_WIDTH * microseconds / wall), 0) or "▏",
                    style=_COLOURS[name],
                ),
            )
    return table


def _missing(result: RunResult) -> list[str]:
    """The figures that are not known, those with one reason together."""
    together: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name, flags, reason in result.missing:
        together.setdefault((reason, flags), []).append(name)
    return [
        f"{', '.join(dict.fromkeys(names))}: {reason}"
        + (f"; give {_either(flags)}" if flags else "")
        for (reason, flags), names in together.items()
    ]


def _either(flags: tuple[str, ...]) -> str:
    """One of the flags is enough, but a batch in sequences needs their length as well."""
    length = "--sequence-length"
    if length in flags and len(flags) > 1:
        return f"{' or '.join(flag for flag in flags if flag != length)}, and {length}"
    return " or ".join(flags)
