"""Low-rank adapters (LoRA, DoRA, rsLoRA) on a frozen model: the layers of `peft`, put in before the
model is sharded.

`peft` defines what an adapter computes and how its files look, so an adapter trained here loads
there and the other way round. Here is what it has no counterpart for: parameters on the meta
device, sharded ones, and draws that do not depend on the number of ranks. The frozen weights rest
in the precision of the forward, without gradient, moments or a second copy; adapters rest in the
master precision and, like all weights, are cast to that of the forward when they are gathered
(under bf16 peft alone would compute them in fp32).

Letters: r rank, I inputs and O outputs of a layer, E experts. A layer's update is scaling * B A
with A [r, I] and B [O, r]; scaling is alpha / r, for rsLoRA alpha / sqrt(r). DoRA (arXiv
2402.09353) scales the rows of the sum with the weight to trained lengths, the magnitudes [O].
Stacked experts have one pair per expert, in A [E*r, I] and B [O, r*E].
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig as PeftLoraConfig
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from drillyard.config.run_model import LoraConfig
from drillyard.errors import UserError
from drillyard.models.adapter_forward import ADAPTER, use_own_forward
from drillyard.models.nf4 import Nf4Linear, dequantize_linears, quantize_linears, unpack
from drillyard.models.random_init import module_seed
from drillyard.models.sharding import is_adapter_name, local_region, local_tensor, without_wrappers
from drillyard.modelspec import adapter_module_names, model_spec

LARGEST_UPDATE_ELEMENTS = 2**22


def inject_adapters(
    model: PreTrainedModel,
    lora: LoraConfig,
    base: str | None,
    dtypes: tuple[torch.dtype, torch.dtype],
    *,
    quantized: bool = False,
) -> None:
    """Put adapters into a model on the meta device and freeze all else; in place.

    `base`: the name of the pretrained model, for the adapter's files. `dtypes`: of the frozen
    parameters and of the adapters. `quantized`: keep the frozen linear layers in nf4. Raises
    UserError for a target that no layer of the model has, a rank over a layer's size, a variant
    that a targeted layer does not have, and where nf4 cannot hold a layer.
    """
    config = peft_config(model, lora, base)
    try:
        with torch.device("meta"):
            inject_adapter_in_model(config, model, ADAPTER)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"model.lora: {reason}\nname other layers in model.lora.target_modules"
        ) from error
    for module in model.modules():
        if isinstance(module, DoraLinearLayer):
            # Each forward would empty a cache that is only filled in inference, and torch.compile
            # refuses to recompute a block in which a dictionary changes.
            vars(module)["_cache_clear"] = _nothing
    for name, parameter in model.named_parameters():
        is_adapter = is_adapter_name(name)
        parameter.data = parameter.data.to(dtypes[is_adapter])
        parameter.requires_grad_(is_adapter)
    _require_small_rank(model)
    use_own_forward(model)
    if quantized:
        quantize_linears(model)


def peft_config(model: PreTrainedModel, lora: LoraConfig, base: str | None) -> PeftLoraConfig:
    """The adapters of a run config as peft describes them. Raises UserError for a target that no
    layer has."""
    targets: Any = lora.target_modules
    if targets != "all-linear":
        try:
            targets = adapter_module_names(model_spec(model.config.to_dict(), built=True), targets)
        except UserError as error:
            raise UserError(f"model.lora.target_modules: {error}") from None
    # Its type there is int, and files with a float in it are read.
    alpha: Any = int(lora.alpha) if lora.alpha.is_integer() else lora.alpha
    return PeftLoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        r=lora.rank,
        lora_alpha=alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        use_dora=lora.variant == "dora",
        use_rslora=lora.variant == "rslora",
        fan_in_fan_out=model.config.model_type == "gpt2",
    )


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, peft's layer) of each layer with an adapter; the stacked experts of a block are two,
    one in the other."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield without_wrappers(name), module


def init_adapters(model: PreTrainedModel, seed: int) -> None:
    """Draw A of each adapter as peft does, uniformly in +-1/sqrt(I), and set B to zero: equal bits
    on all layouts.

    The base's weights must be there: DoRA's magnitudes begin as the lengths of their rows.
    Collective.
    """
    device = next(model.parameters()).device
    with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for name, layer in adapted_layers(model):
            weight = _AdaptedWeight(layer)
            torch.manual_seed(module_seed(seed, name))
            whole = torch.empty(weight.down.shape, dtype=weight.down.dtype, device=device)
            nn.init.kaiming_uniform_(whole, a=math.sqrt(5))
            local_tensor(weight.down).copy_(whole[local_region(weight.down)])
            local_tensor(weight.up).zero_()
            if weight.magnitude is not None:
                local_tensor(weight.magnitude).copy_(
                    weight.lengths()[local_region(weight.magnitude)]
                )


class MergedWeights:
    """This rank's parts of the frozen weights with the updates of their adapters added, made one by
    one when they are needed; the last `kept` are kept. Weights in nf4 are unpacked at once."""

    def __init__(self, model: PreTrainedModel, kept: int) -> None:
        dequantize_linears(model)
        adapted = [_AdaptedWeight(layer) for _, layer in adapted_layers(model)]
        self._adapted = {id(each.weight): each for each in adapted}
        self._of = lru_cache(kept)(lambda key: self._adapted[key].merged())

    def part_of(self, weight: torch.Tensor) -> torch.Tensor | None:
        """This rank's part of a weight, rounded to its precision once; None for one without an
        adapter. Collective, in the same order on all ranks."""
        return self._of(id(weight)) if id(weight) in self._adapted else None


class _AdaptedWeight:
    """A layer's frozen weight and adapter, and this rank's part of the weight with the update
    added, row by row.

    Costs A and B whole, and LARGEST_UPDATE_ELEMENTS in the adapters' precision.
    """

    def __init__(self, layer: Any) -> None:
        name = layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"
        base = layer.get_base_layer()
        self.weight: torch.Tensor = getattr(base, name)
        self.is_packed = isinstance(base, Nf4Linear)
        self.local = local_tensor(self.weight)
        self.first_row = local_region(self.weight)[0].start
        self.down: torch.Tensor = layer.lora_A[ADAPTER].weight
        self.up: torch.Tensor = layer.lora_B[ADAPTER].weight
        magnitudes = layer.lora_magnitude_vector
        self.magnitude: torch.Tensor | None = (
            magnitudes[ADAPTER].weight if ADAPTER in magnitudes else None
        )
        self.scaling: float = layer.scaling[ADAPTER]
        self.transposed: bool = layer.fan_in_fan_out
        """Whether the weight is [I, O], as GPT-2's are."""

    def summed(self) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        """(rows of the local part, the same rows of the whole, those rows with the update added).
        Collective."""
        down, up = _whole(self.down), _whole(self.up)
        if self.weight.ndim == 3:
            experts = self.weight.shape[0]
            down = down.reshape(experts, -1, down.shape[-1])
            up = up.reshape(up.shape[0], -1, experts).permute(2, 0, 1)
        num_rows = self.local.shape[0]
        step = max(1, LARGEST_UPDATE_ELEMENTS * num_rows // max(1, self.local.numel()))
        for start in range(0, num_rows, step):
            part = slice(start, min(num_rows, start + step))
            rows = slice(self.first_row + part.start, self.first_row + part.stop)
            own = self.local[part]
            own = unpack(own, self.down.dtype) if self.is_packed else own
            update = (
                (up @ down[:, rows]).T
                if self.transposed
                else up[rows] @ (down[rows] if up.ndim == 3 else down)
            )
            yield part, rows, own.to(update.dtype) + update * self.scaling

    def lengths(self) -> torch.Tensor:
        """Norms [O] over the inputs of the weight with the update added; whole on every rank.
        Collective."""
        outputs = self.weight.shape[1 if self.transposed else 0]
        squares = torch.zeros(outputs, dtype=self.down.dtype, device=self.local.device)
        for _, rows, summed in self.summed():
            if self.transposed:
                squares += summed.square().sum(0)
            else:
                squares[rows] = summed.square().sum(1)
        if isinstance(self.weight, DTensor):
            for axis, placement in enumerate(self.weight.placements):
                if isinstance(placement, Shard):
                    dist.all_reduce(squares, group=self.weight.device_mesh.get_group(axis))
        return squares.sqrt()

    @torch.no_grad()
    def merged(self) -> torch.Tensor:
        """The local part plus the update, for DoRA with rows of the trained lengths. Collective."""
        factors = None if self.magnitude is None else _whole(self.magnitude) / self.lengths()
        merged = torch.empty_like(self.local)
        for part, rows, summed in self.summed():
            if factors is not None:
                summed = summed * (factors if self.transposed else factors[rows, None])
            merged[part].copy_(summed)
        return merged


def _nothing() -> None:
    """In the place of a method."""


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _require_small_rank(model: PreTrainedModel) -> None:
    for name, layer in adapted_layers(model):
        # The router of a mixture has one output per expert, which is less than most ranks.
        is_router = isinstance(layer, ParamWrapper) and layer.parameter_name == "weight"
        if layer.r[ADAPTER] > min(layer.in_features, layer.out_features) and not is_router:
            raise UserError(
                f"model.lora.rank: {layer.r[ADAPTER]} is over the size of {name},"
                f" {layer.in_features} inputs and {layer.out_features} outputs\nlower"
                " model.lora.rank, or name other layers in model.lora.target_modules"
            )
