"""Function calls in text: how models and data sets write them, read without executing anything.

    <tool_call> {"name": f, "arguments": {...}} </tool_call>      Hermes and Qwen, one call in each pair of tags
    <functioncall> {"name": f, "arguments": '{...}'}              Glaive, with arguments as quoted JSON text
    [TOOL_CALLS] [{"name": f, "arguments": {...}}]                Mistral
    [TOOL_CALLS]f[ARGS]{...}                                      Mistral since 2025, also with [CALL_ID]
    <|tool_call|>[{"name": f, "arguments": {...}}]                Granite, and Phi-4 with <|/tool_call|>
    {"name": f, "parameters": {...}}                              Llama 3, also after <|python_tag|>; or a list of them
    [f(a=1), module.g(b="x")]                                     Python, as the BFCL asks for; or a single call

Text in none of these notations is an answer without a call. Text that begins like one and cannot be
read is `UnparseableCall`. Limits: Python calls have keyword arguments of literals only.
"""  # noqa: E501

from __future__ import annotations

import ast
import json
import re
import warnings
from dataclasses import dataclass
from typing import Any

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
_GLAIVE = "<functioncall>"
CALL_TAGS = (TOOL_CALL, _GLAIVE)
"""What begins a call in the text of data sets."""
_MISTRAL, _ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
_MARKER = re.compile(r"<tool_call>|<functioncall>|\[TOOL_CALLS\]|<\|python_tag\|>|<\|tool_call\|>")
_FENCE = re.compile(r"\A```\w*\n(.*?)\n?```\Z", re.DOTALL)
_QUOTED_ARGUMENTS = re.compile(r"""("arguments"\s*:\s*)'(.*)'(\s*\}\s*)\Z""", re.DOTALL)


@dataclass(frozen=True)
class FunctionCall:
    """A call: the function's name, and its arguments by name as JSON values."""

    name: str
    arguments: dict[str, Any]


class UnparseableCall(ValueError):
    """Text that begins like a call and is none."""


def parse_calls(text: str) -> tuple[str, list[FunctionCall]]:
    """The text before the first call, and the calls in their order. Raises UnparseableCall."""
    first = _MARKER.search(text)
    if first is None:
        stripped = text.strip()
        fenced = _FENCE.match(stripped)
        calls = _bare_calls((fenced[1] if fenced else stripped).strip())
        return ("", calls) if calls else (text.strip(), [])
    markers = list(_MARKER.finditer(text))
    ends = [*(marker.start() for marker in markers[1:]), len(text)]
    calls = []
    for marker, end in zip(markers, ends, strict=True):
        calls += _marked_calls(marker[0], text[marker.end() : end])
    return text[: first.start()].strip(), calls


def _marked_calls(marker: str, body: str) -> list[FunctionCall]:
    if marker == TOOL_CALL:
        body, _, rest = body.partition(TOOL_CALL_END)
        if rest.strip():
            raise UnparseableCall(f"text after {TOOL_CALL_END}: {rest.strip():.40}")
    if marker == _GLAIVE:
        return [_glaive_call(body.strip())]
    body = body.strip().removesuffix("<|/tool_call|>")
    if marker == _MISTRAL and _ARGUMENTS in body:
        name, _, arguments = body.partition(_ARGUMENTS)
        return _calls_of(
            {"name": name.partition("[CALL_ID]")[0].strip(), "arguments": _json(arguments)}
        )
    try:
        return _calls_of(_json(body))
    except UnparseableCall:
        literal = (
            _python_value(body) if marker == TOOL_CALL else None
        )  # Hermes' rows have both notations
        if literal is None:
            raise
        return _calls_of(literal)


def _bare_calls(text: str) -> list[FunctionCall]:
    """The calls of a text that has no marker; none if it is not in a notation of calls."""
    if (python := _python_calls(text)) is not None:
        return python
    return _calls_of(_json(text)) if text.startswith(("{", "[")) else []


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnparseableCall(f"no JSON: {error}") from None


def _calls_of(value: Any) -> list[FunctionCall]:
    """The calls in a decoded JSON value: one, or a list of them."""
    if isinstance(value, list):
        return [call for item in value for call in _calls_of(item)]
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UnparseableCall("not {name, arguments}")
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        arguments = _json(arguments)
    if not isinstance(arguments, dict | None):
        raise UnparseableCall(f"the arguments of {function['name']} are no object")
    return [FunctionCall(function["name"], arguments or {})]


def _glaive_call(text: str) -> FunctionCall:
    """A call whose arguments are JSON text between single quotes, in which a quote may be
    escaped."""

    def unquoted(found: re.Match[str]) -> str:
        return found[1] + found[2].replace("\\'", "'") + found[3]

    try:
        # The rows have line breaks inside strings.
        value = json.loads(_QUOTED_ARGUMENTS.sub(unquoted, text), strict=False)
    except (ValueError, RecursionError) as error:
        raise UnparseableCall(f"no JSON: {error}") from None
    return _calls_of(value if isinstance(value, dict) else None)[0]


def _python_value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _python_calls(text: str) -> list[FunctionCall] | None:
    """The calls of a Python expression: a call, or a list or tuple of calls. None for any other
    text."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of invalid escapes
            tree = ast.parse(text, mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree]
        calls = [_python_call(node) for node in nodes]
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return calls or None


def _python_call(node: ast.expr) -> FunctionCall:
    """A call with keyword arguments of literals. Raises ValueError for anything else."""
    if (
        not isinstance(node, ast.Call)
        or node.args
        or any(keyword.arg is None for keyword in node.keywords)
    ):
        raise ValueError("no call by keywords")
    arguments = {
        str(keyword.arg): _as_json(ast.literal_eval(keyword.value)) for keyword in node.keywords
    }
    return FunctionCall(_dotted_name(node.func), arguments)


def _dotted_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted_name(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise ValueError("no name")


def _as_json(value: Any) -> Any:
    """A literal with tuples as lists; JSON has no tuples. Raises ValueError for sets, bytes and
    complex numbers."""
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    # Python cannot print whole numbers of more than 4,300 digits, which it reads in hexadecimal.
    if isinstance(value, str | int | float | None) and not (
        isinstance(value, int) and value.bit_length() > 1024
    ):
        return value
    raise ValueError(f"a {type(value).__name__} that is not a JSON value")
