"""Work of a GPU in a training step: floating-point operations, bytes of device memory, bytes
between GPUs.

All of it is counted from shapes, per token and per block, so that the work of a step is a sum over
the few kinds of blocks. Speeds are not part of this module.

FLOPs that are executed, per token (one multiply-add is 2):
- A matrix takes 2 a parameter forward; backward 2 for the gradient of its input, and 2 for its own
  unless it is frozen.
- Fused attention kernels (`varlen`, `flex`) do the causal half, forward 2 products of scores and
  values, backward 5, because they compute the scores again (FlashAttention-2, arXiv 2307.08691,
  section 3.1.2). Under `sdpa` and `eager` a mask is given, and all positions are computed; `eager`
  keeps the scores, so its backward is 4 products.
- Full checkpointing does a block's forward again, but for the last product, whose output no
  gradient needs. Selective checkpointing keeps fused attention and every first product of two, and
  does every second one again (`parallel/parallelize.py`). Products of eager attention count among
  those: about half of it is done again.

Bytes of elementwise work, which matrix products do not hide: an operation that reads `i` and writes
`o` bytes reads and writes them forward, and backward reads its input and the gradient of its output
and writes that of its input, 2 i + o. A weight in nf4 is read and written whole for its product,
and for that of backward. Compiled, chains of operations are one kernel that reads its inputs and
writes its outputs once; eager, each operation of transformers' code is a kernel of its own, and
RMSNorm goes through fp32.

Limits: with adapters the gradient of the first block's input is counted, before which autograd
stops; pointwise work of routers, linear attention and dropout is not counted; documents are as long
as sequences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final

from drillyard.config.kernel_rules import MASTER_BYTES
from drillyard.estimation.setup import COMPUTE_BYTES, NF4_BITS, LoraSetup, Setup
from drillyard.modelspec import (
    Block,
    TensorSpec,
    adapter_layers,
    adapter_matrices,
    attention_flops_per_token,
    layers_sharing_input,
)

FORWARD_PRODUCTS: Final = 2
BACKWARD_PRODUCTS: Final = {"varlen": 5, "flex": 5, "sdpa": 5, "eager": 4}


@dataclass(frozen=True, slots=True)
class UnitWork:
    """Work of one unit of FSDP (a block, or the root with its head). Rates are per token, `count`
    such units exist.

    `backward_*` include what is computed a second time. `trainable` parameters are those that have
    gradients. `attention_flops` are scores and values, part of both directions' FLOPs.
    """

    count: int
    parameters: int
    trainable: int
    forward_flops: float
    backward_flops: float
    forward_bytes: float
    backward_bytes: float
    attention_flops: float = 0.0
    packed: int = 0
    """Parameters in nf4, which are made whole for each product."""
    forward_fp8: float = 0.0
    """FLOPs of products in fp8, part of the direction's."""
    backward_fp8: float = 0.0
    gathered_fp8: int = 0
    """Parameters that are gathered in fp8."""


@dataclass(frozen=True, slots=True)
class Work:
    """A step's work on one GPU. `blocks` are the kinds of blocks; the head is part of `root`."""

    blocks: tuple[UnitWork, ...]
    root: UnitWork
    tokens: int
    micro_batches: int
    compute_bytes: int
    master_bytes: int
    frozen_whole: bool = False
    """Whether every rank holds what is frozen whole, so that it is not gathered."""

    @property
    def units(self) -> tuple[UnitWork, ...]:
        return (*self.blocks, self.root)

    @property
    def flops(self) -> float:
        """FLOPs of a step that one GPU really executes."""
        return self.tokens * sum(
            unit.count * (unit.forward_flops + unit.backward_flops) for unit in self.units
        )

    @property
    def fp8_flops(self) -> float:
        """Those of `flops` that are products in fp8."""
        return self.tokens * sum(
            unit.count * (unit.forward_fp8 + unit.backward_fp8) for unit in self.units
        )

    @property
    def attention_share(self) -> float:
        """The share of all FLOPs that are scores and values, which grow with the length of
        sequences."""
        return (
            self.tokens * sum(unit.count * unit.attention_flops for unit in self.units) / self.flops
        )

    @property
    def elementwise_bytes(self) -> float:
        return self.tokens * sum(
            unit.count * (unit.forward_bytes + unit.backward_bytes) for unit in self.units
        )

    @property
    def parameters(self) -> int:
        return sum(unit.count * unit.parameters for unit in self.units)

    def gathered_bytes(self, unit: UnitWork) -> float:
        """Bytes of a unit's whole weights as they are gathered."""
        if self.frozen_whole:
            return unit.trainable * self.compute_bytes
        in_compute = unit.parameters - unit.packed - unit.gathered_fp8
        return in_compute * self.compute_bytes + unit.packed * NF4_BITS / 8 + unit.gathered_fp8

    @property
    def trainable(self) -> int:
        return sum(unit.count * unit.trainable for unit in self.units)


def count_work(setup: Setup) -> Work:
    """The work of a step of `setup`. Of a model of which only counts are known, all of it is the
    root's.

    Cost: in proportion to the kinds of blocks, about 0.1 ms.
    """
    blocks = setup.spec.blocks
    by_id = {id(block): block for block in blocks}
    counts = Counter(id(block) for block in blocks)
    return Work(
        blocks=tuple(_block_work(by_id[key], count, setup) for key, count in counts.items()),
        root=_root_work(setup),
        tokens=setup.tokens_per_step_per_gpu,
        micro_batches=setup.gradient_accumulation,
        compute_bytes=COMPUTE_BYTES[setup.precision],
        master_bytes=MASTER_BYTES[setup.precision],
        frozen_whole=setup.holds_frozen_whole,
    )


def optimizer_bytes(setup: Setup, trainable: int) -> float:
    """Bytes that clipping and AdamW move for `trainable` local parameters, in the master precision.

    The norm of the gradients reads them once; the update reads weight, gradient and two moments and
    writes all but the gradient. On a GPU it clips too (training/adamw_kernel.py); else clipping
    reads and writes the gradients once more, and narrow ones are written and read in the master
    precision.
    """
    clips_apart = setup.clips_gradients and not setup.updates_in_one_pass
    high, low = MASTER_BYTES[setup.precision], COMPUTE_BYTES[setup.precision]
    passes = 4 + (2 if clips_apart else 0)
    narrow = 0
    if setup.keeps_gradients_narrow and low != high:
        narrow = trainable - setup.summed_parameters
    of_narrow = 2 * (low - high) + (0 if setup.updates_in_one_pass else 2 * high)
    return (passes * high + 4 * setup.moment_bytes) * trainable + of_narrow * narrow


def _block_work(block: Block, count: int, setup: Setup) -> UnitWork:
    products = _products(block, setup)
    forward_attention, backward_attention = _attention_flops(block, setup)
    forward = 2.0 * sum(one.parameters for one in products) + forward_attention
    backward = (
        sum((2.0 if one.frozen else 4.0) * one.parameters for one in products) + backward_attention
    )
    again = _recomputed_attention(setup, forward_attention)
    backward += _recomputed_flops(setup, products) + again
    packed = sum(tensor.parameters for tensor in block.tensors if setup.is_packed(tensor))
    operations = _operations(block, setup)
    forward_bytes = sum(reads + writes for reads, writes in operations)
    backward_bytes = sum(2 * reads + writes for reads, writes in operations)
    unpacking = (
        packed * (NF4_BITS / 8 + COMPUTE_BYTES[setup.precision]) / setup.tokens_per_micro_batch
    )
    forward_bytes, backward_bytes = forward_bytes + unpacking, backward_bytes + unpacking
    forward_casts, backward_casts = _fp8_casts(block, setup)
    forward_bytes, backward_bytes = forward_bytes + forward_casts, backward_bytes + backward_casts
    if setup.activation_checkpointing != "none":
        backward_bytes += forward_bytes
    extra = _adapter_parameters(block.tensors, setup.adapters)
    trainable = extra if setup.adapters else block.parameters
    attention = forward_attention + backward_attention + again
    return UnitWork(
        count,
        block.parameters + extra,
        trainable,
        forward,
        backward,
        forward_bytes,
        backward_bytes,
        attention,
        packed,
        2.0 * sum(one.parameters for one in products if one.fp8),
        sum((2.0 if one.frozen else 4.0) * one.parameters for one in products if one.fp8)
        + _recomputed_flops(
            setup, [one if one.fp8 else replace(one, parameters=0) for one in products]
        ),
        sum(each.parameters for each in block.tensors if setup.is_gathered_in_fp8(each)),
    )


def _fp8_casts(block: Block, setup: Setup) -> tuple[float, float]:
    """Bytes per token of the casts to fp8, forward and backward: an operand is read for its scale,
    read again, and written in one byte. Forward casts input and weight; backward both again, for
    torchao keeps them in bf16, and the gradient of the output. A frozen weight has no gradient, so
    that its input is not cast again; one that rests or was gathered in fp8 is not cast, and where
    that is one operand for both products copied transposed in backward.
    """
    once = 2 * COMPUTE_BYTES[setup.precision] + 1
    forward = backward = 0.0
    for tensor in block.tensors:
        if setup.is_fp8(tensor):
            outputs, inputs = tensor.shape
            weight = tensor.parameters / setup.tokens_per_micro_batch
            is_cast = setup.rests_in_fp8(tensor) or setup.is_gathered_in_fp8(tensor)
            both = setup.scales_rows
            cast, copied = (0, 0 if both else 2) if is_cast else (once, once)
            forward += once * inputs + cast * weight
            backward += once * (outputs + (0 if setup.adapters else inputs)) + copied * weight
    return forward, backward


@dataclass(frozen=True, slots=True)
class _Product:
    """A product of activations with a matrix of which one token passes so many parameters."""

    parameters: int
    frozen: bool
    needed: bool = True
    """Whether a gradient needs its output."""
    fp8: bool = False


def _products(block: Block, setup: Setup) -> list[_Product]:
    """The products of a block in the order in which they are made: each matrix, then the two of its
    adapter, of which layers that read one input have the first in common.

    Nothing needs the output of the last one, which is only added to others; that of experts is
    weighed, and needed.
    """
    products: list[_Product] = []
    adapters = setup.adapters
    targets = () if adapters is None else adapters.targets
    adapted = [
        layer.name.removesuffix(".weight") for layer in adapter_layers(block.tensors, targets)
    ]
    for tensor in block.tensors:
        # A router is a matrix even where it is no nn.Linear.
        if not tensor.is_matrix and not (tensor.role == "router" and len(tensor.shape) == 2):
            continue
        is_adapted = adapters is not None and bool(adapter_layers([tensor], adapters.targets))
        # Of a weight that peft adds the update to before its product, the gradient is made as if it
        # were trained.
        is_summed = is_adapted and bool(tensor.adapted_as)
        products.append(
            _Product(
                _active(tensor, block),
                frozen=adapters is not None and not is_summed,
                fp8=setup.is_fp8(tensor),
            )
        )
        if adapters is not None and is_adapted and not is_summed:
            rows, columns = tensor.shape
            name = tensor.name.removesuffix(".weight")
            sharing = (name,) if adapters.magnitudes else layers_sharing_input(name, adapted)
            if sharing[0] == name:
                together = len(sharing) * adapters.rank * columns
                products.append(_Product(together, frozen=False))
            products.append(_Product(adapters.rank * rows, frozen=False))
    if products and not block.mlp.num_experts:
        products[-1] = replace(products[-1], needed=False)
        if not products[-1].frozen and adapters is not None:
            products[-3] = replace(products[-3], needed=False)
    return products


def _recomputed_attention(setup: Setup, forward: float) -> float:
    """FLOPs per token of scores and values that backward does again, of `forward` in the
    forward."""
    if setup.activation_checkpointing == "full":
        return forward
    return (
        forward / 2
        if setup.activation_checkpointing == "selective" and setup.kernel == "eager"
        else 0.0
    )


def _recomputed_flops(setup: Setup, products: Sequence[_Product]) -> float:
    """FLOPs per token of the products that backward does again.

    Eager, a block is run again up to the last output that is needed, so that only the very last
    product is spared; compiled, all that are not needed are.
    """
    if setup.activation_checkpointing in ("none", "memory-budget"):
        return 0.0
    spared = [not one.needed for one in products]
    if not setup.compiled:
        spared[:-1] = [False] * (len(spared) - 1)
    again = [0 if free else one.parameters for one, free in zip(products, spared, strict=True)]
    return 2.0 * sum(again if setup.activation_checkpointing == "full" else again[1::2])


def _root_work(setup: Setup) -> UnitWork:
    """Head, loss and embedding. The embedding is a lookup; logits are made, read for the loss in
    fp32, and their gradients written and read by two products: 5 passes in the compute precision
    and 2 in fp32. The loss is never recomputed; where only counts are known, the root is the whole
    model and is (by half where that is selective)."""
    spec, frozen = setup.spec, setup.adapters is not None
    projections = sum(tensor.parameters for tensor in spec.root if tensor.role == "projection")
    matrices = spec.head_matrix_parameters + projections - spec.idle_root_parameters
    extra = _adapter_parameters(spec.root, setup.adapters)
    low = COMPUTE_BYTES[setup.precision]
    logits = float(spec.vocab_size * (5 * low + 2 * max(4, low)))
    recomputed = {"selective": 1.0, "full": 2.0}.get(setup.activation_checkpointing, 0.0)
    again = 0.0 if spec.blocks else recomputed
    return UnitWork(
        count=1,
        parameters=spec.root_parameters + extra,
        trainable=extra if frozen else spec.root_parameters,
        forward_flops=2.0 * (matrices + extra),
        backward_flops=(2.0 if frozen else 4.0) * matrices
        + 4.0 * extra
        + again * (matrices + extra),
        forward_bytes=logits / 2,
        backward_bytes=logits / 2,
    )


def _active(tensor: TensorSpec, block: Block) -> int:
    mlp = block.mlp
    if tensor.role == "expert" and mlp.num_experts:
        return tensor.parameters * mlp.experts_per_token // mlp.num_experts
    return tensor.parameters


def _adapter_parameters(tensors: Iterable[TensorSpec], adapters: LoraSetup | None) -> int:
    if adapters is None:
        return 0
    layers = adapter_layers(tensors, adapters.targets)
    return sum(
        prod(matrix) for layer in layers for matrix in adapter_matrices(layer, adapters.rank)
    )


def _attention_flops(block: Block, setup: Setup) -> tuple[float, float]:
    """FLOPs per token of scores and values, forward and backward."""
    causal = setup.kernel in ("varlen", "flex")
    forward = attention_flops_per_token(
        replace(setup.spec, blocks=(block,)), setup.sequence_length, causal=causal
    )
    products = 4 if block.attention.kind == "linear" else BACKWARD_PRODUCTS[setup.kernel]
    return forward, forward * products / FORWARD_PRODUCTS


def _operations(block: Block, setup: Setup) -> list[tuple[float, float]]:
    """The elementwise operations of a block: bytes read and written per token, forward."""
    low = COMPUTE_BYTES[setup.precision]
    attention, mlp, hidden = block.attention, block.mlp, setup.spec.hidden_size
    rotated = (
        0 if setup.spec.positions is not None else attention.num_heads + attention.num_kv_heads
    )
    rotated *= attention.rope_head_dim or attention.head_dim
    width = mlp.intermediate_size + mlp.experts_per_token * mlp.expert_size
    residuals = 1 if block.parallel else 2
    if setup.compiled:
        return [
            # Each residual sum is made in the kernel of the norm that follows it.
            (block.num_norms * hidden * low, block.num_norms * hidden * low),
            (residuals * hidden * low, residuals * hidden * low),
            (rotated * low, rotated * low),
            ((2 if mlp.gated else 1) * width * low, width * low),
        ]
    high = max(4, low)
    operations: list[tuple[float, float]] = [
        (residuals * 2 * hidden * low, residuals * hidden * low)
    ]
    if block.norm == "layer":
        operations.append((block.num_norms * hidden * low, block.num_norms * hidden * low))
    else:
        # to fp32, square, mean, scale, back, times the weight
        normed = block.num_norms * hidden
        operations.append((normed * (2 * low + 4 * high), normed * (2 * low + 3 * high)))
    # times cosine, half of it negated, joined, times sine, added
    operations.append((5.5 * rotated * low, 4.5 * rotated * low))
    activation = (width * low, width * low)
    operations += [activation, (2 * width * low, width * low)] if mlp.gated else [activation]
    if setup.kernel == "eager" and attention.kind != "linear":
        scores = attention.num_heads * setup.sequence_length
        # scores written, masked, softmax in fp32, back, read for the values
        operations.append((scores * (4 * low + high), scores * (3 * low + high)))
    return operations
