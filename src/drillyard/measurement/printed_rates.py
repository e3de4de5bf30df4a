"""Printed rates held against the durations on the same lines: a rate times its duration is the work
of a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from drillyard.measurement.formats import format_title
from drillyard.measurement.parsed_log import ParsedLog, Steps
from drillyard.measurement.step_times import Durations, Timing

LARGEST_RATE: Final = 1e18
"""Rates and counts beyond this are damage."""
_CONTRADICTS: Final = 0.01


def contradictions(
    log: ParsedLog,
    timing: Timing,
    tokens_per_gpu: float | None,
    row_work: NDArray[np.float64] | None = None,
) -> Iterator[str]:
    """Printed rates that the durations on the same lines contradict by over 1 %, beyond what
    rounding explains.

    A rate times its duration is the work of a step on one GPU: it must be the known number of
    tokens, or else the same on every line; with `row_work`, proportional to that (to the tokens
    themselves, where `tokens_per_gpu` is known).
    """
    found = timing.all
    if found is None or found.basis not in ("steps", "windows"):
        return
    shown = format_title(log.format, "the log")
    scale = np.ones(len(found.rows)) if row_work is None else row_work[found.rows]
    known = tokens_per_gpu if row_work is None or tokens_per_gpu is None else 1.0
    for column, name, work in (
        ("printed_tokens_per_second_per_gpu", "tokens/s/GPU", known),
        ("printed_tflops_per_gpu", "TFLOP/s/GPU", None),
    ):
        if not log.steps.has(column):
            continue
        typical = _median_work(log, found, column, scale) if work is None else work
        if not typical:
            continue
        expected = typical * scale
        off = _excess(log.steps, found, column, expected)
        if wrong := int((off > 0).sum()):
            worst = int(off.argmax())
            row, seconds = int(found.rows[worst]), float(found.seconds[worst])
            whose = (
                f"1 line prints {name} that its"
                if wrong == 1
                else f"{wrong} lines print {name} that their"
            )
            yield (
                f"{whose} own step time contradicts by over 1 %: at {log.place(row)}"
                f" {getattr(log.steps, column)[row]:g}, where {seconds:g} s make"
                f" {expected[worst] / seconds:.5g} ({shown} may count otherwise)"
            )


def _median_work(
    log: ParsedLog, found: Durations, column: str, scale: NDArray[np.float64]
) -> float | None:
    """The median of rate x duration / scale; None where fewer than three lines have both."""
    done = getattr(log.steps, column)[found.rows] * found.seconds / scale
    usable = (done > 0) & (done < LARGEST_RATE)
    return float(np.median(done[usable])) if usable.sum() >= 3 else None


def _excess(
    steps: Steps, found: Durations, column: str, expected: NDArray[np.float64]
) -> NDArray[np.float64]:
    """By how much each row's rate is further off than 1 % and rounding explain, as a fraction; 0
    where it is not."""
    rates, seconds = getattr(steps, column)[found.rows], found.seconds
    usable = (rates > 0) & (rates < LARGEST_RATE)
    rates = np.where(usable, rates, 1.0)
    allowed = _CONTRADICTS + steps.seconds_precision[found.rows] / seconds + _half_digit(rates)
    off: NDArray[np.float64] = np.abs(rates * seconds / expected - 1) - allowed
    return np.where(usable & (off > 0), off, 0.0)


def _half_digit(rates: NDArray[np.float64]) -> NDArray[np.float64]:
    """Half a unit of the last digit that a rate can be printed with, as a fraction: integers at the
    coarsest."""
    whole = rates == np.rint(rates)
    tenths = ~whole & (rates * 10 == np.rint(rates * 10))
    return np.where(whole, 0.5, np.where(tenths, 0.05, 0.005)) / rates
