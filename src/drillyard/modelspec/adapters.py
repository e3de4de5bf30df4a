"""Adapters (LoRA) on the layers of a model: which layers targets name, and the shapes of what is
trained.

The rules are those of peft 0.21 with transformers 5. An adapter of rank r on a layer of I inputs
and O outputs has the matrices [r, I] and [O, r] (LoRA, arXiv 2106.09685 section 4.1). Experts are
stacked into one tensor, which peft adapts in some families under the names that the layers had
before they were stacked: one pair of matrices per expert, of rank 2 r where two layers were joined
(gate_up_proj). The router counts as a linear layer there.

Limit: in those families peft leaves out dense layers of the same names (of shared experts, say);
here they are counted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import prod
from typing import Final, Literal

from drillyard.errors import UserError
from drillyard.modelspec.spec import ModelSpec, TensorSpec

AdapterTargets = Sequence[str] | Literal["attention", "all-linear"]
"""Names of modules by their last parts (`q_proj`, `attn.c_proj`); those of attention; or all but
the head."""


SHARED_INPUTS: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers of one module that read the same input, where it has several of them."""


def layers_sharing_input(name: str, adapted: Collection[str]) -> tuple[str, ...]:
    """The layers among `adapted`, named by their modules, that read the input of the layer `name`,
    itself included."""
    parent, dot, leaf = name.rpartition(".")
    group = next((names for names in SHARED_INPUTS if leaf in names), (leaf,))
    return tuple(each for each in (f"{parent}{dot}{other}" for other in group) if each in adapted)


def adapter_layers(
    tensors: Iterable[TensorSpec], targets: AdapterTargets
) -> tuple[TensorSpec, ...]:
    """The weights among `tensors` that get an adapter by `targets`."""
    return tuple(
        tensor for tensor in tensors if _is_adaptable(tensor) and _is_target(tensor, targets)
    )


def adapter_matrices(tensor: TensorSpec, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The shapes of the matrices A and B of the adapter of `rank` on a weight, as peft stores
    them."""
    outputs, inputs = tensor.shape[-2:]
    if tensor.role == "expert":
        rank *= len(tensor.adapted_as) * prod(tensor.shape[:-2])
    return (rank, inputs), (outputs, rank)


def adapter_parameters(spec: ModelSpec, rank: int, targets: AdapterTargets) -> int:
    """The parameters of LoRA adapters of `rank` on the layers of `targets`. UserError for one that
    no layer has."""
    adapter_module_names(spec, targets)
    layers = adapter_layers(_tensors(spec), targets)
    return sum(prod(matrix) for layer in layers for matrix in adapter_matrices(layer, rank))


def adapter_module_names(spec: ModelSpec, targets: AdapterTargets) -> list[str]:
    """The names by which peft finds the layers of `targets`. Raises UserError for a target that no
    layer has."""
    if isinstance(targets, str):
        return sorted(
            {name for tensor in adapter_layers(_tensors(spec), targets) for name in _names(tensor)}
        )
    known = {name for tensor in _tensors(spec) if _is_adaptable(tensor) for name in _names(tensor)}
    missing = [target for target in targets if not any(_ends_with(name, target) for name in known)]
    if missing or not targets:
        last = sorted({name.rpartition(".")[2] for name in known})
        raise UserError(
            f"LoRA: {spec.model_type} has no linear layer {', '.join(missing)}\nit has"
            f" {', '.join(last)}."
            if targets
            else f"LoRA: no layer is named\n{spec.model_type} has {', '.join(last)}."
        )
    return list(targets)


def _tensors(spec: ModelSpec) -> list[TensorSpec]:
    return [*spec.root, *(tensor for block in spec.blocks for tensor in block.tensors)]


def _is_adaptable(tensor: TensorSpec) -> bool:
    return (tensor.linear or bool(tensor.adapted_as)) and tensor.role != "head"


def _is_target(tensor: TensorSpec, targets: AdapterTargets) -> bool:
    if targets == "all-linear":
        return True
    if targets == "attention":
        return tensor.role == "attention"
    return any(_ends_with(name, target) for name in _names(tensor) for target in targets)


def _names(tensor: TensorSpec) -> tuple[str, ...]:
    """Names of the modules that targets mean: self_attn.q_proj of self_attn.q_proj.weight."""
    return tensor.adapted_as or (tensor.name.rpartition(".")[0],)


def _ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")
