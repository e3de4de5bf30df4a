"""Conversations in one form, from any kind of file.

The same row has the same tokens in JSON Lines, CSV, Parquet and a saved data set. The rules:

- A key whose value is null counts as absent, everywhere in `messages` and `tools`. Arrow stores
  every row with all keys of the column and fills in nulls, so a null in the data looks like an
  absent key. Nulls in lists are kept. To train a call with a null argument, write its `arguments`
  as JSON text: those nulls are kept.
- `messages`, `tools`, their items and `tool_calls` may be JSON text, as in CSV and in many data
  sets on the hub.
- ShareGPT's {from, value} is read as {role, content}, and other names of roles as the usual ones
  (`chat_roles.py`). A row with Alpaca's `instruction` and `output` (`input`, `system` and `history`
  may be absent) is a conversation of these. A column `system` is the first system message.
- An assistant's thoughts are `reasoning_content`, `thinking` or `reasoning`. The first two are
  filled in from the one that is there, as transformers 5.23 does and 5.17 does not.
- `content` is text, or a list of parts of type text; an empty list counts as absent, and a user's
  message must have content. In a tool's result it may be any JSON value.
- `weight: 0` on an assistant's message means that the turn is not learnt; 1 is the default.

No reader can restore what Arrow drops: it keeps one order of keys and one type per key for all
rows. If these differ between rows (arguments 1 and 1.5, or {x, y} and {y, x}), write `arguments` as
JSON text.
"""

from __future__ import annotations

import json
from typing import Any

from drillyard.data.chat_roles import (
    is_call_role,
    joined_calls,
    template_role,
    with_call_ids,
    with_parsed_calls,
)
from drillyard.data.message_variants import (
    CALLS,
    REASONING,
    identity_forms,
    text_of_parts,
    text_parts,
)
from drillyard.data.raw_batches import Row
from drillyard.errors import UserError

MESSAGE_COLUMNS = ("messages", "conversations", "conversation")
"""Columns that hold a conversation, in the order in which they are looked for."""
_ALPACA_COLUMNS = ("instruction", "output")
_SHAREGPT_KEYS = {"from": "role", "value": "content"}
TOOL_COLUMNS = ("tools", "functions")
"""Columns that hold the tools of a row, in the order in which they are looked for."""
_TURN_KEYS = {"content", *CALLS, *REASONING}


def without_nulls(value: Any) -> Any:
    """The value without keys whose value is null, at any depth; nulls in lists stay."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def normalised_messages(value: Any, where: str) -> list[Row]:
    """The messages of a row as [{role, content, ...}]. UserError, with the message's number, if
    invalid."""
    messages = _parsed(value, "messages", where)
    if not isinstance(messages, list) or not messages:
        raise UserError(
            f"{where}: column 'messages' must be a non-empty list of {{role, content}}; found"
            f" {value!r:.60}."
        )
    found = [_message(message, number, where) for number, message in enumerate(messages, 1)]
    are_calls = [is_call for _, is_call in found]
    normalised = [message for message, _ in found]
    return with_call_ids(joined_calls(normalised, are_calls)) if any(are_calls) else normalised


def with_system_column(messages: list[Row], value: Any, where: str) -> list[Row]:
    """The messages after the text of the row's column `system`, unless they begin with that text.
    UserError if it is not text."""
    if not isinstance(value, str | None):
        raise UserError(f"{where}: column 'system' must be text; found {value!r:.60}. Fix the row.")
    if not value or not value.strip():
        return messages
    if messages[0]["role"] == "system" and text_of_parts(messages[0]).strip() == value.strip():
        return messages
    return [{"role": "system", "content": value}, *messages]


def normalised_tools(value: Any, where: str) -> list[Row] | None:
    """The tools of a row as a list of JSON schemas, or None if there are none."""
    tools = None if isinstance(value, str) and not value.strip() else _parsed(value, "tools", where)
    if tools is None:
        return None
    items = [_parsed(tool, "tools", where) for tool in tools] if isinstance(tools, list) else [None]
    if not all(isinstance(tool, dict) for tool in items):
        raise UserError(
            f"{where}: column 'tools' must be a list of JSON schemas (objects); found"
            f" {value!r:.60}."
        )
    return [without_nulls(tool) for tool in items] or None


def is_alpaca(row: Row) -> bool:
    """Whether a row is one of Alpaca: an instruction and its output, and no conversation."""
    has = {name for name, value in row.items() if value is not None}
    return has >= set(_ALPACA_COLUMNS) and not has & set(MESSAGE_COLUMNS)


def alpaca_messages(row: Row, where: str) -> list[Row]:
    """The conversation of an Alpaca row {instruction, input, output, system, history}.

    `history` is [[question, answer], ...], before the instruction. UserError for a column that is
    not text.
    """
    for name in ("instruction", "input", "output", "system"):
        if not isinstance(row.get(name), str | None):
            raise UserError(
                f"{where}: column {name!r} must be text; found {row[name]!r:.60}. Fix the row."
            )
    history = _parsed(row.get("history"), "history", where) or []
    pairs = (
        [pair for pair in history if isinstance(pair, list) and len(pair) == 2]
        if isinstance(history, list)
        else []
    )
    if len(pairs) != len(history):
        raise UserError(
            f"{where}: column 'history' must be [[question, answer], ...]; found {history!r:.60}."
            " Fix the row."
        )
    question = "\n".join(text for text in (row["instruction"], row.get("input")) if text)
    turns = [*pairs, [question, row["output"]]]
    opening = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    return [
        *opening,
        *(
            {"role": role, "content": text}
            for turn in turns
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ),
    ]


def _message(value: Any, number: int, where: str) -> tuple[Row, bool]:
    """A message in the usual form, and whether its role says that it is a call."""
    message = without_nulls(_parsed(value, f"message {number}", where))
    if isinstance(message, dict) and "role" not in message:
        message = {_SHAREGPT_KEYS.get(key, key): item for key, item in message.items()}
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UserError(
            f"{where}: message {number} is not {{role, content}}: found {value!r:.60}. Fix the row."
        )
    is_call = is_call_role(message["role"])
    message["role"] = template_role(message["role"])
    what = f"tool_calls of message {number}"
    if calls := _parsed(message.pop("tool_calls", None) or None, what, where):
        items = calls if isinstance(calls, list) else [calls]
        message["tool_calls"] = without_nulls([_parsed(call, what, where) for call in items])
    elif is_call:
        message = with_parsed_calls(message, _call_text(message))
    thoughts = next((message[key] for key in REASONING if key in message), None)
    if thoughts is not None:
        message = {"thinking": thoughts, **message, "reasoning_content": thoughts}
    _check_json(message, number, where)
    _check_content(message, number, where)
    _check_weight(message, number, where)
    return message, is_call


def _call_text(message: Row) -> str:
    """The text of a turn that is a call, which may be an object already."""
    content = message.get("content")
    is_value = isinstance(content, dict | list) and not text_parts(message)
    return json.dumps(content, default=repr) if is_value else text_of_parts(message)


def _check_json(message: Row, number: int, where: str) -> None:
    """UserError for values that JSON does not have, such as Arrow's dates, where templates write
    JSON."""
    try:
        for key in ("content", *CALLS, *REASONING):
            if not isinstance(message.get(key), str | None):
                json.dumps(message[key])
    except TypeError as error:
        raise UserError(
            f"{where}: message {number} cannot be written as JSON ({error}). Write its arguments or"
            " content as text."
        ) from None


def _check_content(message: Row, number: int, where: str) -> None:
    """Remove content that is an empty list of parts; write a tool's result of a single value as
    JSON text."""
    role = message["role"]
    is_result = role not in ("system", "developer", "user", "assistant")
    if message.get("content") == [] and not is_result:
        del message["content"]
    content = message.get("content")
    if role == "assistant" and not message.keys() & _TURN_KEYS:
        raise UserError(
            f"{where}: message {number} of the assistant has no content and no tool_calls. Fix the"
            " row."
        )
    if role == "user" and "content" not in message:
        raise UserError(f"{where}: message {number} of the user has no content. Fix the row.")
    if content is None or isinstance(content, str):
        return
    is_parts = isinstance(content, list) and all(
        isinstance(part, dict) and "type" in part for part in content
    )
    if is_result and not (is_parts and content):
        if not isinstance(content, (dict, list)) or not content:
            message["content"] = json.dumps(content)
        return
    if not is_parts:
        raise UserError(
            f"{where}: the content of message {number} is neither text nor a list of parts {{type:"
            f" text, text: ...}}: found {content!r:.60}. Fix the row."
        )
    for part in content:
        if part["type"] != "text" or not isinstance(part.get("text"), str):
            raise UserError(
                f"{where}: message {number} has a content part of type {part['type']!r}; only parts"
                " {type: text, text: ...} can be trained. Remove the part or the row."
            )


def _check_weight(message: Row, number: int, where: str) -> None:
    """Keep `weight` only if it is 0 on an assistant's turn."""
    weight = message.pop("weight", 1)
    if not isinstance(weight, (int, float)) or weight not in (0, 1):
        raise UserError(
            f"{where}: message {number} has weight {weight!r}; only 0 (the turn is not learnt) and"
            " 1 are supported. Change the weight or remove it."
        )
    if weight == 0 and message["role"] == "assistant":
        message["weight"] = 0


def _parsed(value: Any, what: str, where: str) -> Any:
    """The value, decoded if it is JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{where}: {what}: expected JSON text ({error}). Fix the row.") from None


def identity_key(messages: list[Row]) -> str:
    """A key that is equal for equal conversations: it ignores the order of keys, weights, whether
    content is in parts, and whether arguments are JSON text."""
    same = identity_forms(messages)
    for message in same:
        message.pop("weight", None)
    return json.dumps(same, sort_keys=True, default=repr)
