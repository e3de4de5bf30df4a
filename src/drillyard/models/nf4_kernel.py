"""Packed rows of nf4.py made whole on a GPU, in one pass over memory."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_PART = 1024
"""Numbers of a row that one program makes, eight a thread."""


def _level_of_code(code: tl.tensor, levels: tl.constexpr) -> tl.tensor:
    """The levels of codes, chosen bit by bit in registers.

    On an H100 a table in memory made a kernel of 0.2 TB/s, sixteen comparisons one of 1.0, these
    fifteen choices 1.7.
    """
    odd = (code & 1) != 0
    pair_0, pair_1 = tl.where(odd, levels[1], levels[0]), tl.where(odd, levels[3], levels[2])
    pair_2, pair_3 = tl.where(odd, levels[5], levels[4]), tl.where(odd, levels[7], levels[6])
    pair_4, pair_5 = tl.where(odd, levels[9], levels[8]), tl.where(odd, levels[11], levels[10])
    pair_6, pair_7 = tl.where(odd, levels[13], levels[12]), tl.where(odd, levels[15], levels[14])
    upper = (code & 2) != 0
    four_0, four_1 = tl.where(upper, pair_1, pair_0), tl.where(upper, pair_3, pair_2)
    four_2, four_3 = tl.where(upper, pair_5, pair_4), tl.where(upper, pair_7, pair_6)
    upper = (code & 4) != 0
    eight_0, eight_1 = tl.where(upper, four_1, four_0), tl.where(upper, four_3, four_2)
    return tl.where((code & 8) != 0, eight_1, eight_0)


level_of_code: Any = triton.jit(_level_of_code)


def _unpack_part(
    packed: tl.tensor,
    whole: tl.tensor,
    row_bytes: int,
    columns: int,
    levels: tl.constexpr,
    block: tl.constexpr,
    part: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * part + tl.arange(0, part)
    inside = column < columns
    line = packed + row * row_bytes
    byte = tl.load(line + column // 2, mask=inside, other=0)
    code = tl.where(column % 2 == 0, byte >> 4, byte & 15)
    largest = (line + columns // 2).to(tl.pointer_type(tl.float32))
    largest_of_block = tl.load(largest + column // block, mask=inside, other=0.0)
    level = level_of_code(code, levels)
    tl.store(
        whole + row * columns + column,
        (level * largest_of_block).to(whole.dtype.element_ty),
        mask=inside,
    )


unpack_kernel: Any = triton.jit(_unpack_part)


def unpack_into(
    whole: torch.Tensor, packed: torch.Tensor, levels: tuple[float, ...], block: int
) -> None:
    """Fill [R, I] of any floating-point precision from rows of bytes, both contiguous and on one
    device.

    `levels`: the values of the 16 codes; `block`: numbers that share a magnitude.
    """
    rows, columns = whole.shape
    grid = (rows, triton.cdiv(columns, _PART))
    unpack_kernel[grid](packed, whole, packed.stride(0), columns, levels, block, part=_PART)
