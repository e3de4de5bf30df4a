"""Families from before Llama: biases everywhere, plain MLPs, learned positions or none, names of their own."""

from __future__ import annotations

from typing import Final

from drillyard.modelspec.block_modules import Tensors, grouped, layer_norm, linear, plain
from drillyard.modelspec.config_fields import ConfigFields
from drillyard.modelspec.families.family import Family
from drillyard.modelspec.spec import TensorSpec

_GPT2_NAMES: Final = {
    "max_position_embeddings": "n_positions",
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
}


def _four_hidden(f: ConfigFields) -> int:
    return 4 * f.hidden


def _inner(f: ConfigFields) -> int:
    return f.integer("n_inner", 4 * f.hidden)


def _learned_positions(f: ConfigFields) -> Tensors:
    return (TensorSpec("transformer.wpe.weight", (f.integer("n_positions"), f.hidden), "positions"),)


def _falcon_kv_heads(f: ConfigFields) -> int:
    if f.flag("new_decoder_architecture"):
        return f.integer("num_kv_heads", f.heads)
    return 1 if f.flag("multi_query") else f.heads


def _falcon_norms(f: ConfigFields) -> tuple[str, ...]:
    if not f.flag("parallel_attn"):
        return ("post_attention_layernorm", "input_layernorm")
    number = f.integer("num_ln_in_parallel_attn", 2 if f.flag("new_decoder_architecture") else 1)
    return ("ln_attn", "ln_mlp") if number == 2 else ("input_layernorm",)


def _opt_root(f: ConfigFields) -> Tensors:
    """Two positions are kept for padding; a narrower embedding is projected in and out."""
    hidden, narrow = f.hidden, f.integer("word_embed_proj_dim", f.hidden)
    tensors: Tensors = (
        TensorSpec(
            "model.decoder.embed_positions.weight", (f.integer("max_position_embeddings") + 2, hidden), "positions"
        ),
    )
    if narrow != hidden:
        tensors += linear("model.decoder.project_in", narrow, hidden, "projection")
        tensors += linear("model.decoder.project_out", hidden, narrow, "projection")
    return tensors


CLASSIC: Final[dict[str, Family]] = {
    "gpt2": Family(
        defaults={
            "vocab_size": 50257,
            "n_positions": 1024,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "n_inner": None,
            "tie_word_embeddings": True,
        },
        attention=grouped("attn", projections="c_attn", out="c_proj", bias=True, transposed=True),
        mlp=plain("mlp", "c_fc", "c_proj", size=_inner, transposed=True, activation="gelu_new"),
        norm=layer_norm,
        block_norms=("ln_1", "ln_2"),
        final_norm="transformer.ln_f",
        embedding="transformer.wte",
        root=_learned_positions,
        positions="n_positions",
        blocks="transformer.h",
        aliases=_GPT2_NAMES,
        harmless=frozenset(
            {
                "n_ctx",
                "n_special",
                "predict_special_tokens",
                "scale_attn_by_inverse_layer_idx",
                "reorder_and_upcast_attn",
            }
        ),
    ),
    "gpt_bigcode": Family(
        defaults={
            "vocab_size": 50257,
            "n_positions": 1024,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "n_inner": None,
            "multi_query": True,
            "tie_word_embeddings": True,
        },
        attention=grouped(
            "attn",
            projections="c_attn",
            out="c_proj",
            bias=True,
            kv_heads=lambda f: 1 if f.flag("multi_query") else f.heads,
        ),
        mlp=plain("mlp", "c_fc", "c_proj", size=_inner, activation="gelu_pytorch_tanh"),
        norm=layer_norm,
        block_norms=("ln_1", "ln_2"),
        final_norm="transformer.ln_f",
        embedding="transformer.wte",
        root=_learned_positions,
        positions="n_positions",
        blocks="transformer.h",
        aliases=_GPT2_NAMES,
        harmless=frozenset(
            {
                "num_key_value_heads",
                "inference_runner",
                "max_batch_size",
                "pre_allocate_kv_cache",
                "validate_runner_input",
            }
        ),
    ),
    "gptj": Family(
        defaults={
            "vocab_size": 50400,
            "hidden_size": 4096,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "n_inner": None,
            "tie_word_embeddings": False,
        },
        attention=grouped("attn", projections="k_proj v_proj q_proj", out="out_proj"),
        mlp=plain("mlp", "fc_in", "fc_out", size=_inner, activation="gelu_new"),
        norm=layer_norm,
        block_norms=("ln_1",),
        final_norm="transformer.ln_f",
        embedding="transformer.wte",
        blocks="transformer.h",
        head_bias=True,
        parallel=True,
        aliases={name: own for name, own in _GPT2_NAMES.items() if own != "n_positions"},
        harmless=frozenset({"n_positions", "n_ctx"}),
    ),
    "gpt_neox": Family(
        defaults={
            "vocab_size": 50432,
            "hidden_size": 6144,
            "intermediate_size": 24576,
            "num_hidden_layers": 44,
            "num_attention_heads": 64,
            "attention_bias": True,
            "use_parallel_residual": True,
            "tie_word_embeddings": False,
        },
        attention=grouped("attention", projections="query_key_value", out="dense", bias="attention_bias"),
        mlp=plain("mlp", "dense_h_to_4h", "dense_4h_to_h"),
        norm=layer_norm,
        final_norm="gpt_neox.final_layer_norm",
        embedding="gpt_neox.embed_in",
        blocks="gpt_neox.layers",
        parallel="use_parallel_residual",
    ),
    "opt": Family(
        defaults={
            "vocab_size": 50272,
            "hidden_size": 768,
            "ffn_dim": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "max_position_embeddings": 2048,
            "word_embed_proj_dim": None,
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "tie_word_embeddings": True,
        },
        attention=grouped(projections="k_proj v_proj q_proj", out="out_proj", bias="enable_bias"),
        mlp=plain("", "fc1", "fc2", size="ffn_dim", bias="enable_bias", activation="relu"),
        norm=layer_norm,
        norm_weights="layer_norm_elementwise_affine",
        block_norms=("self_attn_layer_norm", "final_layer_norm"),
        final_norm="model.decoder.final_layer_norm",
        final_norm_when=lambda f: f.flag("do_layer_norm_before") and not f.flag("_remove_final_layer_norm"),
        embedding="model.decoder.embed_tokens",
        embedding_size="word_embed_proj_dim",
        root=_opt_root,
        positions="max_position_embeddings",
        blocks="model.decoder.layers",
    ),
    "bloom": Family(
        defaults={
            "vocab_size": 250880,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "tie_word_embeddings": True,
        },
        attention=grouped("self_attention", projections="query_key_value", out="dense", bias=True),
        mlp=plain("mlp", "dense_h_to_4h", "dense_4h_to_h", size=_four_hidden),
        norm=layer_norm,
        final_norm="transformer.ln_f",
        embedding="transformer.word_embeddings",
        root=lambda f: layer_norm("transformer.word_embeddings_layernorm", f.hidden),
        blocks="transformer.h",
        aliases={"n_embed": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"},
        harmless=frozenset(
            {
                "apply_residual_connection_post_layernorm",
                "bias_dropout_fusion",
                "masked_softmax_fusion",
                "offset_alibi",
                "skip_bias_add",
                "skip_bias_add_qkv",
                "slow_but_exact",
            }
        ),
    ),
    "falcon": Family(
        defaults={
            "vocab_size": 65024,
            "hidden_size": 4544,
            "ffn_hidden_size": None,
            "num_hidden_layers": 32,
            "num_attention_heads": 71,
            "num_kv_heads": None,
            "num_ln_in_parallel_attn": None,
            "new_decoder_architecture": False,
            "multi_query": True,
            "parallel_attn": True,
            "bias": False,
            "tie_word_embeddings": True,
        },
        attention=grouped(
            "self_attention", projections="query_key_value", out="dense", bias="bias", kv_heads=_falcon_kv_heads
        ),
        mlp=plain(
            "mlp",
            "dense_h_to_4h",
            "dense_4h_to_h",
            size=lambda f: f.integer("ffn_hidden_size", 4 * f.hidden),
            bias="bias",
        ),
        norm=layer_norm,
        block_norms=_falcon_norms,
        final_norm="transformer.ln_f",
        embedding="transformer.word_embeddings",
        blocks="transformer.h",
        parallel="parallel_attn",
        aliases={"n_embed": "hidden_size"},
        harmless=frozenset({"alibi", "apply_residual_connection_post_layernorm"}),
    ),
}
