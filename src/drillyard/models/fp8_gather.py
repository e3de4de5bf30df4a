"""Gathers of weights in fp8 instead of bf16, where several ranks share them: half of the bytes
between ranks and of a gathered weight, to the same bits.

Under tensorwise scaling a product reads a weight only as fp8 values and one scale. A rank that
knows the largest magnitude of the whole weight can cast its own part, so that FSDP2 gathers what
the product takes, and no product casts it again. FSDP2 lets a shard say what is gathered of it, by
two methods that it looks up on the shard (`FSDPParam.all_gather_inputs`). Here they are attributes
of a plain tensor: torchao's own gathers (`WeightWithDynamicFloat8CastTensor`) make all shards
tensors of a class of its own, which optimizer, checkpoints and exports would have to know.

A part is rounded to bf16 before it is scaled, and the scale is that of the rounded weight, as in a
product that casts what was gathered in bf16: so losses are equal to the bit, and a checkpoint
continues with or without, on any number of ranks.

Cost: once per change of the weights one all-reduce of a number per weight, and a read of the
shards for their magnitudes; in each gather 17 bytes per element of a shard (round 4 + 2, scale 2 +
4, cast 4 + 1), on N ranks 17/N per weight, where bf16 has 6/N and the product a cast of 5. The
product of backward still makes a transposed copy.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from drillyard.parallel.parallelize import fsdp_modules


def gather_in_fp8(root: nn.Module) -> int:
    """Have FSDP2 gather in fp8 the weights that layers of `root` multiply in it, tensorwise; in
    place. Returns how many there are.

    Called once, after `fully_shard` and `to_empty` and before anything is gathered.
    """
    from torchao.float8.float8_linear import Float8Linear

    together = _Scales()
    for sharded in fsdp_modules(root):
        # Not public (torch 2.11 to 2.15): FSDP2 takes hold of its shards, padded.
        group: Any = sharded._get_fsdp_state()._fsdp_param_group
        if group is None:
            continue
        group.lazy_init()
        for each in group.fsdp_params:
            module, name = each._module_info.module, each._module_info.param_name
            if isinstance(module, Float8Linear) and name == "weight":
                together.weights.append(_GatheredWeight(each, module, together))
                each._init_extensions()
    return len(together.weights)


class _Scales:
    """The scales of all weights that are gathered in fp8, computed together."""

    def __init__(self) -> None:
        self.weights: list[_GatheredWeight] = []

    @torch.no_grad()
    def update(self, ranks: dist.ProcessGroup) -> None:
        """Make the scales those of the weights as they are now. Collective over the `ranks` that
        share them."""
        from torchao.float8.float8_utils import amax_to_scale

        shards = [weight.shard for weight in self.weights]
        largest = torch.stack(torch._foreach_norm(shards, float("inf"))).float()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=ranks)
        # Rounding keeps the order: this is the largest of the rounded.
        scales = amax_to_scale(largest.to(torch.bfloat16), self.weights[0].fp8)
        # In their place: whole weights refer to them.
        torch._foreach_copy_([weight.scale for weight in self.weights], list(scales.unbind()))
        for weight in self.weights:
            weight.version = weight.shard._version


class _GatheredWeight:
    """FSDP2's extension of a gather, for the weight of one layer."""

    def __init__(self, fsdp_param: Any, module: Any, together: _Scales) -> None:
        self.shard: torch.Tensor = fsdp_param._sharded_param_data
        """This rank's part with its padding of zeros, flat: the memory that the optimizer
        updates."""
        self.shape: torch.Size = fsdp_param.padded_sharded_param_size
        self.fp8: torch.dtype = module.config.cast_config_weight.target_dtype
        self.mm_config = module.linear_mm_config
        self.together = together
        self.scale = torch.ones((), device=self.shard.device)
        self.version: int | None = None
        """torch's count of writes to the shard of which `scale` is."""
        local: Any = fsdp_param.sharded_param._local_tensor
        local.fsdp_pre_all_gather = self.cast_shard
        local.fsdp_post_all_gather = self.whole_weight

    @torch.no_grad()
    def cast_shard(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor], None]:
        """This rank's part in fp8 [padded rows, columns], as bytes: not every backend transfers
        fp8. Collective where the weights have changed."""
        if self.version != self.shard._version:
            self.together.update(mesh.get_group())
        rounded = self.shard.to(mp_policy.param_dtype)
        # Within the range of fp8, as the scale is that of the largest. It has a dimension, so that
        # the result is in its precision.
        values = (rounded * self.scale[None]).to(self.fp8)
        return (values.view(torch.uint8).view(self.shape),), None

    def whole_weight(
        self,
        gathered: tuple[torch.Tensor, ...],
        metadata: None,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[()]] | None:
        """The weight that products read. Later gathers write to the same memory, and need nothing
        here."""
        from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

        if out is not None:
            return None
        (values,) = gathered
        whole = Float8TrainingTensor(
            values.view(self.fp8),
            self.scale,
            param_dtype,
            self.mm_config,
            gemm_input_role=GemmInputRole.WEIGHT,
        )
        return cast(torch.Tensor, whole), ()
