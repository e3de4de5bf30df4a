"""Rules for kinds of layers, by which a config says where windows, experts and linear attention
are.

A rule is a function of a config's fields and, for kinds of attention, of a layer's index. Where a
config lists its layers (`layer_types`) the list counts; the rules for a list left out are those of
transformers' config classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, get_args

from drillyard.modelspec.config_fields import ConfigFields

LayerKind = Literal["full_attention", "sliding_attention", "chunked_attention", "linear_attention"]


def window_of(f: ConfigFields, kind: LayerKind) -> int | None:
    """The number of positions that a layer of this kind attends to at most; None for all."""
    if kind == "chunked_attention":
        return f.optional_integer("attention_chunk_size")
    if kind == "sliding_attention":
        disabled = f.has("use_sliding_window") and not f.flag("use_sliding_window")
        return None if disabled else f.optional_integer("sliding_window")
    return None


def layer_kinds(f: ConfigFields, rule: str, *arguments: Any) -> list[LayerKind]:
    """The kind of each layer: by `layer_types` where the family has it and the config gives it,
    else by `rule`."""
    kinds = f.sequence("layer_types") if f.has("layer_types") else None
    if kinds is None:
        return [LAYER_RULES[rule](f, layer, *arguments) for layer in range(f.layers)]
    if len(kinds) != f.layers:
        raise f.error(f"layer_types names {len(kinds)} layers, num_hidden_layers is {f.layers}")
    known = get_args(LayerKind)
    if (unknown := next((kind for kind in kinds if kind not in known), None)) is not None:
        raise f.error(f"layer_types: {unknown!r} is not known; known are {', '.join(known)}")
    return kinds


def every_nth_full(f: ConfigFields, layer: int, field: str | int) -> LayerKind:
    """Sliding, but every n-th layer full; n is constant or a field, of which null means that none
    slides."""
    every = field if isinstance(field, int) else f.optional_integer(field)
    return "sliding_attention" if every is not None and (layer + 1) % every else "full_attention"


def by_pattern(f: ConfigFields, layer: int) -> LayerKind:
    """EXAONE 4: `sliding_window_pattern` is an n as in `every_nth_full`, or letters that repeat,
    such as LLLG (local, global)."""
    pattern = f.value("sliding_window_pattern")
    if isinstance(pattern, str) and pattern and not set(pattern) - {"L", "G"}:
        return "sliding_attention" if pattern[layer % len(pattern)] == "L" else "full_attention"
    return every_nth_full(f, layer, "sliding_window_pattern")


def from_max_window_layers(f: ConfigFields, layer: int) -> LayerKind:
    """Qwen2 and Qwen3: the first `max_window_layers` layers are full."""
    return (
        "sliding_attention"
        if layer >= f.integer("max_window_layers", minimum=0)
        else "full_attention"
    )


def odd_below_max_window_layers(f: ConfigFields, layer: int) -> LayerKind:
    """Qwen2-MoE: every other of the first `max_window_layers` layers slides."""
    below = layer < f.integer("max_window_layers", minimum=0)
    return "sliding_attention" if below and (layer + 1) % 2 else "full_attention"


def by_rope(f: ConfigFields, layer: int, kind: LayerKind, where_rope: bool) -> LayerKind:
    """SmolLM3 and Llama 4: layers with rotary positions (or those without) are of this kind, the
    others full."""
    rope = f.sequence("no_rope_layers")
    if rope and len(rope) != f.layers:
        raise f.error(f"no_rope_layers names {len(rope)} layers, num_hidden_layers is {f.layers}")
    has_rope = bool(rope[layer] if rope else (layer + 1) % f.integer("no_rope_layer_interval"))
    return kind if has_rope is where_rope else "full_attention"


def linear_but_every_nth(f: ConfigFields, layer: int) -> LayerKind:
    """Qwen3-Next: every `full_attention_interval`-th layer has attention."""
    return (
        "linear_attention"
        if (layer + 1) % f.integer("full_attention_interval")
        else "full_attention"
    )


LAYER_RULES: Final[dict[str, Callable[..., LayerKind]]] = {
    "full": lambda f, layer: "full_attention",
    "sliding": lambda f, layer: "sliding_attention",
    "every_nth_full": every_nth_full,
    "by_pattern": by_pattern,
    "from_max_window_layers": from_max_window_layers,
    "odd_below_max_window_layers": odd_below_max_window_layers,
    "by_rope": by_rope,
    "linear_but_every_nth": linear_but_every_nth,
}
"""Kinds of layers, for `layer_kinds` of a family; sliding layers attend to all positions where no
window is given."""


def qwen_sparse(f: ConfigFields) -> frozenset[int]:
    """Every `decoder_sparse_step`-th layer that `mlp_only_layers` does not keep dense."""
    dense, every = (
        f.layer_indices("mlp_only_layers") or frozenset(),
        f.integer("decoder_sparse_step"),
    )
    return frozenset(n for n in range(f.layers) if n not in dense and (n + 1) % every == 0)


def llama4_sparse(f: ConfigFields) -> frozenset[int]:
    """The layers that `moe_layers` lists, else every `interleave_moe_layer_step`-th."""
    named = f.layer_indices("moe_layers")
    if named is None:
        step = f.integer("interleave_moe_layer_step")
        return frozenset(range(step - 1, f.layers, step))
    return named & frozenset(range(f.layers))


def ernie_sparse(f: ConfigFields) -> frozenset[int]:
    """Every `moe_layer_interval`-th layer from `moe_layer_start_index` to `moe_layer_end_index`
    (-1: the last)."""
    first, last = (
        f.integer("moe_layer_start_index", minimum=0),
        f.integer("moe_layer_end_index", minimum=-1),
    )
    last = f.layers - 1 if last == -1 else min(last, f.layers - 1)
    every = f.integer("moe_layer_interval")
    return frozenset(n for n in range(first, last + 1) if (n + 1) % every == 0)


SPARSE_RULES: Final[dict[str, Callable[[ConfigFields], frozenset[int]]]] = {
    "all": lambda f: frozenset(range(f.layers)),
    "after_first_dense": lambda f: frozenset(
        range(f.integer("first_k_dense_replace", minimum=0), f.layers)
    ),
    "qwen": qwen_sparse,
    "llama4": llama4_sparse,
    "ernie": ernie_sparse,
}
"""The layers that have experts, for `sparse_layers` of a family."""
