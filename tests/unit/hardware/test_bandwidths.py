"""Bus bandwidth: the published curves, what lies between their points, and the bound by line
rates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drillyard.hardware import catalog
from drillyard.hardware.bandwidths import (
    MIB,
    Bandwidth,
    bus_bandwidth,
    bus_bandwidth_bound,
    bus_factor,
)
from drillyard.hardware.facts import FactSource, Provenance

A4 = catalog().machine("a4-highgpu-8g")
SOURCE = Provenance(FactSource("bench", "2026-01-01"))
CURVES = st.dictionaries(st.integers(1, 2**14), st.floats(0.1, 1000), min_size=1, max_size=6).map(
    lambda points: dict(zip(sorted(points), sorted(points.values()), strict=True))
)


def bandwidth(gb_per_s, **changes):
    values = {
        "collective": "all_gather",
        "nodes": 2,
        "num_accelerators": 16,
        "machine": "a4-highgpu-8g",
        **changes,
    }
    return Bandwidth.create(SOURCE, gb_per_s=gb_per_s, **values)


def reference(machine, *arguments):
    return bus_bandwidth(catalog().bandwidths, machine, *arguments)


def bound(machine, *arguments):
    return bus_bandwidth_bound(machine, catalog().accelerator_of(machine), *arguments)


def test_factors_are_those_of_nccl_tests():
    assert bus_factor("all_gather", 16) * 401.49 == pytest.approx(376.40, abs=0.01)
    assert bus_factor("all_gather", 16) * 201.32 == pytest.approx(188.74, abs=0.01)
    assert bus_factor("all_reduce", 16) * 231.99 == pytest.approx(434.97, abs=0.02)


def test_a_measured_size_gives_the_measured_value():
    for size_mib, gb_per_s in ((1, 15.41), (256, 338.77), (8192, 376.40)):
        found = reference(A4, "all_gather", 2, size_mib * MIB)
        assert found.gb_per_s.value == pytest.approx(gb_per_s)
        assert "NCCL 2.26.6" in found.gb_per_s.source


def test_more_nodes_than_were_measured_get_the_largest_measurement_and_its_row_says_so():
    found = reference(A4, "all_gather", 128, 8192 * MIB)
    assert (found.gb_per_s.value, found.row.nodes) == (376.40, 2)


def test_one_node_falls_back_on_any_host_with_as_many_of_its_gpus():
    p5 = catalog().machine("p5.48xlarge")
    found = reference(p5, "all_reduce", 1, 16384 * MIB)
    assert (found.gb_per_s.value, found.row.accelerator, found.row.machine) == (480, "h100", None)
    assert reference(catalog().machine("a3-highgpu-4g"), "all_reduce", 1, MIB) is None


def test_another_collective_is_no_substitute():
    assert reference(A4, "alltoall", 2, MIB) is None
    assert reference(A4, "all_reduce", 2, MIB) is None
    mega = catalog().machine("a3-megagpu-8g")
    reduce, gather = (
        reference(mega, one, 2, 2**34).gb_per_s.value for one in ("all_reduce", "all_gather")
    )
    assert reduce / gather == pytest.approx(1.8, abs=0.01)


def test_the_nearest_number_of_nodes_below_wins():
    rows = [bandwidth({8: 100.0}), bandwidth({8: 50.0}, nodes=16, num_accelerators=128)]
    values = {
        nodes: bus_bandwidth(rows, A4, "all_gather", nodes, 8 * MIB).gb_per_s.value
        for nodes in (2, 8, 16, 1000)
    }
    assert values == {2: 100.0, 8: 100.0, 16: 50.0, 1000: 50.0}
    assert bus_bandwidth(rows, A4, "all_gather", 1, 8 * MIB) is None


def test_algorithm_bandwidth_is_turned_into_bus_bandwidth():
    row = bandwidth({8: 100.0}, figure="algbw", collective="all_reduce")
    assert row.bus_gb_per_s(8 * MIB).value == pytest.approx(187.5)


@given(CURVES, st.floats(1, 2**36), st.floats(1, 2**36))
def test_between_points_bandwidth_is_monotone_and_time_never_shrinks_with_size(
    gb_per_s, size, other
):
    row = bandwidth(gb_per_s)
    small, large = sorted((size, other))
    slow, fast = row.bus_gb_per_s(small).value, row.bus_gb_per_s(large).value
    assert 0 < slow <= fast * (1 + 1e-9)
    assert fast <= max(gb_per_s.values()) * (1 + 1e-9)
    if small < min(gb_per_s) * MIB:
        assert small / slow == pytest.approx(
            min(gb_per_s) * MIB / gb_per_s[min(gb_per_s)], rel=1e-6
        )


@given(CURVES)
def test_the_curve_goes_through_its_points(gb_per_s):
    row = bandwidth(gb_per_s)
    for size, rate in gb_per_s.items():
        assert row.bus_gb_per_s(size * MIB).value == pytest.approx(rate)


def test_two_nodes_of_eight_can_reach_fifteen_times_a_gpus_share_of_the_nics():
    assert bound(A4, "all_gather", 2).value == 15 * 50
    assert bound(A4, "alltoall", 2).value == pytest.approx(50 * 15 / 8)
    assert bound(A4, "all_reduce", 64).value == pytest.approx(50 * 511 / 63)


def test_in_one_node_the_link_bounds_and_the_switch_may_add_up():
    h100 = catalog().machine("gpu-h100-sxm")
    assert bound(h100, "all_gather", 1).value == 450
    assert bound(h100, "all_reduce", 1).value == pytest.approx(450 * 1.75)


def test_one_nvlink_domain_bounds_like_one_node_and_beyond_it_the_nics_do():
    rack = catalog().machine("a4x-highgpu-4g")
    assert bound(rack, "all_gather", 18).value == 900
    assert bound(rack, "all_gather", 19).value == pytest.approx(50 * 75 / 18)


def test_no_bound_is_invented_where_no_rate_is_known():
    single = catalog().machine("gpu-h100-sxm_1gpu-16vcpu-200gb")
    assert bound(single, "all_reduce", 1) is None
    assert bound(single, "all_reduce", 2) is None
    assert bound(catalog().machine("g2-standard-96"), "all_reduce", 1) is None
