"""What Terraform makes in the provider of the tests, as Google's APIs show it: `leaks` and the
checks of `up` ask those, and never the provider."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.unit.provision.google.google_cloud import PROJECT, GoogleCloud

Value = dict[str, Any]
REGION = "us-central1"
NOT_LISTED = (
    "google_project_service",
    "google_storage_bucket_iam_member",
    "google_artifact_registry_repository_iam_member",
    "google_service_account_iam_member",
)
"""Enabled services, which `down` leaves, and rights that go with their thing."""


class MadeAtGoogle:
    """Keeps a project in step with a provider's objects."""

    def __init__(self, google: GoogleCloud) -> None:
        self.google = google

    def change(self, verb: str, kind: str, value: Value) -> str | None:
        """Follow a create or delete; why Google refuses it, if it does."""
        if kind in NOT_LISTED:
            return None
        if kind in _PARTS:
            holder, key = _PARTS[kind]
            service, path = holder(value)
            parts: list[Value] = self.google.things[service, path].setdefault(key, [])
            parts[:] = [each for each in parts if each["name"] != value["name"]]
            parts += [{"name": value["name"]}] if verb == "create" else []
            return None
        if kind == "google_project_iam_member":
            binding = {"role": value["role"], "members": [value["member"]]}
            if verb == "create":
                self.google.bindings.append(binding)
            else:
                self.google.bindings.remove(binding)
            return None
        service, path, body = _THINGS[kind](value)
        if verb == "create":
            described = {"description": value["description"]} if value.get("description") else {}
            self.google.add(service, path, **described, **body)
        elif users := self.google.users(path):
            return f"Error 400: The resource '{path}' is already being used by '{users[0]}'"
        else:
            self.google.things.pop((service, path), None)
        return None


def computed(kind: str, value: Value) -> Value:
    """What Google sets, where names are made of it."""
    if kind == "google_service_account":
        email = email_of(value)
        name = f"projects/{PROJECT}/serviceAccounts/{email}"
        return {"email": email, "member": f"serviceAccount:{email}", "name": name}
    return {"location": REGION} if kind == "google_container_node_pool" else {}


def email_of(value: Value) -> str:
    return f"{value['account_id']}@{PROJECT}.iam.gserviceaccount.com"


def _last(text: str) -> str:
    return text.rpartition("/")[2]


def _network(value: Value) -> Value:
    name = _last(value["network"])
    return {
        "network": f"https://www.googleapis.com/compute/v1/projects/{PROJECT}/global/networks/{name}"
    }


def _regional(collection: str, more: Callable[[Value], Value]) -> Callable[[Value], Any]:
    def made(value: Value) -> tuple[str, str, Value]:
        return "compute", f"regions/{value['region']}/{collection}/{value['name']}", more(value)

    return made


def _global(collection: str, more: Callable[[Value], Value]) -> Callable[[Value], Any]:
    return lambda value: ("compute", f"global/{collection}/{value['name']}", more(value))


def _cluster(value: Value) -> tuple[str, str, Value]:
    network = f"projects/{PROJECT}/global/networks/{_last(value['network'])}"
    body = {
        "location": value["location"],
        "resourceLabels": value["resource_labels"],
        "networkConfig": {"network": network},
        "nodePools": [],
    }
    return "container", f"locations/{value['location']}/clusters/{value['name']}", body


def _repository(value: Value) -> tuple[str, str, Value]:
    path = f"locations/{value['location']}/repositories/{value['repository_id']}"
    return "artifactregistry", path, {"labels": value["labels"]}


def _bucket(value: Value) -> tuple[str, str, Value]:
    body = {"labels": value["labels"], "location": value["location"].upper()}
    return "storage", f"b/{value['name']}", body


def _machine(value: Value) -> Value:
    """The body of a virtual machine, or the properties of a template of some."""
    subnets = (_last(each["subnetwork"]) for each in value["network_interface"])
    place = f"https://www.googleapis.com/compute/v1/projects/{PROJECT}/regions/{REGION}"
    nics = [{"subnetwork": f"{place}/subnetworks/{each}"} for each in subnets]
    return {"labels": value["labels"], "networkInterfaces": nics}


def _zonal(collection: str, more: Callable[[Value], Value]) -> Callable[[Value], Any]:
    return lambda value: (
        "compute",
        f"zones/{value['zone']}/{collection}/{value['name']}",
        more(value),
    )


def _resize_request(value: Value) -> tuple[str, str, Value]:
    group = f"zones/{value['zone']}/instanceGroupManagers/{value['instance_group_manager']}"
    return "compute", f"{group}/resizeRequests/{value['name']}", {"state": "ACCEPTED"}


def _nothing(value: Value) -> Value:
    return {}


_THINGS: dict[str, Callable[[Value], tuple[str, str, Value]]] = {
    "google_artifact_registry_repository": _repository,
    "google_compute_firewall": _global("firewalls", _network),
    "google_compute_instance": _zonal("instances", _machine),
    "google_compute_instance_group_manager": _zonal("instanceGroupManagers", _nothing),
    "google_compute_network": _global("networks", _nothing),
    "google_compute_region_instance_template": _regional(
        "instanceTemplates", lambda value: {"properties": _machine(value)}
    ),
    "google_compute_resize_request": _resize_request,
    "google_compute_resource_policy": _regional("resourcePolicies", _nothing),
    "google_compute_router": _regional("routers", _network),
    "google_compute_subnetwork": _regional("subnetworks", _network),
    "google_container_cluster": _cluster,
    "google_service_account": lambda value: ("iam", f"serviceAccounts/{email_of(value)}", {}),
    "google_storage_bucket": _bucket,
}
_PARTS: dict[str, tuple[Callable[[Value], tuple[str, str]], str]] = {
    "google_compute_router_nat": (
        lambda value: ("compute", f"regions/{value['region']}/routers/{_last(value['router'])}"),
        "nats",
    ),
    "google_container_node_pool": (
        lambda value: (
            "container",
            f"locations/{value['location']}/clusters/{_last(value['cluster'])}",
        ),
        "nodePools",
    ),
}
