"""DCGM's diagnostic of each node, where DCGM is installed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from drillyard.acceptance.check import Check, Expected, Level
from drillyard.acceptance.evidence import AcceptanceEvidence, Observation
from drillyard.acceptance.gpu_evidence import gpus_of
from drillyard.acceptance.node_results import (
    has_gpus,
    node_observations,
    node_result,
    why_not_observed,
)
from drillyard.acceptance.parsers.dcgm import DcgmReport, DcgmResult, DcgmSeverity, parse_dcgm
from drillyard.acceptance.parsers.errors import NotThisOutput
from drillyard.acceptance.results import CheckResult, Status

PROBE = "dcgm"


def judge(evidence: AcceptanceEvidence, expected: Expected) -> Iterator[CheckResult]:
    """One result per test that fails on a GPU, else one per node."""
    counted = {node.rank: len(node.table.gpus) for node in gpus_of(evidence) if node.table}
    for rank, seen in node_observations(evidence, PROBE):
        needed = counted.get(rank)
        if expected.machine is not None and has_gpus(expected):
            needed = expected.machine.num_accelerators
        yield from _judge_node(rank, evidence.name_of(rank), seen, needed)


def _judge_node(
    rank: int, name: str, seen: Observation | None, needed: int | None
) -> Iterator[CheckResult]:
    tools = (seen.values or {}).get("tools") if seen else None
    answer = tools.get("diagnostic") if isinstance(tools, Mapping) else None
    if not isinstance(answer, Mapping):
        why = f"{name}: {why_not_observed(seen, PROBE)}"
        yield node_result(CHECK, rank, Status.incomplete, why)
        return
    if answer.get("installed") is False:
        yield node_result(CHECK, rank, Status.skipped, f"{name}: DCGM is not installed")
        return
    error = answer.get("error")
    try:
        report = parse_dcgm(str(answer.get("text", "")))
    except NotThisOutput as problem:
        reason = f"{name}: {error or f'the output of dcgmi {problem}'}"
        action = "start DCGM's host engine on the node (systemctl start nvidia-dcgm), and run again"
        yield node_result(CHECK, rank, Status.incomplete, reason, action=action)
        return
    found = list(_findings(rank, name, report))
    yield from found
    if any(each.status is not Status.recorded for each in found):
        return
    reason = _doubt(report, str(error) if error else None, needed)
    if reason:
        yield node_result(CHECK, rank, Status.incomplete, f"{name}: {reason}")
        return
    ran = sum(each.status == "pass" for each in report.results)
    reason = f"{name}: DCGM {report.version or 3}: {ran} tests passed on {len(report.gpus)} GPUs"
    yield node_result(CHECK, rank, Status.passed, reason, observed=ran, unit="tests")


def _findings(rank: int, name: str, report: DcgmReport) -> Iterator[CheckResult]:
    for each in report.results:
        status = _status(each)
        if status is Status.passed or status is Status.skipped:
            continue
        severity = each.severity
        title = severity.name if severity is not None else "no severity"
        said = "; ".join(warning.text for warning in each.warnings)
        reason = f"{name}: {each.entity}: DCGM's test {each.test}: {each.status} ({title})"
        remedy = DcgmSeverity.UNKNOWN if severity is None else severity
        yield node_result(
            CHECK,
            rank,
            status,
            reason + (f": {said[:200]}" if said else ""),
            metric=each.test,
            device=each.gpu,
            observed=title,
            action=remedy.remedy,
            evidence=tuple(warning.text[:400] for warning in each.warnings),
        )


def _status(result: DcgmResult) -> Status:
    """Of a test on a GPU: the worse of its own word and its worst severity."""
    severity = result.severity
    if severity in (
        DcgmSeverity.ISOLATE,
        DcgmSeverity.TRIAGE,
        DcgmSeverity.CONFIG,
        DcgmSeverity.RESET,
    ):
        return Status.fail
    if severity is DcgmSeverity.MONITOR and result.status in ("pass", "warn", "fail"):
        return Status.warn
    if result.status == "fail":
        return Status.fail
    if severity is DcgmSeverity.UNKNOWN or result.status not in ("pass", "warn", "skip"):
        return Status.incomplete
    if result.status == "pass" and any(each.severity is None for each in result.warnings):
        # It passed, and warns all the same: of what, the document does not say.
        return Status.incomplete
    return {"pass": Status.passed, "warn": Status.warn, "skip": Status.skipped}[result.status]


def _doubt(report: DcgmReport, error: str | None, needed: int | None) -> str:
    """Why a report without findings does not pass; empty: it does."""
    if error:
        return f"{error}, although no test of its report failed"
    if not report.gpus:
        return "DCGM ran no test on a GPU"
    if needed is not None and len(report.gpus) < needed:
        return f"DCGM tested {len(report.gpus)} of {needed} GPUs"
    return ""


CHECK = Check(
    name="dcgm",
    title="DCGM diagnostic",
    level=Level.quick,
    probes=("dcgm", "accelerators"),
    seconds=10,
    measures="NVIDIA's own tests of each GPU: level 1 in quick, 2 in standard, 3 in full",
    how="dcgmi diag -j",
    evidence="a whole report of DCGM 3 or 4 with a test on every GPU; skipped where DCGM is not"
    " installed",
    references="DCGM's status and severity: MONITOR warns, ISOLATE, TRIAGE, CONFIG and RESET fail",
    meaning="by test; the severity says whether the GPU can be used",
    action="as the severity says",
    judge=judge,
)
