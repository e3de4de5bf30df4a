"""The gradient of a head's weight, summed over chunks by its products, against fp64."""

from __future__ import annotations

from typing import Any

import torch
from setups import Setting

from drillyard.models.head_product import SummedGradient, adds_to_fp32

LARGEST_ERROR = {torch.float32: 2**-8, torch.bfloat16: 2**-6}
"""Of the largest gradient, where each chunk's part is rounded to bf16 and summed in fp32, in
bf16."""
LARGEST_UNROUNDED_ERROR = 1e-4
"""The same where products add to the sum in fp32."""


def against_fp64(setting: Setting) -> dict[str, Any]:
    """Chunks of odd sizes, one of which carries no loss, in bf16 with sums in fp32 and in bf16."""
    vocabulary, hidden_size = (53, 19) if setting.tiny else (32001, 1031)
    adds_wide = adds_to_fp32(torch.device(setting.device))
    found: dict[str, Any] = {"products_add_to_fp32": adds_wide}
    for dtype, limit in LARGEST_ERROR.items():
        generator = torch.Generator(setting.device).manual_seed(0)

        def draw(*shape: int, generator: torch.Generator = generator) -> torch.Tensor:
            options: dict[str, Any] = {"device": setting.device, "generator": generator}
            return torch.randn(*shape, **options).bfloat16()

        weight = draw(vocabulary, hidden_size).requires_grad_()
        weight.grad_dtype = dtype
        head, expected = SummedGradient(weight), torch.zeros_like(weight, dtype=torch.float64)
        for rows in (1023, 1, 517, 2048):
            hidden, of_logits = draw(rows, hidden_size).requires_grad_(), draw(rows, vocabulary)
            of_logits *= rows != 517
            torch.autograd.grad(head(hidden), [hidden], of_logits)
            expected += of_logits.double().T @ hidden.detach().double()
        assert head.total is not None and head.total.dtype == dtype
        error = ((head.total.double() - expected).abs().max() / expected.abs().max()).item()
        if adds_wide and dtype == torch.float32:
            limit = LARGEST_UNROUNDED_ERROR
        assert error < limit, f"{dtype}: {error:.1e} of the largest gradient"
        found[f"error_{dtype}".replace("torch.", "")] = error
    return found
