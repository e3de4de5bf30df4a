"""Fields of a config.json that decide neither shapes nor attended lengths, in any family."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Final

# fmt: off
_NAMES: Final = frozenset({
    # bookkeeping
    "architectures", "architecture", "model_type", "auto_map", "transformers_version", "tokenizer_class",
    "task_specific_params", "id2label", "label2id", "num_labels", "problem_type", "torch_dtype", "dtype",
    "quantization_config", "compression_config", "transformers.js_config", "is_llama_config", "finetuning_task",
    "is_encoder_decoder", "is_decoder", "model_max_length",
    # what a forward pass returns, keeps or runs on
    "output_hidden_states", "output_attentions", "output_router_logits", "return_dict", "use_return_dict",
    "torchscript", "use_cache", "cache_implementation", "chunk_size_feed_forward", "pretraining_tp",
    "gradient_checkpointing", "attn_implementation", "attn_impl", "use_flash_attn", "use_flash_attention",
    "flash_attn", "use_bfloat16",
    # generation settings that old configs carry
    "max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
    "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores",
    "return_dict_in_generate", "remove_invalid_values", "suppress_tokens", "begin_suppress_tokens", "prefix",
    # initialisation and elementwise functions
    "initializer_range", "init_std", "hidden_act", "hidden_activation", "activation_function", "activation",
    "swiglu_limit", "swiglu_alpha", "layerdrop", "residual_in_fp32", "use_parallel_residual", "clip_qkv",
    # positions that have no parameters
    "max_position_embeddings", "original_max_position_embeddings", "max_sequence_length", "seq_length",
    "initial_context_length", "rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq",
    "rope_interleave", "rope_type", "rope_pct", "partial_rotary_factor", "rotary", "rotary_dim", "rotary_pct",
    "rotary_emb_base", "rotary_scaling_factor", "rope_interleaved", "no_rope_layers", "no_rope_layer_interval",
    # scales
    "attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier", "logit_scale",
    "query_pre_attn_scalar", "scale_attn_weights", "attention_softmax_in_fp32",
    "scale_attention_softmax_in_fp32", "attn_logit_softcapping", "final_logit_softcapping", "attn_temperature_tuning",
    "attn_scale", "floor_scale",
    # how a router chooses, not how many
    "scoring_func", "topk_method", "topk_group", "n_group", "routed_scaling_factor", "norm_topk_prob", "seq_aux",
    "aux_loss_alpha", "router_aux_loss_coef", "router_jitter_noise", "input_jitter_noise", "ep_size", "moe_norm_min",
})
# fmt: on

_PATTERNS: Final = (
    "*_token_id",
    "*_token_index",
    "*dropout*",
    "*_pdrop",
    "*_eps",
    "*_epsilon",
    "summary_*",
    "unsloth_*",
    "_name_or_path",
    "_attn_implementation*",
    "_commit_hash",
    "_from_model_config",
)


def is_ignored(name: str) -> bool:
    """Whether the field decides neither shapes nor attended lengths in any family."""
    return name in _NAMES or any(fnmatchcase(name, pattern) for pattern in _PATTERNS)
