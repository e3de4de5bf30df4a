"""Which networks the nodes of a pool need beside the cluster's own: one need for each interface.

Network objects are the cluster's, so pools whose interfaces have the same object share its subnet,
also pools of different machines. The facts are `networks` in `hardware/network_stacks.yaml`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from drillyard.config.cluster import ClusterConfig
from drillyard.config.platforms import platforms
from drillyard.config.problems import Problem
from drillyard.hardware.capacity import stack_name
from drillyard.hardware.catalog import Catalog
from drillyard.hardware.facts import cited
from drillyard.hardware.network_stacks import NetworkStack
from drillyard.launch.kubernetes.config import KubernetesConfig
from drillyard.provision.cluster_plan import Pool
from drillyard.provision.pools import key_path


@dataclass(frozen=True)
class InterfaceNeed:
    """One additional interface of each node of a pool. `vpc` is the last part of its VPC's name;
    `profile`: the network profile that the VPC is made from, and then has its MTU."""

    network_object: str
    vpc: str
    mtu: int | None
    profile: str | None
    firewall: bool
    device_mode: str
    source: str

    @property
    def vpc_address(self) -> str:
        """Terraform's address of the VPC."""
        return f"google_compute_network.{self.vpc.replace('-', '_')}"

    @property
    def subnet_address(self) -> str:
        """Terraform's address of the subnet."""
        return f"google_compute_subnetwork.{self.network_object.replace('-', '_')}"


@dataclass(frozen=True)
class PoolNetwork:
    """How the nodes of a pool are connected. `stack`: None where the machine lacks the one that the
    config names; `dranet`: GKE makes the data networks, so `interfaces` is empty."""

    pool: Pool
    stack: NetworkStack | None
    dranet: bool
    interfaces: tuple[InterfaceNeed, ...]


def pool_networks(
    cluster: ClusterConfig, pools: Sequence[Pool], facts: Catalog
) -> tuple[PoolNetwork, ...]:
    """The networks of every pool, in the order of the pools."""
    return tuple(_pool_network(cluster, pool, facts) for pool in pools)


def _pool_network(cluster: ClusterConfig, pool: Pool, facts: Catalog) -> PoolNetwork:
    machine = pool.machine
    name = stack_name(cluster, machine, facts)
    stack = facts.network_stacks.get(name)
    if stack is None or name not in ("ethernet", machine.network_stack):
        return PoolNetwork(pool, None, False, ())
    dranet = platforms()[cluster.platform].in_pods and _by_dranet(cluster, pool, stack)
    return PoolNetwork(pool, stack, dranet, () if dranet else tuple(_interfaces(pool, stack)))


def _by_dranet(cluster: ClusterConfig, pool: Pool, stack: NetworkStack) -> bool:
    machine = pool.machine
    own = machine.pods if stack.name == machine.network_stack else None
    asked = cluster.section_as(KubernetesConfig).pod_network
    return bool(stack.device_class) and (own is not None or asked == "dranet")


def _interfaces(pool: Pool, stack: NetworkStack) -> Iterator[InterfaceNeed]:
    networks = stack.networks
    for each in stack.additional_networks(pool.machine):
        assert networks is not None
        source = cited(stack, "networks")
        mtu, profile, mode = networks.host_mtu, None, "NetDevice"
        if not each.of_host:
            mtu, mode = networks.mtu, networks.device_mode or mode
            profile = None if networks.profile is None else f"{pool.zone}-{networks.profile}"
        yield InterfaceNeed(each.label, each.vpc, mtu, profile, each.firewall, mode, source)


def network_objects(facts: Catalog) -> tuple[str, ...]:
    """The Network objects that a cluster may have, in an order that no config changes."""
    found: list[str] = []
    for stack in facts.network_stacks.values():
        machines = [each for each in facts.machines.values() if each.network_stack == stack.name]
        largest = max(machines, key=lambda each: each.data_nics.count, default=None)
        if largest is not None:
            found += [each.label for each in stack.additional_networks(largest)]
    return tuple(dict.fromkeys(found))


def merged_needs(
    needs: Sequence[PoolNetwork], objects: Sequence[str]
) -> dict[str, tuple[InterfaceNeed, int]]:
    """Each Network object that a pool needs, in the order of `objects`, with the need and the
    number of nodes that use it, all pools together."""
    found: dict[str, tuple[InterfaceNeed, int]] = {}
    for network in needs:
        for need in network.interfaces:
            _, nodes = found.get(need.network_object, (need, 0))
            found[need.network_object] = need, nodes + network.pool.nodes
    return {name: found[name] for name in objects if name in found}


def network_problems(needs: Sequence[PoolNetwork]) -> Iterator[Problem]:
    """Pools that would share a Network object and need different VPCs behind it."""
    first: dict[str, tuple[InterfaceNeed, Pool]] = {}
    for network in needs:
        for need in network.interfaces:
            earlier, pool = first.setdefault(need.network_object, (need, network.pool))
            same_region = pool.region == network.pool.region
            if same_region and (earlier.mtu, earlier.profile) != (need.mtu, need.profile):
                message = (
                    f"{network.pool.zone}: {network.pool.name} and {pool.name} share the network"
                    f" {need.network_object}, which is one zone's ({pool.zone}): use that zone, a"
                    " cluster of its own, or kubernetes.pod_network: dranet"
                )
                yield Problem(key_path(network.pool, "zone"), message)
                break
