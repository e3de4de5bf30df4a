"""What of a Terraform document hashicorp/google refuses, by its schema: names, types, counts.

The schema is that of provider 7.45.0 (google_schema.json, which the provider of the integration
tests serves, too), or as a later version changes it. It has no rules of values; those are the
plan's own, and tested as such.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

OF_TERRAFORM = frozenset({"depends_on", "lifecycle", "provider"})
LIFECYCLE = {"ignore_changes", "prevent_destroy", "create_before_destroy", "replace_triggered_by"}
VERSIONS = ("7.45.0", "8.0.0", "8.7.0")
Schema = dict[str, Any]


@cache
def resource_schemas(version: str) -> dict[str, Schema]:
    """The schema of each resource in this version of the provider."""
    data = json.loads(Path(__file__).with_name("google_schema.json").read_text("utf-8"))
    schemas: dict[str, Schema] = copy.deepcopy(data["resources"])
    for later, changes in data["later"].items():
        if VERSIONS.index(later) <= VERSIONS.index(version):
            for kind, lines in changes.items():
                for line in lines:
                    _change(schemas[kind], line)
    return schemas


def _change(schema: Schema, line: str) -> None:
    sign, _, rest = line.partition(" ")
    if sign not in "+-":
        # Another collection type: as JSON a list and a set are the same.
        return
    *above, name = rest.split(".")
    for each in above:
        if each not in schema["blocks"]:
            return
        schema = schema["blocks"][each]
    if sign == "-":
        schema["blocks"].pop(name, None)
        schema["attributes"].pop(name, None)
    else:
        schema["attributes"].setdefault(name, {"type": "dynamic", "optional": True})


def document_problems(document: dict[str, Any], version: str) -> list[str]:
    """Every problem of the resources of a document."""
    schemas = resource_schemas(version)
    found = []
    for kind, bodies in document["resource"].items():
        for label, body in bodies.items():
            if kind not in schemas:
                found.append(f"{kind}: no such resource")
                continue
            found += _problems(body, schemas[kind], f"{kind}.{label}", OF_TERRAFORM)
            found += [
                f"{kind}.{label}.lifecycle.{name}: no such setting"
                for name in body.get("lifecycle", {})
                if name not in LIFECYCLE
            ]
    return found


def _problems(
    body: dict[str, Any], schema: Schema, path: str, also: frozenset[str] = frozenset()
) -> Iterator[str]:
    attributes, blocks = schema["attributes"], schema["blocks"]
    for name in body.keys() - attributes.keys() - blocks.keys() - also:
        yield f"{path}.{name}: no such argument or block"
    for name, attribute in attributes.items():
        if attribute.get("required") and body.get(name) is None:
            yield f"{path}.{name}: required"
        if name in body and not (attribute.get("required") or attribute.get("optional")):
            yield f"{path}.{name}: only the provider sets it"
        if name in body and not _fits(body[name], attribute["type"]):
            yield f"{path}.{name}: {body[name]!r} is not {attribute['type']}"
    for name, block in blocks.items():
        given = body.get(name)
        items = [] if given is None else given if isinstance(given, list) else [given]
        if len(items) < block["min"] or (block["max"] and len(items) > block["max"]):
            yield f"{path}.{name}: {len(items)} blocks, allowed {block['min']} to {block['max']}"
        for number, item in enumerate(items):
            yield from _problems(item, block, f"{path}.{name}[{number}]")


def _fits(value: Any, kind: Any) -> bool:
    if kind == "dynamic" or (isinstance(value, str) and "${" in value):
        return True
    if kind == "string":
        return isinstance(value, str | int | float | bool)
    if kind == "bool":
        return isinstance(value, bool) or value in ("true", "false")
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    outer, inner = kind
    if outer == "map":
        return isinstance(value, dict) and all(_fits(each, inner) for each in value.values())
    return isinstance(value, list) and all(_fits(each, inner) for each in value)


def unknown_references(document: dict[str, Any]) -> set[str]:
    """What a document's resources refer to, or come after, that it does not have. Every expression
    in it must be one reference."""
    resources = document["resource"]
    known = {f"{kind}.{label}" for kind, named in resources.items() for label in named}
    text = json.dumps(resources)
    references = re.findall(r"\$\{([a-z_]+\.[A-Za-z0-9_]+)\.[a-z_]+\}", text)
    assert text.count("${") == len(references)
    after = re.findall(r'"depends_on": \[([^\]]*)\]', text)
    return (set(references) | set(re.findall(r'"([^"]+)"', " ".join(after)))) - known
