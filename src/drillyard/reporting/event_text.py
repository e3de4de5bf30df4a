"""What happened to a run, in words: one short sentence for each event that a person wants to read.

Steps, and the begin and end of pauses, are not among them: charts and the goodput bar show those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from drillyard import formatting
from drillyard.telemetry.console import count, flatten
from drillyard.telemetry.events import ODD_VALUE, event_microseconds

Level = Literal["good", "note", "warning", "failure"]
Event = Mapping[str, Any]

SPOKEN: Final = frozenset({"loss", "sql_execution"})
"""The figures of an evaluation that a sentence has room for."""
ROUTINE: Final = frozenset({"checkpoint", "checkpoint_removed", "evaluation"})
"""Events that a healthy run has many of."""


@dataclass(frozen=True, slots=True)
class EventText:
    """An event for people. `time_us` is UTC in microseconds since 1970, None in a log without time stamps; `step` is
    None where it concerns none."""

    time_us: int | None
    name: str
    level: Level
    text: str
    step: int | None = None

    @property
    def routine(self) -> bool:
        return self.name in ROUTINE


def describe_event(event: Event) -> EventText | None:
    """What an event says to people; None for those that say nothing to them, and those of other writers."""
    words_of = _WORDS.get(str(event["event"]))
    if words_of is None:
        return None
    try:
        level, text = words_of(event)
    except ODD_VALUE:
        level, text = "warning", f"The event {event['event']} has a value that no run writes"
    step = event.get("step")
    time_us = event_microseconds(event)
    return EventText(time_us, event["event"], level, one_line(text), step if isinstance(step, int) else None)


def one_line(text: str) -> str:
    """A text on one line without control characters: what a log quotes must not move a terminal's cursor."""
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())


def evaluation_figures(results: Mapping[str, Any]) -> list[str]:
    """The headline figures of an evaluation: `rows: loss 3.036`; all numbers where it has no headline."""
    figures = flatten(dict(results))
    shown = {name: value for name, value in figures.items() if name.rpartition(".")[2] in SPOKEN} or figures
    return [figure_text(name, value) for name, value in shown.items()]


def figure_text(name: str, value: float) -> str:
    """`rows: loss 3.036` for the figure with the dotted name `rows.loss`."""
    part, _, measure = name.rpartition(".")
    written = formatting.percent(value) if measure == "sql_execution" else formatting.number(value)
    label = measure_label(measure)
    return f"{part}: {label} {written}" if part else f"{label} {written}"


def measure_label(measure: str) -> str:
    """`SQL execution accuracy` for `sql_execution`, `bits per byte` for `bits_per_byte`."""
    return {"sql_execution": "SQL execution accuracy"}.get(measure, measure.replace("_", " "))


def _run_start(event: Event) -> tuple[Level, str]:
    ranks = event.get("world_size")
    return "note", f"The run was started on {formatting.plural(ranks, 'rank')}" if ranks else "The run was started"


def _round_start(event: Event) -> tuple[Level, str]:
    ranks = event.get("world_size")
    which = f"Round {event['round']} of ranks began" if event.get("round") else "The ranks began"
    return "note", f"{which}: {formatting.plural(ranks, 'rank')}" if ranks else which


def _data(event: Event) -> tuple[Level, str]:
    parts = event.get("parts") or {}
    sizes = [f"{name} {count(part['tokens'])} tokens" for name, part in parts.items() if "tokens" in part]
    return "note", "The data was ready" + (": " + ", ".join(sizes) if sizes else "")


def _parameters(event: Event) -> tuple[Level, str]:
    return "note", f"The model was built: {count(event['count'])} parameters"


def _resolved(event: Event) -> tuple[Level, str]:
    changed = event.get("changed") or {}
    if not changed:
        return "note", "Settings left open were resolved"
    told = ", ".join(f"{key} {old} -> {new}" for key, (old, new) in changed.items())
    return "warning", f"Settings left open were resolved otherwise than before: {told}"


def _estimate(event: Event) -> tuple[Level, str]:
    verdict = event.get("verdict")
    if verdict is None:
        return "note", "Whether it fits in memory could not be predicted"
    return ("note" if verdict == "fits" else "warning"), f"Predicted before the first step: it {verdict} in memory"


def _resume(event: Event) -> tuple[Level, str]:
    seconds = event.get("seconds")
    loaded = f", loaded in {formatting.duration(seconds)}" if seconds is not None else ""
    return "warning", f"Went on from the checkpoint of step {event.get('step')}{loaded}"


def _settings_changed(event: Event) -> tuple[Level, str]:
    changes = (f"{key} {old} -> {new}" for key, (old, new) in (event.get("changes") or {}).items())
    return "note", f"Trained with other settings from here on: {', '.join(changes)}"


def _spike(kind: str, field: str) -> Callable[[Event], tuple[Level, str]]:
    def words_of(event: Event) -> tuple[Level, str]:
        value, median, limit = (event.get(name) for name in (field, "median", "limit"))
        if value is None or median is None or limit is None:
            return "warning", f"{kind} spike"
        figures = (formatting.number(number) for number in (value, median, limit))
        return "warning", "{} spike: {} (recent median {}, limit {})".format(kind, *figures)

    return words_of


def _nonfinite(event: Event) -> tuple[Level, str]:
    figures = [(name, event.get(name)) for name in ("loss", "grad_norm")]
    told = ", ".join(f"{measure_label(name)} {value:g}" for name, value in figures if value is not None)
    return "warning", "The step was skipped: not finite" + (f" ({told})" if told else "")


def _checkpoint(event: Event) -> tuple[Level, str]:
    details = [formatting.size(event["bytes"])] if "bytes" in event else []
    if "seconds" in event:
        details.append(f"in {formatting.duration(event['seconds'])}")
    if "blocking_seconds" in event:
        details.append(f"training waited {formatting.duration(event['blocking_seconds'])}")
    return "good", "Checkpoint complete" + (": " + ", ".join(details) if details else "")


def _about_checkpoint(level: Level, what: str) -> Callable[[Event], tuple[Level, str]]:
    def words_of(event: Event) -> tuple[Level, str]:
        reason = event.get("reason")
        return level, what + (f": {reason}" if reason else "")

    return words_of


def _evaluation(event: Event) -> tuple[Level, str]:
    return "good", "Evaluation: " + ", ".join(evaluation_figures(event.get("results") or {}))


def _evaluation_failed(event: Event) -> tuple[Level, str]:
    what, part, reason = (event.get(name) for name in ("metric", "part", "reason"))
    return "warning", f"Evaluation failed: {what} of {part}: {reason}"


def _signal(event: Event) -> tuple[Level, str]:
    return "warning", f"{event.get('signal') or 'A request'} asked the run to stop"


def _failure(event: Event) -> tuple[Level, str]:
    rank, reason = event.get("failed_rank"), str(event.get("reason", "no reason is known"))
    who = f"Rank {rank} failed" if rank is not None and not reason.startswith("rank ") else "Failure"
    return "failure", f"{who}: {reason}"


def _warning(event: Event) -> tuple[Level, str]:
    return "warning", str(event.get("text", "warning"))


def _waiting(event: Event) -> tuple[Level, str]:
    return "note", f"Waiting: {event.get('reason', 'queued')}"


def _restart(event: Event) -> tuple[Level, str]:
    return "warning", f"A new round of ranks was started (round {event.get('round', 'unknown')})"


def _end(event: Event) -> tuple[Level, str]:
    status = event.get("status", "ended")
    levels: dict[str, Level] = {"completed": "good", "interrupted": "warning", "failed": "failure"}
    code = event.get("exit_code")
    return levels.get(status, "note"), f"The run {_ENDS.get(status, status)}" + (f" (exit code {code})" if code else "")


_ENDS = {"completed": "is complete", "interrupted": "was interrupted", "failed": "failed"}
_WORDS: Final[dict[str, Callable[[Event], tuple[Level, str]]]] = {
    "run_start": _run_start,
    "round_start": _round_start,
    "data": _data,
    "parameters": _parameters,
    "resolved": _resolved,
    "estimate": _estimate,
    "resume": _resume,
    "settings_changed": _settings_changed,
    "loss_spike": _spike("Loss", "loss"),
    "gradient_spike": _spike("Gradient", "grad_norm"),
    "nonfinite_step": _nonfinite,
    "checkpoint": _checkpoint,
    "checkpoint_failed": _about_checkpoint("warning", "A checkpoint was not saved"),
    "checkpoint_incomplete": _about_checkpoint("warning", "An incomplete checkpoint was passed over"),
    "checkpoint_damaged": _about_checkpoint("warning", "A damaged checkpoint was passed over"),
    "checkpoint_abandoned": _about_checkpoint("warning", "A checkpoint of steps that are done otherwise was left"),
    "checkpoint_removed": _about_checkpoint("note", "A checkpoint that is no longer kept was removed"),
    "checkpoint_not_removed": _about_checkpoint("warning", "An old checkpoint could not be removed"),
    "evaluation": _evaluation,
    "evaluation_failed": _evaluation_failed,
    "signal": _signal,
    "failure": _failure,
    "warning": _warning,
    "waiting": _waiting,
    "restart": _restart,
    "end": _end,
}
