"""Many estimates at once: every combination of some settings, and which of them are worth having.

Combinations train different numbers of tokens in a step, so all are compared on the same work: the
tokens of the run as it is written (a billion where its length is not known). A combination is on
the Pareto front of cost against time when no other that fits is both faster and cheaper. Times and
costs are the geometric means of their ranges; a bound would win against everything measured and is
left out of the front, unless there is nothing else.

An impossible combination (a batch that does not divide, a machine not sold so) keeps its reason and
does not end the sweep; a value that no run config may hold does. Cost: that of an estimate for each
point.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from drillyard.config.run import RunConfig
from drillyard.config.sweep_grammar import Axis, combinations
from drillyard.config.validation_errors import find_problems
from drillyard.errors import UserError
from drillyard.estimation.quantity import SECONDS_PER_HOUR
from drillyard.estimation.request import EstimateRequest
from drillyard.estimation.run_estimate import RunEstimate, estimate_run

Combination = tuple[Mapping[str, Any], RunConfig]
Progress = Callable[[Sequence[Combination]], Iterable[Combination]]
TOKENS_OF_NO_RUN = 1e9


@dataclass(frozen=True, slots=True)
class SweepEstimate:
    """One combination: its values by key, its estimate, or why there is none (`refusal`).

    `hours` and `cost` (in GPU-hours where there is no price) are those of the sweep's tokens.
    """

    values: Mapping[str, Any]
    estimate: RunEstimate | None
    refusal: str
    hours: float | None
    cost: float | None
    on_front: bool = False

    @property
    def is_bound(self) -> bool:
        """Whether only the better end of its step time is known."""
        timed = None if self.estimate is None else self.estimate.step_time
        return timed is not None and timed.seconds.is_bound

    @property
    def unverified(self) -> bool:
        """Whether one of its figures rests on an assumption or an unconfirmed value."""
        one = self.estimate
        return one is not None and (
            (one.memory is not None and one.memory.total.unverified)
            or (one.step_time is not None and one.step_time.seconds.unverified)
            or (one.run_time is not None and one.run_time.longest.unverified)
            or (one.cost is not None and one.cost.of_step.unverified)
        )


@dataclass(frozen=True, slots=True)
class SweepResult:
    """All points in the order of the axes. `cost_unit` is `$`, or `GPU-hours` where a price is
    missing.

    `with_failures`: whether times hold saves and failures; they do where that is known of every
    point.
    """

    axes: Sequence[Axis]
    points: Sequence[SweepEstimate]
    tokens: float
    cost_unit: str
    with_failures: bool

    @property
    def decides_recomputation(self) -> bool:
        """Whether `activation_checkpointing: auto` was resolved for each point."""
        possible = (point.estimate for point in self.points if point.estimate is not None)
        return any(
            one.request.config.training.activation_checkpointing == "auto" for one in possible
        )

    @property
    def front(self) -> list[SweepEstimate]:
        """The Pareto front, the fastest first."""
        return sorted(
            (point for point in self.points if point.on_front), key=lambda point: point.hours or 0.0
        )


def run_sweep(
    request: EstimateRequest, axes: Sequence[Axis], progress: Progress = iter
) -> SweepResult:
    """Estimate all combinations of `axes` around `request`; `progress` passes them on, and may show
    it.

    UserError where the run itself cannot be estimated, or a value is none that its setting may
    have.
    """
    chosen = list(combinations(axes))
    base = estimate_run(request)
    request = replace(
        request, tokens=TOKENS_OF_NO_RUN if base.run_time is None else base.run_time.tokens
    )
    configs = []
    for values in chosen:
        settings = {
            axis.path: values[axis.key] for axis in axes if axis.path not in ("nodes", "machine")
        }
        configs.append((values, with_settings(request.config, settings)))
    estimated = [
        (values, *_estimated(replace(request, config=config), values))
        for values, config in progress(configs)
    ]
    timed = [one for _, one, _ in estimated if one is not None and one.run_time is not None]
    with_failures = all(one.run_time is not None and one.run_time.wall is not None for one in timed)
    priced = bool(timed) and all(one.cost is not None for one in timed)
    found = [
        SweepEstimate(
            values, one, refusal, *_figures(one, priced=priced, with_failures=with_failures)
        )
        for values, one, refusal in estimated
    ]
    assert request.tokens is not None
    cost_unit = "$" if priced else "GPU-hours"
    return SweepResult(
        tuple(axes), tuple(mark_front(found)), request.tokens, cost_unit, with_failures
    )


def with_settings(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """`config` with other `settings`, by dotted key. UserError for one that it does not have or may
    not hold."""
    if not settings:
        return config
    content: dict[str, Any] = copy.deepcopy(config.model_dump(mode="json"))
    for key, value in settings.items():
        *sections, last = key.split(".")
        here = content
        for section in sections:
            if not isinstance(here.get(section), dict):
                here[section] = {}
            here = here[section]
        here[last] = value
    try:
        return RunConfig.model_validate_json(
            json.dumps(content), strict=True, context={"resolve_environment": False}
        )
    except ValidationError:
        found = next(iter(find_problems(RunConfig, content)))
        raise UserError(f"--sweep: {'.'.join(map(str, found.path))}: {found.message}") from None


def _estimated(
    request: EstimateRequest, values: Mapping[str, Any]
) -> tuple[RunEstimate | None, str]:
    """The estimate on the machine and nodes of `values`, or why there is none."""
    target = request.target
    try:
        if "machine" in values:
            target = target.with_machine(str(values["machine"]), request.facts)
        if "nodes" in values:
            target = target.with_nodes(values["nodes"])
        return estimate_run(replace(request, target=target)), ""
    except UserError as error:
        return None, str(error).splitlines()[0]


def _figures(
    one: RunEstimate | None, *, priced: bool, with_failures: bool
) -> tuple[float | None, float | None]:
    """Hours and dollars (or GPU-hours) of an estimate, in the middle of their ranges."""
    if one is None or one.run_time is None:
        return None, None
    hours = (
        one.run_time.longest if with_failures else one.run_time.failure_free
    ).middle / SECONDS_PER_HOUR
    if not priced or one.cost is None:
        return hours, hours * one.request.target.num_gpus
    return hours, hours * one.cost.price.of_all.value


def mark_front(found: Iterable[SweepEstimate]) -> list[SweepEstimate]:
    """Mark the points of the front; runs that the trainer refuses are not on it unless all are."""
    listed = list(found)
    refused: dict[int, bool] = {
        index: bool(point.estimate.refusals)
        for index, point in enumerate(listed)
        if point.hours is not None
        and point.estimate is not None
        and point.estimate.verdict in ("fits", "unknown")
    }
    fitting = [index for index in refused if not refused[index]] or list(refused)
    measured = [index for index in fitting if not listed[index].is_bound]
    best = math.inf
    for index in sorted(
        measured or fitting, key=lambda index: (listed[index].hours, listed[index].cost)
    ):
        if (cost := listed[index].cost) is not None and cost < best:
            best = cost
            listed[index] = replace(listed[index], on_front=True)
    return listed
