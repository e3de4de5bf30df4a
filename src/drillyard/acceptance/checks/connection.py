"""Nodes that stayed with the job to its end."""

from __future__ import annotations

from collections.abc import Iterator

from drillyard.acceptance.check import Check, Expected, Level
from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.results import CheckResult, Status


def judge(evidence: AcceptanceEvidence, expected: Expected) -> Iterator[CheckResult]:
    """One result per node that was lost, and one for the job."""
    lost: set[int] = set()
    for seen in evidence.observations:
        for rank in sorted(set(seen.silent) - lost):
            lost.add(rank)
            name = evidence.name_of(rank)
            why = f"{name} was lost in {seen.probe}: {seen.error}"
            yield CHECK.result((rank,), Status.fail, why, culprits=(rank,))
        if seen.probe == "connection" and not seen.silent:
            name = evidence.name_of(seen.nodes[0])
            yield CHECK.result(seen.nodes, Status.fail, f"{name}: {seen.error}")
    ranks = tuple(node.rank for node in evidence.nodes)
    if evidence.interrupted is not None:
        why = f"the job ended before its last step: {evidence.interrupted}"
        yield CHECK.result(ranks, Status.incomplete, why)
    elif not evidence.observations:
        yield CHECK.result(ranks, Status.incomplete, "the job observed nothing")
    elif remaining := tuple(rank for rank in ranks if rank not in lost):
        count = f"{len(remaining)} of {evidence.expected_nodes} nodes"
        yield CHECK.result(remaining, Status.passed, f"{count} answered to the end")


CHECK = Check(
    name="connection",
    title="Nodes that answer",
    level=Level.quick,
    probes=("connection",),
    seconds=0,
    measures="whether every node answers until the job ends",
    how="each node's program sends node 0 a message every two seconds, and an answer to each step",
    evidence="an answer of every node to every step",
    references="20 seconds without a message, or a step's own limit",
    meaning="a node was stopped, crashed, lost its network, or got no processor time",
    action="look at the node's log and its kernel log; restart it, or leave it out",
    judge=judge,
    metric="answers",
)
