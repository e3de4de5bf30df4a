"""The estimate that a run logs in one line before its first step: will it fit, and how long will a
step take.

Nothing here stops a run: what cannot be estimated is reported as such. `train` gives the memory
that its ranks report, `launch` that of the catalog. Cost: a memory and a step time estimate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from drillyard.errors import UserError
from drillyard.estimation.memory import MemoryEstimate, Verdict, memory_estimate, verdict_on
from drillyard.estimation.quantity import DOUBT, Range, range_text, time_range
from drillyard.estimation.setup import Setup
from drillyard.estimation.step_time import step_time
from drillyard.formatting import three_digits
from drillyard.hardware import Accelerator, Machine


@dataclass(frozen=True, slots=True)
class StartupEstimate:
    """Memory and step time of a run; `missing` has the reason where there is no `memory` or
    `step_seconds`."""

    setup: Setup
    memory_gib: float | None
    memory: MemoryEstimate | None
    step_seconds: Range | None
    missing: dict[str, str]

    @property
    def verdict(self) -> Verdict | None:
        """Whether it fits; None where the memory needed or available is not known."""
        if self.memory is None or self.memory_gib is None:
            return None
        return verdict_on(self.memory.total, self.memory_gib)

    def line(self) -> str:
        """`Estimate: it fits: 61.2 to 70.4 of 140 GiB per rank (activation checkpointing: none); 1
        to 1.5 s a step`"""
        return f"Estimate: {self.memory_words()}; {self._time_words()}"

    def fields(self) -> dict[str, Any]:
        """The same as fields of the event `estimate`."""
        memory, times = self.memory, self.step_seconds
        return {
            "verdict": self.verdict,
            "memory_gib": None
            if memory is None
            else {**_ends(memory.total), "available": self.memory_gib},
            "peak_at": None if memory is None else memory.peak_at,
            "step_seconds": None if times is None else {**_ends(times), "is_bound": times.is_bound},
            "missing": self.missing or None,
        }

    def memory_words(self) -> str:
        """Whether it fits: `it fits: 61.2 to 70.4 of 140 GiB per rank (...)`."""
        mode = f"activation checkpointing: {self.setup.activation_checkpointing}"
        if self.setup.gathers_adapters_alone:
            mode += "; frozen weights whole on every rank"
        if self.setup.device_type == "cpu":
            mode += "; Python and torch themselves not counted"
        if self.memory is None:
            return f"the memory cannot be estimated ({self.missing['memory']}; {mode})"
        used = (
            f"{_about(self.memory.total)}{range_text(self.memory.total, three_digits, 'at least')}"
        )
        if self.verdict is None or self.memory_gib is None:
            return f"{used} GiB per rank ({mode})"
        return f"it {self.verdict}: {used} of {three_digits(self.memory_gib)} GiB per rank ({mode})"

    def _time_words(self) -> str:
        times = self.step_seconds
        if times is None:
            return f"the step time is not known ({self.missing['step_seconds']})"
        bound = " (a bound: no measured run is like this one)" if times.is_bound else ""
        return f"{_about(times)}{time_range(times).removesuffix(DOUBT)} a step{bound}"


def startup_estimate(
    setup: Setup,
    memory_gib: float | None,
    accelerator: Accelerator | None,
    machine: Machine | None = None,
    *,
    hardware: str = "",
) -> StartupEstimate:
    """Estimate `setup` with `memory_gib` per rank (None: not known) on an accelerator, in nodes of
    `machine`.

    Without an accelerator there is no step time; `hardware` then names what there is instead.
    """
    memory, seconds, missing = None, None, {}
    try:
        memory = memory_estimate(setup)
    except UserError as error:
        missing["memory"] = str(error).splitlines()[0]
    if accelerator is None:
        missing["step_seconds"] = f"no speed of {hardware or 'this hardware'} is on record"
    else:
        try:
            seconds = step_time(setup, machine, accelerator).seconds
        except UserError as error:
            missing["step_seconds"] = str(error).splitlines()[0]
    return StartupEstimate(setup, memory_gib, memory, seconds, missing)


def _about(numbers: Range) -> str:
    """A word of caution where something that the numbers rest on is not confirmed."""
    return "about " if numbers.unverified else ""


def _ends(numbers: Range) -> dict[str, float]:
    return {"low": numbers.low.value, "high": numbers.high.value}
