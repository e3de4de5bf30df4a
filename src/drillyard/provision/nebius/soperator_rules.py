"""Rules of a Slurm cluster by Soperator, beside those of every cluster of Nebius
(`nebius_rules.py`). Limits are those of the recipe's variables.tf
(https://github.com/nebius/nebius-solutions-library, soperator/installations/example).
"""

from __future__ import annotations

from collections.abc import Iterator

from drillyard.config.cluster import ClusterConfig
from drillyard.config.creation import CreationConfig
from drillyard.config.problems import Problem
from drillyard.provision.nebius.config import NebiusConfig

VERSION = "4.1.13"
"""Of the recipe whose settings are written."""
LEAST_DISK_GIB, LONGEST_NAME = 128, 32
"""Of a boot disk in GiB; of `company_name` in characters."""
_OF_OTHERS = ("user", "startup_script", "boot_image", "directory")
_NOT_HERE = ("version", "cpu_pool", "authorized_networks", "labels", "state_bucket")


def soperator_problems(
    cluster: ClusterConfig, section: NebiusConfig, creation: CreationConfig
) -> Iterator[Problem]:
    """What the file of such a cluster may not say, or lacks."""
    for key in _OF_OTHERS:
        if getattr(section, key) is not None:
            message = "nodes of Soperator do not have it: remove it"
            yield Problem(("nebius", key), message)
    for key in _NOT_HERE:
        if getattr(creation, key) != CreationConfig.model_fields[key].default:
            message = f"is decided by the recipe of Soperator {VERSION}: remove it"
            yield Problem(("cluster", key), message)
    if creation.ranges.nodes is not None:
        message = "nodes of Soperator are in the project's first subnet: remove it"
        yield Problem(("cluster", "ranges", "nodes"), message)
    if not creation.private_nodes:
        message = (
            "nodes of Soperator have no public addresses; logins go to its login node: remove it"
        )
        yield Problem(("cluster", "private_nodes"), message)
    if creation.disk_gib < LEAST_DISK_GIB:
        message = (
            f"found {creation.disk_gib}; boot disks of Soperator have at least {LEAST_DISK_GIB}"
            " GiB: write that or more"
        )
        yield Problem(("cluster", "disk_gib"), message)
    if len(cluster.name) > LONGEST_NAME:
        message = (
            f"has {len(cluster.name)} characters, and Soperator takes at most {LONGEST_NAME}: write"
            " a shorter one"
        )
        yield Problem(("name",), message)
    storage = (cluster.storage.directory, section.filesystem, section.filesystem_gib)
    if storage == (None, None, None):
        message = (
            "missing: a file system for runs and data, beside the root of the nodes: write one such"
            " as /mnt/shared, with nebius: {filesystem_gib: 2048}"
        )
        yield Problem(("storage", "directory"), message)
    if cluster.storage.directory == "/home":
        message = "/home is on a file system of Soperator's own: write one such as /mnt/shared"
        yield Problem(("storage", "directory"), message)
