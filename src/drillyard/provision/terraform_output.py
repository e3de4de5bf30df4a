"""Output of Terraform with `-json`: a line per event, and the document of a plan, and the state.

https://developer.hashicorp.com/terraform/internals/machine-readable-ui and .../json-format
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from drillyard.errors import UserError
from drillyard.formatting import plural
from drillyard.provision.provider_errors import Diagnostic

Action = Literal["create", "update", "replace", "delete", "read", "no-op"]
_DONE = {"create": "created", "update": "updated", "delete": "deleted", "read": "read"}
_DOING = {"create": "creating", "update": "updating", "delete": "deleting", "read": "reading"}
_REMIND_SECONDS = 60


@dataclass(frozen=True)
class Change:
    """What a plan does with one resource. `because`: the attributes that change, or that force a
    replacement."""

    address: str
    kind: str
    action: Action
    because: tuple[str, ...] = ()
    shrinks: bool = False
    """Whether a pool gets fewer nodes than it has, or may have."""


@dataclass(frozen=True)
class PlannedChanges:
    """A saved plan: exactly this is applied. `drift`: what others have done to resources, by
    address (`update`: changed what the plan changes back, `delete`: gone)."""

    file: Path
    changes: tuple[Change, ...]
    drift: Mapping[str, Action]
    changes_outputs: bool = False

    @property
    def is_empty(self) -> bool:
        return not self.wanted and not self.changes_outputs

    @property
    def wanted(self) -> tuple[Change, ...]:
        """The changes that do something."""
        return tuple(each for each in self.changes if each.action not in ("no-op", "read"))

    def addresses(self, *actions: Action) -> list[str]:
        """The addresses of the changes of these kinds."""
        return [each.address for each in self.changes if each.action in actions]


@dataclass(frozen=True)
class StateResource:
    """A resource of the state with all of its attributes. `tainted`: its creation failed, and the
    next apply replaces it."""

    address: str
    kind: str
    attributes: Mapping[str, Any]
    tainted: bool = False


def action_of(actions: Sequence[str]) -> Action:
    """One word for the actions of a resource change: both orders of delete and create are a
    replacement."""
    if sorted(actions) == ["create", "delete"]:
        return "replace"
    assert len(actions) == 1, actions
    found: Any = actions[0]
    return "delete" if found == "forget" else found


def planned_changes(file: Path, document: Mapping[str, Any]) -> PlannedChanges:
    """The changes in the document that `terraform show -json PLAN` prints."""
    changes = tuple(
        Change(
            each["address"],
            each["type"],
            action_of(each["change"]["actions"]),
            _because(each["change"]),
            _shrinks(each["change"]),
        )
        for each in document.get("resource_changes", [])
        if each.get("mode", "managed") == "managed"
    )
    planned = {each["address"]: each["change"] for each in document.get("resource_changes", [])}
    drift = {
        each["address"]: action_of(each["change"]["actions"])
        for each in document.get("resource_drift", [])
        if _is_of_others(each["change"], planned.get(each["address"]))
    }
    outputs = [each["actions"] for each in document.get("output_changes", {}).values()]
    return PlannedChanges(file, changes, drift, any(each != ["no-op"] for each in outputs))


def _is_of_others(drift: Mapping[str, Any], planned: Mapping[str, Any] | None) -> bool:
    """Whether others have deleted a resource, or changed what the plan changes again. Terraform
    calls it drift, too, when the cloud itself sets a computed attribute later, such as a status or
    the versions of a cluster: nothing follows from that."""
    action = action_of(drift["actions"])
    if action == "delete":
        return True
    if action == "no-op" or planned is None or action_of(planned["actions"]) in ("no-op", "read"):
        return False
    theirs = set(_differing(drift.get("before"), drift.get("after")))
    ours = set(
        _differing(planned.get("before"), planned.get("after"), planned.get("after_unknown"))
    )
    return not theirs.isdisjoint(ours)


def _differing(
    before: Any, after: Any, unknown: Any = None, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[str | int, ...]]:
    """The paths of the values that differ, without those that are known after the apply. Nothing
    and an empty list or map are the same: providers write either."""
    if unknown is True or before == after:
        return
    keys: list[Any] | None = None
    if all(isinstance(each, dict | None) for each in (before, after)):
        keys = [*{**(before or {}), **(after or {})}]
    elif all(isinstance(each, list | None) for each in (before, after)):
        keys = [*range(max(len(before or ()), len(after or ())))]
    if keys is None:
        yield path
        return
    for key in keys:
        old, new = _part(before, key), _part(after, key)
        yield from _differing(old, new, _part(unknown, key), (*path, key))


def _part(value: Any, key: str | int) -> Any:
    if isinstance(value, dict):
        return value.get(key)
    return value[int(key)] if isinstance(value, list) and int(key) < len(value) else None


def _because(change: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the attributes that force a replacement, or else that differ."""
    if forcing := change.get("replace_paths"):
        return tuple(sorted({str(path[0]) for path in forcing if path}))
    before, after = change.get("before") or {}, change.get("after") or {}
    if not before or not after:
        return ()
    unknown = change.get("after_unknown") or {}
    names = before.keys() | after.keys()
    return tuple(
        sorted(
            name
            for name in names
            if before.get(name) != after.get(name) and unknown.get(name) is not True
        )
    )


_SIZES = ("node_count", "fixed_node_count", "total_max_node_count", "max_node_count")


def _shrinks(change: Mapping[str, Any]) -> bool:
    before, after = change.get("before") or {}, change.get("after") or {}
    scaling = [(each.get("autoscaling") or [{}])[0] for each in (before, after)]
    sizes = [
        (old.get(name), new.get(name))
        for old, new in ((before, after), tuple(scaling))
        for name in _SIZES
    ]
    return any(old is not None and new is not None and new < old for old, new in sizes)


def state_resources(text: str, earlier_versions: str = "") -> list[StateResource]:
    """The managed resources of a state (version 4 of its format, which every Terraform since
    0.12 and OpenTofu write); none of no state. Raises UserError for what is not a state, with the
    user's way to `earlier_versions`."""
    if not text.strip():
        return []
    try:
        resources = json.loads(text).get("resources", [])
    except (ValueError, RecursionError, AttributeError) as error:
        raise UserError(
            f"Terraform's state is damaged: not a JSON object ({error})\nThe bucket of the state"
            f" keeps earlier versions; put the last good one over it: {earlier_versions}"
        ) from None
    found = []
    for resource in resources:
        if resource.get("mode") != "managed":
            continue
        address = f"{resource['type']}.{resource['name']}"
        for instance in resource.get("instances", []):
            key = instance.get("index_key")
            found.append(
                StateResource(
                    address if key is None else f"{address}[{json.dumps(key)}]",
                    resource["type"],
                    instance.get("attributes") or {},
                    instance.get("status") == "tainted",
                )
            )
    return found


class EventLines:
    """Reads the lines of a `-json` command as they come: progress for the user, and its errors."""

    def __init__(self) -> None:
        self.errors: list[Diagnostic] = []
        self.warnings: list[Diagnostic] = []
        self.in_progress: dict[str, str] = {}
        self.rest: list[str] = []
        """Lines that are not events."""

    def read(self, line: str) -> str | None:
        """Take one line; returns what to print for it, if anything."""
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        # A whole document may be one line, too.
        if not isinstance(event, dict) or "@level" not in event:
            self.rest += [line] if line.strip() else []
            return None
        kind = event.get("type")
        if kind == "diagnostic":
            found = event.get("diagnostic", {})
            row = Diagnostic(
                str(found.get("summary", "")),
                str(found.get("detail", "")),
                str(found.get("address", "")),
            )
            (self.errors if found.get("severity") == "error" else self.warnings).append(row)
            return None
        hook = event.get("hook", {})
        address = str(hook.get("resource", {}).get("addr", ""))
        action, seconds = str(hook.get("action", "")), int(hook.get("elapsed_seconds") or 0)
        if kind == "apply_start" and action in _DOING:
            self.in_progress[address] = action
        elif kind == "apply_progress" and seconds and seconds % _REMIND_SECONDS < 10:
            return f"{_DOING.get(action, action)} {address}: {seconds} s"
        elif kind == "apply_complete":
            self.in_progress.pop(address, None)
            return f"{_DONE.get(action, action)} {address} in {seconds} s"
        elif kind == "apply_errored":
            self.in_progress.pop(address, None)
            return f"failed: {_DOING.get(action, action)} {address}, after {seconds} s"
        return None


def changes_text(changes: Iterable[Change]) -> list[str]:
    """Lines that show what a plan does beyond creating: one per update, replacement and deletion,
    and how many resources it creates."""
    lines, created = [], 0
    for each in changes:
        if each.action == "create":
            created += 1
        elif each.action in ("update", "replace", "delete"):
            because = f" ({', '.join(each.because)})" if each.because else ""
            lines.append(f"{each.action} {each.address}{because}")
    return ([f"create {plural(created, 'resource')}"] if created else []) + lines
