"""What FSDP2 shards, gathers and reduces together: each block, and the root with embedding, final norm and head.

`fully_shard` cuts every tensor along its first dimension into `shard` chunks of equal rows, the last of them filled up
with padding (torch/distributed/fsdp/_fully_shard/_fsdp_param.py, `_init_sharded_param`; `torch.chunk`). Rank 0 always
holds full chunks, so what is predicted is the rank with most. Gathers and reductions move padded chunks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from drillyard.estimation.setup import LoraSetup
from drillyard.modelspec import TensorSpec, adapter_layers


@dataclass(frozen=True, slots=True)
class FsdpUnit:
    """One group of tensors by elements: on this rank (padding included), and of those that are trained."""

    shard: int
    trained_shard: int
    padding: int
    """Elements of `shard` x ranks that no parameter has."""
    padding_trained: int
    num_trained: int
    """Tensors that are trained."""
    largest: int
    """Elements of the largest tensor."""
    largest_trained: int
    ranks: int

    @property
    def whole(self) -> int:
        """Elements gathered, padding included."""
        return self.shard * self.ranks

    @property
    def whole_trained(self) -> int:
        return self.trained_shard * self.ranks


def fsdp_unit(tensors: Iterable[TensorSpec], ranks: int, adapters: LoraSetup | None) -> FsdpUnit:
    """The unit of some tensors over `ranks`, with the adapters that hang on them."""
    frozen = list(tensors)
    trained = frozen
    if adapters is not None:
        layers = adapter_layers(frozen, adapters.targets)
        trained = [low for layer in layers for low in _low_rank(layer, adapters.rank)]
        frozen = [*frozen, *trained]
    shard = sum(_chunk(tensor.shape, ranks) for tensor in frozen)
    trained_shard = sum(_chunk(tensor.shape, ranks) for tensor in trained)
    return FsdpUnit(
        shard=shard,
        trained_shard=trained_shard,
        padding=shard * ranks - sum(tensor.parameters for tensor in frozen),
        padding_trained=trained_shard * ranks - sum(tensor.parameters for tensor in trained),
        num_trained=len(trained),
        largest=max((tensor.parameters for tensor in frozen), default=0),
        largest_trained=max((tensor.parameters for tensor in trained), default=0),
        ranks=ranks,
    )


def _chunk(shape: tuple[int, ...], ranks: int) -> int:
    """Elements of the first of `ranks` chunks along the first dimension."""
    return -(-shape[0] // ranks) * prod(shape[1:])


def _low_rank(layer: TensorSpec, rank: int) -> tuple[TensorSpec, TensorSpec]:
    """The two matrices of a layer's adapter: [rank, inputs] and [outputs, rank]."""
    outputs, inputs = layer.shape
    return TensorSpec("lora_A.weight", (rank, inputs), layer.role), TensorSpec(
        "lora_B.weight", (outputs, rank), layer.role
    )
