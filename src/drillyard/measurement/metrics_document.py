"""`drillyard metrics --json`: the published document of a measured run, and its JSON Schema
(`--json-schema`).

The version is raised when a field is renamed, removed or means something else; new fields may come
without. Every field is always there: what is not known is null, and `missing` says why and which
flag would give it. Seconds, US dollars and fractions (0.42, not 42) throughout. Non-finite numbers
do not occur. Filled by `RunResult.as_json`.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

VERSION: Final = 1


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="null", from_attributes=True)


class StepSeconds(_Part):
    """Seconds of a step, warm-up left out. `p50` is the headline, from which all rates and costs
    are made."""

    basis: str | None = Field(
        description=(
            "What they rest on: steps, windows, time stamps, progress clock, moving averages or"
            " whole run."
        )
    )
    window_steps: int = Field(description="How many steps each logged duration is the mean of.")
    mean: float | None
    p50: float | None
    p95: float | None = Field(
        description="Null where single steps are not logged; so are p99 and jitter."
    )
    p99: float | None
    lowest: float | None
    highest: float | None
    jitter: float | None = Field(description="1.4826 x median absolute deviation / median.")
    slow_fraction: float | None = Field(
        description="Share of steps that took over 1.5 times the median."
    )
    precision_seconds: float = Field(
        description="By how much a duration may be off because of how it is printed."
    )
    steps: int = Field(description="Steps that these figures rest on.")
    left_out: int = Field(
        description="Steps left out as warm-up, or because they are outside of the range asked for."
    )
    num_gpus: int | None = Field(
        description=(
            "Where restarts changed the number of GPUs, the last one: these figures are of the"
            " steps on it. Else null."
        )
    )
    on_other_gpus: int = Field(description="Steps on other numbers of GPUs, not counted here.")
    first_step: int | None
    last_step: int | None


class Loss(_Part):
    """Of the steps that led to the model."""

    first: float | None
    last: float | None
    lowest: float | None
    lowest_step: int | None
    curve: list[tuple[int, float]] = Field(description="Up to 200 points: step, loss.")


class HeldOutFigure(_Part):
    """A figure of the evaluations. `lowest` is that of losses."""

    last: float
    last_step: int | None
    lowest: float | None
    lowest_step: int | None


class Waits(_Part):
    """Saves or evaluations that training waited for."""

    count: int
    median_seconds: float | None
    longest_seconds: float | None
    total_seconds: float | None


class Checkpoints(Waits):
    """Saves: how long training waited, and how long those took that were written meanwhile."""

    written: int = Field(description="Saves that say how long it took until they were complete.")
    median_written_seconds: float | None


class StallLine(_Part):
    """A step, or a window of steps, that took over three times the median per step."""

    step: int
    seconds: float
    place: str


class FlaggedStep(_Part):
    """A step and where its line is."""

    step: int
    place: str
    steps: int = Field(description="How many, up to this one: 1, or what its line counts.")


class Printed(_Part):
    """Rates as the framework printed them, under its own formula: medians over the same steps."""

    tokens_per_second_per_gpu: float | None
    tflops_per_gpu: float | None
    mfu: float | None


class SourceFile(_Part):
    """One file that was read or looked at."""

    name: str
    format: str | None
    used: bool
    note: str
    lines: int
    lines_passed_over: int = Field(
        description="Lines that are no step and nothing else that counts."
    )
    damaged_lines: int
    unfinished_lines: int = Field(
        description="1 where the last line has no newline and was left out."
    )


class MissingFigure(_Part):
    """A figure that is null, why, and the flags that would give it."""

    field: str
    flags: list[str]
    reason: str


class MetricsDocument(_Part):
    """Achieved figures of a run."""

    model_config = ConfigDict(title="Document")

    version: Literal[1]
    drillyard: str = Field(description="The version of Drillyard that measured.")
    name: str
    format: str | None = Field(description="The format of the log that the steps come from.")
    sources: list[SourceFile]
    step_seconds: StepSeconds
    tokens_per_second_per_gpu: float | None
    tflops_per_gpu: float | None
    mfu: float | None = Field(description="A fraction of the dense peak.")
    formula: str | None = Field(
        description="What FLOPs per token are counted by; names as in `drillyard estimate`."
    )
    flops_per_token: float | None
    parameters: float | None
    peak_tflops: float | None
    accelerator: str | None
    precision: str
    precision_from: str = Field(description="flag, log or default.")
    num_gpus: int | None = Field(description="The last number, where restarts changed it.")
    num_gpus_changes: list[int] = Field(
        description="The numbers of GPUs in order: one where it never changed, empty if not known."
    )
    sequence_length: int | None
    tokens_per_step: float | None = Field(description="Of all GPUs.")
    tokens_from: str | None
    printed: Printed
    price_per_gpu_hour: float | None
    cost_per_step: float | None
    cost_per_million_tokens: float | None
    cost_so_far: float | None = Field(description="Of all wall time but for waiting.")
    goodput: float | None = Field(description="Productive over wall time.")
    wall_seconds: float | None
    seconds_by_category: dict[str, float] | None
    microseconds_by_category: dict[str, int] | None = Field(
        description="These sum to wall time exactly."
    )
    restarts: int | None
    steps_redone: int | None
    clock_steps_back: int | None
    loss: Loss
    held_out: dict[str, HeldOutFigure] = Field(
        description="What evaluations found, by dotted names."
    )
    skipped_steps: int
    skipped: list[FlaggedStep] = Field(description="The first 100.")
    nonfinite_steps: int
    nonfinite: list[FlaggedStep] = Field(description="The first 100.")
    stalled_steps: int
    stalls: list[StallLine] = Field(description="The first 100.")
    checkpoints: Checkpoints
    evaluations: Waits
    missing: list[MissingFigure]
    warnings: list[str]


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of the document."""
    schema = MetricsDocument.model_json_schema(mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
