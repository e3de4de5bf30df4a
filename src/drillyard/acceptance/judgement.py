"""From evidence to the outcome of an acceptance job: results of all checks, the verdict, and the
nodes at fault. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from drillyard.acceptance.check import Expected, Level
from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.registry import checks_of
from drillyard.acceptance.results import CheckResult, Status, verdict_of


@dataclass(frozen=True)
class Outcome:
    """The outcome. `culprits`: nodes proven to be at fault, the clearest case first."""

    evidence: AcceptanceEvidence
    results: tuple[CheckResult, ...]
    verdict: Status
    culprits: tuple[int, ...]


def judge(evidence: AcceptanceEvidence, expected: Expected) -> Outcome:
    """Judge everything that was observed."""
    results = [_missing(evidence, rank) for rank in evidence.missing]
    for check in checks_of(Level(evidence.level)):
        results += check.judge(evidence, expected)
    culprits = dict.fromkeys(rank for each in results for rank in each.culprits)
    return Outcome(evidence, tuple(results), verdict_of(results), tuple(culprits))


def _missing(evidence: AcceptanceEvidence, rank: int) -> CheckResult:
    return CheckResult(
        check="join",
        metric="joined",
        nodes=(rank,),
        status=Status.fail,
        reason=f"{evidence.name_of(rank)} did not join the job",
        action="look at its log; restart the node, or leave it out",
        culprits=(rank,),
    )
