"""The content of a report from a measured run: `drillyard metrics`' figures as curves, tiles and
tables.

Nothing is computed twice: figures are those of `measure`, of a run directory those that the run
logged, as in summary.json. What is unknown is listed as missing, with the flag that provides it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any, Final, NamedTuple

import numpy as np

from drillyard import formatting
from drillyard.formatting import count, duration, number, plural
from drillyard.measurement.formats import format_title
from drillyard.measurement.gpu_counts import gpus_text
from drillyard.measurement.parsed_log import NONFINITE, SKIPPED, LogEvent, ParsedLog
from drillyard.measurement.run_result import RunResult
from drillyard.measurement.step_times import last_rows, total_tokens
from drillyard.reporting.content import COUNTS, Content, Curves, Floats, Point, Table, Tile
from drillyard.reporting.event_text import EventText, describe_event
from drillyard.telemetry.console import flatten

_BASIS: Final = {
    "windows": "means over {0} steps each",
    "time stamps": "from the lines' time stamps",
    "progress clock": "from the progress bar's clock",
    "moving averages": "moving averages, as the log prints no others",
    "whole run": "the mean of the whole run",
}


def measured_content(result: RunResult, device: str = "GPU", price_source: str = "") -> Content:
    """The content of a report on a measured run. `price_source` says where its price comes from."""
    log, account = result.log, result.goodput
    return Content(
        title=PurePath(result.name).name or result.name,
        source=", ".join(source.name for source in log.sources if source.used),
        subtitle=_subtitle(result, device),
        status=format_title(log.format, "unknown format"),
        status_level="note",
        device=device,
        begin_us=log.clock.first_time_us,
        end_us=log.clock.last_time_us,
        curves=_curves(result),
        tiles=[tile for tile in _tiles(result, device, price_source) if tile is not None],
        mfu_note=_mfu_note(result),
        goodput=account.seconds() if account is not None and account.wall_microseconds else {},
        goodput_note=(
            f"The clock stepped back {plural(account.clock_steps_back, 'time')}; hidden time is not"
            " counted."
            if account is not None and account.clock_steps_back
            else ""
        ),
        resumed=_resumed(log),
        evaluations=_evaluations(log.events),
        events=[text for event in log.events if (text := _event_text(event)) is not None],
        checkpoints=(
            Table(("Checkpoints", "Value"), rows) if (rows := checkpoint_rows(result)) else None
        ),
        environment=list(_environment(result)),
        missing=_missing(result),
        warnings=list(result.warnings),
    )


class _Rates(NamedTuple):
    """Headline rates. Of a run directory the medians of what the run logged, as in summary.json;
    else computed."""

    tokens_per_second_per_gpu: float | None
    tflops_per_gpu: float | None
    mfu: float | None
    peak_flops: float | None


def _rates(result: RunResult) -> _Rates:
    speed = result.speed
    if result.log.run_directory is None:
        return _Rates(
            speed.tokens_per_second_per_gpu, speed.tflops_per_gpu, speed.mfu, speed.peak_flops
        )
    printed = (
        speed.printed_tokens_per_second_per_gpu,
        speed.printed_tflops_per_gpu,
        speed.printed_mfu,
    )
    return _Rates(*printed, result.log.facts.peak_flops)


def _curves(result: RunResult) -> Curves:
    """The rows that led to the model. Rates are those of each step under the named formula, else as
    printed."""
    log, speed, timing = result.log, result.speed, result.timing
    steps, own = log.steps, log.run_directory is not None
    rows = last_rows(steps)
    seconds = np.full(len(steps), np.nan)
    warm_up = np.zeros(len(steps), dtype=bool)
    if timing.all is not None:
        seconds[timing.all.rows] = timing.all.seconds
        warm_up[timing.all.rows] = True
        if timing.kept is not None and (timing.times.left_out or not own):
            warm_up[timing.kept.rows] = False
    rate, tflops, mfu = (
        np.asarray(getattr(steps, f"printed_{name}"), dtype=np.float64)
        for name in ("tokens_per_second_per_gpu", "tflops_per_gpu", "mfu")
    )
    if not own:
        with np.errstate(divide="ignore", invalid="ignore"):
            if speed.row_tokens_per_gpu is not None and np.isfinite(seconds).any():
                rate = speed.row_tokens_per_gpu / seconds
            elif speed.tokens_per_step_per_gpu is not None and np.isfinite(seconds).any():
                rate = speed.tokens_per_step_per_gpu / seconds
            if speed.flops_per_token is not None:
                tflops = rate * speed.flops_per_token / 1e12
            if speed.mfu is not None and speed.peak_flops:
                mfu = tflops * 1e12 / speed.peak_flops
    memory: Floats = np.asarray(steps.memory_gib, dtype=np.float64)
    return Curves(
        **{
            name: getattr(steps, name)[rows]
            for name in ("step", "loss", "data_seconds", "learning_rate", "grad_norm")
        },
        step_seconds=seconds[rows],
        tokens_per_second_per_gpu=rate[rows],
        tflops_per_gpu=tflops[rows],
        mfu=mfu[rows],
        memory_gib=memory[rows],
        warm_up=warm_up[rows],
        finite=(steps.flags[rows] & (SKIPPED | NONFINITE)) == 0,
        window_steps=max(1, timing.times.window_steps),
        gpus=None if speed.row_gpus is None else speed.row_gpus[rows],
    )


def _subtitle(result: RunResult, device: str) -> str:
    speed, facts = result.speed, result.log.facts
    trained = facts.trainable_parameters
    adapters = (
        f", {count(trained)} of them trained"
        if trained and speed.parameters and trained < speed.parameters
        else ""
    )
    parts = (
        facts.model,
        speed.parameters and f"{count(speed.parameters)} parameters{adapters}",
        speed.num_gpus
        and _devices(speed.num_gpus_changes, device)
        + (f" ({speed.accelerator})" if speed.accelerator else ""),
        speed.precision if speed.precision_from != "default" else "",
    )
    return " · ".join(part for part in parts if part)


def _tiles(result: RunResult, device: str, price_source: str) -> Iterator[Tile | None]:
    log, account, rates = result.log, result.goodput, _rates(result)
    tokens = total_tokens(log.steps)
    last = log.steps.step[last_rows(log.steps)][-1:].tolist() or [0]
    notes = (
        f"of {log.facts.total_steps:,}" if log.facts.total_steps else "",
        f"{count(tokens)} tokens" if tokens else "",
    )
    yield Tile("Last step", f"{last[0]:,}", _joined(*notes))
    yield _loss_tile(result)
    yield _step_time_tile(result)
    gpus = result.speed.num_gpus_changes
    if (rate := rates.tokens_per_second_per_gpu) is not None:
        yield Tile(
            f"Tokens/s per {device}",
            number(rate),
            # With several numbers there is no one rate of all.
            (f"{number(rate * gpus[0])} on " if len(gpus) == 1 else "on " if gpus else "")
            + _devices(gpus, device),
        )
    formula = result.speed.formula or ""
    if rates.mfu is not None and rates.peak_flops:
        peak = f"of {number(rates.peak_flops / 1e12)} TFLOP/s {result.speed.precision}, {formula}"
        yield Tile("MFU", formatting.percent(rates.mfu), peak)
    elif rates.tflops_per_gpu is not None:
        yield Tile(f"TFLOP/s per {device}", number(rates.tflops_per_gpu), formula)
    if account is not None and account.goodput is not None:
        wall = duration(account.wall_microseconds / 1e6)
        yield Tile(
            "Goodput", formatting.percent(account.goodput), f"of {wall} wall time was productive"
        )
    restarts = max(len(log.attempts) - 1, 0) if account is None else account.restarts
    failures = sum(event.kind == "failure" for event in log.events)
    if restarts or failures:
        redone = int(np.count_nonzero(log.steps.again)) if account is None else account.steps_redone
        yield Tile(
            "Restarts",
            str(restarts),
            f"{plural(failures, 'failure')}, {plural(redone, 'step')} done again",
        )
    yield _cost_tile(result, device, tokens, price_source)


def _devices(gpus: Sequence[int], device: str) -> str:
    """`16 GPUs`, or `2, then 1 GPU`; nothing where no number is known."""
    return f"{gpus_text(gpus)} {device}{'s' * (gpus[-1] != 1)}" if gpus else ""


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def _loss_tile(result: RunResult) -> Tile | None:
    losses = result.losses
    if losses.last is None or losses.lowest is None:
        return None
    for name, figure in result.held_out.items():
        if figure.lowest is not None:
            part = name.rpartition(".")[0] or name
            return Tile(
                "Last loss",
                number(losses.last),
                f"held out ({part}): {number(figure.last)}, best {number(figure.lowest)}",
            )
    note = (
        f"first {number(losses.first or 0.0)}, lowest {number(losses.lowest)} at step"
        f" {losses.lowest_step:,}"
    )
    return Tile("Last loss", number(losses.last), note)


def _step_time_tile(result: RunResult) -> Tile | None:
    times = result.timing.times
    if times.typical is None or (result.log.run_directory is not None and not times.left_out):
        return None
    what = "mean" if times.p50 is None else "median"
    p95 = "" if times.p95 is None else f"p95 {duration(times.p95)}"
    basis = _BASIS.get(times.basis or "", "").format(times.window_steps)
    rounding = (
        f"printed to +-{times.relative_precision:.0%}" if times.relative_precision > 0.01 else ""
    )
    gpus = "" if times.num_gpus is None else f"on {times.num_gpus:,} GPUs"
    return Tile("Step time", duration(times.typical), _joined(what, p95, gpus, basis, rounding))


def _cost_tile(
    result: RunResult, device: str, tokens: int | None, price_source: str
) -> Tile | None:
    """Cost of the run so far, and per million tokens of its last state; else the price of a typical
    step."""
    cost = result.cost
    amount = cost.per_step if cost.so_far is None else cost.so_far
    if cost.usd_per_gpu_hour is None or amount is None:
        return None
    million = (
        cost.so_far / tokens * 1e6
        if cost.so_far is not None and tokens
        else cost.per_million_tokens
    )
    price = f"{formatting.dollars(cost.usd_per_gpu_hour)} per {device}-hour" + (
        price_source and f", {price_source}"
    )
    note = _joined(f"{formatting.dollars(million)} per million tokens" if million else "", price)
    return Tile(
        "Cost of a step" if cost.so_far is None else "Cost", formatting.dollars(amount), note
    )


def _mfu_note(result: RunResult) -> str:
    speed, peak = result.speed, _rates(result).peak_flops
    if speed.formula is None:
        return (
            "As printed by the framework"
            if speed.printed_tflops_per_gpu or speed.printed_mfu
            else ""
        )
    note = f"FLOPs by formula {speed.formula}"
    if peak:
        return (
            f"{note}; peak {number(peak / 1e12)} TFLOP/s ({speed.accelerator}, {speed.precision},"
            " dense)"
        )
    return (
        f"{note}; no MFU: no {speed.precision} peak of {speed.accelerator or 'this device'} is"
        " known"
    )


def _resumed(log: ParsedLog) -> list[int]:
    """The steps that later attempts resumed from: as the log says, else the one before their
    first."""
    if said := [
        event.step for event in log.events if event.kind == "resume" and event.step is not None
    ]:
        return said
    starts = [log.steps.step[log.steps.attempt == attempt.number] for attempt in log.attempts[1:]]
    return [max(0, int(steps.min()) - 1) for steps in starts if len(steps)]


def _evaluations(events: list[LogEvent]) -> dict[str, list[Point]]:
    """The values of each figure by its dotted name; evaluating a step again replaces its value."""
    figures: dict[str, dict[int, float]] = {}
    for event in events:
        if event.kind == "evaluation":
            for name, value in flatten(dict(event.values)).items():
                if name.rpartition(".")[2] not in COUNTS:
                    figures.setdefault(name, {})[event.step or 0] = value
    return {
        name: [Point(step, values[step]) for step in sorted(values)]
        for name, values in figures.items()
    }


def _event_text(event: LogEvent) -> EventText | None:
    """An event of a log as the one of the same name in events.jsonl; the end of a save counts as
    its completion."""
    name = "checkpoint" if event.kind == "checkpoint_end" else event.kind
    fields = {
        "step": event.step,
        "seconds": event.seconds,
        "results": event.values,
        "reason": event.text,
    }
    return describe_event({"event": name, "time": event.time_us, **fields})


def checkpoint_rows(result: RunResult) -> list[tuple[str, ...]]:
    """Number and duration of training's waits for saves, and the time until saves were complete."""
    waits = [
        wait.seconds
        for wait in result.waits
        if wait.what == "checkpoint" and wait.seconds is not None
    ]
    rows: list[tuple[str, ...]] = []
    for label, values in (
        ("Training waited", waits),
        ("Until on disk", list(result.written_seconds)),
    ):
        if values:
            rows.append((f"{label}, times", f"{len(values):,}"))
            rows.append(
                (
                    f"{label}, median",
                    f"{duration(statistics.median(values))} (most {duration(max(values))})",
                )
            )
    return rows


def _environment(result: RunResult) -> Iterator[tuple[str, str]]:
    """The files, and the facts that they or the flags provided."""
    for source in result.log.sources:
        what = (
            format_title(source.format, "nothing recognised")
            if source.used
            else f"not used: {source.note}"
        )
        yield source.name, f"{what}; {plural(source.lines, 'line')}"
    speed = result.speed
    facts: list[tuple[str, Any]] = [
        ("Tokens per step", speed.tokens_per_step and f"{speed.tokens_per_step:,.0f}"),
        ("Sequence length", speed.sequence_length),
        ("Tokenizer", result.log.facts.tokenizer),
        ("Accelerator", speed.accelerator),
    ]
    yield from ((label, str(value)) for label, value in facts if value)


def _missing(result: RunResult) -> list[str]:
    """Each reason once, with its figures and the flags that would provide them."""
    by_reason: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for missing in result.missing:
        by_reason.setdefault((missing.reason, missing.flags), []).append(
            missing.field.replace("_", " ")
        )
    return [
        f"Missing: {', '.join(fields)}: {reason}"
        + (f"; {' or '.join(flags)} gives it." if flags else ".")
        for (reason, flags), fields in by_reason.items()
    ]
