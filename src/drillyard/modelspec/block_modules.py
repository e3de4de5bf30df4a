"""The modules that blocks are made of: attention, feed-forward, norms, each as the tensors that
transformers builds.

A row of families.yaml chooses the functions and sets how its modules differ: names, biases, norms
of queries and keys, fused matrices. Each function takes the fields of a config and such settings,
and returns what the module does and its tensors. A bias that is a string names the config field
that switches it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Final

from drillyard.modelspec.config_fields import ConfigFields
from drillyard.modelspec.families import Settings, Switch
from drillyard.modelspec.spec import Mlp, Role, TensorSpec

Tensors = tuple[TensorSpec, ...]
AttentionModule = tuple[dict[str, Any], Tensors]
"""The attributes of an Attention, all but its window, and its tensors."""
MlpModule = tuple[Mlp, Tensors]
Size = int | str | Sequence[Any] | Mapping[str, Any]
"""A number, a field, a product of sizes, or {field: NAME, or: SIZE} for a field that may be
null."""


def size_of(f: ConfigFields, size: Size) -> int:
    """The value of a size under a config."""
    if isinstance(size, int):
        return size
    if isinstance(size, str):
        return f.integer(size)
    if isinstance(size, Mapping):
        return f.integer(size["field"], size_of(f, size["or"]))
    return prod(size_of(f, factor) for factor in size)


def linear(
    name: str,
    inputs: int,
    outputs: int,
    role: Role,
    *,
    bias: bool = False,
    transposed: bool = False,
) -> Tensors:
    """An nn.Linear, or transposed the Conv1D of GPT-2."""
    weight = TensorSpec(
        f"{name}.weight", (inputs, outputs) if transposed else (outputs, inputs), role, linear=True
    )
    return (weight, TensorSpec(f"{name}.bias", (outputs,), role)) if bias else (weight,)


def norm(kind: str, name: str, size: int) -> Tensors:
    """A norm: `rms_norm`, `layer_norm`, `unbiased_layer_norm` (Cohere) or `bare_norm`, without
    parameters (OLMo)."""
    parameters = {
        "rms_norm": ("weight",),
        "layer_norm": ("weight", "bias"),
        "unbiased_layer_norm": ("weight",),
    }
    return tuple(TensorSpec(f"{name}.{part}", (size,), "norm") for part in parameters.get(kind, ()))


def prefixed(prefix: str, tensors: Iterable[TensorSpec]) -> Tensors:
    """The tensors with a prefix before their names."""
    return tuple(replace(t, name=f"{prefix}.{t.name}" if prefix else t.name) for t in tensors)


# Attention


def grouped_attention(
    f: ConfigFields,
    *,
    prefix: str = "self_attn",
    projections: Sequence[str] = ("q_proj", "k_proj", "v_proj"),
    out: str = "o_proj",
    bias: Switch = False,
    out_bias: Switch | None = None,
    query_key_norm: str | None = None,
    query_key_norm_when: Switch = True,
    multi_query: bool = False,
    transposed: bool = False,
    sinks: bool = False,
    gated: bool = False,
) -> AttentionModule:
    """Multi-head, grouped-query or multi-query attention.

    `projections` are the names of the matrices of queries, keys and values, or of the one that
    fuses them. `out_bias` is `bias` unless given. `multi_query`: the config has the flag of that
    name. `sinks`: a learned logit per head. `gated`: the query projection also makes a gate.
    """
    kv_heads = _multi_query_kv_heads(f) if multi_query else f.kv_heads
    query, key = f.heads * f.head_dim, kv_heads * f.head_dim
    widths = [query * (2 if gated else 1), key, key]
    if len(projections) == 1:
        widths = [sum(widths)]
    tensors = [TensorSpec("sinks", (f.heads,), "attention")] if sinks else []
    for name, width in zip(projections, widths, strict=True):
        tensors += linear(
            name, f.hidden, width, "attention", bias=f.switch(bias), transposed=transposed
        )
    with_bias = f.switch(bias if out_bias is None else out_bias)
    tensors += linear(out, query, f.hidden, "attention", bias=with_bias, transposed=transposed)
    normed = query_key_norm is not None and f.switch(query_key_norm_when)
    if query_key_norm is not None and normed:
        tensors += _query_key_norm(f, query_key_norm)
    attributes = {
        "kind": "softmax",
        "num_heads": f.heads,
        "num_kv_heads": kv_heads,
        "head_dim": f.head_dim,
        "value_head_dim": f.head_dim,
        "query_key_norm": (
            "none" if not normed else "all_heads" if query_key_norm == "all_heads" else "per_head"
        ),
    }
    return attributes, prefixed(prefix, tensors)


def _multi_query_kv_heads(f: ConfigFields) -> int:
    """GPT-BigCode and Falcon, which has groups in its new decoder architecture."""
    if f.has("new_decoder_architecture") and f.flag("new_decoder_architecture"):
        return f.integer("num_kv_heads", f.heads)
    return 1 if f.flag("multi_query") else f.heads


def _query_key_norm(f: ConfigFields, kind: str) -> Tensors:
    """The norms of queries and keys, each of `head_dim` unless said otherwise.

    `per_head`: shared by the heads. `layer_norm_per_head`: the same with a bias (Phi). `all_heads`:
    over all heads together (OLMo). `matrix`: weights for every head, as a matrix (Cohere).
    `module_per_head`: a module for every head (StableLM).
    """
    size, heads = f.head_dim, {"q": f.heads, "k": f.kv_heads}
    if kind == "per_head":
        return tuple(t for name in heads for t in norm("rms_norm", f"{name}_norm", size))
    if kind == "layer_norm_per_head":
        return tuple(t for name in heads for t in norm("layer_norm", f"{name}_layernorm", size))
    if kind == "all_heads":
        return tuple(
            t
            for name, count in heads.items()
            for t in norm("rms_norm", f"{name}_norm", count * size)
        )
    if kind == "matrix":
        return tuple(
            TensorSpec(f"{name}_norm.weight", (count, size), "norm")
            for name, count in heads.items()
        )
    assert kind == "module_per_head", kind
    modules = [
        f"{name}_layernorm.norms.{head}" for name, count in heads.items() for head in range(count)
    ]
    return tuple(TensorSpec(f"{module}.weight", (size,), "norm") for module in modules)


def latent_attention(f: ConfigFields, *, prefix: str = "self_attn") -> AttentionModule:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 section 2.1)."""
    q_rank, kv_rank = f.optional_integer("q_lora_rank"), f.integer("kv_lora_rank")
    plain, rope, value = (
        f.integer(n) for n in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    width, bias = f.heads * (plain + rope), f.flag("attention_bias")
    if q_rank is None:
        tensors = [*linear("q_proj", f.hidden, width, "attention")]
    else:
        tensors = [
            *linear("q_a_proj", f.hidden, q_rank, "attention", bias=bias),
            *norm("rms_norm", "q_a_layernorm", q_rank),
            *linear("q_b_proj", q_rank, width, "attention"),
        ]
    tensors += [
        *linear("kv_a_proj_with_mqa", f.hidden, kv_rank + rope, "attention", bias=bias),
        *norm("rms_norm", "kv_a_layernorm", kv_rank),
        *linear("kv_b_proj", kv_rank, f.heads * (plain + value), "attention"),
        *linear("o_proj", f.heads * value, f.hidden, "attention", bias=bias),
    ]
    attributes = {
        "kind": "latent",
        "num_heads": f.heads,
        "num_kv_heads": f.heads,
        "head_dim": plain + rope,
        "value_head_dim": value,
        "q_rank": q_rank,
        "kv_rank": kv_rank,
        "rope_head_dim": rope,
    }
    return attributes, prefixed(prefix, tensors)


def gated_delta_attention(f: ConfigFields, *, prefix: str = "linear_attn") -> AttentionModule:
    """The gated delta rule of Qwen3-Next (arXiv 2412.06464): a state per value head instead of
    attention."""
    key_heads, value_heads = f.integer("linear_num_key_heads"), f.integer("linear_num_value_heads")
    key_dim, value_dim = f.integer("linear_key_head_dim"), f.integer("linear_value_head_dim")
    if value_heads % key_heads:
        raise f.error(
            f"linear_num_value_heads {value_heads} does not divide by linear_num_key_heads"
            f" {key_heads}"
        )
    keys, values = key_heads * key_dim, value_heads * value_dim
    tensors = (
        TensorSpec("dt_bias", (value_heads,), "attention"),
        TensorSpec("A_log", (value_heads,), "attention"),
        TensorSpec(
            "conv1d.weight",
            (2 * keys + values, 1, f.integer("linear_conv_kernel_dim")),
            "attention",
        ),
        *linear("in_proj_qkvz", f.hidden, 2 * keys + 2 * values, "attention"),
        *linear("in_proj_ba", f.hidden, 2 * value_heads, "attention"),
        *norm("rms_norm", "norm", value_dim),
        *linear("out_proj", values, f.hidden, "attention"),
    )
    attributes = {
        "kind": "linear",
        "num_heads": value_heads,
        "num_kv_heads": key_heads,
        "head_dim": key_dim,
        "value_head_dim": value_dim,
    }
    return attributes, prefixed(prefix, tensors)


ATTENTIONS: Final[dict[str, Callable[..., AttentionModule]]] = {
    "grouped": grouped_attention,
    "latent": latent_attention,
    "gated_delta": gated_delta_attention,
}


def attention_module(f: ConfigFields, settings: Settings) -> AttentionModule:
    """The attention that a row of families.yaml describes."""
    return ATTENTIONS[settings.get("kind", "grouped")](
        f, **{k: v for k, v in settings.items() if k != "kind"}
    )


# Feed-forward


def gated_mlp(
    f: ConfigFields,
    *,
    prefix: str = "mlp",
    size: Size = "intermediate_size",
    bias: Switch = False,
    fused: bool = False,
    activation: str = "silu",
) -> MlpModule:
    """A gated MLP: gate and up (`fused` into one matrix), then down."""
    width, with_bias = size_of(f, size), f.switch(bias)
    ins = {"gate_up_proj": 2 * width} if fused else {"gate_proj": width, "up_proj": width}
    tensors = [t for n, w in ins.items() for t in linear(n, f.hidden, w, "mlp", bias=with_bias)]
    tensors += linear("down_proj", width, f.hidden, "mlp", bias=with_bias)
    return Mlp(True, f.activation or activation, width), prefixed(prefix, tensors)


def plain_mlp(
    f: ConfigFields,
    *,
    prefix: str = "mlp",
    into: str,
    out: str,
    size: Size = "intermediate_size",
    bias: Switch = True,
    transposed: bool = False,
    activation: str = "gelu",
    extra: Mapping[str, Sequence[int]] | None = None,
) -> MlpModule:
    """An MLP of two matrices. `extra`: parameters of the activation by name, with their shapes."""
    width, with_bias = size_of(f, size), f.switch(bias)
    tensors = (
        *linear(into, f.hidden, width, "mlp", bias=with_bias, transposed=transposed),
        *linear(out, width, f.hidden, "mlp", bias=with_bias, transposed=transposed),
        *(TensorSpec(name, tuple(shape), "mlp") for name, shape in (extra or {}).items()),
    )
    return Mlp(False, f.activation or activation, width), prefixed(prefix, tensors)


def expert_mlp(
    f: ConfigFields,
    *,
    prefix: str = "mlp",
    count: str = "num_local_experts",
    chosen: str = "num_experts_per_tok",
    size: Size = "moe_intermediate_size",
    router: str = "gate",
    router_is_linear: bool = False,
    router_tensors: Mapping[str, Sequence[int | str]] | None = None,
    inputs_first: bool = False,
    bias: bool = False,
    shared: Settings | None = None,
    shared_when: str | None = None,
    shared_gate: bool = False,
    activation: str = "silu",
    adapted_as: Mapping[str, Sequence[str]] | None = None,
) -> MlpModule:
    """A mixture of gated experts: a router, the experts' matrices stacked, and shared experts.

    `router_tensors` are further tensors of the router, `experts` in a shape standing for their
    number. `inputs_first`: the experts' matrices are stored (experts, inputs, outputs). `shared`
    are the settings of the shared experts' gated MLP, which exist where the number in the field
    `shared_when` is not 0; `shared_gate`: a gate for its output. `adapted_as`: the linear layers
    that router and experts stand for to peft, by the names of their tensors.
    """
    number, per_token, width = f.integer(count), f.integer(chosen), size_of(f, size)
    if per_token > number:
        raise f.error(f"{chosen} is {per_token}, but there are {number} experts")
    names = {name: tuple(layers) for name, layers in (adapted_as or {}).items()}
    as_router = names.get(router, ())
    tensors = [
        TensorSpec(f"{router}.weight", (number, f.hidden), "router", router_is_linear, as_router)
    ]
    for name, dims in (router_tensors or {}).items():
        tensors.append(
            TensorSpec(
                name, tuple(dim if isinstance(dim, int) else number for dim in dims), "router"
            )
        )
    for name, inputs, outputs in (
        ("gate_up_proj", f.hidden, 2 * width),
        ("down_proj", width, f.hidden),
    ):
        matrix = (inputs, outputs) if inputs_first else (outputs, inputs)
        tensors.append(
            TensorSpec(
                f"experts.{name}", (number, *matrix), "expert", adapted_as=names.get(name, ())
            )
        )
        if bias:
            tensors.append(TensorSpec(f"experts.{name}_bias", (number, outputs), "expert"))
    shared_width = 0
    if shared is not None and (shared_when is None or f.integer(shared_when, minimum=0)):
        common, common_tensors = gated_mlp(f, **shared)
        shared_width = common.intermediate_size
        tensors += common_tensors
    if shared_gate:
        tensors += linear("shared_expert_gate", f.hidden, 1, "router")
    return Mlp(True, f.activation or activation, shared_width, number, per_token, width), prefixed(
        prefix, tensors
    )


def mlp_module(f: ConfigFields, settings: Settings) -> MlpModule:
    """The dense MLP that a row of families.yaml describes."""
    module = plain_mlp if settings.get("kind") == "plain" else gated_mlp
    return module(f, **{k: v for k, v in settings.items() if k != "kind"})
