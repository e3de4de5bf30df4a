"""The 95 % interval of a simulated mean covers it in 19 of 20 simulations, also where failures or
waits are rare."""

from __future__ import annotations

import pytest

from drillyard.estimation.checkpoint_interval import SaveSchedule, expected_wall_seconds
from drillyard.estimation.simulator import Hazard, Scenario, simulate_scenario

DAY = 86_400.0
RARE = SaveSchedule(1000, 10.0, 100, 5.0, 20.0)
RARELY = Scenario(1, RARE, 0.0, 300.0, (Hazard("failure", 0.04 / RARE.failure_free_seconds),))
"""0.04 expected failures."""
TWO_SPARES = Scenario(
    64,
    SaveSchedule(20_000, 60.0, 60, 5.0, 20.0),
    60,
    240,
    (Hazard("hardware", 5e-3 / DAY, True, DAY), Hazard("other", 1.5e-3 / DAY)),
    2,
)
TWO_SPARES_WALL = 1_218_811.0
"""Seconds: mean of 4 x 20,000 replicas, whose standard error is 78; a wait, in one run of eight,
takes 11 hours."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "wall_seconds"),
    [
        (RARELY, expected_wall_seconds(RARE, 300.0, RARELY.mtbf_seconds)),
        (TWO_SPARES, TWO_SPARES_WALL),
    ],
    ids=["0.04 failures", "two spares"],
)
@pytest.mark.parametrize("replicas", [20, 60])
def test_the_interval_holds_the_mean_in_19_of_20_simulations(run, wall_seconds, replicas):
    spreads = [
        simulate_scenario(run, replicas=replicas, seed=seed).wall_seconds for seed in range(300)
    ]
    coverage = sum(one.low <= wall_seconds <= one.high for one in spreads) / len(spreads)
    assert coverage == pytest.approx(0.95, abs=0.04)
    assert min(one.low for one in spreads) >= run.schedule.failure_free_seconds


NO_SPARES = Scenario(
    8,
    SaveSchedule(3_000, 60.0, 20, 5.0, 60.0),
    60,
    240,
    (Hazard("hardware", 2e-5 / 8, True, 9 * DAY),),
    0,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "seeds"),
    [(RARELY, 20), (TWO_SPARES, 20), (NO_SPARES, 4)],
    ids=["0.04 failures", "two spares", "no spares"],
)
@pytest.mark.parametrize("replicas", [5, 20])
def test_goodput_and_its_interval_are_shares_and_in_order(run, seeds, replicas):
    for seed in range(seeds):
        goodput = simulate_scenario(run, replicas=replicas, seed=seed).goodput
        best = run.schedule.work_seconds / run.schedule.failure_free_seconds
        assert 0 <= goodput.low <= goodput.mean <= goodput.high <= best * (1 + 1e-12)
        assert goodput.percentile_5 <= goodput.percentile_95
