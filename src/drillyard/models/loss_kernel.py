"""The loss of a chunk of logits on a GPU, and its gradient in their place.

Torch's own operators move 28 bytes per logit in bf16: a softmax in fp32 is written and read again
by each operation on it. Here a row is read twice, for its sum and for its gradient, and written
once: 6 bytes, and no memory but a number per row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_PART = 4096
"""Logits of a row that a program holds at once."""
_WARPS = 8
_LEAST = tl.constexpr(-3.0e38)
"""Below every finite logit, and finite: the difference of two infinities is not a number."""


def _row_into_gradient(
    logits: tl.tensor,
    targets: tl.tensor,
    losses: tl.tensor,
    vocabulary: int,
    scale: float,
    ignored: tl.constexpr,
    part: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * vocabulary
    target = tl.load(targets + row)
    if target == ignored:
        tl.store(losses + row, 0.0)
        for start in range(0, vocabulary, part):
            column = start + tl.arange(0, part)
            zeros = tl.zeros([part], dtype=logits.dtype.element_ty)
            tl.store(line + column, zeros, mask=column < vocabulary)
    else:
        largest = tl.full([], _LEAST, tl.float32)
        total = tl.full([], 0.0, tl.float32)
        for start in range(0, vocabulary, part):
            column = start + tl.arange(0, part)
            values = tl.load(line + column, mask=column < vocabulary, other=float("-inf"))
            values = values.to(tl.float32)
            before = largest
            largest = tl.maximum(before, tl.max(values, 0))
            total = total * tl.exp(before - largest) + tl.sum(tl.exp(values - largest), 0)
        log_of_sum = largest + tl.log(total)
        # A target outside of the vocabulary makes the loss not a number, so its step is skipped.
        inside = (target >= 0) & (target < vocabulary)
        of_target = tl.load(line + target, mask=inside, other=float("nan")).to(tl.float32)
        tl.store(losses + row, (log_of_sum - of_target) * scale)
        for start in range(0, vocabulary, part):
            column = start + tl.arange(0, part)
            values = tl.load(line + column, mask=column < vocabulary, other=0.0).to(tl.float32)
            gradient = tl.exp(values - log_of_sum) - tl.where(column == target, 1.0, 0.0)
            gradient = (gradient * scale).to(logits.dtype.element_ty)
            tl.store(line + column, gradient, mask=column < vocabulary)


row_kernel: Any = triton.jit(_row_into_gradient)


def turn_into_gradient(
    logits_CV: torch.Tensor, targets_C: torch.Tensor, scale: float, ignored: int
) -> torch.Tensor:
    """`scale` times the summed cross entropy, fp32; `logits_CV`, contiguous and of at most fp32,
    then holds its gradient.

    Rows of target `ignored` add nothing and get zeros. Autograd refuses a backward that would need
    the logits themselves.
    """
    losses_C = torch.empty(len(targets_C), dtype=torch.float32, device=logits_CV.device)
    row_kernel[(len(targets_C),)](
        logits_CV,
        targets_C,
        losses_C,
        logits_CV.shape[1],
        scale,
        ignored=ignored,
        part=_PART,
        num_warps=_WARPS,
    )
    torch.autograd.graph.increment_version(logits_CV)
    return losses_C.sum()
