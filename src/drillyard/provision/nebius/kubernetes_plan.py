"""The plan of a cluster of Nebius' Managed Kubernetes: Terraform's resources, prices and quotas,
the charts that runs need, and the config of platform `kubernetes` for `launch`.

The charts are those of any cluster of Kubernetes (`existing_cluster.py`), with the names that the
config for `launch` has. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from drillyard.config.cluster import ClusterConfig, cluster_model
from drillyard.hardware.capacity import Quota, quota_needed
from drillyard.launch.kubernetes.config import KubernetesConfig
from drillyard.launch.kubernetes.created_cluster import IMAGE_USER
from drillyard.provision.cluster_chart import OWN_CHART
from drillyard.provision.cluster_plan import ChartRelease, ClusterPlan, PlannedResource, PriceLine
from drillyard.provision.existing_cluster import existing_cluster_plan
from drillyard.provision.nebius.instances import FILESYSTEM_KIND, fabric_of
from drillyard.provision.nebius.kubernetes_rules import cpu_machine_name
from drillyard.provision.nebius.managed_kubernetes import (
    CLUSTER,
    GPU_TAINT,
    POOL_LABEL,
    add_cluster,
)
from drillyard.provision.nebius.nebius_settings import DOMAIN, NebiusSettings, required_provider
from drillyard.provision.nebius.networks import add_subnet
from drillyard.provision.prices import cpu_pool_prices, part_line
from drillyard.provision.ssh_launch import launch_basis
from drillyard.provision.terraform_document import TerraformDocument, reference

CLAIM = "shared"
"""The volume claim of each namespace: the directory of the file system on every node."""
CLUSTER_OUTPUT = "cluster_id"
"""Name of Terraform's output that is the id of the cluster."""
_COUNTS = ("compute.instance.count", "compute.disk.count")
"""Quotas that the controllers' nodes count against, too."""


def kubernetes_plan(
    settings: NebiusSettings, bucket: PlannedResource, prices: tuple[PriceLine, ...], endpoint: str
) -> ClusterPlan:
    """The plan of a config that the rules allow. `bucket`: that of the state, at `endpoint`;
    `prices`: of the GPU nodes and the shared file system."""
    cluster, facts, pool = settings.cluster, settings.facts, settings.pool
    document = TerraformDocument()
    _, subnet = add_subnet(document, settings)
    add_cluster(document, settings, subnet)
    launch = launch_config(settings)
    charts = existing_cluster_plan(_without_namespace(launch), facts)
    own = (charts.launch_settings or {})["kubernetes"]
    cpu = facts.cpu_machine(cpu_machine_name(settings.creation.cpu_pool))
    nodes = settings.creation.cpu_pool.nodes
    return ClusterPlan(
        name=cluster.name,
        platform=cluster.platform,
        project=settings.project,
        region=settings.region,
        zone=settings.region,
        pools=(pool,),
        terraform=document.as_json(
            {"nebius": {"domain": DOMAIN}},
            required_provider(),
            {CLUSTER_OUTPUT: {"value": reference(CLUSTER)}},
        ),
        state_bucket=bucket.name,
        state_endpoint=endpoint,
        resources=(bucket, *document.resources),
        releases=tuple(_with_volume(each, cluster.storage.directory) for each in charts.releases),
        prices=(
            part_line("control plane", "nebius-control-plane", pool.region, None),
            *cpu_pool_prices(cpu, nodes, settings.creation, facts, pool.region),
            *prices,
        ),
        quotas=tuple(_quotas(settings, nodes, cpu.vcpus)),
        warnings=tuple(_warnings(settings)),
        fields=tuple(document.fields),
        labels=settings.labels,
        launch_settings={**launch, "kubernetes": {**launch["kubernetes"], **own}},
    )


def launch_config(settings: NebiusSettings) -> dict[str, Any]:
    """The config of platform kubernetes for runs on the cluster, without the namespace."""
    cluster, pool = settings.cluster, settings.pool
    given: KubernetesConfig | None = getattr(cluster, "kubernetes", None)
    own = {} if given is None else given.model_dump(mode="json", exclude_unset=True)
    return {
        **launch_basis(cluster, "kubernetes"),
        "kubernetes": {
            "context": f"nebius_{settings.project}_{cluster.name}",
            "queue": pool.name,
            "volume_claim": CLAIM,
            "run_as_user": IMAGE_USER,
            "node_selector": {POOL_LABEL: pool.name},
            "tolerations": [{"key": GPU_TAINT, "operator": "Exists", "effect": "NoSchedule"}],
            **own,
        },
    }


def _without_namespace(launch: Mapping[str, Any]) -> ClusterConfig:
    return cluster_model().model_validate(launch)


def _with_volume(release: ChartRelease, directory: str | None) -> ChartRelease:
    """The release of our chart with a volume of the shared directory in each namespace."""
    if release.chart != OWN_CHART:
        return release
    volume = {"claim": CLAIM, "path": directory}
    return replace(release, values={**release.values, "sharedDirectory": volume})


def _quotas(settings: NebiusSettings, nodes: int, vcpus: int) -> Iterator[Quota]:
    found = quota_needed(settings.cluster, settings.facts)
    for each in found:
        more = nodes if each.metric in _COUNTS else 0
        yield replace(each, amount=each.amount + more)
    of_cpus = replace(found[0], metric="compute.instance.non-gpu.vcpu", amount=nodes * vcpus)
    yield replace(of_cpus, unit="vCPUs", reason="the controllers' nodes")
    of_cluster = replace(found[0], metric="mk8s.cluster.count", amount=1, unit="clusters")
    yield replace(of_cluster, reason="the cluster of Managed Kubernetes")


def _warnings(settings: NebiusSettings) -> Iterator[str]:
    """What cannot be undone, and what the plan cannot check."""
    pool, section = settings.pool, settings.section
    yield (
        "name, location and fabric cannot be changed later, nor storage.directory: another value"
        " replaces the cluster or its nodes"
    )
    yield f"{pool.name}: its {pool.nodes} nodes are billed until they are destroyed, used or not"
    if pool.consumption == "spot":
        yield f"{pool.name}: Nebius may take spot nodes back"
    if pool.nodes > 1 and fabric_of(settings) is None:
        yield f"{pool.name}: no InfiniBand joins its nodes: a step waits for Ethernet"
    if not settings.creation.authorized_networks:
        yield (
            "cluster.authorized_networks: none are given, so everybody may reach the control plane,"
            " and only logins keep them out"
        )
    if section.filesystem_gib is not None:
        yield (
            f"{FILESYSTEM_KIND}.shared: it has the runs' data: down keeps it, and Terraform does"
            " not destroy it while its lifecycle says prevent_destroy"
        )
    if section.filesystem is not None:
        yield (
            f"nebius.filesystem: {section.filesystem} must exist in the project and its region, and"
            " its directory belong to the pods' user (kubernetes.run_as_user)"
        )
