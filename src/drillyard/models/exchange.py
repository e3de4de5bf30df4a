"""Boxes of sharded parameters, put together on the ranks that write them.

Between two ranks there is at most one message per round: a rank holds one region, and a writer gets one part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from drillyard.models.sharding import Region, holders, local_region, local_tensor
from drillyard.models.weight_layout import overlap, relative


@dataclass(frozen=True)
class ParameterBox:
    """A box of a parameter that travels to its writer in one round."""

    box: Region
    tensor: torch.Tensor
    dtype: torch.dtype


def exchange_boxes(
    parts: tuple[ParameterBox | None, ...], rank: int, process_group: dist.ProcessGroup | None
) -> torch.Tensor | None:
    """Bring one part per writer to it; returns this rank's, on the CPU, or None when it has nothing to write."""
    operations: list[dist.P2POp] = []
    kept_alive: list[torch.Tensor] = []
    to_copy: list[tuple[torch.Tensor, torch.Tensor]] = []
    whole: torch.Tensor | None = None
    for writer, part in enumerate(parts):
        if part is None:
            continue
        box = part.box
        if writer != rank:
            own = _own_share(part, rank, process_group)
            if own is not None:
                kept_alive.append(own)
                operations.append(_operation(dist.isend, own, writer, process_group))
            continue
        local = local_tensor(part.tensor)
        whole = torch.empty([size.stop - size.start for size in box], dtype=part.dtype, device=local.device)
        for holder, region in _holders(part.tensor, rank, process_group):
            common = overlap(region, box)
            if common is None:
                continue
            place = whole[relative(common, box)]
            if holder == rank:
                place.copy_(local[relative(common, region)])
                continue
            arriving = (
                place if place.is_contiguous() else torch.empty_like(place, memory_format=torch.contiguous_format)
            )
            if arriving is not place:
                to_copy.append((place, arriving))
            operations.append(_operation(dist.irecv, arriving, holder, process_group))
    for request in dist.batch_isend_irecv(operations) if operations else []:
        request.wait()
    for place, arriving in to_copy:
        place.copy_(arriving)
    return None if whole is None else whole.cpu()


def _own_share(part: ParameterBox, rank: int, process_group: dist.ProcessGroup | None) -> torch.Tensor | None:
    """What this rank sends of a part that another one writes; None when it holds nothing of it."""
    if not isinstance(part.tensor, DTensor):
        return None
    for holder, region in _holders(part.tensor, rank, process_group):
        common = overlap(region, part.box)
        if holder == rank and common is not None:
            return local_tensor(part.tensor)[relative(common, region)].detach().to(part.dtype).contiguous()
    return None


def _holders(tensor: torch.Tensor, rank: int, process_group: dist.ProcessGroup | None) -> list[tuple[int, Region]]:
    """(rank in the group, region) of those that together hold the tensor; a plain tensor is whole on every rank."""
    if not isinstance(tensor, DTensor):
        return [(rank, local_region(tensor))]
    group = process_group or dist.distributed_c10d._get_default_group()
    return [(dist.get_group_rank(group, holder), region) for holder, region in holders(tensor)]


def _operation(kind: Any, tensor: torch.Tensor, peer: int, process_group: dist.ProcessGroup | None) -> dist.P2POp:
    return dist.P2POp(kind, tensor, group=process_group, group_peer=peer)
