"""`drillyard metrics --json`: the published document of a measured run, and its JSON Schema (`--json-schema`).

The version is raised when a field is renamed, removed or means something else; new fields may come without. Every
field is always there: what is not known is null, and `missing` says why and which flag would give it. Seconds, US
dollars and fractions (0.42, not 42) throughout. Non-finite numbers do not occur.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from drillyard import __version__
from drillyard.measurement.marks import WaitKind
from drillyard.measurement.run_result import RunResult

VERSION: Final = 1
CURVE_POINTS: Final = 200
MOST_LISTED: Final = 100


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="null")


class StepSeconds(_Part):
    """Seconds of a step, warm-up left out. `p50` is the headline, from which all rates and costs are made."""

    basis: str | None = Field(
        description="What they rest on: steps, windows, time stamps, progress clock, moving averages or whole run."
    )
    window_steps: int = Field(description="How many steps each logged duration is the mean of.")
    mean: float | None
    p50: float | None
    p95: float | None = Field(description="Null where single steps are not logged; so are p99 and jitter.")
    p99: float | None
    lowest: float | None
    highest: float | None
    jitter: float | None = Field(description="1.4826 x median absolute deviation / median.")
    slow_fraction: float | None = Field(description="Share of steps that took over 1.5 times the median.")
    precision_seconds: float = Field(description="By how much a duration may be off because of how it is printed.")
    steps: int = Field(description="Steps that these figures rest on.")
    left_out: int = Field(description="Steps left out as warm-up, or because they are outside of the range asked for.")
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
    lines_passed_over: int = Field(description="Lines that are no step and nothing else that counts.")
    damaged_lines: int
    unfinished_lines: int = Field(description="1 where the last line has no newline and was left out.")


class MissingFigure(_Part):
    """A figure that is null, why, and the flags that would give it."""

    field: str
    flags: list[str]
    reason: str


class MetricsDocument(_Part):
    """What a run achieved."""

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
    formula: str | None = Field(description="What FLOPs per token are counted by; names as in `drillyard estimate`.")
    flops_per_token: float | None
    parameters: float | None
    peak_tflops: float | None
    accelerator: str | None
    precision: str
    precision_from: str = Field(description="flag, log or default.")
    num_gpus: int | None
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
    microseconds_by_category: dict[str, int] | None = Field(description="These sum to wall time exactly.")
    restarts: int | None
    steps_redone: int | None
    clock_steps_back: int | None
    loss: Loss
    held_out: dict[str, HeldOutFigure] = Field(description="What evaluations found, by dotted names.")
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


def build_document(result: RunResult) -> MetricsDocument:
    """The document of a measured run."""
    speed, cost, account, losses = result.speed, result.cost, result.goodput, result.losses
    return MetricsDocument(
        version=VERSION,
        drillyard=__version__,
        name=result.name,
        format=result.log.format,
        sources=_sources(result),
        step_seconds=_step_seconds(result),
        tokens_per_second_per_gpu=speed.tokens_per_second_per_gpu,
        tflops_per_gpu=speed.tflops_per_gpu,
        mfu=speed.mfu,
        formula=speed.formula,
        flops_per_token=speed.flops_per_token,
        parameters=speed.parameters,
        peak_tflops=None if speed.peak_flops is None else speed.peak_flops / 1e12,
        accelerator=speed.accelerator,
        precision=speed.precision,
        precision_from=speed.precision_from,
        num_gpus=speed.num_gpus,
        sequence_length=speed.sequence_length,
        tokens_per_step=speed.tokens_per_step,
        tokens_from=speed.tokens_from,
        printed=Printed(
            tokens_per_second_per_gpu=speed.printed_tokens_per_second_per_gpu,
            tflops_per_gpu=speed.printed_tflops_per_gpu,
            mfu=speed.printed_mfu,
        ),
        price_per_gpu_hour=cost.usd_per_gpu_hour,
        cost_per_step=cost.per_step,
        cost_per_million_tokens=cost.per_million_tokens,
        cost_so_far=cost.so_far,
        goodput=None if account is None else account.goodput,
        wall_seconds=None if account is None else account.wall_microseconds / 1e6,
        seconds_by_category=None if account is None else account.seconds(),
        microseconds_by_category=None if account is None else account.microseconds(),
        restarts=None if account is None else account.restarts,
        steps_redone=None if account is None else account.steps_redone,
        clock_steps_back=None if account is None else account.clock_steps_back,
        loss=Loss(
            first=losses.first,
            last=losses.last,
            lowest=losses.lowest,
            lowest_step=losses.lowest_step,
            curve=losses.curve(CURVE_POINTS),
        ),
        held_out={name: HeldOutFigure(**figure._asdict()) for name, figure in result.held_out.items()},
        skipped_steps=len(losses.skipped),
        skipped=_flagged(losses.skipped),
        nonfinite_steps=len(losses.nonfinite),
        nonfinite=_flagged(losses.nonfinite),
        stalled_steps=len(result.timing.stalls),
        stalls=[
            StallLine(step=stall.step, seconds=stall.seconds, place=stall.place)
            for stall in result.timing.stalls[:MOST_LISTED]
        ],
        checkpoints=_checkpoints(result),
        evaluations=Waits(**_waited(result, "evaluation")),
        missing=[MissingFigure(field=name, flags=list(flags), reason=why) for name, flags, why in result.missing],
        warnings=list(result.warnings),
    )


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of the document."""
    schema = MetricsDocument.model_json_schema(mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _step_seconds(result: RunResult) -> StepSeconds:
    times = result.timing.times
    names = set(StepSeconds.model_fields)
    return StepSeconds(**{name: getattr(times, name) for name in names})


def _sources(result: RunResult) -> list[SourceFile]:
    names = SourceFile.model_fields
    return [SourceFile(**{name: getattr(source, name) for name in names}) for source in result.log.sources]


def _flagged(steps: Iterable[tuple[int, str]]) -> list[FlaggedStep]:
    return [FlaggedStep(step=step, place=place) for step, place in list(steps)[:MOST_LISTED]]


def _waited(result: RunResult, what: WaitKind) -> dict[str, Any]:
    found = [wait.seconds for wait in result.waits if wait.what == what]
    seconds = [value for value in found if value is not None]
    return {
        "count": len(found),
        "median_seconds": statistics.median(seconds) if seconds else None,
        "longest_seconds": max(seconds, default=None),
        "total_seconds": sum(seconds) if seconds else None,
    }


def _checkpoints(result: RunResult) -> Checkpoints:
    written = result.written_seconds
    return Checkpoints(
        **_waited(result, "checkpoint"),
        written=len(written),
        median_written_seconds=statistics.median(written) if written else None,
    )
