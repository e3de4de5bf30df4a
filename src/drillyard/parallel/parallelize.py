"""Transformations of a model before it trains, in the order in which they are applied.

1. Activation checkpointing, per block: the block's forward is wrapped, so no parameter changes its
   name.
2. torch.compile, per block: collectives stay outside of the graphs and compile time does not grow
   with depth.
3. FSDP2, per block and then the root: parameters rest as fp32 (or fp64) shards, are gathered in the
   compute precision, and gradients are summed in the precision of the parameters. A rank that is
   alone and may keep its weights whole has no FSDP2 (whole_weights.py).

Gradients are summed, not averaged, over ranks (divide factor 1): the loss is already divided by the
valid tokens of the whole global batch. gloo has no pre-multiplied sum, hence the forced plain SUM.
One rank alone sums nothing: a factor would make torch 2.11 divide by 1 into a copy.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from drillyard.config.kernel_rules import MEMORY_BUDGET, resolve_compile
from drillyard.config.run import TrainingConfig
from drillyard.parallel.ranks import Ranks
from drillyard.parallel.whole_weights import WholeWeights

COMPUTE_DTYPE = {
    "bf16": torch.bfloat16,
    "fp8": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
"""Of gathered weights and activations, by `training.precision`."""
MASTER_DTYPE = {
    "bf16": torch.float32,
    "fp8": torch.float32,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
"""Of sharded weights, their gradients and moments."""


def parallelize_model(
    root: nn.Module,
    blocks: list[nn.Module],
    ranks: Ranks,
    training: TrainingConfig,
    *,
    keep_unsharded: bool,
    unsharded: Collection[nn.Parameter] = (),
) -> None:
    """Apply checkpointing, compile and FSDP2 to `root`, whose transformer blocks are `blocks`; in
    place.

    `keep_unsharded` leaves a block's gathered weights in memory from forward to backward: one
    gather per step instead of two, none on one rank, at the price of the whole model in compute
    precision. `unsharded`: frozen parameters that every rank has whole, in compute precision. FSDP2
    ignores them, and a block or root that has no others gathers and reduces nothing.
    """
    for block in blocks:
        checkpoint_activations(block, training.activation_checkpointing)
    if resolve_compile(training, ranks.device.type):
        is_limited = training.activation_checkpointing == "memory-budget"
        functorch_config.activation_memory_budget = MEMORY_BUDGET if is_limited else 1.0
        for block in blocks:
            compile_block(block)
    if holds_whole(ranks, keep_unsharded=keep_unsharded):
        _hold_whole(root, COMPUTE_DTYPE[training.precision])
        return
    policy = MixedPrecisionPolicy(
        param_dtype=COMPUTE_DTYPE[training.precision],
        reduce_dtype=MASTER_DTYPE[training.precision],
        cast_forward_inputs=False,
    )
    ignored = set(unsharded) or None
    shard = functools.partial(
        fully_shard, mesh=ranks.fsdp_mesh, mp_policy=policy, ignored_params=ignored
    )
    for block in blocks:
        shard(block, reshard_after_forward=not keep_unsharded)
    shard(root, reshard_after_forward=False)
    for module in fsdp_modules(root):
        if ranks.world_size > 1:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        vars(module)["gather_each"] = _gather_each
        register_fsdp_forward_method(cast(nn.Module, module), "gather_each")
    register_fsdp_forward_method(root, "next_logits")


def holds_whole(ranks: Ranks, *, keep_unsharded: bool) -> bool:
    """Whether a model is trained without FSDP2: no other rank has a part of it, and it fits
    whole."""
    return ranks.world_size == 1 and keep_unsharded


def _hold_whole(root: Any, compute_dtype: torch.dtype) -> None:
    weights = WholeWeights(root, compute_dtype)
    next_logits = root.next_logits

    @functools.wraps(next_logits)
    def with_weights(**inputs: Any) -> Any:
        weights.use()
        return next_logits(**inputs)

    vars(root)["next_logits"] = with_weights
    vars(root)["whole_weights"] = weights


def expect_one_micro_batch(root: nn.Module, summed: Collection[nn.Parameter]) -> None:
    """Say, before the first forward, that no step of `root` sums gradients of micro-batches, and
    that its backward sums those of `summed` from parts."""
    weights: WholeWeights | None = vars(root).get("whole_weights")
    if weights is not None:
        weights.expect_one_micro_batch(summed)


def end_backward(root: nn.Module) -> None:
    """End a step's last backward: the masters have their gradients. FSDP2 does so itself."""
    weights: WholeWeights | None = vars(root).get("whole_weights")
    if weights is not None:
        weights.give_back()


def fsdp_modules(root: nn.Module) -> list[FSDPModule]:
    """Every module of `root` that FSDP2 shards, the root included."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def reshard(root: nn.Module) -> None:
    """Give gathered weights back, as a backward would: after a forward without one they would stay,
    and in the compute precision, where the next reader expects the master weights."""
    end_backward(root)
    for module in fsdp_modules(root):
        module.reshard()


@contextlib.contextmanager
def finished_modules(root: nn.Module) -> Iterator[set[nn.Module]]:
    """The modules of `root` that FSDP2 shards and whose forward ended in the meantime, as they
    come."""
    finished: set[nn.Module] = set()
    sharded = cast(list[nn.Module], fsdp_modules(root))
    hooks = [
        module.register_forward_hook(lambda module, *_: finished.add(module)) for module in sharded
    ]
    try:
        yield finished
    finally:
        for hook in hooks:
            hook.remove()


def join_remaining_gathers(root: nn.Module, finished: Collection[nn.Module]) -> None:
    """Take part in what is left of a forward of `root` that failed on this rank alone, and compute
    nothing.

    Each module that is not `finished` passes through FSDP2's hooks, so its state is afterwards that
    of other ranks.
    """
    if isinstance(root, FSDPModule) and root not in finished:
        passed: set[Any] = {root, *finished}
        vars(root)["gather_each"]([module for module in fsdp_modules(root) if module not in passed])


def _gather_each(modules: Collection[Any] = ()) -> None:
    """A forward that computes nothing: FSDP2 gathers its module's weights, and here those of
    `modules` in turn."""
    for module in modules:
        module.gather_each()


def compile_block(block: nn.Module) -> None:
    """Compile a block's forward, as one graph: a break would leave part of it uncompiled without a
    word.

    torch counts graphs by code, which blocks of one class share: two kinds of layer, with gradients
    and without, and each further size of batch need one each, so its default limit of 8 ends runs.
    """
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, limits.accumulated_recompile_limit)
    block.forward = torch.compile(block.forward, fullgraph=True)


def checkpoint_activations(block: nn.Module, mode: str) -> None:
    """Make `block` recompute its activations in backward: all of them (`full`), or the cheap ones
    (`selective`). With `memory-budget` torch.compile chooses, from the graphs of blocks."""
    assert mode != "auto", "resolved before (estimation/resolved_setup.py)"
    if mode in ("none", "memory-budget"):
        return
    options: dict[str, Any] = {}
    if mode == "selective":
        options = {"context_fn": lambda: create_selective_checkpoint_contexts(_save_expensive())}  # type: ignore[no-untyped-call]
    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)


def _save_expensive() -> Callable[..., CheckpointPolicy]:
    """Selective policy: keep outputs of attention and experts and every second matrix product,
    recompute the rest."""
    aten = torch.ops.aten
    expensive = {
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }
    # Kernels that a torch or a build may lack: flash attention over packed documents, and experts
    # of a mixture.
    for namespace, name in (("torch_attn", "_varlen_attn"), ("aten", "_grouped_mm")):
        if hasattr(getattr(torch.ops, namespace), name):
            expensive.add(getattr(getattr(torch.ops, namespace), name).default)
    products = {
        aten.mm.default,
        aten.bmm.default,
        aten.addmm.default,
        aten._scaled_mm.default,
    }
    if hasattr(torch.ops.drillyard, "nf4_linear"):
        products.add(torch.ops.drillyard.nf4_linear.default)
    seen = {False: 0, True: 0}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator in expensive:
            return CheckpointPolicy.MUST_SAVE
        if operator in products:
            seen[context.is_recompute] += 1
            return (
                CheckpointPolicy.MUST_SAVE
                if seen[context.is_recompute] % 2
                else CheckpointPolicy.PREFER_RECOMPUTE
            )
        return CheckpointPolicy.PREFER_RECOMPUTE

    return policy
