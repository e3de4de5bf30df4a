"""What makes pairs of nodes slow: a node, a link, a rack or all of the fabric.

The conclusion is that of `pair_conclusions.py`, from the same results by which node 0 chose the
pairs of each round. A node is blamed only where that is proven.
"""

from __future__ import annotations

from collections.abc import Iterator

from drillyard.acceptance.check import Check, Expected, Level
from drillyard.acceptance.checks.collectives import collective_result
from drillyard.acceptance.collective_evidence import PROBES, measured_collectives
from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.node.search import PairResult
from drillyard.acceptance.pair_conclusions import Conclusion, conclude
from drillyard.acceptance.results import CheckResult, Status
from drillyard.acceptance.thresholds import UNIT

_ACTIONS = {
    "node": "take the node out and have it repaired; compare its NICs with another node's",
    "link": "have the cables and switch ports between the two checked; keep them apart until then",
    "rack": "have the links between the racks checked; keep a job within one rack until then",
    "fabric": "check the network settings of the job first (NCCL_*, plugin), then the switches",
}
_MOST_EVIDENCE = 12


def judge(evidence: AcceptanceEvidence, expected: Expected) -> Iterator[CheckResult]:
    """One result per cause and collective; one that passes where no pair was slow."""
    by_collective = pair_results(evidence, expected)
    for collective, results in by_collective.items():
        ranks = sorted({rank for each in results for rank in each.pair})
        conclusions = conclude(ranks, evidence.racks, results)
        for each in conclusions:
            yield _result(collective, each, evidence)
        if not conclusions:
            yield CHECK.result(
                tuple(ranks),
                Status.passed,
                f"no pair of nodes is slow at {collective}",
                metric=f"{collective} between pairs",
                # Without a threshold equally slow pairs would pass as well.
                required=all(each.passed for each in results),
            )
    if not by_collective:
        alone = evidence.expected_nodes == 1
        reason = "there is one node" if alone else "no pair of nodes was measured"
        yield CHECK.result((), Status.skipped, reason, metric="pairs")


def pair_results(evidence: AcceptanceEvidence, expected: Expected) -> dict[str, list[PairResult]]:
    """By collective: every measured pair, as the search takes it."""
    found: dict[str, list[PairResult]] = {}
    for measured in measured_collectives(evidence):
        if measured.observation.scope != "pairs" or len(measured.nodes) != 2:
            continue
        judged = collective_result(measured, evidence, expected)
        value = judged.observed if isinstance(judged.observed, float) else None
        passed = {Status.passed: True, Status.fail: False}.get(judged.status)
        one, other = measured.nodes
        found.setdefault(measured.collective or "collectives", []).append(
            PairResult((one, other), value, passed, measured.observation.round or 0)
        )
    return found


def _result(collective: str, conclusion: Conclusion, evidence: AcceptanceEvidence) -> CheckResult:
    names = [evidence.name_of(rank) for rank in conclusion.nodes]
    what = {
        "node": names[0],
        "link": f"what lies between {' and '.join(names)}",
        "rack": f"rack {' and '.join(conclusion.racks)}",
        "fabric": "the fabric",
    }[conclusion.kind]
    pairs = [
        f"round {each.round + 1}: {' with '.join(evidence.name_of(rank) for rank in each.pair)}:"
        f" {'not measured' if each.value is None else f'{each.value:.4g} {UNIT}'}"
        for each in conclusion.evidence[:_MOST_EVIDENCE]
    ]
    proven = conclusion.proven
    return CHECK.result(
        conclusion.nodes,
        Status.fail if proven else Status.recorded,
        f"{what} {'' if proven else '(not proven) '}{conclusion.reason}",
        metric=f"{collective} between pairs",
        expected=conclusion.kind,
        action=_ACTIONS[conclusion.kind] if proven else "run accept again",
        culprits=conclusion.nodes if proven and conclusion.kind == "node" else (),
        evidence=tuple(pairs),
    )


CHECK = Check(
    name="slow-pairs",
    title="Cause of slow pairs",
    level=Level.quick,
    probes=PROBES,
    seconds=0,
    measures="which node, link or rack the slow pairs have in common",
    how="up to three rounds of disjoint pairs: suspects meet nodes that have passed",
    evidence="a node that is slow with at least two proven nodes, about equally each time",
    references="the threshold of pairs; without one, the speed of most pairs",
    meaning="the named node, link or rack is slow",
    action=_ACTIONS["node"],
    judge=judge,
)
