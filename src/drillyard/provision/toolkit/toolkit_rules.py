"""Rules of a Slurm cluster that Cluster Toolkit makes, before anything is rendered."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from drillyard.config.creation import HeadConfig
from drillyard.config.problems import Problem
from drillyard.errors import NotFoundError
from drillyard.hardware.cluster_toolkit import nodeset_rules, slurm_machines, toolkit_release
from drillyard.launch.slurm.config import SlurmConfig
from drillyard.provision.gcp.machine_rules import machine_problems
from drillyard.provision.gcp.node_network import network_setting_problems
from drillyard.provision.gcp.placement import placement_problem
from drillyard.provision.gcp.reservation_rules import reservation_problems
from drillyard.provision.gcp.setting_rules import (
    access_problems,
    bucket_problems,
    disk_problems,
    kubernetes_only_problems,
    label_problems,
    name_problems,
    project_problems,
)
from drillyard.provision.pools import key_path
from drillyard.provision.toolkit.settings import HOME, SlurmCluster

_PARTITION = re.compile("[a-z][a-z0-9-]*")


def toolkit_problems(slurm: SlurmCluster) -> Iterator[Problem]:
    """What is wrong with the settings, the machine and how it is bought."""
    yield from _settings(slurm)
    yield from _own_settings(slurm)
    yield from _machine(slurm)


def nodeset_conflicts(nodeset: Mapping[str, Any], machine: str) -> Iterator[tuple[str, str]]:
    """Pairs of a nodeset's settings that the toolkit refuses together. A setting counts where it
    has a value that is not empty or false; dws_flex where it is enabled."""
    used = {key for key, value in nodeset.items() if value}
    flex = nodeset.get("dws_flex")
    if not (isinstance(flex, Mapping) and flex.get("enabled")):
        used.discard("dws_flex")
    for rule in nodeset_rules():
        if rule.name in used and machine not in rule.unless_machine:
            yield from ((rule.name, other) for other in rule.never_with if other in used)


def _settings(slurm: SlurmCluster) -> Iterator[Problem]:
    settings = slurm.settings
    cluster, creation = settings.cluster, settings.creation
    longest = toolkit_release().cluster_name_length
    if len(cluster.name) > longest:
        message = (
            f"'{cluster.name}' has {len(cluster.name)} characters, and the name of a Slurm cluster"
            f" at most {longest}: write {cluster.name[:longest].rstrip('-')}"
        )
        yield Problem(("name",), message)
    yield from name_problems(cluster)
    yield from project_problems(cluster)
    yield from label_problems(creation)
    yield from kubernetes_only_problems(creation)
    yield from access_problems(creation)
    yield from network_setting_problems(creation.network, creation.ranges, kubernetes=False)
    yield from disk_problems(creation, {"the nodes": slurm.pool.machine.boot_disk})
    bucket = cluster.storage.bucket
    if bucket is not None:
        message = (
            f"the nodes share {HOME}, and no bucket is made for them: write storage: {{directory:"
            f" {HOME}/runs}}"
        )
        yield Problem(("storage", "bucket"), message)
    else:
        yield from bucket_problems(cluster, creation, slurm.state_bucket, settings.facts)
    if creation.pools:
        message = (
            "a Slurm cluster is made with one partition of one machine: remove it, and write a file"
            " of its own, with another name, for each further machine or way of buying"
        )
        yield Problem(("cluster", "pools"), message)
    if "registry" in creation.model_fields_set and creation.registry:
        message = "no image repository is made with a Slurm cluster: remove it"
        yield Problem(("cluster", "registry"), message)


def _own_settings(slurm: SlurmCluster) -> Iterator[Problem]:
    own, facts = slurm.own, slurm.settings.facts
    for key in ("controller", "login"):
        try:
            machine = facts.cpu_machine(getattr(own, key))
        except NotFoundError as error:
            yield Problem(("cluster", "head", key), str(error).replace("\n", " "))
            continue
        if machine.cloud != "gcp":
            default = HeadConfig.model_fields[key].default
            message = f"{machine.name} is not one of Google Cloud's: write {default}"
            yield Problem(("cluster", "head", key), message)
    if own.home_gib is not None and own.home_gib < slurm.home.least:
        message = (
            f"found {own.home_gib}; {own.home} of this kind has at least {slurm.home.least} GiB:"
            f" write {slurm.home.least}, or remove it"
        )
        yield Problem(("cluster", "head", "home_gib"), message)
    if own.home == "lustre" and slurm.settings.creation.deletion_protection:
        message = "Lustre has no protection from deletion: remove it, or set cluster.head.home"
        yield Problem(("cluster", "deletion_protection"), f"{message}: filestore")
    if _PARTITION.fullmatch(slurm.partition) is None:
        message = (
            f"'{slurm.partition}' is not one partition of a name that the toolkit takes: a small"
            " letter, then small letters, digits and '-'"
        )
        yield Problem((slurm.settings.cluster.platform, "partition"), message)
    section = slurm.settings.cluster.section_as(SlurmConfig)
    if section.directory is not None and not section.directory.startswith(f"{HOME}/"):
        message = f"{section.directory} is not on {HOME}, which all nodes share: write {HOME}/..."
        yield Problem((slurm.settings.cluster.platform, "directory"), message)
    shared = slurm.settings.cluster.storage.directory
    if shared is not None and not shared.startswith(f"{HOME}/"):
        message = f"{shared} is not on {HOME}, which all nodes share: write {HOME}/runs"
        yield Problem(("storage", "directory"), message)


def _machine(slurm: SlurmCluster) -> Iterator[Problem]:
    settings, pool, machine = slurm.settings, slurm.pool, slurm.pool.machine
    if machine.name not in slurm_machines():
        message = (
            f"{machine.name}: Slurm clusters are made of {', '.join(slurm_machines())}: write one"
            " of them, or platform: gke or gce"
        )
        yield Problem(key_path(pool, "machine"), message)
        return
    yield from machine_problems(
        settings.cluster, slurm.network, settings.facts, "Compute Engine", by_type=False
    )
    yield from reservation_problems(pool, settings.project)
    compact = settings.creation.compact_placement
    wrong = None if compact is None else placement_problem(pool, compact)
    if compact and pool.reservations:
        wrong = "the nodes of a reservation are placed already"
    if wrong is not None:
        yield Problem(("cluster", "compact_placement"), f"{wrong}; remove it")
