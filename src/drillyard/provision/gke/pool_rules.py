"""Rules of GPU pools on GKE: what each way of buying and each machine allow.

They are those of Cluster Toolkit's module gke-node-pool, and of Google's pages on node pools. What
the rendering decides itself (repair, surge, autoscaling limits, affinity) needs no rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from drillyard.config.cluster import ClusterConfig
from drillyard.config.creation import CreationConfig
from drillyard.config.problems import Problem
from drillyard.hardware.catalog import Catalog
from drillyard.hardware.cloud_limits import way_of_buying
from drillyard.launch.kubernetes.config import KubernetesConfig
from drillyard.launch.kubernetes.pod_network import first_versions
from drillyard.provision.cluster_plan import Pool
from drillyard.provision.gcp.machine_rules import machine_problems
from drillyard.provision.gcp.placement import nodes_of_domain, placement_problem
from drillyard.provision.gcp.pool_networks import PoolNetwork, network_problems
from drillyard.provision.gcp.reservation_rules import (
    reservation_problems,
    shared_reservation_problems,
)
from drillyard.provision.gke.control_plane import CPU_POOL, DEFAULT_POOL
from drillyard.provision.gke.versions import reaches
from drillyard.provision.pools import key_path


def pool_problems(
    cluster: ClusterConfig,
    creation: CreationConfig,
    networks: Sequence[PoolNetwork],
    facts: Catalog,
) -> Iterator[Problem]:
    """What is wrong with any pool."""
    assert cluster.location is not None and cluster.location.project is not None
    for network in networks:
        pool = network.pool
        yield from machine_problems(cluster, network, facts, "GKE", by_type=True)
        yield from reservation_problems(pool, cluster.location.project, shared_blocks=False)
        yield from _limits(cluster, pool)
        yield from _pod_network(cluster, network)
        if pool.name in (CPU_POOL, DEFAULT_POOL):
            message = f"{pool.name} is the name of another pool of the cluster; give another"
            yield Problem(key_path(pool, "name"), message)
        compact = creation.compact_placement
        if compact is not None and (wrong := placement_problem(pool, compact)) is not None:
            message = f"pool {pool.name}: {wrong}; remove it"
            yield Problem(("cluster", "compact_placement"), message)
        yield from _version(creation, network)
    yield from network_problems(networks)
    yield from _plugin(cluster, networks)
    yield from shared_reservation_problems(
        [each.pool for each in networks], cluster.location.project
    )


def _plugin(cluster: ClusterConfig, networks: Sequence[PoolNetwork]) -> Iterator[Problem]:
    """The version of an NCCL plugin, for which a daemon must be known: pods have one beside the
    ranks."""
    plugin, path = cluster.section_as(KubernetesConfig).nccl_plugin, ("kubernetes", "nccl_plugin")
    stacks = {each.stack.name: each.stack for each in networks if each.stack is not None}
    coupled = [stack for stack in stacks.values() if stack.coupled_versions]
    if plugin is None:
        return
    if stacks and not coupled:
        message = f"{', '.join(stacks)} has no plugin whose version can be chosen: remove it"
        yield Problem(path, message)
    for stack in coupled:
        if stack.daemon_of(plugin) is None:
            known = ", ".join(dict.fromkeys(each["plugin"] for each in stack.coupled_versions))
            message = f"no daemon is known to work with plugin {plugin} of {stack.name}: {known} do"
            yield Problem(path, message)


def _limits(cluster: ClusterConfig, pool: Pool) -> Iterator[Problem]:
    most = nodes_of_domain(pool.machine)
    if most is not None and pool.nodes > most:
        message = (
            f"found {pool.nodes}; a pool of {pool.machine.name} is one NVLink domain of {most}"
            " nodes: give each domain a pool (cluster.pools)"
        )
        yield Problem(key_path(pool, "nodes"), message)
    hours = cluster.section_as(KubernetesConfig).max_run_hours
    longest = way_of_buying(pool.consumption).longest_hours
    if not pool.key and longest is not None and hours is not None and hours > longest:
        message = (
            f"{hours:g}: nodes of {pool.consumption} exist for at most {longest} hours: write"
            f" {longest}, or less"
        )
        yield Problem(("kubernetes", "max_run_hours"), message)


def _pod_network(cluster: ClusterConfig, network: PoolNetwork) -> Iterator[Problem]:
    pool, stack = network.pool, network.stack
    asked = cluster.section_as(KubernetesConfig).pod_network
    if pool.key or stack is None or (asked in (None, "interfaces") and not network.dranet):
        return
    path = ("kubernetes", "pod_network")
    if stack.device_class is None:
        yield Problem(path, f"{asked}: {stack.name} of {pool.machine.name} has no such way")
    elif asked != "dranet" and asked is not None and network.dranet:
        message = f"{asked}: {pool.machine.name} has its data NICs by dranet alone: remove it"
        yield Problem(path, message)


def version_needs(network: PoolNetwork) -> Iterator[tuple[str, Sequence[str]]]:
    """What of the pool needs a version of GKE, and the first of each minor version."""
    pool, stack = network.pool, network.stack
    if stack is not None:
        versions, _ = stack.gke_versions(pool.machine, dranet=network.dranet)
        if network.dranet and pool.machine.pods is not None:
            versions = pool.machine.pods.gke_versions or versions
        way = "managed DRANET" if network.dranet else stack.title
        yield f"{way} on {pool.machine.name}", versions
    if versions := way_of_buying(pool.consumption).gke_versions:
        yield pool.consumption, versions


def _version(creation: CreationConfig, network: PoolNetwork) -> Iterator[Problem]:
    if creation.version is None:
        return
    for what, versions in version_needs(network):
        if not reaches(creation.version, versions):
            message = (
                f"{creation.version}: {what} needs {first_versions(versions)} or later: write a"
                " later version, or leave it out"
            )
            yield Problem(("cluster", "version"), message)
