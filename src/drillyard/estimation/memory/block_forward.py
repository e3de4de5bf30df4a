"""One transformer block forward, as the classes of transformers write it, on tensors without contents.

The order of operations and the life of local variables follow modeling_llama.py and its relatives (transformers 5):
norms before, after or around attention and MLP; parallel branches; biases; norms of queries and keys; fused and
separate projections. A block's weights come from its spec, and LoRA hangs on the layers that its targets name.

A mixture of experts runs as transformers' grouped matrix product (integrations/moe.py): every token is copied once for
each of its experts, sorted by expert, multiplied in one grouped product per matrix, weighted, brought back into order
and summed. Sizes: rows * experts_per_token "routed" rows, whatever the router chooses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from drillyard.estimation.memory.attention import KERNELS, AttentionShape, both_rotated, eager_capped
from drillyard.estimation.memory.autograd import SizedTensor, Tape
from drillyard.estimation.memory.operators import (
    FP32,
    activated,
    copied_in_backward,
    linear,
    norm,
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
from drillyard.modelspec import Block, adapter_layers

INT64: Final = 8
SCORES_IN_FP32: Final = frozenset({"mixtral"})
"""The experts' weights stay in fp32, and with them the sum over experts."""
ROTATES_IN_FP32: Final = frozenset({"cohere", "cohere2", "olmo2", "olmo3"})
SCALES_BRANCHES: Final = frozenset({"granite"})
SLICES_PROJECTIONS: Final = frozenset({"phi3"})
"""Queries, keys and values are slices of one projection; elsewhere one projection is split."""
ROTATES_A_PART: Final = frozenset({"phi3"})
"""The rotated dimensions are joined with the others, if there are any, in a copy that is laid out by heads; the output
of the kernel is laid out like its queries, and has to be copied too."""
CAPS_SCORES: Final = frozenset({"gemma2"})


@dataclass(frozen=True, slots=True)
class BlockInputs:
    """What a block runs on: tokens, kernel, and which weights are trained."""

    model_type: str
    sequences: int
    length: int
    kernel: str
    positions: int | None
    lora_rank: int | None = None
    lora_targets: tuple[str, ...] | str = ()

    @property
    def rows(self) -> int:
        return self.sequences * self.length


class BlockWeights:
    """A block's tensors by name, as gathered weights with or without a gradient."""

    def __init__(self, e: Tape, block: Block, run: BlockInputs) -> None:
        self.e = e
        self.run = run
        self.shapes = {tensor.name: tensor for tensor in block.tensors}
        self.trained = run.lora_rank is None
        targets = run.lora_targets
        self.adapted = (
            frozenset() if self.trained else frozenset(t.name for t in adapter_layers(block.tensors, targets))
        )
        self.made: dict[str, SizedTensor] = {}

    def named(self, role: str) -> list[str]:
        """Names of the weights of linear layers in a role, without `.weight`, in the block's order."""
        return [s.name.removesuffix(".weight") for s in self.shapes.values() if s.role == role and s.linear]

    def get(self, name: str) -> SizedTensor | None:
        """The tensor of that name, once and the same for every use; None where the block has none."""
        if name not in self.shapes:
            return None
        if name not in self.made:
            self.made[name] = self.e.weight(self.shapes[name].parameters, trained=self.trained)
        return self.made[name]

    def linear(self, name: str, x: SizedTensor) -> SizedTensor:
        """The linear layer `name`, with its bias and its adapter where it has them."""
        weight = self.get(f"{name}.weight")
        assert weight is not None, name
        inputs = x.elements // self.run.rows
        outputs = weight.elements // inputs
        wide = self.run.rows * outputs
        out = linear(self.e, x, weight, wide, self.get(f"{name}.bias"))
        return self._with_adapter(name, x, out, inputs, outputs) if f"{name}.weight" in self.adapted else out

    def _with_adapter(self, name: str, x: SizedTensor, result: SizedTensor, inputs: int, outputs: int) -> SizedTensor:
        """PEFT's layer: result + B(A(x)) * scaling. A keeps x, B keeps the low-rank rows, which are few."""
        rank = self.run.lora_rank
        assert rank is not None
        e, rows = self.e, self.run.rows
        down = e.weight(rank * inputs, trained=True)
        up = e.weight(rank * outputs, trained=True)
        return plus(e, result, scaled(e, linear(e, linear(e, x, down, rows * rank), up, rows * outputs)))


def forward(e: Tape, block: Block, run: BlockInputs, hidden_states: SizedTensor) -> SizedTensor:
    """The block's result [B, T, H]; the caller holds its input."""
    w = BlockWeights(e, block, run)
    norms = [s.name.removesuffix(".weight") for s in block.tensors if s.role == "norm" and s.name.endswith(".weight")]
    # Those of queries and keys are inside of attention.
    outer = [name for name in norms if "." not in name]
    if block.parallel:
        return _parallel(e, block, run, w, hidden_states, outer)
    before, after = _sides(outer)
    for part, first, second in zip((_attention, _mlp), before, after, strict=True):
        residual = hidden_states
        if first is not None:
            hidden_states = _norm(e, block, run, w, first, hidden_states)
        hidden_states = part(e, block, run, w, hidden_states)
        if second is not None:
            hidden_states = _norm(e, block, run, w, second, hidden_states)
        if run.model_type in SCALES_BRANCHES:
            hidden_states = scaled(e, hidden_states)
        hidden_states = plus(e, residual, hidden_states)
    return hidden_states


def _sides(names: list[str]) -> tuple[tuple[str | None, ...], tuple[str | None, ...]]:
    """Which norms stand before and after attention and MLP. A norm without weights has no name and no tensors."""
    if len(names) == 4:
        if "post_self_attn_layernorm" in names:  # GLM-4's order differs from Gemma's
            return ("input_layernorm", "post_attention_layernorm"), ("post_self_attn_layernorm", "post_mlp_layernorm")
        return (names[0], names[2]), (names[1], names[3])
    if names == ["post_attention_layernorm", "post_feedforward_layernorm"]:
        return (None, None), (names[0], names[1])
    first, second = ([*names, "", ""])[:2]
    return (first, second), (None, None)


def _norm(e: Tape, block: Block, run: BlockInputs, w: BlockWeights, name: str, x: SizedTensor) -> SizedTensor:
    weight = w.get(f"{name}.weight") or e.weight(0, trained=False)
    return norm(e, run.model_type, block.norm, x, run.rows, weight, w.get(f"{name}.bias"))


def _parallel(
    e: Tape, block: Block, run: BlockInputs, w: BlockWeights, hidden_states: SizedTensor, names: list[str]
) -> SizedTensor:
    """Attention and MLP read the same normalised input (one norm), or one norm each (GPT-NeoX)."""
    residual = hidden_states
    normed = _norm(e, block, run, w, names[0] if names else "", hidden_states)
    attended = _attention(e, block, run, w, normed)
    if len(names) > 1:
        normed = _norm(e, block, run, w, names[1], hidden_states)
    through_mlp = _mlp(e, block, run, w, normed)
    return plus(e, plus(e, residual, attended), through_mlp)


def _attention(e: Tape, block: Block, run: BlockInputs, w: BlockWeights, hidden_states: SizedTensor) -> SizedTensor:
    query_states, key_states, value_states = _query_key_value(e, block, run, w, hidden_states)
    if run.positions is None:
        in_fp32 = run.model_type in ROTATES_IN_FP32
        query_states, key_states = both_rotated(e, query_states, key_states, in_fp32=in_fp32)
    if run.model_type in ROTATES_A_PART:
        query_states, key_states = shifted(e, query_states), shifted(e, key_states)
    a = block.attention
    shape = AttentionShape(run.sequences, run.length, a.num_heads, a.num_kv_heads, a.head_dim, a.value_head_dim)
    capped = run.kernel == "eager" and run.model_type in CAPS_SCORES
    kernel = eager_capped if capped else KERNELS[run.kernel]
    output = kernel(e, query_states, key_states, value_states, shape)
    if run.model_type in ROTATES_A_PART and run.kernel != "eager":
        output = shifted(e, output)
    return w.linear(w.named("attention")[-1], output)


def _query_key_value(
    e: Tape, block: Block, run: BlockInputs, w: BlockWeights, hidden_states: SizedTensor
) -> tuple[SizedTensor, SizedTensor, SizedTensor]:
    a, rows = block.attention, run.rows
    *names, _ = w.named("attention")
    query, key = rows * a.num_heads * a.head_dim, rows * a.num_kv_heads * a.head_dim
    value = rows * a.num_kv_heads * a.value_head_dim
    if a.kind == "latent":
        return _latent(e, block, run, w, hidden_states)
    if len(names) == 1:
        together = w.linear(names[0], hidden_states)
        if run.model_type in SLICES_PROJECTIONS:
            return piece(e, together, query), piece(e, together, key), piece(e, together, value)
        q, k, v = e.split(together, (query, key, value))
        return q, k, v
    q, k, v = (_per_head(e, block, run, w, name, hidden_states) for name in names[:3])
    return q, k, v


def _per_head(
    e: Tape, block: Block, run: BlockInputs, w: BlockWeights, name: str, hidden_states: SizedTensor
) -> SizedTensor:
    """A projection, normalised where the block has norms for it, seen by heads: its gradient comes back copied."""
    x = w.linear(name, hidden_states)
    a = block.attention
    own = f"{name.removesuffix('_proj')}_norm"
    if a.query_key_norm != "none" and f"{own}.weight" in w.shapes:
        rows = run.rows if a.query_key_norm == "all_heads" else x.elements // a.head_dim
        weight = w.get(f"{own}.weight")
        assert weight is not None
        if a.query_key_norm == "per_head":
            x = copied_in_backward(e, x)
        return norm(e, run.model_type, block.norm, x, rows, weight, w.get(f"{own}.bias"))
    return copied_in_backward(e, x)


def _latent(
    e: Tape, block: Block, run: BlockInputs, w: BlockWeights, hidden_states: SizedTensor
) -> tuple[SizedTensor, SizedTensor, SizedTensor]:
    """Multi-head latent attention: compressed queries and keys, normalised, then widened to heads."""
    a, rows = block.attention, run.rows
    prefix = w.named("attention")[0].rsplit(".", 1)[0]
    if a.q_rank is None:
        query = w.linear(f"{prefix}.q_proj", hidden_states)
    else:
        low = _norm(e, block, run, w, f"{prefix}.q_a_layernorm", w.linear(f"{prefix}.q_a_proj", hidden_states))
        query = w.linear(f"{prefix}.q_b_proj", low)
    assert a.kv_rank is not None
    compressed = w.linear(f"{prefix}.kv_a_proj_with_mqa", hidden_states)
    low = _norm(e, block, run, w, f"{prefix}.kv_a_layernorm", piece(e, compressed, rows * a.kv_rank))
    wide = w.linear(f"{prefix}.kv_b_proj", low)
    value = piece(e, wide, rows * a.num_heads * a.value_head_dim)
    # A key has a part of its own and one with positions, joined to the size of a query.
    key = scaled(e, query)
    return query, key, value


def _mlp(e: Tape, block: Block, run: BlockInputs, w: BlockWeights, x: SizedTensor) -> SizedTensor:
    if block.mlp.num_experts:
        return _mixture(e, block, run.rows, w, x)
    names = w.named("mlp")
    activation = block.mlp.activation
    if not block.mlp.gated:
        return w.linear(names[-1], _activated(e, w.linear(names[0], x), activation))
    if len(names) == 3:
        gate, up, down = names
        return w.linear(down, times(e, _activated(e, w.linear(gate, x), activation), w.linear(up, x)))
    together = w.linear(names[0], x)
    gate_states, up_states = e.split(together, (together.elements // 2,) * 2)
    del together
    up_states = times(e, up_states, _activated(e, gate_states, activation))
    return w.linear(names[-1], up_states)


def _activated(e: Tape, x: SizedTensor, activation: str) -> SizedTensor:
    """One kernel that keeps its input, but for those that transformers writes out."""
    if activation in ("gelu_new", "gelu_fast"):
        return _gelu_new(e, x)
    if activation == "relu2":
        return power(e, unary(e, x, saves="result"))
    return activated(e, x)


def _gelu_new(e: Tape, x: SizedTensor) -> SizedTensor:
    """0.5 x (1 + tanh(c (x + 0.044715 x^3))), operator by operator: keeps x, the tanh and both factors."""
    half = scaled(e, x)
    inner = scaled(e, plus(e, x, scaled(e, power(e, x))))
    return times(e, half, shifted(e, unary(e, inner, saves="result")))


def _mixture(e: Tape, block: Block, rows: int, w: BlockWeights, x: SizedTensor) -> SizedTensor:
    """The block's feed-forward part [rows, H]: router, experts, and shared experts where there are some."""
    mlp = block.mlp
    hidden = x.elements // rows
    scores, order = _routed(e, block, rows, w, x)
    states = unary(e, x, e.empty(rows * mlp.experts_per_token * hidden, x.itemsize))
    up = _grouped(e, w, "gate_up_proj", states, rows * mlp.experts_per_token * 2 * mlp.expert_size)
    states = _gated(e, up)
    del up
    states = _grouped(e, w, "down_proj", states, rows * mlp.experts_per_token * hidden)
    weighted = times(e, states, scores)
    restored = unary(e, weighted)
    del weighted
    result = to(e, _summed_over_experts(e, restored, rows * hidden), x.itemsize)
    del restored, states, order
    shared = [name for name in w.named("mlp") if name]
    if not shared:
        return result
    gate, into, down = (shared * 3)[:3] if len(shared) < 3 else shared[:3]
    return plus(e, result, w.linear(down, times(e, activated(e, w.linear(gate, x)), w.linear(into, x))))


def _routed(e: Tape, block: Block, rows: int, w: BlockWeights, x: SizedTensor) -> tuple[SizedTensor, list[SizedTensor]]:
    """Weights of the chosen experts, one per routed row, and the index tensors that backward needs."""
    number, chosen = block.mlp.num_experts, block.mlp.experts_per_token
    name = next(name for name in w.shapes if w.shapes[name].role == "router")
    weight = w.get(name)
    assert weight is not None
    probabilities = softmax(e, to(e, linear(e, x, weight, rows * number), FP32))
    indices = [e.empty(rows * chosen, INT64) for _ in range(4)]
    top = unary(e, probabilities, e.empty(rows * chosen, FP32))
    total = _summed_over_experts(e, top, rows)
    top = times(e, top, total)
    return top if w.run.model_type in SCORES_IN_FP32 else to(e, top, x.itemsize), indices


def _summed_over_experts(e: Tape, x: SizedTensor, elements: int) -> SizedTensor:
    return unary(e, x, e.empty(elements, x.itemsize), passes=True)


def _grouped(e: Tape, w: BlockWeights, name: str, x: SizedTensor, outputs: int) -> SizedTensor:
    """One product for all experts."""
    weight = w.get(next(key for key in w.shapes if key.endswith(f"experts.{name}")))
    assert weight is not None
    return linear(e, x, weight, outputs, grouped=True)


def _gated(e: Tape, together: SizedTensor) -> SizedTensor:
    gate, up = e.split(together, (together.elements // 2,) * 2)
    return times(e, activated(e, gate), up)
