"""The FLOPs of formulas are those that torch counts in a forward pass with eager attention, matrix
by matrix."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.modelspec.building import transformers_config

from drillyard.modelspec import Attention, ModelSpec, flops_per_token, model_spec

LENGTH = 16
SMALL = {"vocab_size": 64, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = SMALL | {"num_key_value_heads": 2, "intermediate_size": 40}
MIXTURE = GROUPED | {"num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}

MODELS: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "gpt2": SMALL,
    "gpt_neox": SMALL | {"intermediate_size": 96},
    "opt": SMALL | {"word_embed_proj_dim": 24, "ffn_dim": 96},
    "bloom": SMALL,
    "falcon": SMALL,
    "phi": GROUPED,
    "phi3": GROUPED,
    "gemma2": GROUPED | {"head_dim": 8, "sliding_window": 8},
    "cohere": GROUPED,
    "nemotron": GROUPED,
    "qwen3": GROUPED | {"head_dim": 16},
    "deepseek_v3": SMALL
    | LATENT
    | {"num_key_value_heads": 4, "intermediate_size": 40, "first_k_dense_replace": 2},
    "mixtral": MIXTURE | {"num_local_experts": 5},
    "qwen2_moe": MIXTURE
    | {"num_experts": 5, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 32},
    "deepseek_v2": MIXTURE
    | LATENT
    | {
        "num_key_value_heads": 4,
        "n_routed_experts": 5,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
    },
}


@pytest.mark.parametrize("family", MODELS)
def test_matrices_and_attention_of_a_forward_pass(family):
    config = {"model_type": family} | MODELS[family]
    spec = model_spec(config)
    # Eager attention makes all scores, masked or not: windows and the causal half save nothing
    # there. Routers multiply too; Megatron-LM's formula, whose matrices these are, leaves them out.
    attention = sum(full_attention(block.attention) for block in spec.blocks)
    routers = 2 * sum(
        t.parameters for block in spec.blocks for t in block.tensors if t.role == "router"
    )
    assert counted(config) == LENGTH * (2 * spec.active_matmul_parameters + routers + attention)
    assert flops_per_token(
        spec, "megatron", LENGTH
    ) == 6 * spec.active_matmul_parameters + 3 * causal(spec)


def full_attention(attention: Attention) -> int:
    return 2 * attention.num_heads * (attention.head_dim + attention.value_head_dim) * LENGTH


def causal(spec: ModelSpec) -> float:
    halves = (full_attention(block.attention) / LENGTH for block in spec.blocks)
    widths = (min(LENGTH, window or LENGTH) for window in spec.windows)
    return sum(half * (w - w * w / (2 * LENGTH)) for half, w in zip(halves, widths, strict=True))


def counted(config: dict[str, Any]) -> int:
    """FLOPs of a forward pass over one sequence, as torch's own counter gives them."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    resolved = transformers_config(config)
    model = AutoModelForCausalLM.from_config(
        resolved, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, LENGTH, dtype=torch.long), use_cache=False)
    return counter.get_total_flops()
