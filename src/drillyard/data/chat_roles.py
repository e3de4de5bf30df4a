"""Who speaks in a conversation: one table of the names that data sets use, for every format of
chats.

A role of the table becomes one of the five that chat templates know. A turn that is a call itself
(`function_call` of LLaMA-Factory, `tool_call` of ms-swift) becomes an assistant's message with
`tool_calls`; one whose call cannot be read stays as text and is not learnt (`BROKEN_CALL`). A role
that is not in the table is left as it is: `require_known_roles` refuses it unless the chat template
names it.
"""

from __future__ import annotations

import re
from typing import Any

from drillyard.data.call_syntax import FunctionCall, UnparseableCall, parse_calls
from drillyard.data.raw_batches import Row
from drillyard.errors import UserError

BROKEN_CALL = "broken_call"
"""The key of a message, and the count of rows, whose call cannot be read."""
SYSTEM_REPLACED = "system_replaced"
"""The key of a row, and the count of rows, whose system message lists the tools: its text is not
used."""
ROLES = (
    {role: role for role in ("system", "developer", "user", "assistant", "tool")}
    | dict.fromkeys(("human", "prompter"), "user")
    | dict.fromkeys(("gpt", "chatgpt", "bot", "ai", "model"), "assistant")
    | dict.fromkeys(("function_call", "tool_call"), "assistant")
    | dict.fromkeys(("function", "observation", "ipython"), "tool")
    | dict.fromkeys(("tool_response", "tool_result", "tool_output"), "tool")
    | dict.fromkeys(("function_response", "function_result"), "tool")
)
"""Names of speakers in OpenAI's rows, ShareGPT, OpenAssistant, LangChain, Gemini, Llama,
LLaMA-Factory and ms-swift, and the roles of chat templates that they are."""
_CALL_ROLES = ("function_call", "tool_call")


def is_call_role(role: str) -> bool:
    """Whether a turn of this role is a call, written as text."""
    return role.strip().lower() in _CALL_ROLES


def template_role(role: str) -> str:
    """The role of chat templates that a name stands for; an unknown one as it is."""
    return ROLES.get(role.strip().lower(), role)


def require_known_roles(messages: list[Row], template: str, where: str) -> None:
    """Raise UserError for a role that neither the table nor the template names."""
    for number, message in enumerate(messages, 1):
        role = message["role"]
        if role not in ROLES and not re.search(rf"""(['"]){re.escape(role)}\1""", template):
            raise UserError(
                f"{where}: message {number} has the role {role!r}, which neither the chat template"
                f" nor Drillyard knows. Use one of {', '.join(ROLES)}, or remove the row."
            )


def calling_message(calls: list[FunctionCall], content: str = "") -> Row:
    """The assistant's message with these calls. An empty content is there, since some templates
    need one."""
    written = [
        {"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls
    ]
    return {"role": "assistant", "content": content, "tool_calls": written}


def with_parsed_calls(message: Row, text: str) -> Row:
    """The message with the calls of its text in `tool_calls`; with weight 0 if none can be
    read."""
    try:
        content, found = parse_calls(text)
    except UnparseableCall:
        found = []
    return (
        {**message, **calling_message(found, content)}
        if found
        else {**message, "weight": 0, BROKEN_CALL: True}
    )


def with_call_ids(messages: list[Row]) -> list[Row]:
    """Number the calls that have no id, and name them in the results that follow: Mistral's
    template needs ids."""
    number, waiting = 0, list[str]()
    result = []
    for message in messages:
        if calls := message.get("tool_calls"):
            calls = [{"id": f"call{number + i:05d}", **call} for i, call in enumerate(calls)]
            message, number = {**message, "tool_calls": calls}, number + len(calls)
            waiting = [call["id"] for call in calls]
        elif message["role"] == "tool" and waiting:
            message = {"tool_call_id": waiting.pop(0), **message}
        result.append(message)
    return result


def joined_calls(messages: list[Row], are_calls: list[bool]) -> list[Row]:
    """The messages with turns that are calls and follow each other joined to one: ms-swift's
    parallel calls."""
    result: list[Row] = []
    is_before = False
    for message, is_call in zip(messages, are_calls, strict=True):
        is_call = is_call and "tool_calls" in message
        if is_call and is_before:
            calls: list[Any] = [*result[-1]["tool_calls"], *message["tool_calls"]]
            result[-1] = {**result[-1], "tool_calls": calls}
        else:
            result.append(message)
        is_before = is_call
    return result
