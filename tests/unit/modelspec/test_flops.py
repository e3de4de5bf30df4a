"""FLOPs per token and MFU reproduce the published worked example and the field's tables, and hold as identities."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drillyard.errors import UserError
from drillyard.modelspec import FORMULAS, flops_per_token, mfu, model_spec, training_flops_per_token

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
def test_a_70b_run_on_b200_under_each_formula(formula, gflops_per_token, tflops_per_gpu, mfu_percent):
    # 16 B200s (2250 TFLOP/s), 8 sequences of 4096 per GPU, 14.53 s per step.
    tokens_per_second = 8 * 4096 / 14.53
    flops = training_flops_per_token(LLAMA_70B, formula, 4096)
    fraction = mfu(flops_per_token=flops, tokens_per_second_per_gpu=tokens_per_second, peak_flops_per_second=2250e12)
    assert flops / 1e9 == pytest.approx(gflops_per_token, abs=0.005)
    assert flops * tokens_per_second / 1e12 == pytest.approx(tflops_per_gpu, abs=0.05)
    assert fraction * 100 == pytest.approx(mfu_percent, abs=0.005)


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
    flops = training_flops_per_token(config, "torchtitan", sequence_length) * sequence_length
    assert float(f"{flops:.2e}") == flops_per_sample


def test_an_unknown_peak_gives_no_mfu():
    assert mfu(flops_per_token=1e9, tokens_per_second_per_gpu=1e3, peak_flops_per_second=None) is None


def test_an_unknown_formula_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match=r"8N.*6N, palm"):
        training_flops_per_token(LLAMA_8B, "8N", 128)


configs = st.builds(
    lambda layers, kv, group, head_dim, hidden, ffn, vocab, tied: {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "num_key_value_heads": kv,
        "num_attention_heads": kv * group,
        "head_dim": head_dim,
        "hidden_size": hidden,
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
    attention = 12 * spec.num_layers * width * length
    norms = (2 * spec.num_layers + 1) * spec.hidden_size
    embedding = spec.embedding_parameters
    assert flops["6N"] == 6 * spec.total_parameters
    assert flops["palm"] - flops["6N"] == pytest.approx(attention)
    assert flops["causal"] - flops["6N"] == pytest.approx(attention / 2)
    assert flops["palm"] - flops["torchtitan"] == pytest.approx(0 if spec.tied else 6 * embedding, abs=1e-3)
    assert flops["hfu-full"] == pytest.approx(flops["palm"] * 4 / 3)
    # Megatron counts the matrices: everything but the input embedding and the norms (llama has no biases).
    assert flops["megatron"] == pytest.approx(
        flops["causal"] - 6 * norms - (0 if spec.tied else 6 * embedding), rel=1e-9, abs=1e-3
    )


@given(st.integers(1, 4000), st.integers(1, 4000))
def test_a_window_attends_to_the_mean_number_of_positions_inside_it(length, window):
    shape = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 3}
    config = {"model_type": "mistral", "sliding_window": window, **shape}
    open_config = config | {"sliding_window": None}
    spec = model_spec(config)

    def attention_flops(config, formula):
        return training_flops_per_token(config, formula, length) - 6 * spec.total_parameters

    mean_attended = sum(min(position + 0.5, window) for position in range(length)) / length
    assert attention_flops(config, "causal") == pytest.approx(12 * 3 * 2 * 4 * mean_attended, rel=1e-6, abs=1e-3)
    assert attention_flops(config, "palm") == pytest.approx(
        attention_flops(open_config, "palm") * min(length, window) / length, rel=1e-6, abs=1e-3
    )
