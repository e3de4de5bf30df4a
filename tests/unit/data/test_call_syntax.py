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


def xml(parameters: str, name: str = "geo.weather") -> str:
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


BAR, LOW = "\uff5c", "\u2581"
DEEPSEEK = {
    word: f"<{BAR}tool{LOW}{word.replace(' ', LOW)}{BAR}>"
    for word in ("calls begin", "call begin", "sep", "call end", "calls end")
}
WEATHER_JSON = json.dumps(WEATHER.arguments)


@pytest.mark.parametrize(
    "text",
    [
        xml(
            "<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
            '<parameter=units>\n["C", 1.5]\n</parameter>\n<parameter=cached>\nTrue\n</parameter>\n'
        )
        + "\n"
        + xml("", "set_timer"),
        (
            "<tool_call>geo.weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>units</arg_key>\n"
            '<arg_value>["C", 1.5]</arg_value>\n<arg_key>cached</arg_key>\n'
            "<arg_value>true</arg_value>\n</tool_call>\n<tool_call>set_timer\n</tool_call><|user|>"
        ),
        (
            f"{DEEPSEEK['calls begin']}{DEEPSEEK['call begin']}function{DEEPSEEK['sep']}geo.weather"
            f"\n```json\n{WEATHER_JSON}\n```{DEEPSEEK['call end']}\n{DEEPSEEK['call begin']}"
            f"function{DEEPSEEK['sep']}set_timer\n```json\n{{}}\n```{DEEPSEEK['call end']}"
            f"{DEEPSEEK['calls end']}"
        ),
        (
            f"{DEEPSEEK['calls begin']}{DEEPSEEK['call begin']}geo.weather{DEEPSEEK['sep']}"
            f"{WEATHER_JSON}{DEEPSEEK['call end']}{DEEPSEEK['call begin']}set_timer"
            f"{DEEPSEEK['sep']}{{}}{DEEPSEEK['call end']}{DEEPSEEK['calls end']}"
        ),
        (
            f'<{BAR}DSML{BAR}function_calls>\n<{BAR}DSML{BAR}invoke name="geo.weather">\n'
            f'<{BAR}DSML{BAR}parameter name="city" string="true">Paris</{BAR}DSML{BAR}parameter>\n'
            f'<{BAR}DSML{BAR}parameter name="days" string="false">3</{BAR}DSML{BAR}parameter>\n'
            f'<{BAR}DSML{BAR}parameter name="units" string="false">["C", 1.5]'
            f'</{BAR}DSML{BAR}parameter>\n<{BAR}DSML{BAR}parameter name="cached" string="false">'
            f"true</{BAR}DSML{BAR}parameter>\n</{BAR}DSML{BAR}invoke>\n<{BAR}DSML{BAR}invoke "
            f'name="set_timer">\n</{BAR}DSML{BAR}invoke>\n</{BAR}DSML{BAR}function_calls>'
        ),
        (
            '<minimax:tool_call>\n<invoke name="geo.weather">\n<parameter name="city">Paris'
            '</parameter>\n<parameter name="days">3</parameter>\n<parameter name="units">["C", 1.5]'
            '</parameter>\n<parameter name="cached">true</parameter>\n</invoke>\n'
            '<invoke name="set_timer">\n</invoke>\n</minimax:tool_call>'
        ),
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.geo.weather:0"
            f"<|tool_call_argument_begin|>{WEATHER_JSON}<|tool_call_end|><|tool_call_begin|>"
            "functions.set_timer:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
            "<|tool_calls_section_end|>"
        ),
        (
            "<|channel|>commentary to=functions.geo.weather <|constrain|>json<|message|>"
            f"{WEATHER_JSON}<|call|><|start|>assistant to=functions.set_timer<|channel|>commentary"
            " json<|message|>{}<|call|>"
        ),
        (
            '<|tool_call>call:geo.weather{cached:true,city:<|"|>Paris<|"|>,days:3,'
            'units:[<|"|>C<|"|>,1.5]}<tool_call|><|tool_call>call:set_timer{}<tool_call|>'
        ),
        (
            "<start_function_call>call:geo.weather{city:<escape>Paris<escape>,days:3,"
            "units:[<escape>C<escape>,1.5],cached:true}<end_function_call>"
            "<start_function_call>call:set_timer{}<end_function_call>"
        ),
        (
            "<|tool_call_start|>[geo.weather(city='Paris', days=3, units=[\"C\", 1.5],"
            " cached=true), set_timer()]<|tool_call_end|>"
        ),
        f"<tool_calls>[\n{as_json(WEATHER)},\n{as_json(TIMER)}\n]</tool_calls>",
        f"<tool_calls>\n{as_json(WEATHER)}\n{as_json(TIMER)}\n</tool_calls>",
        f"<TOOLCALL>[{as_json(WEATHER)}, {as_json(TIMER)}]</TOOLCALL>",
        (
            '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "geo.weather", "parameters":'
            f' {WEATHER_JSON}}}, {{"tool_call_id": "1", "tool_name": "set_timer",'
            ' "parameters": {}}]<|END_ACTION|>'
        ),
        f"<|python_start|><|python_end|>{as_json(WEATHER)}{as_json(TIMER, 'parameters')}",
        f"{as_json(WEATHER, 'parameters')}; {as_json(TIMER, 'parameters')}",
        f"<function=geo.weather>{WEATHER_JSON}</function><function=set_timer>{{}}</function>",
    ],
    ids=[
        "Qwen3-Coder",
        "GLM",
        "DeepSeek 3",
        "DeepSeek 3.1",
        "DeepSeek 3.2",
        "MiniMax-M2",
        "Kimi",
        "gpt-oss",
        "Gemma 4",
        "FunctionGemma",
        "LFM2",
        "Jamba",
        "MiniMax-M1",
        "Nemotron",
        "Command A",
        "Llama 4",
        "Llama 3, two",
        "Llama 3, tags",
    ],
)
@pytest.mark.parametrize(
    "before", ["", "<think>f is <tool_call> or {.\n</think>\n\n", "\n</think>\n"]
)
def test_the_notations_of_other_models_give_the_same_calls(text: str, before: str) -> None:
    content, calls = parse_calls(before + text)
    assert calls == [WEATHER, TIMER]
    assert "geo" not in content


STRANGE = 'a</tool_call>b<tool_call>c</parameter>\n<|tool_call|>[TOOL_CALLS]{"\n</think> d'


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>\n{as_json(FunctionCall('f', {'x': STRANGE}))}\n</tool_call>",
        f"<tool_call>\n{ {'name': 'f', 'arguments': {'x': STRANGE}} }\n</tool_call>",
        f"[TOOL_CALLS] [{as_json(FunctionCall('f', {'x': STRANGE}))}]",
        xml(f"<parameter=x>\n{STRANGE}\n</parameter>\n", "f"),
        f"<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{STRANGE}</arg_value>\n</tool_call>",
        f'<|tool_call>call:f{{x:<|"|>{STRANGE}<|"|>}}<tool_call|>',
    ],
    ids=["Hermes", "Hermes, Python", "Mistral", "Qwen3-Coder", "GLM", "Gemma 4"],
)
def test_tags_inside_of_a_text_are_text(text: str) -> None:
    assert parse_calls(text)[1] == [FunctionCall("f", {"x": STRANGE})]


@pytest.mark.parametrize(
    ("written", "schema", "value"),
    [
        ("12", {"type": "string"}, "12"),
        ("12", {"type": "integer"}, 12),
        ("12", {}, 12),
        ("12", {"type": ["string", "null"]}, "12"),
        ("null", {"type": ["string", "null"]}, None),
        ("None", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("true", {"type": "string", "enum": ["true", "false"]}, "true"),
        ("True", {"type": "boolean"}, True),
        ("[1]", {"type": "string"}, "[1]"),
        ("[1]", {"$ref": "#/$defs/list"}, [1]),
        ("[1", {"type": "array"}, "[1"),
        (" a ", {"type": "string"}, " a "),
        ("", {"type": "string"}, ""),
    ],
)
def test_the_schema_tells_text_from_numbers_where_the_notation_does_not(
    written: str, schema: dict[str, object], value: object
) -> None:
    defs = {"list": {"type": "array", "items": {"type": "integer"}}}
    schemas = {"f": {"type": "object", "properties": {"x": schema}, "$defs": defs}}
    for text in (
        xml(f"<parameter=x>\n{written}\n</parameter>\n", "f"),
        f"<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>",
        f'<invoke name="f">\n<parameter name="x">{written}</parameter>\n</invoke>',
    ):
        assert parse_calls(text, schemas) == ("", [FunctionCall("f", {"x": value})])


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
        "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</tool_call>",
        "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>",
        "<tool_call>f</tool_call> and more",
        '<invoke name="f">\n<parameter name="x">1</parameter>',
        "<|tool_call>call:f{x:1",
        "<|tool_call>f{}",
        "<|tool_call_start|>[f(1)]<|tool_call_end|>",
        "to=functions.f<|message|>1",
        '{"name": "f", "parameters": {}} and more',
        "[TOOL_CALLS]f[ARGS]{",
        "[TOOL_CALLS]f[ARGS][1]",
        "[" * 100_000,
        f"[f(a=0x{'f' * 5000})]",
    ],
)
def test_text_that_begins_like_a_call_and_is_none_is_refused(text: str) -> None:
    with pytest.raises((UnparseableCall, RecursionError)):
        parse_calls(text)


@given(st.text(alphabet='<tool_call>=/functionparametergky:"|{}1', max_size=60))
def test_no_text_of_tags_raises_anything_else(text: str) -> None:
    try:
        parse_calls(f"<tool_call>{text}", {"f": {}})
    except UnparseableCall:
        return


@given(st.text(alphabet="<tool_call>{}[]()\"':,=f1.\\ \n/|python_tag", max_size=60))
def test_no_text_raises_anything_else(text: str) -> None:
    try:
        _, calls = parse_calls(text)
    except UnparseableCall:
        return
    assert all(isinstance(call.arguments, dict) for call in calls)
