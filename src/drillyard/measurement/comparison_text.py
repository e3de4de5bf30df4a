"""A comparison for people: figures by run, what is faster and by how much, losses where all runs
have got to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from drillyard.estimation.confidence import CONFIDENCE
from drillyard.formatting import count, significant
from drillyard.measurement.comparison import (
    AXES,
    Axis,
    Comparison,
    Interval,
    RunDifference,
    steps_done,
)
from drillyard.measurement.gpu_counts import gpus_text
from drillyard.measurement.run_result import RunResult

_FIGURES: Final[dict[str, Callable[[RunResult], str | None]]] = {
    "Steps": lambda run: None if (done := steps_done(run)) is None else f"{done:,}",
    "Step time (s)": lambda run: _number(run.timing.times.typical),
    "  p95 (s)": lambda run: _number(run.timing.times.p95),
    "Tokens/s/GPU": lambda run: _number(run.speed.tokens_per_second_per_gpu),
    "TFLOP/s/GPU": lambda run: _number(run.speed.tflops_per_gpu),
    "MFU": lambda run: None if run.speed.mfu is None else f"{run.speed.mfu:.2%}",
    "  by formula": lambda run: run.speed.formula,
    "  of peak": lambda run: (
        None
        if run.speed.peak_flops is None
        else f"{run.speed.peak_flops / 1e12:g} ({run.speed.precision})"
    ),
    "GPUs": lambda run: gpus_text(run.speed.num_gpus_changes) or None,
    "$ a step": lambda run: _number(run.cost.per_step),
    "$ per million tokens": lambda run: _number(run.cost.per_million_tokens),
    "Goodput": lambda run: (
        None if run.goodput is None or run.goodput.goodput is None else f"{run.goodput.goodput:.1%}"
    ),
    "Last loss": lambda run: _number(run.losses.last),
}
_AXIS_NAMES: Final[dict[Axis, str]] = {
    "step": "step",
    "tokens": "tokens",
    "seconds": "time",
    "dollars": "dollars",
}


def render_comparison(comparison: Comparison) -> RenderableType:
    """The whole comparison; whether the runs can be compared comes first."""
    parts: list[RenderableType] = []
    if comparison.differ:
        parts.append(Text("Not comparable: these differ", style="bold red"))
        parts += [Text(f"  - {reason}") for reason in comparison.differ]
        parts.append("")
    parts += [_figures(comparison), ""]
    for against in comparison.against:
        parts += [Text(line) for line in _words(comparison, against)]
    if comparison.points:
        parts += ["", _losses(comparison)]
    parts += [
        Text(f"Not by {_AXIS_NAMES[axis]}: {why}") for axis, why in comparison.unknown_axes.items()
    ]
    if comparison.not_stated:
        parts.append(
            Text(f"Not stated by every log, so not checked: {', '.join(comparison.not_stated)}")
        )
    parts.append(Text(f"Intervals: {CONFIDENCE:.0%}, Student's t on blocks of neighbouring steps."))
    return Group(*parts)


def _number(value: float | None) -> str | None:
    return None if value is None else significant(value)


def _table(heading: str, comparison: Comparison) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(heading)
    for name in comparison.names:
        table.add_column(Text(name), justify="right", overflow="fold")
    return table


def _figures(comparison: Comparison) -> RenderableType:
    table = _table("", comparison)
    for label, figure in _FIGURES.items():
        values = [figure(run) for run in comparison.runs]
        if any(value is not None for value in values):
            table.add_row(label, *(Text(value or "-") for value in values))
    return table


def _words(comparison: Comparison, against: RunDifference) -> Iterator[str]:
    """Describe one run against the first, in sentences."""
    base = comparison.names[0]
    if against.faster is not None:
        yield _speed_words(base, against, against.faster)
    for axis in AXES:
        if (interval := against.loss.get(axis)) is not None:
            yield _loss_words(base, against.run, axis, interval)


def _speed_words(base: str, against: RunDifference, faster: Interval) -> str:
    what = "tokens/s/GPU" if against.of == "tokens_per_second_per_gpu" else "steps/s"
    more = f"{abs(faster.value):.2%} {'more' if faster.value >= 0 else 'fewer'} {what} than {base}"
    if faster.value >= 1:
        more = f"{1 + faster.value:.4g} times the {what} of {base}"
    if faster.low is None or faster.high is None:
        return f"{against.run}: {more} (too few steps to say how certain that is)"
    interval = f"({faster.low:+.2%} to {faster.high:+.2%})"
    if not faster.certain:
        return f"{against.run}: as fast as {base}, as far as these logs can tell {interval}"
    return f"{against.run}: {more} {interval}"


def _loss_words(base: str, run: str, axis: Axis, loss: Interval) -> str:
    at = f"at equal {_AXIS_NAMES[axis]}"
    if loss.low is None or loss.high is None:
        return (
            f"{run}: loss {loss.value:+.4g} against {base} {at} (too few points to say how certain"
            " that is)"
        )
    if loss.low == loss.high == 0:
        return f"{run}: exactly the same loss as {base} {at}"
    interval = f"({loss.low:+.4g} to {loss.high:+.4g})"
    if not loss.certain:
        return f"{run}: the same loss as {base} {at}, as far as these logs can tell {interval}"
    return (
        f"{run}: a loss {'higher' if loss.value > 0 else 'lower'} by {abs(loss.value):.4g} than"
        f" {base} {at} {interval}"
    )


def _losses(comparison: Comparison) -> RenderableType:
    table = _table("Loss at", comparison)
    for axis in AXES:
        for point in comparison.points:
            if point.axis == axis:
                table.add_row(
                    _place(axis, point.at),
                    *("-" if loss is None else f"{loss:.4g}" for loss in point.losses),
                )
    return table


def _place(axis: Axis, at: float) -> str:
    return {
        "step": f"step {at:,.0f}",
        "tokens": f"{count(at)} tokens",
        "seconds": f"{significant(at)} s",
        "dollars": f"${significant(at)}",
    }[axis]
