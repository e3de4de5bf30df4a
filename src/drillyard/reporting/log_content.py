"""The content of a report from the logs of any framework: what `drillyard metrics` measured, as curves and figures.

All figures are those of `measure`; this only says them in the report's words. What a log does not tell (and no flag
did) is in the report's list of what is missing, with the flag that would give it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any, Final

import numpy as np

from drillyard import formatting
from drillyard.measurement.formats import format_title
from drillyard.measurement.parsed_log import NONFINITE, SKIPPED, Mark, ParsedLog
from drillyard.measurement.run_result import RunResult
from drillyard.measurement.step_times import last_rows
from drillyard.reporting.content import COUNTS, Content, Curves, Floats, Point, Table, Tile
from drillyard.reporting.event_text import EventText, Level, evaluation_figures, one_line
from drillyard.telemetry.console import count, flatten

_SAID: Final[dict[str, tuple[Level, str]]] = {
    "run_start": ("note", "The run was started"),
    "round_start": ("note", "The ranks began"),
    "resume": ("warning", "Went on from a checkpoint"),
    "checkpoint": ("good", "Checkpoint complete"),
    "checkpoint_end": ("good", "Checkpoint saved"),
    "evaluation": ("good", "Evaluation"),
    "failure": ("failure", "Failure"),
    "restart": ("warning", "A new round of ranks was started"),
    "waiting": ("note", "Waiting"),
    "end": ("note", "The run ended"),
}
"""What marks say to people; begin and end of pauses are in the goodput bar."""
_QUOTED: Final = frozenset({"failure", "restart", "waiting", "end", "resume"})
_BASIS: Final = {
    "windows": "means over {0} steps each",
    "time stamps": "from the lines' time stamps",
    "progress clock": "from the progress bar's clock",
    "moving averages": "moving averages, as the log prints no others",
    "whole run": "the mean of the whole run",
}


def measured_content(result: RunResult) -> Content:
    """The content of a report on a measured run."""
    log, account = result.log, result.goodput
    return Content(
        title=PurePath(result.name).name or result.name,
        source=", ".join(source.name for source in log.sources if source.used),
        subtitle=_subtitle(result),
        status=format_title(log.format, "unknown format"),
        status_level="note",
        device="GPU",
        begin_us=log.clock.first_time_us,
        end_us=log.clock.last_time_us,
        curves=_curves(result),
        tiles=list(_tiles(result)),
        mfu_note=_mfu_note(result),
        goodput=account.seconds() if account is not None and account.wall_microseconds else {},
        goodput_notes=[f"The clock stepped back {formatting.plural(account.clock_steps_back, 'time')}."]
        if account is not None and account.clock_steps_back
        else [],
        resumed=_resumed(log),
        evaluations=_evaluations(log.marks),
        happenings=list(_happenings(log.marks)),
        checkpoints=_checkpoints(result),
        environment=list(_environment(result)),
        missing=_missing(result),
        warnings=list(result.warnings),
    )


def _curves(result: RunResult) -> Curves:
    """The rows that led to the model. Rates are those of each step under the named formulas, else as printed."""
    log, speed, timing = result.log, result.speed, result.timing
    steps = log.steps
    rows = last_rows(steps)
    seconds = np.full(len(steps), np.nan)
    warm_up = np.zeros(len(steps), dtype=bool)
    if timing.all is not None:
        seconds[timing.all.rows] = timing.all.seconds
        warm_up[timing.all.rows] = True
        if timing.kept is not None:
            warm_up[timing.kept.rows] = False
    with np.errstate(divide="ignore", invalid="ignore"):
        rate: Floats = np.asarray(steps.printed_tokens_per_second_per_gpu, dtype=np.float64)
        if speed.tokens_per_step_per_gpu is not None and np.isfinite(seconds).any():
            rate = speed.tokens_per_step_per_gpu / seconds
        tflops: Floats = np.asarray(steps.printed_tflops_per_gpu, dtype=np.float64)
        if speed.flops_per_token is not None:
            tflops = rate * speed.flops_per_token / 1e12
        mfu: Floats = np.asarray(steps.printed_mfu, dtype=np.float64)
        if speed.mfu is not None and speed.peak_flops:
            mfu = tflops * 1e12 / speed.peak_flops
    return Curves(
        step=steps.step[rows],
        loss=steps.loss[rows],
        step_seconds=seconds[rows],
        data_seconds=np.full(len(rows), np.nan),
        tokens_per_second_per_gpu=rate[rows],
        tflops_per_gpu=tflops[rows],
        mfu=mfu[rows],
        memory_gib=np.asarray(steps.memory_gib, dtype=np.float64)[rows],
        learning_rate=steps.learning_rate[rows],
        grad_norm=steps.grad_norm[rows],
        warm_up=warm_up[rows],
        finite=(steps.flags[rows] & (SKIPPED | NONFINITE)) == 0,
        window_steps=max(1, timing.times.window_steps),
    )


def _subtitle(result: RunResult) -> str:
    speed, parts = result.speed, []
    if result.log.facts.model:
        parts.append(result.log.facts.model)
    if speed.parameters:
        parts.append(f"{count(speed.parameters)} parameters")
    if speed.num_gpus:
        parts.append(
            formatting.plural(speed.num_gpus, "GPU") + (f" ({speed.accelerator})" if speed.accelerator else "")
        )
    if speed.precision_from != "default":
        parts.append(speed.precision)
    return " · ".join(parts)


def _tiles(result: RunResult) -> Iterator[Tile]:
    log, speed, times, account = result.log, result.speed, result.timing.times, result.goodput
    steps = log.steps.step
    total = f"of {log.facts.total_steps:,}" if log.facts.total_steps else ""
    yield Tile("Last step", f"{int(steps.max()):,}" if len(steps) else "0", total)
    losses = result.losses
    if losses.last is not None and losses.lowest is not None:
        note = f"first {formatting.number(losses.first or 0.0)}, lowest {formatting.number(losses.lowest)}"
        yield Tile("Last loss", formatting.number(losses.last), f"{note} at step {losses.lowest_step:,}")
    if times.typical is not None:
        what = "mean" if times.p50 is None else "median"
        p95 = "" if times.p95 is None else f"; p95 {formatting.duration(times.p95)}"
        basis = _BASIS.get(times.basis or "", "").format(times.window_steps)
        rounding = f"; printed to +-{times.relative_precision:.0%}" if times.relative_precision > 0.01 else ""
        yield Tile(
            "Step time", formatting.duration(times.typical), what + p95 + (f"; {basis}" if basis else "") + rounding
        )
    if speed.tokens_per_second_per_gpu is not None:
        rate, gpus = speed.tokens_per_second_per_gpu, speed.num_gpus
        note = f"{formatting.number(rate * gpus)} on {formatting.plural(gpus, 'GPU')}" if gpus else ""
        yield Tile("Tokens/s per GPU", formatting.number(rate), note)
    if speed.mfu is not None and speed.peak_flops:
        peak = f"of {formatting.number(speed.peak_flops / 1e12)} TFLOP/s {speed.precision}, {speed.formula}"
        yield Tile("MFU", formatting.percent(speed.mfu), peak)
    elif speed.tflops_per_gpu is not None:
        yield Tile("TFLOP/s per GPU", formatting.number(speed.tflops_per_gpu), speed.formula or "")
    if account is not None and account.goodput is not None:
        wall = formatting.duration(account.wall_microseconds / 1e6)
        yield Tile("Goodput", formatting.percent(account.goodput), f"of {wall} wall time was productive")
    if len(log.attempts) > 1:
        redone = int(np.count_nonzero(log.steps.again))
        yield Tile("Restarts", str(len(log.attempts) - 1), f"{formatting.plural(redone, 'logged step')} done again")
    yield from _cost(result)


def _cost(result: RunResult) -> Iterator[Tile]:
    cost = result.cost
    if cost.usd_per_gpu_hour is None:
        return
    price = f"{formatting.dollars(cost.usd_per_gpu_hour)} per GPU-hour"
    million = f"{formatting.dollars(cost.per_million_tokens)} per million tokens" if cost.per_million_tokens else ""
    if cost.so_far is not None:
        yield Tile("Cost", formatting.dollars(cost.so_far), "; ".join(part for part in (million, price) if part))
    elif cost.per_step is not None:
        yield Tile(
            "Cost of a step", formatting.dollars(cost.per_step), "; ".join(part for part in (million, price) if part)
        )


def _mfu_note(result: RunResult) -> str:
    speed = result.speed
    if speed.formula is None:
        return "As printed by the framework" if speed.printed_tflops_per_gpu or speed.printed_mfu else ""
    note = f"FLOPs by formula {speed.formula}"
    if speed.peak_flops:
        peak = f"{formatting.number(speed.peak_flops / 1e12)} TFLOP/s ({speed.accelerator}, {speed.precision})"
        return f"{note}; peak {peak}"
    return f"{note}; no MFU: no peak is known"


def _resumed(log: ParsedLog) -> list[int]:
    """The step before the first one of each later start."""
    starts = [log.steps.step[log.steps.attempt == attempt.number] for attempt in log.attempts[1:]]
    return [max(0, int(steps.min()) - 1) for steps in starts if len(steps)]


def _evaluations(marks: list[Mark]) -> dict[str, list[Point]]:
    figures: dict[str, dict[int, float]] = {}
    for mark in marks:
        if mark.kind == "evaluation":
            for name, value in _results(mark).items():
                if name.rpartition(".")[2] not in COUNTS:
                    figures.setdefault(name, {})[mark.step or 0] = value
    return {name: [Point(step, values[step]) for step in sorted(values)] for name, values in figures.items()}


def _results(mark: Mark) -> dict[str, float]:
    return flatten(dict(mark.values))


def _happenings(marks: list[Mark]) -> Iterator[EventText]:
    for mark in marks:
        if mark.kind not in _SAID:
            continue
        level, text = _SAID[mark.kind]
        if mark.kind == "evaluation" and mark.values:
            text = "Evaluation: " + ", ".join(evaluation_figures(mark.values))
        elif mark.seconds is not None:
            text += f" in {formatting.duration(mark.seconds)}"
        elif mark.kind in _QUOTED and mark.text:
            text += f": {mark.text}"
        yield EventText(mark.time_us, mark.kind.removesuffix("_end"), level, one_line(text), mark.step)


def _checkpoints(result: RunResult) -> Table | None:
    waits = [wait.seconds for wait in result.waits if wait.what == "checkpoint" and wait.seconds is not None]
    rows: list[tuple[str, ...]] = []
    for label, values in (("Training waited", waits), ("Until on disk", list(result.written_seconds))):
        if values:
            rows.append((f"{label}, times", f"{len(values):,}"))
            median, longest = formatting.duration(statistics.median(values)), formatting.duration(max(values))
            rows.append((f"{label}, median", f"{median} (most {longest})"))
    return Table(("Checkpoints", "Value"), rows) if rows else None


def _environment(result: RunResult) -> Iterator[tuple[str, str]]:
    """What the figures rest on: the files, and the facts that they or the flags gave."""
    for source in result.log.sources:
        what = format_title(source.format, "nothing recognised") if source.used else f"not used: {source.note}"
        yield source.name, f"{what}; {formatting.plural(source.lines, 'line')}"
    speed = result.speed
    facts: list[tuple[str, Any]] = [
        ("Tokens per step", speed.tokens_per_step and f"{speed.tokens_per_step:,.0f}"),
        ("Sequence length", speed.sequence_length),
        ("Tokenizer", result.log.facts.tokenizer),
        ("Accelerator", speed.accelerator),
    ]
    yield from ((label, str(value)) for label, value in facts if value)


def _missing(result: RunResult) -> list[str]:
    """Each reason once, with the figures that it concerns and the flags that would give them."""
    by_reason: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for missing in result.missing:
        by_reason.setdefault((missing.reason, missing.flags), []).append(missing.field.replace("_", " "))
    return [
        f"Missing: {', '.join(fields)}: {reason}" + (f"; {' or '.join(flags)} gives it." if flags else ".")
        for (reason, flags), fields in by_reason.items()
    ]
