"""Rows of function-calling data as conversations {messages, tools, accepted} in OpenAI's form.

    system, chat                  glaiveai/glaive-function-calling-v2: a conversation as one text,
                                  functions in `system`
    query, tools, answers         Salesforce/xlam-function-calling-60k: a question and its calls
    question, function            the BFCL; with a column `ground_truth`, the accepted calls
    messages, tools               OpenAI's; also `conversations`, with calls as text in
                                  NousResearch's hermes-function-calling-v1

The calls become `tool_calls`, which the model's own chat template writes. `accepted` are the calls
that the metric function-call expects ([{name, arguments: {parameter: [values]}}]): those of the
first turn that calls.

A turn whose call cannot be read is not learnt, and its row is counted (`broken_call`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from drillyard.data.call_syntax import CALL_TAGS, FunctionCall
from drillyard.data.chat_messages import (
    MESSAGE_COLUMNS,
    TOOL_COLUMNS,
    normalised_messages,
    normalised_tools,
    with_system_column,
    without_nulls,
)
from drillyard.data.chat_roles import (
    BROKEN_CALL,
    SYSTEM_REPLACED,
    calling_message,
    with_call_ids,
    with_parsed_calls,
)
from drillyard.data.message_variants import text_of_parts
from drillyard.data.raw_batches import Row
from drillyard.data.tool_schemas import openai_tool
from drillyard.errors import UserError

LAYOUTS = (("system", "chat"), ("query", "tools", "answers"), ("question", "function"))
"""The columns by which a row's layout is known, besides those of conversations."""

_GLAIVE_TURN = re.compile(r"(?:^|\n)\s*(USER|ASSISTANT|FUNCTION RESPONSE):")
_GLAIVE_ROLES = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}
_GLAIVE_END = "<|endoftext|>"
_GLAIVE_INTRODUCTION = re.compile(
    r"\s*with access to the following functions\.?\s*Use them if required\s*-?\s*\Z"
)
_HERMES_TOOLS = re.compile(r"<tools>(.*?)</tools>", re.DOTALL)
_HERMES_RESPONSE = re.compile(r"\A\s*<tool_response>\s*(.*?)\s*</tool_response>\s*\Z", re.DOTALL)


def function_calling_row(row: Row, columns: Mapping[str, str], where: str) -> Row:
    """The row with `messages`, `tools` and `accepted` besides its others. UserError if it is in
    none of the layouts."""
    layout = (
        None
        if columns
        else next(
            (names for names in LAYOUTS if all(row.get(name) is not None for name in names)), None
        )
    )
    if layout == LAYOUTS[0]:
        found = _glaive(row, where)
    elif layout == LAYOUTS[1]:
        found = _xlam(row, where)
    elif layout == LAYOUTS[2]:
        found = _bfcl(row, where)
    else:
        found = _openai(row, columns, where)
    tools = [openai_tool(tool, where) for tool in found["tools"]]
    messages = with_call_ids([_with_calls(message, where) for message in found["messages"]])
    asked = next((message for message in messages if message.get("tool_calls")), None)
    accepted = found.get("accepted") or [_exactly(call) for call in _calls(asked)]
    return {
        **row,
        "messages": messages,
        "tools": tools or None,
        "accepted": accepted,
        **({SYSTEM_REPLACED: True} if SYSTEM_REPLACED in found else {}),
    }


def question_of(messages: list[Row]) -> list[Row]:
    """The messages before the first turn that calls; all of them if none does."""
    called = next(
        (number for number, message in enumerate(messages) if message.get("tool_calls")),
        len(messages),
    )
    return messages[:called]


def _openai(row: Row, columns: Mapping[str, str], where: str) -> Row:
    named: tuple[str, ...] = (columns["messages"],) if "messages" in columns else MESSAGE_COLUMNS
    found = next((name for name in named if row.get(name) is not None), None)
    if found is None:
        layouts = "; ".join(", ".join(names) for names in (*LAYOUTS, ("messages", "tools")))
        raise UserError(
            f"{where}: its columns ({', '.join(map(str, row)) or 'none'}) are in none of the"
            f" layouts of format function-calling: {layouts}. Set data.columns: {{messages: NAME,"
            " tools: NAME}."
        )
    messages = normalised_messages(row[found], where)
    system = row.get(columns.get("system", "system"))
    named = (columns["tools"],) if "tools" in columns else TOOL_COLUMNS
    tools = (
        normalised_tools(next((row[name] for name in named if row.get(name)), None), where) or []
    )
    found_tools = (
        _HERMES_TOOLS.findall(text_of_parts(messages[0])) if messages[0]["role"] == "system" else []
    )
    # The usual prompt names the tags, with nothing between them, before it uses them.
    listed = next((text for text in reversed(found_tools) if text.strip()), None)
    if listed is None:
        return {"messages": with_system_column(messages, system, where), "tools": tools}
    # The system message explains a notation of calls: the model's template has its own.
    if not messages[1:]:
        raise UserError(f"{where}: the conversation is a system message alone. Remove the row.")
    return {
        SYSTEM_REPLACED: True,
        "messages": with_system_column(messages[1:], system, where),
        "tools": tools or normalised_tools(_one_list(listed), where) or [],
    }


def _one_list(text: str) -> str:
    """JSON objects that follow each other as a JSON list; other text as it is."""
    decoder, found, rest = json.JSONDecoder(), [], text.strip()
    try:
        while rest:
            value, end = decoder.raw_decode(rest)
            found.append(value)
            rest = rest[end:].lstrip()
    except (ValueError, RecursionError):
        return text
    return text if len(found) == 1 and isinstance(found[0], list) else json.dumps(found)


def _xlam(row: Row, where: str) -> Row:
    answers = _objects(row["answers"], "answers", where)
    answer = (
        {"role": "assistant", "tool_calls": answers}
        if answers
        else {"role": "assistant", "content": ""}
    )
    messages = [{"role": "user", "content": str(row["query"])}, answer]
    messages = normalised_messages(messages, where)
    return {
        "messages": with_system_column(messages, row.get("system"), where),
        "tools": normalised_tools(row["tools"], where) or [],
    }


def _bfcl(row: Row, where: str) -> Row:
    question = row["question"]
    # A list of turns, each a list of messages; the first is asked.
    turn = (
        question[0]
        if isinstance(question, list) and question and isinstance(question[0], list)
        else question
    )
    messages = normalised_messages(
        [{"role": "user", "content": turn}] if isinstance(turn, str) else turn, where
    )
    messages = with_system_column(messages, row.get("system"), where)
    accepted = []
    # Parquet's structs have the keys of all rows, with nulls.
    truth = without_nulls(_objects(row.get("ground_truth") or [], "ground_truth", where))
    for call in truth:
        for name, arguments in call.items():
            if not isinstance(arguments, dict) or not all(map(_are_choices, arguments.values())):
                raise UserError(
                    f"{where}: ground_truth must be [{{function: {{parameter: [accepted"
                    f" values]}}}}]; found {call!r:.60}. Fix the row."
                )
            accepted.append({"name": name, "arguments": arguments})
    functions = row["function"] if isinstance(row["function"], list | str) else [row["function"]]
    listed = without_nulls(_objects(functions, "function", where))
    tools = [openai_tool(tool, where) for tool in listed]
    if accepted:
        messages = [*messages, calling_message([reference_call(call, tools) for call in accepted])]
    return {"messages": messages, "tools": tools, "accepted": accepted}


def _are_choices(value: Any) -> bool:
    """Whether this is a list of accepted values; inside of one, an object has such a list for each
    key."""
    return isinstance(value, list) and bool(value) and all(map(_is_choice, value))


def _is_choice(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_are_choices, value.values()))
    return not isinstance(value, list) or all(map(_is_choice, value))


def _objects(value: Any, column: str, where: str) -> list[Row]:
    """A column's list of objects, decoded if it is JSON text."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
        items = [json.loads(item) if isinstance(item, str) else item for item in found]
    except (ValueError, TypeError, RecursionError):
        items = [None]
    if not all(isinstance(item, dict) for item in items):
        raise UserError(
            f"{where}: column {column!r} must be a list of objects; found {value!r:.60}. Fix the"
            " row."
        )
    return items


def reference_call(accepted: Row, tools: list[Row]) -> FunctionCall:
    """The call with the first accepted value of each parameter that is required or may not be left
    out."""
    schema: Row = next(
        (each["function"] for each in tools if each["function"]["name"] == accepted["name"]), {}
    )
    required = schema.get("parameters", {}).get("required", [])
    arguments = {}
    for name, choices in accepted["arguments"].items():
        if name in required or "" not in choices:
            arguments[name] = _first(next((choice for choice in choices if choice != ""), ""))
    return FunctionCall(accepted["name"], arguments)


def _first(choice: Any) -> Any:
    """An accepted value with the first of the accepted values inside of it."""
    if isinstance(choice, dict):
        return {key: _first(values[0]) for key, values in choice.items() if "" not in values}
    return [_first(item) for item in choice] if isinstance(choice, list) else choice


def _exactly(call: FunctionCall) -> Row:
    """The accepted call that is this call and no other."""
    return {
        "name": call.name,
        "arguments": {name: [_only(value)] for name, value in call.arguments.items()},
        "exact": True,
    }


def _only(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: [_only(item)] for key, item in value.items()}
    return [_only(item) for item in value] if isinstance(value, list) else value


def _calls(message: Row | None) -> list[FunctionCall]:
    """The calls of a message, their arguments decoded; other text than JSON counts as no
    arguments."""
    calls = []
    for call in (message or {}).get("tool_calls", []):
        arguments = call["function"].get("arguments")
        calls.append(
            FunctionCall(call["function"]["name"], arguments if isinstance(arguments, dict) else {})
        )
    return calls


def _with_calls(message: Row, where: str) -> Row:
    """The message with its calls in `tool_calls`, as {type, function: {name, arguments: object}}.

    Calls in the text of an assistant are taken out of it. One that cannot be read stays, with
    weight 0.
    """
    role, text = message["role"], text_of_parts(message)
    if role == "tool" and (response := _HERMES_RESPONSE.match(text)):
        return {**message, "content": response[1]}
    if role != "assistant":
        return message
    if (single := message.get("function_call")) is not None:
        rest = {key: value for key, value in message.items() if key != "function_call"}
        message = {**rest, "tool_calls": [single]}
    if calls := message.get("tool_calls"):
        return {**message, "tool_calls": [_openai_call(call, where) for call in calls]}
    if BROKEN_CALL in message or not any(tag in text for tag in CALL_TAGS):
        return message
    return with_parsed_calls(message, text)


def _openai_call(call: Any, where: str) -> Row:
    """A call as {type, function: {name, arguments: object}}. UserError if it is none."""
    function = call.get("function", call) if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    try:
        arguments = (
            json.loads(arguments)
            if isinstance(arguments, str) and arguments.strip()
            else arguments or {}
        )
    except (ValueError, RecursionError):
        arguments = None
    if (
        not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
        or not isinstance(arguments, dict)
    ):
        raise UserError(
            f"{where}: a call must be {{name, arguments: {{...}}}}; found {call!r:.60}. Fix the"
            " row."
        )
    kept = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {
        **kept,
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _glaive(row: Row, where: str) -> Row:
    instructions, tools = _glaive_functions(
        str(row["system"]).removeprefix("SYSTEM:").strip(), where
    )
    before, *parts = _GLAIVE_TURN.split(str(row["chat"]))
    if before.strip():
        raise UserError(
            f"{where}: column 'chat' must begin with USER: or ASSISTANT:; found"
            f" {before.strip()!r:.60}."
        )
    messages = [{"role": "system", "content": instructions}] if instructions else []
    for who, text in zip(parts[::2], parts[1::2], strict=True):
        if content := text.replace(_GLAIVE_END, "").strip():
            messages.append({"role": _GLAIVE_ROLES[who], "content": content})
    if not messages:
        raise UserError(f"{where}: column 'chat' has no turn. Remove the row.")
    return {"messages": normalised_messages(messages, where), "tools": tools}


def _glaive_functions(system: str, where: str) -> tuple[str, list[Row]]:
    """The instructions, and the functions: JSON objects that follow them."""
    begin = system.find("{")
    if begin < 0:
        return system, []
    tools, decoder, position = list[Row](), json.JSONDecoder(strict=False), begin
    while position < len(system):
        try:
            tool, position = decoder.raw_decode(system, position)
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{where}: column 'system': a function is no JSON ({error}). Fix the row."
            ) from None
        tools.append(tool)
        position += len(system[position:]) - len(system[position:].lstrip(" \n\r\t,"))
    return _GLAIVE_INTRODUCTION.sub(".", system[:begin].strip()), tools
