"""Which values a parameter's schema allows, and schemas that a file may have."""

from __future__ import annotations

import json
from time import perf_counter
from typing import Any

import pytest

from drillyard.data.function_rows import function_calling_row
from drillyard.data.schema_types import allows_parameter, required_parameters
from drillyard.evaluation.call_scoring import judge_calls

DEFS = {
    "city": {"type": "string"},
    "loop": {"$ref": "#/$defs/loop"},
    "tree": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/tree"}}]},
    "a/b~c d": {"type": "integer"},
}


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        (True, [1, "a", None], []),
        ({}, [1, "a", None], []),
        (False, [], [1, None]),
        ({"type": "integer"}, [1], [1.0, "1", True, None]),
        ({"type": "number"}, [1, 1.5], ["1", True]),
        ({"type": ["string", "null"]}, ["a", None], [1, False]),
        ({"type": "string", "nullable": True}, ["a", None], [1]),
        ({"type": "date"}, ["a", 1], []),
        ({"enum": ["a", 1.5, None]}, ["a", "z", 2, None], [True, []]),
        ({"const": True}, [True, False], [1]),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, ["a", [1]], [1]),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, ["a", None], [1]),
        ({"allOf": [{"type": ["string", "null"]}, {"type": ["null", "integer"]}]}, [None], ["a"]),
        ({"type": "array", "items": {"type": "integer"}}, [[], [1, 2]], [["1"], "1"]),
        ({"items": {"type": "integer"}}, [[1], "text"], [["1"]]),
        ({"prefixItems": [{"type": "string"}], "items": False}, [["a"], []], [[1], ["a", 1]]),
        ({"items": [{"type": "string"}], "additionalItems": False}, [["a"]], [["a", 1]]),
        ({"$ref": "#/$defs/city"}, ["a"], [1]),
        ({"$ref": "#/$defs/city", "nullable": True}, ["a", None], [1]),
        ({"$ref": "#/$defs/a~1b~0c%20d"}, [1], ["a"]),
        ({"$ref": "#/$defs/loop"}, [1, "a"], []),
        ({"$ref": "#/$defs/tree"}, [None, [None, [None]]], [1, [1], [[1]]]),
        ({"$ref": "#/$defs/absent"}, [1, "a"], []),
        ({"$ref": "https://example.org/s.json#/a"}, [1, "a"], []),
        ({"type": "object", "required": ["k"]}, [{}, {"k": 1}], [1]),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, [{"k": 1}], [1]),
    ],
)
def test_values_have_the_types_that_a_schema_allows(
    schema: Any, allowed: list[Any], refused: list[Any]
) -> None:
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": DEFS}
    assert [value for value in allowed if not allows_parameter(parameters, "x", value)] == []
    assert [value for value in refused if allows_parameter(parameters, "x", value)] == []


@pytest.mark.parametrize(
    "parameters",
    [
        {
            "$ref": "#/$defs/F",
            "$defs": {"F": {"properties": {"n": {"type": "integer"}}, "required": ["n"]}},
        },
        {
            "$ref": "#/definitions/F",
            "definitions": {"F": {"properties": {"n": {"type": "integer"}}, "required": ["n"]}},
        },
        {"allOf": [{"required": ["n"]}, {"properties": {"n": {"type": "integer"}}}]},
        {"type": "object", "required": ["n"], "additionalProperties": {"type": "integer"}},
        {"type": ["object", "null"], "required": ["n"], "properties": {"n": {"type": "int"}}},
        {"type": "dict", "required": ["n"], "anyOf": [{"properties": {"n": {"type": "integer"}}}]},
    ],
)
def test_a_schema_may_state_its_parameters_anywhere(parameters: dict[str, Any]) -> None:
    row = {
        "question": [[{"role": "user", "content": "?"}]],
        "function": [{"name": "f", "parameters": parameters}],
        "ground_truth": [{"f": {"n": [1]}}],
    }
    found = function_calling_row(row, {}, "here")
    schema = found["tools"][0]["function"]["parameters"]
    assert required_parameters(schema) == ["n"]
    outcomes = [
        judge_calls(
            found["tools"], found["accepted"], json.dumps({"name": "f", "arguments": given})
        ).outcome
        for given in ({"n": 1}, {}, {"n": "1"}, {"n": 2})
    ]
    assert outcomes == ["correct", "missing_parameter", "wrong_type", "wrong_value"]


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "dict", "required": ["n"]},
        {"required": ["n"]},
        {"type": "object", "properties": {}, "required": ["n"]},
        {"type": "object", "additionalProperties": True},
        {"type": "object", "properties": {"n": True}},
        {"type": "object", "properties": {"n": {"items": [{"type": "str"}, True]}}},
        {"$schema": "https://json-schema.org/draft/2020-12/schema"},
        {"type": ["any"]},
        {},
        None,
    ],
)
def test_a_schema_without_properties_is_one(parameters: Any) -> None:
    row = {"question": "?", "function": [{"name": "f", "parameters": parameters}]}
    for inner in (parameters, {"type": "object", "properties": {"o": parameters or {}}}):
        row["function"] = [{"name": "f", "parameters": inner}]
        (tool,) = function_calling_row(row, {}, "here")["tools"]
        assert allows_parameter(tool["function"]["parameters"], "n", 1)


def test_types_of_the_bfcl_are_read_at_any_depth() -> None:
    inner = {"type": "dict", "properties": {"k": {"type": "float"}}}
    parameters = {
        "type": "dict",
        "properties": {"x": {"anyOf": [inner, {"type": "tuple"}]}, "y": {"type": ["any", "str"]}},
        "additionalProperties": {"type": "float"},
        "$defs": {"d": inner},
    }
    row = {"question": "?", "function": {"name": "f", "parameters": parameters}}
    (tool,) = function_calling_row(row, {}, "here")["tools"]
    converted = {"type": "object", "properties": {"k": {"type": "number"}}}
    assert tool["function"]["parameters"] == {
        "type": "object",
        "properties": {"x": {"anyOf": [converted, {"type": "array"}]}, "y": {}},
        "additionalProperties": {"type": "number"},
        "$defs": {"d": converted},
    }


def test_a_schema_that_refers_to_itself_many_times_takes_no_time() -> None:
    defs = {
        f"d{n}": {
            "anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2,
            "allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2,
        }
        for n in range(60)
    } | {"d60": {"type": "string", "required": ["x"]}}
    parameters = {
        "properties": {"x": {"$ref": "#/$defs/d0"}},
        "allOf": [{"$ref": "#/$defs/d0"}],
        "$defs": defs,
    }
    start = perf_counter()
    assert allows_parameter(parameters, "x", "a")
    assert not allows_parameter(parameters, "x", 1)
    assert required_parameters(parameters) == ["x"]
    assert perf_counter() - start < 1
