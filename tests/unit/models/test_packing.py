"""Documents of a packed batch do not know of each other: values and gradients, every architecture
and CPU kernel."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.unit.models.tiny import CONFIGS, LENGTH, Packed, filled_model, packed_batch
from torch.nn import functional as F

from drillyard.models import attention
from drillyard.models.attention import (
    document_mask,
    packed_attention_inputs,
    varlen_attention,
    varlen_inputs,
)
from drillyard.models.loss import final_hidden, head_logits

CPU = torch.device("cpu")
LENGTHS = [[7, 9, 3], [LENGTH], [5], [1, 1, 10, 12]]
# Mixtures multiply the tokens of one expert as one matrix, so another document changes the shapes
# of matrix products.
MIXTURES = ("mixtral", "qwen3_moe")


def hidden_of(model, batch: Packed, attention: str) -> torch.Tensor:
    attention = (
        model.config._attn_implementation if model.config.model_type == "gemma2" else attention
    )
    inputs = packed_attention_inputs(batch, model, attention, CPU)
    return final_hidden(
        model, torch.from_numpy(batch.input_ids), torch.from_numpy(batch.position_ids), inputs
    )


def document_losses(model, batch: Packed, attention: str) -> torch.Tensor:
    """Summed next-token loss over all documents of a batch."""
    hidden = hidden_of(model, batch, attention)
    labels = np.full_like(batch.input_ids, -100)
    same = batch.document_ids[:, 1:] == batch.document_ids[:, :-1]
    same &= batch.document_ids[:, 1:] >= 0
    labels[:, :-1][same] = batch.input_ids[:, 1:][same]
    logits = head_logits(model, hidden.flatten(0, 1))
    return F.cross_entropy(
        logits, torch.from_numpy(labels).flatten(), ignore_index=-100, reduction="sum"
    )


def alone(batch: Packed) -> list[Packed]:
    """Each document of a batch as a batch of its own, without packing or padding."""
    documents = []
    for row in range(len(batch.input_ids)):
        for number in range(batch.document_ids[row].max() + 1):
            here = batch.document_ids[row] == number
            ids = batch.input_ids[row][here][None]
            documents.append(
                Packed(ids, np.arange(ids.shape[1])[None], np.zeros(ids.shape, np.int32))
            )
    return documents


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_packed_loss_is_the_sum_of_the_documents_alone(architecture: str, attention: str) -> None:
    model = filled_model(architecture, attention, torch.float64)
    batch = packed_batch(LENGTHS)
    with torch.no_grad():
        packed = document_losses(model, batch, attention)
        one_by_one = sum(document_losses(model, document, attention) for document in alone(batch))
    torch.testing.assert_close(packed, one_by_one, rtol=1e-6, atol=0)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_documents_alone_are_what_the_library_computes_without_our_masks(architecture: str) -> None:
    """The window and the causal order are transformers' own: no mask of ours is compared with
    itself."""
    model = filled_model(architecture, "sdpa", torch.float32)
    batch = packed_batch([[LENGTH]])
    ids = torch.from_numpy(batch.input_ids)
    with torch.no_grad():
        ours = hidden_of(model, batch, "sdpa")
        theirs = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_another_document_changes_no_bit_of_this_one(architecture: str, attention: str) -> None:
    model = filled_model(architecture, attention, torch.float32)
    batch = packed_batch([[7, 9, 3]])
    changed = packed_batch([[7, 9, 3]])
    changed.input_ids[0, :7] = (changed.input_ids[0, :7] + 5) % 40 + 2
    changed.input_ids[0, 19:] = 33
    other = slice(7, 19)
    results = []
    for case in (batch, changed):
        model.zero_grad()
        hidden = hidden_of(model, case, attention)[:, other]
        hidden.square().sum().backward()
        results.append(
            [
                hidden.detach(),
                *(parameter.grad for parameter in model.parameters() if parameter.grad is not None),
            ]
        )
    same = (
        (lambda a, b: torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6))
        if architecture in MIXTURES
        else (lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0))
    )
    for before, after in zip(*results, strict=True):
        same(before, after)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_sequence_of_padding_gives_finite_values_and_gradients(
    architecture: str, attention: str
) -> None:
    model = filled_model(architecture, attention, torch.float32)
    batch = packed_batch([[], [3]])
    hidden_of(model, batch, attention).sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert torch.isfinite(parameter.grad).all(), name


def test_mask_lets_a_position_see_its_document_up_to_itself_within_the_window() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, -1]])
    for window in (None, 1, 2):
        mask = document_mask(documents, window)[0, 0]
        for q in range(6):
            for k in range(6):
                seen = (
                    k <= q
                    and documents[0, q] == documents[0, k]
                    and (window is None or q - k < window)
                )
                assert bool(mask[q, k]) == seen


def test_varlen_offsets_begin_each_document_and_each_stretch_of_padding() -> None:
    inputs = varlen_inputs(packed_batch([[7, 9, 3], [LENGTH]]).document_ids, CPU)
    offsets = inputs["cu_seq_lens_q"]
    assert offsets.dtype == torch.int32
    assert offsets[:5].tolist() == [0, 7, 16, 19, LENGTH]
    assert (offsets[5:] == 2 * LENGTH).all()
    assert len(offsets) == 8
    assert inputs["max_length_q"] == LENGTH


def test_varlen_offsets_hold_every_document_however_many_there_are() -> None:
    documents = np.arange(LENGTH, dtype=np.int32)[None].repeat(6, axis=0)
    offsets = varlen_inputs(documents, CPU)["cu_seq_lens_q"]
    assert offsets[: 6 * LENGTH + 1].tolist() == list(range(6 * LENGTH + 1))
    assert len(offsets) == 256


@pytest.mark.parametrize("groups_heads", [True, False])
@pytest.mark.parametrize("window", [None, 4])
def test_varlen_attention_hands_the_kernel_what_sdpa_computes(
    monkeypatch: pytest.MonkeyPatch, window: int | None, groups_heads: bool
) -> None:
    """The kernel runs on CUDA only; a stand-in with its documented arguments shows that ours mean
    what SDPA does: with torch's argument for grouped heads, and without it as in torch 2.11."""

    def reference(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, **grouping):
        assert torch.equal(cu_q, cu_k)
        assert grouping == ({"enable_gqa": True} if groups_heads else {})
        assert (k.shape[1] == q.shape[1]) != groups_heads
        left, right = window_size
        assert right == 0
        output = torch.empty_like(q)
        for start, end in zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), strict=True):
            distance = torch.arange(end - start)[:, None] - torch.arange(end - start)[None, :]
            seen = (distance >= 0) & ((distance <= left) if left >= 0 else True)
            part = [x[start:end].transpose(0, 1)[None] for x in (q, k, v)]
            result = F.scaled_dot_product_attention(
                *part, attn_mask=seen, scale=scale, enable_gqa=True
            )
            output[start:end] = result[0].transpose(0, 1)
        return output

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", reference)
    monkeypatch.setattr(attention, "KERNEL_GROUPS_HEADS", groups_heads)
    batch = packed_batch([[7, 9, 3], [LENGTH]])
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, LENGTH, 8, generator=generator)
    key, value = (torch.randn(2, 2, LENGTH, 8, generator=generator) for _ in range(2))
    inputs = varlen_inputs(batch.document_ids, CPU)
    ours, _ = varlen_attention(
        torch.nn.Module(), query, key, value, None, scaling=0.3, sliding_window=window, **inputs
    )
    mask = document_mask(torch.from_numpy(batch.document_ids), window)
    expected = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(ours, expected.transpose(1, 2))


def test_varlen_arguments_reach_every_attention_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers hands keyword arguments of the base model down to the attention function, for
    every architecture."""
    calls: list[int | None] = []

    def recorded(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, **grouping):
        calls.append(None if window_size[0] < 0 else window_size[0] + 1)
        return torch.zeros_like(q)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", recorded)
    windows = {
        "mistral": [4, 4],
        "gemma3_text": [4, None],
        "qwen3": [4, None],
        "mixtral": [4, 4],
        "phi3": [4, 4],
    }
    for architecture in CONFIGS:
        if architecture == "gemma2":
            continue
        calls.clear()
        model = filled_model(architecture, "varlen", torch.float32)
        hidden_of(model, packed_batch(LENGTHS), "varlen")
        expected = windows.get(architecture)
        assert len(calls) == 2, architecture
        assert expected is None or calls == expected, architecture


def test_dropout_draws_apart_only_the_training_mode() -> None:
    model = filled_model("gpt2", "sdpa", torch.float32, resid_pdrop=0.5)
    batch = packed_batch(LENGTHS)
    with torch.no_grad():
        model.train()
        assert not torch.equal(hidden_of(model, batch, "sdpa"), hidden_of(model, batch, "sdpa"))
        model.eval()
        assert torch.equal(hidden_of(model, batch, "sdpa"), hidden_of(model, batch, "sdpa"))
