"""Rules of settings that hold for every cluster on Google Cloud: project, labels, buckets, disks.

Terraform's provider accepts what these refuse and the cloud refuses it later, half-way through.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from drillyard.config.cluster import ClusterConfig
from drillyard.config.creation import CreationConfig
from drillyard.config.problems import Problem
from drillyard.hardware.catalog import Catalog
from drillyard.hardware.cloud_limits import disk_limit, limit
from drillyard.provision.cluster_plan import CLUSTER_LABEL
from drillyard.provision.gcp.names import PROJECT_ID, bucket_name_problem
from drillyard.provision.gcp.place_rules import bucket_location_problem
from drillyard.provision.prices import DEFAULT_DISK

_OF_KUBERNETES = (
    "version",
    "release_channel",
    "cpu_pool",
    "max_pods_per_node",
    "gpu_driver",
    "images",
)
"""Keys of `cluster:` that only a cluster of Kubernetes has."""
_OF_A_NEW_BUCKET = ("bucket_location", "bucket_keep_versions", "bucket_recover_days")


def name_problems(cluster: ClusterConfig) -> Iterator[Problem]:
    """Why the cluster's VPC cannot have its name."""
    if cluster.name == "default":
        message = (
            "the cluster's VPC has its name, and most projects have a VPC 'default': write another"
        )
        yield Problem(("name",), message)


def project_problems(cluster: ClusterConfig) -> Iterator[Problem]:
    """Why `location.project` is not the id of a project."""
    assert cluster.location is not None and cluster.location.project is not None
    if PROJECT_ID.fullmatch(cluster.location.project) is None:
        message = (
            f"'{cluster.location.project}' is not the id of a project: at most 30 lower-case"
            " letters, digits and '-', not its name or number: gcloud projects list"
        )
        yield Problem(("location", "project"), message)


def disk_problems(creation: CreationConfig, disks: Mapping[str, str | None]) -> Iterator[Problem]:
    """Why `cluster.disk_gib` cannot be the size of a boot disk; `disks`: the type of disk by whose
    it is."""
    for nodes, disk in disks.items():
        allowed = disk_limit(disk or DEFAULT_DISK)
        if not allowed.allows(creation.disk_gib):
            default = CreationConfig.model_fields["disk_gib"].default
            message = (
                f"found {creation.disk_gib}; a boot disk ({disk or DEFAULT_DISK}) of {nodes} has"
                f" {allowed.in_words}: write {default}, or another size within"
            )
            yield Problem(("cluster", "disk_gib"), message)
            return


def label_problems(creation: CreationConfig) -> Iterator[Problem]:
    """Labels that Google or the cluster itself uses, or too many."""
    if CLUSTER_LABEL in creation.labels:
        message = "this label identifies what the cluster consists of; remove it"
        yield Problem(("cluster", "labels", CLUSTER_LABEL), message)
    for key in creation.labels:
        if key.startswith("goog"):
            message = "labels that begin with goog are Google's; give it another name"
            yield Problem(("cluster", "labels", key), message)
    if not (allowed := limit("labels-of-a-resource")).allows(len(creation.labels) + 1):
        message = (
            f"{len(creation.labels)} and the cluster's own are more than {allowed.in_words}: remove"
            f" {len(creation.labels) + 1 - (allowed.most or 0)}"
        )
        yield Problem(("cluster", "labels"), message)


def bucket_problems(
    cluster: ClusterConfig, creation: CreationConfig, state_bucket: str, facts: Catalog
) -> Iterator[Problem]:
    """What is wrong with the buckets of data and state."""
    name = cluster.storage.bucket
    if name is None:
        yield from _without_bucket(creation)
    else:
        if (wrong := bucket_name_problem(name)) is not None:
            short = name.removeprefix("gs://").strip("/")
            if bucket_name_problem(short) is not None:
                short = re.sub(r"[^a-z0-9]+", "-", short.lower()).strip("-")
            fix = f"; write {short}" if bucket_name_problem(short) is None else ""
            yield Problem(("storage", "bucket"), f"'{name}' {wrong}{fix}")
        if name == state_bucket:
            message = f"{name} is Terraform's; give runs a bucket of their own"
            yield Problem(("storage", "bucket"), message)
    if creation.existing_bucket:
        for key in _OF_A_NEW_BUCKET:
            if getattr(creation, key) != CreationConfig.model_fields[key].default:
                message = "an existing bucket stays as it is: remove this, or existing_bucket"
                yield Problem(("cluster", key), message)
    else:
        days = creation.bucket_recover_days
        if days and not (allowed := limit("soft-delete")).allows(days):
            message = f"found {days}; write 0, or {allowed.in_words}"
            yield Problem(("cluster", "bucket_recover_days"), message)
        place = creation.bucket_location
        if place is not None and (wrong := bucket_location_problem(place, facts)) is not None:
            yield Problem(("cluster", "bucket_location"), wrong)
    wrong = bucket_name_problem(state_bucket) if creation.state_bucket else None
    if wrong is not None:
        yield Problem(("cluster", "state_bucket"), f"'{state_bucket}' {wrong}")


def _without_bucket(creation: CreationConfig) -> Iterator[Problem]:
    for key in ("existing_bucket", *_OF_A_NEW_BUCKET):
        if getattr(creation, key) != CreationConfig.model_fields[key].default:
            message = "there is no bucket: name it (storage.bucket), or remove this"
            yield Problem(("cluster", key), message, depends_on=(("storage", "bucket"),))


def kubernetes_only_problems(creation: CreationConfig) -> Iterator[Problem]:
    """Settings that only a cluster of Kubernetes has."""
    for key in _OF_KUBERNETES:
        if getattr(creation, key) != CreationConfig.model_fields[key].default:
            message = "only a cluster of Kubernetes has it (platform: gke): remove it"
            yield Problem(("cluster", key), message)
    for key in ("pods", "services"):
        if getattr(creation.ranges, key) is not None:
            message = "only a cluster of Kubernetes has such addresses: remove it"
            yield Problem(("cluster", "ranges", key), message)


def access_problems(creation: CreationConfig) -> Iterator[Problem]:
    """What is wrong with who may reach the nodes by ssh."""
    path = ("cluster", "authorized_networks")
    if creation.private_nodes and creation.authorized_networks:
        message = (
            "nodes without public addresses are reached by Google's tunnel alone: remove it, or set"
            " cluster.private_nodes: false"
        )
        yield Problem(path, message)
    if not creation.private_nodes and not creation.authorized_networks:
        message = (
            "missing: with public addresses it says who may reach the nodes by ssh: write your own"
            " range, such as [203.0.113.0/24]"
        )
        yield Problem(path, message)
