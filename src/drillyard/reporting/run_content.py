"""The content of a report from a run directory: its metrics.jsonl, events.jsonl and configs, finished or not.

Figures are those of telemetry's `summarize`, so that report, summary.json and summary.txt cannot differ. A run that is
still going is reported as far as it is. Cost: the two logs are read twice, about 5 s for 100,000 steps.
"""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from drillyard import formatting
from drillyard.errors import UserError
from drillyard.reporting.content import COUNTS, ConfigText, Content, Curves, Floats, Point, Table, Tile
from drillyard.reporting.estimate_table import estimate_table
from drillyard.reporting.event_text import Event, Level, describe_event
from drillyard.reporting.gpu_price import CLUSTER_FILE, GpuPrice, gpu_price
from drillyard.telemetry.console import count, flatten
from drillyard.telemetry.events import EVENTS_FILE, event_microseconds, read_events
from drillyard.telemetry.metrics import read_steps
from drillyard.telemetry.summary import failure_text, summarize

FLOAT_COLUMNS: Final = (
    "loss",
    "step_seconds",
    "data_seconds",
    "tokens_per_second_per_gpu",
    "tflops_per_gpu",
    "mfu",
    "memory_gib",
    "learning_rate",
    "grad_norm",
)
LEVELS: Final[dict[str, Level]] = {"completed": "good", "interrupted": "warning", "failed": "failure"}


def is_run_directory(path: Path) -> bool:
    """Whether a run of ours has started here."""
    return (path / EVENTS_FILE).is_file()


def read_run_directory(run_directory: Path, usd_per_gpu_hour: float | None = None) -> Content:
    """The content of a run's report.

    Raises UserError for a directory in which no run has started.
    """
    if not is_run_directory(run_directory):
        raise UserError(f"{run_directory}: no {EVENTS_FILE}: this is not the directory of a run that has started.")
    summary = summarize(run_directory)
    events = read_events(run_directory)
    curves = _curves(read_steps(run_directory), events)
    price = gpu_price(run_directory, usd_per_gpu_hour)
    times = [event_microseconds(event) for event in events]
    order = _last(events, "order")
    device = "GPU" if summary["accelerator"] else "rank"
    happenings = [found for event in events if (found := describe_event(event)) is not None]
    return Content(
        title=summary["name"],
        source=str(run_directory),
        subtitle=_subtitle(summary, device),
        status=summary["status"],
        status_level=LEVELS.get(summary["status"], "note"),
        device=device,
        begin_us=min(times, default=None),
        end_us=max(times, default=None),
        curves=curves,
        tiles=_tiles(summary, order.get("total_steps"), device, price),
        mfu_note=_mfu_note(summary, device),
        goodput=summary["seconds_by_category"] if summary["wall_seconds"] else {},
        goodput_notes=_goodput_notes(summary),
        resumed=[
            event["step"] for event in events if event["event"] == "resume" and isinstance(event.get("step"), int)
        ],
        evaluations=_evaluations(events),
        happenings=happenings,
        checkpoints=_checkpoints(events),
        estimate=estimate_table(_last(events, "estimate"), curves, device),
        environment=_environment(events),
        resolved=_resolved(_last(events, "resolved")),
        documents=list(_documents(run_directory)),
        missing=_missing(summary, price, curves),
    )


def _curves(records: Iterable[Event], events: Iterable[Event]) -> Curves:
    """The last occurrence of every logged step, as columns. `events` tell when the ranks were started."""
    columns = {name: array("d") for name in FLOAT_COLUMNS}
    steps, rounds, times, compiled, windows = array("q"), array("q"), array("q"), array("b"), 1
    for record in records:
        steps.append(record["step"])
        rounds.append(record.get("round") or 0)
        times.append(event_microseconds(record))
        compiled.append(bool(record.get("compile_seconds")))
        windows = max(windows, record.get("window_steps") or 1)
        for name, values in columns.items():
            value = record.get(name)
            values.append(float("nan") if value is None else value)
    step = np.array(steps)
    round_of = np.array(rounds)
    starts = sorted(event_microseconds(event) for event in events if event["event"] in ("run_start", "round_start"))
    begun = np.searchsorted(np.array(starts, np.int64), np.array(times), side="right")
    first = np.ones(len(step), dtype=bool)
    first[1:] = (round_of[1:] != round_of[:-1]) | (step[1:] <= step[:-1]) | (begun[1:] > begun[:-1])
    order = _last_rows(step)
    floats: dict[str, Floats] = {name: np.array(values)[order] for name, values in columns.items()}
    # A step without a gradient norm (no clipping) is no step without an update.
    norms = floats["grad_norm"]
    has_norms = bool(np.isfinite(norms).any())
    return Curves(
        step=step[order],
        warm_up=(first | np.array(compiled, dtype=bool))[order],
        finite=np.isfinite(floats["loss"]) & (np.isfinite(norms) if has_norms else True),
        window_steps=windows,
        **floats,
    )


def _last_rows(step: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Indices of the last row of every step, by step."""
    _, from_the_end = np.unique(step[::-1], return_index=True)
    return len(step) - 1 - from_the_end


def _last(events: Iterable[Event], name: str) -> Event:
    found: Event = {}
    for event in events:
        if event["event"] == name:
            found = event
    return found


def _subtitle(summary: dict[str, Any], device: str) -> str:
    parts = []
    if summary["parameters"] is not None:
        total, trainable = summary["parameters"], summary["trainable_parameters"]
        trained = "" if trainable == total else f", {count(trainable)} of them trained"
        parts.append(f"{count(total)} parameters{trained}")
    if summary["num_gpus"] is not None:
        name = f" ({summary['accelerator']})" if summary["accelerator"] else ""
        parts.append(formatting.plural(summary["num_gpus"], device) + name)
    if summary["precision"]:
        parts.append(summary["precision"])
    return " · ".join(parts)


def _tiles(summary: dict[str, Any], total_steps: int | None, device: str, price: GpuPrice | None) -> list[Tile]:
    of = [f"of {total_steps:,}"] if total_steps else []
    tokens = [f"{count(summary['tokens'])} tokens"] if summary["tokens"] else []
    tiles = [Tile("Steps", f"{summary['steps']:,}", "; ".join([*of, *tokens]))]
    if summary["final_loss"] is not None:
        tiles.append(Tile("Last loss", formatting.number(summary["final_loss"]), _best_held_out(summary["held_out"])))
    tiles += _speed_tiles(summary, device)
    if summary["goodput"] is not None:
        note = f"of {formatting.duration(summary['wall_seconds'])} wall time was productive"
        tiles.append(Tile("Goodput", formatting.percent(summary["goodput"]), note))
    restarts = summary["restarts"]
    if restarts or summary["failures"]:
        redone = formatting.plural(summary["steps_redone"], "step") + " done again"
        tiles.append(Tile("Restarts", str(restarts), f"{formatting.plural(summary['failures'], 'failure')}, {redone}"))
    if price is not None and summary["num_gpus"]:
        tiles.append(_cost_tile(summary, device, price))
    return tiles


def _speed_tiles(summary: dict[str, Any], device: str) -> list[Tile]:
    times, rate = summary["step_seconds"], summary["tokens_per_second_per_gpu"]
    if times["median"] is None:
        return []
    window = f", means of {times['window_steps']} steps" if times["window_steps"] > 1 else ""
    tiles = [
        Tile(
            "Step time",
            formatting.duration(times["median"]),
            f"median; p95 {formatting.duration(times['p95'])}{window}",
        )
    ]
    total = (
        f"median; {formatting.number(rate * summary['num_gpus'])} on {formatting.plural(summary['num_gpus'], device)}"
    )
    tiles.append(Tile(f"Tokens/s per {device}", formatting.number(rate), total))
    if summary["mfu"] is not None:
        peak = (
            f"of {formatting.number(summary['peak_flops'] / 1e12)} TFLOP/s {summary['precision']}, {summary['formula']}"
        )
        tiles.append(Tile("MFU", formatting.percent(summary["mfu"]), peak))
    else:
        note = f"{summary['formula']}; no MFU without a known peak"
        tiles.append(Tile(f"TFLOP/s per {device}", formatting.number(summary["tflops_per_gpu"]), note))
    return tiles


def _cost_tile(summary: dict[str, Any], device: str, price: GpuPrice) -> Tile:
    billed = summary["wall_seconds"] - summary["seconds_by_category"]["waiting"]
    cost = price.cost(summary["num_gpus"], billed)
    tokens = summary["tokens"]
    per_million = f"{formatting.dollars(cost / tokens * 1e6)} per million tokens; " if tokens else ""
    return Tile(
        "Cost",
        formatting.dollars(cost),
        f"{per_million}{formatting.dollars(price.usd_per_hour)} per {device}-hour, {price.source}",
    )


def _best_held_out(held_out: dict[str, dict[str, Any]]) -> str:
    """The lowest held-out loss of the first part that has one."""
    for name, figure in held_out.items():
        if "best" in figure:
            last, best = formatting.number(figure["last"]), formatting.number(figure["best"])
            return f"held out ({name.rpartition('.')[0]}): {last}, best {best}"
    return ""


def _mfu_note(summary: dict[str, Any], device: str) -> str:
    if summary["formula"] is None:
        return ""
    note = f"FLOPs by formula {summary['formula']}, attention left out"
    if summary["peak_flops"]:
        peak = formatting.number(summary["peak_flops"] / 1e12)
        return f"{note}; peak {peak} TFLOP/s ({summary['accelerator']}, {summary['precision']}, dense)"
    known = summary["accelerator"] or f"this {'device' if device == 'rank' else device}"
    return f"{note}; no MFU: no {summary['precision'] or ''} peak of {known} is known"


def _goodput_notes(summary: dict[str, Any]) -> list[str]:
    back = summary["clock_steps_back"]
    return [f"The clock stepped back {formatting.plural(back, 'time')}; what it hid is not counted."] if back else []


def _evaluations(events: Iterable[Event]) -> dict[str, list[Point]]:
    """The values of each figure by its dotted name; of a step evaluated again the last."""
    figures: dict[str, dict[int, float]] = {}
    for event in events:
        if event["event"] != "evaluation":
            continue
        for name, value in flatten(event.get("results", {})).items():
            if name.rpartition(".")[2] not in COUNTS:
                figures.setdefault(name, {})[int(event.get("step") or 0)] = value
    return {name: [Point(step, values[step]) for step in sorted(values)] for name, values in figures.items()}


def _checkpoints(events: list[dict[str, Any]]) -> Table | None:
    saves = [event for event in events if event["event"] == "checkpoint"]
    if not saves:
        return None
    rows = [("Complete", f"{len(saves):,}"), ("Last", f"step {saves[-1].get('step')}")]
    if saves[-1].get("bytes") is not None:
        rows.append(("Size", formatting.size(saves[-1]["bytes"])))
    for label, name in (("Training waited, median", "blocking_seconds"), ("Until on disk, median", "seconds")):
        values = [event[name] for event in saves if event.get(name) is not None]
        if values:
            rows.append(
                (label, f"{formatting.duration(statistics.median(values))} (most {formatting.duration(max(values))})")
            )
    failed = sum(event["event"] == "checkpoint_failed" for event in events)
    if failed:
        rows.append(("Failed", f"{failed:,}"))
    return Table(headers=("Checkpoints", "Value"), rows=rows)


FAILURES_SHOWN: Final = 3
ENVIRONMENT: Final = {
    "round_start": {
        "world_size": "Ranks",
        "threads": "CPU threads per rank",
        "python": "Python",
        "torch": "PyTorch",
        "transformers": "transformers",
    },
    "order": {
        "hardware": "Hardware",
        "global_batch_size": "Sequences per step",
        "micro_batch_size": "Micro-batch size",
        "gradient_accumulation": "Gradient accumulation",
    },
}


def _environment(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """What the last round ran on."""
    rows = []
    for name, fields in ENVIRONMENT.items():
        event = _last(events, name)
        rows += [(label, str(event[key])) for key, label in fields.items() if event.get(key) is not None]
    return rows


def _resolved(event: Event) -> Table | None:
    """What the settings that run.yaml leaves open have become, and why."""
    reasons = event.get("reasons") or {}
    rows = [(key, str(value), str(reasons.get(key, ""))) for key, value in (event.get("settings") or {}).items()]
    return Table(("Setting left open", "Became", "Why"), rows, numbers_from=3) if rows else None


def _documents(run_directory: Path) -> Iterator[ConfigText]:
    for name in ("run.yaml", CLUSTER_FILE):
        path = run_directory / name
        if path.is_file():
            yield ConfigText(name, path.read_text(encoding="utf-8", errors="replace"))


def _missing(summary: dict[str, Any], price: GpuPrice | None, curves: Curves) -> list[str]:
    notes = []
    if not len(curves.step):
        notes.append("No step has been logged yet.")
    elif summary["step_seconds"]["median"] is None:
        notes.append("Speed: fewer than two steps were logged.")
    failed = summary["failed_evaluations"]
    notes += [f"Not measured: {failure_text(one)}." for one in failed[:FAILURES_SHOWN]]
    if len(failed) > FAILURES_SHOWN:
        notes.append(f"Not measured: {len(failed) - FAILURES_SHOWN} more evaluations; see events.jsonl.")
    if price is None:
        notes.append("Cost: no price is known; --price-per-gpu-hour DOLLARS gives one.")
    return notes
