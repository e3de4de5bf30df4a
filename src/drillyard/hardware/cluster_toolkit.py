"""What Google's Cluster Toolkit makes Slurm clusters of, and what it refuses.

    toolkit_release().version                 # 1.95.0
    slurm_machine("a4-highgpu-8g").sockets    # 2

The facts are in cluster_toolkit.yaml, slurm_machines.yaml, nodeset_rules.yaml and
home_storage.yaml, each with source and date.
"""

from __future__ import annotations

from functools import cache

from pydantic import PositiveInt

from drillyard.hardware.catalog import packaged_rows
from drillyard.hardware.facts import CatalogRow


class ToolkitRelease(CatalogRow):
    """The release that blueprints are written for. `terraform`: the oldest version that it takes;
    `slurm_gcp`: the release that images get Slurm from; `gib_package`: gIB for Debian's apt;
    `cluster_name_length`: the most characters of a Slurm cluster's name."""

    name: str
    version: str
    terraform: str
    slurm_gcp: str
    gib_package: str
    cluster_name_length: PositiveInt


class SlurmMachine(CatalogRow):
    """A machine of which there are Slurm blueprints."""

    name: str
    sockets: PositiveInt
    resume_seconds: PositiveInt


class NodesetRule(CatalogRow):
    """A setting of a nodeset that is refused together with each of `never_with`."""

    name: str
    never_with: tuple[str, ...]
    unless_machine: tuple[str, ...] = ()


class HomeStorage(CatalogRow):
    """Storage of /home. `throughput`: MB/s per TiB, of Lustre; `tier`: of Filestore."""

    name: str
    least: PositiveInt
    default: PositiveInt
    service: str
    tier: str | None = None
    throughput: PositiveInt | None = None


@cache
def toolkit_release() -> ToolkitRelease:
    """The release."""
    (row,) = packaged_rows(ToolkitRelease, "cluster_toolkit")
    return row


@cache
def slurm_machines() -> dict[str, SlurmMachine]:
    """The machines by name."""
    return {row.name: row for row in packaged_rows(SlurmMachine, "slurm_machines")}


@cache
def nodeset_rules() -> tuple[NodesetRule, ...]:
    """The rules of nodesets."""
    return packaged_rows(NodesetRule, "nodeset_rules")


def home_storage(name: str) -> HomeStorage:
    """What /home can be on, by name: filestore or lustre."""
    return {row.name: row for row in packaged_rows(HomeStorage, "home_storage")}[name]
