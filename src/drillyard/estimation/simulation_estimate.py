"""Additions of `--simulate` to an estimate: goodput with its spread, the best interval, and how
many spares pay off.

The run is simulated in the middle of its range of step times and at one failure rate: the one that
was chosen, else llama3's. As in the estimate, a node in place of a failed one is at hand, except
where spares are counted.

Intervals are ranked by the closed form of `checkpoint_interval`, which is exact while a node is
always at hand; simulation adds how much single runs vary. For spares there is no such form. There
all candidates get the same failures: a candidate whose difference to the cheapest one has 0 within
its 95 % interval is reported as equally cheap.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from drillyard.errors import UserError
from drillyard.estimation.checkpoint_interval import (
    LEAST_GAIN,
    expected_wall_seconds,
    least_interval_steps,
)
from drillyard.estimation.confidence import mean_interval
from drillyard.estimation.failure_estimate import FailureEstimate, FailureInputs, failure_estimate
from drillyard.estimation.failure_rates import assumptions
from drillyard.estimation.quantity import SECONDS_PER_DAY, SECONDS_PER_HOUR
from drillyard.estimation.run_estimate import RunEstimate
from drillyard.estimation.run_time import middle_failure_inputs
from drillyard.estimation.simulator import (
    Hazard,
    Scenario,
    Simulation,
    cheapest_spares,
    simulate_scenario,
)

INTERVAL_FACTORS = (0.25, 0.5, 0.71, 1.0, 1.41, 2.0, 4.0)


@dataclass(frozen=True, slots=True)
class IntervalChoice:
    """One interval: its goodput by the closed form, and its runs simulated.

    `as_good`: the run takes less than LEAST_GAIN longer than at the best interval.
    """

    interval_steps: int
    expected_goodput: float
    simulation: Simulation
    as_good: bool


@dataclass(frozen=True, slots=True)
class SparesChoice:
    """One number of spares, simulated. `node_hours`, those of spares included, are the mean; `usd`
    needs a price.

    `as_good`: its node-hours cannot be distinguished from the cheapest one's.
    """

    spares: int
    simulation: Simulation
    node_hours: float
    usd: float | None
    as_good: bool


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """Replicas of the run as it saves in the estimate; other intervals and numbers of spares, the
    best first."""

    rate: str
    simulation: Simulation
    intervals: tuple[IntervalChoice, ...]
    spares: tuple[SparesChoice, ...]
    unverified: bool
    """Whether it rests on an assumption or an unconfirmed value."""


def simulate_run(estimate: RunEstimate, *, seed: int) -> SimulatedRun:
    """Simulate the run of `estimate`. UserError where its length or the cost of its saves is not
    known."""
    run, timed, request = estimate.run_time, estimate.step_time, estimate.request
    if run is None or timed is None or run.wall is None:
        missing = estimate.missing[0] if estimate.missing else None
        why = "" if missing is None else f": {missing.why}; give {missing.give}"
        raise UserError(
            f"--simulate needs a step time, the length of the run and the cost of a save{why}"
        )
    job = middle_failure_inputs(run, request.target, timed.seconds, request.failures)
    first = run.failures[0]
    planned = best = build_scenario(job, failure_estimate(job, first.rate))
    if first.best is not None:
        own = replace(job, interval_steps=first.fast.schedule.interval_steps)
        planned = build_scenario(own, failure_estimate(own, first.rate))
    price = None if estimate.cost is None else estimate.cost.price.of_node.value
    return SimulatedRun(
        first.rate.name,
        simulate_scenario(planned, seed=seed),
        compare_intervals(best, seed=seed),
        compare_spares(planned, default_spares(planned), usd_per_node_hour=price, seed=seed),
        first.fast.unverified,
    )


def build_scenario(job: FailureInputs, failures: FailureEstimate) -> Scenario:
    """The scenario of an estimate: the same failures, interval and restart, and a node always at
    hand.

    A share of the failures (node_share) takes a node, which is back after repair_seconds in the
    mean; so is a preempted one.
    """
    share, repair = (assumptions()[name].value for name in ("node_share", "repair_seconds"))
    per_node = failures.named("failures per day").value / job.num_nodes / SECONDS_PER_DAY
    hazards = [
        Hazard("hardware", per_node * share, True, repair),
        Hazard("other", per_node * (1 - share)),
    ]
    if job.preemptions_per_node_day:
        hazards.append(
            Hazard("preemption", job.preemptions_per_node_day / SECONDS_PER_DAY, True, repair)
        )
    restart = job.restart
    return Scenario(
        num_nodes=job.num_nodes,
        schedule=failures.schedule,
        detect_seconds=restart.detect.value,
        start_seconds=restart.start.value + restart.load.value,
        hazards=tuple(hazards),
    )


def compare_intervals(
    scenario: Scenario, *, replicas: int | None = None, seed: int = 0
) -> tuple[IntervalChoice, ...]:
    """Goodput at intervals from a quarter to four times the scenario's own, the best first.

    The scenario's own interval is the best one unless another takes LEAST_GAIN less time, the rule
    that it was chosen by (`choose_schedule`). The scenario has no limit on spares.
    """
    assert scenario.spares is None
    schedule = scenario.schedule
    least = least_interval_steps(schedule.step_seconds, schedule.drain_seconds, schedule.steps)
    around = (round(factor * schedule.interval_steps) for factor in INTERVAL_FACTORS)
    variants, expected = {}, {}
    for count in sorted({min(max(count, least), schedule.steps) for count in around}):
        changed = replace(schedule, interval_steps=count)
        variants[count] = replace(scenario, schedule=changed)
        expected[count] = expected_wall_seconds(
            changed, scenario.restart_seconds, scenario.mtbf_seconds
        )
    longest_as_good = min(expected.values()) / (1 - LEAST_GAIN)

    def rank(count: int) -> tuple[bool, float]:
        return not (
            count == schedule.interval_steps and expected[count] <= longest_as_good
        ), expected[count]

    def choice(count: int) -> IntervalChoice:
        simulation = simulate_scenario(variants[count], replicas=replicas, seed=seed)
        return IntervalChoice(
            count,
            schedule.work_seconds / expected[count],
            simulation,
            expected[count] <= longest_as_good,
        )

    return tuple(map(choice, sorted(variants, key=rank)))


def compare_spares(
    scenario: Scenario,
    candidates: Iterable[int],
    *,
    usd_per_node_hour: float | None = None,
    replicas: int | None = None,
    seed: int = 0,
) -> tuple[SparesChoice, ...]:
    """Node-hours of the whole run with each number of spares, cheapest first. A spare costs as much
    as a node."""
    simulated, hours = {}, {}
    for spares in sorted(set(candidates)):
        result = simulate_scenario(replace(scenario, spares=spares), replicas=replicas, seed=seed)
        simulated[spares] = result
        hours[spares] = (scenario.num_nodes + spares) * result.wall_seconds.mean / SECONDS_PER_HOUR
    ranked = sorted(simulated, key=lambda spares: (hours[spares], spares))
    cheapest = simulated[ranked[0]]
    return tuple(
        SparesChoice(
            spares,
            simulated[spares],
            hours[spares],
            None if usd_per_node_hour is None else hours[spares] * usd_per_node_hour,
            spares == ranked[0] or _as_cheap(simulated[spares], cheapest),
        )
        for spares in ranked
    )


def _as_cheap(dearer: Simulation, cheapest: Simulation) -> bool:
    """Whether 0 is within the 95 % interval of the difference in node-hours, replica by replica.

    The difference of runs without a failure is known. That of the others has its long tail towards
    the one with fewer spares, which waits for nodes; the mean of such waits is as uncertain as that
    of a run's time.
    """
    one, other = dearer.scenario, cheapest.scenario
    nodes, other_nodes = one.num_nodes + (one.spares or 0), other.num_nodes + (other.spares or 0)
    known = (nodes - other_nodes) * one.schedule.failure_free_seconds
    drawn = [
        nodes * left.wall_seconds - other_nodes * right.wall_seconds
        for left, right in zip(dearer.outcomes, cheapest.outcomes, strict=True)
    ]
    if not drawn:
        return known <= 0
    fewer = min(nodes, other_nodes) - one.num_nodes
    bound = min(drawn) if nodes < other_nodes else max(drawn)
    low, _ = mean_interval(
        drawn, bound, one.mean_away_seconds / (fewer + 1) * min(nodes, other_nodes)
    )
    return one.no_failure_share * known + (1 - one.no_failure_share) * low <= 0


def default_spares(scenario: Scenario) -> list[int]:
    """Numbers of spares worth simulating: around the cheapest by the machine-repair model.

    Numbers with which the job waits most of the time are left out: they never pay, and take long.
    """
    cheapest = cheapest_spares(
        scenario.num_nodes, scenario.node_losses_per_node_second, scenario.mean_away_seconds
    )
    around = {round(cheapest * factor) for factor in (0.5, 0.75, 0.9, 1.0, 1.1, 1.5)}
    working = {
        spares for spares in around if replace(scenario, spares=spares).waiting_share() < 0.5
    }
    return sorted(working | {max(0, cheapest - 1), cheapest, cheapest + 1})
