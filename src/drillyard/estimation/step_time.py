"""How long a step takes: bounds from the hardware, and a range from runs that were measured.

    predicted = step_time(setup, machine, accelerator)
    predicted.seconds, predicted.mfu, predicted.rows        # ranges; the runs that they are drawn from

The bounds are what no step can beat: its FLOPs at the best rate published for the accelerator, the bytes of weights and
optimizer at the bandwidth of its memory, its collectives at the machine's own measured bandwidths. Between the bounds
and a real step lies an efficiency, which nobody can compute. It is taken from measured runs of the same class
(accelerator, precision, checkpointing, sharding), see `efficiency`; what those runs differ in (model, sequence, batch,
GPUs, network, compiled or not) is counted by `work`, `communication` and `timeline`, and not averaged.

Where nothing that is measured is like the setup only the bound is known, and is called one. Without a peak at the
precision there is no answer.

Cost: about half a millisecond, and once some 20 ms for the efficiencies of published runs. Limits: mixtures of experts
are taken from dense runs, adapters from full training; stragglers, input and evaluation are in no bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from drillyard.estimation.communication import CollectiveNetwork, StepTraffic, step_traffic
from drillyard.estimation.efficiency import (
    BANDS,
    NEIGHBOURS,
    SLOW_ATTENTION,
    Basis,
    BestRates,
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
from drillyard.estimation.timeline import Timeline, timeline, unit_copies
from drillyard.hardware import Accelerator, Bandwidth, Fact, FactSource, Machine, catalog
from drillyard.modelspec import Formula, adapter_parameters, flops_per_token, formula_label

FLOPS_FORMULA: Final[Formula] = "6N"
"""The formula of TFLOP/s and MFU, the one that runs report (`telemetry/metrics.py`)."""
SMALLER: Final = 0.8
"""A model below this share of the smallest measured model's parameters gets a note."""
NETWORK_LIMITS: Final = 0.2
"""A step that waits for collectives for this share of its time gets a note."""
NOT_COUNTED: Final = FactSource("communication is not counted: nothing is known of the network", None, True)
QUANTITY_FIELDS: Final = ("compute", "memory", "activations", "communication", "bound")
RANGE_FIELDS: Final = ("efficiency", "seconds", "exposed", "tokens_per_second_per_gpu", "tflops_per_gpu", "mfu")

Support = Quantity | Fact[Any] | FactSource


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The time of a step in seconds, and what follows from it.

    Bounds: `compute`, `memory` and `communication` (None where nothing is known of the network), the largest of which
    is `bound`; `activations` is the time that elementwise work takes at the bandwidth of the memory, beside them.
    `seconds` and all others are None where the accelerator has no known rates at the precision; `seconds.is_bound`
    where nothing measured is like it. `efficiency` is the share of the best known rates; `exposed` the communication
    that computing does not hide, inside `seconds`. MFU and TFLOP/s are by `formula`. `rows` are the runs behind the
    range, `basis` how they were found; `notes` say what is not known.
    """

    run_class: RunClass
    formula: str
    notes: tuple[str, ...]
    basis: Basis | None = None
    rows: tuple[ReferenceRun, ...] = ()
    compute: Quantity | None = None
    memory: Quantity | None = None
    activations: Quantity | None = None
    communication: Quantity | None = None
    bound: Quantity | None = None
    efficiency: Range | None = None
    seconds: Range | None = None
    exposed: Range | None = None
    tokens_per_second_per_gpu: Range | None = None
    tflops_per_gpu: Range | None = None
    mfu: Range | None = None

    @property
    def terms(self) -> tuple[Quantity, ...]:
        """Every term in the order in which it was computed, for explanations."""
        first = [getattr(self, name) for name in QUANTITY_FIELDS]
        ranges = [one for name in RANGE_FIELDS if (one := getattr(self, name)) is not None]
        ends = [end for one in ranges for end in ((one.low,) if one.is_bound else (one.low, one.high))]
        return (*(one for one in first if one is not None), *ends)

    def as_json(self) -> dict[str, Any]:
        """Every field by its name, terms and ranges in full, the rows by name with their efficiencies."""
        return {
            "class": self.run_class._asdict(),
            "basis": self.basis,
            "formula": self.formula,
            **{name: None if (one := getattr(self, name)) is None else one.as_json() for name in QUANTITY_FIELDS},
            **{name: _range_json(getattr(self, name)) for name in RANGE_FIELDS},
            "rows": [{**used.row.as_json(), "efficiency": used.efficiency} for used in self.rows],
            "notes": list(self.notes),
        }


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
    """The time of a step of `setup` on `accelerator`; between nodes on the network of `machine`, where one is named.

    `rows` are the measured runs to draw from (default: the published ones), without those of the publisher
    `without_source`. `calibration` is a measured run that is taken instead of all others. `bandwidths` are the
    reference bandwidths (default: those of the catalog).
    """
    asked, label = run_class(setup, accelerator.name), formula_label(FLOPS_FORMULA, adapters=setup.adapters is not None)
    rates = best_rates(accelerator, setup.precision)
    if rates is None:
        why = f"the {setup.precision} peak or the memory bandwidth of {accelerator.name} is not known"
        return StepTime(run_class=asked, formula=label, notes=(why,))
    references = catalog().bandwidths if bandwidths is None else tuple(bandwidths)
    work = count_work(setup)
    traffic = step_traffic(setup, work, CollectiveNetwork(accelerator, machine, setup.gpus_per_node, references))
    notes = [*setup.spec.notes] + ([] if traffic is not None else [f"{NOT_COUNTED.text}; name a machine"])
    basis, used = _drawn(setup, accelerator, rows, without_source, calibration, rates, references, notes)
    bounds = _bounds(setup, work, traffic, rates)
    line = timeline(setup, work, traffic, rates.values)
    excess = unmeasured_attention(work, used) if used else 0.0
    times = _times(basis, used, line, bounds, setup, accelerator, excess)
    if basis != "calibration":
        notes += _beyond_measured(setup, work, used, times, excess)
    return StepTime(
        run_class=asked,
        formula=label,
        notes=tuple(notes),
        basis=basis,
        rows=used,
        **bounds._asdict(),
        **times._asdict(),
    )


def _drawn(
    setup: Setup,
    accelerator: Accelerator,
    rows: Sequence[MeasuredRun] | None,
    without_source: str | None,
    calibration: MeasuredRun | None,
    rates: BestRates,
    references: tuple[Bandwidth, ...],
    notes: list[str],
) -> tuple[Basis, tuple[ReferenceRun, ...]]:
    """The measured runs that the range rests on; what there is to say of them goes to `notes`."""
    asked = run_class(setup, accelerator.name)
    if calibration is not None:
        reached = efficiency_of(calibration, rates.kind, references)
        if reached is None:
            notes.append(f"{calibration.name} says nothing here: it would have waited for its network alone")
            return "bound", ()
        if calibration.run_class != asked:
            notes.append(f"calibrated by a run of another class: {calibration.run_class}, not {asked}")
        return "calibration", (ReferenceRun(calibration, reached),)
    known = published_runs().values() if rows is None else rows
    others = [row for row in known if row.publisher != without_source]
    basis, used = select_reference_runs(setup, accelerator, others, rates.kind, references)
    if basis == "neighbours":
        notes.append(f"{NEIGHBOURS.text} ({asked})")
    elif basis == "bound":
        notes.append(f"no measured run is like it ({asked}): only the bound is known")
    return basis, used


class _Bounds(NamedTuple):
    """The bounds, as `StepTime` has them."""

    compute: Quantity
    memory: Quantity
    activations: Quantity
    communication: Quantity | None
    bound: Quantity


class _Times(NamedTuple):
    """The ranges, as `StepTime` has them."""

    seconds: Range
    tokens_per_second_per_gpu: Range
    tflops_per_gpu: Range
    mfu: Range | None
    efficiency: Range | None = None
    exposed: Range | None = None


def _bounds(setup: Setup, work: Work, traffic: StepTraffic | None, rates: BestRates) -> _Bounds:
    best = "the best matmul rate published" if rates.kind == "achievable" else "peak"
    executed = f"{work.flops:.4g} FLOPs that are executed, recomputation included, over {best}"
    compute = quantity("compute", work.flops / rates.flops.value, "s", executed, rates.flops)
    passes = 3 if setup.activation_checkpointing == "none" else 4
    moved = float(work.micro_batches * passes * work.compute_bytes * work.parameters)
    moved += work.micro_batches * sum(unit.count * sum(unit_copies(setup, work, unit)) for unit in work.units)
    moved += optimizer_bytes(setup, work.trainable // setup.shard)
    words = "weights read and gradients written by every pass, FSDP's copies, clipping and AdamW, over memory bandwidth"
    memory = quantity("memory", moved / rates.memory.value, "s", words, rates.memory)
    words = "bytes of elementwise operations and of the loss over memory bandwidth"
    activations = quantity("activations", work.elementwise_bytes / rates.memory.value, "s", words, rates.memory)
    communication = None if traffic is None else _communication(setup, work, traffic)
    largest = max((one for one in (compute, memory, communication) if one is not None), key=lambda one: one.value)
    bound = quantity("bound", largest.value, "s", f"the largest of the bounds: {largest.name}", largest)
    return _Bounds(compute, memory, activations, communication, bound)


def _communication(setup: Setup, work: Work, traffic: StepTraffic) -> Quantity:
    in_units = zip(work.units, traffic.units, strict=True)
    total = work.micro_batches * sum(unit.count * (one.forward + one.backward) for unit, one in in_units)
    gathers = "one all-gather" if setup.keeps_unsharded else "two all-gathers"
    words = "one GPU alone" if setup.world_size == 1 else "copies whose gradients are added up"
    if setup.shard > 1:
        words = f"{gathers} and a reduce-scatter per block and micro-batch"
        words += ", an all-reduce over the copies" if setup.replicate > 1 else ""
    return quantity("communication", total, "s", words, traffic.basis)


def _beyond_measured(
    setup: Setup, work: Work, used: tuple[ReferenceRun, ...], times: _Times, excess: float
) -> Iterator[str]:
    """What the measured runs do not show: smaller models, longer sequences, and steps that wait for a network."""
    smallest = min((one.row.setup.spec.total_parameters for one in used), default=0)
    if used and setup.spec.total_parameters < SMALLER * smallest:
        yield (
            f"the smallest model of a measured run has {smallest / 1e9:.2g}B parameters: smaller ones reach less of "
            "the best rates, by how much is not known; --calibrate RUN_DIR takes a run of yours"
        )
    if excess:
        longest = max(one.row.setup.sequence_length for one in used)
        yield (
            f"attention is {work.attention_share:.0%} of the FLOPs, in the measured runs (sequences of up to "
            f"{longest:,} tokens) {work.attention_share - excess:.0%} at most: it may be up to {SLOW_ATTENTION:g} "
            "times slower than matrix products, which makes the range wider; --calibrate RUN_DIR takes a run of yours"
        )
    if times.exposed is not None and times.exposed.high.value > NETWORK_LIMITS * times.seconds.low.value:
        share = times.exposed.high.value / times.seconds.low.value
        yield (
            f"the network limits this step (up to {share:.0%} of it waits for collectives), which no measured run "
            "shows: bandwidths are those of collectives alone on an idle machine; --calibrate RUN_DIR takes a run of "
            "yours"
        )


def _times(
    basis: Basis,
    used: tuple[ReferenceRun, ...],
    line: Timeline,
    bounds: _Bounds,
    setup: Setup,
    accelerator: Accelerator,
    unmeasured: float,
) -> _Times:
    least = bounds.bound
    if not used:
        step = quantity("step", least.value, "s", "no less than the bound", least)
        return _derived(setup, Range(step, step, is_bound=True), accelerator)
    supports: list[Support] = [bounds.compute, bounds.memory, bounds.activations, bounds.communication or NOT_COUNTED]
    efficiency = efficiency_range(basis, used)

    slow_network, slow_attention = BANDS[basis], 1 + (SLOW_ATTENTION - 1) * unmeasured

    def step_at(share: Quantity, slow_end: bool = False) -> Quantity:
        words = "per block the longer of computing at the efficiency and communicating, then root and optimizer"
        value = max(least.value, line.seconds(share.value))
        if slow_end:
            value = max(least.value, line.seconds(share.value, slow_network) * slow_attention)
            words += f"; communication x {slow_network:g}"
            words += f", attention beyond measured runs x {slow_attention:.2f}" if unmeasured else ""
        return quantity("step", value, "s", words, *supports, share)

    def exposed_at(share: Quantity) -> Quantity:
        words = "communication that computing does not hide"
        return quantity("exposed communication", line.exposed(share.value), "s", words, *supports, share)

    derived = _derived(setup, Range(step_at(efficiency.high), step_at(efficiency.low, True)), accelerator)
    known = bounds.communication is not None
    exposed = Range(exposed_at(efficiency.low), exposed_at(efficiency.high)) if known else None
    return derived._replace(efficiency=efficiency, exposed=exposed)


def _derived(setup: Setup, seconds: Range, accelerator: Accelerator) -> _Times:
    """Tokens/s, TFLOP/s and MFU; their high ends are those of the shortest step."""
    tokens, adapters = setup.tokens_per_step_per_gpu, setup.adapters
    extra = None if adapters is None else adapter_parameters(setup.spec, adapters.rank, adapters.targets)
    flops = tokens * flops_per_token(setup.spec, FLOPS_FORMULA, setup.sequence_length, adapter_parameters=extra)
    label = formula_label(FLOPS_FORMULA, adapters=adapters is not None)
    peak = accelerator.peak(setup.precision)

    def speed(step: Quantity) -> Quantity:
        return quantity("tokens/s per GPU", tokens / step.value, "tokens/s", f"{tokens} tokens / step", step)

    def rate(step: Quantity) -> Quantity:
        return quantity("TFLOP/s per GPU", flops / step.value / 1e12, "TFLOP/s", f"FLOPs by {label} / step", step)

    def share(step: Quantity) -> Quantity:
        assert peak is not None
        return quantity("MFU", flops / step.value / peak.value, "", f"FLOPs by {label} / step / dense peak", step, peak)

    mfu = None if peak is None else _inverted(seconds, share)
    return _Times(seconds, _inverted(seconds, speed), _inverted(seconds, rate), mfu)


def _inverted(seconds: Range, of: Callable[[Quantity], Quantity]) -> Range:
    """What is the higher the shorter the step is; of a bound the best end, as both."""
    best = of(seconds.low)
    return Range(best if seconds.is_bound else of(seconds.high), best, seconds.is_bound)


def _range_json(one: Range | None) -> dict[str, Any] | None:
    if one is None:
        return None
    return {"low": one.low.as_json(), "high": one.high.as_json(), "is_bound": one.is_bound}
