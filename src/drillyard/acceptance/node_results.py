"""Results of checks that look at one node at a time, and how a check gets what it needs: every node
that joined is judged, whether or not something was observed there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, TypeVar

from drillyard.acceptance.check import Check, Expected
from drillyard.acceptance.evidence import AcceptanceEvidence, Observation
from drillyard.acceptance.results import CheckResult, Status

V = TypeVar("V", bound=Hashable)


def node_result(check: Check, rank: int, status: Status, reason: str, **more: Any) -> CheckResult:
    """The result of a node. A failed one blames it."""
    blamed = {"culprits": (rank,) if status is Status.fail else ()}
    return check.result((rank,), status, reason, **{**blamed, **more})


def node_observations(
    evidence: AcceptanceEvidence, probe: str
) -> Iterator[tuple[int, Observation | None]]:
    """The last observation of a probe on each node that joined; None: there is none. Nodes of
    recorded evidence without one are left out. What a probe printed before it failed is no
    value."""
    found: dict[int, Observation] = {}
    for seen in evidence.of(probe):
        for rank in seen.nodes:
            found[rank] = seen.model_copy(update={"values": None}) if seen.error else seen
    for node in evidence.nodes:
        if node.rank in found or not evidence.recorded:
            yield node.rank, found.get(node.rank)


def why_not_observed(seen: Observation | None, probe: str) -> str:
    """Why an observation has no values."""
    if seen is None:
        return f"the probe {probe} did not run"
    return seen.error or f"the probe {probe} found nothing"


def has_gpus(expected: Expected) -> bool:
    """Whether the cluster config names a machine with GPUs."""
    return expected.accelerator is not None and expected.accelerator.name != "cpu"


def majority(values: Mapping[int, V]) -> V | None:
    """The value of more than half of the nodes; None where there is no such value."""
    if not values:
        return None
    value, count = Counter(values.values()).most_common(1)[0]
    return value if 2 * count > len(values) else None


def named(evidence: AcceptanceEvidence, ranks: list[int], most: int = 8) -> str:
    """Names of nodes for a sentence."""
    names = [evidence.name_of(rank) for rank in ranks[:most]]
    return ", ".join(names) + (f" and {len(ranks) - most} more" if len(ranks) > most else "")


def difference(
    check: Check, evidence: AcceptanceEvidence, name: str, values: Mapping[int, str], *, fails: bool
) -> CheckResult | None:
    """The result where nodes have different values of what must be equal; None where it is. Nodes
    unlike most are blamed where a difference `fails`; otherwise it warns."""
    if len(set(values.values())) == 1:
        return None
    common = majority(values)
    odd = tuple(rank for rank, value in values.items() if value != common)
    shown = "; ".join(f"{evidence.name_of(rank)} {values[rank][:80]}" for rank in odd[:8])
    others = f"; the others {common[:80]}" if common is not None else ""
    return check.result(
        odd, Status.fail if fails else Status.warn, f"{name} differs: {shown}{others}",
        metric=name,
        observed=values[odd[0]],
        expected=common or "",
        culprits=odd if fails and common is not None else (),
    )  # fmt: skip
