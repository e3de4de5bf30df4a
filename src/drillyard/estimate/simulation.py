"""What `--simulate` adds to a prediction: goodput with its spread, the best interval, and how many spares pay.

The run is simulated in the middle of its range of step times and at one failure rate: the one that was chosen, else
llama3's. As a prediction assumes, a node in place of a failed one is at hand, except where spares are counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from drillyard.errors import UserError
from drillyard.estimate.choices import IntervalChoice, SparesChoice, compare_intervals, compare_spares, scenario_of
from drillyard.estimate.failures import failure_outlook
from drillyard.estimate.prediction import Prediction
from drillyard.estimate.run_time import middle_job
from drillyard.estimate.simulate import Simulation, simulate


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """Replicas of the run as it saves in the prediction; other intervals and numbers of spares, the best first."""

    rate: str
    simulation: Simulation
    intervals: tuple[IntervalChoice, ...]
    spares: tuple[SparesChoice, ...]
    unverified: bool
    """Whether it rests on an assumption or an unconfirmed value."""


def simulate_run(prediction: Prediction, *, seed: int) -> SimulatedRun:
    """Simulate the run of `prediction`. UserError where its length or the cost of its saves is not known."""
    run, timed, question = prediction.run, prediction.speed, prediction.question
    if run is None or timed is None or run.wall is None:
        missing = prediction.missing[0] if prediction.missing else None
        why = "" if missing is None else f": {missing.why}; give {missing.give}"
        raise UserError(f"--simulate needs a step time, the length of the run and the cost of a save{why}")
    job = middle_job(run, question.place, timed.seconds, question.failures)
    first = run.outlooks[0]
    best = scenario_of(job, failure_outlook(job, first.rate))
    planned = best
    if first.best is not None:
        own = replace(job, interval_steps=first.fast.schedule.interval_steps)
        planned = scenario_of(own, failure_outlook(own, first.rate))
    price = None if prediction.cost is None else prediction.cost.price.of_node.value
    return SimulatedRun(
        first.rate.name,
        simulate(planned, seed=seed),
        compare_intervals(best, seed=seed),
        compare_spares(planned, usd_per_node_hour=price, seed=seed),
        first.fast.unverified,
    )
