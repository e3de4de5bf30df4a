"""Which nodes are at fault where pairs of nodes have failed: shared by the checks of pairs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from drillyard.acceptance.check import Check
from drillyard.acceptance.checks.mesh_evidence import listed, undirected
from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.node_results import node_result
from drillyard.acceptance.results import CheckResult, Status

_MOST_EVIDENCE = 10


@dataclass(frozen=True)
class Blame:
    """Nodes proven to be at fault, and the bad pairs that they do not explain."""

    nodes: tuple[int, ...]
    links: tuple[tuple[int, int], ...]


def blame(good: Iterable[tuple[int, int]], bad: Iterable[tuple[int, int]]) -> Blame:
    """A node is at fault where every pair that it is in failed, and at least two of its partners
    have a good pair with another node. Two nodes prove nothing. Pairs have no
    direction."""
    good_pairs = {frozenset(pair) for pair in good}
    bad_pairs = {frozenset(pair) for pair in bad} - good_pairs
    works = {rank for pair in good_pairs for rank in pair}
    found: list[int] = []
    for rank in sorted({rank for pair in bad_pairs for rank in pair} - works):
        partners = {other for pair in bad_pairs if rank in pair for other in pair - {rank}}
        if len(partners & works) >= 2:
            found.append(rank)
    links = sorted(
        (min(pair), max(pair)) for pair in bad_pairs if pair.isdisjoint(found) and len(pair) == 2
    )
    return Blame(tuple(found), tuple(links))


def failed_pairs(
    check: Check,
    evidence: AcceptanceEvidence,
    good: set[tuple[int, int]],
    bad: Mapping[tuple[int, int], str],
    what: str,
) -> Iterator[CheckResult]:
    """Results of pairs with a direction, of which the `bad` ones failed, each with its text: one
    per node at fault, which begins with `what` failed ("ports between"), and one per other pair."""
    found = blame(
        (undirected(*pair) for pair in good if pair[::-1] not in bad),
        (undirected(*pair) for pair in bad),
    )
    for rank in found.nodes:
        texts = [text for pair, text in bad.items() if rank in pair]
        others = sorted({each for pair in bad if rank in pair for each in pair} - {rank})
        reason = f"{what} {evidence.name_of(rank)} and {listed(evidence, others)}: {texts[0]}"
        lines = tuple(texts[:_MOST_EVIDENCE])
        yield node_result(check, rank, Status.fail, reason, evidence=lines)
    for a, b in found.links:
        texts = [bad[pair] for pair in ((a, b), (b, a)) if pair in bad]
        yield check.result((a, b), Status.fail, texts[0], evidence=tuple(texts))
