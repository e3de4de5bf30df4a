"""Which part of a whole tensor each rank holds, and the plain names of a wrapped model's parameters.

FSDP2 keeps a parameter as a DTensor: split along dimensions over the axes of a device mesh, or copied along them. A
`Region` is the part that one rank holds, as slices of the whole. Initialisation keeps a region of a whole draw,
loading reads a region of a file, export sends a region to the rank that writes it. Splits follow `torch.chunk`: parts
of ceil(size / ranks), the last ones shorter or empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel

Region = tuple[slice, ...]

# What wrappers insert into the names of a model's modules.
WRAPPERS = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_orig_mod.")


def plain_name(name: str) -> str:
    """A module's or parameter's name without the parts that wrappers insert."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def region_at(shape: torch.Size, mesh_shape: tuple[int, ...], coordinate: tuple[int, ...], placements: Any) -> Region:
    """The part of a tensor of `shape` at one coordinate of the mesh; empty slices where there is nothing left for
    it."""
    bounds = [(0, size) for size in shape]
    for num_parts, part, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if type(placement) is Replicate:
            continue
        assert type(placement) is Shard, f"placement {placement} is neither a shard nor a copy"
        start, end = bounds[placement.dim]
        step = -(-(end - start) // num_parts)
        bounds[placement.dim] = (min(end, start + part * step), min(end, start + (part + 1) * step))
    return tuple(slice(start, end) for start, end in bounds)


def local_region(tensor: torch.Tensor) -> Region:
    """The part of the whole tensor that this rank holds."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank is not in the tensor's mesh"
    return region_at(tensor.shape, tuple(mesh.shape), tuple(coordinate), tensor.placements)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The storage of this rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def holders(tensor: DTensor) -> Iterator[tuple[int, Region]]:
    """(global rank, region) of each rank that holds a part, one rank per part: of copies, the first."""
    mesh = tensor.device_mesh
    copied = [axis for axis, placement in enumerate(tensor.placements) if isinstance(placement, Replicate)]
    for coordinate in (
        torch.cartesian_prod(*(torch.arange(size) for size in mesh.shape)).reshape(-1, mesh.ndim).tolist()
    ):
        if any(coordinate[axis] for axis in copied):
            continue
        region = region_at(tensor.shape, tuple(mesh.shape), tuple(coordinate), tensor.placements)
        if all(part.stop > part.start for part in region):
            yield int(mesh.mesh[tuple(coordinate)]), region


def restore_ties(model: PreTrainedModel) -> None:
    """Tie a model's tied weights again where `to_empty` has parted them, as it does with plain tensors.

    Sharded ones (DTensors) keep their identity, and FSDP2 already holds on to them.
    """
    for target, source in model.all_tied_weights_keys.items():
        module_name, _, attribute = target.rpartition(".")
        module = model.get_submodule(module_name)
        kept = model.get_parameter(source)
        if module._parameters[attribute] is not kept:
            assert not isinstance(kept, DTensor), f"{target} and {source} were sharded apart"
            module._parameters[attribute] = kept
