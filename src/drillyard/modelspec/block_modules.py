"""The parts that blocks are made of: attention, feed-forward, norms, each as the tensors that transformers builds.

A family's row (families/) picks parts and sets how they differ: names, biases, norms of queries and keys, fused
matrices. Each function here takes such settings and returns the part, a function of a config's fields. A setting that
is a string names the config field that switches it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from drillyard.modelspec.config_fields import ConfigFields
from drillyard.modelspec.spec import Mlp, Role, TensorSpec

Tensors = tuple[TensorSpec, ...]
AttentionPart = Callable[[ConfigFields], tuple[dict[str, Any], Tensors]]
"""The attributes of an Attention, all but its window, and its tensors."""
MlpPart = Callable[[ConfigFields], tuple[Mlp, Tensors]]
NormPart = Callable[[str, int], Tensors]
"""A norm by its name and size."""
QueryKeyNorm = Callable[[ConfigFields], Tensors]
Size = str | int | Callable[[ConfigFields], int]


def linear(
    name: str, inputs: int, outputs: int, role: Role, *, bias: bool = False, transposed: bool = False
) -> Tensors:
    """An nn.Linear, or transposed the Conv1D of GPT-2."""
    shape = (inputs, outputs) if transposed else (outputs, inputs)
    weight = TensorSpec(f"{name}.weight", shape, role, linear=True)
    return (weight, TensorSpec(f"{name}.bias", (outputs,), role)) if bias else (weight,)


def rms_norm(name: str, size: int) -> Tensors:
    """An RMSNorm."""
    return (TensorSpec(f"{name}.weight", (size,), "norm"),)


def unbiased_layer_norm(name: str, size: int) -> Tensors:
    """A LayerNorm with weights only (Cohere)."""
    return (TensorSpec(f"{name}.weight", (size,), "norm"),)


def layer_norm(name: str, size: int) -> Tensors:
    """A LayerNorm with weights and biases."""
    return (TensorSpec(f"{name}.weight", (size,), "norm"), TensorSpec(f"{name}.bias", (size,), "norm"))


def bare_norm(name: str, size: int) -> Tensors:
    """A norm without parameters (OLMo)."""
    return ()


def size_of(fields: ConfigFields, size: Size) -> int:
    """A size that is a constant, a config field or computed from fields."""
    if isinstance(size, int):
        return size
    return fields.integer(size) if isinstance(size, str) else size(fields)


# Norms of queries and keys


def per_head(
    query: str = "q_norm", key: str = "k_norm", *, norm: NormPart = rms_norm, when: bool | str = True
) -> QueryKeyNorm:
    """One norm over head_dim, shared by the heads."""
    return lambda f: (*norm(query, f.head_dim), *norm(key, f.head_dim)) if f.switch(when) else ()


def all_heads(query: str = "q_norm", key: str = "k_norm") -> QueryKeyNorm:
    """One norm over all heads together."""
    return lambda f: (*rms_norm(query, f.heads * f.head_dim), *rms_norm(key, f.kv_heads * f.head_dim))


def weights_of_each_head(when: str) -> QueryKeyNorm:
    """Cohere's: a weight for every dimension of every head, as a matrix."""

    def tensors(f: ConfigFields) -> Tensors:
        shapes = {"q_norm": (f.heads, f.head_dim), "k_norm": (f.kv_heads, f.head_dim)}
        return tuple(TensorSpec(f"{n}.weight", s, "norm") for n, s in shapes.items()) if f.flag(when) else ()

    return tensors


def norm_of_each_head(when: str) -> QueryKeyNorm:
    """StableLM's: a norm module of its own for every head."""

    def tensors(f: ConfigFields) -> Tensors:
        counts = {"q_layernorm": f.heads, "k_layernorm": f.kv_heads}
        names = [f"{name}.norms.{head}.weight" for name, count in counts.items() for head in range(count)]
        return tuple(TensorSpec(name, (f.head_dim,), "norm") for name in names) if f.flag(when) else ()

    return tensors


# Attention


def grouped(
    prefix: str = "self_attn",
    *,
    projections: str = "q_proj k_proj v_proj",
    out: str = "o_proj",
    bias: bool | str = False,
    out_bias: bool | str | None = None,
    norm: QueryKeyNorm | None = None,
    norm_kind: Literal["none", "per_head", "all_heads"] = "none",
    kv_heads: Callable[[ConfigFields], int] | None = None,
    transposed: bool = False,
    sinks: bool = False,
    gated: bool = False,
) -> AttentionPart:
    """Multi-head, grouped-query or multi-query attention.

    `projections` are the names of the matrices of queries, keys and values, or of the one that fuses them. `out_bias`
    is `bias` unless given. `sinks`: a learned logit per head. `gated`: the query projection also makes a gate.
    """

    def part(f: ConfigFields) -> tuple[dict[str, Any], Tensors]:
        kv = f.kv_heads if kv_heads is None else kv_heads(f)
        query, key = f.heads * f.head_dim, kv * f.head_dim
        names, widths = projections.split(), [query * (2 if gated else 1), key, key]
        if len(names) == 1:
            widths = [sum(widths)]
        tensors: list[TensorSpec] = [TensorSpec("sinks", (f.heads,), "attention")] if sinks else []
        for name, width in zip(names, widths, strict=True):
            tensors += linear(name, f.hidden, width, "attention", bias=f.switch(bias), transposed=transposed)
        with_bias = f.switch(bias if out_bias is None else out_bias)
        tensors += linear(out, query, f.hidden, "attention", bias=with_bias, transposed=transposed)
        extra = norm(f) if norm else ()
        shape = {
            "kind": "softmax",
            "num_heads": f.heads,
            "num_kv_heads": kv,
            "head_dim": f.head_dim,
            "value_head_dim": f.head_dim,
            "query_key_norm": norm_kind if extra else "none",
        }
        return shape, within(prefix, (*tensors, *extra))

    return part


def latent(prefix: str = "self_attn") -> AttentionPart:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 section 2.1)."""

    def part(f: ConfigFields) -> tuple[dict[str, Any], Tensors]:
        q_rank, kv_rank = f.optional_integer("q_lora_rank"), f.integer("kv_lora_rank")
        plain, rope, value = (f.integer(n) for n in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        width, bias = f.heads * (plain + rope), f.flag("attention_bias")
        if q_rank is None:
            tensors = [*linear("q_proj", f.hidden, width, "attention")]
        else:
            tensors = [
                *linear("q_a_proj", f.hidden, q_rank, "attention", bias=bias),
                *rms_norm("q_a_layernorm", q_rank),
                *linear("q_b_proj", q_rank, width, "attention"),
            ]
        tensors += [
            *linear("kv_a_proj_with_mqa", f.hidden, kv_rank + rope, "attention", bias=bias),
            *rms_norm("kv_a_layernorm", kv_rank),
            *linear("kv_b_proj", kv_rank, f.heads * (plain + value), "attention"),
            *linear("o_proj", f.heads * value, f.hidden, "attention", bias=bias),
        ]
        shape = {
            "kind": "latent",
            "num_heads": f.heads,
            "num_kv_heads": f.heads,
            "head_dim": plain + rope,
            "value_head_dim": value,
            "q_rank": q_rank,
            "kv_rank": kv_rank,
            "rope_head_dim": rope,
        }
        return shape, within(prefix, tensors)

    return part


def gated_delta(prefix: str = "linear_attn") -> AttentionPart:
    """The gated delta rule of Qwen3-Next (arXiv 2412.06464): a state per value head instead of attention."""

    def part(f: ConfigFields) -> tuple[dict[str, Any], Tensors]:
        key_heads, value_heads = f.integer("linear_num_key_heads"), f.integer("linear_num_value_heads")
        key_dim, value_dim = f.integer("linear_key_head_dim"), f.integer("linear_value_head_dim")
        if value_heads % key_heads:
            raise f.error(f"linear_num_value_heads {value_heads} does not divide by linear_num_key_heads {key_heads}")
        keys, values = key_heads * key_dim, value_heads * value_dim
        tensors = (
            TensorSpec("dt_bias", (value_heads,), "attention"),
            TensorSpec("A_log", (value_heads,), "attention"),
            TensorSpec("conv1d.weight", (2 * keys + values, 1, f.integer("linear_conv_kernel_dim")), "attention"),
            *linear("in_proj_qkvz", f.hidden, 2 * keys + 2 * values, "attention"),
            *linear("in_proj_ba", f.hidden, 2 * value_heads, "attention"),
            *rms_norm("norm", value_dim),
            *linear("out_proj", values, f.hidden, "attention"),
        )
        shape = {
            "kind": "linear",
            "num_heads": value_heads,
            "num_kv_heads": key_heads,
            "head_dim": key_dim,
            "value_head_dim": value_dim,
        }
        return shape, within(prefix, tensors)

    return part


# Feed-forward


def gated(
    prefix: str = "mlp",
    *,
    size: Size = "intermediate_size",
    bias: bool | str = False,
    fused: bool = False,
    activation: str = "silu",
) -> MlpPart:
    """A gated MLP: gate and up (fused into one matrix on request), then down."""

    def part(f: ConfigFields) -> tuple[Mlp, Tensors]:
        width, with_bias = size_of(f, size), f.switch(bias)
        ins = {"gate_up_proj": 2 * width} if fused else {"gate_proj": width, "up_proj": width}
        tensors = [t for n, w in ins.items() for t in linear(n, f.hidden, w, "mlp", bias=with_bias)]
        tensors += linear("down_proj", width, f.hidden, "mlp", bias=with_bias)
        return Mlp(True, f.activation or activation, width), within(prefix, tensors)

    return part


def plain(
    prefix: str,
    into: str,
    out: str,
    *,
    size: Size = "intermediate_size",
    bias: bool | str = True,
    transposed: bool = False,
    activation: str = "gelu",
    extra: Tensors = (),
) -> MlpPart:
    """An MLP of two matrices. `extra`: parameters of the activation."""

    def part(f: ConfigFields) -> tuple[Mlp, Tensors]:
        width, with_bias = size_of(f, size), f.switch(bias)
        tensors = (
            *linear(into, f.hidden, width, "mlp", bias=with_bias, transposed=transposed),
            *linear(out, width, f.hidden, "mlp", bias=with_bias, transposed=transposed),
            *extra,
        )
        return Mlp(False, f.activation or activation, width), within(prefix, tensors)

    return part


def experts(
    prefix: str = "mlp",
    *,
    count: str = "num_local_experts",
    chosen: str = "num_experts_per_tok",
    size: Size = "moe_intermediate_size",
    router: str = "gate",
    router_is_linear: bool = False,
    router_extra: Callable[[int], Tensors] = lambda count: (),
    inputs_first: bool = False,
    bias: bool = False,
    shared: Callable[[ConfigFields], tuple[Mlp, Tensors] | None] | None = None,
    shared_gate: bool = False,
    activation: str = "silu",
) -> MlpPart:
    """A mixture of gated experts: a router, the experts' matrices stacked, and on request shared experts.

    `inputs_first`: the experts' matrices are stored (experts, inputs, outputs). `shared` is the MLP of the shared
    experts, `shared_gate` a gate for its output.
    """

    def part(f: ConfigFields) -> tuple[Mlp, Tensors]:
        number, per_token, width = f.integer(count), f.integer(chosen), size_of(f, size)
        if per_token > number:
            raise f.error(f"{chosen} is {per_token}, but there are {number} experts")
        shapes = {"gate_up_proj": (f.hidden, 2 * width), "down_proj": (width, f.hidden)}
        tensors = [TensorSpec(f"{router}.weight", (number, f.hidden), "router", linear=router_is_linear)]
        tensors += router_extra(number)
        for name, (inputs, outputs) in shapes.items():
            shape = (inputs, outputs) if inputs_first else (outputs, inputs)
            tensors.append(TensorSpec(f"experts.{name}", (number, *shape), "expert"))
            if bias:
                tensors.append(TensorSpec(f"experts.{name}_bias", (number, outputs), "expert"))
        common = shared(f) if shared else None
        tensors += common[1] if common else ()
        if shared_gate:
            tensors += linear("shared_expert_gate", f.hidden, 1, "router")
        common_width = common[0].intermediate_size if common else 0
        mlp = Mlp(True, f.activation or activation, common_width, number, per_token, width)
        return mlp, within(prefix, tensors)

    return part


def within(prefix: str, tensors: tuple[TensorSpec, ...] | list[TensorSpec]) -> Tensors:
    """The tensors with a prefix before their names."""
    return tuple(TensorSpec(f"{prefix}.{t.name}" if prefix else t.name, t.shape, t.role, t.linear) for t in tensors)
