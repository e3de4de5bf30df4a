"""Results of checks, and the verdict that follows from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How a result ended. `recorded`: a figure that is not judged and does not count."""

    passed = "pass"
    warn = "warn"
    fail = "fail"
    incomplete = "incomplete"
    skipped = "skipped"
    recorded = "recorded"


@dataclass(frozen=True, slots=True)
class Threshold:
    """A limit and where it comes from. `at_least`: the observed value must not be below `value`,
    otherwise not above it."""

    value: float
    unit: str
    at_least: bool
    source: str
    """The cited row, rule or baseline."""
    reference: float | None = None
    """The reference value; the threshold is a fraction of it."""
    bound: float | None = None
    """What the hardware allows at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One judged figure. `nodes` are ranks: the node, the pair, or all that it is about.

    `observed` is the figure; None: there is none. `culprits` are the nodes that this result
    proves to be at fault; empty where it does not say which. Only `required` results decide the
    verdict.
    """

    check: str
    metric: str
    nodes: tuple[int, ...]
    status: Status
    reason: str
    """One sentence: what was seen, and what follows."""
    observed: float | str | None = None
    interval: tuple[float, float] | None = None
    unit: str = ""
    threshold: Threshold | None = None
    expected: str = ""
    """What is expected, in words, where there is no threshold."""
    device: int | None = None
    action: str = ""
    """What to do."""
    culprits: tuple[int, ...] = ()
    evidence: tuple[str, ...] = ()
    """Lines of output or figures on which it rests."""
    required: bool = True
    series: tuple[tuple[float, float], ...] = ()
    """(bytes, GB/s): the curve of which `observed` is one point."""
    reference_series: tuple[tuple[float, float], ...] = ()
    """The same curve as it was measured elsewhere."""


def verdict_of(results: Iterable[CheckResult]) -> Status:
    """The verdict of a whole job: the worst status of its required results. Nothing judged is
    incomplete."""
    found = {each.status for each in results if each.required}
    for status in (Status.fail, Status.incomplete, Status.warn):
        if status in found:
            return status
    return Status.passed if Status.passed in found else Status.incomplete


EXIT_CODES = {Status.passed: 0, Status.warn: 0, Status.fail: 1, Status.incomplete: 3}
"""By verdict. A mistake in a config is 2."""
