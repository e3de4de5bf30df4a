"""Clocks of the nodes: how far apart, and whether one went back during the job.

Logs, leases, file times and certificates of different nodes are compared with each other; timers of
libraries that read the wall clock fire at once, or never, when it steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from drillyard.acceptance.check import Check, Expected, Level
from drillyard.acceptance.checks.mesh_evidence import (
    entries,
    listed,
    member,
    network_steps,
    not_between_nodes,
    number,
    unanswered,
)
from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.node_results import node_result
from drillyard.acceptance.results import CheckResult, Status, Threshold

FAIL_SECONDS = 1.0
WARN_SECONDS = 0.128
_FAIL = Threshold(
    FAIL_SECONDS, "s", False, "logs and file times of different nodes are compared in seconds"
)
_WARN = Threshold(
    WARN_SECONDS, "s", False, "RFC 5905, appendix A.1.1: STEPT, above which NTP steps a clock"
)
_STEPS_BACK: Any = {"metric": "steps back", "unit": "s", "expected": "no step back"}
_MOVED_SECONDS = 0.05
"""Between two looks in one job: 100 ppm, a bad crystal, take 8 minutes for it."""


@dataclass(frozen=True)
class Offset:
    """Seconds ahead of another clock, and how wrong that may be."""

    seconds: float
    uncertain: float


def offsets_of(values: Mapping[int, dict[str, Any]]) -> dict[int, Offset]:
    """Each node's clock against that of the lowest rank, over the round trips that took least. A
    node that no chain of answers connects to it is missing."""
    edges: dict[int, dict[int, Offset]] = {}
    for rank, found in values.items():
        for peer in entries(found, "peers"):
            other = member(peer, "node")
            offset = number(member(peer, "clock", "offset"))
            trip = number(member(peer, "clock", "round_trip"))
            if not isinstance(other, int) or offset is None or trip is None:
                continue
            for a, b, seconds in ((rank, other, offset), (other, rank, -offset)):
                before = edges.setdefault(a, {}).get(b)
                if before is None or trip / 2 < before.uncertain:
                    edges[a][b] = Offset(seconds, trip / 2)
    if not edges:
        return {}
    first = min(edges)
    known, reached = {first: Offset(0.0, 0.0)}, [first]
    for rank in reached:
        for other, step in sorted(edges[rank].items()):
            if other not in known:
                total = known[rank].seconds + step.seconds
                known[other] = Offset(total, known[rank].uncertain + step.uncertain)
                reached.append(other)
    return known


def judge(evidence: AcceptanceEvidence, expected: Expected) -> Iterator[CheckResult]:
    """Steps back of each node, then the offsets of those that differ, then of all."""
    yield from _steps(evidence)
    if (nothing := not_between_nodes(evidence, CHECK, "network")) is not None:
        yield nothing
        return
    yield from unanswered(evidence, CHECK, "network")
    steps = network_steps(evidence)
    offsets = offsets_of(steps[0])
    asked = [rank for rank, values in steps[0].items() if values]
    for rank in asked:
        if rank not in offsets:
            name = evidence.name_of(rank)
            why = f"{name}: no answer over UDP between it and the others"
            action = "open the network between the nodes for UDP"
            yield CHECK.result((rank,), Status.incomplete, why, action=action)
    if len(offsets) >= 2:
        yield from _offsets(evidence, offsets, steps[0])
        yield from _moved(evidence, offsets, offsets_of(steps[-1]) if len(steps) > 1 else {})


def _offsets(
    evidence: AcceptanceEvidence, offsets: dict[int, Offset], values: Mapping[int, dict[str, Any]]
) -> Iterator[CheckResult]:
    center = median(sorted(each.seconds for each in offsets.values()))
    apart = {rank: each.seconds - center for rank, each in offsets.items()}
    if len(offsets) == 2:
        a, b = sorted(offsets)
        apart = {b: offsets[b].seconds - offsets[a].seconds}
    odd = {
        rank: seconds
        for rank, seconds in apart.items()
        if abs(seconds) - offsets[rank].uncertain > WARN_SECONDS
    }
    wrong = _wrong(offsets, values) if odd else {}
    unsure = [rank for rank, each in apart.items() if abs(each) > WARN_SECONDS and rank not in odd]
    for rank, why in wrong.items():
        if rank in unsure:
            continue
        # Of two nodes, one figure stands for both.
        seconds = odd.pop(rank) if rank in odd else -odd.popitem()[1]
        yield _offset(evidence, (rank,), seconds, offsets[rank].uncertain, why, (rank,))
    for rank, seconds in sorted(odd.items(), key=lambda item: -abs(item[1])):
        nodes = tuple(sorted(offsets)) if len(offsets) == 2 else (rank,)
        why = "with two clocks it is not known which is wrong"
        yield _offset(evidence, nodes, seconds, offsets[rank].uncertain, why, ())
    for rank in unsure:
        reason = (
            f"the clock of {evidence.name_of(rank)} was read within"
            f" {offsets[rank].uncertain:.3f} s only, as its answers took long"
        )
        yield CHECK.result((rank,), Status.incomplete, reason)
    rest = [rank for rank in offsets if rank not in {*odd, *wrong, *unsure}]
    if len(rest) > 1:
        found = [offsets[rank].seconds for rank in rest]
        spread = max(found) - min(found)
        yield CHECK.result(
            tuple(rest), Status.passed,
            f"the clocks of {len(rest)} nodes differ by {spread:.4f} s at most",
            observed=spread, unit="s", threshold=_WARN,
        )  # fmt: skip


def _offset(
    evidence: AcceptanceEvidence,
    nodes: tuple[int, ...],
    seconds: float,
    uncertain: float,
    why: str,
    culprits: tuple[int, ...],
) -> CheckResult:
    failed = abs(seconds) - uncertain > FAIL_SECONDS
    size, way = abs(seconds), "ahead of" if seconds > 0 else "behind"
    if len(nodes) == 1:
        what = f"the clock of {evidence.name_of(nodes[0])} is {size:.3f} s {way} the others'"
    else:
        a, b = map(evidence.name_of, nodes)
        what = f"the clock of {b} is {size:.3f} s {way} that of {a}"
    return CHECK.result(
        nodes, Status.fail if failed else Status.warn, f"{what}; {why}",
        observed=seconds,
        interval=(seconds - uncertain, seconds + uncertain),
        unit="s",
        threshold=_FAIL if failed else _WARN,
        culprits=culprits if failed else (),
    )  # fmt: skip


def _wrong(offsets: dict[int, Offset], values: Mapping[int, dict[str, Any]]) -> dict[int, str]:
    """Nodes whose clock is proven wrong, and by what: they differ from more than half of all; or
    from the clock of the storage, or as the kernel itself says, while the others do not."""
    center = median(sorted(each.seconds for each in offsets.values()))
    close = {rank for rank, each in offsets.items() if abs(each.seconds - center) < WARN_SECONDS}
    if len(offsets) > 2 and 2 * len(close) > len(offsets):
        return {rank: f"{len(close)} clocks agree" for rank in offsets.keys() - close}
    storage = {
        rank: (offset, number(member(values.get(rank), "clock", "storage", "uncertain")) or 0.0)
        for rank in offsets
        if (offset := number(member(values.get(rank), "clock", "storage", "offset"))) is not None
    }
    if len(storage) == len(offsets):
        right = {
            rank for rank, (offset, most) in storage.items() if abs(offset) < WARN_SECONDS + most
        }
        wrong = storage.keys() - right
        # The storage has a clock of its own only where its differences are those of the nodes.
        if right and wrong and _agree(offsets, storage):
            return dict.fromkeys(sorted(wrong), "the clock of the storage agrees with the other")
    kept = {rank: member(values.get(rank), "clock", "synchronized") for rank in offsets}
    wrong = {rank for rank, each in kept.items() if each is False}
    if wrong and all(isinstance(each, bool) for each in kept.values()) and len(wrong) < len(kept):
        return dict.fromkeys(sorted(wrong), "its kernel reports it as not synchronized")
    return {}


def _agree(offsets: dict[int, Offset], storage: dict[int, tuple[float, float]]) -> bool:
    first = min(offsets)
    return all(
        abs((offsets[rank].seconds - offsets[first].seconds) + (offset - storage[first][0]))
        < most + storage[first][1] + offsets[rank].uncertain + offsets[first].uncertain + 0.05
        for rank, (offset, most) in storage.items()
    )


def _steps(evidence: AcceptanceEvidence) -> Iterator[CheckResult]:
    """Every node's own watch, of the last step that has it."""
    watched: dict[int, Any] = {}
    for probe in ("network", "clock"):
        for seen in evidence.of(probe):
            found = member(seen.values, "clock", "watched")
            if len(seen.nodes) == 1 and isinstance(found, dict):
                watched[seen.nodes[0]] = found
    steady = []
    for rank, found in watched.items():
        steps = [
            seconds
            for each in entries(found, "steps")
            if (seconds := number(member(each, "seconds"))) is not None
        ]
        back = [each for each in steps if each < 0]
        if not back:
            steady.append(rank)
            continue
        name = evidence.name_of(rank)
        yield node_result(
            CHECK, rank, Status.fail,
            f"the clock of {name} stepped back by {-min(back):.3f} s during the job",
            observed=min(back), **_STEPS_BACK,
        )  # fmt: skip
    if steady:
        longest = min(number(watched[rank].get("seconds")) or 0.0 for rank in steady)
        reason = f"no clock of {len(steady)} nodes stepped back in {longest:.0f} s"
        yield CHECK.result(tuple(steady), Status.passed, reason, observed=0.0, **_STEPS_BACK)


def _moved(
    evidence: AcceptanceEvidence, before: dict[int, Offset], after: dict[int, Offset]
) -> Iterator[CheckResult]:
    """Clocks that moved against the others between the first and the last step."""
    both = sorted(before.keys() & after.keys())
    if len(both) < 2:
        return
    moves = {
        rank: (after[rank].seconds - after[both[0]].seconds)
        - (before[rank].seconds - before[both[0]].seconds)
        for rank in both
    }
    center = median(sorted(moves.values()))
    for rank, move in moves.items():
        unsure = 2 * (before[rank].uncertain + after[rank].uncertain) + _MOVED_SECONDS
        still = [other for other in both if abs(moves[other] - center) <= _MOVED_SECONDS]
        if abs(move - center) > unsure and 2 * len(still) > len(both):
            reason = (
                f"the clock of {evidence.name_of(rank)} moved by {move - center:+.3f} s"
                f" against those of {listed(evidence, still)} during the job"
            )
            yield node_result(
                CHECK, rank, Status.fail, reason,
                metric="moved", observed=move - center, unit="s",
                expected=f"at most {_MOVED_SECONDS} s",
            )  # fmt: skip


CHECK = Check(
    name="clock",
    title="Clocks",
    level=Level.quick,
    probes=("network",),
    seconds=5,
    measures="how far the nodes' clocks are apart, and steps back during the job",
    how="each pair exchanges times over UDP, as NTP does: of several round trips the shortest"
    " counts; each node compares its wall clock with its monotonic one ten times a second",
    evidence="an offset for every node, and its own watch from start to end",
    references="fail: more than 1 s, or any step back; warn: more than 0.128 s (RFC 5905)",
    meaning="a clock is wrong or is being corrected by steps: it is not synchronized, or its time"
    " server disagrees with the others'",
    action="look at `chronyc tracking` (or `timedatectl`) of this node; let chrony slew, not step,"
    " after its start",
    judge=judge,
    metric="offset",
)
