"""Adapted layers compute what peft's own forward computes, gradients too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.unit.models.tiny import VOCAB, filled_model

from drillyard.config.run import LoraConfig
from drillyard.models import adapter_forward
from drillyard.models.adapter_forward import ADAPTER
from drillyard.models.adapters import adapted_layers, inject_adapters

LORA: dict[str, Any] = {"rank": 4, "alpha": 6.0, "target_modules": "all-linear"}


def adapted(architecture: str, **lora: Any) -> Any:
    model = filled_model(architecture)
    dtypes = (torch.float32, torch.float32)
    inject_adapters(model, LoraConfig(**(LORA | lora)), None, dtypes)
    generator = torch.Generator().manual_seed(0)
    for _, layer in adapted_layers(model):
        for part in (layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]):
            weight = torch.randn(part.weight.shape, generator=generator) * 0.3
            part.weight = torch.nn.Parameter(weight)
    return model


def has_own_forward(module: torch.nn.Module) -> bool:
    return type(module).forward.__module__ == adapter_forward.__name__


@contextmanager
def forward_of_peft(model: Any) -> Iterator[None]:
    """The model without the classes that were given to its modules."""
    given = [(module, type(module)) for module in model.modules() if has_own_forward(module)]
    assert given
    for module, own in given:
        module.__class__ = own.__bases__[0]
    yield
    for module, own in given:
        module.__class__ = own


def logits_and_gradients(model: Any) -> list[torch.Tensor]:
    tokens = torch.arange(20).reshape(2, 10) % VOCAB
    logits = model(tokens, use_cache=False).logits
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    return [logits, *torch.autograd.grad(logits.square().sum(), weights)]


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe"])
def test_adapters_of_routers_and_experts_give_the_bits_of_peft(architecture: str) -> None:
    model = adapted(architecture)
    found = logits_and_gradients(model)
    with forward_of_peft(model):
        expected = logits_and_gradients(model)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
