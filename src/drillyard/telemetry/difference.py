"""The first step at which two runs differ: their metrics compared step by step, to the bit.

Losses are written with `repr`, so equal text means equal bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from drillyard.errors import UserError
from drillyard.formatting import number_list
from drillyard.guarded_files import is_there
from drillyard.telemetry.metrics import METRICS_FILE, read_metrics

COMPARED: Final = ("loss", "grad_norm")


@dataclass(frozen=True, slots=True)
class Divergence:
    """Difference in one metric: at the first step with a difference, and at the step with the
    largest.

    Differences are absolute; `relative` ones are over the larger magnitude of the two. The
    difference to a missing or non-finite value is infinite.
    """

    metric: str
    first_step: int
    first_values: tuple[float | None, float | None]
    first_difference: float
    first_relative: float
    largest_step: int
    largest_difference: float
    largest_relative: float
    steps: int


@dataclass(frozen=True, slots=True)
class Difference:
    """The comparison of two runs: common steps, steps that only one has, and the metrics that
    differ."""

    common_steps: int
    only_first: tuple[int, ...]
    only_second: tuple[int, ...]
    divergences: tuple[Divergence, ...]

    @property
    def equal(self) -> bool:
        """Same steps, same bits."""
        return not (self.only_first or self.only_second or self.divergences)


def compare_runs(first: Path, second: Path) -> Difference:
    """Compare the metrics of two run directories; the last occurrence of a repeated step counts.

    Raises UserError for a directory without a logged step, and for two without a common one.
    """
    left, right = _by_step(first), _by_step(second)
    common = sorted(left.keys() & right.keys())
    if not common:
        raise UserError(
            f"{first} and {second} have no logged step in common"
            f" ({min(left)}..{max(left)} and {min(right)}..{max(right)})."
        )
    divergences = (_divergence(metric, common, left, right) for metric in COMPARED)
    return Difference(
        common_steps=len(common),
        only_first=tuple(sorted(left.keys() - right.keys())),
        only_second=tuple(sorted(right.keys() - left.keys())),
        divergences=tuple(divergence for divergence in divergences if divergence is not None),
    )


def _by_step(run_directory: Path) -> dict[int, dict[str, Any]]:
    if not is_there(run_directory / METRICS_FILE):
        raise UserError(
            f"{run_directory}: has no {METRICS_FILE}: give the directory of a run, such as"
            " runs/NAME."
        )
    records = {record["step"]: record for record in read_metrics(run_directory)}
    if not records:
        raise UserError(f"{run_directory / METRICS_FILE}: holds no logged step yet.")
    return records


def _divergence(
    metric: str, steps: list[int], left: dict[int, dict[str, Any]], right: dict[int, dict[str, Any]]
) -> Divergence | None:
    """Compare `metric` over `steps`; None when it is equal to the bit at each of them."""
    pairs = [(step, left[step].get(metric), right[step].get(metric)) for step in steps]
    different = [(step, a, b) for step, a, b in pairs if repr(a) != repr(b)]
    if not different:
        return None
    first_step, a, b = different[0]
    largest_step, c, d = max(different, key=lambda item: _difference(item[1], item[2])[0])
    first, largest = _difference(a, b), _difference(c, d)
    return Divergence(metric, first_step, (a, b), *first, largest_step, *largest, len(different))


def _difference(a: float | None, b: float | None) -> tuple[float, float]:
    """The absolute and the relative difference."""
    if a is None or b is None or not (math.isfinite(a) and math.isfinite(b)):
        return math.inf, math.inf
    difference = abs(a - b)
    return difference, difference / max(abs(a), abs(b)) if difference else 0.0


def format_difference(difference: Difference, first: Path, second: Path) -> str:
    """The comparison in a few lines for people."""
    lines = [f"A {first}", f"B {second}"]
    for divergence in difference.divergences:
        a, b = divergence.first_values
        lines += [
            f"{divergence.metric} differs first at step {divergence.first_step}: A {a!r}, B {b!r}",
            (
                f"  by {divergence.first_difference:.3g} (relative"
                f" {divergence.first_relative:.3g}); at {divergence.steps} of"
                f" {difference.common_steps} common steps, most at step {divergence.largest_step}:"
                f" {divergence.largest_difference:.3g} (relative {divergence.largest_relative:.3g})"
            ),
        ]
    for name, steps in (("A", difference.only_first), ("B", difference.only_second)):
        if steps:
            lines.append(f"{len(steps)} steps only in {name}: {_ranges(steps)}")
    same = [
        metric
        for metric in COMPARED
        if metric not in {item.metric for item in difference.divergences}
    ]
    if same:
        lines.append(
            f"Equal to the bit at all {difference.common_steps} common steps: {', '.join(same)}"
        )
    return "\n".join(lines)


def _ranges(steps: tuple[int, ...]) -> str:
    """The first five ranges of steps: 1-3, 7, 9-12, 15, 20, ..."""
    ranges = number_list(steps).split(", ")
    return ", ".join([*ranges[:5], *(["..."] if len(ranges) > 5 else [])])
