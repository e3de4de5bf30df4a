"""Parts of a whole tensor that each rank holds, and parts that travel to the rank that writes them.

FSDP2 keeps a parameter as a DTensor: split along dimensions over the axes of a device mesh, or
copied along them. A `Region` is the part that one rank holds, as slices of the whole. Splits follow
`torch.chunk`: parts of ceil(size / ranks), the last ones shorter or empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel

from drillyard.parallel.collectives import rank_and_size

Region = tuple[slice, ...]

# What wrappers insert into the names of a model's modules.
WRAPPERS = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_orig_mod.")
# What peft inserts into the names of modules that have an adapter, and the parts of the adapter.
ADAPTED = "base_layer."
ADAPTER_PARTS = frozenset({"lora_A", "lora_B", "lora_magnitude_vector"})


def without_wrappers(name: str) -> str:
    """A module's or parameter's name without the parts that wrappers insert, as peft has it where
    it has an adapter."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def plain_name(name: str) -> str:
    """A module's or parameter's name in the model of transformers, without wrappers and
    adapters."""
    return without_wrappers(name).replace(ADAPTED, "")


def is_adapter_name(name: str) -> bool:
    """Whether a parameter is part of an adapter."""
    return not ADAPTER_PARTS.isdisjoint(name.split("."))


def whole_region(shape: torch.Size) -> Region:
    """The box that is everything."""
    return tuple(slice(0, size) for size in shape)


def overlap(first: Region, second: Region) -> Region | None:
    """The common part of two boxes of one tensor; None when it is empty."""
    common = tuple(
        slice(max(a.start, b.start), min(a.stop, b.stop))
        for a, b in zip(first, second, strict=True)
    )
    return common if all(part.stop > part.start for part in common) else None


def relative(inner: Region, outer: Region) -> Region:
    """`inner` in the coordinates of `outer`."""
    return tuple(
        slice(i.start - o.start, i.stop - o.start) for i, o in zip(inner, outer, strict=True)
    )


def region_at(
    shape: torch.Size, mesh_shape: tuple[int, ...], coordinate: tuple[int, ...], placements: Any
) -> Region:
    """The part of a tensor of `shape` at one coordinate of the mesh; its slices may be empty."""
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
        return whole_region(tensor.shape)
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank is not in the tensor's mesh"
    return region_at(tensor.shape, tuple(mesh.shape), tuple(coordinate), tensor.placements)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The storage of this rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def holders(tensor: torch.Tensor) -> Iterator[tuple[int, Region]]:
    """(global rank, region) of each rank that holds a part; of copies, the first. This rank holds a
    plain tensor."""
    if not isinstance(tensor, DTensor):
        yield rank_and_size()[0], whole_region(tensor.shape)
        return
    mesh = tensor.device_mesh
    copied = [
        axis for axis, placement in enumerate(tensor.placements) if isinstance(placement, Replicate)
    ]
    for coordinate in product(*map(range, mesh.shape)):
        if any(coordinate[axis] for axis in copied):
            continue
        region = region_at(tensor.shape, tuple(mesh.shape), coordinate, tensor.placements)
        if all(part.stop > part.start for part in region):
            yield int(mesh.mesh[coordinate]), region


def restore_ties(model: PreTrainedModel) -> None:
    """Tie weights again where `to_empty` has parted plain tensors; DTensors keep their identity."""
    for target, source in model.all_tied_weights_keys.items():
        module_name, _, attribute = target.rpartition(".")
        module = model.get_submodule(module_name)
        kept = model.get_parameter(source)
        if module._parameters[attribute] is not kept:
            assert not isinstance(kept, DTensor), f"{target} and {source} were sharded apart"
            module._parameters[attribute] = kept


@dataclass(frozen=True)
class ParameterBox:
    """A box of a parameter that travels to its writer in one round. `values`: instead of this
    rank's part of it."""

    box: Region
    tensor: torch.Tensor
    dtype: torch.dtype
    values: torch.Tensor | None = None

    @property
    def local(self) -> torch.Tensor:
        return local_tensor(self.tensor) if self.values is None else self.values


def exchange_boxes(parts: tuple[ParameterBox | None, ...], rank: int) -> torch.Tensor | None:
    """Bring one part per writer to it; returns this rank's, on the CPU, or None when it has nothing
    to write."""
    operations: list[dist.P2POp] = []
    kept_alive: list[torch.Tensor] = []
    to_copy: list[tuple[torch.Tensor, torch.Tensor]] = []
    whole: torch.Tensor | None = None
    for writer, part in enumerate(parts):
        if part is None:
            continue
        box = part.box
        if writer != rank:
            if (own := _own_share(part, rank)) is not None:
                kept_alive.append(own)
                operations.append(dist.P2POp(dist.isend, own, writer))
            continue
        local = part.local
        whole = torch.empty(
            [size.stop - size.start for size in box], dtype=part.dtype, device=local.device
        )
        for holder, region in holders(part.tensor):
            common = overlap(region, box)
            if common is None:
                continue
            place = whole[relative(common, box)]
            if holder == rank:
                place.copy_(local[relative(common, region)])
                continue
            arriving = place
            if not place.is_contiguous():
                arriving = torch.empty_like(place, memory_format=torch.contiguous_format)
                to_copy.append((place, arriving))
            operations.append(dist.P2POp(dist.irecv, arriving, holder))
    for request in dist.batch_isend_irecv(operations) if operations else []:
        request.wait()
    for place, arriving in to_copy:
        place.copy_(arriving)
    return None if whole is None else whole.cpu()


def _own_share(part: ParameterBox, rank: int) -> torch.Tensor | None:
    """Data that this rank sends of a part that another rank writes; None when it holds none of
    it."""
    if (
        not isinstance(part.tensor, DTensor)
        or (region := dict(holders(part.tensor)).get(rank)) is None
    ):
        return None
    if (common := overlap(region, part.box)) is None:
        return None
    return part.local[relative(common, region)].detach().to(part.dtype).contiguous()
