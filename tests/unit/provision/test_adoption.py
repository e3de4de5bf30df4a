"""How what exists is found again: import ids and references."""

from __future__ import annotations

from typing import Any

import pytest

from drillyard.provision.adoption import import_id, references, resolve
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.terraform_output import StateResource


def plan(resources: dict[str, dict[str, Any]]) -> ClusterPlan:
    return ClusterPlan(
        name="c",
        platform="gke",
        project="p",
        region="us-central1",
        zone="us-central1-b",
        pools=(),
        terraform={"resource": resources},
        state_bucket="p-c-tfstate",
        resources=(),
    )


CLUSTER = {
    "google_container_cluster.cluster": StateResource(
        "google_container_cluster.cluster",
        "google_container_cluster",
        {"id": "projects/p/locations/us-central1/clusters/c"},
    ),
    "google_compute_router.system": StateResource(
        "google_compute_router.system", "google_compute_router", {"name": "c"}
    ),
}


@pytest.mark.parametrize(
    ("kind", "body", "expected"),
    [
        ("google_compute_network", {"name": "c"}, "projects/p/global/networks/c"),
        (
            "google_compute_subnetwork",
            {"name": "c", "region": "us-east1"},
            "projects/p/regions/us-east1/subnetworks/c",
        ),
        (
            "google_compute_router_nat",
            {"name": "c", "router": "${google_compute_router.system.name}"},
            "p/us-central1/c/c",
        ),
        (
            "google_container_cluster",
            {"name": "c", "location": "us-central1"},
            "projects/p/locations/us-central1/clusters/c",
        ),
        (
            "google_container_node_pool",
            {"name": "gpu", "cluster": "${google_container_cluster.cluster.id}"},
            "p/us-central1/c/gpu",
        ),
        (
            "google_project_iam_member",
            {"project": "p", "role": "roles/a", "member": "serviceAccount:x@y"},
            "p roles/a serviceAccount:x@y",
        ),
        (
            "google_service_account",
            {"account_id": "c-nodes"},
            "projects/p/serviceAccounts/c-nodes@p.iam.gserviceaccount.com",
        ),
        ("google_project_service", {"service": "a.googleapis.com"}, "p/a.googleapis.com"),
        ("google_storage_bucket", {"name": "b"}, "b"),
        (
            "google_storage_bucket_iam_member",
            {"bucket": "b", "role": "roles/a", "member": "principal://x"},
            "b/b roles/a principal://x",
        ),
        (
            "google_artifact_registry_repository",
            {"repository_id": "c", "location": "us-central1"},
            "projects/p/locations/us-central1/repositories/c",
        ),
    ],
)
def test_import_ids_have_the_formats_of_the_provider(
    kind: str, body: dict[str, Any], expected: str
) -> None:
    assert import_id(plan({kind: {"x": body}}), f"{kind}.x", CLUSTER) == expected


def test_what_refers_to_something_unknown_has_no_id() -> None:
    body = {"name": "gpu", "cluster": "${google_container_cluster.other.id}"}
    made = plan({"google_container_node_pool": {"x": body}})
    assert import_id(made, "google_container_node_pool.x", CLUSTER) is None
    assert references(made, "google_container_node_pool.x") == {"google_container_cluster.other"}
    assert import_id(made, "google_compute_network.gone", CLUSTER) is None


def test_references_count_in_every_place_but_data_sources_do_not() -> None:
    body = {
        "name": "a",
        "deep": [{"network": "${google_compute_network.n.name}"}],
        "member": "serviceAccount:${data.google_project.this.number}",
        "depends_on": ["google_project_service.api"],
    }
    made = plan({"google_compute_firewall": {"x": body}})
    assert references(made, "google_compute_firewall.x") == {
        "google_compute_network.n",
        "google_project_service.api",
    }
    assert resolve("a-${google_compute_router.system.name}-b", CLUSTER) == "a-c-b"
