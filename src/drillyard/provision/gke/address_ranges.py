"""The address ranges of a GKE cluster: of nodes, pods, services and data NICs.

Sizes follow from the number of nodes. A subnet has four addresses that Google keeps
(https://cloud.google.com/vpc/docs/subnets#unusable-ip-addresses-in-every-subnet); each node takes a
block of pod addresses of at least twice `max_pods_per_node`
(https://cloud.google.com/kubernetes-engine/docs/how-to/flexible-pod-cidr).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Network, summarize_address_range

from drillyard.config.creation import AddressRanges
from drillyard.errors import UserError

RESERVED_ADDRESSES = 4
SERVICES_PREFIX = 20
"""4,096 services."""
_NODES_AND_CONTROLLERS = IPv4Network("10.0.0.0/9")
_PODS = IPv4Network("100.64.0.0/10")
"""RFC 6598: GKE takes it for pods, so that private ranges are left to nodes and data NICs
(https://cloud.google.com/kubernetes-engine/docs/concepts/alias-ips#non-rfc-1918)."""
_SERVICES = IPv4Network("10.128.0.0/20")
_DATA = IPv4Network("192.168.0.0/16")


@dataclass(frozen=True)
class ClusterRanges:
    """Computed or given ranges; `data` has one subnet per additional interface of a node."""

    nodes: IPv4Network
    pods: IPv4Network
    services: IPv4Network
    data: tuple[IPv4Network, ...]


def cluster_ranges(
    given: AddressRanges, gpu_nodes: int, cpu_nodes: int, max_pods: int, data_subnets: int
) -> ClusterRanges:
    """The ranges of a cluster of so many nodes. Raises UserError for a given range that is too
    small, and for two that overlap."""
    nodes = gpu_nodes + cpu_nodes
    pod_block = 32 - math.ceil(math.log2(2 * max_pods))
    pods_prefix = pod_block - math.ceil(math.log2(max(nodes, 2)))
    node_range = _room("nodes", given.nodes, _NODES_AND_CONTROLLERS, _prefix(nodes), nodes)
    pod_range = _room("pods", given.pods, _PODS, pods_prefix, nodes)
    service_range = IPv4Network(given.services) if given.services else _SERVICES
    data = tuple(_data_ranges(given.data, gpu_nodes, data_subnets))
    _refuse_overlaps({"nodes": node_range, "pods": pod_range, "services": service_range}, data)
    return ClusterRanges(node_range, pod_range, service_range, data)


def _prefix(nodes: int) -> int:
    """The longest prefix of a subnet with room for `nodes` and Google's own addresses."""
    return 32 - math.ceil(math.log2(nodes + RESERVED_ADDRESSES))


def _room(
    key: str, given: str | None, default: IPv4Network, prefix: int, nodes: int
) -> IPv4Network:
    if given is None:
        if prefix < default.prefixlen:
            raise UserError(
                f"nodes: {nodes} nodes need a range of /{prefix} for {key}, and {default} is too"
                f" small: give cluster.ranges.{key}"
            )
        return IPv4Network((default.network_address, prefix))
    found = IPv4Network(given)
    if found.prefixlen > prefix:
        raise UserError(
            f"cluster.ranges.{key}: {found} is too small for {nodes} nodes: /{prefix} or larger"
        )
    return found


def _data_ranges(given: str | None, nodes: int, count: int) -> Iterator[IPv4Network]:
    if not count:
        return
    prefix = _prefix(nodes)
    room = IPv4Network(given) if given else _DATA
    blocks = 1 << max(prefix - room.prefixlen, -1) if prefix >= room.prefixlen else 0
    if given is None and blocks < count:
        # Private addresses that no other default uses.
        room = IPv4Network("172.16.0.0/12")
        blocks = 1 << (prefix - room.prefixlen) if prefix >= room.prefixlen else 0
    if blocks < count:
        raise UserError(
            f"cluster.ranges.data: {room} has no room for {count} subnets of /{prefix}, which"
            f" {nodes} nodes need"
        )
    size = 1 << (32 - prefix)
    for number in range(count):
        first = room.network_address + number * size
        yield next(summarize_address_range(first, first + size - 1))


def _refuse_overlaps(named: dict[str, IPv4Network], data: tuple[IPv4Network, ...]) -> None:
    every = [*named.items(), *(("data", each) for each in data)]
    for number, (key, one) in enumerate(every):
        for other_key, other in every[:number]:
            if one.overlaps(other):
                raise UserError(
                    f"cluster.ranges: {key} ({one}) and {other_key} ({other}) overlap; give ranges"
                    " that do not"
                )
