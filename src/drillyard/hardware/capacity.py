"""The capacity that a cluster config needs: a machine that is known and sold in that way, and
quotas of its cloud.

Commands that use the machine of a cluster call `machine_of`. A machine without a list of ways to
buy it (a user's own row) is available in any way. `quota_needed` computes the quantities that
clouds count (GPUs, nodes, vCPUs, disks, networks) by the rules in quotas.yaml. It calls no cloud,
so it does not know what is granted or in use.

Limits: machines outside the known clouds need no quota. Quotas of storage and container registries
are not counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

from pydantic import Field, PositiveInt

from drillyard.errors import UserError
from drillyard.hardware.catalog import Catalog, catalog, packaged_rows
from drillyard.hardware.facts import CatalogRow, FactSource
from drillyard.hardware.machines import Consumption, Machine

if TYPE_CHECKING:
    from drillyard.config.cluster import ClusterConfig

CLOUD_TITLES = {"gcp": "Google Cloud", "aws": "AWS", "nebius": "Nebius"}


@dataclass(frozen=True, slots=True)
class Quota:
    """So much of `metric` must be granted in `region` (None: globally); `dimensions` narrow a
    metric of families."""

    metric: str
    region: str | None
    amount: int
    unit: str
    reason: str
    source: FactSource
    dimensions: Mapping[str, str]


class QuotaRule(CatalogRow):
    """One rule of quotas.yaml; an empty filter matches everything."""

    cloud: Literal["gcp", "aws", "nebius"]
    platforms: tuple[str, ...]
    metric: str
    amount: Literal[
        "gpus", "nodes", "vcpus", "local_ssd_gib", "vpcs", "subnets", "gpu_clusters", "one"
    ]
    unit: str
    reason: str
    consumption: tuple[Consumption, ...] = ()
    gpus: tuple[str, ...] = ()
    forms: tuple[str, ...] = ()
    boot_disks: tuple[str, ...] = ()
    cpu_quota: bool = False
    dimensions: dict[str, str] = Field(default={})
    scope: Literal["region", "global"] = "region"
    times: PositiveInt = 1

    def holds(self, platform: str, consumption: str | None, machine: Machine) -> bool:
        """Whether the rule applies to this machine, bought this way, on this platform."""
        return (
            self.cloud == machine.cloud
            and platform in self.platforms
            and (not self.consumption or consumption in self.consumption)
            and (not self.gpus or machine.gpu_quota in self.gpus)
            and (not self.forms or machine.gpu_quota_form in self.forms)
            and (not self.boot_disks or machine.boot_disk in self.boot_disks)
            and (not self.cpu_quota or machine.cpu_quota is not None)
        )


def machine_of(cluster: ClusterConfig, facts: Catalog) -> Machine:
    """The machine of `cluster`. UserError, with the line, where it is missing, unknown or not sold
    this way."""
    if cluster.machine is None:
        raise _at(cluster, "machine", "missing: name the machine type, or give --machine")
    try:
        machine = facts.machine(cluster.machine)
    except UserError as error:
        raise _at(cluster, "machine", str(error)) from None
    if (unsold := consumption_problem(cluster.consumption, machine)) is not None:
        raise _at(cluster, "consumption", unsold)
    return machine


def consumption_problem(consumption: str | None, machine: Machine) -> str | None:
    """Reason why `machine` cannot be bought by `consumption`, or None where it can."""
    if consumption is None or not machine.consumption or consumption in machine.consumption:
        return None
    return (
        f"{machine.name} cannot be had by '{consumption}'; it can by"
        f" {', '.join(machine.consumption)}"
    )


def quota_needed(cluster: ClusterConfig, facts: Catalog | None = None) -> list[Quota]:
    """List what the cluster counts against its cloud's quotas; empty for machines outside clouds.

    `facts` is the catalog (ours by default). Raises UserError for a machine unknown to it or to the
    platform's cloud.
    """
    if cluster.machine is None or cluster.has_own_machines:
        return []
    known = facts or catalog()
    machine = known.machine(cluster.machine)
    if cluster.cloud is not None and machine.cloud not in (None, cluster.cloud):
        raise UserError(
            f"machine {machine.name} is one of {CLOUD_TITLES[machine.cloud]}; platform"
            f" {cluster.platform} is of {CLOUD_TITLES[cluster.cloud]}: change `platform` or"
            " `machine`"
        )
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
        for rule in _rules()
        if rule.holds(cluster.platform, cluster.consumption, machine) and quantities[rule.amount]
    ]


def region_of(cluster: ClusterConfig) -> str | None:
    """The cluster's region, or that of its zone, which is a region and a letter: us-central1-b,
    us-east-1a."""
    if cluster.location is None:
        return None
    if cluster.location.region is None and cluster.location.zone is not None:
        return re.sub(r"-?[a-z]$", "", cluster.location.zone)
    return cluster.location.region


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


@cache
def _rules() -> tuple[QuotaRule, ...]:
    return packaged_rows(QuotaRule, "quotas")


def _at(cluster: ClusterConfig, field: str, message: str) -> UserError:
    """An error about `field`, with its line where the config was read from a file."""
    # Imported here, as our own catalog does not need the models of configs.
    from drillyard.config.problems import location_of

    places = cluster._origin.places
    label = "" if places is None else f"{location_of((field,), places).label}: "
    return UserError(f"{label}{field}: {message}")
