"""events.jsonl: what happened to a run, when, across all its restarts: vocabulary, writer, readers,
goodput.

One JSON object per line: `time` (UTC, microseconds, e.g. 2026-01-31T12:00:00.123456Z), `event`, and
where they apply `round` (the attempt: 0 for the first, +1 with each restart), `rank` and `step`
(optimizer steps completed). Rank 0 and the supervisor append to the same file. Goodput is computed
from these lines alone.

| event | written by | when | fields besides time, round, step |
|---|---|---|---|
| run_start | supervisor (1) | a person, scheduler or launcher starts the run | world_size, launch, versions, ... |
| round_start | rank 0 | the ranks of an attempt begin to work | world_size |
| data | rank 0 | the data is ready | parts, notes |
| parameters | rank 0 | the model is built | count, trainable, formula, flops_per_token, accelerator, peak_flops |
| order | rank 0 | the samples of each step and the numerics are fixed | data, world_size, numerics, ... |
| resolved | rank 0 | settings left open are resolved, or kept as they were | settings, reasons, kept, changed |
| estimate | rank 0 | memory and step time are estimated | verdict, memory_gib, peak_at, step_seconds, missing |
| resume | rank 0 | a checkpoint was loaded; `step` is its step | path, seconds |
| settings_changed | rank 0 | after `resume`: other settings from `step` on | changes: {setting: [old, new]} |
| first_step | rank 0 | the first step of an attempt is done (needed only if it is not logged) | |
| step | rank 0 | a logged step is done | step_seconds, window_steps, data_seconds, compile_seconds |
| loss_spike, gradient_spike | rank 0 | `step` is an outlier; follows the next logged step | loss, median, limit, ... |
| nonfinite_step | rank 0 | `step` was skipped; follows the next logged step | loss, grad_norm, samples |
| checkpoint_begin, checkpoint_end | rank 0 | training waits for a save (blocking part only) | seconds (end) |
| checkpoint | rank 0 | a checkpoint is complete, manifest written | path, bytes, blocking_seconds, seconds |
| checkpoint_failed | rank 0, or a rank that lost the others | a save failed; training continues | path, reason |
| checkpoint_incomplete, checkpoint_damaged | rank 0 | a load skipped a checkpoint | path, reason |
| checkpoint_abandoned | rank 0 | a checkpoint holds steps that are now trained differently | path |
| checkpoint_removed, checkpoint_not_removed | rank 0 | retention no longer keeps it | path, reason (not removed) |
| evaluation_begin, evaluation_end | rank 0 | training waits for an evaluation | seconds (end) |
| evaluation | rank 0 | the results of an evaluation | results |
| evaluation_failed | rank 0 | a metric could not be measured; training continues | part, metric, reason, stack |
| export_begin, export_end | rank 0 | the model is written, to `final/` or beside it | seconds, directory (end) |
| signal | the process that received it | a signal asks the run to stop | signal |
| failure | supervisor | a rank died, hung or raised | reason, failed_rank, exit_code |
| warning | rank 0 | a failure that does not end the run: a log on a full disk, a tracker | text |
| waiting | supervisor or launcher | nothing can run before the next start (queued) | reason |
| restart | supervisor | the next attempt starts after a failure | reason |
| end | rank 0, then the supervisor | the run is over | status, sequences |

(1) rank 0 where there is no supervisor; one of the two, not both.

The status of an `end` is completed, interrupted or failed; its `sequences` (from rank 0) counts the
data's sequences that were seen at least once, all of them, and the epochs; of several sources also
of each, by name. `order` has `by_epoch`: whether each epoch's last batch is short
(data/sampler.py).

Writers may add other events: readers ignore unknown ones.
"""  # noqa: E501

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Literal

from drillyard.errors import UserError
from drillyard.goodput import Goodput, Kind, Moment, Overlay, account
from drillyard.telemetry.jsonlines import LineFile, encode, read_records

EVENTS_FILE: Final = "events.jsonl"
_MOST_RANKS: Final = 2**31
"""More is damage."""

EventName = Literal[
    "run_start",
    "round_start",
    "data",
    "parameters",
    "order",
    "resolved",
    "estimate",
    "resume",
    "settings_changed",
    "first_step",
    "step",
    "loss_spike",
    "gradient_spike",
    "nonfinite_step",
    "checkpoint_begin",
    "checkpoint_end",
    "checkpoint",
    "checkpoint_failed",
    "checkpoint_incomplete",
    "checkpoint_damaged",
    "checkpoint_abandoned",
    "checkpoint_removed",
    "checkpoint_not_removed",
    "evaluation_begin",
    "evaluation_end",
    "evaluation",
    "evaluation_failed",
    "export_begin",
    "export_end",
    "signal",
    "failure",
    "warning",
    "waiting",
    "restart",
    "end",
]

ODD_VALUE: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Exceptions that Python raises when a record holds a value of the wrong type."""


@contextlib.contextmanager
def refusing_odd_values(*run_directories: str | Path) -> Iterator[None]:
    """Raise UserError where code that reads a run's records, or another log, meets a value of the
    wrong type or a number that is too large to compute with.

    Records may be of any version, so they are not checked against a schema.
    """
    try:
        yield
    except ODD_VALUE as error:
        where = " or ".join(map(str, run_directories))
        raise UserError(
            f"{where}: a logged value is none that a run writes ({type(error).__name__}:"
            f" {error!s:.200}). Copy it again from where the run wrote it; if the original fails"
            " too, please report this as a bug."
        ) from error


def utc_now() -> str:
    """The current time in UTC with microseconds, as written in every line."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def event_line(event: str, fields: dict[str, Any]) -> str:
    """The line of an event at the current time; fields that are None are left out."""
    present = {name: value for name, value in fields.items() if value is not None}
    return encode({"time": utc_now(), "event": event, **present})


def append_event(run_directory: Path, event: EventName, **fields: Any) -> None:
    """Append one event, from any process of the run. Opens and closes the file: for rare events,
    not for steps.

    Raises UserError when it cannot be written.
    """
    troubles: list[str] = []
    file = LineFile(run_directory / EVENTS_FILE, warn=troubles.append)
    file.write(event_line(event, fields))
    file.close()
    if file.lost_lines:
        raise UserError(f"{troubles[0].partition(';')[0]}: the event {event!r} is missing there")


def read_events(run_directory: Path) -> list[dict[str, Any]]:
    """All events in the order they were written; torn lines and lines without a time or a name are
    skipped."""
    return [record for record in read_records(run_directory / EVENTS_FILE) if is_event(record)]


def is_event(record: Mapping[str, Any]) -> bool:
    """Whether a record has a name and a valid time, as every event has."""
    return isinstance(record.get("event"), str) and has_time(record)


def has_time(record: Mapping[str, Any]) -> bool:
    """Whether a record has a time with a time zone."""
    try:
        return datetime.fromisoformat(record["time"]).tzinfo is not None
    except (KeyError, TypeError, ValueError):
        return False


def event_microseconds(event: Mapping[str, Any]) -> int:
    """An event's time in whole microseconds since 1970."""
    return (datetime.fromisoformat(event["time"]) - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(
        microseconds=1
    )


def utc_time(microseconds: int) -> datetime:
    """The time that many microseconds after 1970, in UTC."""
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=microseconds)


INTERRUPTIONS: Final[dict[str, tuple[Kind, Overlay | None]]] = {
    "checkpoint_begin": ("begin", "checkpoint"),
    "checkpoint_end": ("end", "checkpoint"),
    "evaluation_begin": ("begin", "evaluation"),
    "evaluation_end": ("end", "evaluation"),
    "export_begin": ("begin", "checkpoint"),
    "export_end": ("end", "checkpoint"),
    "failure": ("failure", None),
    "restart": ("failure", None),
    "waiting": ("waiting", None),
    "end": ("over", None),
}
"""Events, of ours and in logs of any framework, that mean the same to goodput."""
_MOMENTS: Final[dict[str, tuple[Kind, Overlay | None]]] = {
    "run_start": ("run_start", None),
    "round_start": ("round_start", None),
    "resume": ("resume", None),
    "first_step": ("step", None),
    "step": ("step", None),
    **INTERRUPTIONS,
}


def moment(event: Mapping[str, Any]) -> Moment:
    """Convert an event for goodput. `first_step` is a step without a duration; an unknown event
    only passes time."""
    kind, overlay = _MOMENTS.get(event["event"], ("other", None))
    step, seconds = event.get("step"), event.get("step_seconds")
    return Moment(
        event_microseconds(event),
        kind,
        step if isinstance(step, int) else None,
        seconds,
        overlay,
        num_gpus=started_gpus(event["event"], event.get("world_size")),
    )


def started_gpus(name: str, world_size: Any) -> int | None:
    """The number of ranks that an event of this name starts; None where it starts none or does not
    say how many."""
    if name not in ("run_start", "round_start") or type(world_size) is not int:
        return None
    return world_size if 0 < world_size < _MOST_RANKS else None


def goodput(events: Iterable[Mapping[str, Any]]) -> Goodput:
    """The goodput of a run from its events, in the order they were written."""
    return account(map(moment, events))
