"""Rules of GPU pools on GKE: what each way of buying and each machine allow.

They are those of Cluster Toolkit's module gke-node-pool, and of Google's pages on node pools. What
the rendering decides itself (repair, surge, autoscaling limits, affinity) needs no rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from drillyard.config.cluster import ClusterConfig
from drillyard.config.creation import CreationConfig
from drillyard.config.problems import Problem
from drillyard.config.reservation_name import RESERVATION_FORMS, read_reservation
from drillyard.hardware.capacity import CLOUD_TITLES
from drillyard.hardware.catalog import Catalog
from drillyard.hardware.cloud_limits import limit, way_of_buying
from drillyard.launch.kubernetes.config import KubernetesConfig
from drillyard.launch.kubernetes.pod_network import first_versions
from drillyard.launch.network import stack_problem
from drillyard.provision.cluster_plan import Pool
from drillyard.provision.gke.control_plane import CPU_POOL, DEFAULT_POOL
from drillyard.provision.gke.placement import nodes_of_domain, placement_problem
from drillyard.provision.gke.pool_networks import PoolNetwork, network_problems
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
        yield from _machine(cluster, network, facts)
        yield from _reservations(pool, cluster.location.project)
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
    yield from _shared_reservations([each.pool for each in networks], cluster.location.project)


def _machine(cluster: ClusterConfig, network: PoolNetwork, facts: Catalog) -> Iterator[Problem]:
    machine = network.pool.machine
    path = key_path(network.pool, "machine")
    if machine.cloud != "gcp":
        whose = CLOUD_TITLES.get(machine.cloud or "", "no cloud")
        alike = [
            each.name
            for each in facts.machines.values()
            if each.cloud == "gcp"
            and each.accelerator == machine.accelerator
            and network.pool.consumption in each.consumption
        ]
        fix = " or ".join(alike) or "one that `drillyard hardware` lists with cloud gcp"
        message = f"{machine.name} is one of {whose}, and GKE has Google Cloud's: write {fix}"
        yield Problem(path, message)
    elif machine.accelerator_type is None:
        message = (
            f"{machine.name} has no accelerator_type, by which GKE knows its GPU: give it in the"
            " hardware file"
        )
        yield Problem(path, message)
    elif network.stack is None:
        wrong = stack_problem(cluster, machine) or f"{machine.network_stack} is not known"
        yield Problem(("network_stack",), wrong)
    else:
        for mtu in {each.mtu for each in network.interfaces if each.mtu is not None}:
            if not (allowed := limit("vpc-mtu")).allows(mtu):
                message = (
                    f"{network.stack.name} has networks of MTU {mtu}, and a VPC has"
                    f" {allowed.in_words}: change it in the hardware file"
                )
                yield Problem(path, message)


def _reservations(pool: Pool, project: str) -> Iterator[Problem]:
    path = key_path(pool, "reservations")
    if pool.consumption not in ("reservation", "calendar"):
        # Of the first pool, the config's own check says both.
        if pool.reservations and pool.key:
            yield Problem(path, f"{pool.consumption} uses no reservation: remove it")
        return
    if not pool.reservations and pool.key:
        message = f"missing: a pool of {pool.consumption} is made from one: reservations: [NAME]"
        yield Problem(path, message)
    elif len(pool.reservations) > 1:
        message = (
            f"found {len(pool.reservations)}; a pool of {pool.consumption} is made from exactly"
            " one: give each reservation a pool of its own"
        )
        yield Problem(path, message)
    for text in pool.reservations:
        found = read_reservation(text)
        if found is None:
            yield Problem(path, f"'{text}': write {RESERVATION_FORMS}")
        elif found.block and found.project not in (None, project):
            message = (
                f"{text}: GKE takes no block of a reservation that another project shares: name"
                " the reservation alone"
            )
            yield Problem(path, message)


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


def _shared_reservations(pools: Sequence[Pool], project: str) -> Iterator[Problem]:
    """A reservation is of one machine, zone and way of buying: pools that differ cannot share it.
    Pools that do not differ take their nodes from the same number (`plan --check` counts)."""
    first: dict[tuple[str, str], Pool] = {}
    for pool in pools:
        for text in pool.reservations:
            found = read_reservation(text)
            if found is None or pool.consumption not in ("reservation", "calendar"):
                continue
            other = first.setdefault((found.project or project, found.name), pool)
            mine, its = (
                {"machine": each.machine.name, "zone": each.zone, "consumption": each.consumption}
                for each in (pool, other)
            )
            differ = [f"{key} {its[key]}" for key, value in mine.items() if value != its[key]]
            if differ:
                message = (
                    f"{text} is the reservation of pool {other.name} ({', '.join(differ)}), and a"
                    " reservation is of one machine, zone and way of buying: name another"
                )
                yield Problem(key_path(pool, "reservations"), message)


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
