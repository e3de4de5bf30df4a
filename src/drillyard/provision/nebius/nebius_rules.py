"""Rules of a GPU cluster of Nebius: its place, machine, fabric, file system, access and settings.

Terraform drops settings that the provider does not know without a word, and the cloud refuses wrong
values half-way through: what is known is refused here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from drillyard.config.cluster import ClusterConfig
from drillyard.config.creation import CreationConfig
from drillyard.config.problems import Path, Problem
from drillyard.errors import UserError
from drillyard.hardware.capacity import CLOUD_TITLES, stack_name
from drillyard.hardware.catalog import Catalog
from drillyard.hardware.machines import Machine
from drillyard.provision.cluster_plan import CLUSTER_LABEL, Pool
from drillyard.provision.nebius.config import NebiusConfig
from drillyard.provision.nebius.kubernetes_rules import kubernetes_problems
from drillyard.provision.nebius.soperator_rules import soperator_problems
from drillyard.provision.node_login import (
    DEFAULT_USER,
    NEW_KEY,
    public_key,
    script_text,
    user_problem,
)
from drillyard.provision.pools import key_path, read_pools

STACKS = ("infiniband", "ethernet")
_PROJECT = re.compile(r"project-[a-z0-9]+")
_CAPACITY = re.compile(r"capacityblockgroup-[a-z0-9]+")
_MOUNT = re.compile(r"(/[A-Za-z0-9._-]+)+")
_NOT_HERE = (
    *("release_channel", "max_pods_per_node", "gpu_driver", "images"),
    *("compact_placement", "existing_bucket", "bucket_location", "bucket_keep_versions"),
    *("bucket_recover_days", "registry", "deletion_protection", "network"),
)
"""Keys of `cluster:` that a GPU cluster of Nebius does not have."""


def nebius_problems(cluster: ClusterConfig, facts: Catalog) -> list[Problem]:
    """What the config, the machine or the region do not allow. A config without project, region,
    machine or consumption has the problems that its own check names, and no others."""
    location = cluster.location
    if location is None or location.project is None or location.region is None:
        return []
    found, problems = read_pools(cluster, facts, zonal=False)
    # Of `cluster.pools` one rule says all.
    own = [each for each in problems if each.path[:2] != ("cluster", "pools")]
    creation = cluster.cluster or CreationConfig()
    section = cluster.section_as(NebiusConfig)
    if section.orchestrator == "kubernetes":
        of_kind = [*kubernetes_problems(cluster, section, creation, facts)]
    elif section.orchestrator == "soperator":
        of_kind = [*_key(section), *soperator_problems(cluster, section, creation)]
    else:
        of_kind = [*_login(section), *_access(creation), *_of_kubernetes(creation)]
    of_kind += _of_others(cluster, section)
    settings = [*_place(cluster), *_shared_storage(cluster), *of_kind, *_unused(creation)]
    pools = [each for each in found if not each.key]
    if not pools:
        return [*own, *settings]
    return [*own, *_machine(cluster, pools[0], facts), *settings]


def regions_of(machine: Machine, facts: Catalog) -> list[str]:
    """The regions that have the machine: those of its fabrics, and of its prices."""
    priced = [each.region for each in facts.prices if each.machine == machine.name and each.region]
    return sorted({*machine.infiniband_fabrics, *priced})


def joins_fabric(cluster: ClusterConfig, pool: Pool, facts: Catalog) -> bool:
    """Whether InfiniBand joins the nodes: several of 8 GPUs, unless the config says ethernet."""
    stack = stack_name(cluster, pool.machine, facts)
    return pool.nodes > 1 and pool.machine.data_nics.count > 0 and stack == "infiniband"


def _place(cluster: ClusterConfig) -> Iterator[Problem]:
    location = cluster.location
    assert location is not None and location.project is not None
    if _PROJECT.fullmatch(location.project) is None:
        message = (
            f"'{location.project}' is not the id of a project, such as project-e00abc: nebius iam"
            " project list --parent-id TENANT"
        )
        yield Problem(("location", "project"), message)
    if location.zone is not None:
        message = "Nebius has regions without zones: remove it"
        yield Problem(("location", "zone"), message)


def _machine(cluster: ClusterConfig, pool: Pool, facts: Catalog) -> Iterator[Problem]:
    machine, section = pool.machine, cluster.section_as(NebiusConfig)
    if machine.cloud != "nebius":
        owner = CLOUD_TITLES.get(machine.cloud or "", "your own hardware file")
        message = f"{machine.name} is one of {owner}: write one of Nebius, such as gpu-h100-sxm"
        yield Problem(key_path(pool, "machine"), message)
        return
    yield from _reservation(pool)
    regions = regions_of(machine, facts)
    if regions and pool.region not in regions:
        message = (
            f"{pool.region} has no {machine.name}; these do: {', '.join(regions)}{_newer(machine)}"
        )
        yield Problem(("location", "region"), message)
        return
    stack = stack_name(cluster, machine, facts)
    if stack not in STACKS:
        message = f"{stack} is not a network of Nebius: write {' or '.join(STACKS)}, or remove it"
        yield Problem(("network_stack",), message)
        return
    if machine.data_nics.count == 0:
        yield from _too_few_gpus(cluster, machine, stack)
        return
    yield from _fabric(section, cluster, pool, facts)


def _too_few_gpus(cluster: ClusterConfig, machine: Machine, stack: str) -> Iterator[Problem]:
    why = (
        f"{machine.name} has {machine.num_accelerators} GPU, and only machines with 8 join an"
        " InfiniBand fabric"
    )
    whole = machine.name.partition("_")[0]
    if stack == "infiniband":
        message = f"{why}: write machine: {whole}, or network_stack: ethernet"
        yield Problem(("network_stack",), message)
    if cluster.section_as(NebiusConfig).fabric is not None:
        yield Problem(("nebius", "fabric"), f"{why}: write machine: {whole}, or remove it")


def _fabric(
    section: NebiusConfig, cluster: ClusterConfig, pool: Pool, facts: Catalog
) -> Iterator[Problem]:
    path, machine, given = ("nebius", "fabric"), pool.machine, section.fabric
    joined = joins_fabric(cluster, pool, facts)
    if given is not None and not joined:
        why = "one node joins no other" if pool.nodes == 1 else "ethernet joins the nodes"
        yield Problem(path, f"{why}: remove it")
        return
    here = machine.infiniband_fabrics.get(pool.region, ())
    if joined and not here:
        others = ", ".join(machine.infiniband_fabrics) or "none"
        message = (
            f"no InfiniBand fabric of {pool.region} joins {machine.name}; regions with one:"
            f" {others}{_newer(machine)}"
        )
        yield Problem(("location", "region"), message)
    elif given is not None and given not in here:
        message = (
            f"'{given}' is not a fabric of {pool.region} for {machine.name}: write"
            f" {' or '.join(here)}, or remove it{_newer(machine)}"
        )
        yield Problem(path, message)


def _newer(machine: Machine) -> str:
    """How a newer region or fabric is made known."""
    row = f"{{name: {machine.name}, infiniband_fabrics: {{REGION: [FABRIC]}}}}"
    return f" (newer ones: a hardware file with machines: [{row}])"


def _reservation(pool: Pool) -> Iterator[Problem]:
    for name in pool.reservations:
        if _CAPACITY.fullmatch(name) is None:
            message = (
                f"'{name}' is not the id of a group of capacity blocks, such as"
                " capacityblockgroup-e00abc: nebius capacity capacity-block-group list"
            )
            yield Problem(("reservation",), message)


def _login(section: NebiusConfig) -> Iterator[Problem]:
    if (wrong := user_problem(section.user or DEFAULT_USER)) is not None:
        yield Problem(("nebius", "user"), wrong)
    yield from _key(section)
    if section.startup_script is not None:
        yield from _readable(("nebius", "startup_script"), script_text, section.startup_script)


def _key(section: NebiusConfig) -> Iterator[Problem]:
    if section.identity_file in (None, "none"):
        message = (
            "missing: the key by which you log in to the nodes: ssh-keygen -t ed25519 -f"
            f" {NEW_KEY}, then nebius: {{identity_file: {NEW_KEY}}}"
        )
        yield Problem(("nebius", "identity_file"), message)
    else:
        yield from _readable(("nebius", "identity_file"), public_key, str(section.identity_file))


def _readable(path: Path, read: Callable[[str], str], file: str) -> Iterator[Problem]:
    try:
        read(file)
    except UserError as error:
        yield Problem(path, str(error))


def _shared_storage(cluster: ClusterConfig) -> Iterator[Problem]:
    section, storage = cluster.section_as(NebiusConfig), cluster.storage
    if storage.bucket is not None:
        message = (
            "nodes of Nebius share a file system: remove it, and write storage: {directory:"
            " /mnt/shared} with nebius: {filesystem_gib: 2048}"
        )
        yield Problem(("storage", "bucket"), message)
    if section.filesystem is not None and section.filesystem_gib is not None:
        message = "nebius.filesystem exists, and has its size: remove one of both"
        yield Problem(("nebius", "filesystem_gib"), message)
    given = [key for key in ("filesystem", "filesystem_gib") if getattr(section, key) is not None]
    if given and storage.directory is None:
        message = (
            f"missing: nebius.{given[0]} is mounted there on every node: write one such as"
            " /mnt/shared"
        )
        yield Problem(("storage", "directory"), message)
    elif storage.directory is not None and not given:
        message = (
            "missing: what is mounted at storage.directory: a size, with which a file system is"
            " made, or nebius.filesystem, the id of one"
        )
        yield Problem(("nebius", "filesystem_gib"), message)
    elif storage.directory is not None and _MOUNT.fullmatch(storage.directory) is None:
        message = (
            f"found '{storage.directory}'; a file system is mounted at an absolute path of letters,"
            " digits, '.', '_' and '-': write one such as /mnt/shared"
        )
        yield Problem(("storage", "directory"), message)


def _access(creation: CreationConfig) -> Iterator[Problem]:
    if creation.private_nodes:
        message = (
            "the nodes are reached by ssh at their public addresses: write false, and in"
            " cluster.authorized_networks who may reach them"
        )
        yield Problem(("cluster", "private_nodes"), message)
    elif not creation.authorized_networks:
        message = (
            "missing: with public addresses it says who may reach the nodes by ssh: write your own"
            " range, such as [203.0.113.0/24]"
        )
        yield Problem(("cluster", "authorized_networks"), message)


def _of_kubernetes(creation: CreationConfig) -> Iterator[Problem]:
    """Keys of `cluster:` that only a cluster of Kubernetes has."""
    for key in ("version", "cpu_pool"):
        if getattr(creation, key) != CreationConfig.model_fields[key].default:
            yield Problem(("cluster", key), f"is of clusters of Kubernetes: {_KUBERNETES}")


def _of_others(cluster: ClusterConfig, section: NebiusConfig) -> Iterator[Problem]:
    """Settings of another orchestrator."""
    if section.orchestrator != "kubernetes" and getattr(cluster, "kubernetes", None) is not None:
        yield Problem(("kubernetes",), f"is of clusters of Kubernetes: {_KUBERNETES}")
    if section.orchestrator != "soperator" and section.jail_gib is not None:
        message = "is of Soperator: remove it, or write nebius: {orchestrator: soperator}"
        yield Problem(("nebius", "jail_gib"), message)


_KUBERNETES = "remove it, or write nebius: {orchestrator: kubernetes}"


def _unused(creation: CreationConfig) -> Iterator[Problem]:
    for key in _NOT_HERE:
        if getattr(creation, key) != CreationConfig.model_fields[key].default:
            message = "clusters of platform nebius do not have it: remove it"
            yield Problem(("cluster", key), message)
    for key in ("pods", "services", "data"):
        if getattr(creation.ranges, key) is not None:
            message = "only the nodes have addresses here (cluster.ranges.nodes): remove it"
            yield Problem(("cluster", "ranges", key), message)
    if creation.pools:
        message = (
            "a cluster of Nebius has one pool of GPU nodes: remove it, and write a file of its own,"
            " with another name, for each further machine or way of buying"
        )
        yield Problem(("cluster", "pools"), message)
    if CLUSTER_LABEL in creation.labels:
        message = "this label identifies what the cluster consists of; remove it"
        yield Problem(("cluster", "labels", CLUSTER_LABEL), message)
