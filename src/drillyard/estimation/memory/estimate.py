"""Memory per rank, before anything runs: `memory_estimate(setup)`.

The step is run in a model of eager PyTorch and FSDP2 in which tensors have sizes and no contents (step_memory.py). On
a CPU,
in eager mode, what comes out is what torch's own FSDPMemTracker measures of the trainer's step: state to the byte, the
rest within half a percent (tests/distributed/test_memory_tracker.py). What a GPU adds, and what compiled blocks,
selective checkpointing and fused kernels leave open, are terms with a range (device.py).

Cost: about a millisecond for each kind of block, whatever the number of layers. Limits: every position carries loss
(fewer need less); dropout is not counted; the rank predicted is 0, whose shards are never the smaller ones; a model
that is known by its number of parameters only is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from drillyard.errors import UserError
from drillyard.estimation.memory.device import GIB, PARTITION, POLICY, of_gpu, ranged
from drillyard.estimation.memory.ledger import MemoryKind
from drillyard.estimation.memory.step_memory import StepMemory
from drillyard.estimation.quantity import Quantity, Range, quantity
from drillyard.estimation.setup import Setup
from drillyard.hardware.facts import FactSource

FSDP2: Final = FactSource("torch/distributed/fsdp/_fully_shard, torch 2.11 to 2.15", "2026-11")
AUTOGRAD: Final = FactSource("torch tools/autograd/derivatives.yaml; transformers 5, models/*/modeling_*.py", "2026-11")
TRAINER: Final = FactSource("drillyard models/loss.py, training/trainer.py and training/optimizer.py", None)

PARTS: Final[tuple[tuple[str, tuple[MemoryKind, ...], str, FactSource], ...]] = (
    (
        "parameters",
        (MemoryKind.PARAMETERS, MemoryKind.BUFFERS),
        "shards in master precision, rows padded to the ranks",
        FSDP2,
    ),
    (
        "gradients",
        (MemoryKind.GRADIENTS, MemoryKind.WHOLE_GRADIENTS),
        "of shards, and of whole weights until reduced",
        FSDP2,
    ),
    ("optimizer state", (MemoryKind.OPTIMIZER,), "two moments of each trained shard, a step count per tensor", TRAINER),
    ("gathered weights", (MemoryKind.GATHERED,), "whole in compute precision: root, and the block that runs", FSDP2),
    (
        "communication buffers",
        (MemoryKind.ALL_GATHER, MemoryKind.REDUCE_SCATTER),
        "gathers one block ahead, reduction",
        FSDP2,
    ),
    ("inputs and masks", (MemoryKind.INPUTS,), "tokens, positions, targets, masks, rotary tables", TRAINER),
    ("activations", (MemoryKind.ACTIVATIONS,), "saved for backward, and a layer that is recomputed", AUTOGRAD),
    (
        "logits and loss",
        (MemoryKind.LOSS,),
        "a chunk's logits, log-softmax and gradients; gradients of hidden rows",
        TRAINER,
    ),
    ("temporaries", (MemoryKind.TEMPORARIES,), "gradients of activations and what is made between them", AUTOGRAD),
)

COMPARED: Final = frozenset(
    {
        "cohere",
        "cohere2",
        "gemma2",
        "gemma3_text",
        "gpt2",
        "granite",
        "llama",
        "mistral",
        "mixtral",
        "olmo2",
        "olmo3",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "smollm3",
    }
)
"""Model types whose prediction was compared with the tracker's measurement of the trainer's step."""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Memory of the rank that needs most, at the moment when it needs most.

    `parts` are in GiB and add up to `total`, their low ends to its low end and their high ends to its high end.
    `peak_at` names the moment; `moments` has the most bytes of each phase of a step, without what a GPU adds.
    `state_bytes` are exact: parameters, gradients and optimizer state of this rank's shards, and how much of the
    parameters is padding.
    """

    parts: tuple[Range | Quantity, ...]
    total: Range
    peak_at: str
    moments: dict[str, int]
    state_bytes: dict[str, int]
    notes: tuple[str, ...] = ()

    def part(self, name: str) -> Range | Quantity:
        """The part of that name; KeyError where there is none."""
        for part in self.parts:
            if (part.low if isinstance(part, Range) else part).name == name:
                return part
        raise KeyError(name)

    def as_json(self) -> dict[str, Any]:
        """Parts and total as low and high terms, the moments and the exact bytes."""
        return {
            "total": _as_json(self.total),
            "peak_at": self.peak_at,
            "parts": [_as_json(part) for part in self.parts],
            "moments_bytes": dict(self.moments),
            "state_bytes": dict(self.state_bytes),
            "notes": list(self.notes),
        }


def memory_estimate(
    setup: Setup, *, keeps_unsharded: bool | None = None, device_type: Literal["cuda", "cpu"] | None = None
) -> MemoryEstimate:
    """What one rank needs for a step of `setup`. Pure, without torch.

    `keeps_unsharded` and `device_type` override the setup's own. Raises UserError for a model without blocks (only its
    number of parameters is known) and for one with linear attention.
    """
    if not setup.spec.blocks:
        raise UserError(
            "memory cannot be predicted for a model of which only the number of parameters is known\n"
            "give its config.json by --config FILE in place of --params"
        )
    if any(block.attention.kind == "linear" for block in setup.spec.blocks):
        raise UserError(f"memory cannot be predicted for {setup.spec.model_type}: its linear attention is not modelled")
    keeps = setup.keeps_unsharded if keeps_unsharded is None else keeps_unsharded
    step = StepMemory(setup, keeps_unsharded=keeps)
    parts: list[Range | Quantity] = [_part(step, *row) for row in PARTS]
    if setup.activation_checkpointing == "selective":
        parts.append(_selective(setup, step, keeps))
    if setup.compiled:
        parts.append(_compiled(setup, step, keeps))
    if (device_type or setup.device_type) == "cuda":
        parts += of_gpu(setup, step)
    return MemoryEstimate(
        tuple(parts), _total(parts), step.moment, dict(step.moments), _state_bytes(step), _notes(setup)
    )


def by_checkpointing(setup: Setup, *, device_type: Literal["cuda", "cpu"] | None = None) -> dict[str, MemoryEstimate]:
    """The same step with each mode of activation checkpointing, by its name."""
    modes: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
    return {
        mode: memory_estimate(replace(setup, activation_checkpointing=mode), device_type=device_type) for mode in modes
    }


def _part(step: StepMemory, name: str, kinds: tuple[MemoryKind, ...], formula: str, source: FactSource) -> Quantity:
    return quantity(name, sum(step.ledger.at_peak[kind] for kind in kinds) / GIB, "GiB", formula, source)


def _selective(setup: Setup, step: StepMemory, keeps: bool) -> Range:
    """Whether a kernel adds or hides a product moves the policy's count by one: then it keeps the other half."""
    other = StepMemory(setup, keeps_unsharded=keeps, skips_first_product=True).ledger.peak - step.ledger.peak
    formula = "the other half of the products kept instead"
    return ranged("selective policy", min(0, other), max(0, other), formula, POLICY, POLICY)


def _compiled(setup: Setup, step: StepMemory, keeps: bool) -> Range:
    """Compiled blocks keep at least what products and attention need, and at most what eager ones do."""
    fused = StepMemory(setup, keeps_unsharded=keeps, fuses=True).ledger.peak - step.ledger.peak
    formula = "at least the inputs of products and attention, at most what eager blocks keep"
    return ranged("compiled blocks", min(0, fused), 0, formula, PARTITION, PARTITION)


def _total(parts: list[Range | Quantity]) -> Range:
    lows = [part.low if isinstance(part, Range) else part for part in parts]
    highs = [part.high if isinstance(part, Range) else part for part in parts]
    formula = "sum of the parts at the peak"
    low, high = (
        quantity("memory per rank", sum(one.value for one in ends), "GiB", formula, *ends) for ends in (lows, highs)
    )
    return Range(low, high)


def _state_bytes(step: StepMemory) -> dict[str, int]:
    units = step.units
    trained = sum(u.trained_shard for u in units)
    return {
        "parameters": sum(u.shard for u in units) * step.master,
        "gradients": trained * step.master,
        "optimizer": step.optimizer_bytes,
        "padding": sum(u.padding for u in units) * step.master // step.setup.shard,
    }


def _notes(setup: Setup) -> tuple[str, ...]:
    if setup.spec.model_type in COMPARED:
        return setup.spec.notes
    return (*setup.spec.notes, f"activations of {setup.spec.model_type} are predicted by its parts, compared with none")


def _as_json(part: Range | Quantity) -> dict[str, Any]:
    if isinstance(part, Quantity):
        return part.as_json()
    return {"name": part.low.name, "low": part.low.as_json(), "high": part.high.as_json()}
