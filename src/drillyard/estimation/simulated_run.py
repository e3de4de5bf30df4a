"""What `--simulate` adds to a prediction: goodput with its spread, the best interval, and how many spares pay.

The run is simulated in the middle of its range of step times and at one failure rate: the one that was chosen, else
llama3's. As a prediction assumes, a node in place of a failed one is at hand, except where spares are counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from drillyard.errors import UserError
from drillyard.estimation.choices import IntervalChoice, SparesChoice, build_scenario, compare_intervals, compare_spares
from drillyard.estimation.failure_estimate import failure_estimate
from drillyard.estimation.run_estimate import RunEstimate
from drillyard.estimation.run_time import middle_failure_inputs
from drillyard.estimation.simulator import Simulation, simulate_scenario


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """Replicas of the run as it saves in the prediction; other intervals and numbers of spares, the best first."""

    rate: str
    simulation: Simulation
    intervals: tuple[IntervalChoice, ...]
    spares: tuple[SparesChoice, ...]
    unverified: bool
    """Whether it rests on an assumption or an unconfirmed value."""


def simulate_run(prediction: RunEstimate, *, seed: int) -> SimulatedRun:
    """Simulate the run of `prediction`. UserError where its length or the cost of its saves is not known."""
    run, timed, question = prediction.run, prediction.speed, prediction.question
    if run is None or timed is None or run.wall is None:
        missing = prediction.missing[0] if prediction.missing else None
        why = "" if missing is None else f": {missing.why}; give {missing.give}"
        raise UserError(f"--simulate needs a step time, the length of the run and the cost of a save{why}")
    job = middle_failure_inputs(run, question.place, timed.seconds, question.failures)
    first = run.outlooks[0]
    best = build_scenario(job, failure_estimate(job, first.rate))
    planned = best
    if first.best is not None:
        own = replace(job, interval_steps=first.fast.schedule.interval_steps)
        planned = build_scenario(own, failure_estimate(own, first.rate))
    price = None if prediction.cost is None else prediction.cost.price.of_node.value
    return SimulatedRun(
        first.rate.name,
        simulate_scenario(planned, seed=seed),
        compare_intervals(best, seed=seed),
        compare_spares(planned, usd_per_node_hour=price, seed=seed),
        first.fast.unverified,
    )
