"""From evidence to the outcome of an acceptance job: results of all checks, the verdict, and the
nodes at fault. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from drillyard.acceptance.check import Check, Expected, Level
from drillyard.acceptance.evidence import AcceptanceEvidence, Observation
from drillyard.acceptance.registry import checks_of
from drillyard.acceptance.results import CheckResult, Status, verdict_of

_JUDGED = {Status.passed, Status.warn, Status.fail, Status.incomplete}


@dataclass(frozen=True)
class Outcome:
    """The outcome. `culprits`: nodes proven to be at fault, the clearest case first."""

    evidence: AcceptanceEvidence
    results: tuple[CheckResult, ...]
    verdict: Status
    culprits: tuple[int, ...]
    expected: Expected | None = None
    """What it was judged by; None where nothing was judged."""


def judge(evidence: AcceptanceEvidence, expected: Expected) -> Outcome:
    """Judge everything that was observed."""
    results = [_missing(evidence, rank) for rank in evidence.missing]
    results += [_unreadable(seen) for seen in evidence.of("file")]
    for check in checks_of(Level(evidence.level)):
        if evidence.recorded and not any(evidence.of(probe) for probe in check.probes):
            continue
        results += list(check.judge(evidence, expected)) or [_nothing_recorded(check)]
    if not any(each.required and each.status in _JUDGED for each in results):
        results.append(_nothing_judged(results, expected))
    culprits = dict.fromkeys(rank for each in results for rank in each.culprits)
    return Outcome(evidence, tuple(results), verdict_of(results), tuple(culprits), expected)


def _missing(evidence: AcceptanceEvidence, rank: int) -> CheckResult:
    name, early = evidence.name_of(rank), evidence.interrupted
    return CheckResult(
        check="join",
        metric="joined",
        nodes=(rank,),
        # A job that ended early may not have waited for it.
        status=Status.incomplete if early else Status.fail,
        reason=f"{name} did not join the job" + (f", which ended early: {early}" if early else ""),
        action="look at its log; restart the node, or leave it out",
        culprits=() if early else (rank,),
    )


def _nothing_recorded(check: Check) -> CheckResult:
    return CheckResult(
        check=check.name,
        metric=check.name,
        nodes=(),
        status=Status.skipped,
        reason=f"no file has what {check.name} needs",
    )


def _unreadable(seen: Observation) -> CheckResult:
    return CheckResult(
        check="file",
        metric="content",
        nodes=(),
        status=Status.incomplete,
        reason=f"{seen.source}: {seen.error}",
        action="give what nccl-tests, nvidia-smi -q -x, dcgmi diag -j or dmesg printed",
    )


def _nothing_judged(results: Sequence[CheckResult], expected: Expected) -> CheckResult:
    """Why there is no verdict where every figure was only recorded."""
    first = next((each for each in results if each.status is Status.recorded), None)
    if first is not None and first.action:
        action = first.action
    elif expected.machine is None:
        action = "name the machine: machine in the cluster config, or --machine with --from"
    else:
        action = "measure what drillyard has figures of, or compare with --baseline FILE"
    return CheckResult(
        check="verdict",
        metric="judged results",
        nodes=(),
        status=Status.incomplete,
        reason=first.reason if first else "nothing was observed that a check can judge",
        action=action,
    )
