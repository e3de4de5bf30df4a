"""What a cluster config counts against a cloud's quotas: which metric, where, how much and why.

The rules stand in quotas.yaml. This module turns a cluster into the few quantities that clouds count (GPUs, nodes,
vCPUs, disks, networks) and fills the rules in. It asks no cloud: whether a quota is high enough, and what of it is in
use, is provisioning's question.

Limits: machines that are no cloud's need nothing. Quotas of storage and of the container registry are not counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from drillyard.errors import UserError
from drillyard.hardware.catalog import Catalog, catalog, read_rules
from drillyard.hardware.facts import CatalogRow, FactSource
from drillyard.hardware.machines import Consumption, Machine

if TYPE_CHECKING:
    from drillyard.config.cluster import ClusterConfig

CLOUD_OF = {"gke": "gcp", "gce": "gcp", "vertex": "gcp", "nebius": "nebius"}
"""Platforms that belong to one cloud; Slurm runs on any, and local and ssh machines on none."""

CLOUD_TITLES = {"gcp": "Google Cloud", "aws": "AWS", "nebius": "Nebius"}


@dataclass(frozen=True, slots=True)
class Quota:
    """So much of `metric` must be granted in `region` (None: globally); `dimensions` narrow a metric of families."""

    metric: str
    region: str | None
    amount: int
    unit: str
    reason: str
    source: FactSource
    dimensions: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaRule(CatalogRow):
    """One rule of quotas.yaml; an empty filter lets everything pass."""

    cloud: Literal["gcp", "aws", "nebius"]
    platforms: tuple[str, ...]
    metric: str
    amount: Literal["gpus", "nodes", "vcpus", "local_ssd_gib", "vpcs", "subnets", "gpu_clusters", "one"]
    unit: str
    reason: str
    consumption: tuple[Consumption, ...] = ()
    gpus: tuple[str, ...] = ()
    forms: tuple[str, ...] = ()
    boot_disks: tuple[str, ...] = ()
    cpu_quota: bool = False
    dimensions: Mapping[str, str] = field(default_factory=dict)
    scope: Literal["region", "global"] = "region"
    times: int = 1

    def holds(self, platform: str, consumption: str | None, machine: Machine) -> bool:
        """Whether the rule speaks of this machine, bought so, on this platform."""
        return (
            self.cloud == machine.cloud
            and platform in self.platforms
            and (not self.consumption or consumption in self.consumption)
            and (not self.gpus or machine.gpu_quota in self.gpus)
            and (not self.forms or machine.gpu_quota_form in self.forms)
            and (not self.boot_disks or machine.boot_disk in self.boot_disks)
            and (not self.cpu_quota or machine.cpu_quota is not None)
        )


def quota_needed(cluster: ClusterConfig, facts: Catalog | None = None) -> list[Quota]:
    """What the cluster counts against its cloud's quotas; empty for machines that are no cloud's.

    `facts` is the catalog to look the machine up in (ours by default). Raises UserError for an unknown machine and
    for a machine that the platform's cloud does not have.
    """
    if cluster.machine is None or cluster.has_own_machines:
        return []
    known = facts or catalog()
    machine = known.machine(cluster.machine)
    _require_cloud(cluster.platform, machine)
    region = region_of(cluster)
    quantities = _quantities(machine, cluster.nodes, known)
    words = {
        "gpu": machine.gpu_quota,
        "gpu_lower": (machine.gpu_quota or "").lower(),
        "vm_family": machine.name.split("-")[0].upper(),
        "cpu_quota": machine.cpu_quota,
    }
    return [
        Quota(
            metric=rule.metric.format(**words),
            region=region if rule.scope == "region" else None,
            amount=quantities[rule.amount] * rule.times,
            unit=rule.unit,
            reason=rule.reason,
            source=rule.provenance.of("metric"),
            dimensions={name: text.format(**words) for name, text in rule.dimensions.items()},
        )
        for rule in read_rules(QuotaRule)
        if rule.holds(cluster.platform, cluster.consumption, machine) and quantities[rule.amount]
    ]


def region_of(cluster: ClusterConfig) -> str | None:
    """The cluster's region, or that of its zone, which is a region and a letter: us-central1-b, us-east-1a."""
    if cluster.location is None:
        return None
    if cluster.location.region is None and cluster.location.zone is not None:
        return re.sub(r"-?[a-z]$", "", cluster.location.zone)
    return cluster.location.region


def _require_cloud(platform: str, machine: Machine) -> None:
    cloud = CLOUD_OF.get(platform)
    if cloud is not None and machine.cloud is not None and machine.cloud != cloud:
        raise UserError(
            f"machine {machine.name} is one of {CLOUD_TITLES[machine.cloud]}; platform {platform} is of"
            f" {CLOUD_TITLES[cloud]}: change `platform` or `machine`"
        )


def _quantities(machine: Machine, nodes: int, known: Catalog) -> dict[str, int]:
    stack = known.network_stack(machine.network_stack)
    return {
        "gpus": nodes * machine.num_accelerators,
        "nodes": nodes,
        "vcpus": nodes * (machine.vcpus or 0),
        "local_ssd_gib": round(nodes * machine.local_ssd_gib),
        "vpcs": stack.additional_vpcs(machine),
        "subnets": stack.additional_subnets(machine),
        "gpu_clusters": int(nodes > 1 and machine.data_nics.count > 0),
        "one": 1,
    }
