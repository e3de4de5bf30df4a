"""What exists in a project, by the lists of each service.

A list that was refused, that failed on one of its pages, or that left places out, is a gap: nothing
follows from what it lacks. A service that the project does not use holds nothing.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drillyard.programs import parallel_map
from drillyard.provision.google.api import ApiError, GoogleApis
from drillyard.provision.google.listings import LISTINGS, RESIZE_REQUESTS, Listing, Part
from drillyard.provision.leak_report import Gap

_AT_ONCE = 8
_IN_PROJECT = re.compile(r"(?:^|/)projects/(?P<project>[^/]+)/(?P<path>.+)$")
_SCOPE = re.compile(r"(?:^|/|:)(?P<scope>zones|regions|locations)/(?P<name>[^/]+)/")
_EMPTY = "NO_RESULTS_ON_PAGE"
"""Warning of a place that holds nothing."""


@dataclass(frozen=True)
class Thing:
    """One thing that exists. `path` is its address in the project, `zones/us-central1-b/disks/a`;
    `location` is empty for what is global."""

    kind: str
    name: str
    location: str
    path: str
    body: Mapping[str, Any]
    row: Listing
    part: Part | None = None
    parent: str = ""
    """`path` of the thing that it is a part of."""

    def command(self, project: str) -> str:
        """The gcloud command that deletes it."""
        template = self.part.delete if self.part else self.row.delete
        words = {
            **{key: value for key, value in self.body.items() if isinstance(value, str)},
            "name": self.name,
            "location": self.location,
            "place": _place_flag(self),
            "policy_place": _policy_flag(self),
            "parent": self.parent.rpartition("/")[2],
            "project": project,
            "condition": "--all" if self.body.get("condition") else "--condition=None",
        }
        commands = []
        for each in template.split(" && "):
            argv = ["gcloud", *(word.format_map(words) for word in each.split())]
            if "{project}" not in each:
                argv.append(f"--project={project}")
            commands.append(shlex.join(argv))
        return " && ".join(commands)

    def linked(self) -> Iterator[str]:
        """The addresses of what it is attached to, as the service writes them."""
        if self.part is not None:
            for key in ("network", "attachmentTarget"):
                if isinstance(value := self.body.get(key), str):
                    yield value
            return
        for link in self.row.links:
            for choice in link.split("|"):
                if found := list(_values(self.body, choice.split("."))):
                    yield from found
                    break


@dataclass(frozen=True)
class Inventory:
    """What the lists hold. `disabled` are the services that the project does not use."""

    things: tuple[Thing, ...]
    gaps: tuple[Gap, ...]
    disabled: tuple[str, ...]


def take_inventory(apis: GoogleApis, region: str, rows: Sequence[Listing] = LISTINGS) -> Inventory:
    """Ask every list, several at a time. Raises CredentialsError."""
    return _joined(parallel_map(lambda row: _listed(apis, row, region), rows, _AT_ONCE))


def resize_requests(apis: GoogleApis, groups: Iterable[Thing]) -> Inventory:
    """The requests for nodes of these managed instance groups: each group has a list of its own."""

    def listed(group: Thing) -> Inventory:
        regional = group.path.startswith("regions/")
        row = RESIZE_REQUESTS
        method = "regionI" + row.method[1:] if regional else row.method
        place = {"region" if regional else "zone": group.location}
        return _read(
            apis,
            row,
            method,
            {"project": apis.project, "instanceGroupManager": group.name, **place},
            group.path,
        )

    return _joined(parallel_map(listed, list(groups), _AT_ONCE))


def path_in(project: str, number: str | None, address: str) -> str | None:
    """The path of an address in this project: `global/networks/train`. None for one of another
    project; a bare name is that of a network (Filestore)."""
    found = _IN_PROJECT.search(address)
    if found is None:
        return None if "/" in address or not address else f"global/networks/{address}"
    return found["path"] if found["project"] in (project, number) else None


def _joined(parts: Iterable[Inventory]) -> Inventory:
    parts = list(parts)
    things = {(each.kind, each.path): each for part in parts for each in part.things}
    by_path: dict[str, Thing] = {}
    for each in things.values():
        by_path.setdefault(each.path, each)
    return Inventory(
        tuple(by_path.values()),
        tuple(gap for part in parts for gap in part.gaps),
        tuple(sorted({each for part in parts for each in part.disabled})),
    )


def _listed(apis: GoogleApis, row: Listing, region: str) -> Inventory:
    parameters: dict[str, Any] = {
        key: value.format(project=apis.project, region=region) for key, value in row.parent.items()
    } or {"project": apis.project}
    if row.method == "projects.getIamPolicy":
        # Version 3 tells conditions (https://cloud.google.com/iam/docs/policies#versions).
        parameters["body"] = {"options": {"requestedPolicyVersion": 3}}
    return _read(apis, row, row.method, parameters, "")


def _read(
    apis: GoogleApis, row: Listing, method: str, parameters: Mapping[str, Any], parent: str
) -> Inventory:
    things: list[Thing] = []
    gaps: list[Gap] = []
    try:
        for page in apis.pages(row.service, method, **parameters):
            gaps += [Gap(row.service, method, why) for why in _left_out(page)]
            for scope, body in _bodies(page, row):
                things += _things(apis.project, row, scope, body, parent)
    except ApiError as error:
        if error.refusal == "disabled":
            return Inventory((), (), (row.service,))
        gaps.append(Gap(row.service, method, str(error)))
    return Inventory(tuple(things), tuple(gaps), ())


def _left_out(page: Mapping[str, Any]) -> Iterator[str]:
    """Why this page is only a part: places that did not answer."""
    for key in ("unreachables", "unreachable", "missingZones"):
        if places := page.get(key):
            yield f"did not answer: {', '.join(sorted(map(str, places)))}"
    scopes = page.get("items")
    warnings = [("", page.get("warning"))]
    if isinstance(scopes, dict):
        warnings += [(f"{scope}: ", each.get("warning")) for scope, each in scopes.items()]
    for place, warning in warnings:
        if warning and warning.get("code") != _EMPTY:
            yield f"{place}{warning.get('message') or warning.get('code')}"


def _bodies(page: Mapping[str, Any], row: Listing) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The things of a page with the places that they are listed under."""
    if row.method.endswith(".aggregatedList"):
        for scope, listed in (page.get("items") or {}).items():
            yield from ((scope, body) for body in listed.get(row.items) or ())
    elif row.method == "projects.getIamPolicy":
        for binding in page.get(row.items) or ():
            yield from (("", {**binding, "member": each}) for each in binding.get("members") or ())
    else:
        yield from (("", body) for body in page.get(row.items) or ())


def _things(
    project: str, row: Listing, scope: str, body: Mapping[str, Any], parent: str
) -> Iterator[Thing]:
    if body.get("state") in row.ended:
        return
    name = str(body.get("email") or body.get("name") or "").rpartition("/")[2]
    if row.method == "projects.getIamPolicy":
        name = f"{body.get('role')} {body['member']}"
    path = _path(row, scope, name, body)
    if title := (body.get("condition") or {}).get("title"):
        path += f" {title}"  # A role may be granted several times, under conditions.
    if parent:
        path = f"{parent}/{name}"
    found = _SCOPE.search(path)
    location = found["name"] if found else str(body.get("location") or "").lower()
    thing = Thing(row.kind, name, location, path, body, row, parent=parent)
    yield thing
    if row.part is None:
        return
    for each in body.get(row.part.key) or ():
        part = str(each.get("name"))
        yield Thing(
            row.part.kind,
            part,
            location,
            f"{path}/{row.part.key}/{part}",
            each,
            row,
            row.part,
            path,
        )


def _path(row: Listing, scope: str, name: str, body: Mapping[str, Any]) -> str:
    if row.service == "container":
        return f"locations/{body.get('location')}/clusters/{name}"
    own = str(body.get("selfLink") or body.get("name") or "")
    found = _IN_PROJECT.search(own)
    if row.service == "compute":
        collection = row.items if scope else row.method.partition(".")[0]
        return found["path"] if found else f"{scope or 'global'}/{collection}/{name}"
    return f"{row.service}:{found['path'] if found else f'{row.items}/{name}'}"


def _values(body: Any, keys: list[str]) -> Iterator[str]:
    """The strings at `a.b[].c` of a document."""
    if not keys:
        if isinstance(body, str):
            yield body
        return
    key, *rest = keys
    found = body.get(key.removesuffix("[]")) if isinstance(body, Mapping) else None
    if key.endswith("[]"):
        for each in found or ():
            yield from _values(each, rest)
    else:
        yield from _values(found, rest)


def _place_flag(thing: Thing) -> str:
    scope = thing.path.partition("/")[0]
    if scope in ("zones", "regions"):
        return f"--{scope[:-1]}={thing.location}"
    return "--global"


def _policy_flag(thing: Thing) -> str:
    if thing.path.startswith("regions/"):
        return f"--firewall-policy-region={thing.location}"
    return "--global-firewall-policy"
