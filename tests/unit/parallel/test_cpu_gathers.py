"""Memory that is freed after gathers on a CPU goes back to the system, once for each 128 MiB gathered."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from drillyard.parallel.cpu_gathers import BYTES_BETWEEN_TRIMS, TrimmingAllGather

CPU = torch.device("cpu")
MIB = 2**20
# Under the size from which glibc maps an allocation by itself, and gives it back when it is freed.
PIECE_BYTES = 100_000


def private_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def freed_between_allocations_in_use() -> list[torch.Tensor]:
    """Use and free 200 MB in pieces, each beside a small allocation that stays in use; these are returned."""
    pieces, small = [], []
    for _ in range(2_000):
        pieces.append(torch.ones(PIECE_BYTES, dtype=torch.uint8))
        small.append(torch.ones(300))
    return small


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_freed_memory_is_given_back_after_each_128_mib_gathered() -> None:
    gather = TrimmingAllGather()
    for _ in range(2):
        in_use = freed_between_allocations_in_use()
        kept = private_bytes()
        gather.allocate((BYTES_BETWEEN_TRIMS // 2 - 1,), dtype=torch.bfloat16, device=CPU)
        assert private_bytes() > kept - 20 * MIB
        gather.allocate((2,), dtype=torch.bfloat16, device=CPU)
        assert private_bytes() < kept - 150 * MIB
        assert float(torch.stack(in_use).sum()) == 300 * len(in_use)


def test_the_output_of_a_gather_has_the_size_and_dtype_asked_for() -> None:
    output = TrimmingAllGather().allocate((3, 5), dtype=torch.uint8, device=CPU)
    assert (output.shape, output.dtype, output.device) == (torch.Size([3, 5]), torch.uint8, CPU)
