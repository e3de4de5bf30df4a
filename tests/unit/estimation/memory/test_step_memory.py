"""Bytes of a step, for one small model of each family and each setting that changes what lies in
memory.

tests/distributed/test_memory_tracker.py compares the same sums with what torch allocates. Where a
change of the estimate is meant, the numbers here follow that comparison.
"""

from __future__ import annotations

from typing import Any

import pytest

from drillyard.estimation.memory.autograd import MemoryKind
from drillyard.estimation.memory.step_memory import StepMemory
from drillyard.estimation.setup import LoraSetup, Setup
from drillyard.modelspec import model_spec

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
}
WITHOUT_GROUPS = {key: size for key, size in SIZES.items() if key != "num_key_value_heads"}
GPT2 = {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 256, "vocab_size": 500}
WIDE_HEADS = {**SIZES, "head_dim": 32}
MIXTRAL = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN3_MOE = {**WIDE_HEADS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
LATENT = {
    **SIZES,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
LORA = LoraSetup(4, ("q_proj", "down_proj"))
LORA_ON_ALL = LoraSetup(8, "all-linear")
STEP: dict[str, Any] = {
    "precision": "bf16",
    "sequence_length": 64,
    "micro_batch_size": 2,
    "gradient_accumulation": 1,
    "activation_checkpointing": "none",
    "shard": 4,
    "replicate": 1,
    "gpus_per_node": 8,
    "kernel": "sdpa",
    "compiled": False,
    "loss_chunk_tokens": 32,
    "torch_release": (2, 15),
    "device_type": "cpu",
}


def step_of(family: str, sizes: dict[str, Any], changes: dict[str, Any]) -> StepMemory:
    variants = {name: changes[name] for name in ("fuses", "skips_first_product") if name in changes}
    settings = {**STEP, **{name: value for name, value in changes.items() if name not in variants}}
    return StepMemory(
        Setup(spec=model_spec({"model_type": family, **sizes}), **settings), **variants
    )


BYTES: list[tuple[str, dict[str, Any], dict[str, Any], str, int, int]] = [
    ("llama", SIZES, {}, "backward of a layer", 7424412, 54047440),
    (
        "llama",
        SIZES,
        {"gradient_accumulation": 2, "torch_release": (2, 14), "shard": 1},
        "backward of a layer",
        18565916,
        160972880,
    ),
    (
        "llama",
        SIZES,
        {"gradient_accumulation": 2, "torch_release": (2, 14), "shard": 1, "replicate": 2},
        "reduction of a layer's gradients",
        18855708,
        168095312,
    ),
    (
        "llama",
        SIZES,
        {"gradient_accumulation": 2, "shard": 1, "activation_checkpointing": "full"},
        "backward of a recomputed layer",
        16698652,
        148844368,
    ),
    (
        "llama",
        SIZES,
        {
            "gradient_accumulation": 3,
            "replicate": 2,
            "torch_release": (2, 14),
            "precision": "fp32",
            "shard": 3,
        },
        "backward of a layer",
        14919280,
        101925904,
    ),
    (
        "llama",
        SIZES,
        {
            "gradient_accumulation": 3,
            "replicate": 2,
            "activation_checkpointing": "full",
            "sequence_length": 8,
        },
        "backward of a recomputed layer",
        6760220,
        54075984,
    ),
    (
        "llama",
        {**SIZES, "tie_word_embeddings": True},
        {"gradient_accumulation": 2, "replicate": 2, "sequence_length": 63},
        "backward of a layer",
        7972396,
        58424572,
    ),
    (
        "llama",
        {**SIZES, "tie_word_embeddings": True},
        {"gradient_accumulation": 3, "keeps_unsharded": True, "shard": 3, "sequence_length": 9},
        "reduction of a layer's gradients",
        9022452,
        76438600,
    ),
    (
        "llama",
        {**SIZES, "tie_word_embeddings": True},
        {"adapters": LORA, "torch_release": (2, 14)},
        "forward of a layer",
        4228864,
        23420288,
    ),
    (
        "llama",
        SIZES,
        {
            "gradient_accumulation": 2,
            "keeps_unsharded": True,
            "torch_release": (2, 14),
            "activation_checkpointing": "selective",
        },
        "backward of a recomputed layer",
        9827996,
        76188368,
    ),
    (
        "llama",
        SIZES,
        {"gradient_accumulation": 2, "keeps_unsharded": True, "shard": 1},
        "loss",
        19374620,
        169606224,
    ),
    (
        "llama",
        SIZES,
        {
            "gradient_accumulation": 2,
            "keeps_unsharded": True,
            "precision": "fp32",
            "torch_release": (2, 14),
        },
        "loss",
        15965340,
        111587280,
    ),
    (
        "llama",
        SIZES,
        {"keeps_unsharded": True, "replicate": 2, "shard": 1, "precision": "fp64"},
        "backward of a layer",
        40289564,
        328443272,
    ),
    (
        "llama",
        {**SIZES, "attention_bias": True, "mlp_bias": True},
        {"adapters": LORA, "shard": 3, "gradient_accumulation": 2},
        "forward of a layer",
        4632964,
        27151042,
    ),
    (
        "llama",
        {**SIZES, "num_key_value_heads": 1},
        {"adapters": LORA_ON_ALL, "activation_checkpointing": "selective", "precision": "fp64"},
        "backward of a recomputed layer",
        14731872,
        84144960,
    ),
    (
        "llama",
        {**SIZES, "num_key_value_heads": 1},
        {"kernel": "eager"},
        "backward of a layer",
        7880860,
        56218064,
    ),
    (
        "llama",
        {**SIZES, "num_key_value_heads": 4},
        {"kernel": "eager", "activation_checkpointing": "selective", "shard": 1},
        "backward of a recomputed layer",
        16686876,
        141633360,
    ),
    (
        "llama",
        SIZES,
        {"kernel": "eager", "micro_batch_size": 1, "precision": "fp32"},
        "backward of a layer",
        8458652,
        59167952,
    ),
    (
        "llama",
        SIZES,
        {"kernel": "eager", "precision": "fp64"},
        "backward of a layer",
        23067676,
        148165768,
    ),
    (
        "llama",
        SIZES,
        {
            "activation_checkpointing": "selective",
            "skips_first_product": True,
            "gradient_accumulation": 2,
        },
        "backward of a recomputed layer",
        7018780,
        52141008,
    ),
    (
        "llama",
        SIZES,
        {"activation_checkpointing": "selective", "adapters": LORA},
        "backward of a recomputed layer",
        3378432,
        18574208,
    ),
    (
        "mistral",
        SIZES,
        {"kernel": "varlen", "fuses": True},
        "backward of a layer",
        6135196,
        46864848,
    ),
    (
        "qwen2",
        SIZES,
        {
            "kernel": "varlen",
            "fuses": True,
            "activation_checkpointing": "selective",
            "loss_chunk_tokens": 100,
        },
        "backward of a recomputed layer",
        5993228,
        45170128,
    ),
    (
        "qwen3",
        WIDE_HEADS,
        {
            "kernel": "flex",
            "fuses": True,
            "activation_checkpointing": "full",
            "adapters": LORA_ON_ALL,
        },
        "backward of a recomputed layer",
        2513184,
        16103936,
    ),
    ("gemma", WIDE_HEADS, {}, "backward of a layer", 7304088, 52270752),
    ("gemma2", WIDE_HEADS, {"kernel": "eager"}, "backward of a layer", 9305016, 62541088),
    (
        "gemma2",
        WIDE_HEADS,
        {"kernel": "eager", "activation_checkpointing": "full", "adapters": LORA_ON_ALL},
        "backward of a recomputed layer",
        3323552,
        16331520,
    ),
    (
        "gemma2",
        WIDE_HEADS,
        {"kernel": "varlen", "sequence_length": 16, "loss_chunk_tokens": 64},
        "backward of a layer",
        5471672,
        41380384,
    ),
    (
        "gemma3_text",
        WIDE_HEADS,
        {
            "activation_checkpointing": "selective",
            "gradient_accumulation": 2,
            "keeps_unsharded": True,
        },
        "backward of a recomputed layer",
        9912792,
        72972832,
    ),
    ("olmo", SIZES, {}, "backward of a layer", 7028216, 51259552),
    ("olmo2", SIZES, {}, "backward of a layer", 8338364, 59052112),
    (
        "olmo2",
        SIZES,
        {"adapters": LORA_ON_ALL, "kernel": "varlen"},
        "backward of a layer",
        5279008,
        30029312,
    ),
    ("olmo3", SIZES, {"precision": "fp32"}, "backward of a layer", 11816380, 75878224),
    ("phi3", SIZES, {}, "backward of a layer", 7522668, 54636688),
    (
        "phi3",
        SIZES,
        {"kernel": "eager", "activation_checkpointing": "selective"},
        "backward of a recomputed layer",
        6736236,
        46993296,
    ),
    ("phi", SIZES, {}, "backward of a layer", 6180632, 44517428),
    (
        "cohere",
        SIZES,
        {"activation_checkpointing": "full"},
        "backward of a recomputed layer",
        5772680,
        39551968,
    ),
    ("cohere2", SIZES, {"kernel": "varlen"}, "backward of a layer", 6847752, 49593696),
    (
        "granite",
        SIZES,
        {"activation_checkpointing": "selective"},
        "backward of a recomputed layer",
        6422940,
        45561552,
    ),
    ("smollm3", SIZES, {"kernel": "flex"}, "backward of a layer", 6948760, 50039968),
    ("stablelm", SIZES, {}, "backward of a layer", 7040576, 51358720),
    ("starcoder2", SIZES, {}, "backward of a layer", 5162092, 37671200),
    ("glm4", SIZES, {}, "backward of a layer", 12394332, 89712336),
    ("nemotron", {**SIZES, "hidden_act": "relu2"}, {}, "backward of a layer", 5643824, 40772416),
    ("gpt_neox", WITHOUT_GROUPS, {}, "backward of a layer", 5927088, 44099344),
    ("gpt2", GPT2, {}, "backward of a layer", 8158032, 57709440),
    (
        "gpt2",
        GPT2,
        {"activation_checkpointing": "selective", "adapters": LORA_ON_ALL, "micro_batch_size": 1},
        "backward of a recomputed layer",
        3145216,
        19045632,
    ),
    (
        "gpt2",
        GPT2,
        {"gradient_accumulation": 2, "keeps_unsharded": True, "sequence_length": 8},
        "reduction of a layer's gradients",
        9015504,
        74771904,
    ),
    ("mixtral", MIXTRAL, {}, "backward of a layer", 17889692, 131161680),
    (
        "mixtral",
        MIXTRAL,
        {"activation_checkpointing": "selective", "shard": 8, "gradient_accumulation": 2},
        "backward of a recomputed layer",
        22131228,
        146917456,
    ),
    (
        "qwen2_moe",
        {**QWEN3_MOE, "shared_expert_intermediate_size": 128},
        {},
        "backward of a layer",
        8975628,
        66199312,
    ),
    ("qwen3_moe", QWEN3_MOE, {"kernel": "varlen"}, "backward of a layer", 7860220, 57426576),
    (
        "qwen3_moe",
        QWEN3_MOE,
        {"activation_checkpointing": "full", "adapters": LORA},
        "backward of a recomputed layer",
        2758528,
        14618240,
    ),
    (
        "deepseek_v2",
        {**LATENT, "q_lora_rank": None},
        {"activation_checkpointing": "selective"},
        "backward of a recomputed layer",
        5859440,
        41804096,
    ),
    ("deepseek_v3", LATENT, {"kernel": "varlen"}, "backward of a layer", 6910448, 50162624),
]
"""Model, sizes and settings; then the moment of the peak, its bytes, and the peaks of all phases of
the step added."""


@pytest.mark.parametrize(("family", "sizes", "changes", "moment", "peak", "of_all_phases"), BYTES)
def test_the_bytes_of_a_step(
    family: str,
    sizes: dict[str, Any],
    changes: dict[str, Any],
    moment: str,
    peak: int,
    of_all_phases: int,
) -> None:
    step = step_of(family, sizes, changes)
    assert (step.moment, step.ledger.peak) == (moment, peak)
    assert sum(step.moments.values()) == of_all_phases
    live = step.ledger.live
    assert not any(live[MemoryKind.WHOLE_GRADIENTS :])
    # A rank that is alone keeps its copies in compute precision.
    trained = sum(unit.trained_shard for unit in step.units)
    kept = trained * step.compute if step.setup.holds_whole else 0
    assert live[MemoryKind.GATHERED] == kept
