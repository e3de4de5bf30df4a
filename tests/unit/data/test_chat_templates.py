"""Tokens and masks of chats are those of plain transformers, for templates in the shape of ten
model families."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.unit.data.chat_templates import MARKED, QWEN3, plain
from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from transformers import PreTrainedTokenizerFast

from drillyard.config.run import RunConfig
from drillyard.data.mapped_sequences import IGNORED
from drillyard.data.prepared_data import prepare
from drillyard.data.tokenizer import _as_pretrained, _train

SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|assistant|>",
    "<|user|>",
    "<|system|>",
    "<|end|>",
    "<|User|>",
    "<|Assistant|>",
    "<|end_of_sentence|>",
    "<|START_OF_TURN_TOKEN|>",
    "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>",
    "<|END_OF_TURN_TOKEN|>",
]
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello, who are you?"},
    {"role": "assistant", "content": "Naïve ✓ answer\n\nin two parts."},
    {"role": "user", "content": " and now? "},
    {"role": "assistant", "content": "\nThe end"},
]


@cache
def byte_level() -> PreTrainedTokenizerFast:
    tokenizer = _as_pretrained(_train(400, iter(message["content"] * 3 for message in TALK)))
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    return tokenizer


@cache
def metaspace() -> PreTrainedTokenizerFast:
    """In the manner of Llama 2: a space is put before every text that is tokenised."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.ByteFallback()
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=tokens, show_progress=False)
    backend.train_from_iterator([message["content"] for message in TALK] * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    return tokenizer


Documents = Callable[..., list[tuple[list[int], list[bool]]]]


@pytest.fixture
def documents(
    make_config: Callable[..., RunConfig], write_rows: Callable[..., Path], tmp_path: Path
) -> Documents:
    """Tokens of each document that a conversation becomes, and whether each is learnt."""

    def made(
        tokenizer: PreTrainedTokenizerFast,
        template: str,
        messages: Any,
        loss_on: str = "completion",
    ) -> list[tuple[list[int], list[bool]]]:
        with_template = copy.deepcopy(tokenizer)
        with_template.chat_template = template
        directory = Path(tempfile.mkdtemp(dir=tmp_path))
        with_template.save_pretrained(directory)
        settings = {
            "format": "chat",
            "tokenizer": str(directory),
            "loss_on": loss_on,
            "packing": False,
        }
        data = prepare(
            make_config(write_rows([{"messages": messages}]), sequence_length=1024, **settings)
        )
        batch = data.train.sources[0].read(range(len(data.train.sources[0])))
        found = []
        for row, inside in enumerate(batch.document_ids >= 0):
            learnt = [False, *(batch.labels[row][inside][:-1] != IGNORED).tolist()]
            found.append((batch.input_ids[row][inside].tolist(), learnt))
        return found

    return made


# transformers leaves out a last character that is the second token of its kind (a line end after
# Metaspace's space).
ENDING_IN_A_TOKEN = ["llama2", "llama3", "mistral", "deepseek", "cohere"]


@pytest.mark.parametrize(
    ("make", "name"),
    [*((byte_level, name) for name in MARKED), *((metaspace, name) for name in ENDING_IN_A_TOKEN)],
)
def test_tokens_and_masks_are_those_of_transformers_with_and_without_generation_blocks(
    make: Any, name: str, documents: Documents
) -> None:
    tokenizer = make()
    expected: Any = tokenizer.apply_chat_template(
        TALK, chat_template=MARKED[name], return_dict=True, return_assistant_tokens_mask=True
    )
    assert 0 < sum(expected["assistant_masks"]) < len(expected["input_ids"])
    for template in (MARKED[name], plain(MARKED[name])):
        ((tokens, learnt),) = documents(tokenizer, template, TALK)
        assert tokens == expected["input_ids"]
        assert learnt == [bool(flag) for flag in expected["assistant_masks"]]


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral"])
def test_a_weight_of_zero_and_the_last_turn_alone(name: str, documents: Documents) -> None:
    tokenizer = byte_level()
    whole: Any = tokenizer.apply_chat_template(
        TALK, chat_template=MARKED[name], return_dict=True, return_assistant_tokens_mask=True
    )
    first: Any = tokenizer.apply_chat_template(
        TALK[:3], chat_template=MARKED[name], return_dict=True, return_assistant_tokens_mask=True
    )
    flags = [bool(flag) for flag in whole["assistant_masks"]]
    of_first = [bool(flag) for flag in first["assistant_masks"]] + [False] * (
        len(flags) - len(first["input_ids"])
    )
    of_last = [flag and not other for flag, other in zip(flags, of_first, strict=True)]
    for template in (MARKED[name], plain(MARKED[name])):
        without_first = [
            {**m, "weight": 0} if n == 2 else {**m, "weight": 1} for n, m in enumerate(TALK)
        ]
        assert documents(tokenizer, template, without_first) == [(whole["input_ids"], of_last)]
        assert documents(tokenizer, template, TALK, "last") == [(whole["input_ids"], of_last)]
        everything = [True] * len(flags)
        masked = [flag and not other for flag, other in zip(everything, of_first, strict=True)]
        ((tokens, learnt),) = documents(tokenizer, template, without_first, "all")
        assert (tokens, learnt[1:]) == (whole["input_ids"], masked[1:])
        trailing = [*TALK, {"role": "user", "content": "Bye"}]
        assert documents(tokenizer, template, trailing, "last") == [(whole["input_ids"], of_last)]


def test_turns_of_qwen3_are_learnt_as_it_renders_each_when_nothing_follows(
    documents: Documents,
) -> None:
    """A turn that is followed by another question loses its `<think>` block in the template."""
    tokenizer = byte_level()

    def rendered(messages: list[dict[str, Any]], prompt: bool = False) -> str:
        text: Any = tokenizer.apply_chat_template(
            messages, chat_template=QWEN3, tokenize=False, add_generation_prompt=prompt
        )
        return str(text)

    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    long = [
        *TALK,
        {"role": "user", "content": "Add"},
        {"role": "assistant", "reasoning_content": "I call.", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "reasoning_content": "Now I know.", "content": "Two."},
    ]
    # The call and the answer after it share one document: both keep their thoughts.
    prefixes = [(TALK[:2], TALK[2:3]), (TALK[:4], TALK[4:5]), (long[:6], long[6:])]
    for (tokens, learnt), (context, turns) in zip(
        documents(tokenizer, QWEN3, long), prefixes, strict=True
    ):
        assert tokenizer.decode(tokens) == rendered([*context, *turns])
        expected = ""
        for number, message in enumerate(turns):
            if message["role"] == "assistant":
                before = rendered([*context, *turns[:number]], prompt=True)
                expected += rendered([*context, *turns[: number + 1]]).removeprefix(before)
        assert (
            tokenizer.decode([token for token, flag in zip(tokens, learnt, strict=True) if flag])
            == expected
        )
        assert expected.startswith("<think>\n")
    ((tokens, _),) = documents(tokenizer, QWEN3, long, "last")
    assert tokenizer.decode(tokens) == rendered(long)
