"""Products in fp8: what is converted, what is left and named, and how near a product comes."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from tests.unit.estimation.requests import run_config
from tests.unit.models.tiny import CONFIGS, filled_model, meta_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from drillyard.config.kernel_rules import Fp8Scaling
from drillyard.config.run_checks import check_run
from drillyard.errors import MissingExtraError, UserError
from drillyard.models.architectures import blocks
from drillyard.models.fp8 import keep_frozen_in_fp8, use_fp8_products
from drillyard.models.sharding import plain_name
from drillyard.modelspec import model_spec

CPU = torch.device("cpu")


def converted(model: Any) -> set[str]:
    from torchao.float8.float8_linear import Float8Linear

    return {
        plain_name(name)
        for name, module in model.named_modules()
        if isinstance(module, Float8Linear)
    }


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_what_is_converted_is_what_the_estimate_counts(name: str) -> None:
    model = meta_model(name)
    spec = model_spec(model.config.to_dict(), built=True)
    wanted = {
        f"{index}.{tensor.name.removesuffix('.weight')}"
        for index, block in enumerate(spec.blocks)
        for tensor in block.tensors
        if tensor.linear
        and spec.model_type != "gpt2"
        and all(size % 16 == 0 for size in tensor.shape)
        and tensor.role != "router"
    }
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if not wanted:
        with pytest.raises(UserError, match="no layer"):
            use_fp8_products(model, blocks(model), "tensorwise", CPU)
        return
    left = use_fp8_products(model, blocks(model), "tensorwise", CPU)
    found = {each.split(".", 2)[-1] for each in converted(model)}
    assert found == wanted
    assert {id(parameter): name for name, parameter in model.named_parameters()} == names
    assert not {each.split("*.")[-1] for each in left} & {each.split(".", 1)[1] for each in found}


class PassesOverWeight(TorchDispatchMode):
    """Bytes read by operators that cast something of a weight's size, or copy it."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements, self.read = elements, 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operator.name() in ("aten::abs", "aten::clamp", "aten::clone"):
            self.read += args[0].nbytes if args[0].numel() == self.elements else 0
        return operator(*args, **(kwargs or {}))


def test_a_frozen_weight_scaled_by_rows_is_not_cast_again() -> None:
    """It rests in 2 bytes a parameter, one for each product, beside the scales; the bits of result
    and gradient are those of casting in both."""
    torch.manual_seed(0)
    model = filled_model("llama", dtype=torch.bfloat16).requires_grad_(False)
    use_fp8_products(model, blocks(model), "rowwise", CPU)
    layer = blocks(model)[0].mlp.up_proj
    x = torch.randn(2, 8, layer.in_features).bfloat16().requires_grad_()
    upstream = torch.randn(2, 8, layer.out_features).bfloat16()
    found = []
    for rests_in_fp8 in (False, True):
        if rests_in_fp8:
            keep_frozen_in_fp8(model)
        with PassesOverWeight(layer.in_features * layer.out_features) as passes:
            y = layer(x)
            (gradient,) = torch.autograd.grad(y, x, upstream)
        found.append((y, gradient, passes.read))
    (y, gradient, cast), (again, gradient_again, none) = found
    assert torch.equal(y, again) and torch.equal(gradient, gradient_again)
    assert cast > 0 == none
    of_weight = layer.weight.nbytes + layer.backward_weight.nbytes
    assert of_weight == 2 * layer.in_features * layer.out_features
    scales = layer.weight_scale.nbytes + layer.backward_scale.nbytes
    assert scales == 4 * (layer.in_features + layer.out_features)
    # As the second operand of `torch._scaled_mm` has to lie.
    assert layer.weight.t().stride()[0] == layer.backward_weight.stride()[0] == 1


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_products_and_their_gradients_are_near_those_of_fp64(scaling: Fp8Scaling) -> None:
    torch.manual_seed(0)
    model = filled_model("llama", dtype=torch.bfloat16)
    layer = blocks(model)[0].mlp.up_proj
    weight = layer.weight.detach().double().requires_grad_()
    use_fp8_products(model, blocks(model), scaling, CPU)
    x = torch.randn(32, layer.in_features).bfloat16().requires_grad_()
    exact_x = x.detach().double().requires_grad_()
    upstream = torch.randn(32, layer.out_features).bfloat16()
    y = blocks(model)[0].mlp.up_proj(x)
    y.backward(upstream)
    exact = exact_x @ weight.T
    exact.backward(upstream.double())
    own = blocks(model)[0].mlp.up_proj.weight
    assert own is layer.weight
    for near, true in ((y, exact), (x.grad, exact_x.grad), (own.grad, weight.grad)):
        error = (near.double() - true).norm() / true.norm()
        # e4m3 has 3 bits of mantissa, e5m2 two: a uniform error of half a unit, twice.
        assert 0.002 < error < 0.09


def test_adapters_and_odd_sizes_are_left_in_bf16() -> None:
    model = meta_model("llama", intermediate_size=40)
    inject_adapter_in_model(LoraConfig(r=16, target_modules=["q_proj"]), model, "default")
    left = use_fp8_products(model, blocks(model), "tensorwise", CPU)
    assert left == [f"model.layers.*.mlp.{each}_proj" for each in ("gate", "up", "down")]
    assert {each.removesuffix(".base_layer")[-6:] for each in converted(model)} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    }
    attention = blocks(model)[0].self_attn
    assert type(attention.q_proj.lora_A["default"]) is nn.Linear


def test_a_gpu_without_the_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA L4")
    model, gpu = meta_model("llama"), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(UserError, match=r"8\.9.*8\.0\nset training.precision: bf16$"):
        use_fp8_products(model, blocks(model), "tensorwise", gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    with pytest.raises(UserError, match=r"9\.0.*8\.9\n.*fp8_scaling: tensorwise"):
        use_fp8_products(model, blocks(model), "rowwise", gpu)
    use_fp8_products(model, blocks(model), "tensorwise", gpu)


def test_without_torchao_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    model = meta_model("llama")
    with pytest.raises(MissingExtraError, match=r"drillyard\[torchao\]"):
        use_fp8_products(model, blocks(model), "tensorwise", CPU)


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"data": {"sequence_length": 100}}, "data.sequence_length", "write 96 or 112"),
        ({"data": {"sequence_length": 8}}, "data.sequence_length", "write 16"),
        ({"training": {"precision": "bf16", "fp8_scaling": "rowwise"}}, "training.fp8_scaling", ""),
    ],
)
def test_what_contradicts_fp8_is_named(changes: dict[str, Any], key: str, words: str) -> None:
    settings: dict[str, Any] = {"training": {"precision": "fp8"}} | changes
    config = run_config(**settings)
    problems = {".".join(map(str, each.path)): each.message for each in check_run(config)}
    assert words in problems[key]
