"""What follows from a machine's row: rates of its NICs and its storage, with the sources of
both."""

from __future__ import annotations

from typing import Any

import pytest

from drillyard.hardware.bandwidths import bus_bandwidth_bound
from drillyard.hardware.catalog import catalog, nearest_names
from drillyard.hardware.facts import FactSource, Provenance
from drillyard.hardware.machines import Machine
from drillyard.hardware.network_stacks import NetworkStack

ROW, NICS, HOSTS = (FactSource(name, "2026-01-01") for name in ("row", "data", "host"))
DATA, HOST = {"count": 8, "gbps": 400}, {"count": 2, "gbps": 100}


def machine(**fields: Any) -> Machine:
    values: dict[str, Any] = {
        "name": "m",
        "accelerator": "h100",
        "num_accelerators": 8,
        "network_stack": "infiniband",
        **fields,
    }
    return Machine.create(Provenance(ROW, {"data_nics": NICS, "host_nics": HOSTS}), **values)


@pytest.mark.parametrize(
    ("fields", "share", "sources"),
    [
        ({"data_nics": DATA, "host_nics": HOST}, 50.0, (NICS, ROW)),
        ({"host_nics": HOST}, 3.125, (HOSTS, ROW)),
        ({"data_nics": DATA, "num_accelerators": 4}, 100.0, (NICS, ROW)),
        ({}, None, None),
    ],
)
def test_each_gpus_share_of_the_nics(fields: Any, share: float | None, sources: Any) -> None:
    found = machine(**fields).nic_gb_per_s_per_accelerator()
    assert (None if found is None else found.value) == share
    assert (None if found is None else found.sources) == sources


@pytest.mark.parametrize(
    ("storage", "hosts", "num_nodes", "rate", "num_sources"),
    [
        ({"per_node_gb_per_s": 5}, HOST, 3, 15.0, 1),
        ({}, HOST, 3, 75.0, 1),
        ({"per_node_gb_per_s": 5, "aggregate_gb_per_s": 12}, HOST, 2, 10.0, 1),
        ({"per_node_gb_per_s": 5, "aggregate_gb_per_s": 12}, HOST, 3, 12.0, 1),
        ({"aggregate_gb_per_s": 30}, HOST, 1, 25.0, 2),
        ({"aggregate_gb_per_s": 30}, HOST, 2, 30.0, 2),
        ({"aggregate_gb_per_s": 30}, None, 1, 30.0, 1),
        (None, None, 4, None, 0),
        (None, HOST, 4, 100.0, 1),
    ],
)
def test_what_nodes_can_write_together(
    storage: Any, hosts: Any, num_nodes: int, rate: float | None, num_sources: int
) -> None:
    fields = {"storage": None if storage is None else {"kind": "bucket", **storage}}
    found = machine(**fields, **({} if hosts is None else {"host_nics": hosts})).storage_gb_per_s(
        num_nodes
    )
    assert (None if found is None else found.value) == rate
    assert (0 if found is None else len(found.sources)) == num_sources


def test_no_nodes_write_nothing_that_could_be_asked_for() -> None:
    with pytest.raises(AssertionError):
        machine(host_nics=HOST).storage_gb_per_s(0)


@pytest.mark.parametrize(
    ("domain", "num_nodes", "rate"),
    # One way of a GPU's link is 450 GB/s; between nodes 50 GB/s a GPU, of which 15 of 16 ranks'
    # data leave by one.
    [
        (None, 1, 450.0),
        (None, 2, 50.0 * 15),
        (16, 2, 450.0),
        (15, 2, 50.0 * 15),
        (None, 3, 50.0 * 23 / 2),
    ],
)
def test_an_nvlink_domain_over_nodes_is_bounded_by_its_links(
    domain: int | None, num_nodes: int, rate: float
) -> None:
    one = machine(data_nics=DATA, link_domain_accelerators=domain)
    found = bus_bandwidth_bound(one, catalog().accelerator("h100"), "all_gather", num_nodes)
    assert found is not None and found.value == pytest.approx(rate)


def test_one_gpu_without_a_domain_has_no_bus() -> None:
    alone = machine(num_accelerators=1, data_nics=DATA)
    assert bus_bandwidth_bound(alone, catalog().accelerator("h100"), "all_gather", 1) is None
    two = bus_bandwidth_bound(alone, catalog().accelerator("h100"), "all_gather", 2)
    assert two is not None and two.value == 400


def test_a_network_stacks_settings_and_networks() -> None:
    fields: dict[str, Any] = {
        "name": "s",
        "title": "S",
        "environment": {"A": "1", "B": "1", "LD_LIBRARY_PATH": "/lib"},
        "machine_environment": {"m": {"B": "2"}},
        "host_environment": {"C": "3"},
    }
    stack = NetworkStack.create(Provenance(ROW), **fields)
    assert stack.environment_on("m") == {"A": "1", "B": "2", "LD_LIBRARY_PATH": "/lib"}
    assert stack.host_environment_on("m") == {"A": "1", "B": "2", "C": "3"}
    assert stack.host_environment_on("other") == {"A": "1", "B": "1", "C": "3"}
    one = machine(data_nics=DATA)
    assert stack.additional_networks(one) == ()


def test_at_most_three_names_are_near() -> None:
    assert len(nearest_names("GPU-X", ["gpu-a", "gpu-b", "gpu-c", "gpu-d"])) == 3
    assert nearest_names("zzz", ["gpu-a"]) == []
