"""Dense families built like Llama: norms before (or after) attention and a gated MLP, rotary positions."""

from __future__ import annotations

from typing import Any, Final

from drillyard.modelspec.block_modules import (
    all_heads,
    bare_norm,
    gated,
    grouped,
    layer_norm,
    norm_of_each_head,
    per_head,
    plain,
    unbiased_layer_norm,
    weights_of_each_head,
)
from drillyard.modelspec.families.family import Family
from drillyard.modelspec.layer_rules import (
    all_sliding,
    by_pattern,
    every_nth_full,
    from_max_window_layers,
    listed,
    without_rope,
)
from drillyard.modelspec.spec import TensorSpec


def shape(
    vocab: int, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int | None = None, **others: Any
) -> dict[str, Any]:
    """The defaults of the fields that every family here has. `head_dim` None: the hidden size over the heads."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": None,
        "tie_word_embeddings": False,
    } | others


_ATTENTION_BIAS: Final = {"attention_bias": False}
_BIASES: Final = {"attention_bias": False, "mlp_bias": False}
_QWEN_WINDOW: Final = {
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "layer_types": None,
}
_CAUSAL: Final = {"use_bidirectional_attention": (False,)}
_NORMS_AFTER: Final = ("post_attention_layernorm", "post_feedforward_layernorm")
_FOUR_NORMS: Final = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_configured = grouped(bias="attention_bias")

LLAMA_LIKE: Final[dict[str, Family]] = {
    "llama": Family(
        defaults=shape(32000, 4096, 11008, 32, 32, **_BIASES),
        attention=_configured,
        mlp=gated(bias="mlp_bias"),
        hidden_divides_by_heads=True,
        harmless=frozenset({"sliding_window"}),
    ),
    "mistral": Family(
        defaults=shape(32000, 4096, 14336, 32, 32, 8, sliding_window=4096),
        attention=grouped(),
        mlp=gated(),
        kinds=all_sliding,
    ),
    "ministral3": Family(
        defaults=shape(131072, 4096, 14336, 34, 32, 8, head_dim=128, sliding_window=None),
        attention=grouped(),
        mlp=gated(),
        kinds=all_sliding,
    ),
    "qwen2": Family(
        defaults=shape(151936, 4096, 22016, 32, 32, 32, **_QWEN_WINDOW),
        attention=grouped(bias=True, out_bias=False),
        mlp=gated(),
        kinds=listed(from_max_window_layers),
    ),
    "qwen3": Family(
        defaults=shape(151936, 4096, 22016, 32, 32, 32, head_dim=128, **_ATTENTION_BIAS, **_QWEN_WINDOW),
        attention=grouped(bias="attention_bias", norm=per_head(), norm_kind="per_head"),
        mlp=gated(),
        kinds=listed(from_max_window_layers),
    ),
    "gemma": Family(
        fixed=_CAUSAL,
        defaults=shape(256000, 3072, 24576, 28, 16, 16, head_dim=256, tie_word_embeddings=True, **_ATTENTION_BIAS),
        attention=_configured,
        mlp=gated(activation="gelu_pytorch_tanh"),
    ),
    "gemma2": Family(
        fixed=_CAUSAL,
        defaults=shape(
            256000,
            2304,
            9216,
            26,
            8,
            4,
            head_dim=256,
            tie_word_embeddings=True,
            **_ATTENTION_BIAS,
            sliding_window=4096,
            layer_types=None,
        ),
        attention=_configured,
        mlp=gated(activation="gelu_pytorch_tanh"),
        block_norms=_FOUR_NORMS,
        kinds=listed(every_nth_full(2)),
        hidden_divides_by_heads=True,
        harmless=frozenset({"sliding_window_size"}),
    ),
    "gemma3_text": Family(
        fixed=_CAUSAL,
        defaults=shape(
            262208,
            2304,
            9216,
            26,
            8,
            4,
            head_dim=256,
            tie_word_embeddings=True,
            **_ATTENTION_BIAS,
            sliding_window=4096,
            sliding_window_pattern=6,
            layer_types=None,
        ),
        attention=grouped(bias="attention_bias", norm=per_head(), norm_kind="per_head"),
        mlp=gated(activation="gelu_pytorch_tanh"),
        block_norms=_FOUR_NORMS,
        kinds=listed(every_nth_full("sliding_window_pattern")),
        aliases={"_sliding_window_pattern": "sliding_window_pattern"},
        hidden_divides_by_heads=True,
    ),
    "phi3": Family(
        defaults=shape(32064, 3072, 8192, 32, 32, sliding_window=None),
        attention=grouped(projections="qkv_proj"),
        mlp=gated(fused=True),
        kinds=all_sliding,
        harmless=frozenset({"interpolate_factor"}),
        fixed={"attention_bias": (False,), "mlp_bias": (False,), "lm_head_bias": (False,), "full_attn_mod": (1,)},
    ),
    "olmo": Family(
        defaults=shape(50304, 4096, 11008, 32, 32, **_ATTENTION_BIAS),
        attention=_configured,
        mlp=gated(),
        norm=bare_norm,
    ),
    "olmo2": Family(
        defaults=shape(50304, 4096, 11008, 32, 32, **_ATTENTION_BIAS),
        attention=grouped(bias="attention_bias", norm=all_heads(), norm_kind="all_heads"),
        mlp=gated(),
        block_norms=_NORMS_AFTER,
    ),
    "olmo3": Family(
        defaults=shape(50304, 4096, 11008, 32, 32, **_ATTENTION_BIAS, sliding_window=4096, layer_types=None),
        attention=grouped(bias="attention_bias", norm=all_heads(), norm_kind="all_heads"),
        mlp=gated(),
        block_norms=_NORMS_AFTER,
        kinds=listed(every_nth_full(4)),
    ),
    "stablelm": Family(
        head_dim_is_derived=True,
        defaults=shape(
            50304, 2560, 6912, 32, 32, 32, use_qkv_bias=False, qk_layernorm=False, use_parallel_residual=False
        ),
        attention=grouped(
            bias="use_qkv_bias", out_bias=False, norm=norm_of_each_head("qk_layernorm"), norm_kind="per_head"
        ),
        mlp=gated(),
        norm=layer_norm,
        block_norms=lambda f: (
            ("input_layernorm",) if f.flag("use_parallel_residual") else ("input_layernorm", "post_attention_layernorm")
        ),
        parallel="use_parallel_residual",
    ),
    "cohere": Family(
        defaults=shape(256000, 8192, 22528, 40, 64, tie_word_embeddings=True, **_ATTENTION_BIAS, use_qk_norm=False),
        attention=grouped(bias="attention_bias", norm=weights_of_each_head("use_qk_norm"), norm_kind="per_head"),
        mlp=gated(),
        norm=unbiased_layer_norm,
        block_norms=("input_layernorm",),
        parallel=True,
    ),
    "cohere2": Family(
        defaults=shape(
            256000,
            8192,
            22528,
            40,
            64,
            tie_word_embeddings=True,
            **_ATTENTION_BIAS,
            sliding_window=4096,
            sliding_window_pattern=4,
            layer_types=None,
        ),
        attention=_configured,
        mlp=gated(),
        norm=unbiased_layer_norm,
        block_norms=("input_layernorm",),
        parallel=True,
        kinds=listed(every_nth_full("sliding_window_pattern")),
        aliases={"_sliding_window_pattern": "sliding_window_pattern"},
        harmless=frozenset(
            {"layer_switch", "order_of_interleaved_layers", "position_embedding_type", "use_parallel_embedding"}
        ),
        fixed={"use_embedding_sharing": (True,), "use_gated_activation": (True,), "use_parallel_block": (True,)},
        head_dim_is_derived=True,
    ),
    "granite": Family(
        defaults=shape(32000, 4096, 11008, 32, 32, **_BIASES),
        attention=_configured,
        mlp=gated(bias="mlp_bias"),
    ),
    "glm": Family(
        defaults=shape(151552, 4096, 13696, 40, 32, 2, head_dim=128, attention_bias=True),
        attention=grouped(bias="attention_bias", out_bias=False),
        mlp=gated(fused=True),
    ),
    "glm4": Family(
        defaults=shape(151552, 4096, 13696, 40, 32, 2, head_dim=128, attention_bias=True),
        attention=grouped(bias="attention_bias", out_bias=False),
        mlp=gated(fused=True),
        block_norms=("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"),
    ),
    "smollm3": Family(
        defaults=shape(
            128256,
            2048,
            11008,
            36,
            16,
            4,
            tie_word_embeddings=True,
            **_BIASES,
            use_sliding_window=False,
            sliding_window=None,
            no_rope_layers=None,
            no_rope_layer_interval=4,
            layer_types=None,
        ),
        attention=_configured,
        mlp=gated(bias="mlp_bias"),
        kinds=listed(without_rope("sliding_attention", where_rope=False)),
        harmless=frozenset({"max_window_layers"}),
    ),
    "ernie4_5": Family(
        defaults=shape(103424, 1024, 3072, 18, 16, 2, head_dim=128, tie_word_embeddings=True, use_bias=False),
        attention=grouped(bias="use_bias"),
        mlp=gated(bias="use_bias"),
    ),
    "exaone4": Family(
        defaults=shape(
            102400, 4096, 16384, 32, 32, 32, sliding_window=4096, sliding_window_pattern=4, layer_types=None
        ),
        attention=grouped(norm=per_head(), norm_kind="per_head"),
        mlp=gated(),
        block_norms=_NORMS_AFTER,
        kinds=listed(by_pattern),
    ),
    "seed_oss": Family(
        defaults=shape(
            155136,
            4096,
            27648,
            64,
            80,
            8,
            head_dim=128,
            attention_bias=True,
            attention_out_bias=False,
            mlp_bias=False,
        ),
        attention=grouped(bias="attention_bias", out_bias="attention_out_bias"),
        mlp=gated(bias="mlp_bias"),
    ),
    "nemotron": Family(
        defaults=shape(256000, 6144, 24576, 32, 48, **_BIASES),
        attention=_configured,
        mlp=plain("mlp", "up_proj", "down_proj", bias="mlp_bias", activation="relu2"),
        norm=layer_norm,
    ),
    "arcee": Family(
        defaults=shape(32000, 2560, 18432, 32, 32, **_BIASES),
        attention=_configured,
        mlp=plain("mlp", "up_proj", "down_proj", bias="mlp_bias", activation="relu2"),
    ),
    "apertus": Family(
        defaults=shape(131072, 4096, 14336, 32, 32, **_ATTENTION_BIAS),
        attention=grouped(bias="attention_bias", norm=per_head(), norm_kind="per_head"),
        mlp=plain(
            "mlp",
            "up_proj",
            "down_proj",
            bias=False,
            activation="xielu",
            extra=(TensorSpec("act_fn.alpha_p", (1,), "mlp"), TensorSpec("act_fn.alpha_n", (1,), "mlp")),
        ),
        block_norms=("attention_layernorm", "feedforward_layernorm"),
        fixed={"qk_norm": (True,), "post_norm": (False,), "mlp_bias": (False,)},
    ),
    "starcoder2": Family(
        defaults=shape(49152, 3072, 12288, 30, 24, 2, tie_word_embeddings=True, use_bias=True, sliding_window=None),
        attention=grouped(bias="use_bias"),
        mlp=plain("mlp", "c_fc", "c_proj", bias="use_bias", activation="gelu_pytorch_tanh"),
        norm=layer_norm,
        kinds=all_sliding,
        fixed={"mlp_type": ("default",), "norm_type": ("layer_norm",)},
    ),
    "phi": Family(
        head_dim_is_derived=True,
        defaults=shape(51200, 2048, 8192, 24, 32, qk_layernorm=False),
        attention=grouped(
            out="dense",
            bias=True,
            norm=per_head("q_layernorm", "k_layernorm", norm=layer_norm, when="qk_layernorm"),
            norm_kind="per_head",
        ),
        mlp=plain("mlp", "fc1", "fc2", activation="gelu_new"),
        norm=layer_norm,
        block_norms=("input_layernorm",),
        final_norm="model.final_layernorm",
        head_bias=True,
        parallel=True,
    ),
}
