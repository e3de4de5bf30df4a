"""What layers with adapters compute, where peft's own layers cost more than they need or cannot be
compiled.

Routers and stacked experts (peft's ParamWrapper): the product W + s B A takes the weight's place
for one call. peft registers a parametrization in each forward for that, which torch.compile
refuses, as it changes the storage of a weight.

Parameters and their names stay those of peft. A layer gets its forward by its class and not as an
attribute of its own: torch.compile makes a graph for each attribute that holds another function,
and one for all layers of a class.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from torch.func import functional_call

ADAPTER = "default"
"""The name that peft gives an adapter by default."""


def use_own_forward(model: nn.Module) -> None:
    """Give layers with adapters the forward of this module; in place."""
    for module in model.modules():
        if type(module) is ParamWrapper:
            module.__class__ = AdaptedWeights


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
