"""Memory per rank, before anything runs: `memory_estimate(setup)`.

The step is run in a model of eager PyTorch and FSDP2 in which tensors have sizes and no contents
(step_memory.py). On a CPU, in eager mode, the result is what torch's own FSDPMemTracker measures of
the trainer's step: state to the byte, the rest within half a percent
(tests/distributed/test_memory_tracker.py). What a GPU adds (see benchmarks/gpu/memory.py), and what
compiled blocks, selective checkpointing and fused kernels leave open, are parts with a range.

Cost: about a millisecond for each kind of block, whatever the number of layers. Limits: every
position carries loss (fewer need less); dropout is not counted; the rank estimated is 0, whose
shards are never the smaller ones; a model that is known by its number of parameters only is
refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from drillyard.config.model_files import ARCHITECTURES
from drillyard.errors import UserError
from drillyard.estimation.memory.autograd import MemoryKind
from drillyard.estimation.memory.step_memory import StepMemory
from drillyard.estimation.quantity import Range, quantity
from drillyard.estimation.setup import Setup
from drillyard.hardware.facts import FactSource

Verdict = Literal["fits", "may not fit", "does not fit"]

FSDP2: Final = FactSource("torch/distributed/fsdp/_fully_shard, torch 2.11 to 2.15", "2026-11")
AUTOGRAD: Final = FactSource(
    "torch tools/autograd/derivatives.yaml; transformers 5, models/*/modeling_*.py", "2026-11"
)
TRAINER: Final = FactSource(
    "drillyard models/loss.py, training/trainer.py and training/optimizer.py", None
)

PARTS: Final[tuple[tuple[str, tuple[MemoryKind, ...], str, FactSource], ...]] = (
    (
        "parameters",
        (MemoryKind.PARAMETERS, MemoryKind.BUFFERS),
        "shards in master precision, rows padded to the ranks; what is frozen in compute precision",
        FSDP2,
    ),
    (
        "gradients",
        (MemoryKind.GRADIENTS, MemoryKind.WHOLE_GRADIENTS),
        "of shards, and of whole weights until reduced",
        FSDP2,
    ),
    (
        "optimizer state",
        (MemoryKind.OPTIMIZER,),
        "two moments of each trained shard, a step count per tensor",
        TRAINER,
    ),
    (
        "gathered weights",
        (MemoryKind.GATHERED,),
        "whole in compute precision: root, and the block that runs",
        FSDP2,
    ),
    (
        "communication buffers",
        (MemoryKind.ALL_GATHER, MemoryKind.REDUCE_SCATTER),
        "gathers one block ahead, reduction",
        FSDP2,
    ),
    (
        "inputs and masks",
        (MemoryKind.INPUTS,),
        "tokens, positions, targets, masks, rotary tables",
        TRAINER,
    ),
    (
        "activations",
        (MemoryKind.ACTIVATIONS,),
        "saved for backward, and a layer that is recomputed",
        AUTOGRAD,
    ),
    (
        "logits and loss",
        (MemoryKind.LOSS,),
        "a chunk's logits, log-softmax and gradients; gradients of hidden rows",
        TRAINER,
    ),
    (
        "temporaries",
        (MemoryKind.TEMPORARIES,),
        "gradients of activations and what is made between them",
        AUTOGRAD,
    ),
)

MIB: Final = 2**20
GIB: Final = 2**30

CONTEXT_LOW: Final = FactSource(
    "723 MiB after the first tensor: discuss.pytorch.org/t/73021", "2020-03", unverified=True
)
CONTEXT_HIGH: Final = FactSource(
    "1343 MiB after the first tensor: transformers documentation, model memory anatomy",
    "2024-01",
    unverified=True,
)
NCCL: Final = FactSource(
    "NCCL user guide: NCCL_BUFFSIZE, 4 MiB by default for a pair of GPUs; nccl"
    " src/include/device.h: MAXCHANNELS 64",
    "2025-06",
    unverified=True,
)
FRAGMENTATION: Final = FactSource(
    "GMLake, arXiv:2401.08156, abstract: 15 % in the mean of eight models", "2024-01"
)
FLASH: Final = FactSource(
    "flash-attention csrc/flash_attn/flash_api.cpp, mha_varlen_bwd: dq_accum, softmax_d in fp32,"
    " dk, dv by query head",
    "2024-07",
)
PARTITION: Final = FactSource(
    "inputs and results of matrix products and attention only: torch/_functorch/partitioners.py"
    " saves no more",
    "2025-06",
)
POLICY: Final = FactSource(
    "parallel/parallelize.py: every second product, counted from the first or from the second", None
)

NCCL_BUFFER_MIB: Final = 4
NCCL_FEWEST_CHANNELS: Final = 2
NCCL_MOST_CHANNELS: Final = 64
CONTEXT_MIB: Final = (723, 1343)
FRAGMENTED_SHARE: Final = 0.15

COMES_AND_GOES: Final = (
    MemoryKind.GATHERED,
    MemoryKind.WHOLE_GRADIENTS,
    MemoryKind.ALL_GATHER,
    MemoryKind.REDUCE_SCATTER,
    MemoryKind.ACTIVATIONS,
    MemoryKind.LOSS,
    MemoryKind.TEMPORARIES,
)


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Memory of the rank that needs most, at the moment when it needs most.

    `parts` are in GiB; their low ends add up to the low end of `total`, their high ends to its high
    end. `peak_at` names the moment; `moments` has the most bytes of each phase of a step, without
    what a GPU adds. `state_bytes` are exact: parameters, gradients and optimizer state of this
    rank's shards, and how much of the parameters is padding.
    """

    parts: tuple[Range, ...]
    total: Range
    peak_at: str
    moments: dict[str, int]
    state_bytes: dict[str, int]
    notes: tuple[str, ...] = ()


def verdict_on(needed_gib: Range, available_gib: float) -> Verdict:
    """`fits` where the whole range is within what is available, `may not fit` where only its lower
    end is."""
    if needed_gib.high.value <= available_gib:
        return "fits"
    return "may not fit" if needed_gib.low.value <= available_gib else "does not fit"


def memory_estimate(setup: Setup) -> MemoryEstimate:
    """Memory that one rank needs for a step of `setup`. Pure, without torch.

    UserError for a model without blocks (only its number of parameters is known) and for one with
    linear attention.
    """
    if not setup.spec.blocks:
        raise UserError(
            "memory cannot be estimated for a model of which only the number of parameters is"
            " known\ngive its config.json by --config FILE in place of --params"
        )
    if any(block.attention.kind == "linear" for block in setup.spec.blocks):
        raise UserError(
            f"memory cannot be estimated for {setup.spec.model_type}: its linear attention is not"
            " modelled"
        )
    step = StepMemory(setup)
    peak = step.ledger.peak
    parts = []
    for name, kinds, formula, source in PARTS:
        nbytes = sum(step.ledger.at_peak[kind] for kind in kinds)
        parts.append(_ranged(name, nbytes, nbytes, formula, source))
    if setup.activation_checkpointing == "selective":
        # Whether a kernel adds or hides a product moves the policy's count by one: then it keeps
        # the other half.
        other = StepMemory(setup, skips_first_product=True).ledger.peak - peak
        formula = "the other half of the products kept instead"
        parts.append(_ranged("selective policy", min(0, other), max(0, other), formula, POLICY))
    if setup.compiled:
        fused = StepMemory(setup, fuses=True).ledger.peak - peak
        formula = "at least the inputs of products and attention, at most what eager blocks keep"
        parts.append(_ranged("compiled blocks", min(0, fused), 0, formula, PARTITION))
    if setup.device_type == "cuda":
        parts += _gpu_parts(setup, step)
    low, high = (
        quantity(
            "memory per rank",
            sum(one.value for one in ends),
            "GiB",
            "sum of the parts at the peak",
            *ends,
        )
        for ends in ([part.low for part in parts], [part.high for part in parts])
    )
    notes = setup.spec.notes
    if setup.spec.model_type not in ARCHITECTURES:
        notes = (
            *notes,
            (
                f"activations of {setup.spec.model_type} are estimated by its parts, compared with"
                " none"
            ),
        )
    return MemoryEstimate(
        tuple(parts), Range(low, high), step.moment, step.moments, _state_bytes(step), notes
    )


def _state_bytes(step: StepMemory) -> dict[str, int]:
    units = step.units
    return {
        "parameters": sum(step.sharding.resting_bytes(u) for u in units),
        "gradients": step.gradient_bytes,
        "optimizer": step.optimizer_bytes,
        "padding": sum(step.sharding.padding_bytes(u) for u in units) // step.setup.shard,
    }


def _ranged(
    name: str,
    low: float,
    high: float,
    formula: str,
    source: FactSource,
    high_source: FactSource | None = None,
) -> Range:
    """A range in GiB from bytes."""
    least = quantity(name, low / GIB, "GiB", formula, source)
    return Range(least, quantity(name, high / GIB, "GiB", formula, high_source or source))


def _gpu_parts(setup: Setup, step: StepMemory) -> list[Range]:
    low, high = (mebibytes * MIB for mebibytes in CONTEXT_MIB)
    found = [
        _ranged(
            "CUDA context",
            low,
            high,
            "driver, kernels and library handles",
            CONTEXT_LOW,
            CONTEXT_HIGH,
        )
    ]
    if setup.world_size > 1:
        # Groups of ranks that communicate over NCCL: all of them, those of a shard, and those of a
        # weight's copies.
        groups = 1 + (setup.shard > 1) + (setup.replicate > 1)
        low, high = (
            groups * channels * 2 * NCCL_BUFFER_MIB * MIB
            for channels in (NCCL_FEWEST_CHANNELS, NCCL_MOST_CHANNELS)
        )
        formula = (
            f"communicators x channels ({NCCL_FEWEST_CHANNELS} to {NCCL_MOST_CHANNELS}) x 2"
            " neighbours x 4 MiB"
        )
        found.append(_ranged("NCCL buffers", low, high, formula, NCCL))
    moving = sum(step.ledger.at_peak[kind] for kind in COMES_AND_GOES)
    formula = f"0 to {FRAGMENTED_SHARE:.0%} of what comes and goes within a step"
    found.append(
        _ranged("allocator fragmentation", 0, FRAGMENTED_SHARE * moving, formula, FRAGMENTATION)
    )
    if setup.kernel in ("varlen", "sdpa"):
        found.append(_attention_workspace(setup, step))
    return found


def _attention_workspace(setup: Setup, step: StepMemory) -> Range:
    """Backward of fused attention sums query gradients in fp32, and key and value gradients for
    each query head."""
    rows = setup.tokens_per_micro_batch
    largest = 0
    for block in {id(block): block for block in setup.spec.blocks}.values():
        a = block.attention
        sums = rows * a.num_heads * (a.head_dim + 1) * 4
        expanded = (
            rows * a.num_heads * (a.head_dim + a.value_head_dim) * step.compute
            if a.num_kv_heads < a.num_heads
            else 0
        )
        largest = max(largest, sums + expanded)
    formula = "0 to B*T*H*(D+1) in fp32, and where heads share keys 2*B*T*H*D"
    return _ranged("fused attention", 0, largest, formula, FLASH)
