"""Devices that compute wrong numbers without an error: products whose every element is known, and
gradients of the same weights and tokens, which must be the same bits on devices of one kind."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from drillyard.acceptance.check import Check, Expected, Level
from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.node_results import node_result
from drillyard.acceptance.rank_values import RankValues, mapping, ranks_of, without_ranks
from drillyard.acceptance.results import CheckResult, Status


def judge(evidence: AcceptanceEvidence, expected: Expected) -> Iterator[CheckResult]:
    """Products, gradients and results of collectives."""
    found = [ranks_of(evidence, seen) for seen in evidence.of("devices")]
    yield from without_ranks(evidence, CHECK, "product", found, "the product")
    ranks = [each for one in found for each in one.ranks]
    if ranks:
        yield from _judge_products(evidence, ranks)
    for seen in evidence.of("training"):
        if ranks := list(ranks_of(evidence, seen).ranks):
            yield from _judge_gradients(evidence, ranks)
    yield from _judge_collectives(evidence)


def _judge_products(
    evidence: AcceptanceEvidence, ranks: Sequence[RankValues]
) -> Iterator[CheckResult]:
    by_shape: dict[str, list[tuple[RankValues, tuple[str, ...]]]] = defaultdict(list)
    failed = False
    for each in ranks:
        product = mapping(each.values.get("product"))
        rounds = product.get("rounds")
        digests, wrong = _rounds(rounds)
        if not digests:
            failed = True
            yield _result(evidence, "product", Status.incomplete, each, "printed no product")
        elif wrong:
            failed = True
            why = f"{wrong} elements of a known product are wrong"
            yield _result(evidence, "product", Status.fail, each, why)
        else:
            shape = "/".join(str(product.get(key)) for key in ("rows", "inner", "seed", "type"))
            by_shape[shape].append((each, digests))
    for found in by_shape.values():
        for result in _odd_ones(evidence, "product", found, "the product"):
            failed = True
            yield result
    if not failed:
        yield _passed("product", ranks, "all devices give the same product, which is right")


def _rounds(rounds: object) -> tuple[tuple[str, ...], int]:
    """The digests of a product's rounds, and its wrong elements; none where one is malformed."""
    digests, wrong = [], 0
    for each in rounds if isinstance(rounds, list) else []:
        digest, count = mapping(each).get("digest"), mapping(each).get("wrong")
        if not isinstance(digest, str) or type(count) is not int or count < 0:
            return (), 0
        digests.append(digest)
        wrong += count
    return tuple(digests), wrong


def _odd_ones(
    evidence: AcceptanceEvidence,
    metric: str,
    found: Sequence[tuple[RankValues, tuple[str, ...]]],
    what: str,
    *,
    follows: bool = False,
) -> Iterator[CheckResult]:
    """Who has other bits than most, in any place. Where each place `follows` from those before it,
    the first in which they differ tells. Without a majority no device is named; a device with
    another number of values than most is not judged."""
    number = Counter(len(digests) for _, digests in found).most_common(1)[0][0]
    for each, digests in found:
        if len(digests) != number:
            why = f"printed {len(digests)} values of {what}, most devices {number}"
            yield _result(evidence, metric, Status.incomplete, each, why)
    found = [one for one in found if len(one[1]) == number]
    odd: dict[RankValues, int] = {}
    for place in range(number):
        counted = Counter(digests[place] for _, digests in found)
        common, votes = counted.most_common(1)[0]
        if votes * 2 <= len(found) and len(counted) > 1:
            yield CHECK.result(
                tuple(sorted({each.node for each, _ in found})),
                Status.fail,
                f"{what} has different bits on the devices, and none has a majority",
                metric=metric,
                observed=f"{len(counted)} values of {len(found)} devices",
                action="run it again on more nodes, or on each of these with another one",
            )
            return
        for each, digests in found:
            if digests[place] != common:
                odd.setdefault(each, votes)
        if odd and follows:
            break
    for each, votes in odd.items():
        why = f"{what} has other bits than on {votes} of {len(found)} devices"
        yield _result(evidence, metric, Status.fail, each, why)


def _judge_gradients(
    evidence: AcceptanceEvidence, ranks: Sequence[RankValues]
) -> Iterator[CheckResult]:
    """Within each kind of device, where most ranks find the same bits twice."""
    kinds: dict[str, list[tuple[RankValues, tuple[str, ...]]]] = defaultdict(list)
    for each in ranks:
        sums = mapping(each.values.get("gradients")).get("sums")
        if isinstance(sums, list) and sums and all(isinstance(one, str) for one in sums):
            kinds[each.kind].append((each, tuple(sums)))
        else:
            yield _result(evidence, "gradients", Status.incomplete, each, "printed no gradients")
            return
    failed = False
    for found in kinds.values():
        # The first two steps have the same weights.
        steady = [sums for _, sums in found if len(set(sums[:2])) == 1]
        if len(steady) * 2 <= len(found):
            failed = True
            yield CHECK.result(
                tuple(sorted({each.node for each, _ in found})),
                Status.recorded,
                "most devices do not find the same gradients twice: not judged",
                metric="gradients",
            )
            continue
        for result in _odd_ones(evidence, "gradients", found, "a gradient", follows=True):
            failed = True
            yield result
    if not failed:
        yield _passed("gradients", ranks, "devices of one kind find the same gradients")


def _judge_collectives(evidence: AcceptanceEvidence) -> Iterator[CheckResult]:
    """Wrong elements of collectives' results: one rank that sees them is at fault; where several
    do, any of them or of their links may be."""
    for seen in evidence.of("collective"):
        wrong = {}
        for each in ranks_of(evidence, seen).ranks:
            rows = each.values.get("rows")
            counts = [mapping(row).get("wrong") for row in rows] if isinstance(rows, list) else []
            total = sum(count for count in counts if type(count) is int)
            if total:
                wrong[each] = total
        name = str(seen.arguments.get("collective"))
        if len(wrong) == 1:
            ((each, count),) = wrong.items()
            why = f"{count} elements of {name} are wrong on this rank only"
            yield _result(evidence, f"results of {name}", Status.fail, each, why)
        elif wrong:
            where = ", ".join(f"{_place(evidence, each)}: {count}" for each, count in wrong.items())
            reason = f"{name} gave wrong elements ({where})"
            yield CHECK.result(seen.nodes, Status.fail, reason, metric=f"results of {name}")


def _place(evidence: AcceptanceEvidence, each: RankValues) -> str:
    return f"{evidence.name_of(each.node)} device {each.local_rank}"


def _result(
    evidence: AcceptanceEvidence, metric: str, status: Status, each: RankValues, why: str
) -> CheckResult:
    reason = f"{_place(evidence, each)}: {why}"
    return node_result(CHECK, each.node, status, reason, metric=metric, device=each.local_rank)


def _passed(metric: str, ranks: Sequence[RankValues], why: str) -> CheckResult:
    nodes = tuple(sorted({each.node for each in ranks}))
    observed = f"{len(ranks)} devices"
    return CHECK.result(nodes, Status.passed, why, metric=metric, observed=observed)


CHECK = Check(
    name="bit-equality",
    title="Equal bits",
    level=Level.quick,
    probes=("devices", "training", "collective"),
    seconds=5,
    measures="whether all devices compute the same, and right, numbers",
    how="products of seeded whole numbers, compared element by element with the host's and by"
    " digest with all other devices'; gradients of the same weights and tokens, by the sum over"
    " their bits; results of collectives, element by element",
    evidence="digests and counts from every device",
    references="the exact product; for gradients the majority of devices of one kind",
    meaning="the device computes wrong numbers without an error (silent data corruption)",
    action="take the node out; run the vendor's diagnosis on the device and have it replaced",
    judge=judge,
)
