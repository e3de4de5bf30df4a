"""Errors of Terraform and of Google's APIs, each as one error with what to do."""

from __future__ import annotations

import pytest

from drillyard.errors import UnreachableError
from drillyard.provision.provider_errors import KINDS, Diagnostic, kind_of, provider_error

CASES = {
    "credentials": (
        'Attempted to load application default credentials: oauth2: "invalid_grant"',
        "gcloud auth application-default login",
    ),
    "api-disabled": (
        "googleapi: Error 403: Kubernetes Engine API has not been used in project 1 before or it is"
        " disabled. Enable it by visiting"
        " https://console.developers.google.com/apis/api/container.googleapis.com/overview",
        "gcloud services enable container.googleapis.com --project p",
    ),
    "quota": (
        "googleapi: Error 403: Quota 'PREEMPTIBLE_NVIDIA_B200_GPUS' exceeded. Limit: 8.0 in region"
        " us-central1., quotaExceeded",
        "iam-admin/quotas?project=p",
    ),
    "stockout": (
        "Error waiting for creating GKE NodePool: (ZONE_RESOURCE_POOL_EXHAUSTED) The zone"
        " 'projects/p/zones/us-central1-b' does not have enough resources available",
        "location.zone",
    ),
    "permission": (
        "googleapi: Error 403: Required 'compute.networks.create' permission for"
        " 'projects/p/global/networks/c', forbidden",
        "--role roles/compute.admin",
    ),
    "protected": (
        "Cannot destroy cluster because deletion_protection is set to true.",
        "cluster.deletion_protection: false",
    ),
    "in-use": (
        "Error 400: The network resource 'c' is already being used by 'k8s-fw',"
        " resourceInUseByAnotherResource",
        "drillyard cluster leaks",
    ),
    "exists": ("googleapi: Error 409: The resource 'c' already exists, alreadyExists", "name"),
    "stale-plan": ("Saved plan is stale", "Repeat drillyard cluster up c.yaml"),
    "too-old": (
        "Unsupported Terraform Core version: This configuration does not support 1.5.7",
        "terraform/install",
    ),
    "network": ("Get https://container.googleapis.com: dial tcp: i/o timeout", "network"),
}


@pytest.mark.parametrize("name", [kind.name for kind in KINDS])
def test_each_kind_is_recognised_and_says_what_to_do(name: str) -> None:
    text, remedy = CASES[name]
    found = kind_of(text)
    assert found is not None and found.name == name
    address = "google_compute_network.system"
    error = provider_error(
        [Diagnostic("Error creating", text, address)],
        project="p",
        command="drillyard cluster up c.yaml",
        doing="terraform apply",
    )
    assert str(error).startswith(f"{address}: ") and remedy in str(error)
    assert isinstance(error, UnreachableError) == (name == "network")


def test_one_error_names_the_first_known_resource_and_counts_the_others() -> None:
    unknown = Diagnostic("Something new", "", "google_compute_router.system")
    stockout = Diagnostic("Error", "GCE_STOCKOUT", "google_container_node_pool.gpu")
    error = str(provider_error([unknown, stockout], project="p", command="up", doing="apply"))
    assert error.startswith("google_container_node_pool.gpu: ")
    assert "1 more" in error and "google_compute_router.system" in error


@pytest.mark.parametrize(
    ("permission", "role"),
    [
        ("container.clusters.create", "roles/container.admin"),
        ("iam.serviceAccounts.create", "roles/iam.serviceAccountAdmin"),
        ("resourcemanager.projects.setIamPolicy", "roles/resourcemanager.projectIamAdmin"),
        ("storage.buckets.create", "roles/storage.admin"),
    ],
)
def test_a_missing_permission_names_the_role_that_has_it(permission: str, role: str) -> None:
    denied = Diagnostic("Error", f"Error 403: Permission '{permission}' denied on resource")
    error = provider_error([denied], project="p", command="up", doing="apply")
    assert f"projects add-iam-policy-binding p --member user:YOUR_ACCOUNT --role {role}" in str(
        error
    )


def test_an_error_without_diagnostics_says_what_failed() -> None:
    error = provider_error([], project="p", command="drillyard cluster up c", doing="tofu plan")
    assert "tofu plan" in str(error) and "drillyard cluster up c" in str(error)
