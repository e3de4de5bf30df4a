"""AdamW over this rank's shards, clipped and guarded on the device.

The optimizer sees plain local tensors, not DTensors: each rank's arithmetic on its own shard needs
no knowledge of the others, and DTensor's dispatch would cost more than the update of a small model.
One all-reduce a step carries both the squared gradient norm and the summed loss. Whether both are
finite stays on the device and goes into the fused kernel as `found_inf`, torch's gate for skipped
steps: parameters, moments and step count are then not changed. Nothing here waits for the device.

On a GPU a kernel of our own clips, updates, and writes the copies in compute precision of a rank
that holds its weights whole, all in one pass (adamw_kernel.py). Gradients that come narrower than
the masters (parallel/whole_weights.py) are widened as they are used, which changes no bit.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw

from drillyard.config.run import OptimizerConfig, ScheduleConfig
from drillyard.config.run_checks import resolve_decay_steps
from drillyard.models.kernels import builds_kernels
from drillyard.models.sharding import local_tensor
from drillyard.parallel.collectives import gather
from drillyard.parallel.ranks import Ranks
from drillyard.parallel.whole_weights import WholeWeights
from drillyard.training.eight_bit_adamw import EightBitAdamW


@dataclass(frozen=True)
class LocalShard:
    """A parameter and this rank's shard of it; a rank that is alone may have plain tensors."""

    name: str
    parameter: nn.Parameter
    local: torch.Tensor


@torch.no_grad()
def local_shards(root: nn.Module) -> list[LocalShard]:
    """The trainable parameters of a sharded module with this rank's shards."""
    return [
        LocalShard(name, parameter, local_tensor(parameter).detach())
        for name, parameter in root.named_parameters()
        if parameter.requires_grad
    ]


def has_weight_decay(root: nn.Module, name: str, parameter: torch.Tensor) -> bool:
    """Whether weight decay applies to the parameter `name` of `root`: to the weights of products
    and embeddings.

    Never to norms and biases, whatever their shape: Cohere's norms of queries and keys are [heads,
    head_dim], a bias of stacked experts is [experts, features]. Norms are recognised by class name,
    as every model defines its own.
    """
    owner, _, leaf = name.rpartition(".")
    is_norm = "norm" in type(root.get_submodule(owner)).__name__.lower()
    return parameter.ndim >= 2 and not is_norm and not leaf.endswith("bias")


class ShardedAdamW:
    """Fused AdamW on local shards, with global clipping and the skipping of non-finite steps.

    `root` must be sharded, materialised and loaded. Weight decay applies to the weights that
    `decays` names.
    """

    def __init__(
        self, root: nn.Module, config: OptimizerConfig, clipping: float | None, ranks: Ranks
    ) -> None:
        self.ranks = ranks
        self.clipping = clipping
        self.shards = local_shards(root)
        self.dtype = self.shards[0].local.dtype
        for shard in self.shards:
            shard.local.grad_dtype = None  # that of the gradient
        decaying: list[torch.Tensor] = []
        others: list[torch.Tensor] = []
        for shard in self.shards:
            (decaying if has_weight_decay(root, shard.name, shard.parameter) else others).append(
                shard.local
            )
        groups = [
            {"params": decaying, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        constants: dict[str, Any] = {
            "lr": config.learning_rate,
            "betas": config.betas,
            "eps": config.epsilon,
        }
        # Of three classes with `factor` and `found_inf`; `OnePassAdamW`'s module needs triton.
        self.optimizer: Any
        self.one_pass = config.name == "adamw" and _fits_one_pass(self.shards, ranks.device)
        self.whole_weights: WholeWeights | None = vars(root).get("whole_weights")
        if config.name == "adamw-8bit":
            self.optimizer = packed = EightBitAdamW(groups, **constants)
            for shard in self.shards:
                packed.state[shard.local] = packed.new_state(shard.local, shard.parameter.shape)
        else:
            if self.one_pass:
                from drillyard.training.adamw_kernel import OnePassAdamW

                self.optimizer = OnePassAdamW(groups, **constants)
            else:
                self.optimizer = ClippingAdamW(groups, **constants, fused=True)
            for shard in self.shards:
                self.optimizer.state[shard.local] = {
                    "step": torch.zeros((), dtype=torch.float32, device=ranks.device),
                    "exp_avg": torch.zeros_like(shard.local),
                    "exp_avg_sq": torch.zeros_like(shard.local),
                }
        # skipped steps, length of the current row of them, longest row: counted on the device, read
        # at logged steps
        self.skipped = torch.zeros(3, dtype=torch.float32, device=ranks.device)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for shard in self.shards:
            shard.parameter.grad = None
            shard.local.grad = None

    @torch.no_grad()
    def step(
        self, loss_sum: torch.Tensor, learning_rate: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Update the shards; returns the global loss and the gradient norm before clipping, both on
        the device.

        `loss_sum` is this rank's share of the global mean loss; the sum over ranks is the loss of
        the global batch.
        """
        for shard in self.shards:
            gradient = shard.parameter.grad
            assert gradient is not None, shard.name
            shard.local.grad = local_tensor(gradient)
        loss, norm = self._global_loss_and_norm(loss_sum)
        found_inf = (~(torch.isfinite(norm) & torch.isfinite(loss))).to(torch.float32)
        self.optimizer.found_inf = found_inf
        self.optimizer.factor = self._clip_factor(norm)
        if self.one_pass:
            self.optimizer.copies = self._copies()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.mark_written()
        if self.one_pass and self.whole_weights is not None:
            self.whole_weights.copies_are_written()
        self._count(found_inf)
        return loss, norm

    def mark_written(self) -> None:
        """Count a write to every shard, for gathers in fp8 (models/fp8_gather.py): neither torch's
        fused kernel nor a checkpoint that is loaded, through other tensors of the same memory, is
        counted by torch."""
        torch.autograd.graph.increment_version([shard.local for shard in self.shards])

    def _clip_factor(self, norm: torch.Tensor) -> torch.Tensor | None:
        """As torch.nn.utils.clip_grads_with_norm_ has it."""
        if self.clipping is None:
            return None
        return (self.clipping / (norm.to(self.dtype) + 1e-6)).clamp(max=1.0)

    def _copies(self) -> Mapping[torch.Tensor, torch.Tensor]:
        if self.whole_weights is None:
            return {}
        copies = self.whole_weights.copies
        return {
            shard.local: copies[shard.parameter]
            for shard in self.shards
            if shard.parameter in copies
        }

    def _global_loss_and_norm(self, loss_sum: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        norm = total_norm(
            [shard.local.grad for shard in self.shards if shard.local.grad is not None], self.dtype
        )
        # Replicas have the same gradients: each adds its share of the squared norm.
        both = torch.stack([norm.double().square() / self.ranks.num_replicas, loss_sum.double()])
        self.ranks.sum_over_data_ranks(both)
        return both[1], both[0].sqrt()

    def _count(self, found_inf: torch.Tensor) -> None:
        total, row, longest = self.skipped.unbind()
        row = (row + found_inf) * found_inf
        self.skipped = torch.stack([total + found_inf, row, torch.maximum(longest, row)])


class ClippingAdamW(torch.optim.AdamW):
    """torch's fused AdamW, whose gradients are multiplied by `factor`. Those narrower than their
    parameters are widened one at a time, so that no more than one copy is in memory."""

    found_inf: torch.Tensor | None = None
    factor: torch.Tensor | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters and their moments, unless `found_inf` is 1."""
        for group in self.param_groups:
            narrow = [each for each in group["params"] if each.grad.dtype != each.dtype]
            wide = [each for each in group["params"] if each.grad.dtype == each.dtype]
            for together in (wide, *([each] for each in narrow)):
                if together:
                    self._update(group, together)

    def _update(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        states = [self.state[each] for each in parameters]
        gradients = [each.grad.to(each.dtype) for each in parameters if each.grad is not None]
        if self.factor is not None:
            torch._foreach_mul_(gradients, self.factor)
        beta1, beta2 = group["betas"]
        adamw(
            parameters,
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            found_inf=self.found_inf,
            amsgrad=False,
            maximize=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )


def total_norm(gradients: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Norm of all `gradients`, of one or several precisions, computed in `dtype`: the bits of
    torch.nn.utils.get_total_norm on gradients of `dtype`."""
    norms: dict[int, torch.Tensor] = {}
    for each in {gradient.dtype for gradient in gradients}:
        numbers = [n for n, gradient in enumerate(gradients) if gradient.dtype == each]
        found = torch._foreach_norm([gradients[n] for n in numbers], 2, dtype=dtype)
        norms.update(zip(numbers, found, strict=True))
    in_order = torch.stack([norms[n] for n in range(len(gradients))])
    total: torch.Tensor = torch.linalg.vector_norm(in_order)
    return total


def _fits_one_pass(shards: list[LocalShard], device: torch.device) -> bool:
    """Whether the kernel of GPUs updates these shards: on all ranks or on none, as copies of a
    model would drift apart by two roundings. Collective on GPUs."""
    return device.type == "cuda" and all(gather(_kernel_fits(shards, device)))


def _kernel_fits(shards: list[LocalShard], device: torch.device) -> bool:
    """Whether the kernel can update this rank's shards. Warns where it should and cannot."""
    fits = all(each.local.dtype == torch.float32 and each.local.is_contiguous() for each in shards)
    if not fits or not builds_kernels(device):
        return False
    # Imported here: triton comes only with builds of torch for GPUs.
    from drillyard.training.adamw_kernel import agrees_with_torch

    if agrees_with_torch(device):
        return True
    warnings.warn(
        "the optimizer's kernel computes other numbers than torch's AdamW here, which takes its"
        " place and moves 12 more bytes per parameter and step: please report this with the"
        f" versions of torch ({torch.__version__}) and of the GPU's driver",
        stacklevel=2,
    )
    return False


def learning_rate(step: int, *, peak: float, total_steps: int, schedule: ScheduleConfig) -> float:
    """Learning rate of optimizer step `step` (0-based) of `total_steps`; a pure function, so
    resuming needs no state.

    Warmup rises linearly and reaches the peak in its last step; the shapes then fall to
    `final_fraction` of the peak, which the last step would reach if there were one more (as in
    PyTorch's and transformers' schedules).
    """
    warmup = schedule.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    floor = schedule.final_fraction
    if schedule.name == "constant":
        return peak
    if schedule.name == "warmup-stable-decay":
        decay = resolve_decay_steps(schedule, total_steps)
        progress = max(0.0, (step - (total_steps - decay)) / decay)
        return peak * (1.0 - (1.0 - floor) * min(1.0, progress))
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    if schedule.name == "linear":
        return peak * (1.0 - (1.0 - floor) * progress)
    return peak * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress)))
