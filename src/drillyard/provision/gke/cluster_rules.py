"""Rules of a GKE cluster that hold for all of its pools: names, places, storage, versions.

Terraform's provider accepts what these refuse and the cloud refuses it later, half-way through.
"""

from __future__ import annotations

from collections.abc import Iterator

from drillyard.config.cluster import ClusterConfig
from drillyard.config.creation import CreationConfig
from drillyard.config.problems import Problem
from drillyard.hardware.catalog import Catalog
from drillyard.provision.cluster_plan import CLUSTER_LABEL
from drillyard.provision.gke.names import PROJECT_ID, REGION, bucket_name_problem

MOST_LABELS = 64
"""https://cloud.google.com/compute/docs/labeling-resources#requirements"""
SMALLEST_DISK_GIB = 10
"""https://cloud.google.com/kubernetes-engine/docs/how-to/custom-boot-disks"""
RECOVER_DAYS = range(7, 91)
"""https://cloud.google.com/storage/docs/soft-delete#retention-duration"""
_OF_A_NEW_BUCKET = ("bucket_location", "bucket_keep_versions", "bucket_recover_days")


def setting_problems(
    cluster: ClusterConfig, creation: CreationConfig, state_bucket: str, facts: Catalog
) -> Iterator[Problem]:
    """What is wrong with the settings of the whole cluster."""
    if cluster.name == "default":
        message = (
            "the cluster's VPC has its name, and most projects have a VPC 'default': write another"
        )
        yield Problem(("name",), message)
    yield from _place(cluster)
    yield from _labels(creation)
    yield from _buckets(cluster, creation, state_bucket)
    if creation.disk_gib < SMALLEST_DISK_GIB:
        message = f"found {creation.disk_gib}; a node's boot disk has {SMALLEST_DISK_GIB} or more"
        yield Problem(("cluster", "disk_gib"), message)
    if (machine := facts.find_machine(creation.cpu_pool.machine)) is not None:
        message = (
            f"{machine.name} has GPUs, which controllers do not use: write a machine without, such"
            " as e2-standard-16"
        )
        yield Problem(("cluster", "cpu_pool", "machine"), message)


def _place(cluster: ClusterConfig) -> Iterator[Problem]:
    location = cluster.location
    assert location is not None and location.project is not None and location.region is not None
    if PROJECT_ID.fullmatch(location.project) is None:
        message = (
            f"'{location.project}' is not the id of a project: at most 30 lower-case letters,"
            " digits and '-', not its name or number"
        )
        yield Problem(("location", "project"), message)
    if REGION.fullmatch(location.region) is None:
        message = f"'{location.region}' is not a region: write one such as us-central1"
        yield Problem(("location", "region"), message)


def _labels(creation: CreationConfig) -> Iterator[Problem]:
    if CLUSTER_LABEL in creation.labels:
        message = "this label identifies what the cluster consists of; remove it"
        yield Problem(("cluster", "labels", CLUSTER_LABEL), message)
    for key in creation.labels:
        if key.startswith("goog"):
            message = "labels that begin with goog are Google's; give it another name"
            yield Problem(("cluster", "labels", key), message)
    if len(creation.labels) >= MOST_LABELS:
        message = f"{len(creation.labels)} and the cluster's own are more than {MOST_LABELS}"
        yield Problem(("cluster", "labels"), message)


def _buckets(
    cluster: ClusterConfig, creation: CreationConfig, state_bucket: str
) -> Iterator[Problem]:
    name = cluster.storage.bucket
    if name is None:
        yield from _without_bucket(creation)
    else:
        if (wrong := bucket_name_problem(name)) is not None:
            yield Problem(("storage", "bucket"), f"'{name}' {wrong}")
        if name == state_bucket:
            message = f"{name} is Terraform's; give runs a bucket of their own"
            yield Problem(("storage", "bucket"), message)
    if creation.existing_bucket:
        for key in _OF_A_NEW_BUCKET:
            if getattr(creation, key) != CreationConfig.model_fields[key].default:
                message = "an existing bucket stays as it is: remove this, or existing_bucket"
                yield Problem(("cluster", key), message)
    elif creation.bucket_recover_days not in (0, *RECOVER_DAYS):
        message = f"found {creation.bucket_recover_days}; write 0, or 7 to 90"
        yield Problem(("cluster", "bucket_recover_days"), message)
    wrong = bucket_name_problem(state_bucket) if creation.state_bucket else None
    if wrong is not None:
        yield Problem(("cluster", "state_bucket"), f"'{state_bucket}' {wrong}")


def _without_bucket(creation: CreationConfig) -> Iterator[Problem]:
    for key in ("existing_bucket", *_OF_A_NEW_BUCKET):
        if getattr(creation, key) != CreationConfig.model_fields[key].default:
            message = "there is no bucket: name it (storage.bucket), or remove this"
            yield Problem(("cluster", key), message)
