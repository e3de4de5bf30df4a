"""Subject of an estimate as one value: a model, how it is cut over ranks, and what one rank does in
a step.

Memory and step time both depend on exactly these numbers, so both are functions of a `Setup` and of
hardware. It is made from a run config by `resolve_setup`; variations (`--sweep`, the nearest
setting that fits) are `replace`d fields.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Final, Literal

from drillyard.config.kernel_rules import MASTER_BYTES, NF4_BLOCK, AttentionKernel, fp8_fits
from drillyard.config.run_model import LoraConfig
from drillyard.modelspec import AdapterTargets, ModelSpec, TensorSpec, adapter_parameters

Precision = Literal["bf16", "fp8", "fp32", "fp64"]
Checkpointing = Literal["none", "memory-budget", "selective", "full"]
COMPUTE_BYTES: Final[Mapping[Precision, int]] = {"bf16": 2, "fp8": 2, "fp32": 4, "fp64": 8}
"""Bytes of an activation, and of a gathered weight; masters are
`config.kernel_rules.MASTER_BYTES`."""
NF4_BITS: Final = 4 + 32 / NF4_BLOCK
"""Of a number, with its share of the fp32 magnitude of its block."""
PACKED_MOMENT_BYTES: Final = 1 + 4 / 256
"""Of a moment in 8 bits, with its share of the fp32 magnitude of its block
(training/eight_bit_adamw.py); those that keep fp32 are a negligible part."""

NEWEST_TORCH: Final = (2, 15)
"""The newest torch whose FSDP2 the memory estimate was compared with."""


@functools.cache
def installed_torch() -> tuple[int, int]:
    """Major and minor release of the torch that is installed here; without one, the newest that is
    known."""
    try:
        major, minor = metadata.version("torch").split(".")[:2]
    except metadata.PackageNotFoundError:
        return NEWEST_TORCH
    return int(major), int(minor)


def can_be_fp8(spec: ModelSpec, tensor: TensorSpec) -> bool:
    """Whether `precision: fp8` does the products of a block's weight in fp8 (models/fp8.py)."""
    return tensor.linear and spec.model_type != "gpt2" and fp8_fits(*tensor.shape)


@dataclass(frozen=True, slots=True)
class LoraSetup:
    """LoRA: adapters of `rank` on the layers that `targets` name; all else is frozen. `magnitudes`:
    DoRA's, too."""

    rank: int
    targets: AdapterTargets
    magnitudes: bool = False


def lora_setup(lora: LoraConfig) -> LoraSetup:
    """The adapters of a run config."""
    targets = lora.target_modules
    return LoraSetup(
        lora.rank, targets if isinstance(targets, str) else tuple(targets), lora.variant == "dora"
    )


@dataclass(frozen=True, slots=True)
class Setup:
    """A training step as one rank sees it. Every `auto` of the run config is resolved here.

    `micro_batch_size` sequences of `sequence_length` tokens go through one forward and backward,
    and `gradient_accumulation` of these make a step. The model is cut over `shard` ranks and there
    are `replicate` copies. `loss_chunk_tokens`: rows whose logits exist at once. `keeps_unsharded`:
    weights that fit whole stay so from forward to backward, and gradients over micro-batches.
    Documents that are packed together are kept apart by a mask under `sdpa` and `eager`, by offsets
    under `varlen` and `flex`. `quantized`: frozen linear layers rest in nf4.
    `keeps_frozen_whole`: every rank holds the weights beside adapters whole, outside FSDP2, which
    shards, gathers and reduces the adapters alone. `stores_fp8`: frozen weights of products in fp8
    rest in fp8, if a rank holds them whole, once or (`scales_rows`) for each of their two products.
    `casts_before_gather`: weights of products in fp8 are gathered in fp8, where ranks share them.
    `packed_moments`: AdamW's moments rest in 8 bits. `torch_release`: of the torch that trains, as
    its FSDP2 decides what lies in memory.
    """

    spec: ModelSpec
    precision: Precision
    sequence_length: int
    micro_batch_size: int
    gradient_accumulation: int
    activation_checkpointing: Checkpointing
    shard: int
    replicate: int
    gpus_per_node: int
    kernel: AttentionKernel
    compiled: bool
    loss_chunk_tokens: int
    clips_gradients: bool = True
    adapters: LoraSetup | None = None
    quantized: bool = False
    stores_fp8: bool = False
    scales_rows: bool = False
    casts_before_gather: bool = False
    packed_moments: bool = False
    keeps_unsharded: bool = False
    keeps_frozen_whole: bool = False
    device_type: Literal["cuda", "cpu"] = "cuda"
    torch_release: tuple[int, int] = field(default_factory=installed_torch)

    @property
    def holds_whole(self) -> bool:
        """Whether the rank is alone and trains without FSDP2 (parallel/parallelize.py)."""
        return self.world_size == 1 and self.keeps_unsharded

    @property
    def holds_frozen_whole(self) -> bool:
        """Whether no frozen weight is sharded or gathered; False where all are trained."""
        return self.adapters is not None and (self.keeps_frozen_whole or self.holds_whole)

    @property
    def gathers_adapters_alone(self) -> bool:
        """Whether ranks that share weights exchange those of adapters and no others."""
        return self.shard > 1 and self.holds_frozen_whole

    @property
    def keeps_gradients_narrow(self) -> bool:
        """Whether gradients, but those that are sums, stay in compute precision up to the update
        (parallel/whole_weights.py)."""
        return self.holds_whole and self.gradient_accumulation == 1

    @property
    def summed_parameters(self) -> int:
        """Trained parameters whose gradient one backward sums from parts: the head's, tied or
        not."""
        return self.spec.head_matrix_parameters if self.adapters is None else 0

    @property
    def updates_in_one_pass(self) -> bool:
        """Whether the kernel of GPUs clips and updates (training/adamw_kernel.py)."""
        return self.device_type == "cuda" and self.precision != "fp64" and not self.packed_moments

    def is_packed(self, tensor: TensorSpec) -> bool:
        """Whether a weight rests in nf4."""
        return self.quantized and tensor.linear and tensor.role != "head"

    def is_fp8(self, tensor: TensorSpec) -> bool:
        """Whether the products of a block's weight are done in fp8."""
        return self.precision == "fp8" and can_be_fp8(self.spec, tensor)

    def rests_in_fp8(self, tensor: TensorSpec) -> bool:
        """Whether a frozen weight is cast to fp8 once and for all."""
        is_of_block = tensor.role not in ("head", "projection")
        return self.stores_fp8 and self.holds_frozen_whole and is_of_block and self.is_fp8(tensor)

    @property
    def gathers_fp8(self) -> bool:
        """Whether ranks exchange weights in fp8 (models/fp8_gather.py)."""
        return self.casts_before_gather and self.shard > 1 and not self.holds_frozen_whole

    def is_gathered_in_fp8(self, tensor: TensorSpec) -> bool:
        """Whether ranks exchange a weight in fp8."""
        is_of_block = tensor.role not in ("head", "projection")
        return self.gathers_fp8 and is_of_block and self.is_fp8(tensor)

    @property
    def moment_bytes(self) -> float:
        """Bytes of one moment of a trained parameter."""
        return PACKED_MOMENT_BYTES if self.packed_moments else MASTER_BYTES[self.precision]

    @property
    def adapter_parameters(self) -> int | None:
        """Trained parameters of LoRA adapters; None: all are trained."""
        return (
            None
            if self.adapters is None
            else adapter_parameters(self.spec, self.adapters.rank, self.adapters.targets)
        )

    @property
    def world_size(self) -> int:
        """Ranks in all: one per GPU."""
        return self.shard * self.replicate

    @property
    def tokens_per_micro_batch(self) -> int:
        """Tokens, padding included, that one rank takes through one forward."""
        return self.micro_batch_size * self.sequence_length

    @property
    def tokens_per_step_per_gpu(self) -> int:
        return self.tokens_per_micro_batch * self.gradient_accumulation

    @property
    def tokens_per_step(self) -> int:
        """Tokens, padding included, of one optimizer step over all ranks."""
        return self.tokens_per_step_per_gpu * self.world_size
