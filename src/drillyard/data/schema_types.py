"""Which type a value may have by a JSON Schema, and which parameters a schema has.

A schema is read as JSON Schema 2020-12 defines it, and earlier drafts and OpenAPI 3.0 where they
differ: `type` (a name or a list of names), `enum` and `const` (the types of their values), `items`
and `prefixItems` (or a list of `items`), `anyOf`, `oneOf` and `allOf`, `$ref` to a place in the
same schema, `true` and `false`, `nullable`. Two rules are those of the BFCL: 2.0 is not an integer,
and the values inside an object have any type.

Limits: keywords that do not concern the type (ranges, patterns, `not`, `if`) are not checked, a
`$ref` to another document admits any value, and so does a type that JSON Schema does not name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

Schema = Any
"""An object of keywords, or true or false."""

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
_PLAIN = frozenset(_TYPES) - {"array"}
_COMBINING = frozenset({"$ref", "anyOf", "oneOf", "allOf", "nullable"})


def allows_parameter(parameters: Schema, name: str, value: Any) -> bool:
    """Whether a JSON value has a type that a function's `parameters` allow for one of them."""
    if isinstance(parameters, dict) and _COMBINING.isdisjoint(parameters):  # as most are
        schema = (parameters.get("properties") or {}).get(name)
        if schema is None and not isinstance(parameters.get("additionalProperties"), dict):
            return True
        if isinstance(schema, dict) and _COMBINING.isdisjoint(schema):
            declared = schema.get("type")
            if isinstance(declared, str) and declared in _PLAIN:
                return type(value) in _TYPES[declared]
    return _Check(parameters).allows_property(name, value, parameters)


def required_parameters(parameters: Schema) -> list[str]:
    """Names of the parameters that a function's `parameters` require."""
    names: list[str] = []
    pending, seen = [parameters], set[int]()
    while pending:
        schema = pending.pop()
        if isinstance(schema, dict) and id(schema) not in seen:
            seen.add(id(schema))
            required = schema.get("required")
            names += required if isinstance(required, list) else []
            pending += [*_referenced(schema, parameters), *_schemas(schema, "allOf")]
    return names


class _Check:
    """Checks values against the parts of one schema; each pair of them once, so that no schema
    that refers to itself takes long."""

    def __init__(self, root: Schema) -> None:
        self.root = root
        self.seen: dict[tuple[int, int, str], bool] = {}

    def allows(self, value: Any, schema: Schema) -> bool:
        """Whether the schema allows the value's type."""
        return self._once(value, schema, "", lambda: self._allows(value, schema))

    def allows_property(self, name: str, value: Any, schema: Schema) -> bool:
        """Whether the schema of an object allows the value's type for this property."""
        return self._once(value, schema, name, lambda: self._allows_property(name, value, schema))

    def _once(self, value: Any, schema: Schema, name: str, check: Callable[[], bool]) -> bool:
        if not isinstance(schema, dict):
            return schema is not False
        key = (id(value), id(schema), name)
        if key not in self.seen:
            self.seen[key] = True  # what a reference to itself adds
            self.seen[key] = check()
        return self.seen[key]

    def _allows(self, value: Any, schema: dict[str, Any]) -> bool:
        if value is None and schema.get("nullable") is True:
            return True
        if not _has_type(value, schema) or not self._combined(
            schema, lambda part: self.allows(value, part)
        ):
            return False
        return not isinstance(value, list) or all(
            self.allows(item, each)
            for item, each in zip(value, _item_schemas(schema), strict=False)
        )

    def _allows_property(self, name: str, value: Any, schema: dict[str, Any]) -> bool:
        properties = schema.get("properties")
        if isinstance(properties, dict) and name in properties:
            own = properties[name]
        else:
            others = schema.get("additionalProperties")
            own = others if isinstance(others, dict) else True
        return self.allows(value, own) and self._combined(
            schema, lambda part: self.allows_property(name, value, part)
        )

    def _combined(self, schema: dict[str, Any], holds: Callable[[Schema], bool]) -> bool:
        """Whether the schemas hold that are combined with this one."""
        return all(map(holds, [*_referenced(schema, self.root), *_schemas(schema, "allOf")])) and (
            all(
                any(map(holds, branches))
                for keyword in ("anyOf", "oneOf")
                if (branches := _schemas(schema, keyword))
            )
        )


def _has_type(value: Any, schema: dict[str, Any]) -> bool:
    """Whether the value has the schema's own type: that of `type`, or of a value of `enum` or
    `const`."""
    declared = schema.get("type")
    names = declared if isinstance(declared, list) else [declared]
    known = [_TYPES.get(name, ()) for name in names if isinstance(name, str)]
    if known:
        return not all(known) or any(type(value) in types for types in known)
    for keyword in ("enum", "const"):
        if keyword in schema:
            listed = schema[keyword] if keyword == "enum" else [schema[keyword]]
            if isinstance(listed, list) and listed:
                return any(
                    type(value) is type(each) or (type(value) is int and type(each) is float)
                    for each in listed
                )
    return True


def _item_schemas(schema: dict[str, Any]) -> Iterator[Schema]:
    """The schema of each item of a list, without end."""
    items = schema.get("items", True)
    if isinstance(items, list):
        yield from items
        items = schema.get("additionalItems", True)
    else:
        yield from _schemas(schema, "prefixItems")
    while True:
        yield items


def _schemas(schema: dict[str, Any], keyword: str) -> list[Schema]:
    found = schema.get(keyword)
    return found if isinstance(found, list) else []


def _referenced(schema: dict[str, Any], root: Schema) -> list[Schema]:
    """The schema that `$ref` names (RFC 6901 in a URI's fragment), if it is in this document."""
    reference = schema.get("$ref")
    document, _, pointer = reference.partition("#") if isinstance(reference, str) else ("?", "", "")
    if document or (pointer and not pointer.startswith("/")):
        return []
    found = root
    for step in unquote(pointer).split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        elif isinstance(found, dict) and key in found:
            found = found[key]
        else:
            return []
    return [found]
