"""Rules of a place for custom jobs: those of its settings, and those of each launch, found before
anything is made."""

from __future__ import annotations

from collections.abc import Iterator

from drillyard.config.cluster import ClusterConfig
from drillyard.config.creation import CreationConfig
from drillyard.config.problems import Problem
from drillyard.hardware.capacity import stack_name
from drillyard.hardware.catalog import Catalog
from drillyard.launch.vertex.config import VertexConfig
from drillyard.launch.vertex.rules import setting_problems
from drillyard.provision.cluster_plan import Pool
from drillyard.provision.gcp.machine_rules import machine_problems
from drillyard.provision.gcp.pool_networks import PoolNetwork
from drillyard.provision.gcp.setting_rules import (
    bucket_problems,
    label_problems,
    name_problems,
    project_problems,
)
from drillyard.provision.vertex.private_access import makes_network, network_problems

_OF_NODES = {
    **dict.fromkeys(("version", "release_channel", "cpu_pool", "max_pods_per_node"), ""),
    **dict.fromkeys(("gpu_driver", "images", "compact_placement", "deletion_protection"), ""),
    **dict.fromkeys(("private_nodes", "authorized_networks"), ""),
    "disk_gib": "; the boot disks of jobs are vertex.boot_disk_gb",
    "network": "; the VPC of jobs is vertex.network: projects/NUMBER/global/networks/NAME",
    "pools": "; a file of its own, with another name, is for each further machine or way of buying",
}
"""Keys of `cluster:` that only clusters with nodes have, each with what to write instead."""


def vertex_machine_problems(
    cluster: ClusterConfig, pool: Pool, facts: Catalog
) -> Iterator[Problem]:
    """What is wrong with the machine, how it is bought, and how jobs use it."""
    # Their networks are the service's own: there is no interface to make.
    name = stack_name(cluster, pool.machine, facts)
    has = name in ("ethernet", pool.machine.network_stack)
    stack = facts.network_stacks.get(name) if has else None
    network = PoolNetwork(pool, stack, dranet=False, interfaces=())
    yield from machine_problems(cluster, network, facts, "Vertex AI", by_type=False)
    if pool.machine.cloud == "gcp":
        section = cluster.section_as(VertexConfig)
        for key, message in setting_problems(cluster, section, pool.machine):
            yield Problem(tuple(key.split(".")), message)


def vertex_setting_problems(
    cluster: ClusterConfig, creation: CreationConfig, state_bucket: str, facts: Catalog
) -> Iterator[Problem]:
    """What is wrong with the settings of what is made."""
    if makes_network(cluster):
        yield from name_problems(cluster)
    yield from project_problems(cluster)
    yield from label_problems(creation)
    yield from bucket_problems(cluster, creation, state_bucket, facts)
    yield from network_problems(cluster, creation)
    for key, instead in _OF_NODES.items():
        if getattr(creation, key) != CreationConfig.model_fields[key].default:
            message = (
                f"only a cluster with nodes has it, and Vertex AI makes them: remove it{instead}"
            )
            yield Problem(("cluster", key), message)
    for key in ("nodes", "pods", "services"):
        if getattr(creation.ranges, key) is not None:
            message = "only a cluster with nodes has such addresses: remove it"
            yield Problem(("cluster", "ranges", key), message)
