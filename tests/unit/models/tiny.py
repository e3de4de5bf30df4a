"""Tiny models of every supported architecture, and packed batches, for the tests of this room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from drillyard.config.run_model import ModelConfig
from drillyard.models.meta_model import build_model
from drillyard.models.random_init import init_random

VOCAB = 48
LENGTH = 24

COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
LAYERS = ["sliding_attention", "full_attention"]

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "layer_types": LAYERS},
    "qwen3": {
        "head_dim": 8,
        "use_sliding_window": True,
        "sliding_window": 4,
        "layer_types": LAYERS,
    },
    "mistral": {"head_dim": 8, "sliding_window": 4},
    "gemma2": {
        "head_dim": 8,
        "sliding_window": 4,
        "query_pre_attn_scalar": 8,
        "final_logit_softcapping": 2.0,
    },
    "gemma3_text": {
        "head_dim": 8,
        "sliding_window": 4,
        "layer_types": LAYERS,
        "query_pre_attn_scalar": 8,
    },
    "olmo2": {},
    "olmo3": {"sliding_window": 4, "layer_types": LAYERS},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25, "sliding_window": 4, "head_dim": 8, "layer_types": LAYERS},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    "phi3": {"sliding_window": 4},
    "smollm3": {"no_rope_layers": [1, 0]},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    "qwen3_moe": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **NO_DROPOUT},
}


def model_config(architecture: str, **changes: Any) -> ModelConfig:
    """The inline model config of a tiny model."""
    shape = {} if architecture == "gpt2" else COMMON
    return ModelConfig(
        config={"architecture": architecture, **shape, **CONFIGS[architecture], **changes},
        init="random",
    )


def meta_model(
    architecture: str, attention: str = "sdpa", dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """A tiny model on the meta device; gemma2 computes its attention eagerly, as no other CPU
    kernel soft-caps."""
    attention = "eager" if architecture == "gemma2" else attention
    return build_model(
        model_config(architecture, **changes),
        vocab_size=VOCAB,
        dtype=dtype,
        attention=attention,
        sequence_length=LENGTH,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )


@dataclass
class Packed:
    """A packed batch as the loader gives it."""

    input_ids: np.ndarray
    position_ids: np.ndarray
    document_ids: np.ndarray


def packed_batch(lengths: list[list[int]], seed: int = 0) -> Packed:
    """Random tokens in documents of the given lengths, one list per sequence; the rest of each
    sequence is padding."""
    random = np.random.default_rng(seed)
    shape = (len(lengths), LENGTH)
    batch = Packed(
        np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.full(shape, -1, np.int32)
    )
    for row, documents in enumerate(lengths):
        start = 0
        for number, length in enumerate(documents):
            end = start + length
            batch.input_ids[row, start:end] = random.integers(2, VOCAB, length)
            batch.position_ids[row, start:end] = np.arange(length)
            batch.document_ids[row, start:end] = number
            start = end
        batch.position_ids[row, start:] = np.arange(LENGTH - start)
    return batch


def filled_model(
    architecture: str, attention: str = "sdpa", dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """A tiny model with weights a few times larger than at initialisation, so that attention is far
    from uniform."""
    model = meta_model(architecture, attention, dtype, **changes).to_empty(device="cpu")
    init_random(model, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8.0)
    return model
