"""`builtin:function-calling`: questions, the functions that may be called, and the calls, seeded.

A row is a conversation in OpenAI's form, {messages, tools}: a question, and the assistant's call of
one function, in one of seven rows of two. Beside the called ones, a row lists one or two other
functions. What a parameter is comes from `function_calling_vocabulary.yaml`; every value stands in
the question.

Hashes, not draws, decide the part that a call belongs to, for any seed and size:

- `calls`: calls of trained functions, with values that no training row gives to that function
  together;
- `functions`: calls of functions that are never trained.

No call of a held-out part is in a training row, and none is in a part twice. Cost: about 30,000
rows per second on one core. Limits: English, short values, at most four parameters of texts, whole
numbers and booleans.
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from drillyard.data.builtin.text_to_sql import Draw, stable_hash
from drillyard.packaged_yaml import read_packaged_yaml

VERSION = 1
"""Raised by hand with every change that changes a row; part of the content key."""

HELD_OUT_PARTS = ("calls", "functions")
_HELD_OUT_PERCENT = 5
_TWO_CALLS = 1 / 7


@dataclass(frozen=True)
class CallableFunction:
    """A function of the vocabulary: its parameters by kind of value, and the phrasings of its
    questions."""

    name: str
    about: str
    parameters: dict[str, str]
    questions: tuple[str, ...]
    trained: bool

    @cached_property
    def required(self) -> list[str]:
        """The parameters that every phrasing names."""
        named = [
            {field for _, field, _, _ in string.Formatter().parse(text)} for text in self.questions
        ]
        return [name for name in self.parameters if all(name in fields for fields in named)]

    @cached_property
    def tool(self) -> dict[str, Any]:
        """The function in OpenAI's form."""
        properties = {name: _schema_of(_kinds()[kind]) for name, kind in self.parameters.items()}
        parameters = {"type": "object", "properties": properties, "required": self.required}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.about, "parameters": parameters},
        }


@cache
def _vocabulary() -> dict[str, Any]:
    vocabulary: dict[str, Any] = read_packaged_yaml(
        "drillyard.data.builtin", "function_calling_vocabulary.yaml"
    )
    return vocabulary


def _kinds() -> dict[str, Any]:
    kinds: dict[str, Any] = _vocabulary()["kinds"]
    return kinds


@cache
def functions() -> tuple[CallableFunction, ...]:
    """All functions, those that are never trained last."""
    return tuple(
        CallableFunction(
            name,
            entry["about"],
            entry["parameters"],
            tuple(entry["questions"]),
            entry.get("role") != "test",
        )
        for name, entry in _vocabulary()["functions"].items()
    )


def _is_range(kind: Any) -> bool:
    return isinstance(kind, dict) and kind.keys() == {"from", "to", "step"}


def _schema_of(kind: Any) -> dict[str, Any]:
    if _is_range(kind):
        return {"type": "integer"}
    values = list(kind.values()) if isinstance(kind, dict) else []
    if values and isinstance(values[0], bool):
        return {"type": "boolean"}
    return {"type": "string", "enum": values} if values else {"type": "string"}


def _value(draw: Draw, kind: Any) -> tuple[str, Any]:
    """The words of a value in the question, and the value."""
    if _is_range(kind):
        number = kind["from"] + kind["step"] * draw.below(
            (kind["to"] - kind["from"]) // kind["step"] + 1
        )
        return str(number), number
    if isinstance(kind, dict):
        return draw.one(list(kind.items()))
    text = draw.one(kind)
    return text, text


def _draw_call(draw: Draw, function: CallableFunction) -> tuple[str, dict[str, Any]]:
    """A question, and the arguments of the call that answers it."""
    question = draw.one(function.questions)
    fields = {field for _, field, _, _ in string.Formatter().parse(question) if field}
    drawn: dict[str, tuple[str, Any]] = {}
    for name, kind in function.parameters.items():
        while name in fields and (name not in drawn or list(drawn.values()).count(drawn[name]) > 1):
            drawn[name] = _value(draw, _kinds()[kind])  # no flight from Paris to Paris
    words = {name: text for name, (text, _) in drawn.items()}
    return question.format_map(words), {name: value for name, (_, value) in drawn.items()}


def part_of(name: str, arguments: dict[str, Any]) -> str:
    """The only part that may have this call: "train", "calls" or "functions"."""
    if not next(function for function in functions() if function.name == name).trained:
        return "functions"
    values = json.dumps(arguments, sort_keys=True)
    return "calls" if stable_hash("call", name, values) % 100 < _HELD_OUT_PERCENT else "train"


def rows(part: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """`count` rows {messages, tools} of a part, in a fixed order: a smaller count gives the first
    of a larger one."""
    draw, seen = Draw("function calls", part, seed), set[str]()
    pool = [function for function in functions() if function.trained == (part != "functions")]
    made = 0
    while made < count:
        called = draw.some(pool, 2 if draw.uniform() < _TWO_CALLS else 1)
        answers = [_draw_call(draw, function) for function in called]
        if any(
            part_of(function.name, given) != part
            for function, (_, given) in zip(called, answers, strict=True)
        ):
            continue
        row = _row(draw, called, answers, [function for function in pool if function not in called])
        if part != "train":
            key = json.dumps(row["messages"][1], sort_keys=True)
            if key in seen:
                continue
            seen.add(key)
        made += 1
        yield row


def _row(
    draw: Draw,
    called: list[CallableFunction],
    answers: list[tuple[str, dict[str, Any]]],
    others: list[CallableFunction],
) -> dict[str, Any]:
    """The conversation, with the called functions and one or two others in random order."""
    listed = [*called, *draw.some(others, 1 + draw.below(2))]
    calls = [
        {"type": "function", "function": {"name": function.name, "arguments": arguments}}
        for function, (_, arguments) in zip(called, answers, strict=True)
    ]
    return {
        "messages": [
            {"role": "user", "content": " ".join(question for question, _ in answers)},
            {"role": "assistant", "content": "", "tool_calls": calls},
        ],
        "tools": [function.tool for function in draw.some(listed, len(listed))],
    }
