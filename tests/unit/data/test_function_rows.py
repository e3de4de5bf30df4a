"""Function-calling rows of every layout become one conversation, and what is no schema or call is
refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from drillyard.data.file_readers import read_files
from drillyard.data.function_rows import BROKEN_CALL, function_calling_row, question_of
from drillyard.data.row_formats import RowFormat
from drillyard.errors import UserError

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "Weather of a city", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"name": "weather", "arguments": {"city": "Paris"}}
ASKED = {"role": "user", "content": "Weather in Paris?"}
HERMES_SYSTEM = (
    f"You are a function calling AI model. <tools> {json.dumps([TOOL])} </tools> Use the following"
    " schema"
)

GLAIVE = {
    "system": (
        "SYSTEM: You are a helpful assistant with access to the following functions. Use them if"
        " required -\n" + json.dumps(FUNCTION, indent=4)
    ),
    "chat": (
        'USER: Weather in Paris?\n\n\nASSISTANT: <functioncall> {"name": "weather", "arguments": '
        '\'{"city": "Paris"}\'} <|endoftext|>\n\n\nFUNCTION RESPONSE: {"sky": "clear"}\n\n\n'
        "ASSISTANT: It is clear. <|endoftext|>"
    ),
}
XLAM = {
    "query": "Weather in Paris?",
    "tools": json.dumps(
        [{**FUNCTION, "parameters": {"city": {"type": "str", "description": "c"}}}]
    ),
    "answers": json.dumps([CALL]),
}
OPENAI = {
    "messages": [
        ASKED,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
                }
            ],
        },
    ],
    "tools": [TOOL],
}
HERMES = {
    "conversations": [
        {"from": "system", "value": HERMES_SYSTEM},
        {"from": "human", "value": "Weather in Paris?"},
        {
            "from": "gpt",
            "value": (
                "<tool_call>\n{'arguments': {'city': 'Paris'}, 'name': 'weather'}\n</tool_call>\n"
            ),
        },
        {"from": "tool", "value": '<tool_response>\n{"sky": "clear"}\n</tool_response>'},
    ]
}
SHAREGPT = {
    "conversations": [
        {"from": "human", "value": "Weather in Paris?"},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": "clear"},
    ],
    "tools": json.dumps([FUNCTION]),
}
BFCL = {
    "question": [[ASKED]],
    "function": [{**FUNCTION, "parameters": {**SCHEMA, "type": "dict"}}],
    "ground_truth": [{"weather": {"city": ["Paris", "Paris, France"]}}],
}


def canonical(row: dict[str, Any], **columns: str) -> dict[str, Any]:
    return function_calling_row(row, columns, "here")


@pytest.mark.parametrize("row", [GLAIVE, XLAM, OPENAI, HERMES, SHAREGPT, BFCL])
def test_every_layout_has_the_same_question_function_and_call(row: dict[str, Any]) -> None:
    found = canonical(row)
    (function,) = [tool["function"] for tool in found["tools"]]
    assert function["name"] == "weather"
    assert function["parameters"]["type"] == "object"
    assert function["parameters"]["properties"]["city"]["type"] == "string"
    assert function["parameters"]["required"] == ["city"]
    asked = question_of(found["messages"])
    assert asked[-1] == ASKED
    (call,) = found["messages"][len(asked)]["tool_calls"]
    assert call["function"] == CALL
    assert found["accepted"][0]["name"] == "weather"
    assert found["accepted"][0]["arguments"]["city"][0] == "Paris"


def test_a_conversation_of_glaive_keeps_its_turns_without_end_tokens() -> None:
    roles = [(message["role"], message.get("content")) for message in canonical(GLAIVE)["messages"]]
    assert roles == [
        ("system", "You are a helpful assistant."),
        ("user", "Weather in Paris?"),
        ("assistant", ""),
        ("tool", '{"sky": "clear"}'),
        ("assistant", "It is clear."),
    ]


def test_a_conversation_of_glaive_without_functions() -> None:
    row = {
        "system": "SYSTEM: You are helpful.",
        "chat": "USER: Hi\n\n\nASSISTANT: Hello <|endoftext|>",
    }
    found = canonical(row)
    assert found["tools"] is None
    assert found["accepted"] == []
    assert [message["content"] for message in found["messages"]] == [
        "You are helpful.",
        "Hi",
        "Hello",
    ]


def test_the_system_message_that_lists_tools_in_hermes_rows_is_left_to_the_template() -> None:
    messages = canonical(HERMES)["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[-1]["content"] == '{"sky": "clear"}'


@pytest.mark.parametrize(
    "listed",
    [json.dumps([TOOL]), f"{json.dumps(TOOL)}\n{json.dumps({'name': 'other', 'parameters': {}})}"],
)
def test_the_usual_prompt_of_hermes_names_its_tags_before_it_uses_them(listed: str) -> None:
    prompt = (
        "Signatures are within <tools> </tools> XML tags. Here are the tools:"
        f" <tools>{listed}</tools> Use them."
    )
    turns = [{"from": "system", "value": prompt}, *HERMES["conversations"][1:]]
    found = canonical({"conversations": turns})
    assert (
        found["tools"][0]["function"]["name"] == "weather"
        and len(found["tools"]) == listed.count("\n") + 1
    )
    assert found["messages"][0]["role"] == "user"


def test_a_system_message_without_tools_between_the_tags_stays() -> None:
    turns = [
        {"from": "system", "value": "Tools come in <tools></tools>."},
        *HERMES["conversations"][1:],
    ]
    found = canonical({"conversations": turns})
    assert found["messages"][0]["role"] == "system" and not found["tools"]


def test_a_parameter_of_xlam_may_be_called_type() -> None:
    tools = [{**FUNCTION, "parameters": {"type": {"type": "str"}, "city": {"type": "str"}}}]
    (tool,) = canonical({**XLAM, "tools": json.dumps(tools)})["tools"]
    assert tool["function"]["parameters"]["properties"].keys() == {"type", "city"}


def test_results_name_the_calls_that_they_answer() -> None:
    found = canonical(SHAREGPT)["messages"]
    assert found[1]["tool_calls"][0]["id"] == found[2]["tool_call_id"] == "call00000"
    assert canonical(OPENAI)["messages"][1]["tool_calls"][0]["id"] == "call_1"


def test_a_call_that_cannot_be_read_is_not_learnt() -> None:
    chat = (
        'USER: Hi\n\n\nASSISTANT: <functioncall> {"name": weather} <|endoftext|>\n\n\nASSISTANT: So'
        " be it."
    )
    answers = [
        message
        for message in canonical({**GLAIVE, "chat": chat})["messages"]
        if message["role"] == "assistant"
    ]
    assert [(message.get("weight"), BROKEN_CALL in message) for message in answers] == [
        (0, True),
        (None, False),
    ]


def test_parameters_of_xlam_become_a_schema() -> None:
    parameters = {
        "a": {"type": "List[int]", "description": "x"},
        "b": {"type": "str, optional", "description": "x"},
        "c": {"type": "float", "description": "x", "default": 1.5},
        "d": {"type": "Union[int, str]", "description": "x"},
        "e": {"type": "Dict[str, Any]", "description": "x"},
    }
    (tool,) = canonical(
        {**XLAM, "tools": [{**FUNCTION, "parameters": parameters}], "answers": "[]"}
    )["tools"]
    schema = tool["function"]["parameters"]
    assert schema["required"] == ["a", "d", "e"]
    types = {name: value.get("type") for name, value in schema["properties"].items()}
    assert types == {"a": "array", "b": "string", "c": "number", "d": None, "e": "object"}
    assert schema["properties"]["a"]["items"] == {"type": "integer"}
    assert schema["properties"]["c"]["default"] == 1.5


def test_types_of_the_bfcl_become_those_of_json_schema() -> None:
    properties = {
        "a": {"type": "float"},
        "b": {"type": "tuple", "items": {"type": "any"}},
        "c": {"type": "dict", "properties": {"d": {"type": "integer"}}},
        "e": {"type": "any"},
    }
    function = {
        "name": "m.f",
        "parameters": {"type": "dict", "properties": properties, "required": ["a"]},
    }
    (tool,) = canonical({"question": "?", "function": function})["tools"]
    assert tool["function"]["parameters"]["properties"] == {
        "a": {"type": "number"},
        "b": {"type": "array", "items": {}},
        "c": {"type": "object", "properties": {"d": {"type": "integer"}}},
        "e": {},
    }


def test_the_reference_call_of_a_bfcl_row_leaves_out_what_may_be_left_out() -> None:
    properties = {name: {"type": "string"} for name in "abcd"} | {"e": {"type": "dict"}}
    row = {
        "question": "?",
        "function": {
            "name": "f",
            "parameters": {"type": "dict", "properties": properties, "required": ["a", "d"]},
        },
        "ground_truth": [
            {
                "f": {
                    "a": ["x", "y"],
                    "b": ["", "z"],
                    "d": ["", "w"],
                    "e": [{"k": ["v"], "l": ["", 1]}],
                }
            }
        ],
    }
    answer = canonical(row)["messages"][-1]["tool_calls"][0]["function"]
    assert answer == {"name": "f", "arguments": {"a": "x", "d": "w", "e": {"k": "v"}}}


def test_columns_can_have_other_names() -> None:
    row = {"talk": OPENAI["messages"], "offered": [TOOL], "system": "a", "chat": "b"}
    assert (
        canonical(row, messages="talk", tools="offered")["accepted"]
        == canonical(OPENAI)["accepted"]
    )


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "dict", "required": ["city"]},
        {"type": "object", "properties": {"at": {"type": "object", "required": ["lat"]}}},
        {"$ref": "#/$defs/P", "$defs": {"P": SCHEMA}},
        {"type": ["object", "null"], "properties": {"city": True}},
        {"allOf": [SCHEMA], "additionalProperties": False},
    ],
)
def test_schemas_are_those_of_json_schema(parameters: dict[str, Any]) -> None:
    found = canonical({**BFCL, "function": [{"name": "weather", "parameters": parameters}]})
    assert found["tools"][0]["function"]["parameters"].keys() >= parameters.keys()
    assert found["accepted"][0]["name"] == "weather"


def test_rows_of_the_bfcl_in_parquet_are_those_in_json(tmp_path: Path) -> None:
    other = {
        "question": [[ASKED]],
        "function": [
            {
                "name": "m.area",
                "parameters": {
                    "type": "dict",
                    "properties": {"sides": {"type": "array", "items": {"type": "float"}}},
                    "required": ["sides"],
                },
            }
        ],
        "ground_truth": [{"m.area": {"sides": [[1.5, 2.5]], "unit": ["", "cm"]}}],
    }
    nested = {
        **BFCL,
        "ground_truth": [{"weather": {"city": ["Paris"]}}, {"at": {"place": [{"lat": [1.5]}]}}],
    }
    rows = [BFCL, other, nested]
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    (batch,) = read_files([path])
    for row, (_, found) in zip(rows, batch.rows(), strict=True):
        written, expected = canonical(found), canonical(row)
        for column in ("messages", "tools", "accepted"):
            assert written[column] == expected[column]


@pytest.mark.parametrize(
    ("tool", "found"),
    [
        ({"description": "no name"}, "description"),
        ({"name": "f", "parameters": [1]}, "tool f: parameters"),
        ({"name": "f", "parameters": {"type": "string"}}, "tool f: parameters"),
        (
            {"name": "f", "parameters": {"type": "object", "properties": ["a"]}},
            "properties of parameters",
        ),
        (
            {"name": "f", "parameters": {"type": "object", "properties": {"a": "text"}}},
            "parameter a",
        ),
        (
            {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": 5}}}},
            "type of parameter a",
        ),
        (
            {"name": "f", "parameters": {"type": "object", "properties": {}, "required": "a"}},
            "required of parameters",
        ),
        ({"name": "f", "parameters": {"a": "str"}}, "parameter a"),
    ],
)
def test_tools_that_are_no_schema_are_refused(tool: dict[str, Any], found: str) -> None:
    with pytest.raises(UserError, match="here: ") as caught:
        canonical({"messages": [ASKED], "tools": [tool]})
    assert found in str(caught.value)


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"text": "a"}, "text"),
        ({**BFCL, "question": []}, "messages"),
        ({**BFCL, "ground_truth": [{"weather": {"city": "Paris"}}]}, "ground_truth"),
        *(
            ({**BFCL, "ground_truth": [{"weather": {"city": [{"k": inner}]}}]}, "ground_truth")
            for inner in (5, [], "abc", [{"l": 5}])
        ),
        ({**BFCL, "function": 5}, "function"),
        ({**XLAM, "answers": "{"}, "answers"),
        ({**XLAM, "answers": [{"arguments": {}}]}, "arguments"),
        ({**GLAIVE, "chat": "Hello"}, "chat"),
        ({**GLAIVE, "system": "Functions: {name}"}, "system"),
        ({**OPENAI, "tools": "weather"}, "tools"),
        (
            {
                "messages": [
                    ASKED,
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": "["}}],
                    },
                ]
            },
            "f",
        ),
    ],
)
def test_rows_that_cannot_be_read_are_refused_with_their_place(
    row: dict[str, Any], found: str
) -> None:
    with pytest.raises(UserError, match="here: ") as caught:
        canonical(row)
    assert found in str(caught.value)
    assert str(caught.value).count("\n") == 0


def test_equal_questions_go_to_the_same_part_whatever_their_calls() -> None:
    form = RowFormat("function-calling")
    other = {**XLAM, "answers": json.dumps([{"name": "weather", "arguments": {"city": "Rome"}}])}
    assert form.identity(canonical(XLAM), "here") == form.identity(canonical(other), "here")
    assert form.identity(canonical({**XLAM, "query": "Why?"}), "here") != form.identity(
        canonical(XLAM), "here"
    )
