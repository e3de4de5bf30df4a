"""What layers with adapters compute, where peft's own layers cost more than they need or cannot be
compiled.

Linear layers with LoRA, W x + s B A x:

- s multiplies A, which is small, and not B A x, which has O numbers per token: in backward the
  gradient of the layer's result goes into its products as it is, and no scaled copy is written.
- Layers that read the same input (queries, keys and values; gate and up) have one product with
  their As, one under the other: x is read once instead of two or three times, in backward the
  gradient of x has one part from all of them, and that of the As is one product.

B A x is not added by `addmm`, which on CUDA copies its summand first
(aten/src/ATen/native/cuda/Blas.cpp): a sum that a code generator fuses into what reads it moves
fewer bytes. Nothing is added to the frozen weights themselves, whose bf16 would round it away.

Routers and stacked experts (peft's ParamWrapper): the sum W + s B A takes the weight's place for
one call. peft registers a parametrization in each forward for that, which torch.compile refuses, as
it changes the storage of a weight.

Parameters and their names stay those of peft. DoRA and dropout of inputs (each layer draws its own
mask) keep peft's forward. A module gets its forward by its class and not as an attribute of its
own: torch.compile makes a graph for each attribute that holds another function, and one for all
modules of a class.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from peft.tuners.lora import Linear
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from drillyard.modelspec.adapters import SHARED_INPUTS

ADAPTER = "default"
"""The name that peft gives an adapter by default."""

Groups = tuple[tuple[str, ...], ...]
"""Names of the children of a module that read one input."""


def use_own_forward(model: nn.Module) -> None:
    """Give layers with adapters, and the modules that call several on one input, the forward of
    this module; in place."""
    for module in list(model.modules()):
        if type(module) is ParamWrapper:
            module.__class__ = AdaptedWeights
        elif _has_plain_adapter(module):
            module.__class__ = AdaptedLinear
        elif groups := _groups(module):
            module_class: Any = type(module)
            module.__class__ = _sharing_inputs(module_class, groups)


def _has_plain_adapter(module: Any) -> bool:
    return (
        type(module) in (Linear, AdaptedLinear)
        and ADAPTER not in module.lora_variant
        and isinstance(module.lora_dropout[ADAPTER], nn.Identity)
    )


def _groups(module: nn.Module) -> Groups:
    children = module._modules
    plain = (
        tuple(name for name in names if _has_plain_adapter(children.get(name)))
        for names in SHARED_INPUTS
    )
    return tuple(names for names in plain if len(names) > 1)


class AdaptedWeights(ParamWrapper):
    """A layer some of whose weights have adapters: one wrapper around the other, each for one
    weight. The outermost is called."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer gives for the same arguments with the summed weights."""
        summed: dict[str, torch.Tensor] = {}
        layer: Any = self
        while isinstance(layer, ParamWrapper):
            wrapper: Any = layer
            weight = wrapper.get_param()
            if wrapper.num_experts > 1:
                left, right, scaling = wrapper.get_delta_factors(ADAPTER)
                weight = torch.baddbmm(weight, left, right, alpha=scaling)
            else:
                weight = weight + wrapper.get_delta_weight(ADAPTER)
            summed[wrapper.parameter_name] = weight
            layer = layer.base_layer
        return functional_call(layer, summed, args, kwargs)


class AdaptedLinear(Linear):
    """A linear layer with a LoRA adapter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., I] to [..., O]."""
        own: Any = self
        result = own.base_layer(x)
        return _with_update(own, result, F.linear(x, _scaled_down(own)))


def _scaled_down(layer: Any) -> torch.Tensor:
    """s A [r, I]."""
    scaled: torch.Tensor = layer.lora_A[ADAPTER].weight * layer.scaling[ADAPTER]
    return scaled


def _with_update(layer: Any, result: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The layer's result with its update, from s A x."""
    update: torch.Tensor = layer.lora_B[ADAPTER](low)
    return result + update


@functools.cache
def _sharing_inputs(module_class: Any, groups: Groups) -> Any:
    """`module_class` with a forward in which layers of each group share a product."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return module_class.forward(_WithSharedInputs(self, groups), *args, **kwargs)

    return type(module_class.__name__, (module_class,), {"forward": forward})


class _WithSharedInputs:
    """A module for one forward, whose layers of each group have their products with A in common."""

    def __init__(self, module: nn.Module, groups: Groups) -> None:
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
