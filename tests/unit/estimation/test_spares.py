"""How long a job waits for nodes, in closed form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drillyard.estimation.simulator import cheapest_spares, waiting_share

DAY = 86_400.0
LOAD = st.floats(1e-5, 0.2)


@given(LOAD)
def test_one_node_without_spares_waits_its_own_repair(load):
    assert waiting_share(1, 0, load / DAY, DAY) == pytest.approx(load / (1 + load))


@given(LOAD, st.integers(1, 200))
def test_without_spares_all_nodes_must_be_there(load, nodes):
    """Each node is there 1/(1 + load) of the time, on its own."""
    assert waiting_share(nodes, 0, load / DAY, DAY) == pytest.approx(
        1 - (1 + load) ** -nodes, rel=1e-6, abs=1e-12
    )


@given(LOAD, st.integers(1, 500), st.integers(0, 50))
def test_one_more_spare_never_makes_the_job_wait_longer(load, nodes, spares):
    share = waiting_share(nodes, spares, load / DAY, DAY)
    # Sums of hundreds of terms differ in their last bits.
    more = waiting_share(nodes, spares + 1, load / DAY, DAY)
    assert 0 <= more <= share + 1e-12 and share <= 1


@given(LOAD, st.integers(1, 60))
def test_the_cheapest_number_of_spares_is_a_minimum(load, nodes):
    def cost(spares):
        return (nodes + spares) / (1 - waiting_share(nodes, spares, load / DAY, DAY))

    best = cheapest_spares(nodes, load / DAY, DAY)
    assert all(cost(best) <= cost(spares) * (1 + 1e-12) for spares in range(0, best + 30))


def test_a_large_cluster_s_cheapest_number_is_a_minimum_too():
    def cost(spares):
        return (12_500 + spares) / (1 - waiting_share(12_500, spares, 5e-3 / DAY, DAY))

    best = cheapest_spares(12_500, 5e-3 / DAY, DAY)
    assert 62.5 < best < 62.5 + 5 * 62.5**0.5
    assert all(cost(best) <= cost(spares) for spares in (35, 50, 62, best - 1, best + 1, best + 30))


def test_nodes_that_never_fail_need_no_spares():
    assert waiting_share(1000, 0, 0.0, DAY) == 0
    assert cheapest_spares(1000, 0.0, DAY) == 0


def test_large_clusters_do_not_overflow():
    assert 0 < waiting_share(100_000, 3000, 0.03 / DAY, DAY) < 1
