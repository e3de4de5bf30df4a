"""What fits where: the few memory questions that the trainer asks before it lays out a model.

State per parameter: master weight, gradient and AdamW's two moments, each in the master precision: 16 bytes under fp32
and bf16 (which keeps fp32 masters), 32 under fp64. Activations are not counted here; the estimate command does that.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from drillyard.errors import DoesNotFitError
from drillyard.parallel.parallelize import MASTER_DTYPE
from drillyard.parallel.ranks import Ranks

GIB = 2**30


def memory_bytes_per_rank(ranks: Ranks) -> int:
    """Memory that one rank may use: its GPU's, or its share of the host's."""
    if ranks.device.type == "cuda":
        return int(torch.cuda.get_device_properties(ranks.device).total_memory)
    return host_memory_bytes() // ranks.local_world_size


def least_memory_bytes(ranks: Ranks) -> int:
    """The least memory that any rank may use: what all of them decide by. Collective.

    Hosts may differ, and ranks that lay a model out differently wait for each other in collectives that never match.
    """
    least = torch.tensor(memory_bytes_per_rank(ranks), dtype=torch.int64, device=ranks.device)
    if ranks.world_size > 1:
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return int(least.item())


def host_memory_bytes() -> int:
    """The host's memory, or the limit of the container it is in."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        path = Path(limit)
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            total = min(total, int(text))
    return total


def require_state_fits(
    num_parameters: int, precision: str, ranks: Ranks, available_bytes: float, *, training: bool = True
) -> None:
    """Raise DoesNotFitError when weights (and for training gradients and moments) alone exceed `available_bytes`.

    With what all ranks agreed on as available, all of them raise or none does.
    """
    copies, what = (4, "weights, gradients and AdamW moments") if training else (1, "weights")
    state_bytes = copies * MASTER_DTYPE[precision].itemsize * num_parameters // ranks.mesh.size(1)
    if state_bytes > available_bytes:
        where = "its GPU has" if ranks.device.type == "cuda" else "its share of this host is"
        raise DoesNotFitError(
            f"the model does not fit: {what} of {num_parameters / 1e9:.2f}B parameters take"
            f" {state_bytes / GIB:.1f} GiB per rank, {where} {available_bytes / GIB:.1f} GiB; use more ranks or hosts, "
            "or a smaller model"
        )
