"""What is left of a config with wrong values, and which problems of the rest are the file's own."""

from __future__ import annotations

import copy
import json
from typing import Annotated, get_args

import pytest
import yaml
from pydantic import BaseModel, Field

from drillyard.allowed_values import Allowed
from drillyard.config.load import config_model, json_schema
from drillyard.config.partial_config import partial_config
from drillyard.config.problems import Problem
from drillyard.config.strict_model import StrictModel
from drillyard.config.yaml_document import parse_document


class Part(StrictModel):
    kind: str
    size: int = 1


class Whole(StrictModel):
    name: str
    count: int = 1
    parts: list[Part] = Field(default=[])
    first: Part | None = None


RIGHT = {"name": "a", "count": 2, "parts": [{"kind": "x"}, {"kind": "y"}], "first": {"kind": "z"}}


def rest(value):
    return partial_config(Whole, value, {"name": "stand-in"}, None)


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({"count": "many"}, {"count": 1}),
        ({"cuont": 3}, {}),
        ({"name": 5}, {"name": "stand-in"}),
        ({"parts": [{"size": 1}, {"kind": "y"}]}, {"parts": [{"kind": "y", "size": 1}]}),
        ({"parts": [{"kind": "x", "size": "s"}]}, {"parts": [{"kind": "x", "size": 1}]}),
        ({"parts": [3, {"kind": "y"}]}, {"parts": [{"kind": "y", "size": 1}]}),
        ({"parts": "x"}, {"parts": []}),
        ({"first": {"size": 2}}, {"first": None}),
        ({"first": 3}, {"first": None}),
    ],
)
def test_the_rest_is_the_config_without_what_is_wrong(changes, left):
    found = rest({**RIGHT, **changes})
    whole = Whole.model_validate(RIGHT).model_dump() | left
    assert found is not None
    assert found.config.model_dump() == whole


def test_problems_of_the_rest_have_the_positions_of_the_file():
    found = rest({**RIGHT, "parts": [{"size": 1}, {"kind": "x"}, 7, {"kind": "y"}]})
    assert found is not None
    moved = [Problem(("parts", position, "kind"), "p") for position in range(2)]
    assert [each.path for each in found.own(moved)] == [("parts", 1, "kind"), ("parts", 3, "kind")]


def test_problems_that_the_gap_has_made_are_dropped():
    found = rest({**RIGHT, "count": "many", "frist": {"kind": "z"}})
    assert found is not None
    problems = [
        Problem(("count",), "missing"),
        Problem(("first", "kind"), "of a key that an unknown one meant"),
        Problem(("name",), "depends on it", depends_on=(("count",),)),
        Problem(("parts", 0), "its own"),
    ]
    assert [each.message for each in found.own(problems)] == ["its own"]


def test_a_document_of_which_nothing_is_left_is_none():
    assert partial_config(Whole, {"count": 1}, {}, None) is None


@pytest.mark.parametrize("which", ["cluster", "run", "workload"])
def test_every_setting_has_a_description(which):
    """Its own; a section of a run config has that of its model."""
    schema = json_schema(which)
    for name, model in {which: schema, **schema["$defs"]}.items():
        for key, setting in model.get("properties", {}).items():
            section = schema["$defs"].get(setting.get("$ref", "").rpartition("/")[2], {})
            inherited = section.get("description") if which != "cluster" else None
            assert setting.get("description") or inherited, f"{name}.{key}"


def test_a_number_keeps_the_digits_that_it_was_typed_with():
    value = parse_document("version: 1.30", "f").value["version"]
    for same in (value, copy.deepcopy(value)):
        assert (same, same.text) == (1.3, "1.30")
    assert json.dumps(value) == "1.3"
    assert yaml.safe_load(yaml.safe_dump([value])) == [1.3]
    assert type(parse_document("1.3", "f").value) is float


def annotations(model, seen):
    """Every annotation in a model and its sections, with its path."""
    if model in seen:
        return
    seen.add(model)
    for name, field in model.model_fields.items():
        todo = [
            Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
        ]
        while todo:
            each = todo.pop()
            yield f"{model.__name__}.{name}", each
            todo += [inner for inner in get_args(each) if get_args(inner)]
            for inner in (each, *get_args(each)):
                if isinstance(inner, type) and issubclass(inner, BaseModel):
                    yield from annotations(inner, seen)


@pytest.mark.parametrize("which", ["cluster", "run", "workload"])
def test_every_pattern_says_in_words_what_it_allows(which):
    """An error about a value has the words: a pattern is for programs."""
    for path, annotation in annotations(config_model(which), set()):
        parts = getattr(annotation, "__metadata__", ())
        inner = [each for part in parts for each in getattr(part, "metadata", [part])]
        if any(getattr(each, "pattern", None) for each in inner):
            assert any(isinstance(each, Allowed) for each in inner), path
