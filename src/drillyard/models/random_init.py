"""Random weights by the model's own scheme, the same bits for every number of ranks.

Sharded tensors cannot be drawn shard by shard: ranks with the same seed would draw the same numbers
for different parts, and schemes that depend on a whole module (GPT-2 scales its output projections
in their parent) would not see it. So a unit, one transformer block or one module outside of the
blocks, is made whole in memory, initialised by the model's own `_init_weights` module by module,
children first, and each rank keeps its slice. Before each module the generator is seeded from
(seed, module name).

Cost: every rank draws every number, on the parameters' device and in their precision, with the
memory of the largest unit. Another kind of device gives other bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from drillyard.models.architectures import blocks
from drillyard.models.nf4 import Nf4Linear, pack_into, packed_layers
from drillyard.models.sharding import (
    is_adapter_name,
    local_region,
    local_tensor,
    plain_name,
    restore_ties,
)
from drillyard.models.weight_layout import named_tensors


def init_random(model: PreTrainedModel, seed: int) -> None:
    """Initialise all parameters and buffers of a model whose storage is allocated but not filled,
    sharded or not.

    Equal bits for any number of ranks, and for HSDP. Tied weights are drawn once, where the
    embedding is.
    """
    restore_ties(model)
    device = next(model.parameters()).device
    filled: set[int] = set()
    with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for unit in _units(model):
            with _whole(unit, filled, device):
                for name, module, initialiser in unit:
                    torch.manual_seed(module_seed(seed, name))
                    initialiser._init_weights(module)  # type: ignore[no-untyped-call]


def init_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that no checkpoint holds (rotary tables, embedding scales); parameters
    stay as they are."""
    kept = {id(tensor) for tensor in named_tensors(model).values()}
    device = next(model.parameters()).device
    with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for unit in _modules(model):
            _, module, initialiser = unit
            if module._buffers:
                with _whole([unit], kept, device):
                    initialiser._init_weights(module)  # type: ignore[no-untyped-call]


def module_seed(seed: int, module_name: str) -> int:
    """64 bits that differ for every module and seed."""
    digest = hashlib.blake2b(f"{seed}/{module_name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


NamedModule = tuple[str, nn.Module, PreTrainedModel]


def _modules(model: PreTrainedModel) -> list[NamedModule]:
    """(plain name, module, the model whose scheme it follows), children before parents, each module
    once.

    Without adapters, which no model's scheme knows.
    """
    found: list[NamedModule] = []
    seen: set[int] = set()

    def visit(name: str, module: nn.Module, initialiser: PreTrainedModel) -> None:
        if id(module) in seen or is_adapter_name(name):
            return
        seen.add(id(module))
        if isinstance(module, PreTrainedModel):
            initialiser = module
        for child_name, child in module.named_children():
            visit(f"{name}.{child_name}" if name else child_name, child, initialiser)
        found.append((plain_name(name), module, initialiser))

    visit("", model, model)
    return found


def _units(model: PreTrainedModel) -> Iterator[list[NamedModule]]:
    """Groups of modules that are whole in memory together: a transformer block, or one module
    outside of the blocks."""
    block_of = {
        id(inner): number for number, block in enumerate(blocks(model)) for inner in block.modules()
    }
    unit: list[NamedModule] = []
    current: int | None = None
    for named in _modules(model):
        number = block_of.get(id(named[1]))
        if unit and (number is None or number != current):
            yield unit
            unit = []
        unit.append(named)
        current = number
    yield unit


@contextmanager
def _whole(unit: list[NamedModule], filled: set[int], device: torch.device) -> Iterator[None]:
    """Put whole, unfilled tensors in the place of a unit's own, and take this rank's part of each
    afterwards.

    A tensor of `filled` is replaced by one on the meta device that transformers' initialisers pass
    over.
    """
    replaced: list[tuple[str, dict[str, Any], str, torch.Tensor]] = []
    whole: dict[int, torch.Tensor] = {}
    packed: dict[int, Nf4Linear] = {}
    for module_name, module, _ in unit:
        packed |= packed_layers(module)
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, own in list(table.items()):
                if own is not None:
                    if id(own) not in whole:
                        whole[id(own)] = _stand_in(
                            own, packed.get(id(own)), done=id(own) in filled, device=device
                        )
                    replaced.append((f"{module_name}.{name}".lstrip("."), table, name, own))
                    table[name] = whole[id(own)]
    versions = {key: tensor._version for key, tensor in whole.items()}
    try:
        yield
        for name, _, _, own in replaced:
            if id(own) not in filled:
                # Every write raises a tensor's version; one that was never written holds whatever
                # memory held.
                assert whole[id(own)]._version > versions[id(own)], (
                    f"the model's own scheme leaves {name} unset"
                )
                if id(own) in packed:
                    pack_into(local_tensor(own), whole[id(own)][local_region(own)[0]])
                else:
                    local_tensor(own).copy_(whole[id(own)][local_region(own)])
                filled.add(id(own))
    finally:
        for _, table, name, own in replaced:
            table[name] = own


def _stand_in(
    own: torch.Tensor, layer: Nf4Linear | None, *, done: bool, device: torch.device
) -> torch.Tensor:
    shape = own.shape if layer is None else (layer.out_features, layer.in_features)
    tensor = torch.empty(shape, dtype=own.dtype, device="meta" if done else device)
    if isinstance(own, (nn.Parameter, DTensor)):
        tensor = nn.Parameter(tensor, requires_grad=own.requires_grad)
    if done:
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    return tensor
