"""What a log says of the whole run in its last line (HF Trainer): how many steps it had, their mean,
its batch and its FLOPs; and where the lines of the steps say otherwise.

    {'train_runtime': 120.0, 'train_samples_per_second': 4.0, 'train_steps_per_second': 0.5, 'epoch': 1.0}

The duration is that of the whole training loop: start-up, evaluations and saves are in it. The
rates divide all steps and samples of the run by it, also those before a resume
(src/transformers/trainer_utils.py of huggingface/transformers, `speed_metrics`).
"""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, NamedTuple

from drillyard.measurement.parsed_log import LogFacts, ParsedLog

_RATE_UNIT: Final = 5e-4
"""The Trainer rounds rates to 3 decimals, and prints durations with 4 digits or more."""
_SLOWER: Final = 1.1
"""Steps cannot be longer than all the time over all steps, but for what rounding hides."""
_FASTER: Final = 0.5
"""Below this share of the mean the steps do not explain half of the time."""
FLOS: Final = "HF Trainer's total_flos"


class Total(NamedTuple):
    """Steps of the whole run: at least, at most."""

    low: int
    high: int


def total_steps(facts: LogFacts) -> Total | None:
    """The steps of the whole run, as far as its log states them."""
    if facts.total_steps is not None:
        return Total(facts.total_steps, facts.total_steps)
    runtime, rate = facts.train_runtime_seconds, facts.train_steps_per_second
    if runtime is None or rate is None:
        return None
    steps = runtime * rate
    error = _RATE_UNIT * (runtime + steps)
    low, high = math.ceil(steps - error), math.floor(steps + error)
    return Total(max(low, 1), high) if high >= max(low, 1) else Total(*[max(round(steps), 1)] * 2)


def seconds_per_step(log: ParsedLog) -> tuple[float, int, int] | None:
    """The mean seconds of a step by the totals that the log states at its end, with the first and
    the last step that they cover; None where it states none."""
    runtime, steps = log.facts.train_runtime_seconds, log.steps
    if runtime is None:
        return None
    total = total_steps(log.facts)
    stated = None if total is None else round((total.low + total.high) / 2)
    last = stated
    if len(steps) and not log.numbered_lines:
        logged = int(steps.step.max())
        rest = -1 if stated is None else stated - logged
        # Where training ended early, the steps are fewer than were planned.
        last = stated if 0 <= rest < max(int(steps.window_steps[-1]), 1) else logged
    resumed = max((event.step or 0 for event in log.events if event.kind == "resume"), default=0)
    if last is None or last <= resumed:
        return None
    return runtime / (last - resumed), resumed + 1, last


def learn_batch(facts: LogFacts) -> None:
    """Samples of a step from the two rates of the whole run, where that is one whole number."""
    steps, samples = facts.train_steps_per_second, facts.train_samples_per_second
    if facts.global_batch_size is not None or not steps or not samples:
        return
    batch = samples / steps
    error = batch * _RATE_UNIT * (1 / steps + 1 / samples)
    if error < 0.5 and abs(batch - round(batch)) <= error:
        place = facts.places["train_samples_per_second"]
        facts.learn(place, global_batch_size=round(batch))


def tflops_of_run(log: ParsedLog, num_gpus: int | None) -> float | None:
    """TFLOP/s per GPU by the FLOPs that the log counts itself; None for a resumed run, whose count
    goes further back than its time."""
    facts = log.facts
    resumed = any(event.kind == "resume" for event in log.events)
    if None in (facts.total_flos, facts.train_runtime_seconds, num_gpus) or resumed:
        return None
    assert facts.total_flos and facts.train_runtime_seconds and num_gpus
    return facts.total_flos / facts.train_runtime_seconds / num_gpus / 1e12


def totals_contradict(log: ParsedLog, typical: float | None) -> Iterator[str]:
    """Say where the typical step and the log's totals cannot both be right, or where the steps are
    less than half of the time."""
    found = seconds_per_step(log)
    if found is None or typical is None:
        return
    mean, first, last = found
    place = log.facts.places.get("train_runtime_seconds", "its last line")
    said = (
        f"the log's totals ({place}) make {mean:.4g} s a step, all of steps {first} to {last}, and"
        f" its lines {typical:.4g} s"
    )
    if typical > mean * _SLOWER:
        yield f"{said}: both cannot be right"
    elif typical < mean * _FASTER:
        yield f"{said}: more than half of the time went to start-up, evaluations, saves or waiting"
