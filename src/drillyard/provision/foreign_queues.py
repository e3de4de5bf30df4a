"""Whether runs can use a ClusterQueue that somebody else has made. Pure.

A namespaceSelector that is missing selects no namespace, an empty one all of them
(https://kueue.sigs.k8s.io/docs/concepts/cluster_queue).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_FACTORS = {
    "": 1.0,
    "m": 0.001,
    **{unit: 1000.0**power for power, unit in enumerate("kMGTPE", 1)},
    **{f"{unit}i": 1024.0**power for power, unit in enumerate("KMGTPE", 1)},
}
_NODE_RESOURCES = ("cpu", "memory")
"""Of which pods state an amount only with `kubernetes.resources`."""


def queue_fit(
    queue: Mapping[str, Any],
    resources: Mapping[str, str],
    namespaces: Mapping[str, Mapping[str, str]],
) -> tuple[list[str], list[str]]:
    """Why runs of these namespaces (labels by name) that ask for `resources` (the amount of all
    nodes) cannot use it; and what differs from the queue that `up` would make."""
    spec = queue.get("spec") or {}
    problems = [
        f"takes no runs of namespace {name} (namespaceSelector)"
        for name, labels in namespaces.items()
        if not _selects(spec.get("namespaceSelector"), labels)
    ]
    quotas, notes = _quotas(spec), list[str]()
    shares = bool(spec.get("cohort") or spec.get("cohortName"))
    for resource, wanted in resources.items():
        given = quotas.get(resource)
        if resource in _NODE_RESOURCES:
            if given is None:
                notes.append(f"does not cover {resource}, so runs must not state any")
        elif given is None:
            problems.append(f"does not cover {resource}")
        elif given == 0 and not shares:
            problems.append(f"has no quota of {resource}")
        elif given < int(wanted) and not shares:
            notes.append(f"its quota of {resource} is {given}, and the file's nodes have {wanted}")
    if spec.get("stopPolicy") not in (None, "None"):
        notes.append(f"it is stopped ({spec['stopPolicy']}), so runs wait")
    return problems, notes


def _quotas(spec: Mapping[str, Any]) -> dict[str, int]:
    """The quota of each resource that is covered, over all flavors, in whole units."""
    found: dict[str, int] = {}
    for group in spec.get("resourceGroups") or ():
        for name in group.get("coveredResources") or ():
            found.setdefault(name, 0)
        for flavor in group.get("flavors") or ():
            for each in flavor.get("resources") or ():
                if each["name"] not in _NODE_RESOURCES:
                    found[each["name"]] += _whole(str(each.get("nominalQuota", 0)))
    return found


def _whole(quantity: str) -> int:
    """A count as Kubernetes writes it: 8, 8k, 8000m or 1Ki."""
    number = quantity.rstrip("mkKMGTPEi")
    return int(float(number) * _FACTORS[quantity.removeprefix(number)])


def _selects(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    if selector is None:
        return False
    wanted = selector.get("matchLabels") or {}
    return wanted.items() <= labels.items() and all(_matches(selector, labels))


def _matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> Iterator[bool]:
    for each in selector.get("matchExpressions") or ():
        value, values = labels.get(each["key"]), each.get("values") or ()
        yield {
            "In": value is not None and value in values,
            "NotIn": value not in values,
            "Exists": value is not None,
            "DoesNotExist": value is None,
        }[each["operator"]]
