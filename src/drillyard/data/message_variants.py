"""The same conversation in the forms that chat templates expect, and the texts in it.

Templates differ in what they take: a call's arguments and a tool's result as objects or as JSON
text, content as text or as parts, a message without content without that key (as transformers
passes it), with null or with empty text, instructions of a developer as those of the system,
several system messages at the beginning as one, thoughts under one name or another or in the
content. Each is a choice of its own, so that text for results goes with objects for arguments.

`with_changed_texts` names every text that says something; `chat_content.py` finds out which of them
a template renders.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from drillyard.data.raw_batches import Row

CALLS = ("tool_calls", "function_call")
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of an assistant's thoughts; the first that a message has counts."""
CONTENT, THOUGHTS, THOUGHTS_IN_CONTENT, CALLED = "content", "reasoning", "think", "tool_calls"
"""Kinds of text in a message."""
_THINK_TAG = re.compile(r"(</?think>)")
Messages = list[Row]
Change = Callable[[str, str, bool], str]
"""Of (kind, text, whether it is text in the row), what takes the text's place."""


@dataclass(frozen=True)
class _Choice:
    """Forms of a conversation, the usual one first, and the kinds of text that they may bring
    back where a template leaves them out."""

    kinds: frozenset[str]
    forms: tuple[Callable[[Messages], Messages], ...]


def message_variants(messages: Messages, kinds: Collection[str]) -> Iterator[Messages]:
    """The conversation in every form that may bring back texts of these kinds, the usual one
    first."""
    if not kinds:
        yield messages
        return
    choices = [choice.forms for choice in _choices(messages) if choice.kinds & set(kinds)]
    for steps in itertools.product(*choices):
        changed = messages
        for step in steps:
            changed = step(changed)
        yield changed


def _choices(messages: Messages) -> Iterator[_Choice]:
    if any(_calls(message) != _openai_calls(message) for message in messages):
        yield _Choice(frozenset({CALLED}), (list, _each(_with_openai_calls)))
    if any(any(_functions(message)) for message in messages):
        yield _Choice(frozenset({CALLED}), (_each(_with_objects), _each(_with_json_text)))
    if any(_is_data(message) for message in messages):
        yield _Choice(frozenset({CONTENT}), (list, _each(_with_result_text)))
    if any("content" not in message for message in messages):
        forms = (
            list,
            _each(lambda m: {"content": None, **m}),
            _each(lambda m: {"content": "", **m}),
        )
        yield _Choice(frozenset({CONTENT, CALLED, THOUGHTS}), forms)
    has_parts = any(text_parts(message) for message in messages)
    joined = (_each(_with_joined_parts),) if has_parts else ()
    yield _Choice(frozenset({CONTENT}), (list, *joined, _each(_with_parts)))
    if any(message["role"] == "developer" for message in messages):
        yield _Choice(frozenset({CONTENT}), (list, _each(_from_system)))
    if _num_instructions(messages) > 1:
        yield _Choice(frozenset({CONTENT}), (list, _with_one_instruction))
    if any(message.keys() & set(REASONING) for message in messages):
        yield _Choice(frozenset({THOUGHTS}), (list, _each(_with_all_names)))
    if any(_thoughts_in_content(message) for message in messages):
        yield _Choice(frozenset({THOUGHTS_IN_CONTENT}), (list, _each(_with_split_thoughts)))


def _each(change: Callable[[Row], Row]) -> Callable[[Messages], Messages]:
    return lambda messages: [change(message) for message in messages]


def with_object_arguments(messages: Messages) -> Messages:
    """The messages with the arguments of calls as objects where they are JSON text."""
    if not any(message.keys() & set(CALLS) for message in messages):
        return messages
    return [_with_objects(message) for message in messages]


def identity_forms(messages: Messages) -> Messages:
    """Copies of the messages that are equal where only parts or notations of arguments differ."""
    return [_with_joined_parts(_with_objects(message)) for message in messages]


def text_parts(message: Row) -> list[Row]:
    """The parts of a content that is a list of text parts; empty for any other content."""
    content = message.get("content")
    is_parts = isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    )
    return content if is_parts and content else []


def text_of_parts(message: Row) -> str:
    """The content as text, parts joined; empty where there is none, or other data."""
    content = _with_joined_parts(message).get("content")
    return content if isinstance(content, str) else ""


def with_changed_texts(message: Row, change: Change) -> Row:
    """The message with every text that says something replaced by `change`: content, thoughts,
    names and arguments of calls.

    In content of an assistant the tags <think> and </think> stay, and what is between them is a
    text of its own.
    """
    result = dict(message)
    thoughts = next((message[key] for key in REASONING if key in message), None)
    if thoughts is not None:
        changed = _changed_values(thoughts, THOUGHTS, change)
        result |= {key: changed for key in REASONING if message.get(key) == thoughts}
    content = message.get("content")
    if isinstance(content, str):
        result["content"] = _changed_content(content, message["role"], change)
    elif parts := text_parts(message):
        result["content"] = [
            {**part, "text": _changed_content(part["text"], message["role"], change)}
            for part in parts
        ]
    elif content is not None:
        result["content"] = _changed_values(content, CONTENT, change)
    if _calls(message):
        result |= copy.deepcopy({key: result[key] for key in CALLS if key in result})
        for call in _calls(result):
            function = call.get("function", call)
            if isinstance(function, dict):
                _change_function(function, change)
    return result


def _changed_content(content: str, role: str, change: Change) -> str:
    if role != "assistant" or "think>" not in content:
        return change(CONTENT, content, True) if content.strip() else content
    pieces = _THINK_TAG.split(content)
    last = max((n for n, piece in enumerate(pieces) if piece == "</think>"), default=-1)
    for number in range(0, len(pieces), 2):
        if pieces[number].strip():
            kind = THOUGHTS_IN_CONTENT if number < last else CONTENT
            pieces[number] = change(kind, pieces[number], True)
    return "".join(pieces)


def _change_function(function: Row, change: Change) -> None:
    if isinstance(function.get("name"), str):
        function["name"] = change(CALLED, function["name"], True)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        decoded = _decoded(arguments)
        is_text = isinstance(decoded, str)
        changed = _changed_values(decoded, CALLED, change)
        function["arguments"] = changed if is_text else _json_text(changed)
    elif arguments:
        function["arguments"] = _changed_values(arguments, CALLED, change)


def _changed_values(value: Any, kind: str, change: Change) -> Any:
    """The value with everything in it replaced that is neither a list nor an object."""
    if isinstance(value, dict):
        return {key: _changed_values(item, kind, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_changed_values(item, kind, change) for item in value]
    if isinstance(value, str):
        return change(kind, value, True) if value.strip() else value
    return change(kind, _json_text(value), False)


def _calls(message: Row) -> list[Row]:
    """The calls of a message that are objects."""
    if not any(key in message for key in CALLS):
        return []
    calls = message.get("tool_calls")
    found = [*(calls if isinstance(calls, list) else []), message.get("function_call")]
    return [call for call in found if isinstance(call, dict)]


def _openai_calls(message: Row) -> list[Row]:
    return [
        call if "function" in call else {"type": "function", "function": call}
        for call in _calls(message)
    ]


def _functions(message: Row) -> Iterator[Row]:
    """The {name, arguments} of the calls of a message."""
    for call in _calls(message):
        function = call.get("function", call)
        if isinstance(function, dict) and "arguments" in function:
            yield function


def _with_openai_calls(message: Row) -> Row:
    """The message with its calls in `tool_calls`, as {type, function: {name, arguments}}."""
    if not _calls(message):
        return message
    rest = {key: value for key, value in message.items() if key not in CALLS}
    return {**rest, "tool_calls": _openai_calls(message)}


def _with_arguments(message: Row, change: Callable[[Any], Any]) -> Row:
    """A copy of the message with changed arguments of its calls."""
    changed = copy.deepcopy(message) if any(_functions(message)) else dict(message)
    for function in _functions(changed):
        function["arguments"] = change(function["arguments"])
    return changed


def _with_objects(message: Row) -> Row:
    return _with_arguments(message, _decoded) if _calls(message) else dict(message)


def _with_json_text(message: Row) -> Row:
    return _with_arguments(
        message, lambda value: value if isinstance(value, str) else _json_text(value)
    )


def _with_result_text(message: Row) -> Row:
    return {**message, "content": _json_text(message["content"])} if _is_data(message) else message


def _with_joined_parts(message: Row) -> Row:
    parts = text_parts(message)
    return {**message, "content": "".join(part["text"] for part in parts)} if parts else message


def _with_parts(message: Row) -> Row:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _from_system(message: Row) -> Row:
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _num_instructions(messages: Messages) -> int:
    """The messages of system and developer before any other."""
    before = itertools.takewhile(lambda m: m["role"] in ("system", "developer"), messages)
    return sum(1 for _ in before)


def _with_one_instruction(messages: Messages) -> Messages:
    number = _num_instructions(messages)
    joined = "\n\n".join(map(text_of_parts, messages[:number]))
    return [{**messages[0], "role": "system", "content": joined}, *messages[number:]]


def _with_all_names(message: Row) -> Row:
    thoughts = next((message[key] for key in REASONING if key in message), None)
    return message if thoughts is None else message | dict.fromkeys(REASONING, thoughts)


def _thoughts_in_content(message: Row) -> bool:
    return message["role"] == "assistant" and "</think>" in text_of_parts(message)


def _with_split_thoughts(message: Row) -> Row:
    """The message with what its content has in <think> as thoughts."""
    if not _thoughts_in_content(message) or message.keys() & set(REASONING):
        return message
    before, _, content = text_of_parts(message).rpartition("</think>")
    thoughts = before.rpartition("<think>")[2].strip("\n")
    named = {"reasoning_content": thoughts, "thinking": thoughts}
    return {**message, **named, "content": content.lstrip("\n")}


def _is_data(message: Row) -> bool:
    """Whether the content is a tool's result that is neither text nor parts."""
    return isinstance(message.get("content"), (dict, list)) and not text_parts(message)


def _json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _decoded(arguments: Any) -> Any:
    """Arguments in JSON text as an object; other text, such as a program, unchanged."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def objects_in(messages: Messages) -> Iterator[Any]:
    """All values in the messages whose Python and JSON notations differ."""
    for message in messages:
        for function in _functions(message):
            if isinstance(function["arguments"], dict) and function["arguments"]:
                yield function["arguments"]
        if isinstance(message.get("content"), (dict, list)):
            yield message["content"]


def strings_in(value: Any) -> Iterator[str]:
    """Every text in nested lists and objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from strings_in(item)
