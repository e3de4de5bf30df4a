"""The attention kernel over packed documents, forward and backward, against fp64 arithmetic with a
dense mask.

It calls what the model calls (`models.attention.varlen_attention`), so the conversion of windows
and the repetition of shared heads are checked with the kernel. On a CPU, which has no such kernel,
dense attention stands in.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from setups import Setting
from torch.nn.attention import varlen

from drillyard.models.attention import document_mask, varlen_attention

TOLERANCE = 1e-2
"""Of the norm of the difference over that of the reference: bf16 operands give 2e-3 to 5e-3."""
WINDOW = 100
HEADS = 8


def against_fp64(setting: Setting) -> dict[str, Any]:
    """The largest error of output and gradients over head sizes, shared heads and windows; it is
    below TOLERANCE."""
    if setting.device == "cpu":
        varlen.varlen_attn = dense_attention
    length = 128 if setting.tiny else 1024
    found = {}
    for head_dim, kv_heads, window in itertools.product((64, 128, 256), (HEADS, 2), (None, WINDOW)):
        name = (
            f"D {head_dim}, {HEADS} heads over {kv_heads},"
            f" {f'window {window}' if window else 'no window'}"
        )
        found[name] = largest_error(setting.device, length, head_dim, kv_heads, window)
    worst = max(found, key=lambda name: found[name])
    assert found[worst] < TOLERANCE, (
        f"{worst}: error {found[worst]:.2e}, allowed {TOLERANCE:.0e}; all: {found}"
    )
    return {"cases": len(found), "largest_error": found[worst], "in": worst}


def largest_error(
    device: str, length: int, head_dim: int, kv_heads: int, window: int | None
) -> float:
    """The largest of the relative errors of output and of gradients of queries, keys and values."""
    generator = torch.Generator().manual_seed(head_dim + kv_heads)

    def random(heads: int) -> torch.Tensor:
        return (
            torch.randn(2, heads, length, head_dim, generator=generator)
            .bfloat16()
            .to(device)
            .requires_grad_()
        )

    query, key, value = random(HEADS), random(kv_heads), random(kv_heads)
    weight = torch.randn(2, length, HEADS, head_dim, generator=generator).bfloat16().to(device)
    # Documents of one token, whole rows, and empty ones between others and at the end.
    ends = [
        1,
        length // 3,
        length // 3,
        length - 1,
        length,
        length,
        2 * length,
        2 * length,
        2 * length,
    ]
    offsets = torch.tensor([0, *ends], dtype=torch.int32, device=device)
    output, _ = varlen_attention(
        torch.nn.Module(),
        query,
        key,
        value,
        None,
        scaling=head_dim**-0.5,
        sliding_window=window,
        cu_seq_lens_q=offsets,
        cu_seq_lens_k=offsets,
        max_length_q=length,
        max_length_k=length,
    )
    output.backward(weight)
    ours = [output, query.grad, key.grad, value.grad]
    wide = [states.detach().double().requires_grad_() for states in (query, key, value)]
    expected = reference(*wide, ends, window)
    expected.backward(weight.double())
    return max(
        float((mine.double() - theirs).norm() / theirs.norm())
        for mine, theirs in zip(ours, [expected, *(states.grad for states in wide)], strict=True)
    )


def reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: list[int], window: int | None
) -> torch.Tensor:
    """Softmax attention of fp64 [B, H, T, D] under the documents' mask: [B, T, H, D]."""
    num_sequences, heads, length, head_dim = query.shape
    documents = np.searchsorted(ends, np.arange(num_sequences * length), side="right").reshape(
        num_sequences, length
    )
    mask = document_mask(torch.from_numpy(documents).to(query.device), window)
    key, value = (
        states.repeat_interleave(heads // states.shape[1], dim=1) for states in (key, value)
    )
    scores = (query @ key.transpose(2, 3) * head_dim**-0.5).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    offsets: torch.Tensor,
    *rest: Any,
    **options: Any,
) -> torch.Tensor:
    """What the kernel computes, of [B*T, H, D], on a CPU."""
    position = torch.arange(query.shape[0])
    document = torch.searchsorted(offsets, position.int(), right=True)
    mask = (document[:, None] == document) & (position[:, None] >= position)
    left = options["window_size"][0]
    if left >= 0:
        mask &= position[:, None] - position <= left
    states = (t.transpose(0, 1)[None] for t in (query, key, value))
    output = torch.nn.functional.scaled_dot_product_attention(
        *states, attn_mask=mask, scale=options["scale"], enable_gqa=True
    )
    return output[0].transpose(0, 1)
