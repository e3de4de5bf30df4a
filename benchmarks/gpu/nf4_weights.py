"""Weights in nf4 on this device: packed and unpacked to the bits of the CPU, and bytes a second."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from setups import Setting

from drillyard.models.nf4 import pack, unpack

SHAPES = ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336))
"""The linear layers of Llama 3.1 8B."""


def unpacked(setting: Setting) -> dict[str, Any]:
    """Bits of pack and unpack against the CPU's, and for the largest shape the rate at which
    weights are made whole, by the bytes that are read and written."""
    scale = 16 if setting.tiny else 1
    for rows, columns in SHAPES:
        values = (
            torch.randn(
                rows // scale, columns // scale, generator=torch.Generator().manual_seed(rows)
            )
            * 0.02
        )
        packed = pack(values.to(setting.device))
        assert torch.equal(packed.cpu(), pack(values)), (
            f"{rows} x {columns}: packed otherwise than on the CPU"
        )
        for dtype in (torch.bfloat16, torch.float32):
            assert torch.equal(unpack(packed, dtype).cpu(), unpack(packed.cpu(), dtype)), (
                f"{rows} x {columns}, {dtype}"
            )
    seconds = []
    for _ in range(3 if setting.tiny else 30):
        _wait(setting)
        started = time.perf_counter()
        for _ in range(10):
            whole = unpack(packed, torch.bfloat16)
        _wait(setting)
        seconds.append((time.perf_counter() - started) / 10)
    moved = packed.nbytes + whole.nbytes
    return {"shapes": len(SHAPES), "unpack_gb_per_s": moved / statistics.median(seconds) / 1e9}


def _wait(setting: Setting) -> None:
    if setting.device == "cuda":
        torch.cuda.synchronize()
