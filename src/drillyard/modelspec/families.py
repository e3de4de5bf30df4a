"""The families of models whose shapes are known: for each, the defaults of its config and what its layers consist of.

One row per `model_type`. `defaults` are the values that transformers takes for fields a config.json leaves out (a saved
config omits some, an inline one omits many); None means derived (see spec.py). `attention_biases` and `mlp_biases` name
the config field that adds biases, or say always or never.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal

_LLAMA_DEFAULTS: Final[dict[str, Any]] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
}


@dataclass(frozen=True, slots=True)
class Family:
    """What distinguishes one family from Llama's decoder.

    `query_key_norm`: no norm, one over each head (head_dim weights), or one over all heads together.
    `windowed_layers`: which layers attend within `sliding_window`: none, all, those named `sliding_attention` in
    `layer_types` (or by the family's own rule where that is left out).
    """

    defaults: dict[str, Any]
    attention_biases: Literal["none", "query_key_value", "configured"] = "configured"
    query_key_norm: Literal["none", "per_head", "all_heads"] = "none"
    norms_per_layer: int = 2
    windowed_layers: Literal["none", "all", "all_if_enabled", "upper_if_enabled", "pattern"] = "none"
    experts: bool = False
    aliases: dict[str, str] = field(default_factory=dict)
    """Other names under which a config.json gives a field."""


FAMILIES: Final[dict[str, Family]] = {
    "llama": Family(_LLAMA_DEFAULTS),
    "mistral": Family(
        _LLAMA_DEFAULTS | {"intermediate_size": 14336, "num_key_value_heads": 8, "sliding_window": 4096},
        attention_biases="none",
        windowed_layers="all",
    ),
    "qwen2": Family(
        _LLAMA_DEFAULTS
        | {
            "vocab_size": 151936,
            "intermediate_size": 22016,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "use_sliding_window": False,
            "max_window_layers": 28,
            "layer_types": None,
        },
        attention_biases="query_key_value",
        windowed_layers="upper_if_enabled",
    ),
    "qwen3": Family(
        _LLAMA_DEFAULTS
        | {
            "vocab_size": 151936,
            "intermediate_size": 22016,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "sliding_window": 4096,
            "use_sliding_window": False,
            "max_window_layers": 28,
            "layer_types": None,
        },
        query_key_norm="per_head",
        windowed_layers="upper_if_enabled",
    ),
    "olmo2": Family(
        _LLAMA_DEFAULTS | {"vocab_size": 50304, "intermediate_size": 11008},
        query_key_norm="all_heads",
    ),
    "gemma3_text": Family(
        _LLAMA_DEFAULTS
        | {
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "tie_word_embeddings": True,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "layer_types": None,
        },
        query_key_norm="per_head",
        norms_per_layer=4,
        windowed_layers="pattern",
        aliases={"_sliding_window_pattern": "sliding_window_pattern"},
    ),
    "mixtral": Family(
        _LLAMA_DEFAULTS
        | {
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        attention_biases="none",
        windowed_layers="all",
        experts=True,
    ),
    "qwen3_moe": Family(
        _LLAMA_DEFAULTS
        | {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "sliding_window": 4096,
            "use_sliding_window": False,
        },
        query_key_norm="per_head",
        windowed_layers="all_if_enabled",
        experts=True,
        aliases={"num_experts": "num_local_experts"},
    ),
    "gpt2": Family(
        {
            "vocab_size": 50257,
            "n_positions": 1024,
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_inner": None,
            "tie_word_embeddings": True,
            "add_cross_attention": False,
        },
        aliases={
            "max_position_embeddings": "n_positions",
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
        },
    ),
}
