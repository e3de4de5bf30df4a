"""The chunked loss: equal to the model's own, and never with the logits of all tokens in memory."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.models.tiny import CONFIGS, LENGTH, VOCAB, filled_model
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from drillyard.models import loss as loss_module
from drillyard.models.head_product import SummedGradient
from drillyard.models.loss import (
    LanguageModelLoss,
    loss_and_gradient,
    loss_inputs,
)

B, T, V = 4, 64, 512


def make_model(tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).double()


def make_batch(share_with_loss: float = 1.0) -> Any:
    generator = np.random.default_rng(0)
    labels = generator.integers(0, V, (B, T))
    labels[generator.random((B, T)) > share_with_loss] = -100
    return types.SimpleNamespace(
        input_ids=generator.integers(0, V, (B, T)),
        labels=labels,
        position_ids=np.tile(np.arange(T), (B, 1)),
        document_ids=np.zeros((B, T), dtype=np.int32),
    )


def summed_loss(
    model: LlamaForCausalLM, batch: Any, chunk_tokens: int | None = None
) -> torch.Tensor:
    inputs = loss_inputs(batch, model, "sdpa", torch.device("cpu"), chunk_tokens)
    loss: torch.Tensor = LanguageModelLoss(model)(**vars(inputs))
    return loss


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.3, 0.0])
def test_equals_the_models_own_logits_in_loss_and_gradients(tied: bool, share: float) -> None:
    model, batch = make_model(tied), make_batch(share)
    logits = model(input_ids=torch.from_numpy(batch.input_ids), use_cache=False).logits
    labels = torch.from_numpy(batch.labels)
    expected = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    loss = summed_loss(model, batch, chunk_tokens=24)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=1e-10)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", CONFIGS)
def test_every_architectures_own_head_gives_the_same_loss_and_gradients(architecture: str) -> None:
    """Scaled and soft-capped logits, tied and untied heads: all gradients, in fp64, through several
    chunks."""
    model = filled_model(architecture, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, VOCAB, (2, LENGTH), generator=generator)
    targets = torch.randint(0, VOCAB, (2 * LENGTH,), generator=generator)
    targets[::5] = -100
    positions = torch.arange(LENGTH).expand(2, -1)
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    expected = F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
    (expected / 7).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    loss = LanguageModelLoss(model)(ids, positions, {}, torch.arange(2 * LENGTH), targets, 10)
    (loss / 7).backward()
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=1e-10)
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            model.get_parameter(name).grad, gradient, rtol=1e-9, atol=1e-10, msg=name
        )


@pytest.mark.parametrize("frozen", ["lm_head", "model"])
def test_frozen_weights_get_no_gradient_and_the_others_theirs(frozen: str) -> None:
    model, batch = make_model(), make_batch()
    summed_loss(model, batch, chunk_tokens=24).backward()
    whole = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    model.get_submodule(frozen).requires_grad_(False)
    summed_loss(model, batch, chunk_tokens=24).backward()
    for name, parameter in model.named_parameters():
        if name.startswith(frozen):
            assert parameter.grad is None
        else:
            torch.testing.assert_close(
                parameter.grad, whole[name], rtol=1e-12, atol=1e-12, msg=name
            )


def test_bf16_gradients_are_as_near_to_the_truth_as_those_of_autograd() -> None:
    """The chunks' own gradients are no less precise than torch's, judged by fp64 on the same bf16
    weights."""
    model, batch = make_model().bfloat16(), make_batch()
    truth_model = make_model()
    truth_model.load_state_dict(model.state_dict())
    summed_loss(truth_model, batch).backward()
    summed_loss(model, batch, chunk_tokens=64).backward()
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    logits = (
        model(input_ids=torch.from_numpy(batch.input_ids), use_cache=False)
        .logits.float()
        .flatten(0, 1)
    )
    F.cross_entropy(logits, torch.from_numpy(batch.labels).flatten(), reduction="sum").backward()
    for name, parameter in model.named_parameters():
        truth = truth_model.get_parameter(name).grad
        error, error_of_autograd = (
            float((g.double() - truth).norm()) for g in (ours[name], parameter.grad)
        )
        assert error < 1.5 * error_of_autograd + 1e-3 * float(truth.norm()), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("wide", [False, True])
def test_the_heads_gradient_is_the_sum_of_its_chunks(dtype: torch.dtype, wide: bool) -> None:
    """Chunks of odd sizes, one of a single row and one that carries no loss, against fp64."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(53, 19, generator=generator).to(dtype).requires_grad_()
    if wide and dtype == torch.bfloat16:
        weight.grad_dtype = torch.float32
    head, expected = SummedGradient(weight), torch.zeros(53, 19, dtype=torch.float64)
    for rows, share in ((31, 1.0), (1, 1.0), (17, 0.0), (64, 0.5)):
        hidden = torch.randn(1, rows, 19, generator=generator).to(dtype).requires_grad_()
        of_logits = torch.randn(1, rows, 53, generator=generator).to(dtype)
        of_logits *= torch.rand(1, rows, 1, generator=generator) < share
        (of_hidden,) = torch.autograd.grad(head(hidden), [hidden], of_logits)
        assert torch.equal(of_hidden, of_logits @ weight)
        expected += of_logits[0].double().T @ hidden[0].detach().double()
    assert head.total is not None and weight.grad is None
    assert head.total.dtype == (weight.grad_dtype or dtype)
    rounding = {torch.bfloat16: 2**-7, torch.float32: 1e-6, torch.float64: 1e-14}[dtype]
    error = (head.total.double() - expected).abs().max() / expected.abs().max()
    assert error < rounding


def test_the_scale_is_applied_before_gradients_are_rounded_to_bf16() -> None:
    """A factor given to `scale` costs no precision; one applied to the loss afterwards is rounded
    to bf16 on a GPU."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 32, generator=generator).bfloat16()
    targets = torch.tensor([1, 2, -100, 3, 4, 5])
    loss, gradient = loss_and_gradient(logits.float(), targets)
    scaled_loss, scaled = loss_and_gradient(logits, targets, 1 / 1021)
    torch.testing.assert_close(scaled_loss, loss / 1021)
    assert torch.equal(scaled, (gradient * (1 / 1021)).bfloat16()) and scaled[2].abs().max() == 0

    model, batch = make_model(), make_batch()
    inputs = vars(loss_inputs(batch, model, "sdpa", torch.device("cpu"), 24))
    LanguageModelLoss(model)(**inputs, scale=1 / 1021).backward()
    scaled_gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    (LanguageModelLoss(model)(**inputs) / 1021).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            scaled_gradients[name], parameter.grad, rtol=1e-12, atol=1e-14, msg=name
        )
    with torch.no_grad():
        torch.testing.assert_close(
            LanguageModelLoss(model)(**inputs, scale=0.5) * 2, LanguageModelLoss(model)(**inputs)
        )


KERNEL = """
import sys, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from drillyard.models import loss_kernel

if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):
    # The interpreter of torch 2.11's triton (3.6) makes a number of an array of one element, which
    # numpy refuses since 2.4. This is what triton 3.9 has there.
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch_tensor
if sys.argv[1] == "interpreted":
    loss_kernel._PART = 64
    for rows, vocabulary, spread in ((1, 5, 1.0), (6, 64, 9.0), (7, 333, 40.0), (3, 1031, 0.1)):
        torch.manual_seed(vocabulary)
        logits = torch.randn(rows, vocabulary) * spread
        logits[:, ::7] = float("-inf")
        targets = torch.randint(1, min(7, vocabulary), (rows,))
        targets[1::3] = -100
        truth = logits.double().requires_grad_()
        expected = torch.nn.functional.cross_entropy(truth, targets, reduction="sum") / 1021
        expected.backward()
        found = loss_kernel.turn_into_gradient(logits, targets, 1 / 1021, -100)
        assert abs(found.double() - expected) < 2e-6 * max(1e-3, abs(expected)), (found, expected)
        worst = float((logits.double() - truth.grad).abs().max()) * 1021
        assert worst < 1e-6 * (1 + spread), (vocabulary, worst)
        assert not logits[targets == -100].any()
    for bad in (float("nan"), float("inf")):
        logits = torch.zeros(2, 100)
        logits[1, 70] = bad
        loss = loss_kernel.turn_into_gradient(logits, torch.tensor([3, 4]), 1.0, -100)
        assert not torch.isfinite(loss), bad
    beyond = loss_kernel.turn_into_gradient(torch.zeros(1, 9), torch.tensor([9]), 1.0, -100)
    assert beyond.isnan()
else:
    fixed = {"ignored": -100, "part": 4096}
    for dtype in ("bf16", "fp32"):
        signature = {"logits": f"*{dtype}", "targets": "*i64", "losses": "*fp32"}
        signature |= {"vocabulary": "i32", "scale": "fp32"} | dict.fromkeys(fixed, "constexpr")
        source = ASTSource(fn=loss_kernel.row_kernel, signature=signature, constexprs=fixed)
        for capability in (80, 90, 100):
            assert compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]
"""


@pytest.mark.parametrize("how", ["interpreted", "compiled"])
def test_the_kernel_of_gpus_against_fp64(how: str) -> None:
    """At odd sizes, with ignored rows, masked logits and values that are not finite; and that it
    compiles."""
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if how == "interpreted" else {})
    command = [sys.executable, "-c", KERNEL, how]
    subprocess.run(command, env=environment, check=True, timeout=300)


def test_a_backward_that_needs_the_logits_notices_that_they_are_gone() -> None:
    """Autograd would otherwise compute with gradients in their place."""
    x = torch.randn(3, 4, requires_grad=True)
    logits = x.exp()
    torch.autograd.graph.increment_version(logits.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logits.sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", CONFIGS)
def test_no_architectures_backward_needs_its_logits(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So on a GPU their gradient can take their place, with the same results."""
    model = filled_model(architecture)
    ids = torch.randint(2, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(LENGTH).expand(2, -1)

    def gradients() -> dict[str, torch.Tensor | None]:
        model.zero_grad()
        rows = torch.arange(2 * LENGTH)
        LanguageModelLoss(model)(ids, positions, {}, rows, ids.flatten(), 10).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    def in_place(
        logits: torch.Tensor, targets: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found, gradient = loss_and_gradient(logits, targets, scale)
        return found, logits.copy_(gradient)

    expected = gradients()
    monkeypatch.setattr(loss_module, "loss_and_gradient", in_place)
    for name, gradient in gradients().items():
        kept = expected[name]
        assert gradient is kept is None or torch.equal(gradient, kept), name


class LargestTensor(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that any operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return result


def test_no_tensor_of_tokens_times_vocabulary_exists_in_forward_or_backward() -> None:
    model, batch = make_model(), make_batch()
    with LargestTensor() as largest:
        summed_loss(model, batch).backward()
    assert largest.elements < B * T * V
    with LargestTensor() as whole:
        model(input_ids=torch.from_numpy(batch.input_ids), use_cache=False)
    assert whole.elements >= B * T * V, "the hook does not see logits"


def test_loss_is_fp32_for_a_bf16_model() -> None:
    assert summed_loss(make_model().bfloat16(), make_batch()).dtype == torch.float32
