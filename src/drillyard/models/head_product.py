"""The head's product over the chunks of the loss, whose weight's gradient is summed by the products
themselves.

Where gradients are wider than weights, autograd writes the product of each chunk in bf16 (2 bytes
per weight), widens it (6) and adds it to the sum (12): 20 bytes per weight and chunk after the
first. On a GPU each product adds to the sum in fp32 here: 8 bytes, no memory beside the sum, and no
chunk's part is rounded. Elsewhere a part in bf16 is added as it is, in 12 bytes. Where weight and
gradient have one precision the product adds to the sum on every device.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import PreTrainedModel


@functools.cache
def adds_to_fp32(device: torch.device) -> bool:
    """Whether a product of bf16 can add to fp32 on `device`, found by one: only CUDA has it, and
    releases of torch differ in the sums that they accept. Waits for the device, once."""
    if device.type != "cuda":
        return False
    ones = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    total = torch.ones(16, 16, dtype=torch.float32, device=device)
    try:
        _add_to_fp32(total, ones, ones, beta=1)
    except (AttributeError, RuntimeError):
        return False
    return bool((total == 17).all())


def _add_to_fp32(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: int) -> None:
    torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, beta=beta, out=total)


class SummedGradient:
    """A linear head [V, H] as a function of rows, and the gradient of its weight, summed over all
    backward passes in the precision in which autograd takes it."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        # Wider than the weight where that was asked for (whole_weights.py; FSDP2 from torch 2.15
        # on).
        self.dtype: torch.dtype = getattr(weight, "grad_dtype", None) or weight.dtype
        self.total: torch.Tensor | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows [..., H] to logits [..., V]."""
        logits: torch.Tensor = _SummingProduct.apply(hidden, self)
        return logits

    def add(self, of_logits_CV: torch.Tensor, hidden_CH: torch.Tensor) -> None:
        """Add the product of a chunk's gradient with its rows."""
        is_first = self.total is None
        if self.total is None:
            self.total = torch.empty_like(self.weight, dtype=self.dtype)
        beta = 0 if is_first else 1  # with 0 what is there is not read
        of_logits_VC = of_logits_CV.t()
        if self.dtype == of_logits_CV.dtype:
            self.total.addmm_(of_logits_VC, hidden_CH, beta=beta)
        elif self.dtype == torch.float32 and adds_to_fp32(self.total.device):
            _add_to_fp32(self.total, of_logits_VC, hidden_CH, beta=beta)
        elif is_first:
            self.total.copy_(of_logits_VC @ hidden_CH)
        else:
            self.total += of_logits_VC @ hidden_CH


def summed_gradient(model: PreTrainedModel) -> SummedGradient | None:
    """For the head of `model`; None for one that is not trained, or not a product alone."""
    head: Any = cast(Any, model).get_output_embeddings()
    is_product = type(head) is nn.Linear and getattr(head, "bias", None) is None
    return SummedGradient(head.weight) if is_product and head.weight.requires_grad else None


class _SummingProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, head: SummedGradient) -> torch.Tensor:
        ctx.save_for_backward(hidden)
        ctx.head = head
        return F.linear(hidden, head.weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logits: torch.Tensor) -> tuple[torch.Tensor, None]:
        (hidden,) = ctx.saved_tensors
        head: SummedGradient = ctx.head
        head.add(of_logits.flatten(0, -2), hidden.flatten(0, -2))
        return of_logits @ head.weight, None
