"""FSDP2's gathers on a CPU, with what is freed after them given back to the system.

FSDP2 frees a block's gathered weights after use. On a GPU PyTorch's allocator reuses them; on a CPU glibc keeps freed
memory between allocations that are still in use, and in an arena for each thread: several hundred MB on some ranks.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

# At this volume glibc's walk over its memory (8 ms) is not to be seen in the time of a step; docs/measurements.md.
BYTES_BETWEEN_TRIMS = 128 * 2**20


class TrimmingAllGather:
    """The all-gather of FSDP2 (`set_custom_all_gather`); `malloc_trim` each time 128 MiB more were gathered by it.

    One is shared by all modules of a model. Without glibc it only gathers.
    """

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._gathered_bytes = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialized tensor for a gather's output."""
        self._gathered_bytes += math.prod(size) * dtype.itemsize
        if self._trim is not None and self._gathered_bytes >= BYTES_BETWEEN_TRIMS:
            self._gathered_bytes = 0
            self._trim(0)
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather `input_tensor` of every rank into `output_tensor`."""
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)
