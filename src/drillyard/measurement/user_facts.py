"""Facts given by flags of `drillyard metrics`, what is still missing, and flags that contradict the
log.

A flag goes before the log. Where they differ, the figure follows the flag and a warning names the
line. What neither states is never guessed: the figures that need it are None and `Missing` names
the flag to give.

A batch can be stated in several ways (sequences in the log's header or on each line; tokens on each
line), so flags and log are brought to the same unit before they are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from drillyard.errors import ConfigError
from drillyard.formatting import count
from drillyard.hardware import Catalog
from drillyard.measurement.gpu_counts import gpu_changes, gpus_by_row, gpus_text
from drillyard.measurement.parsed_log import ParsedLog
from drillyard.modelspec import FORMULAS, Formula


class Missing(NamedTuple):
    """A figure (by its name in the JSON) that cannot be had, why not, and which flags would give
    it, if any."""

    field: str
    flags: tuple[str, ...]
    reason: str


@dataclass(slots=True, kw_only=True)
class Figures:
    """Computed figures; None for those that are not known: then `missing` says why."""

    missing: list[Missing] = field(default_factory=list)

    def lacks(self, name: str, reason: str, *flags: str) -> None:
        self.missing.append(Missing(name, flags, reason))

    def flags_for(self, name: str) -> tuple[str, ...]:
        """The flags that would give a missing figure."""
        return next((missing.flags for missing in self.missing if missing.field == name), ())


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFacts:
    """The flags. Batch sizes are sequences per optimizer step; prices are US dollars; times are UTC
    microseconds."""

    accelerator: str | None = None
    num_gpus: int | None = None
    gpus_per_node: int | None = None
    params: int | None = None
    active_params: int | None = None
    config: Path | None = None
    batch_size_per_gpu: int | None = None
    global_batch_size: int | None = None
    sequence_length: int | None = None
    logging_steps: int | None = None
    """Steps between two lines, for logs whose lines carry no step."""
    precision: str | None = None
    formula: Formula | None = None
    price_per_gpu_hour: float | None = None
    price_per_node_hour: float | None = None
    start_step: int | None = None
    end_step: int | None = None
    job_start_us: int | None = None
    job_end_us: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "num_gpus",
            "gpus_per_node",
            "batch_size_per_gpu",
            "global_batch_size",
            "sequence_length",
            "logging_steps",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: give a number above 0.")
        for name in ("price_per_gpu_hour", "price_per_node_hour"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"--{name.replace('_', '-')} {value:g}: give dollars above 0.")
        if self.price_per_gpu_hour is not None and self.price_per_node_hour is not None:
            raise ConfigError("a price is per GPU-hour or per node-hour: give one of them.")
        if self.active_params is not None and self.params is None:
            raise ConfigError(
                "--active-params says how many of the parameters a token uses: give --params too."
            )
        if self.params is not None and self.config is not None:
            raise ConfigError(
                "--params stands for a model whose config is not at hand; give it or --config, not"
                " both."
            )
        if None not in (self.start_step, self.end_step) and (self.start_step or 0) > (
            self.end_step or 0
        ):
            raise ConfigError(
                f"--start-step {self.start_step} is after --end-step {self.end_step}."
            )


def moment_us(flag: str, text: str | None, zone: tzinfo | None) -> int | None:
    """A time of day such as `2026-01-31T12:00:00Z` as UTC microseconds since 1970; without an
    offset it is in `zone` (UTC if None). ConfigError for anything else."""
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(
            f"{flag} {text}: not a time; write it like 2026-01-31T12:00:00Z."
        ) from error
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=zone or UTC)
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def to_formula(name: str | None) -> Formula | None:
    """The formula of this name, in any case. ConfigError for one that is not known."""
    if name is None:
        return None
    found = next((formula for formula in FORMULAS if formula.lower() == name.lower()), None)
    if found is None:
        raise ConfigError(f"--formula {name}: not known; choose one of {', '.join(FORMULAS)}.")
    return found


PRECISIONS: Final = {
    "bfloat16": "bf16",
    "bf16-mixed": "bf16",
    "float16": "fp16",
    "16-mixed": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "float8": "fp8",
    "fp8-hybrid": "fp8",
}
"""Other names of precisions in logs and flags."""
ROUNDING: Final = 0.01
"""A rounded count, such as `70.6B` parameters, is the same within this."""
PADDING: Final = 0.1
"""Tokens on lines may leave out padding and masked ones: fewer than batch x length by more than
this are a warning."""


def flag_conflicts(
    log: ParsedLog, asked: UserFacts, catalog: Catalog, parameters: float | None
) -> Iterator[str]:
    """One sentence per flag that the log contradicts. `parameters`: of the model that --params or
    --config name."""
    direct = list(_same_fact(log, asked))
    yield from direct
    if not any("-batch-size" in text for text in direct):
        yield from _batch(log, asked)
    yield from _model_and_hardware(log, asked, catalog, parameters)


def _same_fact(log: ParsedLog, asked: UserFacts) -> Iterator[str]:
    for flag, value, name in (
        ("--num-gpus", asked.num_gpus, "num_gpus"),
        ("--sequence-length", asked.sequence_length, "sequence_length"),
        ("--global-batch-size", asked.global_batch_size, "global_batch_size"),
    ):
        stated = getattr(log.facts, name)
        shown = str(stated)
        if name == "num_gpus" and len(changes := gpu_changes(gpus_by_row(log).tolist())) > 1:
            stated, shown = changes, gpus_text(changes)
        if value is not None and stated is not None and value != stated:
            yield f"{flag} {value} is used; the log says {shown} ({_place(log, name)})"


def _batch(log: ParsedLog, asked: UserFacts) -> Iterator[str]:
    """The sequences of a step by the flags and by the log; where the log has no such number, the
    tokens of a step."""
    gpus = asked.num_gpus or log.facts.num_gpus
    if asked.num_gpus is None and len(gpu_changes(gpus_by_row(log).tolist())) > 1:
        # The sequences of a step differ with the number of GPUs.
        gpus = None
    if asked.global_batch_size is not None:
        named, sequences = (
            f"--global-batch-size {asked.global_batch_size}:",
            asked.global_batch_size,
        )
    elif asked.batch_size_per_gpu is not None and gpus is not None:
        named = f"--batch-size-per-gpu {asked.batch_size_per_gpu} on {gpus} GPUs:"
        sequences = asked.batch_size_per_gpu * gpus
    else:
        return
    logged, stated = _on_lines(log, "samples"), log.facts.global_batch_size
    if logged is not None or stated is not None:
        value, place = logged or (float(stated or 0), _place(log, "global_batch_size"))
        if abs(sequences / value - 1) > ROUNDING:
            yield (
                f"{named} {sequences:g} sequences a step are used; the log says {value:g} ({place})"
            )
        return
    length = asked.sequence_length or log.facts.sequence_length
    tokens = _on_lines(log, "tokens")
    if length is None or tokens is None:
        return
    value, place = tokens
    share = value / (sequences * length)
    if share > 1 + ROUNDING or share < 1 - PADDING:
        yield (
            f"{named} {sequences * length:g} tokens a step are used ({length} a sequence); "
            f"the log says {value:g} ({place})"
        )


def _on_lines(log: ParsedLog, column: str) -> tuple[float, str] | None:
    """The median of a column with the place of its first value."""
    values = getattr(log.steps, column)
    rows = np.flatnonzero((values > 0) & np.isfinite(values))
    return (float(np.median(values[rows])), log.place(int(rows[0]))) if len(rows) else None


def _model_and_hardware(
    log: ParsedLog, asked: UserFacts, catalog: Catalog, parameters: float | None
) -> Iterator[str]:
    facts = log.facts
    if asked.precision is not None and facts.precision is not None:
        given, stated = (
            PRECISIONS.get(one.lower(), one.lower()) for one in (asked.precision, facts.precision)
        )
        if given != stated:
            yield (
                f"--precision {asked.precision} is used; the log says {facts.precision}"
                f" ({_place(log, 'precision')})"
            )
    if asked.accelerator is not None and facts.accelerator is not None:
        device = catalog.find_accelerator(facts.accelerator)
        if device is not None and device.name != catalog.accelerator(asked.accelerator).name:
            place = _place(log, "accelerator")
            yield (
                f"--accelerator {asked.accelerator} is used; the log says {facts.accelerator}"
                f" ({place})"
            )
    flag = (
        "--params" if asked.params is not None else "--config" if asked.config is not None else None
    )
    if flag is None or parameters is None or facts.parameters is None:
        return
    if abs(parameters / facts.parameters - 1) > ROUNDING:
        place = _place(log, "parameters")
        yield (
            f"{flag}: {count(parameters)} parameters are used; the log says"
            f" {count(facts.parameters)} ({place})"
        )


def _place(log: ParsedLog, name: str) -> str:
    return log.facts.places.get(name, "in it")
