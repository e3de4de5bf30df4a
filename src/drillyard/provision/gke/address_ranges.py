"""The address ranges of a GKE cluster: of nodes, pods, services and data NICs.

A subnet has four addresses that Google keeps
(https://cloud.google.com/vpc/docs/subnets#unusable-ip-addresses-in-every-subnet); each node takes a
block of pod addresses of at least twice `max_pods_per_node`
(https://cloud.google.com/kubernetes-engine/docs/how-to/flexible-pod-cidr). Ranges that are not
given have room for at least `PLANNED_NODES` nodes: a range that grows with the cluster would move
those behind it, and a subnet that moves is made anew, with all of its nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network
from itertools import islice

from drillyard.config.creation import AddressRanges
from drillyard.config.problems import Problem

PLANNED_NODES = 2000
KEPT_BY_GOOGLE = 4
SERVICES_PREFIX = 20
"""4,096 services."""
SMALLEST_SERVICES_PREFIX = 27
"""https://cloud.google.com/kubernetes-engine/docs/concepts/alias-ips#cluster_sizing_services"""

# Of each kind its own room, so that the defaults of one never depend on those of another. Pods have
# RFC 6598's, which GKE takes, so that private ranges are left to nodes and data NICs.
_ROOMS = {
    "nodes": ("10.0.0.0/9",),
    "services": ("10.128.0.0/10",),
    "pods": ("100.64.0.0/10",),
    "data": ("192.168.0.0/16", "172.24.0.0/13", "10.192.0.0/10"),
}
_ANY_ROOM = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")
RESERVED = {
    IPv4Network("172.17.0.0/16"): "GKE's nodes have Docker's bridge there",
    IPv4Network("34.118.224.0/20"): "GKE keeps it for services",
    IPv4Network("0.0.0.0/8"): "no VPC may have it",
    IPv4Network("127.0.0.0/8"): "no VPC may have it",
    IPv4Network("169.254.0.0/16"): "no VPC may have it",
    IPv4Network("224.0.0.0/4"): "no VPC may have it",
    IPv4Network("255.255.255.255/32"): "no VPC may have it",
    IPv4Network("199.36.153.4/30"): "Google's APIs are there",
    IPv4Network("199.36.153.8/30"): "Google's APIs are there",
}
"""https://cloud.google.com/vpc/docs/subnets#prohibited-ipv4, and
https://cloud.google.com/kubernetes-engine/docs/concepts/alias-ips"""


@dataclass(frozen=True)
class RangeSizes:
    """What the ranges must hold: addresses in the subnet of the nodes, nodes with pods, the most
    pods of a node, and the nodes of each additional subnet."""

    addresses: int
    nodes: int
    max_pods: int
    data_nodes: tuple[int, ...]


@dataclass(frozen=True)
class ClusterRanges:
    """Computed or given ranges; `data` has one subnet per additional interface of a node."""

    nodes: IPv4Network
    pods: IPv4Network
    services: IPv4Network
    data: tuple[IPv4Network, ...]


@dataclass
class _Taken:
    """Ranges that something has: those that nobody may use, then those of the cluster."""

    networks: list[IPv4Network] = field(default_factory=lambda: list(RESERVED))

    def first_free(self, prefix: int, rooms: Sequence[str]) -> IPv4Network | None:
        """Take the first free range of this prefix in the first room that has one."""
        for room in (IPv4Network(each) for each in (*rooms, *_ANY_ROOM)):
            found = self._free_in(prefix, room)
            if found is not None:
                self.networks.append(found)
                return found
        return None

    def _free_in(self, prefix: int, room: IPv4Network) -> IPv4Network | None:
        size = 1 << (32 - prefix)
        start, end = int(room.network_address), int(room.broadcast_address)
        while start + size - 1 <= end:
            found = IPv4Network((IPv4Address(start), prefix))
            taken = next((each for each in self.networks if each.overlaps(found)), None)
            if taken is None:
                return found
            behind = int(taken.broadcast_address) + 1
            start = -(-behind // size) * size
        return None


def cluster_ranges(given: AddressRanges, sizes: RangeSizes) -> ClusterRanges:
    """The ranges of a cluster of this size, whose given ranges `range_problems` has no problem
    with."""
    fixed = {key: IPv4Network(text) for key, text in _given(given)}
    taken = _Taken()
    taken.networks += fixed.values()
    addresses = max(sizes.addresses, PLANNED_NODES)
    nodes = max(sizes.nodes, PLANNED_NODES)
    prefixes = {
        "nodes": subnet_prefix(addresses),
        "pods": pods_prefix(nodes, sizes.max_pods),
        "services": SERVICES_PREFIX,
    }
    found = {
        key: fixed.get(key) or taken.first_free(prefix, _ROOMS[key])
        for key, prefix in prefixes.items()
    }
    nodes_range, pods_range, services_range = (found[key] for key in prefixes)
    assert nodes_range and pods_range and services_range, "refused by range_problems"
    data = tuple(_data_subnets(fixed.get("data"), sizes, taken))
    return ClusterRanges(nodes_range, pods_range, services_range, data)


def _data_subnets(
    given: IPv4Network | None, sizes: RangeSizes, taken: _Taken
) -> Iterator[IPv4Network]:
    if given is not None and sizes.data_nodes:
        prefix = given.prefixlen + (len(sizes.data_nodes) - 1).bit_length()
        yield from islice(given.subnets(new_prefix=prefix), len(sizes.data_nodes))
        return
    for nodes in sizes.data_nodes:
        found = taken.first_free(subnet_prefix(max(nodes, PLANNED_NODES)), _ROOMS["data"])
        assert found, "refused by range_problems"
        yield found


def subnet_prefix(addresses: int) -> int:
    """The longest prefix of a subnet with so many addresses beside those that Google keeps."""
    return min(32 - (addresses + KEPT_BY_GOOGLE - 1).bit_length(), 29)


def pods_prefix(nodes: int, max_pods: int) -> int:
    """The longest prefix of a range with a block of pod addresses for each node."""
    block = 32 - (2 * max_pods - 1).bit_length()
    return block - max(nodes - 1, 1).bit_length()


def range_problems(given: AddressRanges, sizes: RangeSizes) -> Iterator[Problem]:
    """What is wrong with the given ranges, and where no computed one fits."""
    fixed = {key: IPv4Network(text) for key, text in _given(given)}
    yield from _too_small(fixed, sizes)
    earlier: dict[str, IPv4Network] = {}
    for key, network in fixed.items():
        for reserved, reason in RESERVED.items():
            if network.overlaps(reserved):
                yield _problem(key, f"{network} overlaps {reserved}, and {reason}; give another")
        for other_key, other in earlier.items():
            if network.overlaps(other):
                message = f"{network} overlaps {other} of ranges.{other_key}; give another"
                yield _problem(key, message)
        earlier[key] = network
    prefix = pods_prefix(max(sizes.nodes, PLANNED_NODES), sizes.max_pods)
    if "pods" not in fixed and prefix < IPv4Network(_ROOMS["pods"][0]).prefixlen:
        message = (
            f"{sizes.nodes} nodes of {sizes.max_pods} pods need /{prefix}, which no default range"
            " has: give ranges.pods, or a smaller cluster.max_pods_per_node"
        )
        yield _problem("pods", message)


def _too_small(fixed: dict[str, IPv4Network], sizes: RangeSizes) -> Iterator[Problem]:
    needed = {
        "nodes": (subnet_prefix(sizes.addresses), f"{sizes.addresses} addresses"),
        "pods": (
            pods_prefix(sizes.nodes, sizes.max_pods),
            f"{sizes.nodes} nodes of {sizes.max_pods} pods",
        ),
        "services": (SMALLEST_SERVICES_PREFIX, "services"),
    }
    if sizes.data_nodes:
        # All subnets are equal parts of the room.
        count, nodes = len(sizes.data_nodes), max(sizes.data_nodes)
        prefix = subnet_prefix(nodes) - (count - 1).bit_length()
        needed["data"] = (prefix, f"{count} subnets of {nodes} nodes")
    for key, (prefix, what) in needed.items():
        if key in fixed and fixed[key].prefixlen > prefix:
            message = f"{fixed[key]} is too small for {what}: give /{prefix} or larger"
            yield _problem(key, message)


def _given(given: AddressRanges) -> list[tuple[str, str]]:
    return [(key, text) for key, text in given.model_dump().items() if text is not None]


def _problem(key: str, message: str) -> Problem:
    return Problem(("cluster", "ranges", key), message)
