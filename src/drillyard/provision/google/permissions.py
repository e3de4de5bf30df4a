"""The rights that Terraform needs for each kind of resource, and the role that has them.

https://cloud.google.com/iam/docs/permissions-reference
"""

from __future__ import annotations

from collections.abc import Iterable

from drillyard.provision.google.listings import JOB_LISTINGS, LISTINGS

READ_WRITE = ("create", "delete", "get")
_NETWORKS, _SECURITY = "roles/compute.networkAdmin", "roles/compute.securityAdmin"
_PROJECT = "roles/resourcemanager.projectIamAdmin"
_OF_INSTANCES = ("setLabels", "setMetadata", "setServiceAccount", "start", "stop")
_NEEDED: dict[str, tuple[str, tuple[str, ...]]] = {
    "google_project_service": (
        "roles/serviceusage.serviceUsageAdmin",
        ("serviceusage.services.enable", "serviceusage.services.get", "serviceusage.services.list"),
    ),
    "google_compute_network": (
        _NETWORKS,
        tuple(f"compute.networks.{each}" for each in (*READ_WRITE, "updatePolicy")),
    ),
    "google_compute_subnetwork": (
        _NETWORKS,
        tuple(f"compute.subnetworks.{each}" for each in (*READ_WRITE, "use")),
    ),
    "google_compute_router": (
        _NETWORKS,
        tuple(f"compute.routers.{each}" for each in (*READ_WRITE, "update")),
    ),
    "google_compute_router_nat": (_NETWORKS, ("compute.routers.get", "compute.routers.update")),
    "google_compute_firewall": (
        _SECURITY,
        tuple(f"compute.firewalls.{each}" for each in READ_WRITE),
    ),
    "google_compute_instance": (
        "roles/compute.instanceAdmin.v1",
        (
            *(f"compute.instances.{each}" for each in (*READ_WRITE, *_OF_INSTANCES)),
            "compute.disks.create",
            "compute.subnetworks.use",
        ),
    ),
    "google_compute_resource_policy": (
        "roles/compute.instanceAdmin.v1",
        tuple(f"compute.resourcePolicies.{each}" for each in READ_WRITE),
    ),
    "google_compute_instance_template": (
        "roles/compute.instanceAdmin.v1",
        tuple(f"compute.instanceTemplates.{each}" for each in READ_WRITE),
    ),
    "google_compute_region_instance_template": (
        "roles/compute.instanceAdmin.v1",
        tuple(f"compute.instanceTemplates.{each}" for each in (*READ_WRITE, "useReadOnly")),
    ),
    "google_compute_instance_group_manager": (
        "roles/compute.instanceAdmin.v1",
        (
            *(f"compute.instanceGroupManagers.{each}" for each in (*READ_WRITE, "update", "use")),
            *("compute.instances.get", "compute.instanceTemplates.useReadOnly"),
        ),
    ),
    "google_compute_resize_request": (
        "roles/compute.instanceAdmin.v1",
        ("compute.instanceGroupManagers.get", "compute.instanceGroupManagers.update"),
    ),
    "google_compute_image": (
        "roles/compute.instanceAdmin.v1",
        tuple(f"compute.images.{each}" for each in (*READ_WRITE, "useReadOnly")),
    ),
    "google_compute_address": (
        _NETWORKS,
        tuple(f"compute.addresses.{each}" for each in (*READ_WRITE, "use")),
    ),
    "google_filestore_instance": (
        "roles/file.editor",
        tuple(f"file.instances.{each}" for each in (*READ_WRITE, "update")),
    ),
    "google_lustre_instance": (
        "roles/lustre.admin",
        tuple(f"lustre.instances.{each}" for each in READ_WRITE),
    ),
    "google_compute_global_address": (
        _NETWORKS,
        (
            *(f"compute.globalAddresses.{each}Internal" for each in ("create", "delete")),
            "compute.globalAddresses.get",
            "compute.networks.use",
        ),
    ),
    "google_service_networking_connection": (
        _NETWORKS,
        ("servicenetworking.services.addPeering", "servicenetworking.services.get"),
    ),
    "google_container_cluster": (
        "roles/container.admin",
        (
            *(f"container.clusters.{each}" for each in (*READ_WRITE, "update")),
            "container.operations.get",
        ),
    ),
    "google_container_node_pool": (
        "roles/container.admin",
        ("container.clusters.get", "container.clusters.update", "container.operations.get"),
    ),
    "google_service_account": (
        "roles/iam.serviceAccountAdmin",
        tuple(f"iam.serviceAccounts.{each}" for each in READ_WRITE),
    ),
    "google_project_iam_member": (
        _PROJECT,
        ("resourcemanager.projects.getIamPolicy", "resourcemanager.projects.setIamPolicy"),
    ),
    "google_storage_bucket": (
        "roles/storage.admin",
        tuple(f"storage.buckets.{each}" for each in (*READ_WRITE, "update")),
    ),
    "google_storage_bucket_iam_member": (
        "roles/storage.admin",
        ("storage.buckets.getIamPolicy", "storage.buckets.setIamPolicy"),
    ),
    "google_artifact_registry_repository": (
        "roles/artifactregistry.admin",
        tuple(f"artifactregistry.repositories.{each}" for each in READ_WRITE),
    ),
}
_ALWAYS = {
    # Nodes run as the service account, and the state is objects of a bucket.
    "roles/iam.serviceAccountUser": ("iam.serviceAccounts.actAs",),
    "roles/storage.admin": tuple(f"storage.objects.{each}" for each in (*READ_WRITE, "list")),
}


READ_RIGHTS: tuple[str, ...] = tuple(
    sorted(
        {
            *(row.permission for row in (*JOB_LISTINGS, *LISTINGS)),
            "cloudasset.assets.searchAllResources",
            "compute.acceleratorTypes.get",
            "compute.instanceGroupManagers.get",
            "compute.machineTypes.get",
            "compute.machineTypes.list",
            "compute.networkProfiles.get",
            "compute.networks.get",
            "compute.networks.getEffectiveFirewalls",
            "compute.projects.get",
            "compute.regions.get",
            "compute.reservations.get",
            "compute.subnetworks.get",
            "compute.subnetworks.getIamPolicy",
            "container.clusters.get",
            "resourcemanager.projects.get",
            "serviceusage.quotas.get",
            "serviceusage.services.get",
            "serviceusage.services.list",
            "serviceusage.services.use",
            "storage.buckets.get",
            "storage.objects.get",
            "storage.objects.list",
        }
    )
)
"""What `leaks` and `plan --check` need: they only read."""


def rights_of(kinds: Iterable[str]) -> tuple[dict[str, list[str]], list[str]]:
    """The permissions that resources of these kinds need, by the role that grants them, and the
    kinds of which they are not known."""
    rights: dict[str, set[str]] = {role: set(needed) for role, needed in _ALWAYS.items()}
    unknown: list[str] = []
    for kind in dict.fromkeys(kinds):
        if kind not in _NEEDED:
            unknown.append(kind)
            continue
        role, needed = _NEEDED[kind]
        rights.setdefault(role, set()).update(needed)
    return {role: sorted(needed) for role, needed in rights.items()}, unknown
