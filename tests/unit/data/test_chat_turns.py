"""Which turns of a chat are learnt (data.train_on), rows of Alpaca, and the first rows of a
source."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.data.chat_templates import FILES, plain
from tests.unit.data.test_chat_template import CHATML, MARKED, TALK

from drillyard.config.run import RunConfig
from drillyard.config.run_checks import check_run
from drillyard.config.run_data import DataConfig
from drillyard.data.chat_template import ChatRenderer
from drillyard.data.prepared_data import prepare
from drillyard.data.row_formats import RowFormat, row_format
from drillyard.deprecation import RenamedWarning
from drillyard.errors import UserError

MakeConfig = Callable[..., RunConfig]
WriteRows = Callable[..., Path]


def documents(template: str, messages: Any, loss_on: str) -> list[list[tuple[str, bool]]]:
    row = RowFormat("chat").canonical({"messages": messages}, "here")
    return ChatRenderer(template, {}, loss_on).render(row, "here").documents


@pytest.mark.parametrize(
    "template", [CHATML, MARKED, plain(FILES["qwen3"])], ids=["prefix", "marked", "Qwen3"]
)
def test_each_learns_every_turn_from_a_document_that_ends_with_it(template: str) -> None:
    found = documents(template, TALK, "each")
    assert found == [documents(template, TALK[:stop], "last")[0] for stop in (2, 4)]
    answers = [[text for text, loss in document if loss] for document in found]
    assert [len(texts) for texts in answers] == [1, 1]
    assert "Hello" in answers[0][0]
    assert "So long" in answers[1][0]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_a_turn_of_weight_zero_has_no_document_of_its_own(template: str) -> None:
    talk = [TALK[0], {**TALK[1], "weight": 0}, *TALK[2:]]
    assert documents(template, talk, "each") == documents(template, TALK, "last")


ANSWER_FIRST = [TALK[1], *TALK]
"""As many conversations of ShareGPT begin."""


@pytest.mark.parametrize("loss_on", ["completion", "last", "each"])
def test_an_answer_to_nothing_is_context_where_the_template_has_no_empty_conversation(
    loss_on: str,
) -> None:
    needs_a_message = "{% set first = messages[0].role %}" + CHATML
    row = RowFormat("chat").canonical({"messages": ANSWER_FIRST}, "here")
    rendered = ChatRenderer(needs_a_message, {}, loss_on).render(row, "here")
    answers = [text for document in rendered.documents for text, loss in document if loss]
    assert answers == ["Hello<|im_end|>\n", "So long<|im_end|>\n"][loss_on == "last" :]
    assert rendered.counts == ["begins_with_assistant"]
    assert rendered.documents[0][0][0].startswith("<|im_start|>assistant\nHello")
    alone = RowFormat("chat").canonical({"messages": ANSWER_FIRST[:1]}, "here")
    assert ChatRenderer(needs_a_message, {}, loss_on).render(alone, "here").documents == []


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_an_answer_to_nothing_is_learnt_where_the_template_has_one(template: str) -> None:
    (found,) = documents(template, ANSWER_FIRST, "completion")
    assert len([text for text, loss in found if loss]) == 3


def test_train_on_decides_the_loss_of_a_chat(make_config: MakeConfig) -> None:
    found = {
        turns: row_format(make_config("x", format="chat", train_on=turns).data).loss_on
        for turns in ("all", "last", "each")
    }
    assert found == {"all": "completion", "last": "last", "each": "each"}


def test_the_old_form_of_last_still_works_with_a_warning() -> None:
    settings = {"source": "a", "format": "chat", "sequence_length": 8}
    with pytest.warns(RenamedWarning, match="data.train_on: last"):
        old = DataConfig.model_validate({**settings, "loss_on": "last"})
    assert old == DataConfig.model_validate({**settings, "train_on": "last"})


@pytest.mark.parametrize(
    "settings",
    [
        {"format": "text", "train_on": "last"},
        {"format": "chat", "train_on": "each", "loss_on": "all"},
    ],
)
def test_a_choice_of_turns_that_has_no_effect_is_refused(
    settings: dict[str, Any], make_config: MakeConfig
) -> None:
    problems = check_run(make_config("builtin:text-to-sql", **settings))
    assert ("data", "train_on") in [problem.path for problem in problems]


def test_an_alpaca_row_is_a_conversation() -> None:
    form = RowFormat("chat")
    row = {
        "instruction": "Add.",
        "input": "1 2",
        "output": "3",
        "system": "Count.",
        "history": [["a", "b"]],
    }
    assert form.canonical(row, "here")["messages"] == [
        {"role": "system", "content": "Count."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "Add.\n1 2"},
        {"role": "assistant", "content": "3"},
    ]
    short = form.canonical(
        {"instruction": "Add.", "input": "", "output": "3", "history": None}, "here"
    )
    assert [message["content"] for message in short["messages"]] == ["Add.", "3"]


@pytest.mark.parametrize(
    "wrong", [{"input": 3}, {"history": [["a"]]}, {"history": "a"}, {"output": {}}]
)
def test_an_alpaca_row_that_is_no_text_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"here: .*{next(iter(wrong))}"):
        RowFormat("chat").canonical({"instruction": "a", "output": "b", **wrong}, "here")


def test_max_samples_takes_the_first_rows(make_config: MakeConfig, write_rows: WriteRows) -> None:
    path = write_rows([{"text": f"number {i}"} for i in range(9)])

    def rows(limit: int | None) -> int:
        source = {"path": str(path), **({} if limit is None else {"max_samples": limit})}
        (part,) = prepare(make_config(source)).report.parts.values()
        return int(part["rows"])

    assert [rows(limit) for limit in (None, 4, 1, 100)] == [9, 4, 1, 9]
