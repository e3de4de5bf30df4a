"""acceptance.json, made by the models whose schema `drillyard schema acceptance` prints.

It holds all that the report shows, and the evidence, by which a later run takes this one as its
baseline. Within one `version` fields are only added.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import Field, JsonValue

from drillyard.acceptance.checks import clock as clock_check
from drillyard.acceptance.checks import tcp_bandwidth
from drillyard.acceptance.checks.collectives import PAIRS
from drillyard.acceptance.checks.mesh_evidence import member, network_of, number
from drillyard.acceptance.checks.tcp_bandwidth import pair_bandwidths
from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.judgement import Outcome
from drillyard.acceptance.registry import CHECKS
from drillyard.acceptance.results import CheckResult, Status, Threshold
from drillyard.json_document import DocumentPart, Number
from drillyard.version import __version__

VERSION = 1
Verdict = Literal["pass", "warn", "fail", "incomplete", "skipped", "recorded"]


class NodeEntry(DocumentPart):
    """A node."""

    rank: int
    name: str = Field(description="The scheduler's, where it is known.")
    address: str
    rack: str
    joined: bool
    at_fault: bool = Field(description="It is proven to be at fault.")


class ThresholdEntry(DocumentPart):
    """A limit."""

    value: Number
    unit: str
    at_least: bool = Field(description="The observed value must not be below; else not above.")
    source: str = Field(description="The cited row, rule or baseline.")
    reference: Number | None = Field(description="The limit is a fraction of it.")
    bound: Number | None = Field(description="What the hardware allows at most.")


class PointEntry(DocumentPart):
    """A point of a curve."""

    bytes: Number
    gb_per_s: Number


class ResultEntry(DocumentPart):
    """One judged figure."""

    check: str
    title: str
    metric: str
    nodes: list[str] = Field(description="The node, the pair, or all that it is about.")
    ranks: list[int]
    device: int | None
    status: Verdict
    required: bool = Field(description="It takes part in the verdict.")
    reason: str
    observed: Number | str | None
    interval: list[Number] | None = Field(description="Least and greatest of the repeats.")
    unit: str
    threshold: ThresholdEntry | None
    expected: str = Field(description="What is expected, in words, where there is no threshold.")
    action: str = Field(description="What to do.")
    culprits: list[str] = Field(description="Nodes that this result proves to be at fault.")
    evidence: list[str]
    series: list[PointEntry] = Field(description="The curve of which `observed` is a point.")
    reference_series: list[PointEntry]


class CulpritEntry(DocumentPart):
    """A node that is proven to be at fault, the clearest case first."""

    rank: int
    name: str
    checks: list[str]
    reasons: list[str]
    actions: list[str]
    evidence: list[str]


class MatrixEntry(DocumentPart):
    """A figure of pairs of nodes; `values[i][j]` is that of `nodes[i]` and `nodes[j]`, or what the
    first found of the second; null where they were not measured."""

    check: str
    metric: str
    unit: str
    nodes: list[str]
    values: list[list[Number | None]]


class AcceptanceDocument(DocumentPart):
    """The outcome of one acceptance."""

    version: int
    drillyard: str = Field(description="The version that judged.")
    verdict: Verdict
    level: str
    recorded: bool = Field(description="It was judged from recorded files (--from).")
    machine: str | None
    accelerator: str | None
    network_stack: str | None
    started_at: str | None = Field(description="UTC, by node 0's clock (ISO).")
    ended_at: str | None
    nodes: list[NodeEntry]
    culprits: list[CulpritEntry]
    results: list[ResultEntry]
    matrices: list[MatrixEntry]
    evidence: dict[str, JsonValue] = Field(description="All observations, as they were read.")


def acceptance_document(outcome: Outcome) -> AcceptanceDocument:
    """The document of an outcome."""
    evidence, expected = outcome.evidence, outcome.expected
    machine = None if expected is None else expected.machine
    stack = None if expected is None else expected.stack
    return AcceptanceDocument(
        version=VERSION,
        drillyard=__version__,
        verdict=outcome.verdict.value,
        level=evidence.level,
        recorded=evidence.recorded,
        machine=None if machine is None else machine.name,
        accelerator=None if machine is None else machine.accelerator,
        network_stack=None if stack is None else stack.name,
        started_at=_time(evidence.started_at),
        ended_at=_time(evidence.ended_at),
        nodes=list(_nodes(outcome)),
        culprits=[_culprit(rank, outcome) for rank in outcome.culprits],
        results=[_result(each, evidence) for each in outcome.results],
        matrices=list(_matrices(outcome)),
        evidence=_without_nan(evidence.model_dump(mode="json")),
    )


def acceptance_schema() -> dict[str, Any]:
    """The JSON Schema of acceptance.json."""
    schema = AcceptanceDocument.model_json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "acceptance.json of drillyard accept",
        **{key: value for key, value in schema.items() if key != "title"},
    }


def _nodes(outcome: Outcome) -> Iterator[NodeEntry]:
    evidence = outcome.evidence
    joined = {node.rank: node for node in evidence.nodes}
    for rank in sorted({*joined, *evidence.missing}):
        node = joined.get(rank)
        yield NodeEntry(
            rank=rank,
            name=evidence.name_of(rank),
            address="" if node is None else node.address,
            rack="" if node is None else node.rack,
            joined=node is not None,
            at_fault=rank in outcome.culprits,
        )


def _result(result: CheckResult, evidence: AcceptanceEvidence) -> ResultEntry:
    titles = {check.name: check.title for check in CHECKS}
    observed = result.observed
    return ResultEntry(
        check=result.check,
        title=titles.get(result.check, result.check.capitalize()),
        metric=result.metric,
        nodes=[evidence.name_of(rank) for rank in result.nodes],
        ranks=list(result.nodes),
        device=result.device,
        status=result.status.value,
        required=result.required and result.status not in (Status.skipped, Status.recorded),
        reason=result.reason,
        observed=_finite(observed) if isinstance(observed, int | float) else observed,
        interval=None if result.interval is None else list(result.interval),
        unit=result.unit,
        threshold=_threshold(result.threshold),
        expected=result.expected,
        action=result.action,
        culprits=[evidence.name_of(rank) for rank in result.culprits],
        evidence=list(result.evidence),
        series=_points(result.series),
        reference_series=_points(result.reference_series),
    )


def _threshold(threshold: Threshold | None) -> ThresholdEntry | None:
    if threshold is None:
        return None
    return ThresholdEntry(
        value=threshold.value,
        unit=threshold.unit,
        at_least=threshold.at_least,
        source=threshold.source,
        reference=threshold.reference,
        bound=threshold.bound,
    )


def _points(series: tuple[tuple[float, float], ...]) -> list[PointEntry]:
    return [PointEntry(bytes=size, gb_per_s=value) for size, value in series]


def _culprit(rank: int, outcome: Outcome) -> CulpritEntry:
    proofs = [each for each in outcome.results if rank in each.culprits]
    return CulpritEntry(
        rank=rank,
        name=outcome.evidence.name_of(rank),
        checks=list(dict.fromkeys(each.check for each in proofs)),
        reasons=[each.reason for each in proofs],
        actions=list(dict.fromkeys(each.action for each in proofs if each.action)),
        evidence=[line for each in proofs for line in each.evidence],
    )


Pairs = dict[tuple[int, int], float]


def _matrices(outcome: Outcome) -> Iterator[MatrixEntry]:
    """Collectives, TCP bandwidth and clocks between pairs; the last measurement of each."""
    evidence = outcome.evidence
    found: dict[tuple[str, str, str], Pairs] = {}
    for each in outcome.results:
        if each.check == PAIRS.name and isinstance(each.observed, int | float):
            one, other = each.nodes
            pairs = found.setdefault((each.check, each.metric, each.unit), {})
            pairs[one, other] = pairs[other, one] = float(each.observed)
    for (one, other), value in pair_bandwidths(evidence).items():
        pairs = found.setdefault((tcp_bandwidth.CHECK.name, "TCP bandwidth", "GB/s"), {})
        pairs[one, other] = pairs[other, one] = value
    for rank, peers in network_of(evidence, "clock").items():
        for peer, clock in peers.items():
            if (offset := number(member(clock, "offset"))) is not None:
                found.setdefault((clock_check.CHECK.name, "offset", "s"), {})[rank, peer] = offset
    for (check, metric, unit), pairs in found.items():
        ranks = sorted({rank for pair in pairs for rank in pair})
        yield MatrixEntry(
            check=check,
            metric=metric,
            unit=unit,
            nodes=[evidence.name_of(rank) for rank in ranks],
            values=[[pairs.get((i, j)) for j in ranks] for i in ranks],
        )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _time(seconds: float) -> str | None:
    return None if not seconds else datetime.fromtimestamp(seconds, UTC).isoformat()


def _without_nan(value: Any) -> Any:
    """JSON has no numbers that are not finite; what a probe found may have."""
    if isinstance(value, float):
        return _finite(value)
    if isinstance(value, dict):
        return {key: _without_nan(each) for key, each in value.items()}
    return [_without_nan(each) for each in value] if isinstance(value, list) else value
