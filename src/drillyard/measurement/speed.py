"""Speed of a run by one definition: tokens per second per GPU, TFLOP/s per GPU and MFU from the
typical step time.

    tokens/s/GPU = tokens of a step per GPU / seconds of the median step
    TFLOP/s/GPU  = FLOPs per token under the named formula x tokens/s/GPU / 1e12
    MFU          = TFLOP/s/GPU / the accelerator's dense peak at the run's precision

Where a restart changed the number of GPUs, tokens/s/GPU is the median over the logged steps of each
step's tokens / its seconds / the GPUs it ran on.

Tokens of a step are taken from, in this order: the flags (batch size x sequence length), the lines
of the steps, what the log says of batch and sequence, and as a last resort the rate that the lines
print. FLOPs per token: --config or --params under --formula (6N), what a Drillyard run says of
itself, the number of parameters that the log names, else the TFLOP/s that the lines print, under
the label "as printed". The peak is that of --accelerator, or of the device that the log names where
it is known; at bf16 unless --precision or the log says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from drillyard.errors import UserError
from drillyard.formatting import count
from drillyard.hardware import Accelerator, Catalog
from drillyard.measurement.formats.drillyard import Drillyard
from drillyard.measurement.gpu_counts import gpu_changes, gpus_by_row
from drillyard.measurement.log_totals import FLOS, tflops_of_run, totals_contradict
from drillyard.measurement.parsed_log import ParsedLog
from drillyard.measurement.printed_rates import LARGEST_RATE, contradictions
from drillyard.measurement.step_times import Timing, quantiles
from drillyard.measurement.user_facts import PRECISIONS, Figures, UserFacts, flag_conflicts
from drillyard.modelspec import (
    Formula,
    flops_per_token,
    formula_label,
    implausible_mfu,
    model_spec,
    read_config,
    spec_from_counts,
)

DEFAULT_FORMULA: Final[Formula] = "6N"
DEFAULT_PRECISION: Final = "bf16"
PRINTED_RATE: Final = "the rate as printed"
AS_PRINTED: Final = "as printed"
_IDLE_EXPERTS: Final = 1.5
"""Factor by which 6N over a log's parameters exceeds its printed TFLOP/s when not all parameters
are active: between the formulas for dense models lies less."""


@dataclass(slots=True, kw_only=True)
class Speed(Figures):
    """The rates of a run with everything they rest on."""

    num_gpus: int | None = None
    """The last of `num_gpus_changes`."""
    num_gpus_changes: tuple[int, ...] = ()
    """The numbers of GPUs of the run, or of the range of steps asked for, in order."""
    row_gpus: NDArray[np.int64] | None = None
    """The number of GPUs of each row of the log's steps (0: not known), where it changed."""
    row_tokens_per_gpu: NDArray[np.float64] | None = None
    """Tokens of a step per GPU by row of the log's steps, where the number of GPUs changed."""
    sequence_length: int | None = None
    tokens_per_step: float | None = None
    tokens_per_step_per_gpu: float | None = None
    tokens_per_second_per_gpu: float | None = None
    tokens_from: str | None = None
    parameters: float | None = None
    flops_per_token: float | None = None
    formula: str | None = None
    tflops_per_gpu: float | None = None
    accelerator: str | None = None
    precision: str = DEFAULT_PRECISION
    precision_from: str = "default"
    peak_flops: float | None = None
    mfu: float | None = None
    printed_tokens_per_second_per_gpu: float | None = None
    printed_tflops_per_gpu: float | None = None
    printed_mfu: float | None = None
    warnings: list[str] = field(default_factory=list)


def speed(log: ParsedLog, timing: Timing, asked: UserFacts, catalog: Catalog) -> Speed:
    """The speed of a run. Raises UserError for flags that contradict each other or name what is not
    known."""
    found = Speed(sequence_length=asked.sequence_length or log.facts.sequence_length)
    _gpus(found, log, timing, asked)
    for name in ("printed_tokens_per_second_per_gpu", "printed_tflops_per_gpu", "printed_mfu"):
        setattr(found, name, _median_printed(log, timing, name))
    _tokens(found, log, timing, asked)
    _flops(found, log, asked)
    found.warnings[:0] = flag_conflicts(log, asked, catalog, found.parameters)
    _rates(found, log, timing, asked, _peak(found, log, asked, catalog))
    known = None if found.tokens_from == PRINTED_RATE else found.tokens_per_step_per_gpu
    found.warnings += totals_contradict(log, timing.times.typical)
    found.warnings += contradictions(log, timing, known, _row_work(found))
    return found


def _gpus(found: Speed, log: ParsedLog, timing: Timing, asked: UserFacts) -> None:
    """The numbers of GPUs of the run, or of the range of steps asked for."""
    rows = gpus_by_row(log)
    in_range = asked.start_step is not None or asked.end_step is not None
    if asked.num_gpus is not None:
        found.num_gpus_changes = (asked.num_gpus,)
    elif in_range and timing.kept is not None:
        found.num_gpus_changes = gpu_changes(rows[timing.kept.rows].tolist())
    else:
        found.num_gpus_changes = gpu_changes(rows.tolist())
    if not found.num_gpus_changes and log.facts.num_gpus is not None:
        found.num_gpus_changes = (log.facts.num_gpus,)
    found.num_gpus = next(reversed(found.num_gpus_changes), None)
    if len(found.num_gpus_changes) > 1:
        found.row_gpus = rows
    elif log.facts.other_gpus and asked.num_gpus is None and log.format != Drillyard.name:
        others = ", ".join(f"{number:,}" for number in log.facts.other_gpus)
        found.warnings.append(
            f"the log states {found.num_gpus:,} GPUs first ({log.facts.places['num_gpus']}) and"
            f" {others} later: every figure counts {found.num_gpus:,}; for the steps of one start"
            " give --num-gpus with --start-step and --end-step"
        )


def median_of_rows(timing: Timing, values: NDArray[np.float64]) -> float | None:
    """The median over the steps that count of values by row of the log's steps; None where none of
    them has one."""
    if timing.kept is None:
        return None
    chosen = values[timing.kept.rows]
    known = np.isfinite(chosen)
    if not known.any():
        return None
    return quantiles(chosen[known], timing.kept.weight[known], (0.5,))[0]


def _median_printed(log: ParsedLog, timing: Timing, column: str) -> float | None:
    """The median of a printed rate over the steps that count (over all, where no step has a
    duration); None where none is in the range asked for."""
    values = getattr(log.steps, column)
    if timing.kept is not None:
        values = values[timing.kept.rows]
    elif timing.all is not None:
        return None
    values = values[(values >= 0) & (values < LARGEST_RATE)]
    return float(np.median(values)) if len(values) else None


def _tokens(found: Speed, log: ParsedLog, timing: Timing, asked: UserFacts) -> None:
    """Tokens of a step, of all GPUs and of one, and where that is known from."""
    facts, gpus, length = log.facts, found.num_gpus, found.sequence_length
    batch, of_gpu = asked.global_batch_size, asked.batch_size_per_gpu
    if None not in (batch, of_gpu, gpus) and batch != (of_gpu or 0) * (gpus or 0):
        raise UserError(
            f"--global-batch-size {batch} is not --batch-size-per-gpu {of_gpu} x {gpus} GPUs: give"
            " one of them."
        )
    by_line = _median_printed(log, timing, "tokens")
    samples = _median_printed(log, timing, "samples")
    if batch is not None or of_gpu is not None:
        found.tokens_from = "flags"
        if length is None:
            found.lacks("tokens_per_step", "the batch is given in sequences", "--sequence-length")
        elif of_gpu is not None:
            found.tokens_per_step_per_gpu = float(of_gpu * length)
        elif batch is not None:
            found.tokens_per_step = float(batch * length)
    elif by_line is not None:
        found.tokens_from, found.tokens_per_step = "the log's tokens", by_line
    elif facts.tokens_per_step is not None:
        found.tokens_from, found.tokens_per_step = "the log's tokens", float(facts.tokens_per_step)
    elif length is not None and (facts.global_batch_size is not None or samples is not None):
        found.tokens_from = "the log's batch size"
        found.tokens_per_step = length * (
            samples if samples is not None else float(facts.global_batch_size or 0)
        )
    if gpus is not None and found.tokens_per_step_per_gpu is not None:
        found.tokens_per_step = found.tokens_per_step_per_gpu * gpus
    elif gpus is not None and found.tokens_per_step is not None:
        found.tokens_per_step_per_gpu = found.tokens_per_step / gpus
    if found.row_gpus is not None and found.tokens_per_step is not None:
        _tokens_of_rows(found, log, timing, asked)


def _tokens_of_rows(found: Speed, log: ParsedLog, timing: Timing, asked: UserFacts) -> None:
    """Tokens of a step where the number of GPUs changed: by row, and the medians of all."""
    assert found.row_gpus is not None
    gpus = np.where(found.row_gpus > 0, found.row_gpus, np.nan)
    if found.tokens_from == "flags" and asked.batch_size_per_gpu is not None:
        per_gpu = np.full(len(gpus), found.tokens_per_step_per_gpu) * (gpus / gpus)
    elif found.tokens_from == "the log's tokens":
        per_gpu = np.where(log.steps.tokens < LARGEST_RATE, log.steps.tokens, np.nan) / gpus
    else:
        per_gpu = found.tokens_per_step / gpus
    found.row_tokens_per_gpu = per_gpu
    found.tokens_per_step_per_gpu = median_of_rows(timing, per_gpu)
    found.tokens_per_step = median_of_rows(timing, per_gpu * gpus)


def _flops(found: Speed, log: ParsedLog, asked: UserFacts) -> None:
    facts, formula = log.facts, asked.formula or DEFAULT_FORMULA
    if asked.config is not None:
        spec = model_spec(read_config(asked.config), source=str(asked.config), published=True)
        found.warnings += spec.notes
    elif asked.params is not None:
        spec = spec_from_counts(asked.params, asked.active_params)
    elif (
        facts.flops_per_token is not None
        and facts.formula is not None
        and asked.formula in (None, facts.formula)
    ):
        found.flops_per_token, found.formula, found.parameters = (
            facts.flops_per_token,
            facts.formula,
            facts.parameters,
        )
        return
    elif formula != DEFAULT_FORMULA:
        found.lacks("tflops_per_gpu", f"formula {formula} needs the model's layers", "--config")
        return
    elif facts.parameters is not None:
        spec = spec_from_counts(round(facts.parameters))
    else:
        return
    if formula != DEFAULT_FORMULA and spec.blocks and found.sequence_length is None:
        found.lacks("tflops_per_gpu", f"formula {formula} counts attention", "--sequence-length")
        return
    found.parameters = float(spec.total_parameters)
    trained = None if asked.params or asked.config else facts.trainable_parameters
    adapters = None
    if trained is not None and facts.parameters is not None and trained < facts.parameters:
        spec, adapters = spec_from_counts(round(facts.parameters - trained)), round(trained)
    found.formula = formula_label(formula, adapters=adapters is not None)
    found.flops_per_token = flops_per_token(
        spec, formula, found.sequence_length or 1, adapter_parameters=adapters
    )


def _peak(found: Speed, log: ParsedLog, asked: UserFacts, catalog: Catalog) -> Accelerator | None:
    """The accelerator, the precision, and the peak of the one at the other."""
    facts = log.facts
    if (stated := asked.precision or facts.precision) is not None:
        found.precision = PRECISIONS.get(stated.lower(), stated.lower())
        found.precision_from = "flag" if asked.precision else "log"
    if asked.precision is not None:
        precisions = sorted(
            {name for one in catalog.accelerators.values() for name in one.peak_tflops}
        )
        if found.precision not in precisions:
            raise UserError(
                f"--precision {asked.precision}: not known; choose one of {', '.join(precisions)}."
            )
    if asked.accelerator is not None:
        accelerator: Accelerator | None = catalog.accelerator(asked.accelerator)
    else:
        accelerator = (
            None if facts.accelerator is None else catalog.find_accelerator(facts.accelerator)
        )
    flags: tuple[str, ...] = ("--accelerator",)
    if accelerator is None:
        found.accelerator, found.peak_flops = facts.accelerator, facts.peak_flops
        reason = "the log does not say on which accelerator it ran"
        if facts.accelerator:
            reason = f"the log names {facts.accelerator!r}, of which no peak is known"
    else:
        found.accelerator, peak = accelerator.name, accelerator.peak(found.precision)
        found.peak_flops = None if peak is None else peak.value
        if peak is not None and peak.unverified:
            found.warnings.append(
                f"the {found.precision} peak of {accelerator.name} is not confirmed by its vendor"
            )
        reason = f"no {found.precision} peak of {accelerator.name} is known"
        flags = ("--precision", "--hardware") if accelerator.peak_tflops else flags
    if found.peak_flops is None:
        found.lacks("mfu", reason, *flags)
        found.lacks("peak_tflops", reason, *flags)
    return accelerator


def _rates(
    found: Speed, log: ParsedLog, timing: Timing, asked: UserFacts, accelerator: Accelerator | None
) -> None:
    typical = timing.times.typical
    if found.tokens_per_step_per_gpu is None and found.tokens_from in (None, "the log's tokens"):
        _tokens_of_printed_rate(found, log, timing)
    if typical is not None and found.tokens_per_step_per_gpu is not None:
        found.tokens_per_second_per_gpu = found.tokens_per_step_per_gpu / typical
    if timing.kept is not None and found.row_tokens_per_gpu is not None:
        seconds = np.full(len(log.steps), np.nan)
        seconds[timing.kept.rows] = timing.kept.seconds
        found.tokens_per_second_per_gpu = median_of_rows(timing, found.row_tokens_per_gpu / seconds)
    _say_what_is_missing(found, typical, has_flops=tflops_of_run(log, found.num_gpus) is not None)
    rate = found.tokens_per_second_per_gpu
    _set_aside_idle_experts(found, rate, asked)
    if (
        found.flops_per_token is None
        and found.printed_tflops_per_gpu is not None
        and found.formula is None
    ):
        found.formula, found.tflops_per_gpu = AS_PRINTED, found.printed_tflops_per_gpu
    elif found.flops_per_token is None and found.formula is None:
        found.tflops_per_gpu = tflops_of_run(log, found.num_gpus)
        found.formula = None if found.tflops_per_gpu is None else FLOS
    if found.tflops_per_gpu is not None and found.peak_flops:
        found.mfu = found.tflops_per_gpu * 1e12 / found.peak_flops
    if found.flops_per_token is None or rate is None:
        return
    flops = found.flops_per_token * rate
    found.tflops_per_gpu = flops / 1e12
    if found.peak_flops is not None:
        found.mfu = flops / found.peak_flops
        reached = accelerator.achievable(found.precision) if accelerator is not None else None
        best = None if reached is None else reached.value / found.peak_flops
        if (warning := implausible_mfu(found.mfu, found.precision, best)) is not None:
            found.warnings.append(f"MFU {warning}")


def _tokens_of_printed_rate(found: Speed, log: ParsedLog, timing: Timing) -> None:
    """Tokens of a step per GPU from the rates that the lines print beside their durations."""
    if found.printed_tokens_per_second_per_gpu is None:
        return
    found.tokens_from = PRINTED_RATE
    found.tokens_per_second_per_gpu = found.printed_tokens_per_second_per_gpu
    if timing.kept is None:
        return
    rates = log.steps.printed_tokens_per_second_per_gpu[timing.kept.rows]
    usable = (rates >= 0) & (rates < LARGEST_RATE)
    found.tokens_per_step_per_gpu = float(np.median(rates[usable] * timing.kept.seconds[usable]))
    if found.row_gpus is not None:
        gpus = found.row_gpus[timing.kept.rows][usable]
        work = rates[usable] * timing.kept.seconds[usable] * gpus
        found.tokens_per_step = float(np.median(work))
    elif found.num_gpus is not None:
        found.tokens_per_step = found.tokens_per_step_per_gpu * found.num_gpus


def _set_aside_idle_experts(found: Speed, rate: float | None, asked: UserFacts) -> None:
    """6N over all parameters of a mixture of experts is no measure; then what the lines print is a
    better one."""
    printed = found.printed_tflops_per_gpu
    if (
        asked.params
        or asked.config
        or rate is None
        or printed is None
        or found.flops_per_token is None
    ):
        return
    tflops = found.flops_per_token * rate / 1e12
    if tflops > _IDLE_EXPERTS * printed:
        found.warnings.append(
            f"{found.formula} over the {count(found.parameters or 0)} parameters that the log names"
            f" would be {tflops:.4g} TFLOP/s, and it prints {printed:.4g}: a mixture of experts?"
            " Give --params, --active-params."
        )
        found.flops_per_token = found.formula = found.parameters = None


def _say_what_is_missing(found: Speed, typical: float | None, *, has_flops: bool) -> None:
    if found.tokens_per_second_per_gpu is None:
        if typical is None:
            found.lacks("tokens_per_second_per_gpu", "no step has a duration")
        elif found.tokens_per_step is not None:
            found.lacks(
                "tokens_per_second_per_gpu",
                "the log does not say on how many GPUs it ran",
                "--num-gpus",
            )
        else:
            batch = (
                ()
                if found.tokens_from == "flags"
                else ("--batch-size-per-gpu", "--global-batch-size")
            )
            wanted = batch if found.sequence_length else (*batch, "--sequence-length")
            found.lacks(
                "tokens_per_second_per_gpu",
                "the log does not say how many tokens a step has",
                *wanted,
            )
    lacking = (
        found.flops_per_token is None and found.printed_tflops_per_gpu is None and not has_flops
    )
    if lacking and not any(missing.field == "tflops_per_gpu" for missing in found.missing):
        found.lacks(
            "tflops_per_gpu",
            "the log does not say how many parameters the model has",
            "--params",
            "--config",
        )
    elif found.tokens_per_second_per_gpu is None and found.flops_per_token is not None:
        found.lacks(
            "tflops_per_gpu",
            "tokens per second are not known",
            *found.flags_for("tokens_per_second_per_gpu"),
        )
    for name, flags, reason in list(found.missing):
        if name == "tflops_per_gpu":
            found.lacks("mfu", reason, *flags)


def _row_work(found: Speed) -> NDArray[np.float64] | None:
    """What the work of a step on one GPU is proportional to, by row of the log's steps, where the
    number of GPUs changed."""
    if found.row_tokens_per_gpu is not None or found.row_gpus is None:
        return found.row_tokens_per_gpu
    return 1 / np.where(found.row_gpus > 0, found.row_gpus, np.nan)
