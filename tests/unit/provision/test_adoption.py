"""How what exists is found again: import ids and references."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.provision import clusters

from drillyard.errors import UserError
from drillyard.provision.adoption import (
    adopt_interrupted,
    body_of,
    google_import_id,
    references,
    resolve,
)
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
def test_google_import_ids_have_the_formats_of_the_provider(
    kind: str, body: dict[str, Any], expected: str
) -> None:
    assert google_import_id(plan({kind: {"x": body}}), f"{kind}.x", CLUSTER) == expected


def test_what_refers_to_something_unknown_has_no_id() -> None:
    body = {"name": "gpu", "cluster": "${google_container_cluster.other.id}"}
    made = plan({"google_container_node_pool": {"x": body}})
    assert google_import_id(made, "google_container_node_pool.x", CLUSTER) is None
    assert references(made, "google_container_node_pool.x") == {"google_container_cluster.other"}
    assert google_import_id(made, "google_compute_network.gone", CLUSTER) is None


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


PARTS = {
    "google_container_node_pool": "google_container_cluster.",
    "google_compute_router_nat": "google_compute_router.",
    "google_storage_bucket_iam_member": "google_storage_bucket.",
    "google_artifact_registry_repository_iam_member": "google_artifact_registry_repository.",
    "google_service_account_iam_member": "google_service_account.",
}
"""Kinds without label and description, and what they are parts of."""
REPEATABLE = ("google_project_service", "google_project_iam_member")


@pytest.mark.parametrize(("machine", "mode"), clusters.OFFERS)
def test_what_exists_is_recognised_by_a_mark_of_its_own_or_of_what_it_is_a_part_of(
    tmp_path: Path, machine: str, mode: str
) -> None:
    made = clusters.plan(tmp_path, clusters.config(machine, mode))
    for each in made.made_by_terraform:
        body = body_of(made, each.address)
        if each.kind in REPEATABLE:
            continue
        if each.kind in PARTS:
            found = references(made, each.address)
            assert any(address.startswith(PARTS[each.kind]) for address in found), each.address
        else:
            labels = body.get("labels") or body.get("resource_labels") or {}
            is_marked = labels.get("drillyard-cluster") == made.name
            assert is_marked or body.get("description") == f"drillyard cluster {made.name}", body


POLICY = "google_compute_resource_policy.domain_1x72"


class Cloud:
    """A bucket with the record of an interrupted apply, and a Terraform that imports what exists:
    attributes by import id."""

    def __init__(self, recorded: list[str], existing: dict[str, dict[str, Any]]) -> None:
        self.recorded, self.existing = recorded, existing
        self.state: dict[str, StateResource] = {}
        self.asked: list[str] = []

    def creating(self) -> tuple[list[str], list[str]]:
        return self.recorded, []

    def set_creating(self, addresses: list[str], importing: Any = ()) -> None:
        self.recorded = list(addresses)

    def resources(self) -> dict[str, StateResource]:
        return dict(self.state)

    def import_resource(self, address: str, identifier: str) -> bool:
        self.asked.append(identifier)
        found = self.existing.get(identifier)
        if found is not None:
            self.state[address] = StateResource(address, address.partition(".")[0], found)
        return found is not None

    def forget(self, address: str) -> None:
        del self.state[address]


def adopted(made: ClusterPlan, cloud: Cloud) -> set[str]:
    both: Any = cloud
    adopt_interrupted(made, both, both, lambda line: None, recreate=False)
    return set(cloud.state)


@pytest.fixture
def domain(tmp_path: Path) -> ClusterPlan:
    """The plan of machines with a placement policy, which can have no labels."""
    return clusters.plan(tmp_path, clusters.config("a4x-highgpu-4g", "reservation"))


def test_a_policy_without_labels_is_ours_by_record_name_and_description(
    domain: ClusterPlan,
) -> None:
    identifier = "projects/my-project/regions/us-central1/resourcePolicies/team-1x72"
    ours = {identifier: {"id": identifier, "description": "drillyard cluster team"}}
    recorded = ["google_project_service.compute", POLICY]
    assert adopted(domain, Cloud(recorded, ours)) == {POLICY}
    # Nothing is looked for that this never began to make.
    unrecorded = Cloud(["google_project_service.compute"], ours)
    assert adopted(domain, unrecorded) == set() and identifier not in unrecorded.asked
    assert adopted(domain, Cloud([], ours)) == set()
    for described in (None, "", "drillyard cluster team-2"):
        foreign = Cloud(recorded, {identifier: {"id": identifier, "description": described}})
        with pytest.raises(UserError, match="is not this cluster's"):
            adopted(domain, foreign)
        assert foreign.state == {}
    other = Cloud(recorded, {f"{identifier}-b": ours[identifier]})
    assert adopted(domain, other) == set()


def test_a_pool_is_taken_from_the_recorded_cluster_alone(domain: ClusterPlan) -> None:
    cluster, pool = "google_container_cluster.cluster", "google_container_node_pool.cpu"
    identifier = "projects/my-project/locations/us-central1/clusters/team"
    existing = {
        identifier: {"id": identifier, "resource_labels": {"drillyard-cluster": "other"}},
        "my-project/us-central1/team/cpu": {"id": "cpu"},
    }
    needed = references(domain, cluster) | references(domain, pool)
    cloud = Cloud([cluster, pool], existing)
    cloud.state = {each: StateResource(each, "", {}) for each in needed - {cluster}}
    with pytest.raises(UserError, match="is not this cluster's"):
        adopted(domain, cloud)
    assert cluster not in cloud.state and pool not in cloud.state
    existing[identifier]["resource_labels"] = {"drillyard-cluster": "team"}
    assert {cluster, pool} <= adopted(domain, cloud)
