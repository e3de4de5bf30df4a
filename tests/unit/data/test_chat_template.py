"""Conversations: loss on the assistant's turns, found exactly or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from drillyard.config.run import RunConfig
from drillyard.data.chat_template import ChatRenderer
from drillyard.data.mapped_sequences import IGNORED
from drillyard.data.prepared_data import prepare
from drillyard.data.row_formats import RowFormat, Segments
from drillyard.errors import UserError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}[{{ m.role }}] {% if m.role == 'assistant' %}{% generation %}{{"
    " m.content }}</s>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
FORGETFUL = (
    "{% for m in messages %}[{{ m.role }}]{% if loop.last and m.role == 'assistant' %}!{% endif"
    " %}{{ m.content }};{% endfor %}"
)
TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "So long"},
]


def learnt(template: str, messages: Any, loss_on: str = "completion") -> list[str]:
    return [
        text
        for document in documents(template, messages, loss_on)
        for text, loss in document
        if loss
    ]


def documents(template: str, messages: Any, loss_on: str = "completion") -> list[Segments]:
    row = RowFormat("chat").canonical({"messages": messages}, "here")
    return ChatRenderer(template, {}, loss_on).render(row, "here").documents


def test_turns_are_found_by_rendering_prefixes() -> None:
    assert learnt(CHATML, TALK) == ["Hello<|im_end|>\n", "So long<|im_end|>\n"]


def test_turns_are_found_by_generation_blocks() -> None:
    assert learnt(MARKED, TALK) == ["Hello</s>", "So long</s>"]


def test_segments_together_are_the_whole_rendering() -> None:
    for template in (CHATML, MARKED):
        (segments,) = documents(template, TALK)
        (everything,) = learnt(template, TALK, "all")
        assert "".join(text for text, _ in segments) == everything


def test_turns_that_render_differently_when_others_follow_are_learnt_from_documents_of_their_own() -> (  # noqa: E501
    None
):
    assert documents(FORGETFUL, TALK) == [
        [("[user]Hi;", False), ("[assistant]!Hello;", True), ("", False)],
        [
            ("[user]Hi;[assistant]Hello;[user]Bye;", False),
            ("[assistant]!So long;", True),
            ("", False),
        ],
    ]
    assert len(documents(FORGETFUL, TALK, "all")) == 1


def test_the_form_of_sharegpt_is_understood() -> None:
    assert learnt(
        CHATML, [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    ) == ["Hello<|im_end|>\n"]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "non-empty list"),
        ("Hi", "JSON"),
        ([{"role": "user", "content": ""}, "x"], "message 2: .*JSON"),
        ([{"role": "user", "content": ""}, 3], "message 2 is not"),
    ],
)
def test_malformed_conversations_are_errors(messages: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        learnt(CHATML, messages)


def test_what_a_template_refuses_is_reported() -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UserError, match="roles must alternate"):
        learnt(template, TALK)


def test_a_chat_is_tokenised_as_its_template_writes_it(
    tokenizer_directory: Path,
    tmp_path: Path,
    make_config: Callable[..., RunConfig],
    write_rows: Callable[..., Path],
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_directory)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(tmp_path / "chat")
    path = write_rows([{"messages": TALK}])
    data = prepare(
        make_config(path, format="chat", tokenizer=str(tmp_path / "chat"), sequence_length=128)
    )
    batch = data.train.read([(0, 0)])
    used = batch.input_ids[0][batch.document_ids[0] >= 0].tolist()
    assert used == tokenizer.apply_chat_template(TALK, tokenize=True, return_dict=False)
    text = data.tokenizer.decode(batch.labels[0][batch.labels[0] != IGNORED])
    assert text == "Hello<|im_end|>\nSo long<|im_end|>\n"


def test_a_tokenizer_without_a_chat_template_is_reported(
    make_config: Callable[..., RunConfig], write_rows: Callable[..., Path]
) -> None:
    path = write_rows([{"messages": TALK}])
    with pytest.raises(UserError, match="chat template"):
        prepare(make_config(path, format="chat"))


def test_completions_need_a_tokenizer_that_can_end_them(
    tokenizer_directory: Path,
    tmp_path: Path,
    make_config: Callable[..., RunConfig],
    write_rows: Callable[..., Path],
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_directory)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "endless")
    path = write_rows([{"prompt": "a", "completion": "b"}])
    with pytest.raises(UserError, match="end-of-sequence"):
        prepare(make_config(path, format="prompt-completion", tokenizer=str(tmp_path / "endless")))
