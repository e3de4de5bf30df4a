"""Which layers do what: the rules by which a config says where windows, experts and linear attention are.

A rule is a function of a config's fields. Where a config lists its layers (`layer_types`) the list counts; the rules
for a list left out are those of transformers' config classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from drillyard.modelspec.config_fields import ConfigFields

LayerKind = Literal["full_attention", "sliding_attention", "chunked_attention", "linear_attention"]
KindsRule = Callable[[ConfigFields], list[LayerKind]]
SparseRule = Callable[[ConfigFields], frozenset[int]]

_KINDS: Final = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention")


def window_of(f: ConfigFields, kind: LayerKind) -> int | None:
    """The number of positions that a layer of this kind attends to at most; None for all."""
    if kind == "chunked_attention":
        return f.optional_integer("attention_chunk_size")
    if kind == "sliding_attention":
        disabled = f.has("use_sliding_window") and not f.flag("use_sliding_window")
        return None if disabled else f.optional_integer("sliding_window")
    return None


# Attention


def all_full(f: ConfigFields) -> list[LayerKind]:
    return ["full_attention"] * f.layers


def all_sliding(f: ConfigFields) -> list[LayerKind]:
    """Every layer within `sliding_window`, where there is one."""
    return ["sliding_attention"] * f.layers


def listed(default: Callable[[ConfigFields, int], LayerKind]) -> KindsRule:
    """By `layer_types`; where it is left out, by a function of the layer's index."""

    def rule(f: ConfigFields) -> list[LayerKind]:
        kinds = f.sequence("layer_types")
        if kinds is None:
            return [default(f, layer) for layer in range(f.layers)]
        if len(kinds) != f.layers:
            raise f.error(f"layer_types names {len(kinds)} layers, num_hidden_layers is {f.layers}")
        unknown = next((kind for kind in kinds if kind not in _KINDS), None)
        if unknown is not None:
            raise f.error(f"layer_types: {unknown!r} is not known; known are {', '.join(_KINDS)}")
        return kinds

    return rule


def every_nth_full(field: str | int) -> Callable[[ConfigFields, int], LayerKind]:
    """Sliding, but every n-th layer full; n is constant or a field, of which null means that none slides."""

    def kind(f: ConfigFields, layer: int) -> LayerKind:
        every = field if isinstance(field, int) else f.optional_integer(field)
        return "sliding_attention" if every is not None and (layer + 1) % every else "full_attention"

    return kind


def by_pattern(f: ConfigFields, layer: int) -> LayerKind:
    """EXAONE 4: `sliding_window_pattern` is an n as in `every_nth_full`, or letters that repeat, such as LLLG (local,
    global)."""
    pattern = f.value("sliding_window_pattern")
    if isinstance(pattern, str) and pattern and not set(pattern) - {"L", "G"}:
        return "sliding_attention" if pattern[layer % len(pattern)] == "L" else "full_attention"
    return every_nth_full("sliding_window_pattern")(f, layer)


def from_max_window_layers(f: ConfigFields, layer: int) -> LayerKind:
    """Qwen2 and Qwen3: the first `max_window_layers` layers are full."""
    return "sliding_attention" if layer >= f.integer("max_window_layers", minimum=0) else "full_attention"


def odd_below_max_window_layers(f: ConfigFields, layer: int) -> LayerKind:
    """Qwen2-MoE: every other of the first `max_window_layers` layers slides."""
    below = layer < f.integer("max_window_layers", minimum=0)
    return "sliding_attention" if below and (layer + 1) % 2 else "full_attention"


def without_rope(kind: LayerKind, *, where_rope: bool) -> Callable[[ConfigFields, int], LayerKind]:
    """SmolLM3 and Llama 4: layers with rotary positions (or those without) are of this kind, the others full."""

    def rule(f: ConfigFields, layer: int) -> LayerKind:
        rope = f.sequence("no_rope_layers")
        if rope and len(rope) != f.layers:
            raise f.error(f"no_rope_layers names {len(rope)} layers, num_hidden_layers is {f.layers}")
        has_rope = bool(rope[layer] if rope else (layer + 1) % f.integer("no_rope_layer_interval"))
        return kind if has_rope is where_rope else "full_attention"

    return rule


def linear_but_every_nth(f: ConfigFields, layer: int) -> LayerKind:
    """Qwen3-Next: every `full_attention_interval`-th layer has attention."""
    return "linear_attention" if (layer + 1) % f.integer("full_attention_interval") else "full_attention"


# Experts


def all_sparse(f: ConfigFields) -> frozenset[int]:
    return frozenset(range(f.layers))


def qwen_sparse(f: ConfigFields) -> frozenset[int]:
    """Every `decoder_sparse_step`-th layer that `mlp_only_layers` does not keep dense."""
    dense, every = f.layer_indices("mlp_only_layers") or frozenset(), f.integer("decoder_sparse_step")
    return frozenset(n for n in range(f.layers) if n not in dense and (n + 1) % every == 0)


def after_first_dense(f: ConfigFields) -> frozenset[int]:
    """All but the first `first_k_dense_replace` layers (DeepSeek)."""
    return frozenset(range(f.integer("first_k_dense_replace", minimum=0), f.layers))


def llama4_sparse(f: ConfigFields) -> frozenset[int]:
    """The layers that `moe_layers` lists, else every `interleave_moe_layer_step`-th."""
    named = f.layer_indices("moe_layers")
    if named is None:
        step = f.integer("interleave_moe_layer_step")
        return frozenset(range(step - 1, f.layers, step))
    return named & frozenset(range(f.layers))


def ernie_sparse(f: ConfigFields) -> frozenset[int]:
    """Every `moe_layer_interval`-th layer from `moe_layer_start_index` to `moe_layer_end_index` (-1: the last)."""
    first, last = f.integer("moe_layer_start_index", minimum=0), f.integer("moe_layer_end_index", minimum=-1)
    last = f.layers - 1 if last == -1 else min(last, f.layers - 1)
    every = f.integer("moe_layer_interval")
    return frozenset(n for n in range(first, last + 1) if (n + 1) % every == 0)
