"""`training.deterministic`: what PyTorch would do otherwise with kernels that do not give the same
bits twice."""

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen

from drillyard.config.run import RunConfig
from drillyard.training.model_setup import set_determinism


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_cudnn_sdp(True)


def deterministic(value: bool) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "bits",
            "model": {"id": "model"},
            "data": {"source": "builtin:python-stdlib", "sequence_length": 32},
            "training": {
                "steps": 1,
                "optimizer": {"learning_rate": 1.0e-3},
                "deterministic": value,
            },
        }
    )


@pytest.mark.parametrize("value", [True, False])
def test_attention_of_cudnn_is_off(value: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    set_determinism(deterministic(value))
    assert torch.are_deterministic_algorithms_enabled() is value
    assert torch.backends.cuda.cudnn_sdp_enabled() is not value
    if not hasattr(varlen, "_select_backend"):
        return  # torch 2.11's `varlen_attn` knows FlashAttention alone
    monkeypatch.setattr(varlen, "_cudnn_version_and_major_capability", lambda index: (92400, 9))
    monkeypatch.setattr(varlen, "_should_use_cudnn", lambda index: True)
    with FakeTensorMode():
        states = torch.empty(512, 4, 64, dtype=torch.bfloat16, device="cuda")
        offsets = torch.zeros(3, dtype=torch.int32, device="cuda")
        chosen = varlen._select_backend(states, states, states, offsets, offsets, 256, [-1, 0])
    assert chosen == (varlen._FLASH_ATTENTION_BACKEND if value else varlen._CUDNN_ATTENTION_BACKEND)
