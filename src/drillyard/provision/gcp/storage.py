"""The bucket of run directories, and the repository of images.

A bucket has a hierarchical namespace, or keeps earlier versions: Cloud Storage does not offer both
(https://cloud.google.com/storage/docs/hns-overview#limitations). The namespace is the default:
checkpoints are directories, which it lists and renames in one operation instead of one for each
object, and what is deleted or overwritten can still be restored for some days
(https://cloud.google.com/storage/docs/soft-delete).
"""

from __future__ import annotations

from drillyard.provision.gcp.names import described, labelled, named
from drillyard.provision.gcp.project_services import service_address
from drillyard.provision.gcp.settings import GoogleSettings
from drillyard.provision.terraform_document import Body, TerraformDocument, because, reference

SECONDS_OF_A_DAY = 86400
BUCKET_ROLE = "roles/storage.objectUser"
UNFINISHED_UPLOAD_DAYS = 7
_KEPT = "cluster.yaml: cluster.bucket_keep_versions"
_OVERWRITTEN = (
    "versions with more newer ones than this are deleted: each save of a checkpoint would be kept"
    " and billed"
)


def add_bucket(document: TerraformDocument, settings: GoogleSettings) -> tuple[str, str] | None:
    """Make storage.bucket, or use the existing one. Returns expressions of its name and of the
    project's number; None where the config names no bucket."""
    name, creation = settings.cluster.storage.bucket, settings.creation
    body: Body
    if name is None:
        return None
    if creation.existing_bucket:
        why = "its number is part of the names of Workload Identity"
        body = {"project_id": because(settings.project, why, "cluster.yaml: location.project")}
        found = document.look_up("google_project", "this", body)
        return name, reference(found, "number")
    location = creation.bucket_location or settings.region
    body = {
        "name": because(name, "run directories and data", "cluster.yaml: storage.bucket"),
        "location": because(
            location,
            "near the nodes",
            "cluster.yaml: cluster.bucket_location, or location.region",
        ),
        "uniform_bucket_level_access": because(True, "rights by IAM alone, not by object"),
        "public_access_prevention": because("enforced", "it cannot be made public by mistake"),
        "force_destroy": because(False, "a bucket that has data is never destroyed unasked"),
        "labels": labelled(settings.labels),
        "soft_delete_policy": because(
            [{"retention_duration_seconds": creation.bucket_recover_days * SECONDS_OF_A_DAY}],
            "deleted and overwritten objects can be restored for so long",
            "cluster.yaml: cluster.bucket_recover_days",
        ),
        "lifecycle_rule": [
            {
                "action": because(
                    [{"type": "AbortIncompleteMultipartUpload"}],
                    "the parts of an upload that never ended are billed and cannot be seen",
                ),
                "condition": because([{"age": UNFINISHED_UPLOAD_DAYS}], "in days"),
            }
        ],
    }
    if creation.bucket_keep_versions:
        body["versioning"] = because([{"enabled": True}], "earlier versions are kept", _KEPT)
        body["lifecycle_rule"].append(
            {
                "action": because([{"type": "Delete"}], _OVERWRITTEN, _KEPT),
                "condition": because(
                    [
                        {
                            "num_newer_versions": creation.bucket_keep_versions,
                            "with_state": "ARCHIVED",
                        }
                    ],
                    "earlier versions alone",
                    _KEPT,
                ),
            }
        )
    else:
        body["hierarchical_namespace"] = because(
            [{"enabled": True}], "checkpoints are directories; it needs that no versions are kept"
        )
    made = document.add(
        "google_storage_bucket",
        "runs",
        body,
        name=name,
        location=location,
        labelled=True,
        after=[service_address("storage.googleapis.com")],
    )
    return reference(made, "name"), reference(made, "project_number")


def add_bucket_access(
    document: TerraformDocument,
    settings: GoogleSettings,
    bucket: str,
    member: str,
    users: str = "nodes",
) -> None:
    """Let `users` (nodes or jobs) read and write the bucket. `bucket`: its name or an expression;
    `member`: an expression of their account."""
    name = settings.cluster.storage.bucket
    document.add(
        "google_storage_bucket_iam_member",
        users,
        {
            "bucket": because(bucket, "run directories and data", "cluster.yaml: storage.bucket"),
            "role": because(BUCKET_ROLE, "read, write and delete objects, and nothing else"),
            "member": because(member, f"the {users}"),
        },
        name=f"{BUCKET_ROLE} {users} on {name}",
    )


def add_registry(document: TerraformDocument, settings: GoogleSettings) -> None:
    """The repository for the images of runs."""
    name, region = settings.name, settings.region
    document.add(
        "google_artifact_registry_repository",
        "images",
        {
            "repository_id": named(name),
            "location": because(region, "near the nodes", "cluster.yaml: location.region"),
            "format": because("DOCKER", "images of containers"),
            "description": described(name),
            "labels": labelled(settings.labels),
        },
        name=name,
        location=region,
        labelled=True,
        after=[service_address("artifactregistry.googleapis.com")],
    )
