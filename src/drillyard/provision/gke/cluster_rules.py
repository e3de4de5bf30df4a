"""Rules of a GKE cluster that hold for all of its pools: names, labels, disks, storage, versions.

Terraform's provider accepts what these refuse and the cloud refuses it later, half-way through.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from drillyard.config.cluster import ClusterConfig
from drillyard.config.creation import CreationConfig
from drillyard.config.problems import Problem
from drillyard.hardware.capacity import CLOUD_TITLES
from drillyard.hardware.catalog import Catalog, nearest_names
from drillyard.hardware.cloud_limits import disk_limit, limit
from drillyard.hardware.cluster_parts import ZONES_OF_A_REGION
from drillyard.launch.kubernetes.config import KubernetesConfig
from drillyard.launch.kubernetes.rules import image_address
from drillyard.provision.cluster_chart import FIRST_KUBERNETES
from drillyard.provision.cluster_plan import CLUSTER_LABEL, Pool
from drillyard.provision.gke.names import PROJECT_ID, bucket_name_problem
from drillyard.provision.gke.place_rules import bucket_location_problem
from drillyard.provision.gke.versions import reaches
from drillyard.provision.pools import key_path
from drillyard.provision.prices import DEFAULT_DISK

_CLAIM = (("kubernetes", "volume_claim"),)
_OF_A_NEW_BUCKET = ("bucket_location", "bucket_keep_versions", "bucket_recover_days")


def setting_problems(
    cluster: ClusterConfig,
    creation: CreationConfig,
    state_bucket: str,
    pools: Sequence[Pool],
    facts: Catalog,
) -> Iterator[Problem]:
    """What is wrong with the settings of the whole cluster."""
    if cluster.name == "default":
        message = (
            "the cluster's VPC has its name, and most projects have a VPC 'default': write another"
        )
        yield Problem(("name",), message)
    yield from _project(cluster)
    yield from _labels(creation)
    yield from _buckets(cluster, creation, state_bucket, facts)
    yield from _directory(cluster)
    image = cluster.image
    if image is not None and (not image.isprintable() or re.fullmatch(r"\S+", image) is None):
        message = f"'{image}' is not an image's address: write {image_address(cluster)}"
        yield Problem(("image",), message)
    yield from _disks(creation, pools, facts)
    yield from _cpu_machine(creation, facts)
    yield from _nodes(creation, pools)
    if creation.version is not None and not reaches(creation.version, (FIRST_KUBERNETES,)):
        message = (
            f"{creation.version}: the charts need {FIRST_KUBERNETES} or later: write a later"
            " version, or leave it out"
        )
        yield Problem(("cluster", "version"), message)


def _project(cluster: ClusterConfig) -> Iterator[Problem]:
    assert cluster.location is not None and cluster.location.project is not None
    if PROJECT_ID.fullmatch(cluster.location.project) is None:
        message = (
            f"'{cluster.location.project}' is not the id of a project: at most 30 lower-case"
            " letters, digits and '-', not its name or number: gcloud projects list"
        )
        yield Problem(("location", "project"), message)


def _disks(creation: CreationConfig, pools: Sequence[Pool], facts: Catalog) -> Iterator[Problem]:
    cpu = facts.cpu_machines.get(creation.cpu_pool.machine)
    disks = {"the controllers' nodes": cpu.boot_disk if cpu else None}
    disks |= {f"pool {pool.name}": pool.machine.boot_disk for pool in pools}
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


def _cpu_machine(creation: CreationConfig, facts: Catalog) -> Iterator[Problem]:
    name, path = creation.cpu_pool.machine, ("cluster", "cpu_pool", "machine")
    if (machine := facts.find_machine(name)) is not None:
        message = (
            f"{machine.name} has GPUs, which controllers do not use: write a machine without, such"
            " as e2-standard-16"
        )
        yield Problem(path, message)
    elif name not in facts.cpu_machines:
        row = f"cpu_machines: [{{name: {name}, cloud: gcp, vcpus: VCPUS, cpu_quota: METRIC}}]"
        near = nearest_names(name, facts.cpu_machines) or ["e2-standard-16"]
        message = (
            f"machine '{name}' is not known; write {' or '.join(near)}, or give it a row in a file"
            f" of yours (--hardware FILE): {row}"
        )
        yield Problem(path, message)
    elif (cloud := facts.cpu_machines[name].cloud) not in (None, "gcp"):
        message = f"{name} is one of {CLOUD_TITLES[cloud]}: write one such as e2-standard-16"
        yield Problem(path, message)


def _nodes(creation: CreationConfig, pools: Sequence[Pool]) -> Iterator[Problem]:
    nodes = sum(pool.nodes for pool in pools) + creation.cpu_pool.nodes * ZONES_OF_A_REGION
    if pools and not (allowed := limit("nodes-of-a-cluster")).allows(nodes):
        largest = max(pools, key=lambda pool: pool.nodes)
        found, path = largest.nodes, key_path(largest, "nodes")
        if creation.cpu_pool.nodes > found:
            found, path = creation.cpu_pool.nodes, ("cluster", "cpu_pool", "nodes")
        message = (
            f"found {found}; {nodes} nodes in all, and a cluster has at most {allowed.most}: give"
            " fewer, or make several clusters"
        )
        yield Problem(path, message)


def _labels(creation: CreationConfig) -> Iterator[Problem]:
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


def _buckets(
    cluster: ClusterConfig, creation: CreationConfig, state_bucket: str, facts: Catalog
) -> Iterator[Problem]:
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


def _directory(cluster: ClusterConfig) -> Iterator[Problem]:
    """A created cluster has no shared directory but that of a claim."""
    claim = cluster.section_as(KubernetesConfig).volume_claim
    if cluster.storage.directory is not None and claim is None:
        message = (
            f"{cluster.storage.directory}: no volume is made for it: name a bucket"
            " (storage.bucket) instead, or the claim of a volume of yours"
            " (kubernetes.volume_claim)"
        )
        yield Problem(("storage", "directory"), message, depends_on=_CLAIM)


def _without_bucket(creation: CreationConfig) -> Iterator[Problem]:
    for key in ("existing_bucket", *_OF_A_NEW_BUCKET):
        if getattr(creation, key) != CreationConfig.model_fields[key].default:
            message = "there is no bucket: name it (storage.bucket), or remove this"
            yield Problem(("cluster", key), message, depends_on=(("storage", "bucket"),))
