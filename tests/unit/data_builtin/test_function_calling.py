"""Facts about `builtin:function-calling`: parts share no call, questions hold every value, rows
never change."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import pytest

from drillyard.data.builtin import content_key, documents, held_out_parts
from drillyard.data.builtin.function_calling import functions
from drillyard.data.row_formats import RowFormat
from drillyard.evaluation.call_scoring import judge_calls

NAME = "function-calling"
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def parts() -> dict[str, Rows]:
    held_out = {part: list(documents(NAME, {"seed": 3}, part)) for part in held_out_parts(NAME)}
    return {"train": list(documents(NAME, {"examples": 5000}, "train"))} | held_out


def calls(rows: Rows) -> Iterator[tuple[str, str]]:
    for row in rows:
        for call in row["messages"][1]["tool_calls"]:
            yield (
                call["function"]["name"],
                json.dumps(call["function"]["arguments"], sort_keys=True),
            )


def test_parts_share_no_call_whatever_their_seeds(parts: dict[str, Rows]) -> None:
    found = {part: set(calls(rows)) for part, rows in parts.items()}
    assert not found["train"] & found["calls"]
    assert not {name for name, _ in found["functions"]} & {
        name for name, _ in found["train"] | found["calls"]
    }
    assert {name for name, _ in found["calls"]} <= {name for name, _ in found["train"]}


def test_no_answer_of_a_held_out_part_is_there_twice(parts: dict[str, Rows]) -> None:
    for part in held_out_parts(NAME):
        answers = [json.dumps(row["messages"][1]) for row in parts[part]]
        assert len(set(answers)) == len(answers) == 200


def test_no_constant_answer_is_right_often(parts: dict[str, Rows]) -> None:
    answers = Counter(json.dumps(row["messages"][1]) for row in parts["calls"])
    assert max(answers.values()) / 200 < 0.03


def test_every_function_is_asked_for_and_listed_among_others(parts: dict[str, Rows]) -> None:
    used = {name for part in parts.values() for name, _ in calls(part)}
    assert used == {function.name for function in functions()}
    for row in parts["train"]:
        listed = [tool["function"]["name"] for tool in row["tools"]]
        called = [call["function"]["name"] for call in row["messages"][1]["tool_calls"]]
        assert len(set(listed)) == len(listed)
        assert set(called) < set(listed)
    assert (
        0.1 < sum(len(row["messages"][1]["tool_calls"]) == 2 for row in parts["train"]) / 5000 < 0.2
    )


def test_values_stand_in_the_question(parts: dict[str, Rows]) -> None:
    for row in parts["train"]:
        question = row["messages"][0]["content"].lower()
        for call in row["messages"][1]["tool_calls"]:
            for value in call["function"]["arguments"].values():
                assert isinstance(value, bool) or str(value).lower() in question


def test_the_reference_answers_of_all_parts_are_correct(parts: dict[str, Rows]) -> None:
    form = RowFormat(NAME)
    for row in (row for part in parts.values() for row in part[:200]):
        found = form.canonical(row, "here")
        written = [call["function"] for call in found["messages"][1]["tool_calls"]]
        assert (
            judge_calls(found["tools"], found["accepted"], json.dumps(written[::-1])).outcome
            == "correct"
        )


def test_rows_are_those_of_this_version(parts: dict[str, Rows]) -> None:
    """A change of rows must raise VERSION: runs that continue would train on other data."""
    digest = sha256(
        json.dumps([parts["train"][:500], parts["calls"], parts["functions"]]).encode()
    ).hexdigest()
    assert (content_key(NAME, {}), digest[:16]) == (
        "function-calling version=1 examples=50000 seed=0 held_out_examples=200",
        "3f118c4619108268",
    )
