"""A Terraform configuration as one JSON document (main.tf.json), and what it will make.

https://developer.hashicorp.com/terraform/language/syntax/json
"""

from __future__ import annotations

from typing import Any

from drillyard.provision.cluster_plan import PlannedResource

Body = dict[str, Any]


class TerraformDocument:
    """Collects resources in the order in which they are added. No count or for_each: each thing
    that will exist is a resource of its own, so the plan can name all of them."""

    def __init__(self) -> None:
        self.resources: list[PlannedResource] = []
        self._bodies: dict[str, dict[str, Body]] = {}

    def add(
        self,
        kind: str,
        label: str,
        body: Body,
        *,
        name: str,
        location: str | None = None,
        labelled: bool = False,
    ) -> str:
        """Add one resource; its address, for references to it. `name` is the cloud's own."""
        labels = self._bodies.setdefault(kind, {})
        assert label not in labels, f"{kind}.{label} is there already"
        labels[label] = body
        address = f"{kind}.{label}"
        self.resources.append(PlannedResource(address, kind, name, location, labelled))
        return address

    def as_json(self, provider: Body, required: Body, outputs: Body) -> Body:
        """The whole document. `provider` and `required` by the provider's name."""
        return {
            "terraform": required,
            "provider": provider,
            "resource": self._bodies,
            "output": {name: {"value": value} for name, value in outputs.items()},
        }


def reference(address: str, attribute: str = "id") -> str:
    """An expression: the value of another resource's attribute once it exists."""
    return f"${{{address}.{attribute}}}"
