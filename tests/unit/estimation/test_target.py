"""Where a run is to be: by machine, by cluster config, or by nothing but its accelerator."""

from __future__ import annotations

import pytest
from tests.unit.estimation.requests import two_nodes

from drillyard.config.cluster import ClusterConfig, Location
from drillyard.errors import UserError
from drillyard.estimation.target import accelerator_target, cluster_target, machine_target
from drillyard.hardware import catalog


def cluster(**changes: object) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {"name": "c", "platform": "gce", "location": {"project": "p", "zone": "us-central1-b"}}
        | {"machine": "a4-highgpu-8g", "nodes": 4, "consumption": "spot"}
        | changes
    )


def test_a_cluster_config_says_machine_nodes_consumption_and_region() -> None:
    target = cluster_target(cluster(), catalog())
    assert (target.machine.name, target.num_nodes, target.num_gpus) == ("a4-highgpu-8g", 4, 32)
    assert (target.consumption, target.region, target.accelerator.name) == (
        "spot",
        "us-central1",
        "b200",
    )
    assert target.title == "4 x a4-highgpu-8g (32 b200)"


def test_another_machine_or_number_changes_the_config_that_quotas_are_counted_for() -> None:
    target = cluster_target(cluster(), catalog(), machine="a3-megagpu-8g").with_nodes(2)
    assert (target.accelerator.name, target.num_gpus) == ("h100", 16)
    assert target.cluster is not None
    assert (target.cluster.machine, target.cluster.nodes) == ("a3-megagpu-8g", 2)
    assert target.cluster.location == Location(project="p", zone="us-central1-b")


def test_a_machine_that_is_not_sold_so_is_refused_with_the_ways_that_there_are() -> None:
    for make in (
        lambda: machine_target("a4-highgpu-8g", 2, catalog(), consumption="on-demand"),
        lambda: two_nodes("a3-megagpu-8g", consumption="on-demand").with_machine(
            "a4-highgpu-8g", catalog()
        ),
        lambda: cluster_target(cluster(), catalog(), machine="a4x-highgpu-4g"),
    ):
        with pytest.raises(UserError, match=r"'(on-demand|spot)'.*reservation"):
            make()


@pytest.mark.parametrize("nodes", [0, -3])
def test_no_nodes_are_no_place(nodes: int) -> None:
    for make in (lambda: two_nodes(nodes=nodes), lambda: two_nodes().with_nodes(nodes)):
        with pytest.raises(UserError, match=f"nodes.* {nodes}.*at least 1"):
            make()


def test_an_accelerator_alone_fills_nodes_of_eight() -> None:
    target = accelerator_target("h100", 12, catalog())
    assert (target.num_nodes, target.gpus_per_node, target.num_gpus, target.made_up) == (
        2,
        8,
        12,
        True,
    )
    assert target.title == "12 x h100"
    assert accelerator_target("h100", 4, catalog()).gpus_per_node == 4
    assert (
        accelerator_target("NVIDIA H100 80GB HBM3", 12, catalog(), gpus_per_node=4).num_nodes == 3
    )


@pytest.mark.parametrize(
    ("accelerator", "num_gpus", "per_node", "message"),
    [
        ("h100", 0, None, r"GPUs.* 0"),
        ("h100", 8, 0, r"GPUs per node.* 0"),
        ("h1000", 8, None, r"'h1000'.*h100"),
    ],
)
def test_what_is_no_accelerator_or_number_is_refused(
    accelerator: str, num_gpus: int, per_node: int | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        accelerator_target(accelerator, num_gpus, catalog(), gpus_per_node=per_node)
