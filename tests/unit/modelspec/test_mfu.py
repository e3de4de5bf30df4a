"""MFU names its formula, peak and precision, and a figure that cannot be right is flagged, never clipped."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.facts import says

from drillyard.modelspec import Utilisation, flops_per_token, implausible_mfu, mfu, model_spec, utilisation

LLAMA_70B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}


def measured(tokens_per_second_per_gpu: float = 8 * 4096 / 14.53, **others) -> Utilisation:
    settings = {
        "formula": "6N",
        "flops_per_token": flops_per_token(model_spec(LLAMA_70B), "6N", 4096),
        "tokens_per_second_per_gpu": tokens_per_second_per_gpu,
        "accelerator": "b200",
        "precision": "bf16",
        "peak_flops_per_second": 2250e12,
        "achievable_flops_per_second": 2250e12 * 0.776,
    }
    return utilisation(**settings | others)


def test_a_result_says_what_it_is_measured_against():
    result = measured()
    assert result.mfu == pytest.approx(0.4243, abs=5e-5)
    assert result.warning is None
    assert str(result) == "954.7 TFLOP/s per GPU by 6N, 42.43% of 2250 TFLOP/s (b200, bf16)"


def test_an_unknown_accelerator_has_no_mfu_and_says_so():
    result = measured(accelerator="GB999", peak_flops_per_second=None, achievable_flops_per_second=None)
    assert (result.mfu, result.warning) == (None, None)
    assert says(str(result), "954.7 TFLOP/s per GPU ... 6N ... no MFU ... bf16 ... GB999")
    assert mfu(flops_per_token=1e9, tokens_per_second_per_gpu=1e3, peak_flops_per_second=None) is None


def test_tokens_of_all_gpus_taken_for_one_are_flagged_and_not_clipped():
    result = measured(16 * 8 * 4096 / 14.53)
    assert result.mfu == pytest.approx(16 * 0.4243, abs=1e-3)
    assert says(result.warning, "678.9% ... peak ... units")
    assert says(result.warning, "tokens/s ... all GPUs")


@pytest.mark.parametrize(
    ("percent", "precision", "achievable_percent", "flagged"),
    [
        (77.5, "bf16", 77.6, False),  # B200
        (77.7, "bf16", 77.6, True),
        (80.4, "bf16", 80.3, True),  # H100
        (86.8, "bf16", 86.9, False),  # A100
        (79.9, "bf16", None, False),
        (80.1, "bf16", None, True),
        (80.1, "fp8", None, False),
        (100.1, "fp8", None, True),
        (100.1, "bf16", 101, True),
    ],
)
def test_the_limit_is_the_achievable_rate_or_80_percent_in_bf16_or_the_peak(
    percent, precision, achievable_percent, flagged
):
    achievable = None if achievable_percent is None else achievable_percent / 100
    assert (implausible_mfu(percent / 100, precision, achievable) is not None) == flagged


def test_an_fp8_run_against_the_bf16_peak_is_flagged():
    # The 128 H100 of a published log: 692.98 TFLOP/s per GPU is 70 % of the bf16 peak and 35 % of the right one.
    result = measured(
        1e3, flops_per_token=692.98e9 * 1.2, peak_flops_per_second=989e12, achievable_flops_per_second=794e12
    )
    assert "80.3%" in result.warning
    assert says(result.warning, "fp8 peak")


@given(*(st.floats(1e-3, 1e18) for _ in range(3)))
def test_mfu_is_what_the_gpu_does_over_what_it_could(flops, tokens, peak):
    fraction = mfu(flops_per_token=flops, tokens_per_second_per_gpu=tokens, peak_flops_per_second=peak)
    assert fraction * peak == pytest.approx(flops * tokens)
    assert (implausible_mfu(fraction, "fp8") is None) == (fraction <= 1)
