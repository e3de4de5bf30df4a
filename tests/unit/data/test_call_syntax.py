"""Function calls in text: every notation gives the same calls, and text that begins like one is
refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drillyard.data.call_syntax import FunctionCall, UnparseableCall, parse_calls

WEATHER = FunctionCall(
    "geo.weather", {"city": "Paris", "days": 3, "units": ["C", 1.5], "cached": True}
)
TIMER = FunctionCall("set_timer", {})


def as_json(call: FunctionCall, key: str = "arguments") -> str:
    return json.dumps({"name": call.name, key: call.arguments})


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>\n{as_json(WEATHER)}\n</tool_call>\n<tool_call>\n{as_json(TIMER)}\n</tool_call>",
        f"<tool_call>{as_json(WEATHER)}</tool_call><tool_call>{as_json(TIMER)}",
        f"[TOOL_CALLS] [{as_json(WEATHER)}, {as_json(TIMER)}]",
        f"[TOOL_CALLS]{WEATHER.name}[ARGS]{json.dumps(WEATHER.arguments)}[TOOL_CALLS]{TIMER.name}[CALL_ID]a1[ARGS]{{}}",
        f"<|tool_call|>[{as_json(WEATHER)}, {as_json(TIMER)}]",
        f"<|tool_call|>[{as_json(WEATHER)}, {as_json(TIMER)}]<|/tool_call|>",
        f"<|python_tag|>[{as_json(WEATHER, 'parameters')}, {as_json(TIMER, 'parameters')}]",
        f"```json\n[{as_json(WEATHER)}, {as_json(TIMER)}]\n```",
        "[geo.weather(city='Paris', days=3, units=('C', 1.5), cached=True), set_timer()]",
        (
            f'<functioncall> {as_json(WEATHER)}\n<functioncall> {{"name": "set_timer", "arguments":'
            " '{}'}"
        ),
    ],
    ids=[
        "Hermes",
        "Hermes, no end",
        "Mistral",
        "Mistral, ARGS",
        "Granite",
        "Phi-4",
        "Llama",
        "fenced",
        "Python",
        "Glaive",
    ],
)
def test_every_notation_gives_the_same_calls(text: str) -> None:
    assert parse_calls(text) == ("", [WEATHER, TIMER])


def test_the_text_before_a_call_is_kept() -> None:
    assert parse_calls(f"Let me see.\n<tool_call>\n{as_json(TIMER)}\n</tool_call>") == (
        "Let me see.",
        [TIMER],
    )


def test_the_quoted_arguments_of_glaive_have_escaped_quotes_and_line_breaks() -> None:
    text = """{"name": "note", "arguments": '{"text": "it\\'s\nlate", "n": 2}'}"""
    assert parse_calls(f"<functioncall> {text}") == (
        "",
        [FunctionCall("note", {"text": "it's\nlate", "n": 2})],
    )


@pytest.mark.parametrize("text", ["", "No idea.", "print", "f(1)", "1 + 2", "a < b"])
def test_other_text_has_no_call(text: str) -> None:
    assert parse_calls(text) == (text.strip(), [])


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}\n</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}}</tool_call> and more',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '{"name": "f", "parameters": {"a": 1',
        '{"answer": 42}',
        "[f(a=1, g(b=2)]",
        "<functioncall> nothing",
        "[TOOL_CALLS] 7",
        "[TOOL_CALLS]f[ARGS]{",
        "[TOOL_CALLS]f[ARGS][1]",
        "[" * 100_000,
        f"[f(a=0x{'f' * 5000})]",
    ],
)
def test_text_that_begins_like_a_call_and_is_none_is_refused(text: str) -> None:
    with pytest.raises((UnparseableCall, RecursionError)):
        parse_calls(text)


@given(st.text(alphabet="<tool_call>{}[]()\"':,=f1.\\ \n/|python_tag", max_size=60))
def test_no_text_raises_anything_else(text: str) -> None:
    try:
        _, calls = parse_calls(text)
    except UnparseableCall:
        return
    assert all(isinstance(call.arguments, dict) for call in calls)
