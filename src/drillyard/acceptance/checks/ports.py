"""Ports of each node, as the others reach them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from drillyard.acceptance.check import Check, Expected, Level
from drillyard.acceptance.checks.blame import failed_pairs
from drillyard.acceptance.checks.mesh_evidence import (
    entries,
    member,
    network_of,
    not_between_nodes,
    unanswered,
)
from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.results import CheckResult, Status


def judge(evidence: AcceptanceEvidence, expected: Expected) -> Iterator[CheckResult]:
    """One result per node or pair whose ports cannot be reached, else one for all."""
    if (nothing := not_between_nodes(evidence, CHECK, "network")) is not None:
        yield nothing
        return
    yield from unanswered(evidence, CHECK, "network")
    good: set[tuple[int, int]] = set()
    bad: dict[tuple[int, int], str] = {}
    count = 0
    for rank, peers in network_of(evidence, "ports").items():
        for other, ports in peers.items():
            tried = [each for each in entries(ports) if isinstance(each, dict)]
            count += len(tried)
            if not tried:
                yield CHECK.result(
                    (rank, other),
                    Status.incomplete,
                    f"{_way(evidence, rank, other)}: no port was tried in time",
                )
            elif failed := [each for each in tried if each.get("error") is not None]:
                bad[rank, other] = f"{_way(evidence, rank, other)}: {_ports(failed)}"
            else:
                good.add((rank, other))
    yield from failed_pairs(CHECK, evidence, good, bad, "ports between")
    reached = tuple(sorted({rank for pair in good for rank in pair}))
    if good and not bad:
        yield CHECK.result(reached, Status.passed, f"{count} ports of {len(reached)} nodes answer")


def _way(evidence: AcceptanceEvidence, rank: int, other: int) -> str:
    return f"from {evidence.name_of(rank)} to {evidence.name_of(other)}"


def _ports(failed: list[dict[str, Any]]) -> str:
    return "; ".join(
        f"{member(each, 'kind')} port {member(each, 'port')}: {member(each, 'error')}"
        for each in failed
    )


CHECK = Check(
    name="ports",
    title="Ports",
    level=Level.quick,
    probes=("network",),
    seconds=2,
    measures="whether each node reaches the others' ports",
    how="TCP connections to the job's own port and to one that the kernel chose; the node that"
    " answers says which it is",
    evidence="an answer of the right node on every port, both ways",
    references="PyTorch and NCCL connect ranks on ports that the kernel chooses",
    meaning="a firewall or network policy is in the way, or two nodes have one address",
    action="open all TCP ports between the nodes, both ways",
    judge=judge,
    metric="reachable",
)
