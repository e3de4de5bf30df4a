"""Takes into the state what an interrupted apply has made: an apply that was killed leaves things
that exist and of which Terraform's state says nothing.

Before an apply its creations are recorded in the state's bucket; the record goes when the apply has
ended by itself, since then all outcomes are in the state. Where it is left, everything recorded
that the state lacks is imported if it exists, in the order of dependence: what refers to something
that does not exist cannot exist either. Only what carries the cluster's label or description is
taken; anything else belongs to somebody. Kinds that have neither are parts of a thing that has been
taken (pools of a cluster, NAT of a router) or can be created twice (APIs, grants): of those the
exact name and the record decide.

Formats of import ids: the provider's documentation of each resource, section Import
(https://registry.terraform.io/providers/hashicorp/google/latest/docs).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from drillyard.errors import UserError
from drillyard.provision.clouds import cloud_of
from drillyard.provision.cluster_plan import CLUSTER_LABEL, ClusterPlan
from drillyard.provision.state_bucket import StateBucket
from drillyard.provision.terraform_engine import Terraform
from drillyard.provision.terraform_output import StateResource

IMPORT_IDS = {
    "google_artifact_registry_repository": (
        "projects/{project}/locations/{location}/repositories/{repository_id}"
    ),
    "google_artifact_registry_repository_iam_member": (
        "projects/{project}/locations/{location}/repositories/{repository_last} {role} {member}"
    ),
    "google_compute_address": "projects/{project}/regions/{region}/addresses/{name}",
    "google_compute_firewall": "projects/{project}/global/firewalls/{name}",
    "google_compute_instance": "projects/{project}/zones/{zone}/instances/{name}",
    "google_compute_instance_group_manager": (
        "projects/{project}/zones/{zone}/instanceGroupManagers/{name}"
    ),
    "google_compute_region_instance_template": (
        "projects/{project}/regions/{region}/instanceTemplates/{name}"
    ),
    "google_compute_resize_request": (
        "projects/{project}/zones/{zone}/instanceGroupManagers/{instance_group_manager}"
        "/resizeRequests/{name}"
    ),
    "google_compute_global_address": "projects/{project}/global/addresses/{name}",
    "google_compute_network": "projects/{project}/global/networks/{name}",
    "google_compute_resource_policy": (
        "projects/{project}/regions/{region}/resourcePolicies/{name}"
    ),
    "google_compute_router": "projects/{project}/regions/{region}/routers/{name}",
    "google_compute_router_nat": "{project}/{region}/{router_last}/{name}",
    "google_compute_subnetwork": "projects/{project}/regions/{region}/subnetworks/{name}",
    "google_container_cluster": "projects/{project}/locations/{location}/clusters/{name}",
    "google_container_node_pool": "{project}/{region}/{cluster_last}/{name}",
    "google_project_iam_member": "{project} {role} {member}",
    "google_project_service": "{project}/{service}",
    "google_service_account": (
        "projects/{project}/serviceAccounts/{account_id}@{project}.iam.gserviceaccount.com"
    ),
    "google_service_account_iam_member": "{service_account_id} {role} {member}",
    "google_storage_bucket": "{name}",
    "google_storage_bucket_iam_member": "b/{bucket} {role} {member}",
}
"""By the kind of a resource. Fields are its settings, with expressions filled in; `_last`: the last
part of a path."""
RECREATED = frozenset({"google_container_cluster"})
"""Kinds that are made in several steps (a cluster, then without its first pool): one that was
interrupted is replaced, as Terraform itself does after an error."""
_REPEATABLE = re.compile(r"google_project_service\.|google_\w+_iam_member\.")
"""Addresses of what can be created again: an API that is on, a right that is granted."""
_REFERENCE = re.compile(r"\$\{((?:data\.)?[a-z0-9_]+\.[A-Za-z0-9_-]+)\.([a-z_]+)\}")
_ADDRESS = re.compile(r"(?<![.\w])((?:data\.)?(?:google|nebius)_[a-z0-9_]+\.[A-Za-z0-9_-]+)")
_LABELS = ("effective_labels", "labels", "resource_labels")


def adopt_interrupted(
    plan: ClusterPlan,
    terraform: Terraform,
    bucket: StateBucket,
    report: Callable[[str], None],
    *,
    recreate: bool,
) -> None:
    """Import what an interrupted apply has made. `recreate`: mark what is made in several steps, to
    be replaced, and leave to the apply what can be created again. Raises UserError for something of
    the name that is not this cluster's."""
    recorded, importing = bucket.creating()
    if not recorded:
        return
    report("the last command was interrupted: looking for what it has made")
    state = bucket.resources()
    found = [address for address in importing if address in state]
    waiting = [
        address
        for address in recorded
        if address not in state and not (recreate and _REPEATABLE.match(address))
    ]
    while True:
        for address in found:
            require_ours(plan, terraform, state[address])
            if recreate and state[address].kind in RECREATED and not state[address].tainted:
                terraform.taint(address)
        ready = [
            each
            for each in waiting
            if all(row in state or _REPEATABLE.match(row) for row in references(plan, each))
        ]
        if not ready:
            break
        # Before the first import: a foreign thing must not stay in the state unchecked.
        bucket.set_creating(recorded, ready)
        waiting = [each for each in waiting if each not in ready]
        found = [each for each in ready if adopt(plan, terraform, state, each, report)]
        if found:
            state = bucket.resources()
    bucket.set_creating([])


def adopt(
    plan: ClusterPlan,
    terraform: Terraform,
    state: Mapping[str, StateResource],
    address: str,
    report: Callable[[str], None],
) -> bool:
    """Import one resource of the plan; whether it exists."""
    identifier = cloud_of(plan).import_id(plan, address, state)
    if identifier is None or not terraform.import_resource(address, identifier):
        return False
    report(f"found {address}: {identifier}")
    return True


def body_of(plan: ClusterPlan, address: str) -> Mapping[str, Any]:
    """The settings of a resource of the plan; empty where an earlier plan had it."""
    kind, _, label = address.partition(".")
    found: Mapping[str, Any] = plan.terraform["resource"].get(kind, {}).get(label, {})
    return found


def references(plan: ClusterPlan, address: str) -> set[str]:
    """The addresses of the resources that a resource refers to: without them it cannot exist."""
    found = _ADDRESS.findall(json.dumps(body_of(plan, address)))
    return {each for each in found if not each.startswith("data.") and each != address}


def google_import_id(
    plan: ClusterPlan, address: str, state: Mapping[str, StateResource]
) -> str | None:
    """What `terraform import` needs to find a resource of a plan on Google Cloud. None where its
    kind has no id of ours, or where a setting's value is not known."""
    body = body_of(plan, address)
    template = IMPORT_IDS.get(address.partition(".")[0])
    if not body or template is None:
        return None
    fields = {"project": plan.project, "region": plan.region, "location": plan.region}
    for name, value in body.items():
        if isinstance(value, str):
            resolved = resolve(value, state)
            fields[name] = resolved
            fields[f"{name}_last"] = resolved.rpartition("/")[2]
    try:
        found = template.format_map(fields)
    except KeyError:
        return None
    return None if "${" in found else found


def resolve(text: str, state: Mapping[str, StateResource]) -> str:
    """A setting with its references to other resources filled in, where the state has them."""

    def value(match: re.Match[str]) -> str:
        known = state.get(match[1])
        found = None if known is None else known.attributes.get(match[2])
        return match[0] if found is None else str(found)

    return _REFERENCE.sub(value, text)


def require_ours(plan: ClusterPlan, terraform: Terraform, found: StateResource) -> None:
    """Raise UserError, and take the resource out of the state again, where its label or description
    is not this cluster's."""
    body = body_of(plan, found.address)
    if all(_matches(plan, body, found.attributes)):
        return
    terraform.forget(found.address)
    raise UserError(
        f"{found.address}: {found.attributes.get('id')} exists and is not this cluster's: its label"
        f" or description is another's\nDelete it, or change the cluster's name. Nothing was"
        " changed."
    )


def _matches(
    plan: ClusterPlan, body: Mapping[str, Any], attributes: Mapping[str, Any]
) -> Iterator[bool]:
    if any(name in body for name in _LABELS):
        labels: Sequence[Mapping[str, str]] = [attributes.get(name) or {} for name in _LABELS]
        yield any(each.get(CLUSTER_LABEL) == plan.name for each in labels)
    if "description" in body:
        yield attributes.get("description") == body["description"]
