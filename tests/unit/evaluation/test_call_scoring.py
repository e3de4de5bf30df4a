"""Which answers count as the accepted calls, and in which category the others fall: the rules of
the BFCL."""

from __future__ import annotations

import itertools
import json
import math
import random
from typing import Any

import pytest
from tests.unit.evaluation import call_oracle

from drillyard.data.function_rows import function_calling_row
from drillyard.evaluation.call_scoring import CallVerdict, call_accuracy, judge_calls

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "shop.order",
            "parameters": {
                "type": "object",
                "properties": {
                    "item": {"type": "string"},
                    "count": {"type": "integer"},
                    "price": {"type": "number"},
                    "gift": {"type": "boolean"},
                    "sizes": {"type": "array", "items": {"type": "integer"}},
                    "filter": {"type": "object"},
                    "free": {},
                },
                "required": ["item", "count"],
            },
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]
ORDER = {
    "name": "shop.order",
    "arguments": {
        "item": ["New York cheese", "cheese"],
        "count": [2],
        "price": ["", 3],
        "gift": [True, ""],
        "sizes": ["", [1, 2]],
        "filter": ["", {"city": ["Paris", "Paris, France"], "open": ["", True]}],
        "free": ["", "any", 1],
    },
}
STOP = {"name": "stop", "arguments": {}}


def outcome(*calls: tuple[str, dict[str, Any]], accepted: Any = (ORDER,)) -> str:
    text = "".join(
        f"<tool_call>{json.dumps({'name': name, 'arguments': given})}</tool_call>"
        for name, given in calls
    )
    return judge_calls(TOOLS, list(accepted), text).outcome


def order(**changes: Any) -> tuple[str, dict[str, Any]]:
    given = {"item": "cheese", "count": 2, **changes}
    return "shop.order", {name: value for name, value in given.items() if value is not ...}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"item": "new york, CHEESE."},
        {"price": 3},
        {"price": 3.0},
        {"gift": True},
        {"sizes": [1, 2]},
        {"filter": {"city": "paris"}},
        {"filter": {"city": "Paris, France", "open": True}},
        {"free": "any"},
        {"free": 1},
    ],
)
def test_an_accepted_call_is_correct(changes: dict[str, Any]) -> None:
    assert outcome(order(**changes)) == "correct"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"item": ...}, "missing_parameter"),
        ({"colour": "red"}, "invented_parameter"),
        ({"count": "2"}, "wrong_type"),
        ({"count": 2.0}, "wrong_type"),
        ({"count": True}, "wrong_type"),
        ({"gift": "true"}, "wrong_type"),
        ({"item": 2}, "wrong_type"),
        ({"sizes": ["1", "2"]}, "wrong_type"),
        ({"sizes": 1}, "wrong_type"),
        ({"count": 3}, "wrong_value"),
        ({"item": "cheesecake"}, "wrong_value"),
        ({"gift": False}, "wrong_value"),
        ({"sizes": [2, 1]}, "wrong_value"),
        ({"sizes": [1]}, "wrong_value"),
        ({"filter": {"open": True}}, "wrong_value"),
        ({"filter": {"city": "Paris", "stars": 5}}, "wrong_value"),
        ({"free": True}, "wrong_value"),
    ],
)
def test_a_wrong_call_falls_into_its_category(changes: dict[str, Any], expected: str) -> None:
    assert outcome(order(**changes)) == expected


def test_names_and_numbers_of_calls() -> None:
    assert outcome(("shop_order", order()[1])) == "wrong_name"
    assert outcome() == "wrong_count"
    assert outcome(order(), order()) == "wrong_count"
    assert judge_calls(TOOLS, [ORDER], "I am sorry.").outcome == "wrong_count"
    assert (
        judge_calls(TOOLS, [ORDER], '<tool_call>{"name": "shop.order", "argu').outcome
        == "unparseable"
    )
    assert judge_calls(TOOLS, [], "Hello.").outcome == "unjudged"


def test_an_optional_parameter_that_the_accepted_call_names_must_be_there() -> None:
    accepted = {
        "name": "shop.order",
        "arguments": {"item": ["cheese"], "count": [2], "gift": [True]},
    }
    assert outcome(order(), accepted=[accepted]) == "missing_parameter"
    assert outcome(order(gift=True), accepted=[accepted]) == "correct"


def test_several_calls_count_in_any_order_and_each_once() -> None:
    other = {"name": "shop.order", "arguments": {"item": ["bread"], "count": [1, 2]}}
    calls = [order(), order(item="bread", count=1), ("stop", {})]
    accepted = [ORDER, other, STOP]
    assert {outcome(*some, accepted=accepted) for some in itertools.permutations(calls)} == {
        "correct"
    }
    assert outcome(order(), order(), ("stop", {}), accepted=accepted) == "wrong_value"


def test_a_call_that_fits_two_accepted_ones_is_given_to_the_one_that_needs_it() -> None:
    wide = {"name": "shop.order", "arguments": {"item": ["cheese", "bread"], "count": [2]}}
    narrow = {"name": "shop.order", "arguments": {"item": ["cheese"], "count": [2]}}
    assert outcome(order(), order(item="bread"), accepted=[wide, narrow]) == "correct"


def test_a_value_may_have_another_type_than_the_schema_where_the_reference_has() -> None:
    """simple_python_307 of the BFCL has True for a string."""
    accepted = {"name": "shop.order", "arguments": {"item": [True], "count": [2]}}
    assert outcome(order(item=True), accepted=[accepted]) == "correct"
    assert outcome(order(item=5), accepted=[accepted]) == "wrong_type"


LETTERS = {"type": "object", "properties": {"x": {"type": "string"}, "n": {"type": "integer"}}}
LETTER_TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": LETTERS}} for name in "fg"
]


def judged(accepted: list[dict[str, Any]], calls: list[tuple[str, dict[str, Any]]]) -> str:
    text = json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])
    return judge_calls(LETTER_TOOLS, accepted, text).outcome


def test_a_call_twice_is_not_given_by_one_such_call_and_another() -> None:
    twice = [{"name": "f", "arguments": {"x": ["A"]}}] * 2
    for calls in itertools.permutations([("f", {"x": "A"}), ("g", {"x": "A"})]):
        assert judged(twice, list(calls)) == "wrong_name"
    assert judged(twice, [("f", {"x": "A"}), ("f", {"x": "B"})]) == "wrong_value"
    assert judged(twice, [("f", {"x": "A"}), ("f", {"x": "a."})]) == "correct"


def test_several_calls_are_judged_as_the_best_of_all_pairings() -> None:
    draw = random.Random(0)
    seen = set()
    for _ in range(2_000):
        accepted, calls = [], []
        for _ in range(draw.randint(2, 4)):
            name, letters = draw.choice("ffg"), draw.sample("AB", draw.randint(1, 2))
            numbers = draw.choice(([1], [1, 2], ["", 1], ["", 2]))
            accepted.append({"name": name, "arguments": {"x": letters, "n": numbers}})
            number = draw.choice(numbers)
            calls.append((name, {"x": letters[0], **({} if number == "" else {"n": number})}))
        answer = call_oracle.damage(calls, draw)
        expected = call_oracle.category(LETTER_TOOLS, accepted, answer)
        assert judged(accepted, answer) == expected, (accepted, answer)
        seen.add(expected)
    assert seen == {*call_oracle.ORDER, "correct", "wrong_count"}


def test_many_calls_are_paired_exactly_and_fast() -> None:
    """Each accepted call takes the values up to its own number: one pairing in 40! is right."""
    accepted = [{"name": "f", "arguments": {"n": list(range(number + 1))}} for number in range(40)]
    calls = [("f", {"n": number}) for number in range(40)]
    assert judged(accepted, calls) == "correct"
    assert judged(accepted, [*calls[:-1], ("g", {"n": 39})]) == "wrong_name"
    assert judged(accepted, [*calls[:-1], ("f", {"n": 99})]) == "wrong_value"


def test_an_empty_text_is_a_value_in_a_row_of_openai() -> None:
    call = {"name": "f", "arguments": {"x": "", "where": {"city": "", "n": None}}}
    messages = [
        {"role": "user", "content": "?"},
        {
            "role": "assistant",
            "tool_calls": [{"function": {**call, "arguments": json.dumps(call["arguments"])}}],
        },
    ]
    row = function_calling_row({"messages": messages, "tools": LETTER_TOOLS}, {}, "here")

    def outcome_of(arguments: dict[str, Any]) -> str:
        return judged(row["accepted"], [("f", arguments)])

    assert outcome_of(call["arguments"]) == "correct"
    assert outcome_of({"where": {"city": "", "n": None}}) == "missing_parameter"
    assert outcome_of({"x": "", "where": {"n": None}}) == "wrong_value"
    assert outcome_of({"x": "", "where": {"city": ""}}) == "wrong_value"
    assert outcome_of({"x": "a", "where": {"city": "", "n": None}}) == "wrong_value"


def test_accepted_values_of_several_types_are_all_taken() -> None:
    accepted = [{"name": "f", "arguments": {"x": ["one", 1, None]}}]
    for value in ("one", 1, None):
        assert judged(accepted, [("f", {"x": value})]) == "correct"
    assert judged(accepted, [("f", {"x": 1.5})]) == "wrong_type"


def test_a_row_whose_accepted_call_its_own_schema_refuses_is_unjudged() -> None:
    tools = [
        {
            "type": "function",
            "function": {"name": "f", "parameters": {**LETTERS, "required": ["n"]}},
        }
    ]
    accepted = [{"name": "f", "arguments": {"x": ["A"]}}]
    assert judge_calls(tools, accepted, '[f(x="A")]').outcome == "unjudged"
    assert judge_calls(tools, accepted, "Hello.").outcome == "unjudged"


def test_accuracy_leaves_out_what_cannot_be_judged() -> None:
    verdicts = [
        CallVerdict("correct"),
        CallVerdict("wrong_type"),
        CallVerdict("unjudged"),
        CallVerdict("correct"),
    ]
    figures = call_accuracy(verdicts)
    assert (figures["judged"], figures["wrong_type"], figures["unjudged"]) == (3, 1, 1)
    assert figures["accuracy"] == pytest.approx(2 / 3)
    assert math.isnan(call_accuracy([CallVerdict("unjudged")])["accuracy"])
