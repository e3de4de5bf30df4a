"""metrics.jsonl: one line per logged step, every float at full precision.

A run that resumes from a checkpoint does again the steps logged after it. The file is append-only: the first
occurrence stays, the second follows with a higher `round`. The last occurrence of a step is the one that led to the
model; `read_metrics` returns that one. A resumed run on the same layout repeats its losses to the bit, and the file
lets anyone check it.

With `logging.every_steps: N` a line stands for a window of N steps: `window_steps` is N, `step_seconds`,
`data_seconds` and every rate are means per step over the window, while `loss`, `grad_norm`, `learning_rate` and
`valid_tokens` are those of the step named.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from drillyard.telemetry.events import has_time
from drillyard.telemetry.jsonlines import read_records

METRICS_FILE: Final = "metrics.jsonl"
_NUMBERS: Final = ("step_seconds", "tokens", "tokens_per_second_per_gpu", "tflops_per_gpu")


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What the trainer knows about a logged step.

    `step` counts from 1 (the number of optimizer steps completed). `tokens` and `valid_tokens` (those that carry loss)
    are of the whole global batch of one step, over all ranks and micro-batches. `step_seconds` is wall time per step,
    checkpoints and evaluations left out; `data_seconds` is the part of it spent waiting for data and `compile_seconds`
    the part spent compiling, if any was. `skipped_steps` counts all steps of the run so far that a non-finite loss or
    gradient turned into no-ops.
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float | None
    step_seconds: float
    tokens: int
    valid_tokens: int
    num_gpus: int
    data_seconds: float | None = None
    compile_seconds: float | None = None
    memory_gib: float | None = None
    skipped_steps: int = 0
    window_steps: int = 1
    epoch: float | None = None


def current_steps(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps that led to where the run is now, in order; `records` are in the order in which they were logged.

    A run that has gone back to an earlier checkpoint has undone the steps after it, also those that it does not do
    again.
    """
    steps: list[dict[str, Any]] = []
    for record in records:
        while steps and steps[-1]["step"] >= record["step"]:
            steps.pop()
        steps.append(record)
    return steps


def is_step(record: Mapping[str, Any]) -> bool:
    """Whether a record is that of a logged step: what every such line has is there, and is a number."""
    if type(record.get("step")) is not int or not has_time(record):
        return False
    return all(isinstance(record.get(name), int | float) for name in _NUMBERS)


def read_steps(run_directory: Path) -> Iterator[dict[str, Any]]:
    """Every logged step in the order of the file, those done again too; torn lines, and those that lack a measure of
    speed (of other writers), are passed over."""
    return filter(is_step, read_records(run_directory / METRICS_FILE))


def read_metrics(run_directory: Path) -> list[dict[str, Any]]:
    """Logged steps in order, each once: see `current_steps`.

    Torn lines are passed over; a directory without metrics.jsonl has no steps. Non-finite losses come back as floats.
    """
    records = [record for record in read_records(run_directory / METRICS_FILE) if isinstance(record.get("step"), int)]
    return current_steps(records)
