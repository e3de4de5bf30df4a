"""FLOPs per token reproduce a published worked example and the field's table, and hold as
identities."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drillyard.errors import UserError
from drillyard.modelspec import (
    FORMULAS,
    attention_flops_per_token,
    flops_per_token,
    formula_label,
    mean_attended_length,
    model_spec,
    spec_from_counts,
)

LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
LLAMA2_7B = {"model_type": "llama"}  # every field of Llama 2 7B is its family's default
LLAMA2_70B = LLAMA_70B | {"vocab_size": 32000}


@pytest.mark.parametrize(
    ("formula", "gflops_per_token", "tflops_per_gpu", "mfu_percent"),
    [
        ("6N", 423.32, 954.7, 42.43),
        ("megatron", 433.12, 976.8, 43.41),
        ("causal", 439.43, 991.0, 44.04),
        ("torchtitan", 449.23, 1013.1, 45.03),
        ("palm", 455.53, 1027.3, 45.66),
        ("hfu-full", 607.38, 1369.8, 60.88),
    ],
)
def test_a_70b_run_on_b200_under_each_formula(
    formula, gflops_per_token, tflops_per_gpu, mfu_percent
):
    # 16 B200s (2250 TFLOP/s), 8 sequences of 4096 per GPU, 14.53 s per step.
    assert model_spec(LLAMA_70B).total_parameters == 70_553_706_496
    tokens_per_second = 8 * 4096 / 14.53
    flops = flops_per_token(model_spec(LLAMA_70B), formula, 4096)
    assert flops / 1e9 == pytest.approx(gflops_per_token, abs=0.005)
    assert flops * tokens_per_second / 1e12 == pytest.approx(tflops_per_gpu, abs=0.05)
    assert flops * tokens_per_second / 2250e12 * 100 == pytest.approx(mfu_percent, abs=0.005)


# Entries of a per-sample table used in the field: non-embedding parameters and full attention. They
# hold at their own sequence length only.
@pytest.mark.parametrize(
    ("config", "sequence_length", "flops_per_sample"),
    [
        (LLAMA2_7B, 4096, 1.89e14),
        (LLAMA2_70B, 4096, 1.82e15),
        (LLAMA_70B, 8192, 3.94e15),
        (LLAMA_8B, 8192, 4.74e14),
    ],
)
def test_flops_per_sample_of_the_table_used_in_the_field(config, sequence_length, flops_per_sample):
    flops = flops_per_token(model_spec(config), "torchtitan", sequence_length) * sequence_length
    assert float(f"{flops:.2e}") == flops_per_sample


def test_an_unknown_formula_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match=r"8N.*6N, palm"):
        flops_per_token(model_spec(LLAMA_8B), "8N", 128)


configs = st.builds(
    lambda layers, kv, group, head_dim, hidden, ffn, vocab, tied: {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "num_key_value_heads": kv,
        "num_attention_heads": kv * group,
        "head_dim": head_dim,
        "hidden_size": hidden * kv * group,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    },
    *(st.integers(1, 9) for _ in range(3)),
    *(st.integers(1, 300) for _ in range(4)),
    st.booleans(),
)


@given(configs, st.integers(1, 10_000))
def test_formulas_differ_by_their_terms(config, length):
    spec = model_spec(config)
    flops = {formula: flops_per_token(spec, formula, length) for formula in FORMULAS}
    width = spec.num_heads * spec.head_dim
    attention = 12 * len(spec.blocks) * width * length
    norms = (2 * len(spec.blocks) + 1) * spec.hidden_size
    embedding = spec.embedding_parameters
    assert flops["6N"] == 6 * spec.total_parameters
    assert flops["palm"] - flops["6N"] == pytest.approx(attention)
    assert flops["causal"] - flops["6N"] == pytest.approx(attention / 2)
    assert flops["palm"] - flops["torchtitan"] == pytest.approx(
        0 if spec.tied else 6 * embedding, abs=1e-3
    )
    assert flops["hfu-full"] == pytest.approx(flops["palm"] * 4 / 3)
    assert flops["hfu-attention"] == pytest.approx(flops["palm"] + attention / 3)
    # Megatron counts the matrices: everything but the input embedding and the norms (llama has no
    # biases).
    assert flops["megatron"] == pytest.approx(
        flops["causal"] - 6 * norms - (0 if spec.tied else 6 * embedding), rel=1e-9, abs=1e-3
    )


@given(st.integers(1, 4000), st.integers(1, 4000))
def test_a_window_attends_to_the_mean_number_of_positions_inside_it(length, window):
    shape = {
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 3,
    }
    config = {"model_type": "mistral", "sliding_window": window, **shape}
    open_config = config | {"sliding_window": None}
    spec = model_spec(config)

    def attention_flops(config, formula):
        return flops_per_token(model_spec(config), formula, length) - 6 * spec.total_parameters

    mean_attended = sum(min(position + 0.5, window) for position in range(length)) / length
    assert attention_flops(config, "causal") == pytest.approx(
        12 * 3 * 2 * 4 * mean_attended, rel=1e-6, abs=1e-3
    )
    assert attention_flops(config, "palm") == pytest.approx(
        attention_flops(open_config, "palm") * min(length, window) / length, rel=1e-6, abs=1e-3
    )


@given(st.integers(1, 500), st.integers(1, 500))
def test_a_chunk_attends_to_its_own_positions_only(length, chunk):
    config = {"model_type": "llama4_text", "num_hidden_layers": 1, "attention_chunk_size": chunk}
    attention = model_spec(config).blocks[0].attention
    mean = sum(position % chunk + 0.5 for position in range(length)) / length
    assert mean_attended_length(attention, length, causal=True) == pytest.approx(mean)
    assert mean_attended_length(attention, length, causal=False) == min(length, chunk)


def test_layers_with_and_without_a_window_are_counted_each_by_its_own():
    # gpt-oss-20b: 12 of 24 layers see 128 positions, 64 query heads of 64.
    spec = model_spec({"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32})
    assert attention_flops_per_token(spec, 8192, causal=False) == 4 * 64 * 64 * (
        12 * 128 + 12 * 8192
    )
    assert attention_flops_per_token(spec, 64, causal=False) == 4 * 64 * 64 * 24 * 64


def test_latent_attention_counts_the_widths_of_keys_and_values():
    # DeepSeek-V3: queries and keys of 128 + 64, values of 128, 128 heads, 61 layers.
    spec = model_spec({"model_type": "deepseek_v3"})
    assert attention_flops_per_token(spec, 4096, causal=False) == 61 * 2 * 128 * (192 + 128) * 4096


def test_linear_attention_does_not_grow_with_the_sequence():
    # Qwen3-Next: 36 of 48 layers keep a state of 128 x 128 per value head, 12 have 16 heads of 256.
    spec = model_spec({"model_type": "qwen3_next"})
    state = 36 * 6 * 32 * 128 * 128
    assert attention_flops_per_token(spec, 1, causal=False) == state + 12 * 4 * 16 * 256
    assert attention_flops_per_token(spec, 4096, causal=False) == state + 12 * 4 * 16 * 256 * 4096


def test_of_a_mixture_the_active_parameters_count():
    spec = model_spec({"model_type": "mixtral"})
    assert flops_per_token(spec, "6N", 4096) == 6 * 12_879_925_248
    assert flops_per_token(spec, "megatron", 1) == pytest.approx(
        6 * (32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 2 * 3 * 4096 * 14336) + 4096 * 32000),
        rel=1e-4,
    )


@given(configs, st.integers(1, 5000), st.integers(0, 10**6), st.sampled_from(FORMULAS))
def test_frozen_weights_take_two_thirds_of_trained_ones(config, length, adapters, formula):
    spec = model_spec(config)
    full = flops_per_token(spec, formula, length)
    with_adapters = flops_per_token(spec, formula, length, adapter_parameters=adapters)
    passes = {"hfu-full": 4, "hfu-attention": 4}.get(formula, 3)
    causal = formula in ("causal", "megatron")
    attention = (
        0 if formula == "6N" else passes * attention_flops_per_token(spec, length, causal=causal)
    )
    per_weight = 8 if formula == "hfu-full" else 6
    frozen = (full - attention) * (per_weight - 2) / per_weight
    assert with_adapters == pytest.approx(frozen + per_weight * adapters + attention, rel=1e-9)


def test_the_formula_is_named_with_what_it_counts():
    assert formula_label("palm") == "palm"
    assert formula_label("6N", adapters=True) == "4N frozen + 6N trained"
    assert formula_label("palm", adapters=True) == "palm, 4N frozen + 6N trained"


def test_parameters_alone_give_6n_and_nothing_else():
    spec = spec_from_counts(47_000_000_000, 13_000_000_000)
    assert flops_per_token(spec, "6N", 4096) == 78e9
    with pytest.raises(UserError, match="palm"):
        flops_per_token(spec, "palm", 4096)
