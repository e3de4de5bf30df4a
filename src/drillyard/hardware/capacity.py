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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Literal

from pydantic import Field, PositiveInt

from drillyard.errors import UserError
from drillyard.hardware.catalog import Catalog, catalog, packaged_rows
from drillyard.hardware.cluster_parts import ZONES_OF_A_REGION, CpuMachine, nat_addresses
from drillyard.hardware.facts import CatalogRow, FactSource, combine
from drillyard.hardware.machines import Consumption, Machine
from drillyard.hardware.network_stacks import AdditionalNetwork

if TYPE_CHECKING:
    from drillyard.config.cluster import ClusterConfig
    from drillyard.config.creation import CreationConfig

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

    @property
    def in_words(self) -> str:
        """`16 GPUs of PREEMPTIBLE_NVIDIA_B200_GPUS in us-central1`."""
        dimensions = "".join(f", {key} {value}" for key, value in self.dimensions.items())
        region = f" in {self.region}" if self.region else ""
        unit = self.unit
        if self.amount == 1:
            unit = unit.removesuffix("es") if unit.endswith("sses") else unit.removesuffix("s")
        return f"{self.amount:,} {unit} of {self.metric}{dimensions}{region}"


class QuotaRule(CatalogRow):
    """One rule of quotas.yaml; an empty filter matches everything."""

    cloud: Literal["gcp", "aws", "nebius"]
    platforms: tuple[str, ...]
    metric: str
    amount: Literal[
        "gpus", "nodes", "vcpus", "local_ssd_gib", "boot_disk_gib", "one",
        "vpcs", "subnets", "gpu_clusters",
        "networks", "subnetworks", "own_networks", "firewalls", "routers", "addresses",
        "cpu_pool_vcpus", "cpu_pool_disk_gib",
    ]  # fmt: skip
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
        machine = facts.machine(cluster.machine, cluster.cloud)
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
    """List what the cluster counts against its cloud's quotas, one entry for each metric and place:
    all pools, and what it has beside them. Empty for machines outside clouds.

    `facts` is the catalog (ours by default). Raises UserError for a machine unknown to the catalog
    or to the platform's cloud.
    """
    if cluster.machine is None or cluster.has_own_machines:
        return []
    known = facts or catalog()
    pools = _own_pools(cluster, known)
    whole = _quantities_of_cluster(cluster, pools, known)
    parts = [(pool, _quantities_of_pool(cluster, pool)) for pool in pools]
    cpu_pool = _cpu_machine(cluster, known)
    words = {"cpu_pool_quota": cpu_pool.cpu_quota if cpu_pool else None}
    found: dict[tuple[object, ...], Quota] = {}
    for rule in _rules():
        for pool, amounts in [(pools[0], whole)] if rule.amount in whole else parts:
            amount = amounts[rule.amount] * rule.times
            if amount and rule.holds(cluster.platform, pool.consumption, pool.machine):
                quota = _counted(rule, amount, pool.machine, region_of(cluster), words)
                key = (quota.metric, quota.region, *sorted(quota.dimensions.items()))
                found[key] = _sum(found[key], quota) if key in found else quota
    return list(found.values())


def region_of(cluster: ClusterConfig) -> str | None:
    """The cluster's region, or that of its zone, which is a region and a letter: us-central1-b,
    us-east-1a, us-central1-ai1a."""
    if cluster.location is None:
        return None
    if cluster.location.region is None and cluster.location.zone is not None:
        return re.sub(r"-?(ai[0-9]+)?[a-z]$", "", cluster.location.zone)
    return cluster.location.region


def stack_name(cluster: ClusterConfig, machine: Machine, facts: Catalog) -> str:
    """The network stack of the nodes of a machine: `network_stack` is that of the file's own
    machine, and pools of another one have that of theirs."""
    own = facts.find_machine(cluster.machine or "") is machine
    return (cluster.network_stack if own else None) or machine.network_stack


@dataclass(frozen=True, slots=True)
class _Pool:
    machine: Machine
    consumption: str | None
    nodes: int
    key: str = ""
    """Beginning of an error about it: `cluster.pools[0]: ` of a further pool."""


def require_own_cloud(cluster: ClusterConfig, facts: Catalog) -> None:
    """Raise UserError for a machine unknown to the catalog or to the platform's cloud."""
    _own_pools(cluster, facts)


def _own_pools(cluster: ClusterConfig, known: Catalog) -> list[_Pool]:
    """The pools of a cluster. Raises UserError as `require_own_cloud`."""
    pools = list(_pools(cluster, known))
    for pool in pools:
        if cluster.cloud is not None and pool.machine.cloud not in (None, cluster.cloud):
            raise UserError(
                f"{pool.key}machine {pool.machine.name} is one of"
                f" {CLOUD_TITLES[pool.machine.cloud]}; platform {cluster.platform} is of"
                f" {CLOUD_TITLES[cluster.cloud]}: change `platform` or `machine`"
            )
    return pools


def _pools(cluster: ClusterConfig, known: Catalog) -> Iterator[_Pool]:
    assert cluster.machine is not None
    yield _Pool(known.machine(cluster.machine), cluster.consumption, cluster.nodes)
    for number, pool in enumerate(cluster.cluster.pools if cluster.cluster else ()):
        machine = known.machine(pool.machine or cluster.machine)
        yield _Pool(machine, pool.consumption, pool.nodes, f"cluster.pools[{number}]: ")


def _quantities_of_pool(cluster: ClusterConfig, pool: _Pool) -> dict[str, int]:
    machine, nodes = pool.machine, pool.nodes
    return {
        "gpus": nodes * machine.num_accelerators,
        "nodes": nodes,
        "vcpus": nodes * (machine.vcpus or 0),
        "local_ssd_gib": round(nodes * machine.local_ssd_gib),
        "boot_disk_gib": nodes * _creation(cluster).disk_gib,
        "one": 1,
    }


def _quantities_of_cluster(
    cluster: ClusterConfig, pools: Sequence[_Pool], known: Catalog
) -> dict[str, int]:
    machine, nodes = pools[0].machine, sum(pool.nodes for pool in pools)
    networks = {each for pool in pools for each in _networks(cluster, pool, known)}
    vpcs, subnets = len({each.vpc for each in networks}), len(networks)
    creation = _creation(cluster)
    cpu_nodes = creation.cpu_pool.nodes * ZONES_OF_A_REGION if _has_pods(cluster) else 0
    cpu_pool = _cpu_machine(cluster, known)
    every = nodes + cpu_nodes
    # A VPC that the config names is there, with its way to the internet.
    own, gateway = int(creation.network is None), creation.private_nodes
    return {
        "vpcs": vpcs,
        "subnets": subnets,
        "gpu_clusters": int(
            nodes > 1
            and machine.data_nics.count > 0
            and stack_name(cluster, machine, known) == machine.network_stack
        ),
        "networks": vpcs + own,
        "subnetworks": subnets + own,
        "own_networks": own,
        "firewalls": sum(each.firewall for each in networks),
        "routers": int(gateway) * own,
        "addresses": nat_addresses(every) * own if gateway else every,
        "cpu_pool_vcpus": cpu_nodes * cpu_pool.vcpus if cpu_pool and cpu_pool.cpu_quota else 0,
        "cpu_pool_disk_gib": cpu_nodes * creation.disk_gib,
    }


def _networks(cluster: ClusterConfig, pool: _Pool, known: Catalog) -> tuple[AdditionalNetwork, ...]:
    """The networks of the pool's NICs; none where GKE makes them itself (DRANET)."""
    machine = pool.machine
    stack = known.network_stack(stack_name(cluster, machine, known))
    own = machine.pods is not None and stack.name == machine.network_stack
    asked = getattr(cluster.section, "pod_network", None) == "dranet"
    if _has_pods(cluster) and stack.device_class is not None and (own or asked):
        return ()
    return stack.additional_networks(machine)


def _has_pods(cluster: ClusterConfig) -> bool:
    """Whether runs are pods: then controllers have nodes of their own, too."""
    from drillyard.config.platforms import platforms

    return platforms()[cluster.platform].in_pods


def _creation(cluster: ClusterConfig) -> CreationConfig:
    """What only the creation of a cluster needs, with defaults where the config says nothing."""
    # Imported here, as our own catalog does not need the models of configs.
    from drillyard.config.creation import CreationConfig

    return cluster.cluster or CreationConfig()


def _cpu_machine(cluster: ClusterConfig, known: Catalog) -> CpuMachine | None:
    return known.cpu_machines.get(_creation(cluster).cpu_pool.machine)


def _counted(
    rule: QuotaRule,
    amount: int,
    machine: Machine,
    region: str | None,
    words: Mapping[str, str | None],
) -> Quota:
    filled = {
        "gpu": machine.gpu_quota,
        "gpu_lower": (machine.gpu_quota or "").lower(),
        "vm_family": machine.name.split("-")[0].upper(),
        "cpu_quota": machine.cpu_quota,
        **words,
    }
    return Quota(
        metric=rule.metric.format(**filled),
        region=region if rule.scope == "region" else None,
        amount=amount,
        unit=rule.unit,
        reason=rule.reason,
        source=rule.provenance.of("metric"),
        dimensions={name: text.format(**filled) for name, text in rule.dimensions.items()},
    )


def _sum(one: Quota, other: Quota) -> Quota:
    """Both of one metric, with the reasons and sources of both."""
    fact = combine(one.amount + other.amount, one.source, other.source)
    return replace(
        one,
        amount=fact.value,
        reason="; ".join(dict.fromkeys([*one.reason.split("; "), other.reason])),
        source=FactSource(fact.source, fact.date, fact.unverified),
    )


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
