"""Values that the ranks of a probe printed, as the checks read them: who printed what, who printed
nothing and why. All of it is data from elsewhere: what has another form counts as missing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from drillyard.acceptance.check import Check
from drillyard.acceptance.evidence import AcceptanceEvidence, Observation
from drillyard.acceptance.results import CheckResult, Status

NOT_INSTALLED = "PyTorch is not installed"
"""How the reason begins where a node has no PyTorch (`node/worker.py`)."""
ROBUST = 0.6745
"""Of a normal distribution the median absolute deviation is this share of the standard one."""


@dataclass(frozen=True, eq=False)
class RankValues:
    """What one rank printed. `node` is a node's rank, `local_rank` the place on its node."""

    rank: int
    node: int
    local_rank: int
    values: Mapping[str, Any]

    @property
    def on_gpu(self) -> bool:
        return self.values.get("device") == "cuda"

    @property
    def kind(self) -> str:
        """The device and software on which figures and rounding depend."""
        return "/".join(str(self.values.get(key)) for key in ("device_name", "torch", "cuda"))


@dataclass(frozen=True)
class RanksOfProbe:
    """One observation of a probe with ranks. `skipped`: why nothing was measured; `problems`: what
    is missing, by node's rank."""

    observation: Observation
    ranks: tuple[RankValues, ...]
    skipped: str | None
    problems: Mapping[int, str]


def ranks_of(evidence: AcceptanceEvidence, seen: Observation) -> RanksOfProbe:
    """The ranks of an observation. One that printed an object and then failed is not among them."""
    found: dict[tuple[int, int], RankValues] = {}
    reasons: dict[int, str] = {}
    skipped: dict[int, str] = {}
    listed = (seen.values or {}).get("ranks")
    for each in listed if isinstance(listed, list) else []:
        if not isinstance(each, dict):
            continue
        node, local, rank = (_whole(each.get(key)) for key in ("node", "local_rank", "rank"))
        if node not in seen.nodes or min(local, rank) < 0:
            continue
        values, error = each.get("values"), each.get("error")
        if isinstance(error, str):
            if error.startswith(NOT_INSTALLED):
                skipped[node] = error
            reasons.setdefault(node, f"rank {rank}: {error}")
        elif isinstance(values, dict) and isinstance(values.get("skipped"), str):
            skipped[node] = values["skipped"]
        elif isinstance(values, dict):
            found[node, local] = RankValues(rank, node, local, values)
    problems = {}
    for node in seen.nodes:
        there = sum(place[0] == node for place in found)
        if there != evidence.processes_per_node:
            why = reasons.get(node) or skipped.get(node)
            if why is None and (node in seen.silent or seen.error is not None):
                why = seen.error or "did not answer"
            counted = f"{there} of {evidence.processes_per_node} ranks were measured"
            problems[node] = why or counted
    everywhere = set(skipped) == set(seen.nodes) and not found
    reason = next(iter(skipped.values())) if everywhere else None
    ordered = sorted(found.values(), key=lambda each: each.rank)
    return RanksOfProbe(seen, tuple(ordered), reason, {} if everywhere else problems)


def without_ranks(
    evidence: AcceptanceEvidence,
    check: Check,
    metric: str,
    found: Sequence[RanksOfProbe],
    probe: str,
) -> Iterator[CheckResult]:
    """Results for what was not measured: skipped or incomplete, with the reason."""
    if not found:
        status = Status.skipped if evidence.recorded else Status.incomplete
        nodes = tuple(each.rank for each in evidence.nodes)
        yield check.result(nodes, status, f"{probe} was not measured", metric=metric)
    for one in found:
        if one.skipped is not None:
            nodes = one.observation.nodes
            yield check.result(nodes, Status.skipped, one.skipped, metric=metric)
        for node, why in one.problems.items():
            reason = f"{evidence.name_of(node)}: {why}"
            yield check.result((node,), Status.incomplete, reason, metric=metric)


def _whole(value: object) -> int:
    """The whole number; -1 where it is not one."""
    return value if isinstance(value, int) and not isinstance(value, bool) else -1


def numbers(value: object) -> tuple[float, ...]:
    """The numbers of a list that has nothing but finite numbers above zero; else none."""
    if not isinstance(value, list) or not value:
        return ()
    good = all(
        isinstance(each, int | float)
        and not isinstance(each, bool)
        and math.isfinite(each)
        and each > 0
        for each in value
    )
    return tuple(float(each) for each in value) if good else ()


def mapping(value: object) -> Mapping[str, Any]:
    """A JSON object; of anything else nothing."""
    return value if isinstance(value, dict) else {}


def robust_deviations(value: float, others: Sequence[float], least_share: float) -> float:
    """How many robust standard deviations `value` is above the median of `others`. Their spread
    counts as at least `least_share` of the median: few values may lie close by chance."""
    middle = median(others)
    spread = max(median(abs(each - middle) for each in others), least_share * middle)
    return ROBUST * (value - middle) / spread
