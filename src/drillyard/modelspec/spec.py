"""A model from its config alone, without torch: exact parameter counts and the shapes that FLOPs depend on.

`model_spec(config)` takes the contents of a config.json (or an inline `model.config`, with `architecture` in place of
`model_type`) and adds up the tensors that transformers would build. Active parameters are those that one token uses:
all of a dense model; of a mixture of experts the router and the chosen experts only.

Cost: microseconds. Limits: the families of families.py; any other is refused rather than approximated.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drillyard.errors import UserError
from drillyard.modelspec.families import FAMILIES, Family


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only language model by its numbers.

    `windows` holds for each layer the number of positions it attends to at most, None for all of them.
    `embedding_parameters` is the input embedding alone (the table shared with the output when `tied`), learned
    positions are not in it. `active_mlp_matmul_parameters` are the weights of the MLP matrices one token passes, over
    all layers, routers left out.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    windows: tuple[int | None, ...]
    total_parameters: int
    active_parameters: int
    embedding_parameters: int
    active_mlp_matmul_parameters: int


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of the model that `config` describes.

    Raises UserError for a family that is not known and for a field of a wrong type or value.
    """
    model_type = config.get("model_type") or config.get("architecture")
    if model_type not in FAMILIES:
        near = difflib.get_close_matches(str(model_type), FAMILIES, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UserError(
            f"model config: model_type {model_type!r} is not one whose shapes are known.{hint}\n"
            f"Known: {', '.join(sorted(FAMILIES))}."
        )
    family = FAMILIES[model_type]
    fields = _Fields(config, family)
    return _gpt2(fields) if model_type == "gpt2" else _decoder(model_type, family, fields)


class _Fields:
    """The fields of a config with the family's defaults and aliases, checked as they are read."""

    def __init__(self, config: Mapping[str, Any], family: Family) -> None:
        own = {family.aliases.get(name, name): value for name, value in config.items()}
        self._values = family.defaults | {name: value for name, value in own.items() if name in family.defaults}

    def integer(self, name: str, derived: int | None = None) -> int:
        value = self._values[name]
        if value is None and derived is not None:
            return derived
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"model config: {name} must be a positive integer, found {value!r}.")
        return value

    def flag(self, name: str) -> bool:
        value = self._values[name]
        if not isinstance(value, bool):
            raise UserError(f"model config: {name} must be true or false, found {value!r}.")
        return value

    def sequence(self, name: str) -> list[Any] | None:
        value = self._values[name]
        if value is not None and not isinstance(value, list | tuple):
            raise UserError(f"model config: {name} must be a list, found {value!r}.")
        return None if value is None else list(value)

    def window(self) -> int | None:
        return None if self._values["sliding_window"] is None else self.integer("sliding_window")

    def head_dim(self, hidden: int, heads: int) -> int:
        if self._values.get("head_dim") is None and hidden % heads:
            raise UserError(f"model config: the hidden size {hidden} does not divide by {heads} attention heads.")
        return self.integer("head_dim", hidden // heads) if "head_dim" in self._values else hidden // heads


def _decoder(model_type: str, family: Family, fields: _Fields) -> ModelSpec:
    """Llama and its relatives: RMSNorm, gated MLP (dense or of experts), rotary positions without parameters."""
    hidden, layers, vocab = (fields.integer(n) for n in ("hidden_size", "num_hidden_layers", "vocab_size"))
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise UserError(f"model config: {heads} attention heads do not divide by {kv_heads} key-value heads.")
    head_dim = fields.head_dim(hidden, heads)
    query, key = heads * head_dim, kv_heads * head_dim

    attention = hidden * (query + 2 * key) + query * hidden
    if family.attention_biases == "query_key_value":
        attention += query + 2 * key
    elif family.attention_biases == "configured" and fields.flag("attention_bias"):
        attention += query + 2 * key + hidden
    attention += {"none": 0, "per_head": 2 * head_dim, "all_heads": query + key}[family.query_key_norm]
    shared = attention + family.norms_per_layer * hidden

    ffn = fields.integer("intermediate_size")
    mlp_bias = 2 * ffn + hidden if model_type == "llama" and fields.flag("mlp_bias") else 0
    mlp = 3 * hidden * ffn
    sparse_layers, expert, experts, chosen = 0, 0, 0, 0
    if family.experts:
        experts, chosen = fields.integer("num_local_experts"), fields.integer("num_experts_per_tok")
        if chosen > experts:
            raise UserError(f"model config: num_experts_per_tok is {chosen}, but there are {experts} experts.")
        sparse_layers = _sparse_layers(model_type, fields, layers)
        expert = 3 * hidden * (fields.integer("moe_intermediate_size") if model_type == "qwen3_moe" else ffn)
    dense_layers = layers - sparse_layers

    tied = fields.flag("tie_word_embeddings")
    embedding = vocab * hidden
    common = embedding * (1 if tied else 2) + hidden + layers * shared
    common += dense_layers * (mlp + mlp_bias) + sparse_layers * experts * hidden
    return ModelSpec(
        model_type=model_type,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        tied=tied,
        windows=_windows(family, fields, layers),
        total_parameters=common + sparse_layers * experts * expert,
        active_parameters=common + sparse_layers * chosen * expert,
        embedding_parameters=embedding,
        active_mlp_matmul_parameters=dense_layers * mlp + sparse_layers * chosen * expert,
    )


def _sparse_layers(model_type: str, fields: _Fields, layers: int) -> int:
    """How many layers have experts: all of Mixtral's; of Qwen3-MoE's those that its config does not keep dense."""
    if model_type != "qwen3_moe":
        return layers
    dense, every = set(fields.sequence("mlp_only_layers") or ()), fields.integer("decoder_sparse_step")
    return sum(layer not in dense and (layer + 1) % every == 0 for layer in range(layers))


def _windows(family: Family, fields: _Fields, layers: int) -> tuple[int | None, ...]:
    """For each layer the number of positions it attends to at most; None for all."""
    if family.windowed_layers == "none":
        return (None,) * layers
    window = fields.window()
    if family.windowed_layers in ("all_if_enabled", "upper_if_enabled") and not fields.flag("use_sliding_window"):
        window = None
    if window is None or family.windowed_layers in ("all", "all_if_enabled"):
        return (window,) * layers
    types = fields.sequence("layer_types")
    if types is not None:
        if len(types) != layers:
            raise UserError(f"model config: layer_types names {len(types)} layers, num_hidden_layers is {layers}.")
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    if family.windowed_layers == "pattern":
        every = fields.integer("sliding_window_pattern")
        return tuple(window if (layer + 1) % every else None for layer in range(layers))
    first = fields.integer("max_window_layers")
    return tuple(window if layer >= first else None for layer in range(layers))


def _gpt2(fields: _Fields) -> ModelSpec:
    """GPT-2: LayerNorm, biases everywhere, a plain MLP, learned positions."""
    hidden, layers, heads = (fields.integer(n) for n in ("n_embd", "n_layer", "n_head"))
    vocab, positions = fields.integer("vocab_size"), fields.integer("n_positions")
    if fields.flag("add_cross_attention"):
        raise UserError("model config: add_cross_attention is for encoder-decoder models; only decoders are known.")
    ffn = fields.integer("n_inner", 4 * hidden)
    attention = hidden * 3 * hidden + 3 * hidden + hidden * hidden + hidden
    mlp = hidden * ffn + ffn + ffn * hidden + hidden
    tied = fields.flag("tie_word_embeddings")
    embedding = vocab * hidden
    total = embedding * (1 if tied else 2) + positions * hidden + layers * (attention + mlp + 4 * hidden) + 2 * hidden
    return ModelSpec(
        model_type="gpt2",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=fields.head_dim(hidden, heads),
        vocab_size=vocab,
        tied=tied,
        windows=(None,) * layers,
        total_parameters=total,
        active_parameters=total,
        embedding_parameters=embedding,
        active_mlp_matmul_parameters=layers * 2 * hidden * ffn,
    )
