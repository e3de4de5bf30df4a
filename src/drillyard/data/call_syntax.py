"""Function calls in text: how models and data sets write them, read without executing anything.

    <tool_call> {"name": f, "arguments": {...}} </tool_call>      Hermes and Qwen, one call in each pair of tags
    <functioncall> {"name": f, "arguments": '{...}'}              Glaive, with arguments as quoted JSON text
    [TOOL_CALLS] [{"name": f, "arguments": {...}}]                Mistral
    [TOOL_CALLS]f[ARGS]{...}                                      Mistral since 2025, also with [CALL_ID]
    <|tool_call|>[{"name": f, "arguments": {...}}]                Granite, and Phi-4 with <|/tool_call|>
    <tool_calls>[{"name": f, "arguments": {...}}]</tool_calls>    Jamba, MiniMax-M1; Nemotron with <TOOLCALL>
    <|START_ACTION|>[{"tool_name": f, "parameters": {...}}]       Command A, with <|END_ACTION|>
    {"name": f, "parameters": {...}}                              Llama 3 and 4, also after <|python_tag|>; or a list of them
    <tool_call><function=f><parameter=a>1</parameter></function>  Qwen3-Coder, Qwen 3.5, Nemotron 3, with </tool_call>
    <tool_call>f <arg_key>a</arg_key><arg_value>1</arg_value>     GLM, with </tool_call>
    <invoke name="f"><parameter name="a">1</parameter></invoke>   MiniMax-M2 and DeepSeek 3.2, with a prefix in the tags
    <｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜>        DeepSeek 3 and R1, in <｜tool▁calls▁begin｜>
    <|tool_call_begin|>f:0<|tool_call_argument_begin|>{...}       Kimi K2, in <|tool_calls_section_begin|>
    to=functions.f<|channel|>commentary json<|message|>{...}      gpt-oss
    <|tool_call>call:f{a:1,b:<|"|>x<|"|>}<tool_call|>             Gemma 4; FunctionGemma with <escape>
    <|tool_call_start|>[f(a=1)]<|tool_call_end|>                  LFM2
    [f(a=1), module.g(b="x")]                                     Python, as the BFCL asks for; or a single call

Text in none of these notations is an answer without a call. Text that begins like one and cannot be
read is `UnparseableCall`, and so is text after a call. What a model thinks before `</think>` is not
read. Limits: Python calls have keyword arguments of literals only.
"""  # noqa: E501, RUF002

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drillyard.data import call_notations
from drillyard.data.call_notations import Reader, Schemas

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
_GLAIVE = "<functioncall>"
CALL_TAGS = (TOOL_CALL, _GLAIVE)
"""What begins a call in the text of data sets."""


def _json(end: str) -> Reader:
    def read(text: str, position: int, schemas: Schemas) -> tuple[list[call_notations.Call], int]:
        return call_notations.json_values(text, position, end)

    return read


_READERS: dict[str, Reader] = {
    r"<tool_call>": call_notations.read_tool_call,
    r"<functioncall>": call_notations.read_glaive,
    r"\[TOOL_CALLS\]": call_notations.read_mistral,
    r"<\|tool_call\|>": _json("<|/tool_call|>"),
    r"<\|python_tag\|>": _json(""),
    r"<\|python_start\|><\|python_end\|>": _json(""),
    r"<\|python_start\|>": _json("<|python_end|>"),
    r"<tool_calls>(?=\s*[\[{])": _json("</tool_calls>"),
    r"<TOOLCALL>": _json("</TOOLCALL>"),
    r"<\|START_ACTION\|>": _json("<|END_ACTION|>"),
    r"<function=": call_notations.read_function,
    r'<(?:\uff5cDSML\uff5c|\w+:)?invoke name="': call_notations.read_invoke,
    r"<\uff5ctool\u2581calls?\u2581begin\uff5c>": call_notations.read_named_calls,
    r"<\|tool_call(?:s_section)?_begin\|>": call_notations.read_named_calls,
    r"to=functions\.": call_notations.read_harmony,
    r"<\|tool_call>": call_notations.read_gemma,
    r"<start_function_call>": call_notations.read_gemma,
    r"<\|tool_call_start\|>": call_notations.read_python,
}
"""How a call begins, and what reads it from there."""
_NUMBERED = list(_READERS.values())
_BEGIN = re.compile("|".join(_READERS))  # without groups: with them a search takes 50 times as long
_MARKER = re.compile("|".join(f"({pattern})" for pattern in _READERS))
_AFTER_CALL = re.compile(
    rf"(?:(?!{'|'.join(_READERS)})"
    r"(?:\s|<\|start\|>assistant(?: (?=to=functions)| to=[\w.-]+(?=<\|message\|>))?"
    r"|<\|channel\|>commentary|<\|[^|<>\s]*\|?>|<\uff5c[^\uff5c<>\s]*end\uff5c>"
    r"|</?(?:\uff5cDSML\uff5c|\w+:)?(?:function_calls|tool_calls?)>))*"
)
"""What may stand after a call: tags that end it and its turn, and the begin of a further one."""
_FENCE = re.compile(r"\A```\w*\n(.*?)\n?```\Z", re.DOTALL)
_JSON_CALLS = re.compile(r"(?:\[\s*)?\{")
_REASONING, _REASONING_END = "<think>", "</think>"


@dataclass(frozen=True)
class FunctionCall:
    """A call: the function's name, and its arguments by name as JSON values."""

    name: str
    arguments: dict[str, Any]


class UnparseableCall(ValueError):
    """Text that begins like a call and is none."""


def parse_calls(
    text: str, schemas: Mapping[str, Any] | None = None
) -> tuple[str, list[FunctionCall]]:
    """The text before the first call, and the calls in their order. Raises UnparseableCall.

    `schemas`: the schema of each function's parameters, by its name, for notations that do not tell
    text from numbers.
    """
    try:
        content, calls = _parsed(text, schemas or {})
    except (ValueError, RecursionError) as error:
        raise UnparseableCall(str(error)) from None
    return content, [FunctionCall(*call) for call in calls]


def _parsed(text: str, schemas: Schemas) -> tuple[str, list[call_notations.Call]]:
    thought = text.find(_REASONING_END) + len(_REASONING_END) if _REASONING_END in text else 0
    marker = _BEGIN.search(text, thought)
    if marker is None and not text.lstrip().startswith(_REASONING):
        marker = _BEGIN.search(text)  # a call may have </think> in a string
    if marker is None:
        calls = _bare_calls(text[thought:])
        return ("", calls) if calls else (text.strip(), [])
    content, calls = text[: marker.start()].strip(), []
    position = marker.start()
    while found := _MARKER.match(text, position):
        assert found.lastindex is not None
        read, position = _NUMBERED[found.lastindex - 1](text, found.end(), schemas)
        calls += read
        after = _AFTER_CALL.match(text, position)
        position = after.end() if after else position
    if position < len(text):
        raise ValueError(f"text after a call: {text[position:]:.40}")
    return content, calls


def _bare_calls(text: str) -> list[call_notations.Call]:
    """The calls of a text that has no marker; none if it is not in a notation of calls."""
    stripped = text.strip()
    fenced = _FENCE.match(stripped)
    stripped = (fenced[1] if fenced else stripped).strip()
    is_json = _JSON_CALLS.match(stripped) is not None
    if not is_json and (python := call_notations.python_calls(stripped)) is not None:
        return python
    if not stripped.startswith(("{", "[")):
        return []
    calls, end = call_notations.json_values(stripped, 0)
    if end < len(stripped):
        raise ValueError(f"text after a call: {stripped[end:]:.40}")
    return calls
