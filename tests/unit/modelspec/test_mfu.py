"""An MFU that cannot be right is flagged."""

from __future__ import annotations

import pytest
from tests.facts import says

from drillyard.modelspec import implausible_mfu


def test_tokens_of_all_gpus_taken_for_one_are_flagged():
    warning = implausible_mfu(16 * 0.4243, "bf16", 0.776)
    assert says(warning, "678.9% ... peak ... units")
    assert says(warning, "tokens/s ... all GPUs")


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
    # The 128 H100 of a published log: 692.98 TFLOP/s per GPU is 70 % of the bf16 peak and 35 % of
    # the right one.
    warning = implausible_mfu(692.98 * 1.2 / 989, "bf16", 794 / 989)
    assert "80.3%" in warning
    assert says(warning, "fp8 peak")
