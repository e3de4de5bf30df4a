"""The address ranges of a cluster: of nodes, pods, services and data NICs. One of virtual machines
has neither pods nor services.

A subnet has addresses that Google keeps, and may have private ranges alone
(`hardware/cloud_limits.py`); each node takes a block of pod addresses of at least twice
`max_pods_per_node` (https://cloud.google.com/kubernetes-engine/docs/how-to/flexible-pod-cidr).
Ranges that are not given have room for at least `PLANNED_NODES` nodes, and each additional subnet
has a place of its own: a range that moves when a pool comes or grows is replaced, with all of its
nodes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network
from itertools import islice

from drillyard.config.creation import AddressRanges
from drillyard.config.problems import Problem
from drillyard.hardware.cloud_limits import address_ranges, limit

PLANNED_NODES = 2000
SERVICES_PREFIX = 20
"""4,096 services."""

# Of each kind its own room, so that the defaults of one never depend on those of another. Pods have
# RFC 6598's, which GKE takes, so that private ranges are left to nodes and data NICs.
_ROOMS = {
    "nodes": ("10.0.0.0/9",),
    "services": ("10.128.0.0/10",),
    "pods": ("100.64.0.0/10",),
    "data": ("192.168.0.0/16", "172.24.0.0/13", "10.192.0.0/10"),
}
_ANY_ROOM = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")
_CLASS_E = "240.0.0.0/4"
_PRIVATE = "10.0.0.0/8, 172.16.0.0/12, 192.168.0.0/16 or 100.64.0.0/10"


@dataclass(frozen=True)
class RangeSizes:
    """What the ranges must hold: addresses in the subnet of the nodes, nodes with pods, the most
    pods of a node (None: there are no pods), and the nodes of each additional subnet that any
    cluster may have. One without nodes is not made; a computed range keeps its place free."""

    addresses: int
    nodes: int
    max_pods: int | None
    data_nodes: tuple[int, ...]


@dataclass(frozen=True)
class ClusterRanges:
    """Computed or given ranges; `data`: the additional subnets that have nodes."""

    nodes: IPv4Network
    pods: IPv4Network | None
    services: IPv4Network | None
    data: tuple[IPv4Network, ...]


class _Taken:
    """Ranges that something has: those that nobody may use, then those of the cluster."""

    def __init__(self, networks: Iterable[IPv4Network]) -> None:
        unusable = (each.network for each in address_ranges() if not each.usable)
        self._ends = [_ends(network) for network in (*unusable, *networks)]

    def first_free(self, prefix: int, rooms: Sequence[str]) -> IPv4Network | None:
        """Take the first free range of this prefix in the first room that has one."""
        for room in (*rooms, *_ANY_ROOM):
            found = self._free_in(prefix, IPv4Network(room))
            if found is not None:
                self._ends.append(_ends(found))
                return found
        return None

    def _free_in(self, prefix: int, room: IPv4Network) -> IPv4Network | None:
        size = 1 << (32 - prefix)
        start, end = _ends(room)
        while start + size - 1 <= end:
            behind = [
                last + 1 for first, last in self._ends if first < start + size and last >= start
            ]
            if not behind:
                return IPv4Network((start, prefix))
            start = -(-max(behind) // size) * size
        return None


def _ends(network: IPv4Network) -> tuple[int, int]:
    """The first address and the last."""
    return int(network.network_address), int(network.broadcast_address)


def cluster_ranges(given: AddressRanges, sizes: RangeSizes) -> ClusterRanges:
    """The ranges of a cluster of this size, whose given ranges `range_problems` has no problem
    with."""
    found, data = _assigned(_given(given), sizes)
    nodes, pods, services = (found.get(key) for key in ("nodes", "pods", "services"))
    assert nodes and all(found.values()) and all(data), "refused by range_problems"
    subnets = tuple(each for each, used in zip(data, _used(given, sizes), strict=True) if used)
    return ClusterRanges(nodes, pods, services, tuple(each for each in subnets if each))


def _used(given: AddressRanges, sizes: RangeSizes) -> list[bool]:
    """Which of the additional subnets are made: a given room is cut into those alone."""
    used = [bool(nodes) for nodes in sizes.data_nodes]
    return [each for each in used if each] if given.data is not None else used


def _assigned(
    fixed: dict[str, IPv4Network], sizes: RangeSizes
) -> tuple[dict[str, IPv4Network | None], list[IPv4Network | None]]:
    """The given ranges and computed ones for the others, by key, and the additional subnets; None
    where no room has place."""
    taken = _Taken(fixed.values())
    found = {
        key: fixed.get(key) or taken.first_free(prefix, _ROOMS[key])
        for key, prefix in _default_prefixes(sizes).items()
    }
    if (room := fixed.get("data")) is None:
        prefixes = [subnet_prefix(max(nodes, PLANNED_NODES)) for nodes in sizes.data_nodes]
        return found, [taken.first_free(prefix, _ROOMS["data"]) for prefix in prefixes]
    count = sum(map(bool, sizes.data_nodes))
    prefix = min(room.prefixlen + max(count - 1, 0).bit_length(), room.max_prefixlen)
    return found, [*islice(room.subnets(new_prefix=prefix), count)]


def _default_prefixes(sizes: RangeSizes) -> dict[str, int]:
    found = {"nodes": subnet_prefix(max(sizes.addresses, PLANNED_NODES))}
    if sizes.max_pods is not None:
        nodes = max(sizes.nodes, PLANNED_NODES)
        found |= {
            "pods": max(pods_prefix(nodes, sizes.max_pods), 1),
            "services": SERVICES_PREFIX,
        }
    return found


def subnet_prefix(addresses: int) -> int:
    """The longest prefix of a subnet with so many addresses beside those that Google keeps."""
    kept, longest = limit("addresses-kept-of-a-subnet").least, limit("subnet-prefix").most
    assert kept is not None and longest is not None
    return min(32 - (addresses + kept - 1).bit_length(), longest)


def pods_prefix(nodes: int, max_pods: int) -> int:
    """The longest prefix of a range with a block of pod addresses for each node."""
    block = 32 - (2 * max_pods - 1).bit_length()
    return block - max(nodes - 1, 1).bit_length()


def range_problems(given: AddressRanges, sizes: RangeSizes) -> Iterator[Problem]:
    """What is wrong with the given ranges, and where no computed one fits. Each comes with a range
    that would do. Texts that are not ranges are left out: the config's own check has them."""
    fixed, needed = _given(given), _needed(sizes)
    earlier: dict[str, IPv4Network] = {}
    for key, network in fixed.items():
        prefix, what = needed.get(key, (32, ""))
        reasons = [*_refused(network, earlier)]
        if network.prefixlen > prefix:
            reasons.insert(0, f"is too small for {what}, which need /{prefix} or larger")
        if reasons:
            others = {each: other for each, other in fixed.items() if each != key}
            fitting = _free(key, min(prefix, network.prefixlen), others)
            fitting = fitting or _free(key, min(prefix, SERVICES_PREFIX), others)
            fix = f"give another, such as {fitting}" if fitting else "give another"
            yield _problem(key, f"{network} {', and '.join(reasons)}: {fix}")
        else:
            earlier[key] = network
    if len(earlier) == len(fixed):
        yield from _without_room(fixed, sizes)


def _without_room(fixed: dict[str, IPv4Network], sizes: RangeSizes) -> Iterator[Problem]:
    """Computed ranges for which no private range has place beside the others."""
    found, data = _assigned(fixed, sizes)
    for key, prefix in _default_prefixes(sizes).items():
        if found[key] is None:
            others = {each: other for each, other in found.items() if other is not None}
            fitting = _free(key, prefix, others, (_CLASS_E,))
            fix = f"give one of class E, such as {fitting}, or fewer nodes" if fitting else ""
            what = _needed(sizes)[key][1]
            yield _problem(
                key,
                f"{what} need /{prefix}, which no private range has free:"
                f" {fix or 'give fewer nodes, or a smaller cluster.max_pods_per_node'}",
            )
    if None in data:
        yield _problem(
            "data",
            f"{len(data)} subnets of up to {max(sizes.data_nodes)} nodes find no free range: give"
            " fewer nodes, or a smaller range in cluster.ranges",
        )


def _refused(network: IPv4Network, earlier: dict[str, IPv4Network]) -> Iterator[str]:
    rows = address_ranges()
    if not any(network.subnet_of(row.network) for row in rows if row.usable):
        yield f"has public addresses, which others own; private ones are in {_PRIVATE}"
        return
    for row in rows:
        if not row.usable and network.overlaps(row.network):
            yield f"overlaps {row.range} ({row.reason})"
    for key, other in earlier.items():
        if network.overlaps(other):
            yield f"overlaps {other} of ranges.{key}"


def _free(
    key: str, prefix: int, others: dict[str, IPv4Network], more: tuple[str, ...] = ()
) -> IPv4Network | None:
    return _Taken(others.values()).first_free(prefix, (*_ROOMS[key], *more))


def _needed(sizes: RangeSizes) -> dict[str, tuple[int, str]]:
    """The longest prefix of each range, and what it is for."""
    longest = limit("services-prefix").most
    assert longest is not None
    needed = {"nodes": (subnet_prefix(sizes.addresses), f"{sizes.addresses} addresses")}
    if sizes.max_pods is not None:
        needed["pods"] = (
            max(pods_prefix(sizes.nodes, sizes.max_pods), 1),
            f"{sizes.nodes} nodes of {sizes.max_pods} pods",
        )
        needed["services"] = (longest, "services")
    if used := [nodes for nodes in sizes.data_nodes if nodes]:
        # All subnets are equal parts of the room.
        prefix = max(subnet_prefix(max(used)) - (len(used) - 1).bit_length(), 1)
        needed["data"] = (prefix, f"{len(used)} subnets of {max(used)} nodes")
    return needed


def _given(given: AddressRanges) -> dict[str, IPv4Network]:
    found = {}
    for key, text in given.model_dump().items():
        with contextlib.suppress(ValueError):
            if text is not None:
                found[key] = IPv4Network(text)
    return found


def _problem(key: str, message: str) -> Problem:
    return Problem(("cluster", "ranges", key), message)
