"""Ranks that make all others wait, and how evenly steps go.

In data-parallel steps all ranks take the same time, since each waits for the slowest. What differs
is the local time until a rank's own backward pass has ended: the straggler has the longest, and
waits least. It is compared with the faster half of all ranks, over all blocks of steps of the
training probe; without the one block that was worst for it, so that one slow block blames no rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median

from drillyard.acceptance.check import Check, Expected, Level
from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.node_results import node_result
from drillyard.acceptance.rank_values import RankValues, ranks_of, without_ranks
from drillyard.acceptance.results import CheckResult, Status, Threshold
from drillyard.acceptance.training_phases import Phase, phases_of

LIMITS = {"accelerator": 1.1, "processor": 1.3, "shared processor": 2.0}
"""Longest local time over that of the faster half: 5 % apart is normal within a node
(ml-engineering); hosts that were 10 % slow cost MegaScale (arXiv 2402.15627) 0.7 % of MFU. A CPU
shares its caches with other processes; where the wait for a core is not left out, the core, too."""
_UNIT = "times the faster ranks"
SLOW_STEP = 1.5
"""A step over so many medians counts as slow (nccl-tests' analysis of repeats takes the same)."""


def judge(evidence: AcceptanceEvidence, expected: Expected) -> Iterator[CheckResult]:
    """One result for every straggler, or one for all ranks."""
    found = [ranks_of(evidence, seen) for seen in evidence.of("training")]
    yield from without_ranks(evidence, CHECK, CHECK.metric, found, "training")
    for one in found:
        ranks = {each: phases_of(each) for each in one.ranks}
        if not one.skipped and len(ranks) == 1:
            nodes = one.observation.nodes
            yield CHECK.result(nodes, Status.skipped, "there is one rank")
        elif ranks:
            yield from _judge_ranks(evidence, ranks)


def _judge_ranks(
    evidence: AcceptanceEvidence, ranks: Mapping[RankValues, Sequence[Phase]]
) -> Iterator[CheckResult]:
    nodes = tuple(sorted({each.node for each in ranks}))
    blocks = {each: _local_blocks(phases) for each, phases in ranks.items()}
    if len({len(each) for each in blocks.values()}) != 1 or not next(iter(blocks.values())):
        yield CHECK.result(nodes, Status.incomplete, "the ranks' blocks of steps do not agree")
        return
    relative = _relative(blocks)
    limit, named = _limit_of(ranks), False
    waits = {each: _wait_share(phases) for each, phases in ranks.items()}
    for each in sorted(relative, key=lambda one: -_without_worst(relative[one])):
        ratio, low = fmean(relative[each]), _without_worst(relative[each])
        if low <= limit.value:
            continue
        named = True
        reason = (
            f"{evidence.name_of(each.node)} rank {each.local_rank} takes {ratio:.2f} times the"
            f" local time of the faster ranks ({low:.2f} without its worst block), and waits"
            f" {waits[each]:.0%} of its steps"
        )
        yield node_result(
            CHECK,
            each.node,
            Status.fail,
            reason,
            metric=CHECK.metric,
            observed=ratio,
            interval=(low, ratio),
            unit=_UNIT,
            threshold=limit,
            device=each.local_rank,
            evidence=tuple(
                f"{evidence.name_of(one.node)} rank {one.local_rank}: local time"
                f" {fmean(relative[one]):.2f}, waits {waits[one]:.0%}"
                for one in sorted(relative, key=lambda one: one.rank)[:64]
            ),
        )
    if not named:
        slowest = max(relative, key=lambda one: _without_worst(relative[one]))
        low, ratio = _without_worst(relative[slowest]), fmean(relative[slowest])
        reason = (
            f"the slowest of {len(relative)} ranks, {evidence.name_of(slowest.node)} rank"
            f" {slowest.local_rank}, takes {low:.2f} times the local time of the faster ones"
        )
        yield CHECK.result(
            nodes, Status.passed, reason,
            observed=low, interval=(low, ratio), unit=_UNIT, threshold=limit,
        )  # fmt: skip


def _local_blocks(phases: Sequence[Phase]) -> list[float]:
    """Seconds of local time per micro-batch, by block of every phase."""
    return [fmean(local) / phase.accumulated for phase in phases for _, local in phase.blocks]


def _relative(blocks: Mapping[RankValues, Sequence[float]]) -> dict[RankValues, list[float]]:
    """Each rank's blocks over the median of the faster half of all ranks."""
    totals = {each: fmean(values) for each, values in blocks.items()}
    faster = sorted(totals, key=lambda each: totals[each])[: (len(totals) + 1) // 2]
    number = len(next(iter(blocks.values())))
    usual = [median(blocks[each][at] for each in faster) for at in range(number)]
    return {
        each: [value / of for value, of in zip(values, usual, strict=True)]
        for each, values in blocks.items()
    }


def _without_worst(values: Sequence[float]) -> float:
    return fmean(sorted(values)[: max(1, len(values) - 1)])


def _wait_share(phases: Sequence[Phase]) -> float:
    """The share of its steps with others in which a rank does not work itself."""
    together = [phase for phase in phases if phase.ranks > 1]
    step = sum(sum(steps) for phase in together for steps, _ in phase.blocks)
    local = sum(sum(part) for phase in together for _, part in phase.blocks)
    return max(0.0, 1 - local / step) if step else 0.0


def _limit_of(ranks: Mapping[RankValues, object]) -> Threshold:
    kind = "accelerator"
    if not all(each.on_gpu for each in ranks):
        clean = all(each.values.get("waiting_left_out") is True for each in ranks)
        kind = "processor" if clean else "shared processor"
    source = f"ranks on one kind of {kind} are closer"
    return Threshold(LIMITS[kind], _UNIT, False, source, reference=1.0)


def _judge_jitter(evidence: AcceptanceEvidence, expected: Expected) -> Iterator[CheckResult]:
    """The spread of the steps that all ranks take together, as the first rank saw them."""
    found = [ranks_of(evidence, seen) for seen in evidence.of("training")]
    yield from without_ranks(evidence, JITTER, JITTER.metric, found, "training")
    for one in found:
        if not one.ranks:
            continue
        phases = phases_of(one.ranks[0])
        widest = max(phases, key=lambda phase: phase.ranks, default=None)
        steps = sorted(each for block, _ in (widest.blocks if widest else ()) for each in block)
        if not steps:
            yield JITTER.result(one.observation.nodes, Status.incomplete, "no steps were measured")
            continue
        middle = median(steps)
        deviation = median(abs(each - middle) for each in steps)
        slow = sum(each > SLOW_STEP * middle for each in steps) / len(steps)
        p95, p99 = (steps[min(len(steps) - 1, int(share * len(steps)))] for share in (0.95, 0.99))
        reason = (
            f"{len(steps)} steps: p50 {middle * 1e3:.4g} ms, p95 {p95 * 1e3:.4g}, p99"
            f" {p99 * 1e3:.4g}, median absolute deviation {deviation * 1e3:.3g};"
            f" {slow:.0%} take over {SLOW_STEP} medians"
        )
        yield JITTER.result(
            one.observation.nodes, Status.recorded, reason,
            metric=f"steps over {SLOW_STEP} medians",
            observed=slow,
            unit="share",
            evidence=(f"{p95 / middle:.3f} p95/p50", f"{p99 / middle:.3f} p99/p50"),
        )  # fmt: skip


CHECK = Check(
    name="stragglers",
    title="Stragglers",
    level=Level.quick,
    probes=("training",),
    seconds=15,
    measures="the local time of each rank: until its own backward pass has ended",
    how="training steps of a fixed shape, in blocks; a CPU's wait for a core is left out",
    evidence="equally many blocks from every rank",
    references="the faster half of the ranks: 1.1 times on accelerators, 1.3 on CPUs",
    meaning="the rank makes all others wait: its device is throttled, or its host is slow",
    action="look at that device's clocks and at what else runs on its host",
    judge=judge,
    metric="local time",
)
JITTER = Check(
    name="jitter",
    title="Jitter",
    level=Level.quick,
    probes=("training",),
    seconds=0,
    measures="p50, p95, p99 and spread of training steps, and the share over 1.5 medians",
    how="single steps of the training probe on the most ranks",
    evidence="steps of the first rank",
    references="none: recorded",
    meaning="steps vary: other traffic on the network, or hosts that do other work",
    action="compare with a run on one node",
    judge=_judge_jitter,
    metric="step times",
)
