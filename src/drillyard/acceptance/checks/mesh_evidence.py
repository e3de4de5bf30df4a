"""What nodes found of each other, taken from observations: shared by the checks between nodes.

Observations are data from elsewhere: what does not have the form that a probe gives it is
left out, and the check that needs it is incomplete.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from drillyard.acceptance.check import Check
from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.results import CheckResult, Status

_MOST = 1e300


def number(value: object) -> float | None:
    """`value` as a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < _MOST else None


def entries(value: object, *keys: str) -> list[Any]:
    """The list under nested keys; empty where there is none."""
    found = member(value, *keys)
    return found if isinstance(found, list) else []


def member(value: object, *keys: str) -> Any:
    """The value under nested keys; None where there is none."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def network_of(evidence: AcceptanceEvidence, measure: str) -> dict[int, dict[int, Any]]:
    """What each node found of each of its peers in `measure` ("clock", "mtu", ...) of the first
    network step, by rank and rank of the peer."""
    return {
        rank: {peer["node"]: peer.get(measure) for peer in values.get("peers", ())}
        for seen in network_steps(evidence)[:1]
        for rank, values in seen.items()
    }


def network_steps(evidence: AcceptanceEvidence) -> list[dict[int, dict[str, Any]]]:
    """The values of each node in each network step, in order. Their `peers` are those that are
    nodes of the job; a node that did not answer has no values."""
    ranks = {node.rank for node in evidence.nodes}
    steps: list[dict[int, dict[str, Any]]] = []
    for seen in evidence.of("network"):
        if len(seen.nodes) != 1:
            continue
        (rank,) = seen.nodes
        if not steps or rank in steps[-1]:
            steps.append({})
        peers = [
            peer
            for peer in entries(seen.values, "peers")
            if isinstance(peer, dict)
            and type(peer.get("node")) is int
            and peer["node"] in ranks - {rank}
        ]
        steps[-1][rank] = {**seen.values, "peers": peers} if seen.values else {}
    return steps


def unanswered(evidence: AcceptanceEvidence, check: Check, probe: str) -> Iterator[CheckResult]:
    """An incomplete result for each observation of a probe without values, and for each node that
    says nothing of one which measured it. A silent node has a result of its own (`connection`) and
    none here."""
    for seen in evidence.of(probe):
        if seen.values is None and not seen.silent:
            yield _incomplete(evidence, check, seen.nodes, seen.error or "has no values")
    for step in network_steps(evidence)[:1] if probe == "network" else ():
        pairs = {(rank, peer["node"]) for rank in step for peer in step[rank].get("peers", ())}
        for rank, other in sorted(pairs):
            if (other, rank) not in pairs and step.get(other):
                why = f"says nothing of {evidence.name_of(rank)}, which measured it"
                yield _incomplete(evidence, check, (other,), why)


def _incomplete(
    evidence: AcceptanceEvidence, check: Check, nodes: tuple[int, ...], why: str
) -> CheckResult:
    names = " and ".join(map(evidence.name_of, nodes[:2]))
    return check.result(nodes, Status.incomplete, f"{names}: {why}")


def not_between_nodes(evidence: AcceptanceEvidence, check: Check, probe: str) -> CheckResult | None:
    """The result where nothing between nodes was observed; None: something was."""
    if evidence.expected_nodes == 1:
        status, reason = Status.skipped, "the job has one node"
    elif not evidence.of(probe):
        status, reason = Status.incomplete, f"no node ran the probe {probe}"
    elif len(evidence.nodes) < 2:
        status, reason = Status.incomplete, "only one node joined the job"
    else:
        return None
    return check.result(tuple(node.rank for node in evidence.nodes), status, reason)


def undirected(a: int, b: int) -> tuple[int, int]:
    """A pair without direction."""
    return (min(a, b), max(a, b))


def listed(evidence: AcceptanceEvidence, ranks: Iterator[int] | list[int] | tuple[int, ...]) -> str:
    """Names of nodes, the first few of many."""
    names = [evidence.name_of(rank) for rank in ranks]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
