"""Rules of a cluster of virtual machines: its settings, ways of buying, machines and access."""

from __future__ import annotations

from collections.abc import Iterator

from drillyard.config.cluster import ClusterConfig
from drillyard.config.creation import CreationConfig
from drillyard.config.problems import Problem
from drillyard.hardware.catalog import Catalog
from drillyard.hardware.cloud_limits import limit, way_of_buying
from drillyard.launch.network import needs_prolog
from drillyard.provision.cluster_plan import Pool
from drillyard.provision.gce.config import GceConfig
from drillyard.provision.gce.login import login_problems
from drillyard.provision.gcp.machine_rules import machine_problems
from drillyard.provision.gcp.node_network import network_setting_problems
from drillyard.provision.gcp.placement import is_compact, nodes_of_domain, placement_problem
from drillyard.provision.gcp.pool_networks import PoolNetwork
from drillyard.provision.gcp.reservation_rules import reservation_problems
from drillyard.provision.gcp.setting_rules import (
    access_problems,
    bucket_problems,
    disk_problems,
    kubernetes_only_problems,
    label_problems,
    name_problems,
    project_problems,
)
from drillyard.provision.pools import key_path

_SHORTEST_HOURS = 600 / 3600
"""https://cloud.google.com/compute/docs/reference/rest/v1/instanceGroupManagerResizeRequests"""


def gce_setting_problems(
    cluster: ClusterConfig, creation: CreationConfig, state_bucket: str, pool: Pool, facts: Catalog
) -> Iterator[Problem]:
    """What is wrong with the settings of the cluster."""
    yield from name_problems(cluster)
    yield from project_problems(cluster)
    yield from label_problems(creation)
    yield from bucket_problems(cluster, creation, state_bucket, facts)
    yield from disk_problems(creation, {"the nodes": pool.machine.boot_disk})
    yield from network_setting_problems(creation.network, creation.ranges, kubernetes=False)
    yield from _unused(creation)
    yield from access_problems(creation)
    yield from login_problems(cluster)


def _unused(creation: CreationConfig) -> Iterator[Problem]:
    """Settings that a cluster of virtual machines does not have."""
    yield from kubernetes_only_problems(creation)
    if creation.pools:
        message = (
            "runs by ssh have one list of hosts, of one machine: remove it, and write a file of its"
            " own, with another name, for each further machine or way of buying"
        )
        yield Problem(("cluster", "pools"), message)


def gce_machine_problems(
    cluster: ClusterConfig, creation: CreationConfig, network: PoolNetwork, facts: Catalog
) -> Iterator[Problem]:
    """What is wrong with the machine, how it is bought and where it is placed."""
    assert cluster.location is not None and cluster.location.project is not None
    pool, machine = network.pool, network.pool.machine
    yield from machine_problems(cluster, network, facts, "Compute Engine", by_type=False)
    yield from reservation_problems(pool, cluster.location.project)
    yield from _flex_start(cluster, creation, pool)
    if machine.pods is not None:
        message = (
            f"{machine.name} is bare metal, whose data NICs only GKE sets up: write platform: gke"
        )
        yield Problem(key_path(pool, "machine"), message)
    stack = network.stack
    if (
        stack is not None
        and pool.nodes > 1
        and needs_prolog(stack.host_environment_on(machine.name))
    ):
        message = (
            f"missing: {stack.name} of {machine.name} needs a daemon beside each run, which runs by"
            " ssh do not have: write ethernet, or platform: gke"
        )
        yield Problem(("network_stack",), message)
    most = nodes_of_domain(machine)
    if most is not None and pool.nodes > most:
        message = (
            f"found {pool.nodes}; the nodes of {machine.name} are one NVLink domain of {most}:"
            f" write {most}, or less"
        )
        yield Problem(key_path(pool, "nodes"), message)
    compact = creation.compact_placement
    wrong = None if compact is None else placement_problem(pool, compact)
    if wrong is not None:
        yield Problem(("cluster", "compact_placement"), f"{wrong}; remove it")
    allowed = limit("vms-of-a-placement-policy")
    if wrong is None and is_compact(pool, creation) and not allowed.allows(pool.nodes):
        message = (
            f"found {pool.nodes}; near each other are at most {allowed.in_words}: write fewer, or"
            " cluster.compact_placement: false"
        )
        yield Problem(key_path(pool, "nodes"), message)


def _flex_start(cluster: ClusterConfig, creation: CreationConfig, pool: Pool) -> Iterator[Problem]:
    """Settings that only nodes of flex-start have, and one that they cannot have."""
    hours = cluster.section_as(GceConfig).max_run_hours
    path = ("gce", "max_run_hours")
    most = way_of_buying("flex-start").longest_hours
    if pool.consumption != "flex-start":
        if hours is not None:
            yield Problem(
                path, "only nodes of consumption: flex-start have such a limit: remove it"
            )
        return
    if hours is not None and most is not None and not _SHORTEST_HOURS <= hours <= most:
        message = (
            f"found {hours:g}; nodes of flex-start exist for ten minutes to {most} hours: write"
            f" {most}, or less"
        )
        yield Problem(path, message)
    if creation.deletion_protection:
        message = (
            "machines of flex-start are deleted by Google after their time, and have no such"
            " protection: remove it"
        )
        yield Problem(("cluster", "deletion_protection"), message)
