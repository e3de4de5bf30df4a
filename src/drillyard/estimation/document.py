"""The JSON of `drillyard estimate --json`, made by the models whose schema `drillyard schema
estimate` prints.

The models are the contract with programs that read estimates. Within one `version` fields may be
added; none is renamed, removed or given another meaning. A field is read from the attribute of its
name, or from that of `read_from`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, TypeAdapter

from drillyard.estimation.run_estimate import RunEstimate
from drillyard.estimation.simulation_estimate import SimulatedRun
from drillyard.estimation.sweep import SweepEstimate, SweepResult
from drillyard.json_document import DocumentPart, FactEntry, Number, QuotaEntry, read_from

VERSION = 1


class QuantityEntry(DocumentPart):
    """A number with what it rests on."""

    name: str
    value: Number
    unit: str = Field(description="Unit; empty for a count or a fraction.")
    formula: str
    source: str = Field(description="Sources of the formula and of its inputs.")
    date: str | None = Field(description="Oldest date among the sources (ISO).")
    unverified: bool = Field(
        description="Whether anything it rests on is an assumption or unconfirmed."
    )


class RangeEntry(DocumentPart):
    """A number that is known to lie between two."""

    low: QuantityEntry
    high: QuantityEntry
    is_bound: bool = Field(
        description="Only the better end is known; `high` is then the same as `low`."
    )


class ModelEntry(DocumentPart):
    """The model whose run is estimated."""

    source: str = read_from("request.model.source", "Where its config was read.")
    model_type: str = read_from("setup.spec.model_type")
    parameters: int = read_from("setup.spec.total_parameters")
    active_parameters: int = read_from(
        "setup.spec.active_parameters", "Parameters that one token uses."
    )
    adapter_parameters: int | None = read_from(
        "setup.adapter_parameters", "Trained parameters of LoRA adapters; null: all are trained."
    )


class TargetEntry(DocumentPart):
    """Machines and accelerators of the run."""

    machine: str | None = read_from(
        "machine_type", "Machine type; null where only the accelerator is given."
    )
    accelerator: str = read_from("accelerator.name")
    nodes: int = read_from("num_nodes")
    gpus: int = read_from("num_gpus")
    gpus_per_node: int
    consumption: str | None
    region: str | None


class SetupEntry(DocumentPart):
    """The training step, every open setting resolved."""

    precision: str
    sequence_length: int
    micro_batch_size: int
    gradient_accumulation: int
    activation_checkpointing: str
    shard: int
    replicate: int
    frozen_whole: bool = read_from(
        "holds_frozen_whole",
        "Every rank holds what is frozen beside adapters whole: no step gathers it.",
    )
    gathers_fp8: bool = Field(
        description="Ranks exchange in fp8 the weights that products read in fp8."
    )
    attention: str = read_from("kernel")
    compiled: bool
    loss_chunk_tokens: int
    tokens_per_step: int


class DecisionEntry(DocumentPart):
    """Value of a setting that was left open, with the reason."""

    setting: str = read_from("key")
    value: str | int | float | bool
    reason: str


class AlternativeEntry(DocumentPart):
    """Settings with which the run fits."""

    settings: dict[str, Any]
    gpus: int | None = read_from("num_gpus", "Another number of GPUs; null: as it is.")
    memory_gib: float = Field(description="Higher end of the estimated peak.")
    costs: str
    keeps_training: bool = Field(description="What is computed stays the same up to rounding.")


class MemoryEntry(DocumentPart):
    """Memory of one GPU at its peak."""

    total_gib: RangeEntry = read_from("memory.total")
    available_gib: QuantityEntry | None
    peak_at: str = read_from("memory.peak_at")
    parts_gib: list[RangeEntry] = read_from("memory.parts")
    alternatives: list[AlternativeEntry] = Field(
        description="Nearest settings that fit; empty where the run fits."
    )


class MeasuredRunEntry(DocumentPart):
    """A measured run."""

    name: str = read_from("row.name")
    publisher: str = read_from("row.publisher")
    accelerator: str = read_from("row.accelerator.name")
    num_gpus: int = read_from("row.setup.world_size")
    step_seconds: float = read_from("row.seconds")
    tokens_per_second_per_gpu: FactEntry = read_from("row.tokens_per_second_per_gpu")
    efficiency: float = Field(description="Share of the best known rates that it reached.")


class StepTimeEntry(DocumentPart):
    """One optimizer step, failure-free."""

    formula: str = Field(description="Formula of the FLOPs in MFU and TFLOP/s.")
    basis: Literal["calibration", "class", "neighbours", "bound"] | None = Field(
        description=(
            "What the range is drawn from: a run of your own, measured runs of the same class,"
            " those of neighbouring classes, or nothing (then it is a bound)."
        )
    )
    seconds: RangeEntry
    tokens_per_second_per_gpu: RangeEntry
    tflops_per_gpu: RangeEntry
    mfu: RangeEntry | None = Field(description="Null where the accelerator's peak is not known.")
    bounds: list[QuantityEntry] = Field(description="What compute, memory and communication allow.")
    measured_rows: list[MeasuredRunEntry] = read_from(
        "rows", "Measured runs that the efficiency was drawn from."
    )


class FailureEntry(DocumentPart):
    """One failure rate; ranges go from the fast to the slow end of the step time."""

    rate: str = read_from("rate.name")
    failures_per_1000_node_days: float = read_from("rate.failures_per_1000_node_days")
    interruptions: RangeEntry
    checkpoint_interval_steps: RangeEntry = Field(
        description="What the run saves at in this answer."
    )
    best_interval_steps: float
    goodput: RangeEntry = Field(description="ETTR without queue wait.")
    wall_seconds: RangeEntry
    left_out: list[str] = read_from("fast.left_out")
    terms: list[QuantityEntry] = read_from("fast.quantities", "All quantities at the fast end.")


class RunTimeEntry(DocumentPart):
    """The whole run."""

    steps: int
    tokens: float
    seconds_without_failures: RangeEntry = read_from("failure_free")
    wall_seconds: RangeEntry | None = read_from("wall")
    gpu_hours: RangeEntry = Field(description="Failures included where they are known.")
    saves: str
    failures: list[FailureEntry]


class CostEntry(DocumentPart):
    """Dollars."""

    bought: str = read_from("price.bought")
    usd_per_gpu_hour: QuantityEntry = read_from("price.of_gpu")
    usd_per_node_hour: QuantityEntry = read_from("price.of_node")
    usd_per_hour: QuantityEntry = read_from("price.of_all")
    usd_per_step: RangeEntry = read_from("of_step")
    usd_per_million_tokens: RangeEntry = read_from("of_million_tokens")
    usd_per_run: RangeEntry | None = read_from("of_run")


class MissingEntry(DocumentPart):
    """Value without an answer, the reason, and what to give."""

    what: str
    why: str
    give: str


class StatisticsEntry(DocumentPart):
    """A simulated figure: its mean with a 95 % confidence interval, and the spread of single
    runs."""

    mean: float
    low: float
    high: float
    percentile_5: float
    percentile_95: float


class IntervalEntry(DocumentPart):
    """One checkpoint interval: its goodput in closed form, by which intervals are ranked, and
    simulated."""

    interval_steps: int
    expected_goodput: float
    goodput: StatisticsEntry = read_from("simulation.goodput")
    as_good_as_the_best: bool = read_from("as_good")


class SparesEntry(DocumentPart):
    """One number of spare nodes, simulated."""

    spares: int
    node_hours: float
    usd: float | None
    goodput: StatisticsEntry = read_from("simulation.goodput")
    replicas_that_wait: int = read_from(
        "simulation.waits", "Simulated runs in which the job waited for a node."
    )
    as_good_as_the_best: bool = read_from("as_good")


class SimulationEntry(DocumentPart):
    """Result of the simulator at one failure rate."""

    rate: str
    seed: int = read_from("simulation.seed")
    replicas: int = read_from(
        "simulation.replicas", "Runs that were simulated, each with at least one failure."
    )
    no_failure_share: float = read_from(
        "simulation.scenario.no_failure_share", "The probability of a run without a failure, exact."
    )
    goodput: StatisticsEntry = read_from("simulation.goodput")
    wall_seconds: StatisticsEntry = read_from("simulation.wall_seconds")
    interruptions_per_day: StatisticsEntry = read_from("simulation.failures_per_day")
    unverified: bool = Field(
        description="Whether it rests on an assumption or an unconfirmed value."
    )
    intervals: list[IntervalEntry]
    spares: list[SparesEntry]


class EstimateDocument(DocumentPart):
    """The answer of `drillyard estimate --json`."""

    version: Literal[1]
    kind: Literal["estimate"]
    run: str
    verdict: Literal["fits", "may not fit", "does not fit", "unknown"] = Field(
        description="On memory alone."
    )
    train_refuses: list[str] = Field(description="Why `drillyard train` would refuse the run.")
    model: ModelEntry
    place: TargetEntry
    setup: SetupEntry
    decisions: list[DecisionEntry]
    memory: MemoryEntry | None
    step_time: StepTimeEntry | None
    run_time: RunTimeEntry | None
    cost: CostEntry | None
    quotas: list[QuotaEntry]
    simulation: SimulationEntry | None
    missing: list[MissingEntry]
    warnings: list[str]


class SweepPointEntry(DocumentPart):
    """One combination of a sweep; null where it cannot be, see `refusal`."""

    values: dict[str, Any]
    refusal: str
    train_refuses: list[str] = Field(description="Why `drillyard train` would refuse it.")
    verdict: Literal["fits", "may not fit", "does not fit", "unknown"] | None
    on_front: bool
    is_bound: bool
    hours: float | None = Field(
        description="For the tokens of the sweep, in the middle of its range."
    )
    cost: float | None
    gpus: int | None
    activation_checkpointing: str | None = Field(
        description="What was taken; where the config says auto, the least."
    )
    memory_gib: float | None = Field(description="Higher end of the estimated peak per GPU.")
    step_seconds_low: float | None
    step_seconds_high: float | None
    unverified: bool = Field(
        description="Whether a figure rests on an assumption or an unconfirmed value."
    )
    tokens_per_second_per_gpu: float | None
    mfu: float | None


class SweepDocument(DocumentPart):
    """The answer of `drillyard estimate --sweep ... --json`."""

    version: Literal[1]
    kind: Literal["sweep"]
    run: str
    axes: dict[str, list[Any]]
    tokens: float = Field(description="The work that all points are compared on.")
    cost_unit: Literal["$", "GPU-hours"]
    with_failures: bool = Field(description="Whether hours hold saves and failures.")
    points: list[SweepPointEntry]


def estimate_document(
    estimate: RunEstimate, simulated: SimulatedRun | None = None
) -> EstimateDocument:
    same = ("verdict", "setup", "step_time", "run_time", "cost", "quotas", "missing", "warnings")
    content = {
        "version": VERSION,
        "kind": "estimate",
        "run": estimate.request.config.name,
        "train_refuses": estimate.refusals,
        "model": estimate,
        "place": estimate.request.target,
        "decisions": estimate.resolved.decisions,
        "memory": None if estimate.memory is None else estimate,
        "simulation": simulated,
        **{name: getattr(estimate, name) for name in same},
    }
    return EstimateDocument.model_validate(content, strict=False)


def sweep_document(swept: SweepResult, run: str) -> SweepDocument:
    """A sweep, all of its points in the order of its axes."""
    content = {
        "version": VERSION,
        "kind": "sweep",
        "run": run,
        "axes": {axis.key: axis.values for axis in swept.axes},
        "tokens": swept.tokens,
        "cost_unit": swept.cost_unit,
        "with_failures": swept.with_failures,
        "points": [_point(point) for point in swept.points],
    }
    return SweepDocument.model_validate(content, strict=False)


def _point(point: SweepEstimate) -> dict[str, Any]:
    one = point.estimate
    timed, memory = (None, None) if one is None else (one.step_time, one.memory)
    mfu = None if timed is None else timed.mfu
    same = ("values", "refusal", "on_front", "is_bound", "hours", "cost", "unverified")
    return {
        **{name: getattr(point, name) for name in same},
        "train_refuses": one.refusals if one else [],
        "verdict": one and one.verdict,
        "gpus": one and one.request.target.num_gpus,
        "activation_checkpointing": one and one.setup.activation_checkpointing,
        "memory_gib": memory and memory.total.high.value,
        "step_seconds_low": timed and timed.seconds.low.value,
        "step_seconds_high": timed and timed.seconds.high.value,
        "tokens_per_second_per_gpu": timed and timed.tokens_per_second_per_gpu.middle,
        "mfu": mfu and mfu.middle,
    }


def estimate_schema() -> dict[str, Any]:
    """The schema (draft 2020-12) of what `drillyard estimate --json` prints, with and without
    --sweep."""
    either: TypeAdapter[EstimateDocument | SweepDocument] = TypeAdapter(
        EstimateDocument | SweepDocument
    )
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **either.json_schema(by_alias=False),
    }
