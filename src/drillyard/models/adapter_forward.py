"""What layers with LoRA adapters compute, in fewer operators than peft's layers: W x + s B A x.

- s multiplies A, which is small, and not B A x, which has O numbers per token: in backward the
  gradient of the layer's result goes into its products as it is, and no scaled copy is written.
- Layers that read the same input (queries, keys and values; gate and up) have one product with
  their As, one under the other: x is read once instead of two or three times, in backward the
  gradient of x has one part from all of them, and that of the As is one product.

B A x is not added by `addmm`, which on CUDA copies its summand first
(aten/src/ATen/native/cuda/Blas.cpp): a sum that a code generator fuses into what reads it moves
fewer bytes. Nothing is added to the frozen weights themselves, whose bf16 would round it away.

Parameters and their names stay those of peft. DoRA, dropout of inputs (each layer draws its own
mask) and adapters of stacked experts keep peft's forward.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from peft.tuners.lora import Linear
from torch import nn
from torch.nn import functional as F

from drillyard.modelspec.adapters import SHARED_INPUTS

ADAPTER = "default"
"""The name that peft gives an adapter by default."""


def use_fewer_operators(model: nn.Module) -> None:
    """Give layers with LoRA adapters, and the modules that call several on one input, the forward
    of this module; in place."""
    for module in model.modules():
        if _has_plain_adapter(module):
            vars(module)["forward"] = functools.partial(_adapted, module)
        groups = []
        for names in SHARED_INPUTS:
            found = tuple(name for name in names if _has_plain_adapter(_child(module, name)))
            if len(found) > 1:
                groups.append(found)
        if groups:
            vars(module)["forward"] = functools.partial(_sharing_inputs, module, groups)


def _has_plain_adapter(module: Any) -> bool:
    return (
        type(module) is Linear
        and ADAPTER not in module.lora_variant
        and isinstance(module.lora_dropout[ADAPTER], nn.Identity)
    )


def _child(module: nn.Module, name: str) -> nn.Module | None:
    return module._modules.get(name)


def _adapted(layer: Any, x: torch.Tensor) -> torch.Tensor:
    result = layer.base_layer(x)
    return _with_update(layer, result, F.linear(x, _scaled_down(layer)))


def _scaled_down(layer: Any) -> torch.Tensor:
    scaled: torch.Tensor = layer.lora_A[ADAPTER].weight * layer.scaling[ADAPTER]
    return scaled


def _with_update(layer: Any, result: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The layer's result with its update, from s A x."""
    update: torch.Tensor = layer.lora_B[ADAPTER](low)
    return result + update


def _sharing_inputs(module: Any, groups: list[tuple[str, ...]], *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(_WithSharedInputs(module, groups), *args, **kwargs)


class _WithSharedInputs:
    """A module for one forward, whose layers of each group have their products with A in common."""

    def __init__(self, module: nn.Module, groups: list[tuple[str, ...]]) -> None:
        self._module = module
        for names in groups:
            shared = _SharedProduct([getattr(module, name) for name in names])
            for number, name in enumerate(names):
                setattr(self, name, functools.partial(shared.layer, number))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _SharedProduct:
    """Layers that read one input: the first that is called makes the product for all."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self.input: torch.Tensor | None = None
        self.lows: tuple[torch.Tensor, ...] = ()

    def layer(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """The result of a layer; another input than the last one makes another product."""
        result = self.layers[number].base_layer(x)
        if x is not self.input:
            together = F.linear(x, torch.cat([_scaled_down(layer) for layer in self.layers]))
            self.input = x
            ranks = [layer.r[ADAPTER] for layer in self.layers]
            self.lows = torch.split(together, ranks, dim=-1)
        return _with_update(self.layers[number], result, self.lows[number])
