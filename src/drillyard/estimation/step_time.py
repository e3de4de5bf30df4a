"""Time of a step: bounds from the hardware, and a range from runs that were measured.

No step can beat the bounds: its FLOPs at the best rate published for the accelerator, the bytes of
weights and optimizer at the bandwidth of its memory, its collectives at the machine's own measured
bandwidths. A real step takes longer; the ratio, its efficiency, cannot be computed. It is taken
from measured runs of the same class (accelerator, precision, checkpointing, sharding), see
`efficiency`; what those runs differ in (model, sequence, batch, GPUs, network, compiled or not) is
counted (`step_work`, `timeline`), not averaged.

Without a measured run like the setup only the bound is known, and is called one.

Cost: about half a millisecond, and once some 20 ms for the efficiencies of published runs. Limits:
mixtures of experts are taken from dense runs, adapters from full training; stragglers, input and
evaluation are in no bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from drillyard.errors import UserError
from drillyard.estimation.efficiency import (
    BANDS,
    NEIGHBOURS,
    SLOW_ATTENTION,
    Basis,
    ReferenceRun,
    best_rates,
    efficiency_of,
    efficiency_range,
    select_reference_runs,
    unmeasured_attention,
)
from drillyard.estimation.measured_runs import MeasuredRun, RunClass, published_runs, run_class
from drillyard.estimation.quantity import Quantity, Range, quantity
from drillyard.estimation.setup import Setup
from drillyard.estimation.step_work import Work, count_work, optimizer_bytes
from drillyard.estimation.timeline import (
    CollectiveNetwork,
    Rates,
    StepTraffic,
    Timeline,
    step_traffic,
    timeline,
    unit_copies,
)
from drillyard.hardware import Accelerator, Bandwidth, Fact, FactSource, Machine, catalog
from drillyard.modelspec import Formula, flops_per_token, formula_label

FLOPS_FORMULA: Final[Formula] = "6N"
"""The formula of TFLOP/s and MFU, the one that runs report (`telemetry/metrics.py`)."""
SMALLER: Final = 0.8
"""A model below this share of the smallest measured model's parameters gets a note."""
NETWORK_LIMITS: Final = 0.2
"""A step that waits for collectives for this share of its time gets a note."""
NOT_COUNTED: Final = FactSource(
    "communication is not counted: nothing is known of the network", None, True
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The time of a step in seconds, and what follows from it.

    Bounds: `compute`, `memory` and `communication` (None where nothing is known of the network),
    the largest of which is `bound`; `activations` is the time of elementwise work at the bandwidth
    of the memory. `seconds.is_bound`: no measured run is like it. `efficiency` is the share of the
    best known rates; `exposed` the part of `seconds` in which communication is not hidden by
    computing. MFU and TFLOP/s are by `formula`; MFU needs the accelerator's peak. `rows` are the
    runs behind the range, `basis` how they were found, `notes` what is not known.
    """

    run_class: RunClass
    formula: str
    basis: Basis
    rows: tuple[ReferenceRun, ...]
    compute: Quantity
    memory: Quantity
    activations: Quantity
    communication: Quantity | None
    bound: Quantity
    efficiency: Range | None
    seconds: Range
    exposed: Range | None
    tokens_per_second_per_gpu: Range
    tflops_per_gpu: Range
    mfu: Range | None
    notes: tuple[str, ...]

    @property
    def bounds(self) -> list[Quantity]:
        """Bounds by compute, memory and communication."""
        return [
            one
            for one in (self.compute, self.memory, self.activations, self.communication)
            if one is not None
        ]

    @property
    def quantities(self) -> list[Quantity | Range]:
        """All figures in the order in which they were computed, for explanations."""
        ranges = (self.efficiency, self.seconds, self.exposed)
        rates = (self.tokens_per_second_per_gpu, self.tflops_per_gpu, self.mfu)
        return [*self.bounds, self.bound, *(one for one in (*ranges, *rates) if one is not None)]


def step_time(
    setup: Setup,
    machine: Machine | None,
    accelerator: Accelerator,
    *,
    rows: Sequence[MeasuredRun] | None = None,
    without_source: str | None = None,
    calibration: MeasuredRun | None = None,
    bandwidths: Iterable[Bandwidth] | None = None,
) -> StepTime:
    """The time of a step of `setup` on `accelerator`; between nodes on the network of `machine`,
    where one is named.

    `rows` are the measured runs to draw from (default: the published ones), without those of the
    publisher `without_source`. `calibration` is a measured run that is taken instead of all others.
    `bandwidths` are the reference bandwidths (default: those of the catalog). UserError where the
    accelerator has no known rates at the precision.
    """
    rates = best_rates(accelerator, setup.precision)
    if rates is None:
        bf16 = (
            ""
            if setup.precision == "bf16"
            else "--set training.precision=bf16 where that is meant, or "
        )
        raise UserError(
            f"the {setup.precision} peak or the memory bandwidth of {accelerator.name} is not"
            f" known\n{bf16}--hardware FILE with what is known of it"
        )
    references = catalog().bandwidths if bandwidths is None else tuple(bandwidths)
    work = count_work(setup)
    traffic = step_traffic(
        setup, work, CollectiveNetwork(accelerator, machine, setup.gpus_per_node, references)
    )
    notes = [*setup.spec.notes] + (
        [] if traffic is not None else [f"{NOT_COUNTED.text}; name a machine"]
    )
    basis, used = _reference_runs(
        setup, accelerator, rows, without_source, calibration, rates, references, notes
    )
    bounds = _bounds(setup, work, traffic, rates)
    excess = unmeasured_attention(work, used) if used else 0.0
    seconds, exposed, efficiency = _seconds(
        basis, used, timeline(setup, work, traffic, rates), bounds, excess
    )
    if basis != "calibration":
        notes += _beyond_measured(setup, work, used, seconds, exposed, excess)
    return StepTime(
        run_class=run_class(setup, accelerator.name),
        formula=formula_label(FLOPS_FORMULA, adapters=setup.adapters is not None),
        basis=basis,
        rows=used,
        seconds=seconds,
        exposed=exposed,
        efficiency=efficiency,
        notes=tuple(notes),
        **bounds._asdict(),
        **_speeds(setup, seconds, accelerator),
    )


def _reference_runs(
    setup: Setup,
    accelerator: Accelerator,
    rows: Sequence[MeasuredRun] | None,
    without_source: str | None,
    calibration: MeasuredRun | None,
    rates: Rates,
    references: tuple[Bandwidth, ...],
    notes: list[str],
) -> tuple[Basis, tuple[ReferenceRun, ...]]:
    """The measured runs that the range rests on; what there is to say of them goes to `notes`."""
    wanted = run_class(setup, accelerator.name)
    if calibration is not None:
        reached = efficiency_of(calibration, rates.kind, references)
        if reached is None:
            notes.append(
                f"{calibration.name} says nothing here: it would have waited for its network alone"
            )
            return "bound", ()
        if calibration.run_class != wanted:
            notes.append(
                f"calibrated by a run of another class: {calibration.run_class}, not {wanted}"
            )
        return "calibration", (ReferenceRun(calibration, reached),)
    known = published_runs().values() if rows is None else rows
    others = [row for row in known if row.publisher != without_source]
    basis, used = select_reference_runs(setup, accelerator, others, rates.kind, references)
    if basis == "neighbours":
        notes.append(f"{NEIGHBOURS.text} ({wanted})")
    elif basis == "bound":
        notes.append(f"no measured run is like it ({wanted}): only the bound is known")
    return basis, used


class _Bounds(NamedTuple):
    """The bounds, as `StepTime` has them."""

    compute: Quantity
    memory: Quantity
    activations: Quantity
    communication: Quantity | None
    bound: Quantity


def _bounds(setup: Setup, work: Work, traffic: StepTraffic | None, rates: Rates) -> _Bounds:
    best = "the best matmul rate published" if rates.kind == "achievable" else "peak"
    executed = f"{work.flops:.4g} FLOPs that are executed, recomputation included, over {best}"
    if rates.fp8 is not None:
        executed += f", {work.fp8_flops / work.flops:.0%} of them at that of fp8"
    known = [rates.flops] if rates.fp8 is None else [rates.flops, rates.fp8]
    least = rates.seconds(work.flops, 0.0, work.fp8_flops)
    compute = quantity("compute", least, "s", executed, *known)
    passes = 3 if setup.activation_checkpointing in ("none", "memory-budget") else 4
    moved = float(work.micro_batches * passes * work.compute_bytes * work.parameters)
    moved += work.micro_batches * sum(
        unit.count * sum(unit_copies(setup, work, unit)) for unit in work.units
    )
    moved += optimizer_bytes(setup, work.trainable // setup.shard)
    words = (
        "weights read and gradients written by every pass, FSDP's copies, clipping and AdamW, over"
        " memory bandwidth"
    )
    memory = quantity("memory", moved / rates.memory.value, "s", words, rates.memory)
    words = "bytes of elementwise operations and of the loss over memory bandwidth"
    activations = quantity(
        "activations", work.elementwise_bytes / rates.memory.value, "s", words, rates.memory
    )
    communication = None if traffic is None else _communication(setup, work, traffic)
    largest = max(
        (one for one in (compute, memory, communication) if one is not None),
        key=lambda one: one.value,
    )
    bound = quantity(
        "bound", largest.value, "s", f"the largest of the bounds: {largest.name}", largest
    )
    return _Bounds(compute, memory, activations, communication, bound)


def _communication(setup: Setup, work: Work, traffic: StepTraffic) -> Quantity:
    in_units = zip(work.units, traffic.units, strict=True)
    total = work.micro_batches * sum(
        unit.count * (one.forward + one.backward) for unit, one in in_units
    )
    gathers = "one all-gather" if setup.keeps_unsharded else "two all-gathers"
    gathers += " of adapters" if setup.holds_frozen_whole else ""
    words = "one GPU alone" if setup.world_size == 1 else "copies whose gradients are added up"
    if setup.shard > 1:
        words = f"{gathers} and a reduce-scatter per block and micro-batch"
        words += ", an all-reduce over the copies" if setup.replicate > 1 else ""
    return quantity("communication", total, "s", words, traffic.basis)


def _beyond_measured(
    setup: Setup,
    work: Work,
    used: tuple[ReferenceRun, ...],
    seconds: Range,
    exposed: Range | None,
    excess: float,
) -> Iterator[str]:
    """Warn where no measured run applies: smaller models, longer sequences, and steps that wait for
    a network."""
    smallest = min((one.row.setup.spec.total_parameters for one in used), default=0)
    if used and setup.spec.total_parameters < SMALLER * smallest:
        yield (
            f"the smallest model of a measured run has {smallest / 1e9:.2g}B parameters: smaller"
            " ones reach less of the best rates, by how much is not known; --calibrate RUN_DIR"
            " takes a run of yours"
        )
    if excess:
        longest = max(one.row.setup.sequence_length for one in used)
        yield (
            f"attention is {work.attention_share:.0%} of the FLOPs, in the measured runs (sequences"
            f" of up to {longest:,} tokens) {work.attention_share - excess:.0%} at most: it may be"
            f" up to {SLOW_ATTENTION:g} times slower than matrix products, which makes the range"
            " wider; --calibrate RUN_DIR takes a run of yours"
        )
    if exposed is not None and exposed.high.value > NETWORK_LIMITS * seconds.low.value:
        yield (
            f"the network limits this step (up to {exposed.high.value / seconds.low.value:.0%} of"
            " it waits for collectives), which no measured run shows: bandwidths are those of"
            " collectives alone on an idle machine; --calibrate RUN_DIR takes a run of yours"
        )


def _seconds(
    basis: Basis, used: tuple[ReferenceRun, ...], line: Timeline, bounds: _Bounds, excess: float
) -> tuple[Range, Range | None, Range | None]:
    """The step, its exposed communication and the efficiency of both; without measured runs the
    bound alone."""
    least = bounds.bound
    if not used:
        step = quantity("step", least.value, "s", "no less than the bound", least)
        return Range(step, step, is_bound=True), None, None
    supports: list[Quantity | FactSource] = [
        bounds.compute, bounds.memory, bounds.activations, bounds.communication or NOT_COUNTED
    ]  # fmt: skip
    efficiency = efficiency_range(basis, used)
    slow_network, slow_attention = BANDS[basis], 1 + (SLOW_ATTENTION - 1) * excess
    words = (
        "per block the longer of computing at the efficiency and communicating, then root and"
        " optimizer"
    )
    slow_words = f"{words}; communication x {slow_network:g}"
    slow_words += f", attention beyond measured runs x {slow_attention:.2f}" if excess else ""
    fast, slow = efficiency.high, efficiency.low
    slowest = line.seconds(slow.value, slow_network) * slow_attention
    seconds = Range(
        quantity("step", max(least.value, line.seconds(fast.value)), "s", words, *supports, fast),
        quantity("step", max(least.value, slowest), "s", slow_words, *supports, slow),
    )
    if bounds.communication is None:
        return seconds, None, efficiency

    def exposed_at(share: Quantity) -> Quantity:
        words = "communication that computing does not hide"
        return quantity(
            "exposed communication", line.exposed(share.value), "s", words, *supports, share
        )

    return seconds, Range(exposed_at(slow), exposed_at(fast)), efficiency


def _speeds(setup: Setup, seconds: Range, accelerator: Accelerator) -> dict[str, Any]:
    """Tokens/s, TFLOP/s and MFU of a step, as `StepTime` has them; their high ends are those of the
    shortest step."""
    tokens, adapters, extra = (
        setup.tokens_per_step_per_gpu,
        setup.adapters,
        setup.adapter_parameters,
    )
    flops = tokens * flops_per_token(
        setup.spec, FLOPS_FORMULA, setup.sequence_length, adapter_parameters=extra
    )
    by_label = f"FLOPs by {formula_label(FLOPS_FORMULA, adapters=adapters is not None)} / step"
    peak = accelerator.peak(setup.precision)

    def per_step(
        name: str, amount: float, scale: float, unit: str, formula: str, *supports: Fact[float]
    ) -> Range:
        reversed_ends = seconds.map(
            name, lambda step: amount / step / scale, unit, formula, *supports
        )
        return Range(reversed_ends.high, reversed_ends.low, seconds.is_bound)

    return {
        "tokens_per_second_per_gpu": per_step(
            "tokens/s per GPU", tokens, 1, "tokens/s", f"{tokens} tokens / step"
        ),
        "tflops_per_gpu": per_step("TFLOP/s per GPU", flops, 1e12, "TFLOP/s", by_label),
        "mfu": (
            None
            if peak is None
            else per_step("MFU", flops, peak.value, "", f"{by_label} / dense peak", peak)
        ),
    }
