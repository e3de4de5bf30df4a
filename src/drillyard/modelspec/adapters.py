"""Low-rank adapters by their numbers: which linear layers carry one, and how many parameters that adds.

An adapter of rank r on a linear layer of m inputs and n outputs has r (m + n) parameters (LoRA, arXiv 2106.09685
section 4.1). Layers are matched as PEFT does: by the last part of a module's name, or all linear layers but the head.
Experts that are stacked into one tensor are no linear layers, and PEFT's target_modules do not reach them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from drillyard.errors import UserError
from drillyard.modelspec.spec import ModelSpec, TensorSpec

Targets = Sequence[str] | Literal["all-linear"]


def adapter_layers(tensors: Iterable[TensorSpec], targets: Targets) -> tuple[TensorSpec, ...]:
    """The weights of the linear layers among `tensors` that `targets` name; the head is never among them."""
    return tuple(
        tensor
        for tensor in tensors
        if tensor.linear and tensor.role != "head" and (targets == "all-linear" or module_name(tensor) in targets)
    )


def adapter_parameters(spec: ModelSpec, rank: int, targets: Targets) -> int:
    """The parameters of the adapters of `rank` on the layers of `targets` (`q_proj`, `down_proj`, ... or all-linear).

    Raises UserError for a target that no layer of the model has.
    """
    everywhere = [*spec.root, *(tensor for block in spec.blocks for tensor in block.tensors)]
    names = {module_name(tensor) for tensor in adapter_layers(everywhere, "all-linear")}
    missing = [] if targets == "all-linear" else [name for name in targets if name not in names]
    if missing:
        raise UserError(
            f"LoRA: {spec.model_type} has no linear layer {', '.join(missing)}\nit has {', '.join(sorted(names))}."
        )
    return rank * sum(sum(tensor.shape) for tensor in adapter_layers(everywhere, targets))


def module_name(tensor: TensorSpec) -> str:
    """The last part of the name of a tensor's module: q_proj of self_attn.q_proj.weight."""
    return tensor.name.rsplit(".", 2)[-2]
