"""The form of `drillyard estimate --json`: its schema, which `drillyard schema estimate` prints.

The models below are the contract with programs that read estimates. Within one `version` fields may be added; none is
renamed, removed or given another meaning. `as_json.py` makes what they describe; tests hold the two against each other.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter


class DocumentPart(BaseModel):
    """What is described is all there is today; the schema lets a reader take fields that are added later."""

    model_config = ConfigDict(
        extra="forbid", strict=True, json_schema_extra=lambda schema: schema.pop("additionalProperties")
    )


class QuantityEntry(DocumentPart):
    """A number with what it rests on."""

    name: str
    value: float
    unit: str = Field(description="Unit; empty for a count or a fraction.")
    formula: str
    source: str = Field(description="Sources of the formula and of its inputs.")
    date: str | None = Field(description="Oldest date among the sources (ISO).")
    unverified: bool = Field(description="Whether anything it rests on is an assumption or unconfirmed.")


class FactEntry(DocumentPart):
    """A value with its sources."""

    value: float
    source: str
    date: str | None
    unverified: bool


class RangeEntry(DocumentPart):
    """A number that is known to lie between two."""

    low: QuantityEntry
    high: QuantityEntry
    is_bound: bool = Field(description="Only the better end is known; `high` is then the same as `low`.")


class ModelEntry(DocumentPart):
    """The model whose run is predicted."""

    source: str = Field(description="Where its config was read.")
    model_type: str
    parameters: int
    active_parameters: int = Field(description="Parameters that one token uses.")
    adapter_parameters: int | None = Field(description="Trained parameters of LoRA adapters; null: all are trained.")


class TargetEntry(DocumentPart):
    """Where the run is to be."""

    machine: str | None = Field(description="Machine type; null where only the accelerator is given.")
    accelerator: str
    nodes: int
    gpus: int
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
    attention: str
    compiled: bool
    loss_chunk_tokens: int
    tokens_per_step: int


class DecisionEntry(DocumentPart):
    """What a setting that was left open became."""

    setting: str
    value: str | int | float | bool
    reason: str


class AlternativeEntry(DocumentPart):
    """Settings with which the run fits."""

    settings: dict[str, Any]
    gpus: int | None = Field(description="Another number of GPUs; null: as it is.")
    memory_gib: float = Field(description="Higher end of the predicted peak.")
    costs: str
    keeps_training: bool = Field(description="What is computed stays the same up to rounding.")


class MemoryEntry(DocumentPart):
    """Memory of one GPU at its peak."""

    total_gib: RangeEntry
    available_gib: QuantityEntry | None
    peak_at: str
    parts_gib: list[RangeEntry]
    alternatives: list[AlternativeEntry] = Field(description="Nearest settings that fit; empty where the run fits.")


class MeasuredRunEntry(DocumentPart):
    """A measured run."""

    name: str
    publisher: str
    accelerator: str
    num_gpus: int
    step_seconds: float
    tokens_per_second_per_gpu: FactEntry
    efficiency: float = Field(description="Share of the best known rates that it reached.")


class StepTimeEntry(DocumentPart):
    """One optimizer step, failure-free."""

    formula: str = Field(description="Formula of the FLOPs in MFU and TFLOP/s.")
    basis: Literal["calibration", "class", "neighbours", "bound"] | None = Field(
        description="What the range is drawn from: a run of your own, measured runs of the same class, those of "
        "neighbouring classes, or nothing (then it is a bound)."
    )
    seconds: RangeEntry
    tokens_per_second_per_gpu: RangeEntry
    tflops_per_gpu: RangeEntry
    mfu: RangeEntry | None = Field(description="Null where the accelerator's peak is not known.")
    bounds: list[QuantityEntry] = Field(description="What compute, memory and communication allow.")
    measured_rows: list[MeasuredRunEntry] = Field(description="Measured runs that the efficiency was drawn from.")


class FailureEntry(DocumentPart):
    """One failure rate; ranges go from the fast to the slow end of the step time."""

    rate: str
    failures_per_1000_node_days: float
    interruptions: RangeEntry
    checkpoint_interval_steps: RangeEntry = Field(description="What the run saves at in this answer.")
    best_interval_steps: float
    goodput: RangeEntry = Field(description="ETTR without queue wait.")
    wall_seconds: RangeEntry
    left_out: list[str]
    terms: list[QuantityEntry] = Field(description="All terms at the fast end.")


class RunTimeEntry(DocumentPart):
    """The whole run."""

    steps: int
    tokens: float
    seconds_without_failures: RangeEntry
    wall_seconds: RangeEntry | None
    gpu_hours: RangeEntry = Field(description="Failures included where they are known.")
    saves: str
    failures: list[FailureEntry]


class CostEntry(DocumentPart):
    """Dollars."""

    bought: str
    usd_per_gpu_hour: QuantityEntry
    usd_per_node_hour: QuantityEntry
    usd_per_hour: QuantityEntry
    usd_per_step: RangeEntry
    usd_per_million_tokens: RangeEntry
    usd_per_run: RangeEntry | None


class QuotaEntry(DocumentPart):
    """What the cluster counts against its cloud's quotas."""

    metric: str
    region: str | None
    amount: int
    unit: str
    reason: str
    dimensions: dict[str, str]
    source: str


class MissingEntry(DocumentPart):
    """What is not answered, why, and what to give."""

    what: str
    why: str
    give: str


class StatisticsEntry(DocumentPart):
    """A simulated figure: its mean with a 95 % confidence interval, and the spread of single runs."""

    mean: float
    low: float
    high: float
    percentile_5: float
    percentile_95: float


class IntervalEntry(DocumentPart):
    """One checkpoint interval: its goodput in closed form, by which intervals are ranked, and simulated."""

    interval_steps: int
    expected_goodput: float
    goodput: StatisticsEntry
    as_good_as_the_best: bool


class SparesEntry(DocumentPart):
    """One number of spare nodes, simulated."""

    spares: int
    node_hours: float
    usd: float | None
    goodput: StatisticsEntry
    replicas_that_wait: int = Field(description="Simulated runs in which the job waited for a node.")
    as_good_as_the_best: bool


class SimulationEntry(DocumentPart):
    """What the simulator says, at one failure rate."""

    rate: str
    seed: int
    replicas: int = Field(description="Runs that were simulated, each with at least one failure.")
    no_failure_share: float = Field(description="The probability of a run without a failure, exact.")
    goodput: StatisticsEntry
    wall_seconds: StatisticsEntry
    interruptions_per_day: StatisticsEntry
    unverified: bool = Field(description="Whether it rests on an assumption or an unconfirmed value.")
    intervals: list[IntervalEntry]
    spares: list[SparesEntry]


class EstimateDocument(DocumentPart):
    """The answer of `drillyard estimate --json`."""

    version: Literal[1]
    kind: Literal["estimate"]
    run: str
    verdict: Literal["fits", "may not fit", "does not fit", "unknown"] = Field(description="On memory alone.")
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
    hours: float | None = Field(description="For the tokens of the sweep, in the middle of its range.")
    cost: float | None
    gpus: int | None
    activation_checkpointing: str | None = Field(description="What was taken; where the config says auto, the least.")
    memory_gib: float | None = Field(description="Higher end of the predicted peak per GPU.")
    step_seconds_low: float | None
    step_seconds_high: float | None
    unverified: bool = Field(description="Whether a figure rests on an assumption or an unconfirmed value.")
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


def estimate_schema() -> dict[str, Any]:
    """The schema (draft 2020-12) of what `drillyard estimate --json` prints, with and without --sweep."""
    either: TypeAdapter[EstimateDocument | SweepDocument] = TypeAdapter(EstimateDocument | SweepDocument)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **either.json_schema()}
