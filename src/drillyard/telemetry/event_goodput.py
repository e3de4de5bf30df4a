"""Goodput of a run directory: its events (vocabulary in events.py) as the moments of `drillyard.goodput`.

That module holds the sum, its categories and their rules. Here is only what each event means to it: `first_step` is a
step without a duration; writing `final/` counts as a checkpoint; an event that is not in the table below just passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from drillyard.goodput import CATEGORIES, Goodput, Kind, Moment, Overlay, account
from drillyard.telemetry.events import event_microseconds

__all__ = ["CATEGORIES", "Goodput", "goodput", "moment"]

_MEANING: Final[dict[str, tuple[Kind, Overlay | None]]] = {
    "run_start": ("run_start", None),
    "round_start": ("round_start", None),
    "resume": ("resume", None),
    "first_step": ("step", None),
    "step": ("step", None),
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


def moment(event: Mapping[str, Any]) -> Moment:
    """What one event means."""
    kind, overlay = _MEANING.get(event["event"], ("other", None))
    step, seconds = event.get("step"), event.get("step_seconds")
    return Moment(event_microseconds(event), kind, step if isinstance(step, int) else None, seconds, overlay)


def goodput(events: Iterable[Mapping[str, Any]]) -> Goodput:
    """The account of a run from its events in the order they were written."""
    return account(map(moment, events))
