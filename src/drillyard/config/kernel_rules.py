"""Values of settings that are left open (`auto`, null) where a fixed rule decides: one rule each,
for all packages.

The trainer calls these before it lays out a model, the estimate before anything runs, so the two
cannot disagree. `activation_checkpointing: auto` is no such setting: it depends on what fits
(`estimation/resolved_setup.py`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Literal, TypedDict

from drillyard.config.run import ParallelismConfig, TrainingConfig
from drillyard.config.run_data import DataConfig

AttentionKernel = Literal["sdpa", "eager", "varlen", "flex"]

FASTEST_FIRST: Final[tuple[AttentionKernel, ...]] = ("varlen", "sdpa", "flex", "eager")
LARGEST_CHUNK: Final = 2048
SMALL_SHARE_OF_MEMORY: Final = 1 / 16
FLASH_CAPABILITY: Final = (8, 0)
"""Compute capability of the oldest GPUs that flash attention has kernels for (Ampere): torch
aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, as are the head sizes below."""
FLASH_HEAD_MULTIPLE: Final = 8
LARGEST_FLASH_HEAD: Final = 256
SMALLEST_FLEX_HEAD: Final = 16
"""FlexAttention's compiled kernels refuse smaller heads
(torch/_inductor/kernel/flex/flex_attention.py)."""
NF4_BLOCK: Final = 64
"""Numbers of a row that share a magnitude in nf4 (models/nf4.py)."""
MASTER_BYTES: Final = {"bf16": 4, "fp8": 4, "fp32": 4, "fp64": 8}
"""Bytes of a parameter, and of its gradient, by compute precision: bf16 and fp8 keep fp32
masters."""
HALF: Final = ("bf16", "fp8")
"""Precisions under which all but the products that fp8 does is computed in bf16."""
MEMORY_BUDGET: Final = 0.75
"""Share of what compiled blocks keep for backward that `activation_checkpointing: memory-budget`
leaves them at most. A Llama's block gets there (0.66) by computing norms and gates again; where
that does not suffice, torch computes attention over packed documents again, which is expensive."""
FP8_MULTIPLE: Final = 16
"""Sizes of the operands of an fp8 product are multiples of it (torch._scaled_mm)."""
Fp8Scaling = Literal["tensorwise", "rowwise"]
FP8_CAPABILITY: Final[dict[Fp8Scaling, tuple[int, int]]] = {
    "tensorwise": (8, 9),
    "rowwise": (9, 0),
}
"""Least compute capability (PyTorch: aten/src/ATen/native/cuda/ScaledBlas.cpp)."""


def resolve_shard(parallelism: ParallelismConfig, num_ranks: int) -> int:
    """Ranks that share one copy of the weights; `auto`: the number of ranks over `replicate`."""
    return num_ranks // parallelism.replicate if parallelism.shard == "auto" else parallelism.shard


def resolve_compile(training: TrainingConfig, device_type: str) -> bool:
    """Whether blocks are compiled; `auto`: on GPUs."""
    return training.compile is True or (training.compile == "auto" and device_type == "cuda")


def resolve_fp8_scaling(training: TrainingConfig) -> Fp8Scaling:
    """As configured, else one scale for each operand."""
    return training.fp8_scaling or "tensorwise"


def resolve_loss_on(data: DataConfig) -> Literal["completion", "all"]:
    """As configured, else all of a text, and the completion of any other row."""
    return data.loss_on or ("all" if data.format == "text" else "completion")


def resolve_too_long(data: DataConfig) -> str:
    """As configured, else texts are split, and other rows dropped."""
    return data.too_long or ("split" if data.format == "text" else "drop")


def resolve_loss_chunk(tokens_per_micro_batch: int, configured: int | None) -> int:
    """Rows of logits in memory at once: as configured, else a quarter of the micro-batch and at
    most LARGEST_CHUNK."""
    return configured or max(1, min(LARGEST_CHUNK, -(-tokens_per_micro_batch // 4)))


def fp8_fits(inputs: int, outputs: int) -> bool:
    """Whether the products of a linear layer, forward and backward, can be done in fp8."""
    return inputs % FP8_MULTIPLE == 0 and outputs % FP8_MULTIPLE == 0


def fp8_refusal(gpu: str, capability: tuple[int, int], scaling: Fp8Scaling) -> str | None:
    """Why a GPU of this compute capability cannot train in fp8, and what to set; None if it can."""
    least = FP8_CAPABILITY[scaling]
    if capability >= least:
        return None
    other = (
        ", or training.fp8_scaling: tensorwise"
        if scaling == "rowwise" and capability >= FP8_CAPABILITY["tensorwise"]
        else ""
    )
    return (
        f"fp8 products, {scaling}, need a GPU of compute capability {least[0]}.{least[1]}; {gpu}"
        f" has {capability[0]}.{capability[1]}\nset training.precision: bf16{other}"
    )


def unsharded_is_small(num_parameters: int, precision: str, memory_bytes: float) -> bool:
    """Whether the whole model's weights, or gradients, take a small part of a rank's memory.

    Then it is faster to keep them whole within a step: weights from forward to backward, gradients
    over micro-batches.
    """
    return num_parameters * MASTER_BYTES[precision] <= SMALL_SHARE_OF_MEMORY * memory_bytes


def kernel_can_train(
    kernel: str, device_type: str, *, half: bool, capability: tuple[int, int] | None = None
) -> bool:
    """Whether an attention kernel has a backward on the device; `half`: it computes in bf16 (or
    fp16).

    `capability` is the GPU's compute capability; None: one that flash attention supports.
    """
    on_gpu = device_type == "cuda"
    flash = on_gpu and half and (capability is None or capability >= FLASH_CAPABILITY)
    return {"sdpa": True, "eager": True, "varlen": flash, "flex": on_gpu}[kernel]


class AttentionNeeds(TypedDict):
    """Needs of a model from an attention kernel: a cap on scores (None: none), dropout of attention
    weights (0: none), and the size of a head (None: not known)."""

    softcap: float | None
    dropout: float
    head_dim: int | None


def kernel_limitation(
    kernel: str, *, softcap: float | None, dropout: float, head_dim: int | None = None
) -> str | None:
    """Reason why `kernel` does not fit a model's needs (see `AttentionNeeds`), and what to use
    instead; None if it does."""
    if softcap is not None and kernel in ("sdpa", "varlen"):
        return "it cannot soft-cap attention scores; use attention: flex on GPUs, else eager"
    if dropout > 0 and kernel in ("varlen", "flex"):
        return (
            f"it has no dropout and the model's attention dropout is {dropout}; set that to 0 or"
            " use attention: sdpa"
        )
    if head_dim is None:
        return None
    if kernel == "varlen" and (head_dim > LARGEST_FLASH_HEAD or head_dim % FLASH_HEAD_MULTIPLE):
        return (
            f"its head sizes are multiples of {FLASH_HEAD_MULTIPLE} up to {LARGEST_FLASH_HEAD} and"
            f" the model's is {head_dim}; use attention: sdpa"
        )
    if kernel == "flex" and head_dim < SMALLEST_FLEX_HEAD:
        instead = "sdpa" if softcap is None else "eager"
        return (
            f"its smallest head size is {SMALLEST_FLEX_HEAD} and the model's is {head_dim}; use"
            f" attention: {instead}"
        )
    return None


def fastest_kernel(
    device_type: str,
    *,
    half: bool,
    softcap: float | None,
    dropout: float,
    head_dim: int | None = None,
    capability: tuple[int, int] | None = None,
) -> AttentionKernel:
    """Resolve `attention: auto`: the fastest kernel that can train here and computes what the model
    needs.

    One always exists: eager attention supports everything, everywhere.
    """
    return next(
        kernel
        for kernel in FASTEST_FIRST
        if kernel_can_train(kernel, device_type, half=half, capability=capability)
        and kernel_limitation(kernel, softcap=softcap, dropout=dropout, head_dim=head_dim) is None
    )


def num_gpus() -> int:
    """GPUs that ranks may use, without importing torch: CUDA_VISIBLE_DEVICES, or this host's device
    files."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    return len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()])
