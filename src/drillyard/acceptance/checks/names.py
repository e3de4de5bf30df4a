"""Names of the nodes: each must be found by the others, and lead to the right node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from drillyard.acceptance.check import Check, Expected, Level
from drillyard.acceptance.checks.mesh_evidence import (
    entries,
    listed,
    member,
    network_of,
    not_between_nodes,
    number,
    unanswered,
)
from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.results import CheckResult, Status

_SLOW_SECONDS = 1.0


def judge(evidence: AcceptanceEvidence, expected: Expected) -> Iterator[CheckResult]:
    """One result per node at fault or odd pair, and one for all."""
    if (nothing := not_between_nodes(evidence, CHECK, "network")) is not None:
        yield nothing
        return
    yield from unanswered(evidence, CHECK, "network")
    hosts = [node.host for node in evidence.nodes]
    shared = {host for host in hosts if hosts.count(host) > 1}
    ranks = tuple(node.rank for node in evidence.nodes)
    if shared:
        what = f"several nodes call themselves {sorted(shared)[0]}, so names cannot be checked"
        yield CHECK.result(ranks, Status.skipped, what)
        return
    right: set[tuple[int, int]] = set()
    wrong: dict[tuple[int, int], str] = {}
    unknown: dict[tuple[int, int], str] = {}
    for rank, peers in network_of(evidence, "name").items():
        for other, found in peers.items():
            if not isinstance(found, dict):
                unknown[rank, other] = "no answer in time"
            elif found.get("error") is not None:
                unknown[rank, other] = str(found["error"])
            elif found.get("reaches") == other:
                right.add((rank, other))
            else:
                wrong[rank, other] = f"leads to {_where(evidence, found)}"
    if not right and not wrong and unknown:
        why = next(iter(unknown.values()))
        yield CHECK.result(ranks, Status.recorded, f"no node finds another by its name ({why})")
        return
    yield from _failures(evidence, right, {**unknown, **wrong})
    if right and not unknown and not wrong:
        back = _reverse(evidence)
        yield CHECK.result(
            ranks, Status.passed, f"{len(ranks)} nodes find each other by name; {back}"
        )


def _failures(
    evidence: AcceptanceEvidence, right: set[tuple[int, int]], bad: dict[tuple[int, int], str]
) -> Iterator[CheckResult]:
    """A node that finds no other while others are found is at fault; so is one that no other finds;
    what is left are pairs."""
    finds = {rank for rank, _ in right}
    found = {other for _, other in right}
    left = dict(bad)
    for rank in sorted({each for pair in bad for each in pair}):
        out = [pair for pair in left if pair[0] == rank]
        into = [pair for pair in left if pair[1] == rank]
        blind = rank not in finds and len([pair for pair in out if pair[1] in found]) >= 2
        hidden = rank not in found and len([pair for pair in into if pair[0] in finds]) >= 2
        if not blind and not hidden:
            continue
        name = evidence.name_of(rank)
        pairs = [*(out if blind else ()), *(into if hidden else ())]
        what = f"{name} finds no other node by name" if blind else f"no node finds {name} by name"
        yield CHECK.result((rank,), Status.fail, f"{what}: {left[pairs[0]]}", culprits=(rank,))
        for pair in pairs:
            left.pop(pair, None)
    for (rank, other), why in sorted(left.items()):
        a, b = evidence.name_of(rank), evidence.name_of(other)
        yield CHECK.result((rank, other), Status.fail, f"on {a} the name of {b}: {why}")


def _where(evidence: AcceptanceEvidence, found: dict[str, Any]) -> str:
    if isinstance(rank := found.get("reaches"), int):
        return evidence.name_of(rank)
    addresses = ", ".join(map(str, entries(found, "addresses")[:3]))
    return f"{addresses or 'no address'}, where the node is not"


def _reverse(evidence: AcceptanceEvidence) -> str:
    """A sentence on how many addresses lead back to their names. Cloud networks often have none,
    and they are not needed."""
    hosts = {node.rank: node.host.partition(".")[0] for node in evidence.nodes}
    back: set[int] = set()
    slow: set[int] = set()
    for peers in network_of(evidence, "reverse").values():
        for other, found in peers.items():
            shorts = [str(each).partition(".")[0] for each in entries(found, "names")]
            if hosts.get(other) in shorts:
                back.add(other)
    for rank, peers in network_of(evidence, "name").items():
        if any((number(member(each, "seconds")) or 0) > _SLOW_SECONDS for each in peers.values()):
            slow.add(rank)
    text = f"{len(back)} of their addresses lead back to a name"
    return f"{text}; lookups are slow on {listed(evidence, sorted(slow))}" if slow else text


CHECK = Check(
    name="names",
    title="Names",
    level=Level.quick,
    probes=("network",),
    seconds=1,
    measures="whether nodes find each other by name, and addresses lead back to names",
    how="each node looks up the others' host names, and asks the program there which node it is",
    evidence="a lookup of each peer's name on each node",
    references="the nodes' own host names; where no node knows any name, that is recorded",
    meaning="a node's resolver or /etc/hosts differs from the others', or a name is old",
    action="compare /etc/resolv.conf and /etc/hosts with those of another node",
    judge=judge,
    metric="names",
)
