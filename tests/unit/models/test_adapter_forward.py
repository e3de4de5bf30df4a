"""Adapted layers compute what peft's own forward computes, gradients too, with fewer products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.unit.models.tiny import CONFIGS, VOCAB, filled_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaMLP

from drillyard.config.run_model import LoraConfig
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
    mixture = adapted(architecture).model.layers[0].mlp
    x = torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def result_and_gradients() -> list[torch.Tensor]:
        result = mixture(x)
        weights = [weight for weight in mixture.parameters() if weight.requires_grad]
        return [result, *torch.autograd.grad(result.square().sum(), [x, *weights])]

    found = result_and_gradients()
    with forward_of_peft(mixture):
        expected = result_and_gradients()
    assert len(found) == 2 + 2 * 3
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


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
    assert not any(has_own_forward(module) for module in adapted("llama", **lora).modules())


def test_only_some_layers_of_a_group_have_an_adapter() -> None:
    model = adapted("llama", target_modules=["q_proj", "v_proj", "up_proj"])
    found = logits_and_gradients(model)
    with forward_of_peft(model):
        expected = logits_and_gradients(model)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_modules_of_a_kind_have_one_class_which_keeps_its_name() -> None:
    first, second = adapted("llama").model.layers
    for name in ("self_attn", "mlp"):
        ours = type(getattr(first, name))
        assert ours is type(getattr(second, name))
        assert ours.__name__ == ours.__bases__[0].__name__


def test_layers_that_read_different_inputs_get_products_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.gate_proj(x) + self.up_proj(x + 1) + self.gate_proj(x - 1)

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    model = adapted("llama")
    mlp = model.model.layers[0].mlp
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    found = mlp(x)
    with forward_of_peft(model):
        torch.testing.assert_close(found, mlp(x))
