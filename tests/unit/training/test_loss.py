"""The chunked loss: equal to the model's own, and never with the logits of all tokens in memory."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from drillyard.models.loss import LanguageModelLoss, chunk_rows_for, loss_inputs

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


def summed_loss(model: LlamaForCausalLM, batch: Any, chunk_tokens: int | None = None) -> torch.Tensor:
    inputs = loss_inputs(batch, model, "sdpa", torch.device("cpu"), chunk_tokens)
    loss: torch.Tensor = LanguageModelLoss(model)(**vars(inputs))
    return loss


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.3, 0.0])
def test_equals_the_models_own_logits_in_loss_and_gradients(tied: bool, share: float) -> None:
    model, batch = make_model(tied), make_batch(share)
    logits = model(input_ids=torch.from_numpy(batch.input_ids), use_cache=False).logits
    labels = torch.from_numpy(batch.labels)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    loss = summed_loss(model, batch, chunk_tokens=24)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=1e-10)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-9, atol=1e-10, msg=name)


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


def test_chunks_are_a_quarter_of_the_micro_batch_and_bounded() -> None:
    assert chunk_rows_for(256, None) == 64
    assert chunk_rows_for(1_000_000, None) == 2048
    assert chunk_rows_for(256, 100) == 100


def test_loss_is_fp32_for_a_bf16_model() -> None:
    assert summed_loss(make_model().bfloat16(), make_batch()).dtype == torch.float32
