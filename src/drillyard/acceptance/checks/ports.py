"""Ports of each node, as the others reach them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from drillyard.acceptance.check import Check, Expected, Level
from drillyard.acceptance.checks.blame import blame
from drillyard.acceptance.checks.mesh_evidence import (
    entries,
    listed,
    member,
    network_of,
    not_between_nodes,
    unanswered,
    undirected,
)
from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.results import CheckResult, Status


def judge(evidence: AcceptanceEvidence, expected: Expected) -> Iterator[CheckResult]:
    """One result per node or pair whose ports cannot be reached, else one for all."""
    if (nothing := not_between_nodes(evidence, CHECK.name, "reachable", "network")) is not None:
        yield nothing
        return
    yield from unanswered(evidence, CHECK.name, "reachable", "network")
    good: set[tuple[int, int]] = set()
    bad: dict[tuple[int, int], str] = {}
    count = 0
    for rank, peers in network_of(evidence, "ports").items():
        for other, ports in peers.items():
            tried = [each for each in entries(ports) if isinstance(each, dict)]
            count += len(tried)
            if not tried:
                yield _result(
                    (rank, other),
                    Status.incomplete,
                    f"{_way(evidence, rank, other)}: no port was tried in time",
                )
            elif failed := [each for each in tried if each.get("error") is not None]:
                bad[rank, other] = f"{_way(evidence, rank, other)}: {_ports(failed)}"
            else:
                good.add((rank, other))
    yield from _failures(evidence, good, bad)
    reached = tuple(sorted({rank for pair in good for rank in pair}))
    if good and not bad:
        yield _result(reached, Status.passed, f"{count} ports of {len(reached)} nodes answer")


def _failures(
    evidence: AcceptanceEvidence, good: set[tuple[int, int]], bad: dict[tuple[int, int], str]
) -> Iterator[CheckResult]:
    both = {pair for pair in good if pair[::-1] not in bad}
    found = blame((undirected(*pair) for pair in both), (undirected(*pair) for pair in bad))
    for rank in found.nodes:
        texts = [text for pair, text in bad.items() if rank in pair]
        others = sorted({each for pair in bad if rank in pair for each in pair} - {rank})
        reason = (
            f"ports between {evidence.name_of(rank)} and {listed(evidence, others)}: {texts[0]}"
        )
        yield _result((rank,), Status.fail, reason, (rank,), tuple(texts[:10]))
    for a, b in found.links:
        texts = [bad[pair] for pair in ((a, b), (b, a)) if pair in bad]
        yield _result((a, b), Status.fail, texts[0], (), tuple(texts))


def _way(evidence: AcceptanceEvidence, rank: int, other: int) -> str:
    return f"from {evidence.name_of(rank)} to {evidence.name_of(other)}"


def _ports(failed: list[dict[str, Any]]) -> str:
    return "; ".join(
        f"{member(each, 'kind')} port {member(each, 'port')}: {member(each, 'error')}"
        for each in failed
    )


def _result(
    nodes: tuple[int, ...],
    status: Status,
    reason: str,
    culprits: tuple[int, ...] = (),
    lines: tuple[str, ...] = (),
) -> CheckResult:
    return CheckResult(
        check=CHECK.name,
        metric="reachable",
        nodes=nodes,
        status=status,
        reason=reason,
        action=CHECK.action if status is Status.fail else "",
        culprits=culprits,
        evidence=lines,
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
)
