"""What the estimate says of a run before it is handed to a scheduler, in one line, and whether it should be.

A run that cannot fit is money for an error message. What cannot be predicted is said and stops nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from drillyard.config.run import RunConfig
from drillyard.errors import UserError
from drillyard.estimation.model_source import ModelOptions, find_model
from drillyard.estimation.request import EstimateRequest
from drillyard.estimation.run_estimate import estimate_run
from drillyard.estimation.startup_estimate import startup_estimate
from drillyard.estimation.target import cluster_target
from drillyard.launch.request import LaunchRequest


@dataclass(frozen=True)
class PreflightResult:
    """`line`: for a person. `fits` is False only where the estimate says that it does not."""

    line: str
    fits: bool = True


def preflight_estimate(request: LaunchRequest) -> PreflightResult | None:
    """The estimate's line; None for workloads of others and where no machine is named."""
    run, cluster = request.run, request.cluster
    if not isinstance(run, RunConfig) or cluster.machine is None:
        return None
    try:
        place = cluster_target(cluster, request.facts)
        predicted = estimate_run(
            EstimateRequest(config=run, model=find_model(run, ModelOptions()), place=place, facts=request.facts)
        )
    except UserError as error:
        return PreflightResult(f"Estimate: none: {str(error).splitlines()[0]}")
    available = predicted.available_gib
    told = startup_estimate(
        predicted.setup, None if available is None else available.value, place.accelerator, place.machine
    )
    line = told.line()
    if predicted.cost is not None and (dollars := predicted.cost.of_run) is not None:
        line += f"; about ${dollars.low.value:,.0f} to ${dollars.high.value:,.0f} in all"
    return PreflightResult(line, told.verdict != "does not fit")


def cost_key(request: LaunchRequest) -> str:
    """The same for requests whose estimates are equal: those of a sweep over what costs no time and no memory."""
    run = request.run.model_dump(mode="json", exclude={"name": True, "training": {"optimizer", "schedule", "seed"}})
    return f"{request.cluster.name} {run}"
