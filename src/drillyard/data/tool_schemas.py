"""Functions that a model may call, in the one form that chat templates take: OpenAI's list of
`tools`.

    {type: function, function: {name, description, parameters: {type: object, properties: {...},
    required: [...]}}}

Read as well: the inner object alone; xLAM's parameters, {name: {type, description, default}}
without a schema around them; and the types of Python and of the BFCL (str, `List[int]`, float,
dict, tuple, any), which become those of JSON Schema. Other keys are kept as they are.
"""

from __future__ import annotations

import re
from typing import Any

from drillyard.data.raw_batches import Row
from drillyard.errors import UserError

_JSON_TYPES = {
    "string": "string",
    "str": "string",
    "integer": "integer",
    "int": "integer",
    "number": "number",
    "float": "number",
    "double": "number",
    "boolean": "boolean",
    "bool": "boolean",
    "array": "array",
    "list": "array",
    "tuple": "array",
    "set": "array",
    "sequence": "array",
    "object": "object",
    "dict": "object",
    "mapping": "object",
    "null": "null",
    "any": "",
}
"""JSON Schema's types by name in JSON Schema, Python and the BFCL; "": any value."""
_ANY_TYPE = {"$ref", "anyOf", "oneOf", "allOf"}
"""Keywords of a schema whose type another schema may state."""
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_OBJECTS = ("$defs", "definitions", "patternProperties")
"""Keywords with schemas: lists of them, and objects with schemas by name."""
_PYTHON_TYPE = re.compile(r"(\w+)\s*(?:\[(.*)\])?\Z", re.DOTALL)
_OPTIONAL = re.compile(r",\s*optional\b.*\Z", re.IGNORECASE | re.DOTALL)


def openai_tool(tool: Row, where: str) -> Row:
    """One tool in OpenAI's form. UserError, with the function's name, if it is not a schema."""
    function = tool.get("function", tool)
    if (
        not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
        or not function["name"].strip()
    ):
        raise UserError(
            f"{where}: a tool must be {{name, description, parameters}}; found {tool!r:.60}. Fix"
            " its schema."
        )
    name = function["name"].strip()
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if isinstance(parameters, dict) and parameters and not _is_schema(parameters):
        parameters = _xlam_parameters(parameters, f"{where}: tool {name}")
    schema = _json_schema(parameters, f"{where}: tool {name}", "parameters")
    if not schema.keys() & _ANY_TYPE:
        schema.setdefault("type", "object")
    declared = schema.get("type", "object")
    if "object" not in (declared if isinstance(declared, list) else [declared]):
        raise _no_schema(f"{where}: tool {name}", "parameters", "must be of type object", declared)
    function = {
        key: value for key, value in function.items() if key not in ("name", "parameters", "type")
    }
    return {"type": "function", "function": {"name": name, **function, "parameters": schema}}


def _is_schema(parameters: Row) -> bool:
    """Whether these are a JSON schema, and not xLAM's parameters by name, of which one may be
    called `type`."""
    return (
        "properties" in parameters
        or any(key.startswith("$") for key in parameters)
        or isinstance(parameters.get("type"), str | list)
        or any(
            isinstance(parameters.get(key), list | bool)
            for key in (*_LISTS, "required", "additionalProperties")
        )
    )


def _xlam_parameters(parameters: Row, where: str) -> Row:
    """A schema around xLAM's parameters: required are those without a default whose type does not
    say `optional`."""
    properties, required = {}, []
    for name, value in parameters.items():
        if not isinstance(value, dict):
            raise _no_schema(
                where, f"parameter {name}", "must be an object {type, description}", value
            )
        declared = value.get("type")
        if isinstance(declared, str) and (optional := _OPTIONAL.search(declared)):
            value = {**value, "type": declared[: optional.start()]}
        elif "default" not in value:
            required.append(name)
        properties[name] = value
    return {"type": "object", "properties": properties, "required": required}


def _json_schema(schema: Any, where: str, what: str) -> Row:
    """The schema with JSON Schema's types, at any depth. UserError where it has no shape of a
    schema."""
    if not isinstance(schema, dict):
        raise _no_schema(where, what, "must be a JSON schema (an object)", schema)
    result = {**schema, **_inner_schemas(schema, where, what)}
    properties, required, declared = (
        schema.get("properties"),
        schema.get("required"),
        schema.get("type"),
    )
    if properties is not None:
        if not isinstance(properties, dict):
            raise _no_schema(where, f"properties of {what}", "must be an object", properties)
        result["properties"] = {
            name: _any_schema(value, where, f"parameter {name}")
            for name, value in properties.items()
        }
        declared = declared if declared is not None else "object"
    if required is not None and not (
        isinstance(required, list) and all(isinstance(name, str) for name in required)
    ):
        raise _no_schema(where, f"required of {what}", "must be a list of names", required)
    if declared is None:
        return result
    if isinstance(declared, list) and all(isinstance(name, str) for name in declared):
        names = [_JSON_TYPES.get(name.lower(), name) for name in declared]
        if "" not in names:
            return {**result, "type": names}
        del result["type"]
        return result
    if not isinstance(declared, str):
        raise _no_schema(where, f"type of {what}", "must be the name of a type", declared)
    result.pop("type", None)
    return {**_python_type(declared), **result}


def _any_schema(schema: Any, where: str, what: str) -> Any:
    """A schema inside of another one, which may be true or false."""
    return schema if isinstance(schema, bool) else _json_schema(schema, where, what)


def _inner_schemas(schema: Row, where: str, what: str) -> Row:
    """The keywords of a schema that hold schemas other than `properties`, these with JSON Schema's
    types."""
    found: Row = {}
    for key in ("items", "additionalProperties", *_LISTS, *_OBJECTS):
        value = schema.get(key)
        part = f"{key} of {what}"
        if isinstance(value, dict) and key in _OBJECTS:
            found[key] = {name: _any_schema(each, where, part) for name, each in value.items()}
        elif isinstance(value, list) and key in ("items", *_LISTS):
            found[key] = [_any_schema(each, where, part) for each in value]
        elif isinstance(value, dict) and key in ("items", "additionalProperties"):
            found[key] = _json_schema(value, where, part)
    return found


def _python_type(declared: str) -> Row:
    """{type, items} of a type's name; {} for any value, such as a union. Unknown names stay, as in
    JSON Schema."""
    found = _PYTHON_TYPE.match(declared.strip())
    name = _JSON_TYPES.get(found[1].lower()) if found else ""
    if found is None or name == "" or found[1] in ("Union", "Optional"):
        return {}
    if name is None:
        return {"type": declared}
    inside = found[2]
    items = _python_type(inside) if name == "array" and inside and "," not in inside else {}
    return {"type": name, **({"items": items} if items else {})}


def _no_schema(where: str, what: str, rule: str, found: Any) -> UserError:
    return UserError(f"{where}: {what} {rule}; found {found!r:.60}. Fix the schema.")
