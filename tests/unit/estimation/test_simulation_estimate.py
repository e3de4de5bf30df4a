"""Which interval is best and how many spares pay, by simulation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drillyard.estimation.failure_estimate import failure_estimate
from drillyard.estimation.failure_rates import failure_rate
from drillyard.estimation.simulation_estimate import (
    build_scenario,
    compare_intervals,
    compare_spares,
    default_spares,
)

RSC1 = failure_rate("rsc1")
FAST = {"asynchronous": False, "storage_gb_per_s": 800}


@pytest.fixture
def job(make_job):
    return make_job(num_nodes=512, cost=FAST, steps=100_000)


@pytest.fixture
def scenario(job):
    """Nodes are back after six hours."""
    found = build_scenario(job, failure_estimate(job, RSC1))
    hazards = tuple(
        replace(one, away_seconds=6 * 3600) if one.takes_node else one for one in found.hazards
    )
    return replace(found, hazards=hazards)


def test_the_scenario_is_that_of_the_outlook(job):
    outlook = failure_estimate(job, RSC1)
    scenario = build_scenario(job, outlook)
    assert scenario.schedule == outlook.schedule
    assert scenario.restart_seconds == job.restart.total.value
    assert scenario.mtbf_seconds == pytest.approx(outlook.mtbf_seconds)
    shares = [hazard.per_node_second for hazard in scenario.hazards]
    assert shares[0] / sum(shares) == pytest.approx(0.78)


def test_preemptions_are_a_hazard_of_their_own(make_job):
    job = make_job(num_nodes=64, preemptions_per_node_day=0.02)
    scenario = build_scenario(job, failure_estimate(job, RSC1))
    preemption = scenario.hazards[-1]
    assert (preemption.name, preemption.takes_node, preemption.away_seconds) == (
        "preemption",
        True,
        86_400,
    )
    assert scenario.mtbf_seconds == pytest.approx(86_400 / 64 / (0.02 + 6.5e-3))


def test_the_closed_form_ranks_intervals_and_the_simulation_agrees(scenario):
    ranked = compare_intervals(scenario, replicas=100)
    assert ranked[0].interval_steps == scenario.schedule.interval_steps
    assert ranked[0].as_good
    assert not ranked[-1].as_good
    for choice in ranked:
        assert choice.simulation.goodput.mean == pytest.approx(choice.expected_goodput, rel=2e-3)


@pytest.mark.parametrize("seed", range(10))
def test_rare_failures_leave_the_best_interval_as_it_is(make_job, seed):
    """0.04 failures in a run whose saves cost something: sampling noise must not choose the
    interval."""
    job = make_job(num_nodes=4, cost={"asynchronous": False, "storage_gb_per_s": 0.5}, steps=20_000)
    outlook = failure_estimate(job, failure_rate("llama3"))
    assert outlook.named("expected interruptions").value == pytest.approx(0.04, abs=0.01)
    run = build_scenario(job, outlook)
    best = run.schedule.interval_steps
    ranked = compare_intervals(run, replicas=20, seed=seed)
    assert ranked[0].interval_steps == best
    assert [one.expected_goodput for one in ranked[1:]] == sorted(
        (one.expected_goodput for one in ranked[1:]), reverse=True
    )


def test_spares_pay_until_nobody_waits(scenario):
    ranked = compare_spares(scenario, [0, 1, 2, 4, 20], usd_per_node_hour=80.0, replicas=10)
    by_count = {choice.spares: choice for choice in ranked}
    waiting = [
        by_count[count].simulation.spread_of(lambda one: one.waiting).mean
        for count in (0, 1, 2, 4, 20)
    ]
    assert waiting == sorted(waiting, reverse=True)
    assert waiting[-1] == 0
    assert ranked[0].spares in (2, 4)
    assert ranked[0].as_good
    assert not by_count[0].as_good
    assert not by_count[20].as_good
    assert by_count[0].usd == pytest.approx(by_count[0].node_hours * 80)
    assert by_count[0].node_hours == pytest.approx(
        512 * by_count[0].simulation.wall_seconds.mean / 3600
    )


def test_the_repair_model_proposes_what_the_simulation_confirms(scenario):
    assert set(default_spares(scenario)) >= {2, 3, 4}
    ranked = compare_spares(scenario, default_spares(scenario), replicas=10)
    assert {choice.spares for choice in ranked if choice.as_good} & {2, 3, 4}
    assert ranked[0].usd is None
