"""A Terraform configuration as one JSON document (main.tf.json), what it will make, and why each
value is as it is.

https://developer.hashicorp.com/terraform/language/syntax/json
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drillyard.plan_files import ExplainedField, explained
from drillyard.provision.cluster_plan import PlannedResource

Body = dict[str, Any]
OURS = "drillyard"
"""Source of a value that is a choice of ours."""


@dataclass(frozen=True)
class Because:
    """A value, or a block of values, with the reason for it and the setting or fact behind it."""

    value: Any
    reason: str
    source: str


def because(value: Any, reason: str, source: str = OURS) -> Because:
    """`value` as it is rendered, with what `--explain` says about it."""
    return Because(value, reason, source)


class TerraformDocument:
    """Collects resources in the order in which they are added. No count or for_each: each thing
    that will exist is a resource of its own, so the plan can name all of them.

    Every value of a body is a `Because`, or inside of one: a plan explains all that it renders.
    """

    def __init__(self) -> None:
        self.resources: list[PlannedResource] = []
        self.fields: list[ExplainedField] = []
        self._bodies: dict[str, dict[str, Body]] = {}
        self._data: dict[str, dict[str, Body]] = {}

    def add(
        self,
        kind: str,
        label: str,
        body: Body,
        *,
        name: str,
        location: str | None = None,
        labelled: bool = False,
        after: Sequence[str] = (),
    ) -> str:
        """Add one resource; its address, for references to it. `name` is the cloud's own; `after`
        are addresses that it does not refer to, and must not exist before."""
        labels = self._bodies.setdefault(kind, {})
        assert label not in labels, f"{kind}.{label} is there already"
        address = f"{kind}.{label}"
        labels[label] = self._plain(address, "", body)
        if after:
            labels[label]["depends_on"] = list(after)
        self.resources.append(PlannedResource(address, kind, name, location, labelled))
        return address

    def look_up(self, kind: str, label: str, body: Body) -> str:
        """Add a data source, which makes nothing: something of the cloud that is read. Its
        address."""
        self._data.setdefault(kind, {})[label] = self._plain(f"data.{kind}.{label}", "", body)
        return f"data.{kind}.{label}"

    def as_json(self, provider: Body, required: Body, outputs: Body | None = None) -> Body:
        """The whole document. `provider` by the provider's name; `required`: versions; `outputs`:
        what Terraform prints once all is made."""
        data = {"data": self._data} if self._data else {}
        made = {"resource": self._bodies, **({"output": outputs} if outputs else {})}
        return {"terraform": required, "provider": provider, **data, **made}

    def _plain(self, address: str, path: str, value: Any) -> Any:
        if isinstance(value, Because):
            plain = _without_reasons(value.value)
            place = f"{address}: {path}"
            self.fields.append(explained(place, plain, value.reason, value.source))
            return plain
        if isinstance(value, Mapping):
            return {
                key: self._plain(address, f"{path}.{key}" if path else key, each)
                for key, each in value.items()
            }
        if isinstance(value, list):
            # One block is written without its number, as in Terraform's own language.
            numbered = [f"{path}[{number}]" for number in range(len(value))]
            paths = numbered if len(value) > 1 else [path]
            return [
                self._plain(address, each, item) for each, item in zip(paths, value, strict=True)
            ]
        raise AssertionError(f"{address}: {path}: has no reason")


def _without_reasons(value: Any) -> Any:
    if isinstance(value, Because):
        return _without_reasons(value.value)
    if isinstance(value, Mapping):
        return {key: _without_reasons(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_reasons(each) for each in value]
    return value


def reference(address: str, attribute: str = "id") -> str:
    """An expression: the value of another resource's attribute once it exists."""
    return f"${{{address}.{attribute}}}"
