"""NF4: bytes and back, against the definition written out in numpy."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from drillyard.models import nf4
from drillyard.models.nf4 import LEVELS, pack, pack_into, unpack


def defined(values: np.ndarray) -> np.ndarray:
    """Each number as the nearest level times the largest magnitude of its 64, in fp32; of two the
    lower one."""
    levels = np.array(LEVELS, np.float32)
    blocks = values.astype(np.float32).reshape(-1, 64)
    largest = np.abs(blocks).max(1, keepdims=True)
    shares = np.divide(blocks, largest, out=np.zeros_like(blocks), where=largest > 0)
    distances = np.abs(shares[..., None].astype(np.float64) - levels)
    return (levels[distances.argmin(-1)] * largest).reshape(values.shape)


@pytest.mark.parametrize("part", [2**20, 100, 1])
def test_numbers_are_those_of_the_definition_to_the_bit(
    monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    monkeypatch.setattr(nf4, "LARGEST_PART_ELEMENTS", part)
    values = torch.randn(37, 192, generator=torch.Generator().manual_seed(0)) * 0.02
    values[3] = 0
    values[5, :64] *= 1e-30
    values[6, 64:128] *= 1e30
    packed = pack(values)
    assert packed.dtype == torch.uint8 and packed.shape == (37, 192 * 9 // 16)
    expected = defined(values.numpy())
    assert np.array_equal(unpack(packed, torch.float32).numpy(), expected)
    assert torch.equal(unpack(packed, torch.bfloat16), torch.from_numpy(expected).bfloat16())
    assert np.abs(expected - values.numpy()).max() <= 0.16 * np.abs(values.numpy()).max()


def test_packing_again_changes_nothing() -> None:
    once = unpack(pack(torch.randn(8, 128, dtype=torch.float64)), torch.float32)
    assert torch.equal(unpack(pack(once), torch.float32), once)


def test_a_share_half_way_takes_the_lower_level() -> None:
    levels = torch.tensor(LEVELS)
    half_way = (levels[1:] + levels[:-1]) / 2
    values = torch.zeros(1, 64)
    values[0, 0], values[0, 1:16] = 1.0, half_way
    assert torch.equal(unpack(pack(values), torch.float32)[0, 1:16], levels[:-1])


def test_of_rows_and_of_all_is_the_same() -> None:
    values = torch.randn(10, 64).bfloat16()
    assert torch.equal(torch.cat([pack(values[:3]), pack(values[3:])]), pack(values))


@pytest.mark.parametrize("carrier", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
def test_bytes_are_kept_in_numbers_of_any_precision(carrier: torch.dtype) -> None:
    """Those of fp64 need padding: a block has 36 bytes."""
    values = torch.randn(5, 64)
    rows = torch.empty(5, -(-36 // carrier.itemsize), dtype=carrier)
    pack_into(rows, values)
    assert torch.equal(unpack(rows, torch.float32), unpack(pack(values), torch.float32))


KERNEL = """
import sys, torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from drillyard.models import nf4, nf4_kernel

if sys.argv[1] == "interpreted":
    for rows, columns in ((3, 64), (5, 1088), (2, 4096)):
        packed = nf4.pack(torch.randn(rows, columns))
        for dtype in (torch.float32, torch.float64):
            whole = torch.empty(rows, columns, dtype=dtype)
            nf4_kernel.unpack_into(whole, packed, nf4.LEVELS, nf4.BLOCK)
            assert torch.equal(whole, nf4.unpack(packed, dtype)), (rows, columns, dtype)
else:
    fixed = {"levels": nf4.LEVELS, "block": nf4.BLOCK, "part": 1024}
    signature = {"packed": "*u8", "whole": "*bf16", "row_bytes": "i32", "columns": "i32"}
    signature |= dict.fromkeys(fixed, "constexpr")
    source = ASTSource(fn=nf4_kernel.unpack_kernel, signature=signature, constexprs=fixed)
    assert compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
"""


@pytest.mark.parametrize("how", ["interpreted", "compiled"])
def test_the_kernel_of_gpus(how: str) -> None:
    """Its numbers, where triton interprets it on the CPU (whose bf16 is not that of a GPU), and
    that it compiles."""
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if how == "interpreted" else {})
    command = [sys.executable, "-c", KERNEL, how]
    subprocess.run(command, env=environment, check=True, timeout=300)
