"""Attempt that did a step, according to the run's events. Needs no torch.

A start that resumes at step N takes back what earlier ones did after N: their steps are done again,
perhaps on another layout, and those up to N stay. So the steps that led to a state belong to a
chain of starts, each with its first step; a start counts from its own first step on. What was done
and lost is part of an earlier chain: the one that holds at the moment when the step was done last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_STEP_EVENTS = ("first_step", "step", "checkpoint_begin")


@dataclass(frozen=True)
class AttemptSteps:
    """The steps after `after` that one start did, up to the next stretch. order: its event
    `order`."""

    after: int
    order: Mapping[str, Any]


def steps_by_attempt(events: Sequence[Mapping[str, Any]]) -> list[AttemptSteps]:
    """Attempts that did the steps which led to the state after these events, in the order of the
    steps."""
    chain: list[AttemptSteps] = []
    order: Mapping[str, Any] | None = None
    after = 0
    for event in events:
        if event["event"] == "order":
            order, after = event, 0
        elif event["event"] == "resume":
            after = event["step"]
        elif (
            event["event"] in _STEP_EVENTS
            and order is not None
            and (not chain or chain[-1].order is not order)
        ):
            chain = [
                *(stretch for stretch in chain if stretch.after < after),
                AttemptSteps(after, order),
            ]
    return chain


def events_until_step(
    events: Sequence[Mapping[str, Any]], step: int
) -> Sequence[Mapping[str, Any]]:
    """The events up to the last that reports `step` or a later one as done; all where none does."""
    telling = [
        index
        for index, event in enumerate(events)
        if event["event"] in _STEP_EVENTS and event["step"] >= step
    ]
    return events[: telling[-1] + 1] if telling else events


def order_event_of_step(events: Sequence[Mapping[str, Any]], step: int) -> Mapping[str, Any] | None:
    """The event `order` of the start that did `step` last, or of the newest start; None without
    any."""
    orders = [event for event in events if event["event"] == "order"]
    if any(event["event"] in _STEP_EVENTS and event["step"] >= step for event in events):
        chain = steps_by_attempt(events_until_step(events, step))
        orders += [stretch.order for stretch in chain if stretch.after < step]
    return orders[-1] if orders else None


def attempts_between(chain: Sequence[AttemptSteps], first: int, last: int) -> list[AttemptSteps]:
    """The stretches of `chain` that hold any of the steps after `first` up to `last`."""
    ends = [stretch.after for stretch in chain[1:]] + [last]
    return [
        stretch
        for stretch, end in zip(chain, ends, strict=True)
        if stretch.after < last and end > first
    ]
