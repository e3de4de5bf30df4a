"""Tokens per second and MFU of the training probe, and how both change with the number of devices.

Weak scaling: each device has the same work, E = (tokens/s per device on many) / (on few). Strong
scaling: all devices together have the same work, E = T(few) few / (T(many) many), T the time of a
step. Neither is the ratio of bus bandwidths, which is another check.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from drillyard.acceptance.check import Check, Expected, Level
from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.rank_values import RankValues, mapping, ranks_of, without_ranks
from drillyard.acceptance.results import CheckResult, Status, Threshold
from drillyard.acceptance.training_phases import Phase, phases_of
from drillyard.errors import UserError
from drillyard.estimation.setup import Setup
from drillyard.estimation.step_time import FLOPS_FORMULA, StepTime, step_time
from drillyard.modelspec import flops_per_token, model_spec

OF_BASELINE = {True: 7 / 8, False: 0.5}
"""Least share of the baseline: of accelerators, of CPUs, which do other work besides."""
OF_ESTIMATE = {"class": 1.0, "neighbours": 0.75}
"""Share of the estimate's low end that decides, by what it is drawn from: of neighbours it is not
verified, and their trainers compile."""
LOSS_CHUNKS = 4
"""The estimate's least: the probe has all logits at once, which costs no time."""


class Figure(NamedTuple):
    """Tokens per second of one device by block: lowest, middle and highest."""

    lowest: float
    middle: float
    highest: float


@dataclass(frozen=True)
class Speeds:
    """Figures of one observation by phase, the phases themselves, and a rank for its facts."""

    ranks: tuple[RankValues, ...]
    phases: Mapping[str, Phase]
    figures: Mapping[str, Figure]


def speeds_of(evidence: AcceptanceEvidence) -> list[Speeds]:
    """The figures of every observation of the training probe that has all its ranks' phases."""
    found = []
    for seen in evidence.of("training"):
        one = ranks_of(evidence, seen)
        listed = [phases_of(each) for each in one.ranks]
        names = {tuple(phase.name for phase in phases) for phases in listed}
        if one.problems or len(names) != 1 or not listed[0]:
            continue
        figures = {}
        for at, phase in enumerate(listed[0]):
            values = [_tokens_per_second(phases[at]) for phases in listed]
            # The slowest rank's, where they step together; else what most devices do.
            middle = sorted(values, key=lambda value: value.middle)[len(values) // 2]
            figures[phase.name] = middle
        phases = {phase.name: phase for phase in listed[0]}
        found.append(Speeds(one.ranks, phases, figures))
    return found


def _tokens_per_second(phase: Phase) -> Figure:
    """By the local time of a device alone, which leaves out a CPU's wait for a core, and by whole
    steps where ranks wait for each other."""
    by_block = [
        phase.tokens_per_rank / (sum(step if phase.ranks > 1 else local) / len(step))
        for step, local in phase.blocks
    ]
    return Figure(min(by_block), median(by_block), max(by_block))


def _judge_speed(evidence: AcceptanceEvidence, expected: Expected) -> Iterator[CheckResult]:
    """Tokens/s per device of each phase that has the work of its own devices."""
    found = [ranks_of(evidence, seen) for seen in evidence.of("training")]
    yield from without_ranks(evidence, SPEED, "tokens/s", found, "training")
    speeds = speeds_of(evidence)
    yield from _without_speeds(evidence, SPEED, "tokens/s")
    before = speeds_of(expected.baseline) if expected.baseline is not None else []
    for one in speeds:
        nodes = tuple(sorted({each.node for each in one.ranks}))
        for name, figure in one.figures.items():
            phase = one.phases[name]
            if phase.accumulated == 1:
                yield _judge_phase(evidence, expected, one, phase, figure, before, nodes)


def _without_speeds(
    evidence: AcceptanceEvidence, check: Check, metric: str
) -> Iterator[CheckResult]:
    """Incomplete where all ranks printed an object, and not steps that can be compared."""
    found = [ranks_of(evidence, seen) for seen in evidence.of("training")]
    if any(one.ranks and not one.problems for one in found) and not speeds_of(evidence):
        nodes = tuple(each.rank for each in evidence.nodes)
        yield _result(check, metric, nodes, Status.incomplete, "the ranks' steps do not agree")


def _judge_phase(
    evidence: AcceptanceEvidence,
    expected: Expected,
    speeds: Speeds,
    phase: Phase,
    figure: Figure,
    before: Sequence[Speeds],
    nodes: tuple[int, ...],
) -> CheckResult:
    first = speeds.ranks[0]
    metric = f"tokens/s per device, {_where(evidence, phase)}"
    reason = f"{metric}: {figure.middle:,.0f}{_mfu(expected, first, figure.middle)}"
    limit = _estimated(expected, evidence, first, phase)
    # A CPU's steps wait for whatever else runs on its host.
    if limit is None and (first.on_gpu or phase.ranks == 1):
        limit = _of_baseline(speeds, phase, before)
    if limit is None:
        return _result(SPEED, metric, nodes, Status.recorded, reason, figure)
    failed = figure.highest < limit.value
    if failed:
        reason += f", below {limit.value:,.0f} ({limit.source})"
    status = Status.fail if failed else Status.passed
    return _result(SPEED, metric, nodes, status, reason, figure, limit)


def _where(evidence: AcceptanceEvidence, phase: Phase) -> str:
    if phase.ranks == 1:
        return "1 device"
    nodes = max(1, phase.ranks // evidence.processes_per_node)
    return f"{nodes} node{'s' if nodes > 1 else ''}"


def _mfu(expected: Expected, rank: RankValues, tokens_per_second: float) -> str:
    """The MFU in words; nothing where the accelerator's peak is not known."""
    accelerator, shape = expected.accelerator, mapping(rank.values.get("shape"))
    peak = None if accelerator is None or not rank.on_gpu else accelerator.peak("bf16")
    if peak is None or accelerator is None:
        return ""
    if not accelerator.is_called(str(rank.values.get("device_name"))):
        return ""
    try:
        spec = model_spec(_config(shape), built=True)
        flops = flops_per_token(spec, FLOPS_FORMULA, int(shape["sequence"]))
    except (UserError, KeyError, TypeError, ValueError):
        return ""
    share = tokens_per_second * flops / peak.value
    return f", MFU {share:.1%} ({FLOPS_FORMULA}, bf16 peak of {accelerator.name})"


def _config(shape: Mapping[str, object]) -> dict[str, object]:
    """The probe's shape as a config.json."""
    return {
        "model_type": "llama",
        "hidden_size": shape["hidden"],
        "intermediate_size": shape["intermediate"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "vocab_size": shape["vocabulary"],
        "tie_word_embeddings": False,
    }


def estimate_of(
    expected: Expected, shape: Mapping[str, int], ranks: int, per_node: int
) -> StepTime | None:
    """The estimate of a step among `ranks` devices; None where the machine is not known."""
    if expected.machine is None or expected.accelerator is None:
        return None
    setup = Setup(
        spec=model_spec(_config(shape), built=True),
        precision="bf16",
        sequence_length=shape["sequence"],
        micro_batch_size=shape["sequences"],
        gradient_accumulation=1,
        activation_checkpointing="none",
        shard=1,
        replicate=ranks,
        gpus_per_node=per_node,
        kernel="sdpa",
        compiled=False,
        loss_chunk_tokens=shape["sequences"] * shape["sequence"] // LOSS_CHUNKS,
        clips_gradients=False,
        keeps_unsharded=True,
    )
    try:
        return step_time(
            setup,
            expected.machine,
            expected.accelerator,
            bandwidths=expected.catalog.bandwidths,
        )
    except UserError:
        return None


def _estimated(
    expected: Expected, evidence: AcceptanceEvidence, rank: RankValues, phase: Phase
) -> Threshold | None:
    """The low end of the estimate; None where measured runs of the accelerator do not give one."""
    accelerator = expected.accelerator
    if accelerator is None or not accelerator.is_called(str(rank.values.get("device_name"))):
        return None
    shape = {key: value for key, value in mapping(rank.values.get("shape")).items()}
    try:
        found = estimate_of(expected, shape, phase.ranks, evidence.processes_per_node)
    except (UserError, KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    if found is None or (share := OF_ESTIMATE.get(found.basis)) is None:
        return None
    low = found.tokens_per_second_per_gpu.low.value
    whose = "of its class" if found.basis == "class" else "of neighbouring classes"
    source = f"{share:.3g} of the estimate's low end, {len(found.rows)} measured runs {whose}"
    return Threshold(share * low, "tokens/s", True, source, reference=low)


def _of_baseline(speeds: Speeds, phase: Phase, before: Sequence[Speeds]) -> Threshold | None:
    first = speeds.ranks[0]
    for one in before:
        other = one.ranks[0]
        same = other.kind == first.kind and other.values.get("shape") == first.values.get("shape")
        known = one.phases.get(phase.name)
        if same and known is not None and known.ranks == phase.ranks:
            share, value = OF_BASELINE[first.on_gpu], one.figures[phase.name].middle
            source = f"{share:.3g} of the baseline"
            return Threshold(share * value, "tokens/s", True, source, value)
    return None


# Scaling.


def scaling_of(speeds: Speeds, per_node: int) -> dict[str, float]:
    """Efficiencies of weak and strong scaling by name."""
    found, figures = {}, speeds.figures
    alone, node, every = (figures.get(name) for name in ("device", "node", "all"))
    # A node with one device has no phase of its own.
    own = node or alone
    if node is not None and alone is not None:
        found[f"weak scaling, {per_node} devices over 1"] = node.middle / alone.middle
    if every is not None and own is not None:
        nodes = speeds.phases["all"].ranks // per_node
        found[f"weak scaling, {nodes} nodes over 1"] = every.middle / own.middle
        strong = figures.get("work of all on a node")
        if strong is not None:
            # T(1) / (N T(N)) with the same tokens in both steps.
            found[f"strong scaling, {nodes} nodes over 1"] = every.middle / strong.middle
    return found


def _judge_scaling(evidence: AcceptanceEvidence, expected: Expected) -> Iterator[CheckResult]:
    """Every efficiency; without a baseline they are recorded."""
    found = [ranks_of(evidence, seen) for seen in evidence.of("training")]
    yield from without_ranks(evidence, SCALING, "training scaling", found, "training")
    yield from _without_speeds(evidence, SCALING, "training scaling")
    before: dict[str, float] = {}
    if (baseline := expected.baseline) is not None:
        for one in speeds_of(baseline):
            before.update(scaling_of(one, baseline.processes_per_node))
    for one in speeds_of(evidence):
        nodes = tuple(sorted({each.node for each in one.ranks}))
        efficiencies = scaling_of(one, evidence.processes_per_node)
        if not efficiencies:
            yield _result(SCALING, "training scaling", nodes, Status.skipped, "there is one device")
        for metric, value in efficiencies.items():
            figure = Figure(value, value, value)
            limit = None
            if one.ranks[0].on_gpu and metric in before:
                share = OF_BASELINE[True]
                source = f"{share:.3g} of the baseline"
                limit = Threshold(share * before[metric], "", True, source, before[metric])
            status = Status.recorded
            if limit is not None:
                status = Status.passed if value >= limit.value else Status.fail
            reason = f"{metric}: {value:.1%}"
            yield _result(SCALING, metric, nodes, status, reason, figure, limit, unit="")


def _result(
    check: Check,
    metric: str,
    nodes: tuple[int, ...],
    status: Status,
    reason: str,
    figure: Figure | None = None,
    threshold: Threshold | None = None,
    unit: str = "tokens/s",
) -> CheckResult:
    return check.result(
        nodes, status, reason,
        metric=metric,
        observed=None if figure is None else figure.middle,
        interval=None if figure is None else (figure.lowest, figure.highest),
        unit="" if figure is None else unit,
        threshold=threshold,
    )  # fmt: skip


SPEED = Check(
    name="training-speed",
    title="Training speed",
    level=Level.quick,
    probes=("training",),
    seconds=15,
    measures="tokens/s and MFU of a fixed Llama shape on 1 device, 1 node and all nodes",
    how="plain data-parallel PyTorch, no compilation; of a device alone by its local time",
    evidence="equally many steps from every rank",
    references="the low end of what drillyard estimates where runs of its kind were measured, or"
    " 7/8 of the baseline; on a CPU half of it, for a device alone",
    meaning="devices, or the network between them, are slower than in measured runs",
    action="look at the checks of single devices and of collectives: one of them says why",
    judge=_judge_speed,
)
SCALING = Check(
    name="training-scaling",
    title="Training scaling",
    level=Level.quick,
    probes=("training",),
    seconds=0,
    measures="weak scaling (the same work per device) and strong scaling (the same work in all)",
    how="tokens/s per device of the training probe's phases over each other",
    evidence="both phases from every rank",
    references="7/8 of the baseline's; else recorded",
    meaning="the network, or waiting for stragglers, takes more of a step than before",
    action="look at the checks of collectives and of stragglers",
    judge=_judge_scaling,
)
