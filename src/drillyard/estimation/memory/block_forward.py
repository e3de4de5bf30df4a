"""One transformer block forward, as the classes of transformers write it, on tensors without
contents.

The order of operations and the life of local variables follow modeling_llama.py and its relatives
(transformers 5): norms before, after or around attention and MLP; parallel branches; biases; norms
of queries and keys; fused and separate projections. A block's weights come from its spec, with LoRA
on the layers that its targets name.

A mixture of experts runs as transformers' grouped matrix product (integrations/moe.py): every token
is copied once for each of its experts, sorted by expert, multiplied in one grouped product per
matrix, weighted, brought back into order and summed. Sizes: rows * experts_per_token "routed" rows,
whatever the router chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Final

from drillyard.estimation.memory.attention import KERNELS, AttentionShape, eager, rotated
from drillyard.estimation.memory.autograd import SizedTensor, Tape
from drillyard.estimation.memory.operators import (
    FP32,
    activated,
    contraction,
    copied_in_backward,
    joined,
    linear,
    norm,
    packed_linear,
    piece,
    plus,
    power,
    scaled,
    shifted,
    softmax,
    times,
    to,
    unary,
)
from drillyard.estimation.setup import Checkpointing, LoraSetup
from drillyard.modelspec import Block, adapter_layers, adapter_matrices, layers_sharing_input

INT64: Final = 8
SCORES_IN_FP32: Final = frozenset({"mixtral"})
"""The experts' weights stay in fp32, and with them the sum over experts."""
ROTATES_IN_FP32: Final = frozenset({"cohere", "cohere2", "olmo2", "olmo3"})
SCALES_BRANCHES: Final = frozenset({"granite"})
SLICES_PROJECTIONS: Final = frozenset({"phi3"})
"""Queries, keys and values are slices of one projection; elsewhere one projection is split."""
ROTATES_A_PART: Final = frozenset({"phi3"})
"""The rotated dimensions are joined with the others, if there are any, in a copy that is laid out
by heads; the output of the kernel is laid out like its queries, and has to be copied too."""
CAPS_SCORES: Final = frozenset({"gemma2"})


@dataclass(frozen=True, slots=True)
class BlockInputs:
    """Inputs and conditions of a block: tokens, kernel, precision, what is trained and what is
    recomputed.

    `from_weights`: whether its input carries a gradient (the first one's does not under LoRA).
    `accumulates`, `skips_first_product`: see Tape. `fuses`: compiled, at the lower end of its
    memory.
    """

    model_type: str
    hidden_size: int
    sequences: int
    length: int
    itemsize: int
    kernel: str
    mode: Checkpointing
    positions: int | None
    adapters: LoraSetup | None = None
    quantized: bool = False
    fuses: bool = False
    skips_first_product: bool = False
    from_weights: bool = True
    accumulates: bool = False
    gradient_itemsize: int | None = None

    @property
    def rows(self) -> int:
        return self.sequences * self.length


def forward(e: Tape, block: Block, run: BlockInputs, hidden_states: SizedTensor) -> SizedTensor:
    """The block's result [B, T, H]; the caller holds its input."""
    return _BlockForward(e, block, run).result(hidden_states)


class _BlockForward:
    """One forward of a block. Weights are looked up by name, gathered, with or without a
    gradient."""

    def __init__(self, e: Tape, block: Block, run: BlockInputs) -> None:
        self.e = e
        self.block = block
        self.run = run
        self.shapes = {tensor.name: tensor for tensor in block.tensors}
        adapted = (
            [] if run.adapters is None else adapter_layers(block.tensors, run.adapters.targets)
        )
        self.adapted = {tensor.name for tensor in adapted}
        self.weights: dict[str, SizedTensor] = {}
        self.low_rank: dict[str, tuple[SizedTensor, SizedTensor]] = {}
        """Rows s A x of a part's adapted layers, and their Bs, alive until the part is done."""

    def result(self, hidden_states: SizedTensor) -> SizedTensor:
        norms = [s.name.removesuffix(".weight") for s in self.shapes.values() if s.role == "norm"]
        # Biases, and the norms of queries and keys inside of attention, have a dot in what is left
        # of their names.
        outer = [name for name in norms if "." not in name]
        if self.block.parallel:
            return self._parallel(hidden_states, outer)
        before, after = _sides(outer)
        for part, first, second in zip((self._attention, self._mlp), before, after, strict=True):
            residual = hidden_states
            if first is not None:
                hidden_states = self._norm(first, hidden_states)
            hidden_states = part(hidden_states)
            self.low_rank.clear()
            if second is not None:
                hidden_states = self._norm(second, hidden_states)
            if self.run.model_type in SCALES_BRANCHES:
                hidden_states = scaled(self.e, hidden_states)
            hidden_states = plus(self.e, residual, hidden_states)
        return hidden_states

    def _parallel(self, hidden_states: SizedTensor, norms: list[str]) -> SizedTensor:
        """Attention and MLP read the same normalised input (one norm), or one norm each
        (GPT-NeoX)."""
        residual = hidden_states
        normed = self._norm(norms[0] if norms else "", hidden_states)
        attended = self._attention(normed)
        self.low_rank.clear()
        if len(norms) > 1:
            normed = self._norm(norms[1], hidden_states)
        through_mlp = self._mlp(normed)
        return plus(self.e, plus(self.e, residual, attended), through_mlp)

    # Weights

    def _linear_names(self, role: str) -> list[str]:
        """Names of the linear layers in a role, in the block's order."""
        return [
            s.name.removesuffix(".weight")
            for s in self.shapes.values()
            if s.role == role and s.linear
        ]

    def _optional(self, name: str) -> SizedTensor | None:
        """The tensor of that name, the same for every use; None where the block has none."""
        if name not in self.shapes:
            return None
        if name not in self.weights:
            self.weights[name] = self.e.weight(
                self.shapes[name].parameters, trained=self.run.adapters is None
            )
        return self.weights[name]

    def _weight(self, name: str) -> SizedTensor:
        weight = self._optional(name)
        assert weight is not None, name
        return weight

    def _summed_weight(self, name: str) -> SizedTensor:
        """A weight as its layer uses it. Of routers and experts peft adds the update to the weight
        before the product: the sum is a new tensor, with a gradient."""
        e, weight = self.e, self._weight(name)
        if name not in self.adapted:
            return weight
        down, up = self._adapter(name)
        if self.shapes[name].role == "expert":
            return contraction(e, e.empty(weight.elements), [down, up], [])
        update = scaled(e, contraction(e, e.empty(weight.elements), [up, down], []))
        return unary(e, update, passes=True)

    def _adapter(self, name: str) -> tuple[SizedTensor, SizedTensor]:
        assert self.run.adapters is not None
        down, up = adapter_matrices(self.shapes[name], self.run.adapters.rank)
        return self.e.weight(prod(down), trained=True), self.e.weight(prod(up), trained=True)

    def _update(self, name: str, x: SizedTensor, outputs: int) -> SizedTensor:
        """s B A x of the layer `name`: s multiplies A, and layers that read x have one product with
        their As (models/adapter_forward.py)."""
        e, rows = self.e, self.run.rows
        if name not in self.low_rank:
            names = layers_sharing_input(name, [n.removesuffix(".weight") for n in self.adapted])
            downs, ups = zip(*(self._adapter(f"{each}.weight") for each in names), strict=True)
            sizes = [down.elements * rows // (x.elements // rows) for down in downs]
            together = linear(e, x, self._joined_and_scaled(downs), sum(sizes))
            lows = [together] if len(sizes) == 1 else e.split(together, sizes)
            self.low_rank.update(zip(names, zip(lows, ups, strict=True), strict=True))
        low, up = self.low_rank[name]
        return linear(e, low, up, rows * outputs)

    def _joined_and_scaled(self, downs: Sequence[SizedTensor]) -> SizedTensor:
        parts = [scaled(self.e, down) for down in downs]
        return parts[0] if len(parts) == 1 else joined(self.e, *parts)

    def _linear(self, name: str, x: SizedTensor) -> SizedTensor:
        """The linear layer `name`, with its bias, and the update of its adapter added.

        A keeps x, B keeps the low-rank rows, which are few.
        """
        e, rows, adapters = self.e, self.run.rows, self.run.adapters
        weight, bias = self._weight(f"{name}.weight"), self._optional(f"{name}.bias")
        inputs = x.elements // rows
        outputs = weight.elements // inputs
        if self.run.quantized:
            out = packed_linear(e, x, weight.elements, rows * outputs)
        else:
            out = linear(e, x, weight, rows * outputs, bias)
        if adapters is None or f"{name}.weight" not in self.adapted:
            return out
        if adapters.magnitudes:
            down, up = self._adapter(f"{name}.weight")
            return plus(e, out, self._rescaled(x, out, down, up, has_bias=bias is not None))
        summed = plus(e, out, self._update(name, x, outputs))
        e.merge_last_product()
        return summed

    def _rescaled(
        self,
        x: SizedTensor,
        out: SizedTensor,
        down: SizedTensor,
        up: SizedTensor,
        *,
        has_bias: bool,
    ) -> SizedTensor:
        """What DoRA adds to a layer's result: (m - 1) * result + m * B(A(x)) * scaling, m the
        magnitudes over the row norms. The norms take B A whole, made of a unit matrix, which lives
        until the layer is done."""
        e, rows = self.e, self.run.rows
        inputs, outputs = x.elements // rows, out.elements // rows
        unpacked = e.empty(inputs * outputs) if self.run.quantized else None
        # Held as the local variables and the graph of peft's layer hold them; no gradient comes
        # back through them.
        unit, low_update, update = (
            e.empty(size) for size in (inputs * inputs, down.elements, inputs * outputs)
        )
        scaled_update = e.empty(inputs * outputs)
        summed = e.empty(inputs * outputs)
        del scaled_update, summed
        scale = unary(e, e.weight(outputs, trained=True), e.empty(outputs))
        low_result = linear(
            e, linear(e, x, down, down.elements // inputs * rows), up, rows * outputs
        )
        e.merge_last_product()
        result = shifted(e, out) if has_bias else out
        rescaled = times(e, shifted(e, scale), result)
        added = plus(e, rescaled, scaled(e, times(e, scale, low_result)))
        del unit, low_update, update, unpacked
        return added

    def _norm(self, name: str, x: SizedTensor, rows: int | None = None) -> SizedTensor:
        """The norm `name` over `rows` of x (default: one row per token). It may have no weights,
        and no name then."""
        weight = self._optional(f"{name}.weight") or self.e.weight(0, trained=False)
        bias = self._optional(f"{name}.bias")
        return norm(
            self.e, self.run.model_type, self.block.norm, x, rows or self.run.rows, weight, bias
        )

    # Attention

    def _attention(self, hidden_states: SizedTensor) -> SizedTensor:
        e, run, a = self.e, self.run, self.block.attention
        query_states, key_states, value_states = self._query_key_value(hidden_states)
        if run.positions is None:
            in_fp32 = run.model_type in ROTATES_IN_FP32
            query_states, key_states = (
                rotated(e, query_states, in_fp32=in_fp32),
                rotated(e, key_states, in_fp32=in_fp32),
            )
        if run.model_type in ROTATES_A_PART:
            query_states, key_states = shifted(e, query_states), shifted(e, key_states)
        shape = AttentionShape(
            run.sequences, run.length, a.num_heads, a.num_kv_heads, a.head_dim, a.value_head_dim
        )
        capped = run.kernel == "eager" and run.model_type in CAPS_SCORES
        kernel = partial(eager, capped=True) if capped else KERNELS[run.kernel]
        output = kernel(e, query_states, key_states, value_states, shape)
        if run.model_type in ROTATES_A_PART and run.kernel != "eager":
            output = shifted(e, output)
        return self._linear(self._linear_names("attention")[-1], output)

    def _query_key_value(
        self, hidden_states: SizedTensor
    ) -> tuple[SizedTensor, SizedTensor, SizedTensor]:
        a, rows = self.block.attention, self.run.rows
        *names, _ = self._linear_names("attention")
        query, key = rows * a.num_heads * a.head_dim, rows * a.num_kv_heads * a.head_dim
        value = rows * a.num_kv_heads * a.value_head_dim
        if a.kind == "latent":
            return self._latent(hidden_states)
        if len(names) == 1:
            together = self._linear(names[0], hidden_states)
            if self.run.model_type in SLICES_PROJECTIONS:
                return (
                    piece(self.e, together, query),
                    piece(self.e, together, key),
                    piece(self.e, together, value),
                )
            q, k, v = self.e.split(together, (query, key, value))
            return q, k, v
        q, k, v = (self._per_head(name, hidden_states) for name in names[:3])
        return q, k, v

    def _per_head(self, name: str, hidden_states: SizedTensor) -> SizedTensor:
        """A projection, normalised where the block has norms for it, seen by heads: its gradient
        comes back copied."""
        a = self.block.attention
        x = self._linear(name, hidden_states)
        own = f"{name.removesuffix('_proj')}_norm"
        normed = f"{own}.weight" in self.shapes
        if normed and a.query_key_norm == "all_heads":
            return self._norm(own, x)
        x = copied_in_backward(self.e, x)
        return self._norm(own, x, x.elements // a.head_dim) if normed else x

    def _latent(self, hidden_states: SizedTensor) -> tuple[SizedTensor, SizedTensor, SizedTensor]:
        """Multi-head latent attention: compressed queries and keys, normalised, then widened to
        heads."""
        a, rows = self.block.attention, self.run.rows
        prefix = self._linear_names("attention")[0].rsplit(".", 1)[0]
        if a.q_rank is None:
            query = self._linear(f"{prefix}.q_proj", hidden_states)
        else:
            low = self._norm(
                f"{prefix}.q_a_layernorm", self._linear(f"{prefix}.q_a_proj", hidden_states)
            )
            query = self._linear(f"{prefix}.q_b_proj", low)
        assert a.kv_rank is not None
        compressed = self._linear(f"{prefix}.kv_a_proj_with_mqa", hidden_states)
        low = self._norm(f"{prefix}.kv_a_layernorm", piece(self.e, compressed, rows * a.kv_rank))
        wide = self._linear(f"{prefix}.kv_b_proj", low)
        value = piece(self.e, wide, rows * a.num_heads * a.value_head_dim)
        # A key has a part of its own and one with positions, joined to the size of a query.
        key = scaled(self.e, query)
        return query, key, value

    # MLP and experts

    def _mlp(self, x: SizedTensor) -> SizedTensor:
        e, mlp = self.e, self.block.mlp
        if mlp.num_experts:
            return self._mixture(x)
        names = self._linear_names("mlp")
        if not mlp.gated:
            return self._linear(names[-1], _activated(e, self._linear(names[0], x), mlp.activation))
        if len(names) == 3:
            gate, up, down = names
            return self._linear(
                down,
                times(e, _activated(e, self._linear(gate, x), mlp.activation), self._linear(up, x)),
            )
        together = self._linear(names[0], x)
        gate_states, up_states = e.split(together, (together.elements // 2,) * 2)
        del together
        up_states = times(e, up_states, _activated(e, gate_states, mlp.activation))
        return self._linear(names[-1], up_states)

    def _mixture(self, x: SizedTensor) -> SizedTensor:
        """The block's feed-forward part [rows, H]: router, experts, and shared experts where there
        are some."""
        e, mlp, rows = self.e, self.block.mlp, self.run.rows
        hidden, routed = x.elements // rows, rows * mlp.experts_per_token
        scores, order = self._routed(x)
        states = unary(e, x, e.empty(routed * hidden, x.itemsize))
        up = self._grouped("gate_up_proj", states, routed * 2 * mlp.expert_size)
        states = _gated(e, up)
        del up
        states = self._grouped("down_proj", states, routed * hidden)
        weighted = times(e, states, scores)
        restored = unary(e, weighted)
        del weighted
        result = to(e, _summed_over_experts(e, restored, rows * hidden), x.itemsize)
        del restored, states, order
        shared = [name for name in self._linear_names("mlp") if name]
        if not shared:
            return result
        gate, into, down = (shared * 3)[:3]
        return plus(
            e,
            result,
            self._linear(
                down, times(e, activated(e, self._linear(gate, x)), self._linear(into, x))
            ),
        )

    def _routed(self, x: SizedTensor) -> tuple[SizedTensor, list[SizedTensor]]:
        """Weights of the chosen experts, one per routed row, and the index tensors that backward
        needs."""
        e, rows, mlp = self.e, self.run.rows, self.block.mlp
        weight = self._summed_weight(
            next(name for name, tensor in self.shapes.items() if tensor.role == "router")
        )
        probabilities = softmax(e, to(e, linear(e, x, weight, rows * mlp.num_experts), FP32))
        routed = rows * mlp.experts_per_token
        indices = [e.empty(routed, INT64) for _ in range(4)]
        top = unary(e, probabilities, e.empty(routed, FP32))
        total = _summed_over_experts(e, top, rows)
        top = times(e, top, total)
        return top if self.run.model_type in SCORES_IN_FP32 else to(e, top, x.itemsize), indices

    def _grouped(self, name: str, x: SizedTensor, outputs: int) -> SizedTensor:
        weight = self._summed_weight(
            next(key for key in self.shapes if key.endswith(f"experts.{name}"))
        )
        return linear(self.e, x, weight, outputs, grouped=True)


def _sides(names: list[str]) -> tuple[tuple[str | None, ...], tuple[str | None, ...]]:
    """Names of the norms before and after attention and MLP. A norm without weights has no name and
    no tensors."""
    if len(names) == 4:
        if "post_self_attn_layernorm" in names:  # GLM-4's order differs from Gemma's
            return ("input_layernorm", "post_attention_layernorm"), (
                "post_self_attn_layernorm",
                "post_mlp_layernorm",
            )
        return (names[0], names[2]), (names[1], names[3])
    if names == ["post_attention_layernorm", "post_feedforward_layernorm"]:
        return (None, None), (names[0], names[1])
    first, second = ([*names, "", ""])[:2]
    return (first, second), (None, None)


def _activated(e: Tape, x: SizedTensor, activation: str) -> SizedTensor:
    """One kernel that keeps its input, but for those that transformers writes out."""
    if activation in ("gelu_new", "gelu_fast"):
        return _gelu_new(e, x)
    if activation == "relu2":
        return power(e, unary(e, x, saves="result"))
    return activated(e, x)


def _gelu_new(e: Tape, x: SizedTensor) -> SizedTensor:
    """0.5 x (1 + tanh(c (x + 0.044715 x^3))), operator by operator: keeps x, the tanh and both
    factors."""
    half = scaled(e, x)
    inner = scaled(e, plus(e, x, scaled(e, power(e, x))))
    return times(e, half, shifted(e, unary(e, inner, saves="result")))


def _summed_over_experts(e: Tape, x: SizedTensor, elements: int) -> SizedTensor:
    return unary(e, x, e.empty(elements, x.itemsize), passes=True)


def _gated(e: Tape, together: SizedTensor) -> SizedTensor:
    gate, up = e.split(together, (together.elements // 2,) * 2)
    return times(e, activated(e, gate), up)
