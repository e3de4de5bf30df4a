"""Rates of single devices: matmul, memory, copies from and to the host, copies between devices of a
node.

Two judgements of each figure. Against the row of the accelerator (else this cluster's baseline):
limits are far below what healthy devices reach, for a few shapes are measured where the row has the
best of many. Against the other devices of its kind: 5 % apart is normal within a node
(ml-engineering), so a device is named below 90 % and at more than 3.5 robust standard deviations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from drillyard.acceptance.check import Check, Expected, Level
from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.node_results import node_result
from drillyard.acceptance.rank_values import (
    RankValues,
    mapping,
    numbers,
    ranks_of,
    robust_deviations,
    without_ranks,
)
from drillyard.acceptance.results import CheckResult, Status, Threshold
from drillyard.hardware.accelerators import Accelerator
from drillyard.hardware.facts import Fact

OF_OTHERS = {True: 0.9, False: 0.5}
"""Least share of what other devices of the kind reach: of an accelerator, of a CPU, which shares
its caches and memory with whatever runs on the host."""
OF_BASELINE = {True: 7 / 8, False: 0.5}
DEVIATIONS = 3.5
"""Of a modified z-score (Iglewicz and Hoaglin 1993, How to detect and handle outliers)."""
LEAST_SPREAD = 0.015
"""Share of the median that the spread of devices counts as at least."""
FEWEST_OF_A_NODE = 4
"""Devices with which a node is compared by itself; with fewer, all nodes together are."""


@dataclass(frozen=True)
class Rate:
    """One figure of every device. `read` gives it by repeat; `row` the published one, of which a
    healthy device reaches `of_row`."""

    metric: str
    unit: str
    read: Callable[[RankValues], tuple[float, ...]]
    row: Callable[[Accelerator], Fact[float] | None]
    of_row: float


def _matmul(kind: str) -> Callable[[RankValues], tuple[float, ...]]:
    """The repeats of the shape that is fastest."""

    def read(rank: RankValues) -> tuple[float, ...]:
        rows = rank.values.get("matmul")
        found = [
            numbers(mapping(row).get("tflops"))
            for row in (rows if isinstance(rows, list) else [])
            if mapping(row).get("type") == kind
        ]
        return max((each for each in found if each), key=median, default=())

    return read


def _of(part: str) -> Callable[[RankValues], tuple[float, ...]]:
    return lambda rank: numbers(mapping(rank.values.get(part)).get("gb_per_s"))


def _achievable(kind: str) -> Callable[[Accelerator], Fact[float] | None]:
    def row(accelerator: Accelerator) -> Fact[float] | None:
        found = accelerator.achievable(kind)
        return None if found is None else found * 1e-12

    return row


def _memory(accelerator: Accelerator) -> Fact[float] | None:
    known = accelerator.memory_bandwidth_gb_per_s is not None
    return accelerator.fact("memory_bandwidth_gb_per_s") if known else None


def _host(accelerator: Accelerator) -> Fact[float] | None:
    known = accelerator.host_device_gb_per_s is not None
    return accelerator.fact("host_device_gb_per_s") if known else None


OF_ACHIEVABLE = 0.75
"""Of the best published matmul rate, which is that of the best of many shapes."""
OF_MEMORY = 0.55
"""Of the vendor's memory bandwidth: copies were measured at 73 to 78 % of it (ml-engineering:
A100, H100, GB200), at 61 % on H200 (DCGM's diag-skus.yaml, whose limits are 75 % of measured)."""
OF_HOST = 7 / 8
OF_PEERS = 0.7
"""Of the link's one-way rate: measured 83 to 91 % (ml-engineering: H100, GB200, A100)."""


def judge_rate(
    evidence: AcceptanceEvidence, expected: Expected, check: Check, rate: Rate
) -> Iterator[CheckResult]:
    """One figure of all devices: a result for every node, one more for every slow device."""
    found = [ranks_of(evidence, seen) for seen in evidence.of("devices")]
    yield from without_ranks(evidence, check, rate.metric, found, rate.metric)
    ranks = [each for one in found for each in one.ranks]
    measured = {each: rate.read(each) for each in ranks}
    if ranks and not any(measured.values()):
        yield _unmeasured(check, rate, ranks)
        return
    before = _baseline(expected.baseline, rate)
    by_node: dict[int, list[RankValues]] = defaultdict(list)
    for each in ranks:
        by_node[each.node].append(each)
    for node, own in by_node.items():
        name, passed = evidence.name_of(node), []
        for each in own:
            figures = measured[each]
            if not figures:
                why = f"{name} device {each.local_rank}: was not measured"
                yield _result(check, rate, each, figures, Status.incomplete, why)
                continue
            limit = _limit(expected, rate, each, before)
            if isinstance(limit, str):
                why = f"{name} device {each.local_rank}: {limit}"
                yield _result(check, rate, each, figures, Status.incomplete, why)
                continue
            low = _low(each, figures, limit, _others(measured, each))
            if low is None:
                passed.append((each, figures, limit))
            else:
                why = f"{name} device {each.local_rank}: {median(figures):.4g} {rate.unit}, {low}"
                yield _result(check, rate, each, figures, Status.fail, why, limit)
        if passed:
            each, figures, limit = min(passed, key=lambda one: median(one[1]))
            status = Status.passed if limit is not None else Status.recorded
            which = f"the slowest of {len(passed)} devices" if len(passed) > 1 else "its device"
            why = f"{name}: {which} reaches {median(figures):.4g}"
            yield _result(check, rate, each, figures, status, f"{why} {rate.unit}", limit)


def _unmeasured(check: Check, rate: Rate, ranks: Sequence[RankValues]) -> CheckResult:
    on_gpu = any(each.on_gpu for each in ranks)
    reasons = [
        str(mapping(row).get("unsupported"))
        for each in ranks
        for row in _rows(each.values.get("matmul"))
        if mapping(row).get("unsupported") and str(mapping(row).get("type")) in rate.metric
    ]
    status, reason = Status.incomplete, f"{rate.metric} was not measured"
    if reasons:
        status, reason = Status.skipped, f"{rate.metric}: {reasons[0]}"
    elif not on_gpu:
        status, reason = Status.skipped, f"{rate.metric}: the ranks run on CPUs"
    nodes = tuple(sorted({each.node for each in ranks}))
    return check.result(nodes, status, reason, metric=rate.metric)


def _limit(
    expected: Expected, rate: Rate, rank: RankValues, before: Mapping[str, float]
) -> Threshold | str | None:
    """What the device must reach; None where nothing says so, and why not where the row is not the
    device's."""
    accelerator, name = expected.accelerator, str(rank.values.get("device_name"))
    if accelerator is not None and accelerator.peak_tflops:
        if not rank.on_gpu:
            return f"PyTorch finds no accelerator; the machine has {accelerator.title}"
        if not accelerator.is_called(name):
            return f"is called {name}, not {accelerator.title}"
        if (row := rate.row(accelerator)) is not None:
            source = f"{rate.of_row:.3g} of {accelerator.name}: {row.source}"
            value = rate.of_row * row.value
            return Threshold(value, rate.unit, True, source, reference=row.value)
    if (known := before.get(rank.kind)) is not None:
        share = OF_BASELINE[rank.on_gpu]
        return Threshold(share * known, rate.unit, True, f"{share:.3g} of the baseline", known)
    return None


def _low(
    rank: RankValues, figures: Sequence[float], limit: Threshold | None, others: Sequence[float]
) -> str | None:
    """Why the device is too slow; None where it is not. The best repeat decides."""
    best = max(figures)
    if limit is not None and best < limit.value:
        return f"below {limit.value:.4g} {limit.unit} ({limit.source})"
    if not others:
        return None
    usual, share = median(others), OF_OTHERS[rank.on_gpu]
    below = robust_deviations(best, others, LEAST_SPREAD) < -DEVIATIONS
    if best < share * usual and below:
        return f"{best / usual:.0%} of the {usual:.4g} that {len(others)} others of its kind reach"
    return None


def _others(measured: Mapping[RankValues, Sequence[float]], rank: RankValues) -> list[float]:
    """The medians of the other devices of the kind, of its own node where there are enough."""
    alike = [each for each, figures in measured.items() if figures and each.kind == rank.kind]
    own = [each for each in alike if each.node == rank.node]
    chosen = own if len(own) >= FEWEST_OF_A_NODE else alike
    return [median(measured[each]) for each in chosen if each is not rank]


def _baseline(baseline: AcceptanceEvidence | None, rate: Rate) -> dict[str, float]:
    """The median over devices of each kind in the baseline."""
    found: dict[str, list[float]] = defaultdict(list)
    for seen in [] if baseline is None else baseline.of("devices"):
        assert baseline is not None
        for each in ranks_of(baseline, seen).ranks:
            if figures := rate.read(each):
                found[each.kind].append(median(figures))
    return {kind: median(values) for kind, values in found.items()}


def _result(
    check: Check,
    rate: Rate,
    rank: RankValues,
    figures: Sequence[float],
    status: Status,
    reason: str,
    threshold: Threshold | None = None,
) -> CheckResult:
    return node_result(
        check, rank.node, status, reason,
        metric=rate.metric,
        observed=median(figures) if figures else None,
        interval=(min(figures), max(figures)) if figures else None,
        unit=rate.unit,
        threshold=threshold,
        device=rank.local_rank,
    )  # fmt: skip


def _judge_matmul(evidence: AcceptanceEvidence, expected: Expected) -> Iterator[CheckResult]:
    kinds = {
        str(mapping(row).get("type"))
        for seen in evidence.of("devices")
        for row in _rows(seen.arguments.get("matmul"))
    }
    for kind in sorted(kinds) or ["bf16"]:
        rate = Rate(f"matmul {kind}", "TFLOP/s", _matmul(kind), _achievable(kind), OF_ACHIEVABLE)
        yield from judge_rate(evidence, expected, MATMUL, rate)


def _rows(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _judge_memory(evidence: AcceptanceEvidence, expected: Expected) -> Iterator[CheckResult]:
    rate = Rate("memory copy, read and written", "GB/s", _of("memory"), _memory, OF_MEMORY)
    yield from judge_rate(evidence, expected, MEMORY, rate)


def _judge_host(evidence: AcceptanceEvidence, expected: Expected) -> Iterator[CheckResult]:
    for part, metric in (
        ("host_to_device", "host to device"),
        ("device_to_host", "device to host"),
    ):
        rate = Rate(metric, "GB/s", _of(part), _host, OF_HOST)
        yield from judge_rate(evidence, expected, HOST_DEVICE, rate)


MATMUL = Check(
    name="matmul",
    title="Matmul rate",
    level=Level.quick,
    probes=("devices",),
    seconds=5,
    measures="the rate of matrix products on each device, all devices at once",
    how="torch.mm, several shapes, the fastest counts; fp8 where the device has it",
    evidence="a rate from every device",
    references="0.75 of the accelerator's best published rate, or 7/8 of the baseline (half on a"
    " CPU); 0.9 of the other devices of its kind",
    meaning="the device is throttled by heat or power, or its clocks are limited",
    action="look at its clocks, temperature and power limit; compare after a restart of the node",
    judge=_judge_matmul,
)
MEMORY = Check(
    name="memory-bandwidth",
    title="Memory bandwidth",
    level=Level.quick,
    probes=("devices",),
    seconds=2,
    measures="bytes read and written by a copy within each device's memory",
    how="torch copy_ of one buffer to another",
    evidence="a rate from every device",
    references="0.55 of the vendor's bandwidth, or 7/8 of the baseline (half on a CPU); 0.9 of the"
    " other devices of its kind",
    meaning="the memory runs at a lower clock, or corrects many errors",
    action="look at its memory clock and ECC counters; have the device diagnosed",
    judge=_judge_memory,
)
HOST_DEVICE = Check(
    name="host-device",
    title="Copies from and to the host",
    level=Level.quick,
    probes=("devices",),
    seconds=5,
    measures="copies between pinned host memory and each device, one device at a time",
    how="torch copy_ with a pinned buffer, both ways",
    evidence="both rates from every device",
    references="7/8 of the published rate, or of the baseline; 0.9 of other devices of its kind",
    meaning="the PCIe link has fewer lanes or an older generation than it should",
    action="look at the link's width and generation in nvidia-smi -q; reseat or replace the device",
    judge=_judge_host,
)
