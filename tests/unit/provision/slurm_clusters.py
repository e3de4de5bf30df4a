"""Cluster configs of Slurm clusters for the tests, their plans, and a check of blueprints against
the settings of Cluster Toolkit's modules."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from tests.unit.provision import clusters

from drillyard.hardware import catalog
from drillyard.hardware.cluster_toolkit import slurm_machines
from drillyard.provision.cluster_plan import ClusterPlan

MODES = ("on-demand", "reservation", "spot", "flex-start", "calendar")
OFFERS = [
    (name, mode)
    for name in slurm_machines()
    for mode in MODES
    if mode in catalog().machine(name).consumption
]
MODULES: dict[str, Any] = json.loads(
    Path(__file__).with_name("toolkit_modules.json").read_text("utf-8")
)


def config(machine: str = "a4-highgpu-8g", consumption: str = "spot", **settings: Any) -> Any:
    """The content of a cluster.yaml; `settings` replace whole keys, None leaves one out."""
    content = clusters.config(machine, consumption, platform="slurm", **{"storage": {}, **settings})
    return {key: value for key, value in content.items() if value is not None}


def plan(directory: Path, content: dict[str, Any]) -> ClusterPlan:
    """The plan of a cluster.yaml with this content."""
    return clusters.plan(directory, content)


def document(found: ClusterPlan, name: str = "blueprint.yaml") -> dict[str, Any]:
    """One of the YAML files of the deployment."""
    assert found.toolkit is not None
    read: dict[str, Any] = yaml.load(found.toolkit.files[name][0], yaml.CSafeLoader)
    return read


def modules(found: ClusterPlan) -> dict[str, dict[str, Any]]:
    """The modules of the blueprint by id, in the order of deployment."""
    groups = document(found)["deployment_groups"]
    return {each["id"]: each for group in groups for each in group["modules"]}


def settings_of(found: ClusterPlan, module: str) -> dict[str, Any]:
    given: dict[str, Any] = modules(found)[module].get("settings", {})
    return given


def blueprint_problems(found: ClusterPlan) -> Iterator[str]:
    """What Cluster Toolkit refuses in a blueprint: unknown modules and settings, missing required
    ones, wrong types, references to what is not there, modules that must be used and are not."""
    made, variables = modules(found), document(found, "deployment.yaml")["vars"]
    seen: set[str] = set()
    for name, module in made.items():
        row = MODULES.get(module["source"])
        if row is None:
            yield f"{name}: unknown module {module['source']}"
            continue
        if module.get("kind", "terraform") != row["kind"]:
            yield f"{name}: kind is {row['kind']}"
        used = module.get("use", [])
        yield from (
            f"{name}: uses {each}, which is not before it" for each in used if each not in seen
        )
        outputs = {
            output
            for each in used
            if each in made
            for output in MODULES[made[each]["source"]]["outputs"]
        }
        given = module.get("settings", {})
        for key, value in given.items():
            kind = row["settings"].get(key)
            if kind is None:
                yield f"{name}.{key}: no such setting"
            elif not fits(value, kind.lstrip("!")):
                yield f"{name}.{key}: {value!r} is not {kind}"
        for key, kind in row["settings"].items():
            filled = key in given or key in variables or key in outputs or key == row["inject"]
            if kind.startswith("!") and not filled:
                yield f"{name}.{key}: required"
        for text in texts(given):
            yield from (
                f"{name}: {each}" for each in reference_problems(text, made, seen, variables)
            )
        seen.add(name)
    every = {each for module in made.values() for each in module.get("use", [])}
    for name, module in made.items():
        mentioned = f"{name}." in json.dumps([each.get("settings", {}) for each in made.values()])
        if MODULES[module["source"]]["has_to_be_used"] and name not in every and not mentioned:
            yield f"{name}: nothing uses it"


def reference_problems(
    text: str, made: dict[str, Any], seen: set[str], variables: dict[str, Any]
) -> Iterator[str]:
    if "$(" not in text:
        return
    if not text.startswith("$("):
        yield f"an expression within a text: {text[:60]}"
    for owner, output in re.findall(r"([a-z][a-z-]*)\.([a-z_]+)", text):
        if owner == "vars":
            known = output in variables
        else:
            known = owner in seen and output in MODULES[made[owner]["source"]]["outputs"]
        if not known:
            yield f"no {owner}.{output}"


def texts(value: Any) -> Iterator[str]:
    """All texts in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from texts(each)


def fits(value: Any, kind: str) -> bool:
    """Whether a value has a type of Terraform; null and an expression fit all."""
    if value is None or kind == "any" or (isinstance(value, str) and value.startswith("$(")):
        return True
    plain = {"string": str, "bool": bool, "number": (int, float)}
    if kind in plain:
        return isinstance(value, plain[kind]) and (kind == "bool" or not isinstance(value, bool))
    outer, _, rest = kind.partition("(")
    inner = rest[:-1]
    if outer == "optional":
        return fits(value, inner)
    if outer in ("list", "set"):
        return isinstance(value, list) and all(fits(each, inner) for each in value)
    if outer == "map":
        return isinstance(value, dict) and all(fits(each, inner) for each in value.values())
    members = dict(members_of(inner[1:-1]))
    needed = {name for name, each in members.items() if not each.startswith("optional(")}
    return (
        isinstance(value, dict)
        and needed <= value.keys() <= members.keys()
        and all(fits(each, members[name]) for name, each in value.items())
    )


def members_of(text: str) -> Iterator[tuple[str, str]]:
    """Names and types in `a=string,b=list(string)`."""
    depth, start = 0, 0
    for at, letter in enumerate(f"{text},"):
        depth += (letter in "({") - (letter in ")}")
        if letter == "," and not depth:
            name, _, kind = text[start:at].partition("=")
            yield name, kind
            start = at + 1
