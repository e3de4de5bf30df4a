"""Greedy generation: the tokens of transformers' own `generate`, in the order of the prompts,
within positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from drillyard.evaluation.generate import generate
from drillyard.models.loss import LanguageModelLoss
from drillyard.parallel.ranks import Ranks

EOS, PAD, VOCABULARY = 0, 1, 64
ONE_RANK = Ranks(0, 1, 0, 1, torch.device("cpu"), None, 1)  # type: ignore[arg-type]


def llama() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, initializer_range=0.5, **sizes)
    ).eval()


def gpt2(positions: int = 64) -> PreTrainedModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        bos_token_id=EOS,
        eos_token_id=EOS,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=positions,
    )
    config.initializer_range = 0.5
    return GPT2LMHeadModel(config).eval()


def ours(model: PreTrainedModel, prompts: list[list[int]], **changes: Any) -> list[list[int]]:
    options = {"end_tokens": [EOS], "max_new_tokens": 12, "batch_size": 3} | changes
    return generate(LanguageModelLoss(model).eval(), prompts, ONE_RANK, **options)


def theirs(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=12,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens[: tokens.index(EOS)] if EOS in tokens else tokens


@pytest.mark.parametrize("make", [llama, gpt2])
def test_gives_the_tokens_of_transformers_for_prompts_of_all_lengths(make: Any) -> None:
    model = make()
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()
        for length in (9, 2, 5, 17, 3, 8, 1)
    ]
    assert ours(model, prompts) == [theirs(model, prompt) for prompt in prompts]


@pytest.mark.parametrize("ends", [[EOS], []])
def test_prompts_of_a_batch_are_answered_as_each_alone(ends: list[int]) -> None:
    model = llama()
    prompts = [[5], [6, 7, 8, 9, 10], [11, 12, 13]]
    alone = [ours(model, [prompt], end_tokens=ends)[0] for prompt in prompts]
    assert ours(model, prompts, end_tokens=ends) == alone
    assert ends or all(len(answer) == 12 for answer in alone)


def test_stops_where_learned_positions_end() -> None:
    model = gpt2(positions=16)
    short, long, over = [[5] * length for length in (4, 14, 20)]
    answers = ours(model, [over, short, long], batch_size=1)
    assert answers[0] == []
    assert len(answers[1]) <= 12
    assert len(answers[2]) <= 2


def test_leaves_the_model_as_it_was() -> None:
    model = llama()
    model.config.use_cache = False
    before = model.config._attn_implementation
    root = LanguageModelLoss(model).train()
    generate(root, [[5, 6]], ONE_RANK, end_tokens=[EOS], max_new_tokens=2, batch_size=1)
    assert root.training
    assert model.config.use_cache is False
    assert model.config._attn_implementation == before
