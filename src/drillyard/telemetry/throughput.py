"""The ruler of a run: what turns its tokens per second into TFLOP/s and MFU, named wherever these are shown.

The formula is the PerfLogger's, 6 N (active parameters in a mixture of experts), because its figures are comparable
across the field; attention is left out. With frozen weights (LoRA) the gradients of the frozen ones are not computed:
4 FLOPs per frozen and 6 per trained parameter. The other formulas of modelspec can be had from the same logs later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from drillyard.hardware import Accelerator
    from drillyard.telemetry.metrics import StepRecord


@dataclass(frozen=True, slots=True)
class ThroughputFormula:
    """How a run's speed becomes TFLOP/s and MFU.

    `flops_per_token` follows the named formula; `peak_flops` is the accelerator's dense peak at `precision` in FLOP/s,
    None where it is not known: then there is no MFU.
    """

    formula: str
    flops_per_token: float
    accelerator: str | None
    precision: str
    peak_flops: float | None


class ModelDescription(TypedDict):
    """The arguments of RunLog.parameters."""

    count: int
    trainable: int
    formula: str
    flops_per_token: float
    accelerator: Accelerator | None
    precision: str


def describe_model(
    config: Mapping[str, Any], *, count: int, trainable: int, device: str, precision: str, sequence_length: int
) -> ModelDescription:
    """What RunLog.parameters wants to know about a model.

    `config` is its config.json, `count` and `trainable` are its parameters (adapters included), `device` is the name
    that the driver reports. Of a family that modelspec does not know all parameters are taken as active.
    `sequence_length` plays no part in the formula used.
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
        flops_per_token=6.0 * (count - idle) if full else 4.0 * (count - trainable - idle) + 6.0 * trainable,
        accelerator=find_accelerator(device),
        precision=precision,
    )


def derive(record: StepRecord, ruler: ThroughputFormula) -> dict[str, Any]:
    """The rates of a step: tokens/s and TFLOP/s per GPU, MFU as a fraction (None without a known peak), its formula."""
    tokens_per_second_per_gpu = record.tokens / record.step_seconds / record.num_gpus
    flops = tokens_per_second_per_gpu * ruler.flops_per_token
    return {
        "tokens_per_second_per_gpu": tokens_per_second_per_gpu,
        "tflops_per_gpu": flops / 1e12,
        "mfu": None if ruler.peak_flops is None else flops / ruler.peak_flops,
        "formula": ruler.formula,
    }
