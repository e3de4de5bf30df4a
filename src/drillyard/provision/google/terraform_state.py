"""What Terraform's state says it made, read from its bucket."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from drillyard.errors import UserError
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.google.api import GoogleApis

STATE_OBJECT = "default.tfstate"
"""Below the cluster's name: the gcs backend's name of the default workspace
(https://developer.hashicorp.com/terraform/language/backend/gcs)."""


def owned_by_state(plan: ClusterPlan, apis: GoogleApis) -> frozenset[str]:
    """`kind/location/name` of what the state has; empty where there is no state.

    Raises ApiError where the bucket may not be read: without it a live cluster would look like a
    leak.
    """
    name = f"{plan.name}/{STATE_OBJECT}"
    content = apis.read_object(plan.state_bucket, name)
    if content is None:
        return frozenset()
    try:
        return frozenset(state_keys(json.loads(content)))
    except (ValueError, AttributeError, TypeError, KeyError):
        raise UserError(
            f"gs://{plan.state_bucket}/{name}: is not a state of Terraform; an earlier version of"
            f" it may be: gcloud storage ls --all-versions gs://{plan.state_bucket}/{name}"
        ) from None


def state_keys(state: Mapping[str, Any]) -> Iterator[str]:
    """`kind/location/name` of each resource of a state."""
    for resource in state["resources"]:
        for instance in resource["instances"] if resource["mode"] == "managed" else ():
            attributes = instance["attributes"]
            place = attributes.get("location") or attributes.get("zone") or attributes.get("region")
            yield f"{resource['type']}/{str(place or '').rpartition('/')[2]}/{_name(attributes)}"


def _name(attributes: Mapping[str, Any]) -> str:
    if "role" in attributes and "member" in attributes:
        return f"{attributes['role']} {attributes['member']}"
    for key in ("email", "repository_id", "peering", "name", "id"):
        if attributes.get(key):
            return str(attributes[key]).rpartition("/")[2]
    return ""
