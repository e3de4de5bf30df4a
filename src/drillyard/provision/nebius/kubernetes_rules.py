"""Rules of a cluster of Nebius' Managed Kubernetes, beside those of every cluster of Nebius
(`nebius_rules.py`): its version, nodes and boot image, and who reaches the control plane.

Limits are those of https://github.com/nebius/api/tree/main/nebius/mk8s/v1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from drillyard.config.cluster import ClusterConfig
from drillyard.config.creation import CpuPool, CreationConfig
from drillyard.config.problems import Problem
from drillyard.hardware.capacity import CLOUD_TITLES
from drillyard.hardware.catalog import Catalog
from drillyard.launch.kubernetes.config import KubernetesConfig
from drillyard.provision.cluster_chart import FIRST_KUBERNETES
from drillyard.provision.nebius.config import NebiusConfig

CPU_MACHINE = "cpu-d3_16vcpu-64gb"
"""The controllers' machine, where the config names none."""
MOST_NODES, MOST_RANGES = 100, 8
"""Of a node group; of the ranges that may reach the control plane."""
BOOT_IMAGE = re.compile(r"(?P<os>[a-z]+[0-9.]+)-(?P<drivers>cuda[0-9.]+)")
_VERSION = re.compile(r"(\d)\.(\d\d)")
_OF_MACHINES = ("user", "identity_file", "startup_script", "directory")
_MADE = (
    *("namespace", "queue", "service_account", "volume_claim"),
    *("node_selector", "tolerations", "pod_network", "network_libraries"),
)
"""Keys of `kubernetes:` that `up` decides."""


def kubernetes_problems(
    cluster: ClusterConfig, section: NebiusConfig, creation: CreationConfig, facts: Catalog
) -> Iterator[Problem]:
    """What the file of such a cluster may not say, or lacks."""
    for key in _OF_MACHINES:
        if getattr(section, key) is not None:
            message = (
                "is of machines that runs reach by ssh, and nodes of Kubernetes have no logins:"
                " remove it"
            )
            yield Problem(("nebius", key), message)
    if section.boot_image is not None and BOOT_IMAGE.fullmatch(section.boot_image) is None:
        message = (
            f"found '{section.boot_image}'; nodes of Kubernetes have an OS and a preset of drivers:"
            " write both, such as ubuntu24.04-cuda13.0"
        )
        yield Problem(("nebius", "boot_image"), message)
    storage = (cluster.storage.directory, section.filesystem, section.filesystem_gib)
    if storage == (None, None, None):
        message = (
            "missing: pods keep nothing of a run but what is in a directory that all nodes share:"
            " write one such as /mnt/shared, with nebius: {filesystem_gib: 2048}"
        )
        yield Problem(("storage", "directory"), message)
    yield from _sizes(cluster, creation)
    yield from _version(creation)
    yield from cpu_pool_problems(creation.cpu_pool, facts)
    yield from _own_section(cluster)


def cpu_machine_name(pool: CpuPool) -> str:
    """The machine of the controllers: the config's, or ours."""
    return pool.machine if "machine" in pool.model_fields_set else CPU_MACHINE


def cpu_pool_problems(pool: CpuPool, facts: Catalog) -> Iterator[Problem]:
    """A machine of the controllers that is not known, or is not one of Nebius."""
    name, path = cpu_machine_name(pool), ("cluster", "cpu_pool", "machine")
    known = facts.cpu_machines.get(name)
    if known is None:
        row = f"cpu_machines: [{{name: {name}, cloud: nebius, vcpus: VCPUS}}]"
        message = (
            f"machine '{name}' is not known; write one such as {CPU_MACHINE}, or give it a row in a"
            f" file of yours (--hardware FILE): {row}"
        )
        yield Problem(path, message)
    elif known.cloud not in (None, "nebius"):
        message = f"{name} is one of {CLOUD_TITLES[known.cloud]}: write one such as {CPU_MACHINE}"
        yield Problem(path, message)
    elif "_" not in name:
        message = (
            f"found '{name}'; a machine of Nebius is a platform and a preset: write"
            f" PLATFORM_PRESET, such as {CPU_MACHINE}"
        )
        yield Problem(path, message)


def _sizes(cluster: ClusterConfig, creation: CreationConfig) -> Iterator[Problem]:
    for path, found in ((("nodes",), cluster.nodes), (_CPU_NODES, creation.cpu_pool.nodes)):
        if found > MOST_NODES:
            message = (
                f"found {found}; a node group has at most {MOST_NODES} nodes: give fewer, or make"
                " several clusters"
            )
            yield Problem(path, message)
    if (found := len(creation.authorized_networks)) > MOST_RANGES:
        message = (
            f"found {found} ranges; at most {MOST_RANGES} may reach the control plane: give fewer,"
            " or wider ones"
        )
        yield Problem(("cluster", "authorized_networks"), message)


_CPU_NODES = ("cluster", "cpu_pool", "nodes")


def _version(creation: CreationConfig) -> Iterator[Problem]:
    if (version := creation.version) is None:
        return
    found = _VERSION.fullmatch(version)
    if found is None:
        message = (
            f"found '{version}'; a version of Managed Kubernetes has two numbers: write one such as"
            " '1.35'"
        )
        yield Problem(("cluster", "version"), message)
    elif [int(found[1]), int(found[2])] < [int(part) for part in FIRST_KUBERNETES.split(".")]:
        message = (
            f"{version}: the charts need {FIRST_KUBERNETES} or later: write a later version, or"
            " leave it out"
        )
        yield Problem(("cluster", "version"), message)


def _own_section(cluster: ClusterConfig) -> Iterator[Problem]:
    given: KubernetesConfig | None = getattr(cluster, "kubernetes", None)
    if given is None:
        return
    for key in _MADE:
        if key in given.model_fields_set:
            message = "`drillyard cluster up` makes it, and writes it for `launch`: remove it"
            yield Problem(("kubernetes", key), message)
    # The cluster that is made has a queue.
    yield from given.model_copy(update={"queue": cluster.name}).problems(cluster.nodes)
