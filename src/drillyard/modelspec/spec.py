"""Tensors of a decoder-only language model by name and shape, block by block, and their sums.

The tensors are those that transformers builds, under its names. All sums follow from names and
shapes: parameters in total and per unit of FSDP (each block, and the root with embedding, final
norm and head), the padding of a shard along the first dimension, the linear layers that can have
adapters. A block also has the shape of its computation (heads, window, widths, experts), on which
FLOPs and activations depend.

Blocks that are equal are one object, so a model of a hundred layers costs as much as its few kinds
of layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Literal

Role = Literal[
    "attention", "mlp", "router", "expert", "norm", "embedding", "positions", "projection", "head"
]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One parameter tensor: its name inside its unit and its shape, both as transformers has them.

    `expert` tensors hold all experts of a layer along their first dimension; shared experts, which
    every token passes, have the role `mlp`. `linear` marks the weight of an nn.Linear (or GPT-2's
    Conv1D, which is its transpose). `adapted_as`: the linear layers that it stands for to peft,
    where it is none itself (adapters.py).
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    linear: bool = False
    adapted_as: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        return prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether activations are multiplied by it: a weight, not a bias, norm or per-head
        scalar."""
        return self.linear or (self.role == "expert" and not self.name.endswith("bias"))


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of one layer.

    `kind`: `softmax` attention by heads, `latent` (multi-head latent attention: keys and values
    come from a compressed vector of `kv_rank`, queries from one of `q_rank` where that is not None;
    `rope_head_dim` of `head_dim` is rotated), or `linear` (gated delta rule: a state of head_dim x
    value_head_dim per value head instead of attention; there `num_heads` are the value heads and
    `num_kv_heads` the heads of queries and keys). `window` is the number of positions attended to
    at most, None for all; with `chunked` they are those of the same chunk of `window` positions
    instead of the last ones. `head_dim` is that of queries and keys.
    """

    kind: Literal["softmax", "latent", "linear"]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    window: int | None = None
    chunked: bool = False
    q_rank: int | None = None
    kv_rank: int | None = None
    rope_head_dim: int | None = None
    query_key_norm: Literal["none", "per_head", "all_heads"] = "none"


@dataclass(frozen=True, slots=True)
class Mlp:
    """The feed-forward part of one layer.

    `intermediate_size` is the width that every token passes (of the dense MLP, or of the shared
    experts together; 0 where there is neither). Of `num_experts` each token passes
    `experts_per_token`, each `expert_size` wide. `gated`: two matrices in (SwiGLU and its kind)
    instead of one.
    """

    gated: bool
    activation: str
    intermediate_size: int
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0


@dataclass(frozen=True)
class Block:
    """One layer. `parallel`: attention and MLP read the same input instead of one after the
    other."""

    attention: Attention
    mlp: Mlp
    norm: Literal["rms", "layer"]
    num_norms: int
    """Norms over the hidden size, those without weights included."""
    parallel: bool
    tensors: tuple[TensorSpec, ...]

    @cached_property
    def parameters(self) -> int:
        return sum(tensor.parameters for tensor in self.tensors)

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that one token uses: everything but the experts that are not chosen."""
        return self.parameters - self._idle(
            sum(t.parameters for t in self.tensors if t.role == "expert")
        )

    @cached_property
    def attention_matrices(self) -> int:
        """Parameters of the attention's matrices."""
        return sum(t.parameters for t in self.tensors if t.role == "attention" and t.is_matrix)

    @cached_property
    def active_mlp_matrices(self) -> int:
        """Parameters of the MLP's matrices that one token passes, routers left out."""
        dense, experts = (
            sum(t.parameters for t in self.tensors if t.role == role and t.is_matrix)
            for role in ("mlp", "expert")
        )
        return dense + experts - self._idle(experts)

    def _idle(self, expert_parameters: int) -> int:
        """Of the parameters of all experts, those of the experts that a token does not pass."""
        number = self.mlp.num_experts
        return expert_parameters // number * (number - self.mlp.experts_per_token) if number else 0


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only language model by its tensors.

    `root` are the tensors outside the blocks, without a head that is tied to the embedding.
    `blocks_path` names the list of blocks: with `model.layers` the first block's names start with
    `model.layers.0.`. `positions` is the number of learned positions, None where they are rotary or
    absent. `notes` list what of the config is not counted.
    """

    model_type: str
    hidden_size: int
    vocab_size: int
    tied: bool
    blocks: tuple[Block, ...]
    root: tuple[TensorSpec, ...]
    blocks_path: str
    positions: int | None = None
    idle_root_parameters: int = 0
    """Parameters in `root` that a token does not use: only where nothing but counts is known (then
    there are no blocks, and the sizes are 0)."""
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def attention(self) -> Attention:
        """The attention of the first layer with softmax attention, else of the first layer."""
        assert self.blocks, "only parameter counts are known"
        return next(
            (b.attention for b in self.blocks if b.attention.kind != "linear"),
            self.blocks[0].attention,
        )

    @property
    def num_heads(self) -> int:
        return self.attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.attention.head_dim

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer the number of positions it attends to at most, None for all of them."""
        return tuple(block.attention.window for block in self.blocks)

    @cached_property
    def root_parameters(self) -> int:
        return sum(tensor.parameters for tensor in self.root)

    @cached_property
    def total_parameters(self) -> int:
        return self.root_parameters + sum(block.parameters for block in self.blocks)

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that one token uses: embedding and head (once where tied), routers, and the
        chosen experts. Some publishers exclude the input embedding: subtract
        `embedding_parameters`."""
        return (
            self.root_parameters
            - self.idle_root_parameters
            + sum(block.active_parameters for block in self.blocks)
        )

    @cached_property
    def embedding_parameters(self) -> int:
        """The input embedding (the table shared with the output when `tied`) without learned
        positions."""
        return sum(tensor.parameters for tensor in self.root if tensor.role == "embedding")

    @cached_property
    def head_matrix_parameters(self) -> int:
        """The matrix that makes logits: the head's own, or the embedding's when tied."""
        role = "embedding" if self.tied else "head"
        return sum(t.parameters for t in self.root if t.role == role and len(t.shape) == 2)

    @cached_property
    def active_matmul_parameters(self) -> int:
        """Weights of the matrices of attention, MLP and logits that one token passes: what
        Megatron-LM counts."""
        in_blocks = sum(
            block.attention_matrices + block.active_mlp_matrices for block in self.blocks
        )
        projections = sum(
            tensor.parameters
            for tensor in self.root
            if tensor.role == "projection" and tensor.linear
        )
        return in_blocks + projections + self.head_matrix_parameters
