"""Adapted layers compute what peft's own forward computes, gradients too, with fewer products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from peft.tuners.lora import Linear
from tests.unit.models.tiny import CONFIGS, VOCAB, filled_model
from torch.utils._python_dispatch import TorchDispatchMode

from drillyard.config.run import LoraConfig
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


@contextmanager
def forward_of_peft(model: Any) -> Iterator[None]:
    """The model without the forwards that were given to it."""
    given = {module: vars(module).pop("forward", None) for module in model.modules()}
    assert any(given.values())
    yield
    for module, forward in given.items():
        if forward is not None:
            vars(module)["forward"] = forward


def logits_and_gradients(model: Any) -> list[torch.Tensor]:
    tokens = torch.arange(20).reshape(2, 10) % VOCAB
    logits = model(tokens, use_cache=False).logits
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    return [logits, *torch.autograd.grad(logits.square().sum(), weights)]


@pytest.mark.parametrize("architecture", CONFIGS)
def test_logits_and_gradients_are_those_of_peft(architecture: str) -> None:
    model = adapted(architecture)
    found = logits_and_gradients(model)
    with forward_of_peft(model):
        expected = logits_and_gradients(model)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5 * float(theirs.abs().max()))


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        aten = torch.ops.aten
        self.count += operator in (aten.mm.default, aten.addmm.default, aten.linear.default)
        return operator(*args, **(kwargs or {}))


def products(model: Any) -> int:
    with Products() as counted:
        logits_and_gradients(model)
    return counted.count


def test_layers_with_one_input_share_a_product_forward_and_two_backward() -> None:
    model = adapted("llama")
    with forward_of_peft(model):
        separate = products(model)
    # Two for queries, keys and values, one for gate and up; nothing before the first block is
    # trained.
    first, second = 3 + 3 + 1, 3 + 3 + 3
    assert separate - products(model) == first + second


@pytest.mark.parametrize("lora", [{"dropout": 0.1}, {"variant": "dora"}])
def test_what_cannot_be_shared_keeps_the_forward_of_peft(lora: dict[str, Any]) -> None:
    assert not any("forward" in vars(module) for module in adapted("llama", **lora).modules())


def test_only_some_layers_of_a_group_have_an_adapter() -> None:
    model = adapted("llama", target_modules=["q_proj", "v_proj", "up_proj"])
    found = logits_and_gradients(model)
    with forward_of_peft(model):
        expected = logits_and_gradients(model)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_layers_that_read_different_inputs_get_products_of_their_own() -> None:
    model = adapted("llama")
    mlp = model.model.layers[0].mlp
    mlp_class = type(mlp)

    class Shifted(mlp_class):  # type: ignore[misc, valid-type]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.gate_proj(x) + self.up_proj(x + 1) + self.gate_proj(x - 1)

    mlp.__class__ = Shifted
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    found = mlp(x)
    with forward_of_peft(model):
        torch.testing.assert_close(found, mlp(x))
    assert isinstance(mlp.gate_proj, Linear)
