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
from drillyard.hardware.cloud_limits import limit
from drillyard.hardware.cluster_parts import ZONES_OF_A_REGION
from drillyard.launch.kubernetes.config import KubernetesConfig
from drillyard.launch.kubernetes.rules import image_address
from drillyard.provision.cluster_chart import FIRST_KUBERNETES
from drillyard.provision.cluster_plan import Pool
from drillyard.provision.gcp.node_network import network_setting_problems
from drillyard.provision.gcp.setting_rules import (
    bucket_problems,
    disk_problems,
    label_problems,
    name_problems,
    project_problems,
)
from drillyard.provision.gke.versions import reaches
from drillyard.provision.pools import key_path

_CLAIM = (("kubernetes", "volume_claim"),)


def setting_problems(
    cluster: ClusterConfig,
    creation: CreationConfig,
    state_bucket: str,
    pools: Sequence[Pool],
    facts: Catalog,
) -> Iterator[Problem]:
    """What is wrong with the settings of the whole cluster."""
    yield from name_problems(cluster)
    yield from project_problems(cluster)
    yield from label_problems(creation)
    yield from bucket_problems(cluster, creation, state_bucket, facts)
    yield from network_setting_problems(creation.network, creation.ranges, kubernetes=True)
    yield from _directory(cluster)
    image = cluster.image
    if image is not None and (not image.isprintable() or re.fullmatch(r"\S+", image) is None):
        message = f"'{image}' is not an image's address: write {image_address(cluster)}"
        yield Problem(("image",), message)
    cpu = facts.cpu_machines.get(creation.cpu_pool.machine)
    disks = {"the controllers' nodes": cpu.boot_disk if cpu else None}
    disks |= {f"pool {pool.name}": pool.machine.boot_disk for pool in pools}
    yield from disk_problems(creation, disks)
    yield from _cpu_machine(creation, facts)
    yield from _nodes(creation, pools)
    if creation.version is not None and not reaches(creation.version, (FIRST_KUBERNETES,)):
        message = (
            f"{creation.version}: the charts need {FIRST_KUBERNETES} or later: write a later"
            " version, or leave it out"
        )
        yield Problem(("cluster", "version"), message)


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
