"""A CPU without instructions for bf16 is known, and only a CPU."""

from __future__ import annotations

import pytest
import torch

from drillyard.training.model_setup import is_slow_in_half

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("has_instructions", [True, False])
def test_half_precision_is_slow_on_a_cpu_without_its_instructions(
    has_instructions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_instructions)

    slow = {precision for precision in ("bf16", "fp8", "fp32") if is_slow_in_half(precision, CPU)}

    assert slow == (set() if has_instructions else {"bf16", "fp8"})
    assert not is_slow_in_half("bf16", GPU)


def test_torch_says_what_this_cpu_has() -> None:
    assert isinstance(torch.ops.mkldnn._is_mkldnn_bf16_supported(), bool)
