"""The content of a report from a run directory: its metrics.jsonl, events.jsonl and configs,
finished or not.

Figures are those of `drillyard metrics` and of summary.json. What only a run directory has comes on
top: the status, all events, the estimate, resolved settings, versions and the configs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from drillyard import formatting
from drillyard.errors import UserError
from drillyard.guarded_files import is_there, read_text, require_inside
from drillyard.measurement.read_logs import read_logs
from drillyard.measurement.run_result import RunResult, measure
from drillyard.measurement.user_facts import UserFacts
from drillyard.reporting.content import Content, Table
from drillyard.reporting.event_text import END_LEVELS, Event, describe_event
from drillyard.reporting.gpu_price import CLUSTER_FILE, GpuPrice, gpu_price
from drillyard.reporting.log_content import checkpoint_rows, measured_content
from drillyard.reporting.summary import failed_evaluations, failure_text, last_event, run_status
from drillyard.reporting.tables import estimate_table
from drillyard.telemetry.events import EVENTS_FILE, event_microseconds, read_events

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


def is_run_directory(path: Path) -> bool:
    """Whether a Drillyard run has started here."""
    return is_there(path / EVENTS_FILE)


def read_run_directory(run_directory: Path, usd_per_gpu_hour: float | None = None) -> Content:
    """The content of a run's report. Raises UserError for a directory in which no run has
    started."""
    if not is_run_directory(run_directory):
        raise UserError(
            f"{run_directory}: no {EVENTS_FILE}: this is not the directory of a run that has"
            " started."
        )
    events = read_events(run_directory)
    price = gpu_price(run_directory, usd_per_gpu_hour)
    facts = UserFacts(price_per_gpu_hour=(price and price.usd_per_hour) or None)
    result = measure(read_logs([run_directory], framework="drillyard", allow_empty=True), facts)
    device = "GPU" if result.speed.accelerator else "rank"
    content = measured_content(result, device, price.source if price else "")
    status = run_status(events)
    times = [event_microseconds(event) for event in events]
    return replace(
        content,
        title=run_directory.resolve().name,
        source=str(run_directory),
        status=status,
        status_level=END_LEVELS.get(status, "note"),
        begin_us=min(times, default=None),
        end_us=max(times, default=None),
        events=[text for event in events if (text := describe_event(event)) is not None],
        checkpoints=_checkpoints(events, result),
        estimate=estimate_table(
            last_event(events, "estimate"), content.curves.on(result.speed.num_gpus or 0), device
        ),
        environment=list(_environment(events)),
        resolved=_resolved(last_event(events, "resolved")),
        documents=list(_documents(run_directory)),
        missing=list(_missing(events, result, price)),
        warnings=[],
    )


def _checkpoints(events: list[dict[str, Any]], result: RunResult) -> Table | None:
    saves = [event for event in events if event["event"] == "checkpoint"]
    if not saves:
        return None
    rows = [("Complete", f"{len(saves):,}"), ("Last", f"step {saves[-1].get('step')}")]
    if saves[-1].get("bytes") is not None:
        rows.append(("Size", formatting.size(saves[-1]["bytes"])))
    if failed := sum(event["event"] == "checkpoint_failed" for event in events):
        rows.append(("Failed", f"{failed:,}"))
    return Table(("Checkpoints", "Value"), [*rows, *checkpoint_rows(result)])


def _environment(events: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for name, labels in ENVIRONMENT.items():
        event = last_event(events, name)
        yield from (
            (label, str(event[key])) for key, label in labels.items() if event.get(key) is not None
        )


def _resolved(event: Event) -> Table | None:
    """The values that `auto` settings resolved to, and why."""
    reasons = event.get("reasons") or {}
    rows = [
        (key, str(value), str(reasons.get(key, "")))
        for key, value in (event.get("settings") or {}).items()
    ]
    return Table(("Setting left open", "Became", "Why"), rows, numbers_from=3) if rows else None


def _documents(run_directory: Path) -> Iterator[tuple[str, str]]:
    for name in ("run.yaml", CLUSTER_FILE):
        path = run_directory / name
        require_inside(run_directory, path)
        if is_there(path):
            yield name, read_text(path, errors="replace")


def _missing(
    events: list[dict[str, Any]], result: RunResult, price: GpuPrice | None
) -> Iterator[str]:
    if not len(result.log.steps):
        yield "No step has been logged yet."
    elif not result.timing.times.left_out:
        yield "Speed: fewer than two steps were logged."
    failed = failed_evaluations(events)
    yield from (f"Not measured: {failure_text(one)}." for one in failed[:FAILURES_SHOWN])
    if len(failed) > FAILURES_SHOWN:
        yield f"Not measured: {len(failed) - FAILURES_SHOWN} more evaluations; see events.jsonl."
    if price is None:
        yield "Cost: no price is known; --price-per-gpu-hour DOLLARS gives one."
