"""What a GPU needs beyond the tensors of a step, and what cannot be known to the byte: terms with a range, each with
what its ends rest on. None of it can be seen on a CPU; benchmarks/gpu/memory.py compares it with a GPU.
"""

from __future__ import annotations

from typing import Final

from drillyard.estimation.memory.ledger import MemoryKind
from drillyard.estimation.memory.step_memory import StepMemory
from drillyard.estimation.quantity import Range, quantity
from drillyard.estimation.setup import Setup
from drillyard.hardware.facts import FactSource

MIB: Final = 2**20
GIB: Final = 2**30

CONTEXT_LOW: Final = FactSource(
    "723 MiB after the first tensor: discuss.pytorch.org/t/73021", "2020-03", unverified=True
)
CONTEXT_HIGH: Final = FactSource(
    "1343 MiB after the first tensor: transformers documentation, model memory anatomy", "2024-01", unverified=True
)
NCCL: Final = FactSource(
    "NCCL user guide: NCCL_BUFFSIZE, 4 MiB by default for a pair of GPUs; nccl src/include/device.h: MAXCHANNELS 64",
    "2025-06",
    unverified=True,
)
FRAGMENTATION: Final = FactSource("GMLake, arXiv:2401.08156, abstract: 15 % in the mean of eight models", "2024-01")
FLASH: Final = FactSource(
    "flash-attention csrc/flash_attn/flash_api.cpp, mha_varlen_bwd: dq_accum, softmax_d in fp32, dk, dv by query head",
    "2024-07",
)
PARTITION: Final = FactSource(
    "inputs and results of matrix products and attention only: torch/_functorch/partitioners.py saves no more",
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


def ranged(name: str, low: float, high: float, formula: str, low_source: FactSource, high_source: FactSource) -> Range:
    """A range in GiB from bytes."""
    return Range(
        quantity(name, low / GIB, "GiB", formula, low_source), quantity(name, high / GIB, "GiB", formula, high_source)
    )


def of_gpu(setup: Setup, step: StepMemory) -> list[Range]:
    """The terms of a GPU that stand beside those of the step."""
    low, high = (mebibytes * MIB for mebibytes in CONTEXT_MIB)
    found = [ranged("CUDA context", low, high, "driver, kernels and library handles", CONTEXT_LOW, CONTEXT_HIGH)]
    if setup.world_size > 1:
        low, high = (
            _communicators(setup) * channels * 2 * NCCL_BUFFER_MIB * MIB
            for channels in (NCCL_FEWEST_CHANNELS, NCCL_MOST_CHANNELS)
        )
        formula = f"communicators x channels ({NCCL_FEWEST_CHANNELS} to {NCCL_MOST_CHANNELS}) x 2 neighbours x 4 MiB"
        found.append(ranged("NCCL buffers", low, high, formula, NCCL, NCCL))
    moving = sum(step.ledger.at_peak[kind] for kind in COMES_AND_GOES)
    formula = f"0 to {FRAGMENTED_SHARE:.0%} of what comes and goes within a step"
    found.append(ranged("allocator fragmentation", 0, FRAGMENTED_SHARE * moving, formula, FRAGMENTATION, FRAGMENTATION))
    if setup.kernel in ("varlen", "sdpa"):
        found.append(_attention_workspace(setup, step))
    return found


def _communicators(setup: Setup) -> int:
    """Groups of ranks that talk over NCCL: all of them, those of a shard, and those of a weight's copies."""
    return 1 + (setup.shard > 1) + (setup.replicate > 1)


def _attention_workspace(setup: Setup, step: StepMemory) -> Range:
    """Backward of fused attention sums query gradients in fp32, and key and value gradients for each query head."""
    rows = setup.tokens_per_micro_batch
    largest = 0
    for block in {id(block): block for block in setup.spec.blocks}.values():
        a = block.attention
        sums = rows * a.num_heads * (a.head_dim + 1) * 4
        expanded = (
            rows * a.num_heads * (a.head_dim + a.value_head_dim) * step.compute if a.num_kv_heads < a.num_heads else 0
        )
        largest = max(largest, sums + expanded)
    formula = "0 to B*T*H*(D+1) in fp32, and where heads share keys 2*B*T*H*D"
    return ranged("fused attention", 0, largest, formula, FLASH, FLASH)
