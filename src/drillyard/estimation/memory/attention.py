"""Attention kernels by what they keep. Sizes: queries B*T*H*D, keys and values B*T*K*D, scores
B*H*T*T.

- `sdpa` with an explicit mask: torch turns the boolean mask into one of the queries' precision for
  every layer (aten/src/ATen/native/transformers/attention.cpp, convert_boolean_attn_mask), which
  the fused kernels save together with queries, keys and values (repeated for their groups), the
  output and a log-sum-exp per row in fp32.
- `eager`: probabilities in fp32 and again in compute precision; the mask is fp32, so scores are
  while it is added.
- `varlen` and `flex`: queries, keys, values, output, log-sum-exp; no mask and no repetition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from drillyard.estimation.memory.autograd import SizedTensor, Tape
from drillyard.estimation.memory.operators import (
    FP32,
    contraction,
    copied_in_backward,
    crosswise,
    joined,
    piece,
    plus,
    repeated,
    scaled,
    shifted,
    softmax,
    to,
    unary,
)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes of one layer's attention."""

    sequences: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int

    @property
    def rows(self) -> int:
        return self.sequences * self.length

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


Kernel = Callable[[Tape, SizedTensor, SizedTensor, SizedTensor, AttentionShape], SizedTensor]


def rotated(e: Tape, x: SizedTensor, *, in_fp32: bool) -> SizedTensor:
    """x * cos + rotate_half(x) * sin: saves the tables, which all layers share; x itself is not
    needed again."""
    before = x.itemsize
    if in_fp32:
        x = to(e, x, FP32)
    straight = scaled(e, x)
    turned = scaled(e, _half_rotated(e, x))
    out = plus(e, straight, turned)
    del straight, turned
    return to(e, out, before)


def _half_rotated(e: Tape, x: SizedTensor) -> SizedTensor:
    half = x.elements // 2
    first = piece(e, x, half)
    second = piece(e, x, half)
    return joined(e, scaled(e, second), first)


def fused(
    e: Tape,
    query: SizedTensor,
    key: SizedTensor,
    value: SizedTensor,
    shape: AttentionShape,
    mask: SizedTensor | None = None,
) -> SizedTensor:
    """A kernel that never holds the scores: keeps its inputs, its output and a log-sum-exp per row
    and head."""
    out = e.product(shape.rows * shape.heads * shape.value_dim, query.itemsize, always_kept=True)
    log_sum = e.product(shape.rows * shape.heads, FP32, always_kept=True)
    return contraction(e, out, [query, key, value], [query, key, value, out, log_sum, mask])


def sdpa(
    e: Tape, query: SizedTensor, key: SizedTensor, value: SizedTensor, shape: AttentionShape
) -> SizedTensor:
    key = repeated(e, key, shape.group, is_view=shape.kv_heads == 1)
    value = repeated(e, value, shape.group, is_view=shape.kv_heads == 1)
    mask = e.empty(shape.sequences * shape.length**2, query.itemsize)
    return fused(e, query, key, value, shape, mask)


def eager(
    e: Tape,
    query: SizedTensor,
    key: SizedTensor,
    value: SizedTensor,
    shape: AttentionShape,
    *,
    capped: bool = False,
) -> SizedTensor:
    """A kernel that holds all scores; `capped` keeps them within bounds by tanh (Gemma 2)."""
    key_states = repeated(e, key, shape.group, is_view=shape.kv_heads == 1)
    value_states = repeated(e, value, shape.group, is_view=shape.kv_heads == 1)
    weights = scaled(e, _scores(e, query, key_states, shape))
    if capped:
        weights = scaled(e, weights)
        weights = unary(e, weights, saves="result")
        weights = scaled(e, weights)
    weights = _with_fp32_mask(e, weights)
    weights = to(e, softmax(e, weights), query.itemsize)
    output = _weighted(e, weights, value_states, shape)
    return shifted(e, copied_in_backward(e, output))


def _batched(e: Tape, x: SizedTensor, shape: AttentionShape, *, is_copy: bool) -> SizedTensor:
    """Heads laid out for a batched product: a copy where sequences and heads cannot be one
    dimension as they lie."""
    return shifted(e, x) if shape.sequences > 1 and not is_copy else x


def _scores(e: Tape, query: SizedTensor, key: SizedTensor, shape: AttentionShape) -> SizedTensor:
    query = _batched(e, query, shape, is_copy=False)
    key = _batched(e, key, shape, is_copy=shape.group > 1 and shape.kv_heads > 1)
    out = e.product(shape.rows * shape.heads * shape.length, query.itemsize)
    return contraction(e, out, [query, key], crosswise(query, key))


def _weighted(
    e: Tape, weights: SizedTensor, value: SizedTensor, shape: AttentionShape
) -> SizedTensor:
    value = _batched(e, value, shape, is_copy=shape.group > 1 and shape.kv_heads > 1)
    out = e.product(shape.rows * shape.heads * shape.value_dim, weights.itemsize)
    return contraction(e, out, [weights, value], crosswise(weights, value))


def _with_fp32_mask(e: Tape, weights: SizedTensor) -> SizedTensor:
    after = max(FP32, weights.itemsize)
    return unary(e, weights, e.empty(weights.elements, after), passes=after == weights.itemsize)


KERNELS: dict[str, Kernel] = {"sdpa": sdpa, "eager": eager, "varlen": fused, "flex": fused}
