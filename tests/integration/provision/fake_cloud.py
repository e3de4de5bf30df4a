"""A cloud behind Terraform's provider hashicorp/google: it has the real provider's schema and keeps
what is made in a dict.

It has no rules of values and forces no replacement but those of `replaced_by`. An object that is
made while Terraform is killed is there all the same, as in a real cloud.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.integration.provision.plugin_protocol import (
    MESSAGES,
    UNKNOWN,
    error,
    pack,
    schema,
    unpack,
)

_TESTS = Path(__file__).parents[2]
_SCHEMA = json.loads((_TESTS / "unit/provision/google_schema.json").read_text(encoding="utf-8"))
_IDENTITY = (
    "cluster",
    "router",
    "bucket",
    "repository",
    "service_account_id",
    "repository_id",
    "account_id",
    "service",
    "name",
    "role",
    "member",
)
"""Attributes that name an object among those of its kind, where they have a value."""
_IDEMPOTENT = ("google_project_service", "_iam_member")
_STRING = {"type": "string", "computed": True}
_DATA = {
    "google_project": {
        "attributes": {
            **{name: _STRING for name in ("id", "name", "number")},
            "project_id": {"type": "string", "optional": True, "computed": True},
        },
        "blocks": {},
    }
}
Identity = tuple[str, ...]


@dataclass
class Fault:
    """What happens instead of a change: an error, after `hang_seconds`. `times`: how often; None:
    always."""

    message: str
    times: int | None = 1
    hang_seconds: float = 0.0


@dataclass
class FakeCloud:
    """`seconds`: that each change takes. `faults` and `log`: by `create google_compute_network
    NAME` or without the name."""

    seconds: float = 0.0
    shapes: dict[str, Any] = field(default_factory=lambda: _SCHEMA)
    """The provider's own block and its resources."""
    objects: dict[Identity, dict[str, Any]] = field(default_factory=dict)
    """Its threads add and remove meanwhile: iterate over a list of it."""
    faults: dict[str, Fault] = field(default_factory=dict)
    replaced_by: set[tuple[str, str]] = field(default_factory=set)
    """Kind and attribute whose change needs another object."""
    log: list[str] = field(default_factory=list)
    on_change: Callable[[str, str, dict[str, Any]], str | None] = lambda verb, kind, value: None
    """Called for each create and delete; may refuse with a message."""
    on_begin: Callable[..., None] = lambda *words: None
    """Called with verb, kind and name when a change begins."""
    computed: Callable[[str, dict[str, Any]], dict[str, Any]] = lambda kind, value: {}
    """What the cloud sets on an object of a kind, in place of made-up values."""
    closed: threading.Event = field(default_factory=threading.Event)
    """Ends what hangs."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def kinds(self) -> Counter[str]:
        """How many objects there are of each kind."""
        return Counter(identity[0] for identity in list(self.objects))

    def of_kind(self, kind: str) -> dict[str, Any]:
        """The only object of a kind."""
        (found,) = [value for identity, value in list(self.objects.items()) if identity[0] == kind]
        return found

    def remove(self, kind: str) -> None:
        """Somebody deletes every object of a kind."""
        for identity in [each for each in list(self.objects) if each[0] == kind]:
            del self.objects[identity]

    def GetMetadata(self, request: Any) -> dict[str, Any]:
        name = MESSAGES["TypeName"]
        return {
            "resources": [name(type_name=kind) for kind in self.shapes["resources"]],
            "data_sources": [name(type_name=kind) for kind in _DATA],
        }

    def GetProviderSchema(self, request: Any) -> dict[str, Any]:
        entry = MESSAGES["NamedSchema"]
        return {
            "provider": schema(self.shapes["provider"]),
            "resource_schemas": [
                entry(key=kind, value=schema(block))
                for kind, block in self.shapes["resources"].items()
            ],
            "data_source_schemas": [
                entry(key=kind, value=schema(block)) for kind, block in _DATA.items()
            ],
        }

    def _nothing(self, request: Any) -> dict[str, Any]:
        return {}

    ValidateProviderConfig = ValidateResourceConfig = ValidateDataResourceConfig = _nothing
    ConfigureProvider = GetFunctions = StopProvider = _nothing

    def UpgradeResourceState(self, request: Any) -> dict[str, Any]:
        return {"upgraded_state": MESSAGES["DynamicValue"](json=request.raw_state.json)}

    def ReadResource(self, request: Any) -> dict[str, Any]:
        found = self.objects.get(identity_of(request.type_name, unpack(request.current_state)))
        return {"new_state": pack(found)}

    def ReadDataSource(self, request: Any) -> dict[str, Any]:
        config = unpack(request.config)
        return {"state": pack({**config, "id": "projects/p", "name": "p", "number": "123456"})}

    def PlanResourceChange(self, request: Any) -> dict[str, Any]:
        prior, planned = unpack(request.prior_state), unpack(request.proposed_new_state)
        replaced: list[str] = []
        if planned is not None and prior is None:
            _fill(self.shapes["resources"][request.type_name], planned, None)
        elif planned is not None:
            # Blocks, too, which are not proposed where the config has none.
            planned |= {name: prior[name] for name in self.computed(request.type_name, prior)}
            replaced = [
                name
                for kind, name in self.replaced_by
                if kind == request.type_name and prior.get(name) != planned.get(name)
            ]
        paths = [
            MESSAGES["AttributePath"](steps=[MESSAGES["Step"](attribute_name=name)])
            for name in replaced
        ]
        return {
            "planned_state": pack(planned),
            "requires_replace": paths,
            "legacy_type_system": True,
        }

    def ApplyResourceChange(self, request: Any) -> dict[str, Any]:
        prior, planned = unpack(request.prior_state), unpack(request.planned_state)
        kind = request.type_name
        verb = "delete" if planned is None else "create" if prior is None else "update"
        if planned is not None:
            made_of = _name(kind, planned)
            shape = self.shapes["resources"][kind]
            _fill(shape, planned, lambda name, of: _made(made_of, name, of))
            planned |= self.computed(kind, planned) if prior is None else {}
        value = prior if planned is None else planned
        refused = self._refusal(verb, kind, value)
        if refused is not None:
            state = None if verb == "create" else prior
            return {"new_state": pack(state), "diagnostics": [error(refused)]}
        return {"new_state": pack(planned), "legacy_type_system": True}

    def _refusal(self, verb: str, kind: str, value: dict[str, Any]) -> str | None:
        """Make the change, or say why not."""
        identity = identity_of(kind, value)
        line = f"{verb} {kind} {identity[-1]}"
        with self.lock:
            self.log.append(line)
            fault = self.faults.get(line) or self.faults.get(f"{verb} {kind}")
            is_faulty = fault is not None and fault.times != 0
            if fault is not None and fault.times:
                fault.times -= 1
        self.on_begin(verb, kind, identity[-1])
        if is_faulty:
            assert fault is not None
            self.closed.wait(fault.hang_seconds)
            return fault.message
        time.sleep(self.seconds)
        with self.lock:
            if verb == "create" and identity in self.objects and not _repeats(kind):
                return (
                    f"Error creating {kind}: googleapi: Error 409: The resource"
                    f" '{identity[-1]}' already exists, alreadyExists"
                )
            if verb != "update" and (refused := self.on_change(verb, kind, value)) is not None:
                return refused
            if verb == "delete":
                self.objects.pop(identity, None)
            else:
                self.objects[identity] = value
        return None

    def ImportResourceState(self, request: Any) -> dict[str, Any]:
        kind, identifier = request.type_name, request.id
        found = [
            value
            for identity, value in list(self.objects.items())
            if identity[0] == kind and all(part in identifier for part in identity[1:])
        ]
        # The longest name: `a` is part of `a-b`.
        found.sort(key=lambda value: -sum(map(len, identity_of(kind, value))))
        shape = self.shapes["resources"][kind]
        nothing = {
            **dict.fromkeys(shape["attributes"]),
            **{
                name: None if block["nesting_mode"] == "single" else []
                for name, block in shape["blocks"].items()
            },
            "id": identifier,
        }
        made = MESSAGES["ImportedResource"](
            type_name=kind, state=pack(found[0] if found else nothing)
        )
        return {"imported_resources": [made]}


def _keys(value: dict[str, Any]) -> list[str]:
    """Those that the config gives, and not the cloud (`_made`, `FakeCloud.computed`)."""
    if isinstance(value.get("account_id"), str):
        return ["account_id"]
    texts = [name for name in _IDENTITY if isinstance(value.get(name), str)]
    return [name for name in texts if not value[name].startswith(f"{name}.of.")]


def identity_of(kind: str, value: dict[str, Any]) -> Identity:
    """What tells an object from others of its kind: the last parts of what names it, and the whole
    of a member, whose parts are project and namespace."""
    named = {name: value[name] for name in _keys(value)}
    parts = (text if name == "member" else text.rpartition("/")[2] for name, text in named.items())
    return (kind, *parts)


def _repeats(kind: str) -> bool:
    return any(kind.endswith(each) for each in _IDEMPOTENT)


def _name(kind: str, value: dict[str, Any]) -> str:
    known = {name: each for name, each in value.items() if each != UNKNOWN}
    return f"{kind}/{identity_of(kind, known)[-1]}"


def _made(of: str, name: str, kind: Any) -> Any:
    """A made-up value of an attribute that the cloud sets; that of `id` ends in the name."""
    if kind == "string":
        return f"projects/p/{of}" if name in ("id", "self_link") else f"{name}.of.{of}"
    if kind in ("number", "bool"):
        return 0 if kind == "number" else False
    return {} if isinstance(kind, list) and kind[0] == "map" else []


def _fill(
    block: dict[str, Any], value: dict[str, Any], made: Callable[[str, Any], Any] | None
) -> None:
    """Computed attributes without a value become unknown, at a plan; unknown ones get a value, at
    an apply."""
    for name, attribute in block["attributes"].items():
        if made is None and value.get(name) is None and attribute.get("computed"):
            value[name] = UNKNOWN
        elif made is not None and value.get(name) == UNKNOWN:
            value[name] = made(name, attribute.get("type"))
    for name, inner in block["blocks"].items():
        items = value.get(name)
        for item in [items] if isinstance(items, dict) else items or []:
            if isinstance(item, dict):
                _fill(inner, item, made)
