"""Tools and calls as text, for chat templates that know neither: the notation of Hermes and Qwen
2.5.

The functions are listed in the system message, or before the first message where the template
refuses a system message. A call is {"name": ..., "arguments": ...} in <tool_call> tags; results are
a user's message in <tool_response> tags. Servers read these calls with their parser `hermes`.
"""

from __future__ import annotations

import json
from typing import Any

from drillyard.data.call_syntax import TOOL_CALL, TOOL_CALL_END
from drillyard.data.message_variants import text_of_parts
from drillyard.data.raw_batches import Row

_INSTRUCTIONS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""  # noqa: E501


def with_tools_as_text(
    messages: list[Row], tools: list[Row] | None, *, system: bool = True
) -> list[Row]:
    """The conversation in messages of content alone. `system`: whether the template takes a system
    message."""
    rest = list(messages)
    opening = []
    while rest and rest[0]["role"] in ("system", "developer"):
        opening.append(text_of_parts(rest.pop(0)))
    if tools:
        opening.append(_INSTRUCTIONS.format(tools="\n".join(map(_json_text, tools))))
    result: list[Row] = []
    for message in rest:
        if message["role"] == "tool":
            response = f"<tool_response>\n{_result_text(message)}\n</tool_response>"
            if result and result[-1].get("from_tools"):
                result[-1]["content"] += f"\n{response}"
            else:
                result.append({"role": "user", "content": response, "from_tools": True})
        else:
            result.append(_with_calls_as_text(message))
    for message in result:
        message.pop("from_tools", None)
    introduction = "\n\n".join(text for text in opening if text)
    if introduction and system:
        return [{"role": "system", "content": introduction}, *result]
    if introduction and result:
        result[0]["content"] = f"{introduction}\n\n{text_of_parts(result[0])}"
    return result


def _with_calls_as_text(message: Row) -> Row:
    calls = [_json_text(_call(call["function"])) for call in message.get("tool_calls", [])]
    parts = [text_of_parts(message), *(f"{TOOL_CALL}\n{call}\n{TOOL_CALL_END}" for call in calls)]
    kept = {
        key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")
    }
    return {**kept, "content": "\n".join(part for part in parts if part)}


def _call(function: Row) -> Row:
    return {"name": function["name"], "arguments": function["arguments"]}


def _result_text(message: Row) -> str:
    content = message.get("content")
    return text_of_parts(message) if not content or text_of_parts(message) else _json_text(content)


def _json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
