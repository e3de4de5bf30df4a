"""Events as text: a short sentence for each event that a person wants to read, in the report and on
the live screen.

Steps, and the begin and end of pauses, have none: charts and the goodput bar show those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from drillyard.formatting import count, duration, number, percent, plural, size
from drillyard.telemetry.console import ACCURACIES, flatten
from drillyard.telemetry.events import ODD_VALUE, event_microseconds

Level = Literal["good", "note", "warning", "failure"]
Event = Mapping[str, Any]

HEADLINES: Final = frozenset({"loss", *ACCURACIES})
"""The figures of an evaluation that fit in a sentence."""
ROUTINE: Final = frozenset({"checkpoint", "checkpoint_removed", "evaluation"})
"""Events that a healthy run has many of."""


@dataclass(frozen=True, slots=True)
class EventText:
    """An event for people. `time_us` is UTC in microseconds since 1970, None in a log without time
    stamps; `step` is None for an event of no step."""

    time_us: int | None
    name: str
    level: Level
    text: str
    step: int | None = None

    @property
    def routine(self) -> bool:
        return self.name in ROUTINE


def describe_event(event: Event) -> EventText | None:
    """The text of an event; None for events without one. `time` may be microseconds since 1970, or
    None."""
    name = str(event["event"])
    if name not in _TEXTS:
        return None
    level, text_of = _TEXTS[name]
    try:
        text = text_of(event)
        if callable(level):
            level = level(event)
    except ODD_VALUE:
        level, text = "warning", f"The event {name} has a value that no run writes"
    step, time = event.get("step"), event.get("time")
    time_us = event_microseconds(event) if isinstance(time, str) else time
    return EventText(time_us, name, level, one_line(text), step if isinstance(step, int) else None)


def one_line(text: str) -> str:
    """`text` on one line without control characters: a quoted log must not move a terminal's
    cursor."""
    return " ".join(
        "".join(character if character.isprintable() else " " for character in text).split()
    )


def evaluation_figures(results: Mapping[str, Any]) -> list[str]:
    """The headline figures of an evaluation, such as `rows: loss 3.036`; all its numbers if it has
    no headline."""
    figures = flatten(dict(results))
    shown = {
        name: value for name, value in figures.items() if name.rpartition(".")[2] in HEADLINES
    } or figures
    return [figure_text(name, value) for name, value in shown.items()]


def figure_text(name: str, value: float) -> str:
    """`rows: loss 3.036` for the figure with the dotted name `rows.loss`."""
    part, _, measure = name.rpartition(".")
    written = percent(value) if measure in ACCURACIES else number(value)
    return (
        f"{part}: {measure_label(measure)} {written}"
        if part
        else f"{measure_label(measure)} {written}"
    )


def measure_label(measure: str) -> str:
    """`SQL execution accuracy` for `sql_execution`, `bits per byte` for `bits_per_byte`."""
    return ACCURACIES.get(measure, measure.replace("_", " "))


def _ranks(event: Event, between: str) -> str:
    return f"{between}{plural(event['world_size'], 'rank')}" if event.get("world_size") else ""


def _reason(what: str) -> Callable[[Event], str]:
    return lambda event: what + (f": {event['reason']}" if event.get("reason") else "")


def _changes(changes: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{key} {old} -> {new}" for key, (old, new) in (changes or {}).items())


def _listed(what: str, details: list[str]) -> str:
    return what + (": " + ", ".join(details) if details else "")


def _data(event: Event) -> str:
    parts = event.get("parts") or {}
    return _listed(
        "Data ready",
        [
            f"{name} {count(part['tokens'])} tokens"
            for name, part in parts.items()
            if "tokens" in part
        ],
    )


def _resolved(event: Event) -> str:
    changes = _changes(event.get("changed"))
    return f"`auto` settings changed: {changes}" if changes else "`auto` settings resolved"


def _estimate(event: Event) -> str:
    verdict = event.get("verdict")
    return (
        "No memory estimate"
        if verdict is None
        else f"Memory estimate before the first step: {verdict}"
    )


def _resume(event: Event) -> str:
    of_step = "" if event.get("step") is None else f" of step {event['step']}"
    seconds = event.get("seconds")
    return f"Resumed from the checkpoint{of_step}" + (
        "" if seconds is None else f", loaded in {duration(seconds)}"
    )


def _spike(kind: str, field: str) -> Callable[[Event], str]:
    def text(event: Event) -> str:
        figures = [event.get(name) for name in (field, "median", "limit")]
        value, median, limit = ("?" if figure is None else number(figure) for figure in figures)
        return f"{kind} spike: {value} (recent median {median}, limit {limit})"

    return text


def _nonfinite(event: Event) -> str:
    figures = [(name, event.get(name)) for name in ("loss", "grad_norm")]
    return _listed(
        "Non-finite step skipped",
        [f"{measure_label(name)} {value:g}" for name, value in figures if value is not None],
    )


def _checkpoint(event: Event) -> str:
    details = [size(event["bytes"])] if event.get("bytes") is not None else []
    for name, what in (("seconds", "in"), ("blocking_seconds", "training waited")):
        if event.get(name) is not None:
            details.append(f"{what} {duration(event[name])}")
    return _listed("Checkpoint complete", details)


def _evaluation(event: Event) -> str:
    return _listed("Evaluation", evaluation_figures(event.get("results") or {}))


def _failure(event: Event) -> str:
    rank, reason = event.get("failed_rank"), str(event.get("reason") or "reason unknown")
    return (
        f"Rank {rank} failed: {reason}"
        if rank is not None and not reason.startswith("rank ")
        else f"Failure: {reason}"
    )


def _end(event: Event) -> str:
    status, code = event.get("status", "ended"), event.get("exit_code")
    text = {"completed": "is complete", "interrupted": "was interrupted"}.get(status, status)
    return f"The run {text}" + (f" (exit code {code})" if code else "")


END_LEVELS: Final[dict[str, Level]] = {
    "completed": "good",
    "interrupted": "warning",
    "failed": "failure",
}
_TEXTS: Final[dict[str, tuple[Level | Callable[[Event], Level], Callable[[Event], str]]]] = {
    "run_start": ("note", lambda event: "Run started" + _ranks(event, " on ")),
    "round_start": (
        "note",
        lambda event: (
            (f"Attempt {event['round']}: ranks started" if event.get("round") else "Ranks started")
            + _ranks(event, ": ")
        ),
    ),
    "data": ("note", _data),
    "parameters": ("note", lambda event: f"Model built: {count(event['count'])} parameters"),
    "resolved": (lambda event: "warning" if event.get("changed") else "note", _resolved),
    "estimate": (
        lambda event: "note" if event.get("verdict") in (None, "fits") else "warning",
        _estimate,
    ),
    "resume": ("warning", _resume),
    "settings_changed": (
        "note",
        lambda event: f"Settings changed from here on: {_changes(event.get('changes'))}",
    ),
    "loss_spike": ("warning", _spike("Loss", "loss")),
    "gradient_spike": ("warning", _spike("Gradient", "grad_norm")),
    "nonfinite_step": ("warning", _nonfinite),
    "checkpoint": ("good", _checkpoint),
    "checkpoint_failed": ("warning", _reason("Checkpoint not saved")),
    "checkpoint_incomplete": ("warning", _reason("Incomplete checkpoint skipped")),
    "checkpoint_damaged": ("warning", _reason("Damaged checkpoint skipped")),
    "checkpoint_abandoned": (
        "warning",
        _reason("Checkpoint abandoned: its steps are now trained differently"),
    ),
    "checkpoint_removed": ("note", _reason("Checkpoint removed: no longer kept")),
    "checkpoint_not_removed": ("warning", _reason("Old checkpoint could not be removed")),
    "evaluation": ("good", _evaluation),
    "evaluation_failed": (
        "warning",
        lambda event: (
            f"Evaluation failed: {event.get('metric')} of {event.get('part')}:"
            f" {event.get('reason')}"
        ),
    ),
    "signal": (
        "warning",
        lambda event: f"{event.get('signal') or 'A request'} asked the run to stop",
    ),
    "failure": ("failure", _failure),
    "warning": ("warning", lambda event: str(event.get("text", "warning"))),
    "waiting": ("note", lambda event: f"Waiting: {event.get('reason') or 'queued'}"),
    "restart": (
        "warning",
        lambda event: (
            f"Restart: attempt {event['round']}"
            if event.get("round")
            else _reason("Restart")(event)
        ),
    ),
    "end": (lambda event: END_LEVELS.get(str(event.get("status")), "note"), _end),
}
