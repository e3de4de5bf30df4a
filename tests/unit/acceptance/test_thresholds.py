"""Thresholds of collectives: from measured rows of the same machine, nodes and size, and from
nothing else."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drillyard.acceptance.check import Expected
from drillyard.acceptance.results import Status, Threshold
from drillyard.acceptance.thresholds import (
    NoReference,
    accepted_elsewhere,
    collective_threshold,
    deciding_size,
    judged,
    lost_nic_text,
    required_sizes,
)
from drillyard.hardware import catalog
from drillyard.hardware.bandwidths import MIB, Bandwidth
from drillyard.hardware.facts import FactSource, Provenance

ROWS = [row for row in catalog().bandwidths if row.role == "measured"]


def expected(machine):
    facts = catalog()
    found = facts.machine(machine)
    return Expected(facts, found, facts.accelerator_of(found), None)


def machines_of(row):
    """Machines that a row is of."""
    return [
        machine.name
        for machine in catalog().machines.values()
        if row.num_accelerators == row.nodes * machine.num_accelerators
        and (row.machine == machine.name or row.accelerator == machine.accelerator)
    ]


def contradictions(rows):
    """What is wrong with the thresholds of rows."""
    for row in rows:
        for machine in machines_of(row):
            facts = expected(machine)
            for size, measured in row.gb_per_s.items():
                found = collective_threshold(facts, row.collective, row.nodes, size * MIB)
                if isinstance(found, NoReference):
                    yield f"{machine}, {size}: {found.reason}"
                elif found.bound is not None and not found.value <= found.reference <= found.bound:
                    yield f"{machine}, {size}: {found} is above the bound"
                elif not 7 / 8 * measured < found.value and measured == found.reference:
                    yield f"{machine}, {size}: {found} lets a lost NIC pass"
                elif not found.reference / 2 <= found.value < found.reference:
                    yield f"{machine}, {size}: {found}"


def planted(monkeypatch, **values):
    """The catalog with one more row."""
    row = Bandwidth.create(
        Provenance(FactSource("planted", "2026-01-01")),
        **{"collective": "all_gather", "nodes": 2, "num_accelerators": 16, **values},
    )
    monkeypatch.setitem(catalog().__dict__, "bandwidths", (*catalog().bandwidths, row))
    return row


def test_every_measured_row_has_machines():
    assert [row for row in ROWS if not machines_of(row)] == []


def test_thresholds_of_all_measured_rows():
    assert list(contradictions(ROWS)) == []


def test_a_row_above_what_line_rates_allow_is_noticed(monkeypatch):
    row = planted(monkeypatch, machine="a4-highgpu-8g", gb_per_s={8192: 751.0})
    assert list(contradictions([row]))
    assert isinstance(
        collective_threshold(expected("a4-highgpu-8g"), "all_gather", 2, 8 << 30), NoReference
    )


def test_a_minimum_is_quoted_and_never_used(monkeypatch):
    planted(monkeypatch, machine="a4-highgpu-8g", role="minimum", gb_per_s={8192: 700.0})
    facts = expected("a4-highgpu-8g")
    found = collective_threshold(facts, "all_gather", 2, 8 << 30)
    assert isinstance(found, Threshold) and found.reference == 376.40
    assert any("700" in text for text in accepted_elsewhere(facts, "all_gather", 2))
    only_minimum = expected("a4x-highgpu-4g")
    assert isinstance(collective_threshold(only_minimum, "all_gather", 2, 8 << 30), NoReference)


@pytest.mark.parametrize(
    ("machine", "collective", "nodes", "size"),
    [("a4-highgpu-8g", "all_gather", 4, 8 << 30),
     ("a4-highgpu-8g", "all_gather", 1, 8 << 30),
     ("a4-highgpu-8g", "all_reduce", 2, 8 << 30),
     ("a4-highgpu-8g", "all_gather", 2, 1 << 19),
     ("a4-highgpu-8g", "all_gather", 2, 64 << 30),
     ("a3-highgpu-8g", "all_reduce", 1, 8 << 30),
     ("p6-b200.48xlarge", "all_reduce", 8, 8 << 30)],
)  # fmt: skip
def test_another_scope_or_size_is_not_a_reference(machine, collective, nodes, size):
    assert isinstance(collective_threshold(expected(machine), collective, nodes, size), NoReference)


def test_a_row_of_fewer_nodes_is_named():
    found = collective_threshold(expected("a4-highgpu-8g"), "all_gather", 4, 8 << 30)
    assert isinstance(found, NoReference)
    assert "2 nodes" in found.reason


def test_large_messages_decide():
    facts = expected("a4-highgpu-8g")
    sizes = [1 << power for power in range(10, 34)]
    assert deciding_size(facts, "all_gather", 2, sizes) == 8 << 30
    assert deciding_size(facts, "all_gather", 2, [*sizes, 1 << 35]) == 8 << 30
    assert isinstance(deciding_size(facts, "all_gather", 2, sizes[:20]), NoReference)
    assert isinstance(deciding_size(facts, "all_gather", 2, []), NoReference)
    h100 = expected("gpu-h100-sxm")
    assert deciding_size(h100, "all_reduce", 2, [1000 * MIB]) == 1000 * MIB
    assert deciding_size(h100, "all_reduce", 2, sizes) == 1 << 30


def test_what_a_machine_must_show():
    assert set(required_sizes(expected("a4-highgpu-8g"), 2)) == {"all_gather"}
    assert set(required_sizes(expected("a3-ultragpu-8g"), 1)) == {
        "all_reduce", "all_gather", "reduce_scatter",
    }  # fmt: skip


def test_what_a_lost_nic_leaves():
    machine = catalog().machine("a4-highgpu-8g")
    assert "329.3" in lost_nic_text(machine, 2, 376.4)
    assert lost_nic_text(machine, 1, 839.0) == ""


@given(st.lists(st.floats(1, 1000), min_size=1, max_size=9), st.floats(1, 1000))
def test_a_fail_needs_every_repeat_below_and_a_pass_the_median_above(values, limit):
    threshold = Threshold(limit, "GB/s", True, "test")
    status, median, (low, high) = judged(values, threshold)
    assert low <= median <= high
    assert (status is Status.fail) == (high < limit)
    assert (status is Status.passed) == (median >= limit)
    upwards = dataclasses.replace(threshold, at_least=False)
    assert (judged(values, upwards)[0] is Status.fail) == (low > limit)
