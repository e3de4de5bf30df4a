"""Frozen weights that rest in fp8 under rowwise scaling, once for each of the two products that
read them.

The product of forward sums over a weight's inputs, so it takes a scale for each output; that of
backward sums over the outputs and takes a scale for each input. No single cast serves both, and two
take the 2 bytes a parameter that bf16 takes. What falls is what moves: a cast reads bf16 for the
scales, again for the values, and writes a byte, 5 bytes for each product; here a product reads its
operand as it is, in the order that `torch._scaled_mm` wants. Bits are those of casting each time.

The scales take 4 bytes for each output and input: a thousandth of the weights of an 8B model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchao.float8.config import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import (
    Float8TrainingTensor,
    GemmInputRole,
    LinearMMConfig,
)


class FrozenRowwiseLinear(Float8Linear):  # type: ignore[misc]
    """torchao's layer with a frozen weight, of which it has both operands and their scales.

    The parameter `weight` [O, I] is that of forward, `backward_weight` [O, I], which goes down its
    columns, that of backward. They are plain tensors: torchao's own lose their axis of scaling
    where they become parameters (its `detach`).
    """

    weight_scale: torch.Tensor
    backward_weight: torch.Tensor
    backward_scale: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., I] to [..., O], in the dtype of the input."""
        result: torch.Tensor = _Product.apply(
            input,
            self.weight,
            self.weight_scale,
            self.backward_weight,
            self.backward_scale,
            self.linear_mm_config,
            self.config,
        )
        return result if self.bias is None else result + self.bias.to(result.dtype)


@torch.no_grad()
def keep_both_operands(layer: Any) -> None:
    """Put the operands of forward and backward in the place of the frozen weight of `layer`, a
    `Float8Linear` with rowwise scaling; in place."""
    weight = layer.weight.detach()
    of_forward, of_backward = (
        _cast(weight, GemmInputRole.WEIGHT, axis, layer.linear_mm_config, layer.config)
        for axis in (-1, 0)
    )
    layer.weight = nn.Parameter(of_forward._data, requires_grad=False)
    by_columns = of_backward._data.t().contiguous().t()
    for name, tensor in (
        ("weight_scale", of_forward._scale),
        ("backward_weight", by_columns),
        ("backward_scale", of_backward._scale),
    ):
        layer.register_buffer(name, tensor, persistent=False)
    layer.__class__ = FrozenRowwiseLinear


@torch._dynamo.allow_in_graph
class _Product(torch.autograd.Function):
    """torchao's `matmul_with_hp_or_float8_args` for both operands of a weight that has no
    gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        backward_weight: torch.Tensor,
        backward_scale: torch.Tensor,
        mm_config: LinearMMConfig,
        config: Float8LinearConfig,
    ) -> torch.Tensor:
        ctx.save_for_backward(backward_weight, backward_scale)
        ctx.configs = mm_config, config
        ctx.dtype = x.dtype
        cast = _cast(x, GemmInputRole.INPUT, -1, mm_config, config)
        whole = Float8TrainingTensor(
            weight.t(), scale.t(), x.dtype, mm_config, GemmInputRole.WEIGHT, 0
        )
        return torch.mm(cast.reshape(-1, x.shape[-1]), whole).reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        weight, scale = ctx.saved_tensors
        mm_config, config = ctx.configs
        rows = gradient.reshape(-1, gradient.shape[-1])
        cast = _cast(rows, GemmInputRole.GRAD_OUTPUT, -1, mm_config, config)
        whole = Float8TrainingTensor(weight, scale, ctx.dtype, mm_config, GemmInputRole.WEIGHT, 0)
        of_input = torch.mm(cast, whole).reshape(*gradient.shape[:-1], -1)
        return of_input, *[None] * 6


def _cast(
    tensor: torch.Tensor,
    role: GemmInputRole,
    axis: int,
    mm_config: LinearMMConfig,
    config: Float8LinearConfig,
) -> Any:
    """`tensor` in fp8, with a scale for each of the parts that are summed over `axis`."""
    how = {
        GemmInputRole.INPUT: config.cast_config_input,
        GemmInputRole.WEIGHT: config.cast_config_weight,
        GemmInputRole.GRAD_OUTPUT: config.cast_config_grad_output,
    }[role]
    return hp_tensor_to_float8_dynamic(
        tensor,
        how.target_dtype,
        mm_config,
        gemm_input_role=role,
        scaling_granularity=how.scaling_granularity,
        axiswise_dim=axis,
        round_scales_to_power_of_2=config.round_scales_to_power_of_2,
    )
