"""Flags that say something else than the log: the figure follows the flag, and a warning names what the log says.

A batch can be said in four ways (sequences of all GPUs or of one, in the log's header or on each line; tokens on each
line), so both sides are brought to the same unit before they are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from drillyard.hardware import Catalog
from drillyard.measurement.parsed_log import ParsedLog
from drillyard.measurement.user_facts import UserFacts
from drillyard.telemetry.console import count

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
"""Tokens on lines may leave out padding and masked ones: fewer than batch x length by more than this are told."""


class _Said(NamedTuple):
    """A number with the place in the log that says it."""

    value: float
    place: str


def flag_conflicts(log: ParsedLog, asked: UserFacts, catalog: Catalog, parameters: float | None) -> Iterator[str]:
    """One sentence per flag that the log contradicts. `parameters`: of the model that --params or --config name."""
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
        ("--batch-size-per-gpu", asked.batch_size_per_gpu, "batch_size_per_gpu"),
    ):
        stated = getattr(log.facts, name)
        if value is not None and stated is not None and value != stated:
            yield f"{flag} {value} is used; the log says {stated} ({_place(log, name)})"


def _batch(log: ParsedLog, asked: UserFacts) -> Iterator[str]:
    """The sequences of a step by the flags and by the log; where the log has no such number, the tokens of a step."""
    gpus = asked.num_gpus or log.facts.num_gpus
    if asked.global_batch_size is not None:
        named, sequences = f"--global-batch-size {asked.global_batch_size}:", asked.global_batch_size
    elif asked.batch_size_per_gpu is not None and gpus is not None:
        named = f"--batch-size-per-gpu {asked.batch_size_per_gpu} on {gpus} GPUs:"
        sequences = asked.batch_size_per_gpu * gpus
    else:
        return
    logged = _sequences(log, gpus)
    if logged is not None:
        if abs(sequences / logged.value - 1) > ROUNDING:
            yield f"{named} {sequences:g} sequences a step are used; the log says {logged.value:g} ({logged.place})"
        return
    length, tokens = asked.sequence_length or log.facts.sequence_length, _tokens(log)
    if length is None or tokens is None:
        return
    share = tokens.value / (sequences * length)
    if share > 1 + ROUNDING or share < 1 - PADDING:
        yield (
            f"{named} {sequences * length:g} tokens a step are used ({length} a sequence); "
            f"the log says {tokens.value:g} ({tokens.place})"
        )


def _sequences(log: ParsedLog, gpus: int | None) -> _Said | None:
    """Sequences of all GPUs in a step."""
    on_lines = _median(log, "samples")
    if on_lines is not None:
        return on_lines
    facts = log.facts
    if facts.global_batch_size is not None:
        return _Said(facts.global_batch_size, _place(log, "global_batch_size"))
    if facts.batch_size_per_gpu is not None and gpus is not None:
        return _Said(facts.batch_size_per_gpu * gpus, _place(log, "batch_size_per_gpu"))
    return None


def _tokens(log: ParsedLog) -> _Said | None:
    """Tokens of all GPUs in a step."""
    stated = log.facts.tokens_per_step
    return _median(log, "tokens") or (None if stated is None else _Said(stated, _place(log, "tokens_per_step")))


def _median(log: ParsedLog, column: str) -> _Said | None:
    values = getattr(log.steps, column)
    rows = np.flatnonzero((values > 0) & np.isfinite(values))
    return _Said(float(np.median(values[rows])), log.place(int(rows[0]))) if len(rows) else None


def _model_and_hardware(log: ParsedLog, asked: UserFacts, catalog: Catalog, parameters: float | None) -> Iterator[str]:
    facts = log.facts
    if asked.precision is not None and facts.precision is not None:
        given, stated = (PRECISIONS.get(one.lower(), one.lower()) for one in (asked.precision, facts.precision))
        if given != stated:
            yield f"--precision {asked.precision} is used; the log says {facts.precision} ({_place(log, 'precision')})"
    if asked.accelerator is not None and facts.accelerator is not None:
        device = catalog.find_accelerator(facts.accelerator)
        if device is not None and device.name != catalog.accelerator(asked.accelerator).name:
            place = _place(log, "accelerator")
            yield f"--accelerator {asked.accelerator} is used; the log says {facts.accelerator} ({place})"
    flag = "--params" if asked.params is not None else "--config" if asked.config is not None else None
    stated_parameters = facts.parameters
    if flag is None or parameters is None or stated_parameters is None:
        return
    if abs(parameters / stated_parameters - 1) > ROUNDING:
        place = _place(log, "parameters")
        yield f"{flag}: {count(parameters)} parameters are used; the log says {count(stated_parameters)} ({place})"


def _place(log: ParsedLog, name: str) -> str:
    return log.facts.places.get(name, "in it")
