"""FSDP2's own memory: gathered weights, buffers of gathers and reductions, gradients of shards.

`fully_shard` cuts every tensor along its first dimension into `shard` chunks of equal rows, the
last of them filled up with padding (torch/distributed/fsdp/_fully_shard/_fsdp_param.py,
`_init_sharded_param`; `torch.chunk`). Rank 0 always holds full chunks, so the estimate is of the
rank with most. Gathers and reductions move padded chunks.

The order of events is that of torch/distributed/fsdp/_fully_shard (torch 2.11 to 2.15):

- A gather copies the shard into compute precision where that is another one, or into fp8
  (`_get_param_all_gather_inputs`), allocates what all ranks send (`foreach_all_gather`), and copies
  that into the weights. In forward the buffer is kept until the next unit's gather, so that copy
  and transfer overlap (`comm_ctx.all_gather_state`).
- Backward gathers one block ahead (`_backward_prefetch`).
- A reduction copies a unit's gradients into one buffer of master precision; the buffer is kept
  until the next unit's (`reduce_scatter_states`, at most one). What comes out is the gradient of
  the shards, or is added to it.

Frozen weights that every rank keeps whole belong to no unit: they rest beside the shards of the
adapters, which alone are gathered and reduced, and a unit without adapters does nothing.

A rank that is alone and keeps its weights has no FSDP2: their copies in compute precision are there
all the time; gradients come in compute precision, or in that of masters where they are sums
(parallel/whole_weights.py).

Before REWRITTEN_IN, three things take more: a gather in forward holds the buffer of the one before
until its own weights are whole (`prev_all_gather_state` of `wait_for_unshard`); replicas of a whole
model (ranks that share weights with no other) divide the buffer of a reduction by 1, into another
one (`foreach_reduce`); gradients of a later micro-batch lie next to those that are kept whole until
their unit's backward is over (`accumulate_unsharded_grad_if_needed`). One takes less: see loss.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Final

from drillyard.config.kernel_rules import MASTER_BYTES
from drillyard.estimation.memory.autograd import Ledger, MemoryKind
from drillyard.estimation.setup import COMPUTE_BYTES, NF4_BITS, LoraSetup, Setup
from drillyard.modelspec import TensorSpec, adapter_layers, adapter_matrices

REWRITTEN_IN: Final = (2, 15)
"""The release of torch whose FSDP2 follows a parameter's `grad_dtype`; 2.11 to 2.14 are alike in
all of this."""


@dataclass(frozen=True, slots=True)
class FsdpUnit:
    """A block or the root, sharded, gathered and reduced as one, in elements: all of this rank's,
    padding included, and those that are trained."""

    shard: int
    trained_shard: int
    padding: int
    """Elements of `shard` x ranks that no parameter has."""
    padding_trained: int
    num_trained: int
    """Tensors that are trained."""
    largest_trained: int
    """Elements of the largest tensor that is trained."""
    ranks: int
    packed_shard: int = 0
    """Elements of `shard` in nf4."""
    padding_packed: int = 0
    fp8_shard: int = 0
    """Elements of `shard` that rest in fp8, once."""
    gathered_fp8: int = 0
    """Elements of `shard` that are gathered in fp8."""
    largest_fp8: int = 0
    """Of one tensor."""
    frozen_whole: bool = False
    """Whether `shard` has the frozen tensors whole; then they are not gathered."""

    @property
    def gathered_shard(self) -> int:
        """Elements of `shard` that are gathered."""
        return self.trained_shard if self.frozen_whole else self.shard

    @property
    def whole_trained(self) -> int:
        return self.trained_shard * self.ranks


def fsdp_unit(tensors: Iterable[TensorSpec], setup: Setup) -> FsdpUnit:
    """The unit of some tensors over the ranks of `setup`, with the adapters that hang on them."""
    ranks, adapters = setup.shard, setup.adapters
    weights = list(tensors)
    frozen = weights if adapters is not None else []
    trained = weights if adapters is None else list(_adapter_tensors(weights, adapters))
    packed = [tensor for tensor in weights if setup.is_packed(tensor)]
    # Scaled by rows they rest twice, which takes what bf16 takes.
    in_one_byte = [each for each in weights if setup.rests_in_fp8(each) and not setup.scales_rows]
    parts = 1 if setup.holds_frozen_whole else ranks
    frozen_shard, packed_shard = (
        sum(_chunk(tensor.shape, parts) for tensor in some) for some in (frozen, packed)
    )
    trained_shard = sum(_chunk(tensor.shape, ranks) for tensor in trained)
    padding_trained = trained_shard * ranks - sum(tensor.parameters for tensor in trained)
    in_fp8 = [_chunk(each.shape, ranks) for each in weights if setup.is_gathered_in_fp8(each)]
    padding_frozen = frozen_shard * parts - sum(tensor.parameters for tensor in frozen)
    return FsdpUnit(
        shard=frozen_shard + trained_shard,
        trained_shard=trained_shard,
        padding=padding_frozen + padding_trained,
        padding_trained=padding_trained,
        num_trained=len(trained),
        largest_trained=max((tensor.parameters for tensor in trained), default=0),
        ranks=ranks,
        packed_shard=packed_shard,
        padding_packed=packed_shard * parts - sum(tensor.parameters for tensor in packed),
        fp8_shard=sum(each.parameters for each in in_one_byte),
        gathered_fp8=sum(in_fp8),
        largest_fp8=max(in_fp8, default=0),
        frozen_whole=setup.holds_frozen_whole,
    )


def _adapter_tensors(tensors: Iterable[TensorSpec], adapters: LoraSetup) -> Iterator[TensorSpec]:
    """What is trained beside some tensors: the two matrices of each adapter, and DoRA's
    magnitudes."""
    for layer in adapter_layers(tensors, adapters.targets):
        for matrix in adapter_matrices(layer, adapters.rank):
            yield TensorSpec("adapter", matrix, layer.role)
        if adapters.magnitudes:
            yield TensorSpec("magnitude", layer.shape[-2:-1], layer.role)


def _chunk(shape: tuple[int, ...], ranks: int) -> int:
    """Elements of the first of `ranks` chunks along the first dimension."""
    return -(-shape[0] // ranks) * prod(shape[1:])


class FsdpMemory:
    """The units of a model, blocks first and the root last, and what of them is in memory beyond
    the shards."""

    def __init__(self, ledger: Ledger, units: list[FsdpUnit], setup: Setup) -> None:
        self.ledger = ledger
        self.units = units
        self.setup = setup
        self.compute = COMPUTE_BYTES[setup.precision]
        self.master = MASTER_BYTES[setup.precision]
        self.is_older = setup.torch_release < REWRITTEN_IN
        self.whole_gradients = [0] * len(units)
        """Bytes of gradients of whole weights, by unit."""
        self._gathered = set(range(len(units)) if setup.holds_whole else ())
        self._sharded_gradients: set[int] = set()
        self._prefetched: dict[int, int] = {}
        self._all_gather_held = 0
        self._reduce_held = 0
        self._replicas_held = [0] * len(units)

    def resting_bytes(self, unit: FsdpUnit) -> int:
        """Bytes of this rank's shards between their uses: what is frozen rests in compute
        precision, or in fp8."""
        frozen = self._mixed(unit.shard - unit.trained_shard, unit.packed_shard)
        return unit.trained_shard * self.master + frozen - unit.fp8_shard * (self.compute - 1)

    def padding_bytes(self, unit: FsdpUnit) -> int:
        """Bytes of all ranks' shards that no parameter has."""
        return unit.padding_trained * self.master + self._mixed(
            unit.padding - unit.padding_trained, unit.padding_packed
        )

    def _mixed(self, elements: int, packed: int) -> int:
        """Bytes of so many elements in compute precision, but for `packed` of them, which are in
        nf4."""
        return (elements - packed) * self.compute + int(packed * NF4_BITS) // 8

    def _gathered_bytes(self, unit: FsdpUnit) -> int:
        packed = 0 if unit.frozen_whole else unit.packed_shard
        in_fp8 = unit.gathered_fp8 * unit.ranks
        return self._mixed(unit.gathered_shard * unit.ranks - in_fp8, packed * unit.ranks) + in_fp8

    # Gathers

    def gather(self, number: int, *, forward: bool) -> None:
        """Make the weights of a unit whole; nothing happens where they are."""
        unit, ledger = self.units[number], self.ledger
        if number in self._gathered:
            return
        if not unit.gathered_shard:
            return
        self._gathered.add(number)
        if unit.ranks == 1:
            cast = unit.largest_trained * self.compute if self.compute != self.master else 0
            ledger.take(self._gathered_bytes(unit) + cast, MemoryKind.GATHERED)
            ledger.give(cast, MemoryKind.GATHERED)
            return
        buffer = self._prefetched.pop(number, 0) or self._all_gather(unit)
        if forward and not self.is_older:
            self.release_all_gather()
        ledger.take(self._gathered_bytes(unit), MemoryKind.GATHERED)
        if forward:
            self.release_all_gather()
            self._all_gather_held = buffer
        else:
            ledger.give(buffer, MemoryKind.ALL_GATHER)

    def prefetch(self, number: int) -> None:
        """Start a gather, whose buffer then waits."""
        unit = self.units[number]
        if number not in self._gathered and unit.ranks > 1 and unit.gathered_shard:
            self._prefetched[number] = self._all_gather(unit)

    def _all_gather(self, unit: FsdpUnit) -> int:
        in_bf16 = unit.trained_shard - (0 if self.setup.adapters else unit.gathered_fp8)
        cast = in_bf16 * self.compute if self.compute != self.master else 0
        cast += unit.gathered_fp8
        # One after the other they are rounded to bf16 and scaled in fp32.
        scaled = unit.largest_fp8 * (2 + 4)
        self.ledger.take(unit.gathered_fp8 + scaled, MemoryKind.ALL_GATHER)
        self.ledger.give(unit.gathered_fp8 + scaled, MemoryKind.ALL_GATHER)
        buffer = self._gathered_bytes(unit)
        self.ledger.take(cast + buffer, MemoryKind.ALL_GATHER)
        self.ledger.give(cast, MemoryKind.ALL_GATHER)
        return buffer

    def release_all_gather(self) -> None:
        """Give back the buffer that forward held for overlap."""
        self.ledger.give(self._all_gather_held, MemoryKind.ALL_GATHER)
        self._all_gather_held = 0

    def reshard(self, number: int) -> None:
        """Give back a unit's whole weights."""
        if number in self._gathered and not self.setup.holds_whole:
            self._gathered.remove(number)
            self.ledger.give(self._gathered_bytes(self.units[number]), MemoryKind.GATHERED)

    # Gradients

    def reduce(self, number: int) -> None:
        """Turn a unit's whole gradients into gradients of its shards."""
        unit, ledger = self.units[number], self.ledger
        if self.setup.holds_whole:
            ledger.give(self.whole_gradients[number], MemoryKind.WHOLE_GRADIENTS)
            ledger.take(self.whole_gradients[number], MemoryKind.GRADIENTS)
            self.whole_gradients[number] = 0
            return
        if not unit.gathered_shard:
            return
        self.reshard(number)
        self._add_to_kept(number)
        self.release_reduction()
        if not unit.num_trained:
            return
        ledger.give(self._replicas_held[number], MemoryKind.TEMPORARIES)
        self._replicas_held[number] = 0
        self._reduce_held = unit.whole_trained * self.master
        ledger.take(self._reduce_held, MemoryKind.REDUCE_SCATTER)
        ledger.give(self.whole_gradients[number], MemoryKind.WHOLE_GRADIENTS)
        self.whole_gradients[number] = 0
        result = unit.trained_shard * self.master
        if unit.ranks == 1 and self.is_older and self.setup.replicate > 1:
            # A rank that is alone sets no factor to divide by (parallel/parallelize.py).
            ledger.take(result + self._reduce_held, MemoryKind.REDUCE_SCATTER)
            ledger.give(result + self._reduce_held, MemoryKind.REDUCE_SCATTER)
        if number not in self._sharded_gradients:
            self._sharded_gradients.add(number)
            ledger.take(result, MemoryKind.GRADIENTS)
            return
        # Added to what is there. With replicas it is held for their all-reduce until this unit's
        # next reduction, or the end of the last backward (`_all_reduce_state`).
        ledger.take(result, MemoryKind.TEMPORARIES)
        if self.setup.replicate > 1:
            self._replicas_held[number] = result
        else:
            ledger.give(result, MemoryKind.TEMPORARIES)

    def keep_whole(self, number: int) -> None:
        """Gradients that wait for those of the next micro-batch are cast to master precision, one
        after the other."""
        if self.setup.holds_whole:
            return
        unit, ledger = self.units[number], self.ledger
        self._add_to_kept(number)
        wide = self._kept_whole(unit)
        grows = wide - self.whole_gradients[number]
        if grows > 0:
            last = unit.largest_trained * self.compute
            ledger.take(grows + last, MemoryKind.WHOLE_GRADIENTS)
            ledger.give(last, MemoryKind.WHOLE_GRADIENTS)
        self.whole_gradients[number] = wide

    def _kept_whole(self, unit: FsdpUnit) -> int:
        """Bytes of a unit's gradients that are kept whole, in master precision."""
        return (unit.whole_trained - unit.padding_trained) * self.master

    def _add_to_kept(self, number: int) -> None:
        """Add gradients that lie next to those kept whole to these, and give them back."""
        extra = self.whole_gradients[number] - self._kept_whole(self.units[number])
        if extra > 0:
            self.ledger.give(extra, MemoryKind.WHOLE_GRADIENTS)
            self.whole_gradients[number] -= extra

    def release_reduction(self) -> None:
        """Give back the buffer of the last reduction."""
        self.ledger.give(self._reduce_held, MemoryKind.REDUCE_SCATTER)
        self._reduce_held = 0

    def finish(self) -> None:
        """The end of a step's last backward: nothing is waited for any longer."""
        self.release_reduction()
        self.ledger.give(sum(self._replicas_held), MemoryKind.TEMPORARIES)
        self._replicas_held = [0] * len(self.units)
