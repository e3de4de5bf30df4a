"""Matrix products in 8 bits (`training.precision: fp8`), by torchao's float8 training: each operand
is scaled to what fp8 can hold and cast just before its product, in forward and backward alike.

Weights rest and are saved as under bf16, so a checkpoint knows nothing of it; ranks that share them
exchange them in fp8 (fp8_gather.py), under tensorwise. Frozen ones beside adapters are cast once
and then rest in fp8 on ranks that hold them whole, with no cast of them in a product, to the same
bits: in a byte instead of two under tensorwise, in two under rowwise (fp8_rowwise.py).
`tensorwise` has one scale for a whole operand; `rowwise` one for each row (a power of two), which
an outlier disturbs less and whose products are slower. Inputs and weights are e4m3; gradients e5m2
under tensorwise, e4m3 under rowwise.

What stays in bf16: the head (the loss makes its product, and fp8 gains about 1 % there), stacked
experts, routers, adapters, layers that are not an `nn.Linear`, and those whose sizes
`torch._scaled_mm` refuses: they must be multiples of 16.

Without a GPU torchao emulates: operands are rounded to fp8 and multiplied in bf16.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from drillyard.config.kernel_rules import FP8_MULTIPLE, Fp8Scaling, fp8_fits, fp8_refusal
from drillyard.errors import MissingExtraError, UserError
from drillyard.models.sharding import is_adapter_name, without_wrappers


def use_fp8_products(
    model: PreTrainedModel, blocks: Iterable[nn.Module], scaling: Fp8Scaling, device: torch.device
) -> list[str]:
    """Let the linear layers of `blocks` multiply in fp8; in place. Returns the layers that are left
    in bf16, of all blocks once: `layers.*.mlp.gate`.

    Raises UserError for a GPU that cannot, and where no layer would compute in fp8.
    """
    try:
        from torchao.float8 import Float8LinearConfig
        from torchao.float8.float8_linear import Float8Linear
    except ModuleNotFoundError:
        raise MissingExtraError(
            "training.precision: fp8 needs torchao, which is not installed: pip install"
            " 'drillyard[torchao]'"
        ) from None
    require_fp8(device, scaling)
    recipe: Any = Float8LinearConfig.from_recipe_name(scaling)
    recipe = replace(recipe, emulate=device.type == "cpu")
    inside = {id(module) for block in blocks for module in block.modules()}
    left: dict[str, None] = {}
    converted = 0
    for name, module in list(model.named_modules()):
        if id(module) not in inside or is_adapter_name(name) or not _multiplies(module):
            continue
        if type(module) is nn.Linear and fp8_fits(module.in_features, module.out_features):
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, Float8Linear.from_float(module, recipe))
            converted += 1
        else:
            left[_of_all_blocks(without_wrappers(name))] = None
    if not converted:
        raise UserError(
            "training.precision: no layer of this model can compute in fp8: it takes an nn.Linear"
            f" whose sizes are multiples of {FP8_MULTIPLE}\nset training.precision: bf16"
        )
    return list(left)


@torch.no_grad()
def keep_frozen_in_fp8(model: nn.Module) -> None:
    """Put what its products would be cast to in the place of each frozen weight, which is whole; in
    place. Scaled as one, backward makes the transposed copy that the product reads; by rows, both
    products have an operand of their own."""
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_linear import Float8Linear
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import GemmInputRole

    for module in list(model.modules()):
        if isinstance(module, Float8Linear) and not module.weight.requires_grad:
            recipe: Any = module.config
            if recipe.cast_config_weight.scaling_granularity is ScalingGranularity.AXISWISE:
                from drillyard.models.fp8_rowwise import keep_both_operands

                keep_both_operands(module)
                continue
            weight = hp_tensor_to_float8_dynamic(
                module.weight.detach(),
                recipe.cast_config_weight.target_dtype,
                module.linear_mm_config,
                gemm_input_role=GemmInputRole.WEIGHT,
                round_scales_to_power_of_2=recipe.round_scales_to_power_of_2,
            )
            module.weight = nn.Parameter(weight, requires_grad=False)


def require_fp8(device: torch.device, scaling: Fp8Scaling) -> None:
    """Raise UserError for a GPU that has no such products."""
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    refusal = fp8_refusal(torch.cuda.get_device_name(device), capability, scaling)
    if refusal is not None:
        raise UserError(f"training.precision: {refusal}")


def _multiplies(module: nn.Module) -> bool:
    """Whether activations are multiplied by a matrix of this very module."""
    return any(parameter.ndim >= 2 for parameter in module.parameters(recurse=False))


def _of_all_blocks(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
