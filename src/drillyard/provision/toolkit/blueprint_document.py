"""A blueprint of Cluster Toolkit as a YAML document, with the reason of every setting.

https://cloud.google.com/cluster-toolkit/docs/setup/cluster-blueprint. A text may have expressions
of the toolkit, `$(module.output)`; scripts that it contains must not have that sequence of
characters for anything else, or the toolkit would read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from drillyard.plan_files import ExplainedField
from drillyard.provision.terraform_document import Body, plain_value

_WIDTH = 100


class BlueprintDocument:
    """Collects groups of modules in the order in which they are deployed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.fields: list[ExplainedField] = []
        self._groups: list[dict[str, Any]] = []

    def start_group(self, name: str) -> None:
        """Begin a group: what is added from now on belongs to it."""
        self._groups.append({"group": name, "modules": []})

    def add(
        self,
        module: str,
        source: str,
        settings: Body,
        *,
        use: Sequence[str] = (),
        kind: str | None = None,
    ) -> str:
        """Add a module to the current group; its id. `use`: modules of which it takes outputs;
        `kind`: another one than Terraform's."""
        entry: dict[str, Any] = {"id": module, "source": source}
        if kind is not None:
            entry["kind"] = kind
        if use:
            entry["use"] = list(use)
        if plain := plain_value(self.fields, module, "", settings):
            entry["settings"] = plain
        self._groups[-1]["modules"].append(entry)
        return module

    def settings(self, module: str) -> Mapping[str, Any]:
        """The plain settings of a module that was added."""
        every = (each for group in self._groups for each in group["modules"])
        found: Mapping[str, Any] = next(each for each in every if each["id"] == module)["settings"]
        return found

    def as_value(self) -> dict[str, Any]:
        """The whole blueprint."""
        return {"blueprint_name": self.name, "deployment_groups": self._groups}


def as_yaml(value: Mapping[str, Any], comment: str) -> str:
    """The YAML of a document below a comment; keys keep their order, texts of several lines are
    written as blocks."""
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    return head + yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, width=_WIDTH, allow_unicode=True
    )


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
