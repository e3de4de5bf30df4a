"""metrics.jsonl: one line per logged step, every float at full precision, with the rates that
follow from it.

A run that resumes from a checkpoint repeats the steps logged after it. The file is append-only: the
first occurrence stays, the second follows with a higher `round`. The last occurrence of a step is
the one that led to the model; `read_metrics` returns that one. A run resumed on the same layout
repeats its losses to the bit, and the file shows it.

With `logging.every_steps: N` a line stands for a window of N steps: `window_steps` is N,
`step_seconds`, `data_seconds` and every rate are means per step over the window, while `loss`,
`grad_norm`, `learning_rate` and `valid_tokens` are those of the step named.

TFLOP/s and MFU use the PerfLogger's formula, 6 N (N: active parameters in a mixture of experts),
without attention. Frozen weights (LoRA) need no weight gradients: 4 FLOPs per frozen and 6 per
trained parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypedDict

from drillyard.telemetry.events import has_time
from drillyard.telemetry.jsonlines import read_records

if TYPE_CHECKING:
    from drillyard.hardware import Accelerator

METRICS_FILE: Final = "metrics.jsonl"
_NUMBERS: Final = ("step_seconds", "tokens", "tokens_per_second_per_gpu", "tflops_per_gpu")


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Figures of a logged step.

    `step` counts from 1 (the number of optimizer steps completed). `tokens` and `valid_tokens`
    (those that carry loss) are of the whole global batch of one step, over all ranks and
    micro-batches. `step_seconds` is wall time per step without checkpoints and evaluations;
    `data_seconds` is the part of it spent waiting for data and `compile_seconds` the part spent
    compiling. `skipped_steps` counts all steps of the run so far that a non-finite loss or gradient
    turned into no-ops.
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


def is_step(record: Mapping[str, Any]) -> bool:
    """Whether a record is a logged step: it has all fields that every such line has, as numbers."""
    if type(record.get("step")) is not int or not has_time(record):
        return False
    return all(isinstance(record.get(name), int | float) for name in _NUMBERS)


def read_steps(run_directory: Path) -> Iterator[dict[str, Any]]:
    """Every logged step in file order, repeated ones too; torn lines and lines without a rate are
    skipped."""
    return filter(is_step, read_records(run_directory / METRICS_FILE))


def read_metrics(run_directory: Path) -> list[dict[str, Any]]:
    """The logged steps that led to the run's present state, in order. Empty without metrics.jsonl.

    Going back to an earlier checkpoint undoes all steps after it, also those that the run does not
    repeat.
    """
    steps: list[dict[str, Any]] = []
    for record in read_records(run_directory / METRICS_FILE):
        if isinstance(record.get("step"), int):
            while steps and steps[-1]["step"] >= record["step"]:
                steps.pop()
            steps.append(record)
    return steps


@dataclass(frozen=True, slots=True)
class ThroughputFormula:
    """Conversion of tokens per second to TFLOP/s and MFU.

    `peak_flops` is the accelerator's dense peak at `precision` in FLOP/s; without a known one there
    is no MFU.
    """

    formula: str
    flops_per_token: float
    peak_flops: float | None

    def rates(self, record: StepRecord) -> dict[str, Any]:
        """Tokens/s and TFLOP/s per GPU of a step, its MFU as a fraction (None without a peak), and
        the formula."""
        tokens_per_second_per_gpu = record.tokens / record.step_seconds / record.num_gpus
        flops = tokens_per_second_per_gpu * self.flops_per_token
        return {
            "tokens_per_second_per_gpu": tokens_per_second_per_gpu,
            "tflops_per_gpu": flops / 1e12,
            "mfu": None if self.peak_flops is None else flops / self.peak_flops,
            "formula": self.formula,
        }


class ModelDescription(TypedDict):
    """The arguments of RunLog.parameters."""

    count: int
    trainable: int
    formula: str
    flops_per_token: float
    accelerator: Accelerator | None
    precision: str


def describe_model(
    config: Mapping[str, Any], *, count: int, trainable: int, device: str, precision: str
) -> ModelDescription:
    """The arguments of RunLog.parameters.

    `config` is the model's config.json, `count` and `trainable` its parameters (adapters included),
    `device` the driver's name of the accelerator. All parameters of a family that modelspec does
    not know count as active.
    """
    from drillyard.hardware import find_accelerator
    from drillyard.modelspec import all_families, model_spec

    idle = 0
    if config.get("model_type") in all_families():
        spec = model_spec(config, built=True)
        idle = spec.total_parameters - spec.active_parameters
    full = trainable == count
    return ModelDescription(
        count=count,
        trainable=trainable,
        formula="6N" if full else "4N frozen + 6N trained",
        flops_per_token=6.0 * (count - idle)
        if full
        else 4.0 * (count - trainable - idle) + 6.0 * trainable,
        accelerator=find_accelerator(device),
        precision=precision,
    )
