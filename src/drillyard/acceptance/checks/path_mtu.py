"""Path MTU between nodes, and the MTU of each node's interface."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from drillyard.acceptance.check import Check, Expected, Level
from drillyard.acceptance.checks.blame import failed_pairs
from drillyard.acceptance.checks.mesh_evidence import (
    member,
    network_of,
    not_between_nodes,
    number,
    unanswered,
)
from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.node_results import node_result
from drillyard.acceptance.results import CheckResult, Status

_ETHERNET = 1500
"""Bytes: the default of Ethernet (RFC 894)."""


def judge(evidence: AcceptanceEvidence, expected: Expected) -> Iterator[CheckResult]:
    """One result per interface that differs, per node or pair with a smaller path, and for all."""
    if (nothing := not_between_nodes(evidence, CHECK, "network")) is not None:
        yield nothing
        return
    yield from unanswered(evidence, CHECK, "network")
    found = network_of(evidence, "mtu")
    odd = yield from _interfaces(evidence, expected, found)
    good: set[tuple[int, int]] = set()
    bad: dict[tuple[int, int], str] = {}
    paths: list[int] = []
    for rank, peers in found.items():
        for other, each in peers.items():
            path, own, kernel = (_bytes(each, key) for key in ("path", "interface", "kernel"))
            way = f"from {evidence.name_of(rank)} to {evidence.name_of(other)}"
            if path is None or own is None:
                why = member(each, "error") or "no packet was answered"
                yield CHECK.result((rank, other), Status.incomplete, f"{way}: {why}")
            elif path >= own or (kernel is not None and kernel <= path):
                paths.append(path)
                good.add((rank, other))
            else:
                bad[rank, other] = (
                    f"{way} packets of more than {path} bytes are lost silently; the interface"
                    f" sends {own}"
                )
    # A pair with an interface that differs has its result already.
    lost = {pair: text for pair, text in bad.items() if odd.isdisjoint(pair)}
    yield from failed_pairs(CHECK, evidence, good, lost, "between")
    if paths and not bad and not odd:
        reason = f"packets of {min(paths)} bytes reach all of {len(found)} nodes whole"
        nodes = tuple(sorted(found))
        yield CHECK.result(nodes, Status.passed, reason, observed=min(paths), unit="bytes")


def _interfaces(
    evidence: AcceptanceEvidence, expected: Expected, found: dict[int, dict[int, Any]]
) -> Any:
    """Results for interfaces that differ; returns the nodes that have them."""
    own = _interface_mtus(found)
    stack = expected.stack
    wanted = None if stack is None or stack.networks is None else stack.networks.host_mtu
    source = "" if stack is None else f"network stack {stack.name}"
    if wanted is None and expected.baseline is not None:
        before = _interface_mtus(network_of(expected.baseline, "mtu"))
        names = {node.name: before.get(node.rank) for node in expected.baseline.nodes}
        return (yield from _changed(evidence, own, names))
    if wanted is None:
        wanted, source = _usual(own), "the other nodes"
    odd = {rank: mtu for rank, mtu in own.items() if wanted is not None and mtu != wanted}
    for rank, mtu in odd.items():
        reason = f"the interface of {evidence.name_of(rank)} has an MTU of {mtu}, not {wanted}"
        yield _interface(rank, f"{reason} as {source}", mtu, wanted)
    if wanted is None and len(set(own.values())) > 1:
        listing = ", ".join(f"{evidence.name_of(rank)} {mtu}" for rank, mtu in own.items())
        reason = f"interfaces have different MTUs, and which is right is not known: {listing}"
        yield CHECK.result(tuple(own), Status.fail, reason)
        return set(own)
    return set(odd)


def _changed(
    evidence: AcceptanceEvidence, own: dict[int, int], before: dict[str, int | None]
) -> Any:
    odd = set()
    for rank, mtu in own.items():
        name = evidence.name_of(rank)
        if (was := before.get(name)) is not None and was != mtu:
            odd.add(rank)
            reason = f"the interface of {name} has an MTU of {mtu}, and had {was} in the baseline"
            yield _interface(rank, reason, mtu, was)
    return odd


def _interface(rank: int, reason: str, mtu: int, wanted: int | None) -> CheckResult:
    return node_result(
        CHECK, rank, Status.fail, reason, observed=mtu, unit="bytes", expected=f"{wanted} bytes"
    )


def _usual(own: dict[int, int]) -> int | None:
    """What more than half of the nodes have; of two that differ, Ethernet's own size where one
    falls below it."""
    if not own:
        return None
    mtu, count = Counter(own.values()).most_common(1)[0]
    if 2 * count > len(own):
        return mtu
    below = [each for each in own.values() if each < _ETHERNET]
    return _ETHERNET if len(own) == 2 and len(below) == 1 and _ETHERNET in own.values() else None


def _interface_mtus(found: dict[int, dict[int, Any]]) -> dict[int, int]:
    return {
        rank: mtus[0]
        for rank, peers in found.items()
        if (mtus := [mtu for each in peers.values() if (mtu := _bytes(each, "interface"))])
    }


def _bytes(found: object, key: str) -> int | None:
    value = number(member(found, key))
    return None if value is None else int(value)


CHECK = Check(
    name="path-mtu",
    title="Path MTU",
    level=Level.quick,
    probes=("network",),
    seconds=3,
    measures="the largest packet that reaches each other node whole, and the interface's own size",
    how="UDP packets that must not be fragmented, answered by the other node; where the largest is"
    " not answered, the size in between is searched",
    evidence="an answer to some size on every pair, both ways",
    references="the network stack's row, a baseline, or what more than half of the nodes have",
    meaning="an interface, switch port or tunnel takes smaller packets than the sender uses:"
    " connections open, and hang once they carry data",
    action="set the MTU of interface and switch port to that of the other nodes",
    judge=judge,
    metric="MTU",
)
