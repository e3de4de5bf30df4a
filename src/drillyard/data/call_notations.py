"""Readers of the notations in which models write function calls (`call_syntax.py` lists them).

A reader takes the text, the place after the marker that begins a call, and the functions' schemas;
it returns the calls and the place where it stopped. JSON, Python and tagged text are decoded from
the front, so a marker inside of a string ends nothing. ValueError says why a text cannot be read.

Qwen3-Coder, GLM and MiniMax write text and numbers alike, without quotes. There the parameter's
schema decides: a text that JSON (or Python's True, False, None) reads as a value of an allowed type
is that value, every other one is text. Without a schema the text 12 is a number.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from drillyard.data.schema_types import allows_parameter

Call = tuple[str, dict[str, Any]]
"""A function's name and its arguments."""
Schemas = Mapping[str, Any]
"""The schema of each function's parameters."""
Reader = Callable[[str, int, Schemas], tuple[list[Call], int]]

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"\s*")
_BETWEEN_VALUES = re.compile(r"[\s,;]*")
_QUOTED_ARGUMENTS = re.compile(r"""("arguments"\s*:\s*)'(.*)'(\s*\}\s*)\Z""", re.DOTALL)
_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_JSON_WORDS = {"true": True, "false": False, "null": None}


def json_values(text: str, position: int, end: str = "") -> tuple[list[Call], int]:
    """The calls of one or more JSON values, up to the tag `end` if it follows them."""
    calls = []
    while True:
        value, position = _json_value(text, position)
        calls += calls_of(value)
        following = _skip(text, position, _BETWEEN_VALUES)
        if not text.startswith(("{", "["), following):
            break
        position = following
    return calls, _after(text, position, end)


def calls_of(value: Any) -> list[Call]:
    """The calls in a decoded JSON value: one, or a list of them."""
    if isinstance(value, list):
        return [call for item in value for call in calls_of(item)]
    function = value.get("function", value) if isinstance(value, dict) else None
    name = function.get("name", function.get("tool_name")) if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str):
        raise ValueError("not {name, arguments}")
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        arguments = _decoded(arguments)
    if not isinstance(arguments, dict | None):
        raise ValueError(f"the arguments of {name} are not an object")
    return [(name, arguments or {})]


def read_tool_call(text: str, position: int, schemas: Schemas) -> tuple[list[Call], int]:
    """After <tool_call>: JSON as Hermes and Qwen have it (or Python's notation of it, as some rows
    of Hermes), <function=...> as Qwen3-Coder, or a name with <arg_key> and <arg_value> as GLM."""
    start = _skip(text, position)
    if text.startswith("<function=", start):
        calls: list[Call] = []
        place = end = start
        while text.startswith("<function=", place):
            found, end = read_function(text, place + len("<function="), schemas)
            calls, place = [*calls, *found], _skip(text, end)
        return calls, _after(text, end, "</tool_call>")
    if not text.startswith(("{", "["), start):
        return _glm_call(text, start, schemas)
    try:
        return json_values(text, start, "</tool_call>")
    except ValueError:
        end = text.find("</tool_call>", start)
        while end >= 0:
            if (literal := _python_value(text[start:end].strip())) is not None:
                return calls_of(literal), end + len("</tool_call>")
            end = text.find("</tool_call>", end + 1)
        raise


def read_function(text: str, position: int, schemas: Schemas) -> tuple[list[Call], int]:
    """After <function=: Qwen3-Coder's parameters in tags, or Llama's JSON object."""
    name, position = _up_to(text, position, ">")
    start = _skip(text, position)
    if text.startswith("{", start):
        arguments, position = _json_value(text, start)
        return calls_of({"name": name, "arguments": arguments}), _after(
            text, position, "</function>"
        )
    arguments = {}
    while found := _PARAMETER.match(text, start):
        value = found[2].removeprefix("\n").removesuffix("\n")
        arguments[found[1].strip()] = _typed(value, name, found[1].strip(), schemas)
        start = _skip(text, found.end())
    if not text.startswith("</function>", start):
        raise ValueError(f"<function={name}> does not end")
    return [(name, arguments)], start + len("</function>")


_PARAMETER = re.compile(
    r"<parameter=([^>\n]+)>(.*?)</parameter>(?=\s*(?:<parameter=|</function>))", re.DOTALL
)
_GLM_NAME = re.compile(r"([\w.:/-]+)\s*(?=<arg_key>|</tool_call>)")
_GLM_ARGUMENT = re.compile(
    r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>(?=\s*(?:<arg_key>|</tool_call>))",
    re.DOTALL,
)


def _glm_call(text: str, position: int, schemas: Schemas) -> tuple[list[Call], int]:
    found = _GLM_NAME.match(text, position)
    if found is None:
        raise ValueError("no call after <tool_call>")
    name, start, arguments = found[1], found.end(), {}
    while found := _GLM_ARGUMENT.match(text, start):
        key = found[1].strip()
        arguments[key] = _typed(found[2], name, key, schemas)
        start = _skip(text, found.end())
    if not text.startswith("</tool_call>", start):
        raise ValueError(f"the call of {name} does not end")
    return [(name, arguments)], start + len("</tool_call>")


_INVOKED = re.compile(
    r'<(?P<prefix>\uff5cDSML\uff5c|\w+:|)parameter name="(?P<key>[^"]*)"'
    r'(?: string="(?P<is_text>true|false)")?>(?P<value>.*?)</(?P=prefix)parameter>'
    r"(?=\s*(?:<(?P=prefix)parameter|</(?P=prefix)invoke>))",
    re.DOTALL,
)
_INVOKE_END = re.compile(r"</(?:\uff5cDSML\uff5c|\w+:)?invoke>")


def read_invoke(text: str, position: int, schemas: Schemas) -> tuple[list[Call], int]:
    """After <invoke name=": MiniMax's and DeepSeek 3.2's parameters in tags."""
    name, position = _up_to(text, position, '">')
    start, arguments = _skip(text, position), {}
    while found := _INVOKED.match(text, start):
        key, is_text, value = found["key"], found["is_text"], found["value"]
        if is_text is None:
            arguments[key] = _typed(value, name, key, schemas)
        else:
            arguments[key] = value if is_text == "true" else _decoded(value)
        start = _skip(text, found.end())
    end = _INVOKE_END.match(text, start)
    if end is None:
        raise ValueError(f"the call of {name} does not end")
    return [(name, arguments)], end.end()


def read_glaive(text: str, position: int, schemas: Schemas) -> tuple[list[Call], int]:
    """After <functioncall>: an object whose arguments are JSON text between single quotes, in which
    a quote may be escaped."""

    def unquoted(found: re.Match[str]) -> str:
        return found[1] + found[2].replace("\\'", "'") + found[3]

    end = text.find("<functioncall>", position)
    end = len(text) if end < 0 else end
    body = _QUOTED_ARGUMENTS.sub(unquoted, text[position:end].strip())
    value = _decoded(body, strict=False)  # the rows have line breaks inside strings
    return calls_of(value if isinstance(value, dict) else None), end


def read_mistral(text: str, position: int, schemas: Schemas) -> tuple[list[Call], int]:
    """After [TOOL_CALLS]: JSON, or a name and [ARGS] with an object."""
    start = _skip(text, position)
    if text.startswith(("{", "["), start):
        return json_values(text, start)
    name, position = _up_to(text, start, "[ARGS]")
    arguments, position = _json_value(text, position)
    return calls_of({"name": name.partition("[CALL_ID]")[0].strip(), "arguments": arguments}), (
        position
    )


_NAMED_CALL = re.compile(
    r"\s*(?:(?:<\uff5ctool\u2581call\u2581begin\uff5c>)?"
    r"(?:function<\uff5ctool\u2581sep\uff5c>)?([^<>\n]+?)(?:<\uff5ctool\u2581sep\uff5c>|\n```json\n)"
    r"|(?:<\|tool_call_begin\|>)?\s*(?:functions\.)?([^<>\n]+?)(?::\d+)?\s*"
    r"<\|tool_call_argument_begin\|>)"
)
_NAMED_CALL_END = re.compile(
    r"(?:\s*```)?\s*(?:<\uff5ctool\u2581call\u2581end\uff5c>|<\|tool_call_end\|>)?"
)


def read_named_calls(text: str, position: int, schemas: Schemas) -> tuple[list[Call], int]:
    """After DeepSeek's and Kimi's begin of all calls: each is a name and a JSON object, in tags of
    its own."""
    calls: list[Call] = []
    while found := _NAMED_CALL.match(text, position):
        arguments, position = _json_value(text, found.end())
        calls += calls_of({"name": (found[1] or found[2]).strip(), "arguments": arguments})
        position = _skip(text, position, _NAMED_CALL_END)
    if not calls:
        raise ValueError("no call after the begin of calls")
    return calls, position


def read_harmony(text: str, position: int, schemas: Schemas) -> tuple[list[Call], int]:
    """After to=functions. of gpt-oss: a name, words on the channel, and <|message|> with JSON."""
    head, position = _up_to(text, position, "<|message|>")
    name = re.split(r"[\s<]", head, maxsplit=1)[0]
    arguments, position = _json_value(text, position)
    return calls_of({"name": name, "arguments": arguments}), position


def read_gemma(text: str, position: int, schemas: Schemas) -> tuple[list[Call], int]:
    """After Gemma's begin of a call: call:NAME{key:value,...}, text between <|"|> or <escape>."""
    found = re.compile(r"\s*call:([^{}\s]+)(?=\{)").match(text, position)
    if found is None:
        raise ValueError("no call:NAME{...}")
    arguments, position = _gemma_value(text, found.end())
    for end in ("<tool_call|>", "<end_function_call>"):
        position = _after(text, position, end)
    return [(found[1], arguments)], position


_GEMMA_KEY = re.compile(r'\s*(?:<\|"\|>(.+?)<\|"\|>|([^\s:{}\[\],]+))\s*:', re.DOTALL)
_GEMMA_TEXT = re.compile(r'<\|"\|>(.*?)<\|"\|>|<escape>(.*?)<escape>', re.DOTALL)
_GEMMA_WORD = re.compile(r"[^\s,\]}]+")


def _gemma_value(text: str, position: int) -> tuple[Any, int]:
    position = _skip(text, position)
    if text.startswith("{", position):
        entries: dict[str, Any] = {}
        position += 1
        while found := _GEMMA_KEY.match(text, position):
            key = found[1] or found[2]
            entries[key], position = _gemma_value(text, found.end())
            position = _after(text, position, ",")
        return entries, _required(text, position, "}")
    if text.startswith("[", position):
        items = []
        position = _skip(text, position + 1)
        while position < len(text) and text[position] != "]":
            item, position = _gemma_value(text, position)
            items.append(item)
            position = _skip(text, _after(text, position, ","))
        return items, _required(text, position, "]")
    if found := _GEMMA_TEXT.match(text, position):
        return found[1] if found[1] is not None else found[2], found.end()
    if found := _GEMMA_WORD.match(text, position):
        return _decoded(found[0]), found.end()
    raise ValueError("a value is missing")


def read_python(text: str, position: int, schemas: Schemas) -> tuple[list[Call], int]:
    """After <|tool_call_start|> of LFM2: calls in Python up to its end tag, or to the end."""
    ends = [found.start() for found in re.finditer(r"<\|tool_call_end\|>", text)]
    for end in (*(each for each in ends if each >= position), len(text)):
        if (calls := python_calls(text[position:end].strip())) is not None:
            return calls, _after(text, end, "<|tool_call_end|>")
    raise ValueError("no calls in Python's notation")


def python_calls(text: str) -> list[Call] | None:
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


def _python_call(node: ast.expr) -> Call:
    """A call with keyword arguments of literals. Raises ValueError for anything else."""
    if (
        not isinstance(node, ast.Call)
        or node.args
        or any(keyword.arg is None for keyword in node.keywords)
    ):
        raise ValueError("no call by keywords")
    arguments = {
        str(keyword.arg): _as_json(ast.literal_eval(_JsonWords().visit(keyword.value)))
        for keyword in node.keywords
    }
    return _dotted_name(node.func), arguments


class _JsonWords(ast.NodeTransformer):
    """true, false and null as Python has them: some models write JSON between Python's brackets."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_WORDS[node.id]) if node.id in _JSON_WORDS else node


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


def _python_value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _typed(text: str, function: str, parameter: str, schemas: Schemas) -> Any:
    """A value that is written without quotes whatever its type."""
    word = text.strip()
    try:
        value = _PYTHON_WORDS[word] if word in _PYTHON_WORDS else json.loads(word)
    except (ValueError, RecursionError):
        return text
    schema = schemas.get(function, {})
    is_text = allows_parameter(schema, parameter, text)
    return text if is_text and not allows_parameter(schema, parameter, value) else value


def _json_value(text: str, position: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, _skip(text, position))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON: {error}") from None


def _decoded(text: str, *, strict: bool = True) -> Any:
    try:
        return json.loads(text, strict=strict)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON: {error}") from None


def _skip(text: str, position: int, pattern: re.Pattern[str] = _SPACE) -> int:
    found = pattern.match(text, position)
    return found.end() if found else position


def _after(text: str, position: int, tag: str) -> int:
    """The place after a tag that follows, with space before it; the same place if none does."""
    start = _skip(text, position)
    return start + len(tag) if tag and text.startswith(tag, start) else position


def _required(text: str, position: int, tag: str) -> int:
    end = _after(text, position, tag)
    if end == position:
        raise ValueError(f"no {tag}")
    return end


def _up_to(text: str, position: int, tag: str) -> tuple[str, int]:
    end = text.find(tag, position)
    if end < 0:
        raise ValueError(f"no {tag}")
    return text[position:end].strip(), end + len(tag)
