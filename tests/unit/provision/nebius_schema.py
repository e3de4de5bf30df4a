"""What of a Terraform document nebius/nebius refuses, by its names and types (nebius_schema.json).

Terraform itself drops names that it does not know inside of an object without a word, so this is
the only check of them. This provider has no blocks: what nests is an attribute.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

OF_TERRAFORM = frozenset({"depends_on", "lifecycle"})
Schema = dict[str, Any]


@cache
def resource_schemas() -> dict[str, Schema]:
    """The schema of each resource."""
    data = json.loads(Path(__file__).with_name("nebius_schema.json").read_text("utf-8"))
    resources: dict[str, Schema] = data["resources"]
    return resources


def document_problems(document: dict[str, Any]) -> list[str]:
    """Every problem of the resources of a document."""
    found = []
    for kind, bodies in document["resource"].items():
        if kind not in resource_schemas():
            found.append(f"{kind}: no such resource")
            continue
        attributes = resource_schemas()[kind]["attributes"]
        for label, body in bodies.items():
            own = {name: value for name, value in body.items() if name not in OF_TERRAFORM}
            found += _problems(own, attributes, f"{kind}.{label}")
    return found


def _problems(body: Any, attributes: dict[str, Any], path: str) -> Iterator[str]:
    if not isinstance(body, dict):
        yield f"{path}: {body!r} is not an object"
        return
    for name in body.keys() - attributes.keys():
        yield f"{path}.{name}: no such argument"
    for name, attribute in attributes.items():
        if attribute.get("required") and body.get(name) is None:
            yield f"{path}.{name}: required"
        if name in body:
            yield from _misfits(body[name], attribute["type"], f"{path}.{name}")


def _misfits(value: Any, kind: Any, path: str) -> Iterator[str]:
    if isinstance(kind, dict):
        yield from _problems(value, kind["object"], path)
    elif isinstance(kind, list) and kind[0] == "list":
        if not isinstance(value, list):
            yield f"{path}: {value!r} is not a list"
            return
        for number, each in enumerate(value):
            yield from _misfits(each, kind[1], f"{path}[{number}]")
    elif isinstance(kind, list):
        if not isinstance(value, dict):
            yield f"{path}: {value!r} is not a map"
            return
        for key, each in value.items():
            yield from _misfits(each, kind[1], f"{path}.{key}")
    else:
        fits = {
            "string": isinstance(value, str),
            "bool": isinstance(value, bool),
            "number": isinstance(value, int | float) and not isinstance(value, bool),
        }
        if not fits[kind]:
            yield f"{path}: {value!r} is not a {kind}"
