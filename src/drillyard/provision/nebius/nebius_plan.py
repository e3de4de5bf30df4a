"""The plan of a GPU cluster of Nebius: of its machines Terraform's resources, prices, quotas, and
the config by which `launch` reaches the hosts; of Managed Kubernetes see `kubernetes_plan.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from drillyard.config.cluster import ClusterConfig
from drillyard.config.load import yaml_text
from drillyard.config.problems import raise_all
from drillyard.hardware.capacity import quota_needed
from drillyard.hardware.catalog import Catalog
from drillyard.provision.cluster_plan import ClusterPlan, HostLogin, PlannedResource, PriceLine
from drillyard.provision.nebius.instances import FILESYSTEM_KIND, add_nodes, fabric_of
from drillyard.provision.nebius.kubernetes_plan import kubernetes_plan
from drillyard.provision.nebius.nebius_rules import nebius_problems
from drillyard.provision.nebius.nebius_settings import DOMAIN, NebiusSettings, required_provider
from drillyard.provision.nebius.networks import add_network
from drillyard.provision.nebius.soperator import soperator_plan
from drillyard.provision.node_login import verbatim
from drillyard.provision.pools import read_pools
from drillyard.provision.prices import cluster_prices, stored_price
from drillyard.provision.ssh_launch import ssh_launch_settings
from drillyard.provision.terraform_document import Body, TerraformDocument

LAUNCH_OUTPUT = "launch"
"""Name of Terraform's output that is the config of platform ssh."""
BUCKET_KIND = "nebius_storage_v1_bucket"
_UNBROKEN = 1 << 20


def nebius_plan(cluster: ClusterConfig, facts: Catalog) -> ClusterPlan:
    """The plan. Raises UserError with all that the config, the machine or the region do not
    allow."""
    raise_all(nebius_problems(cluster, facts), cluster._origin.places)
    (pool,), _ = read_pools(cluster, facts, zonal=False)
    settings = NebiusSettings(cluster, facts, pool)
    state = settings.creation.state_bucket or f"{settings.project}-{settings.name}-tfstate"
    bucket = PlannedResource(
        "", BUCKET_KIND, state, settings.region, labelled=True, made_by="drillyard"
    )
    endpoint = f"https://storage.{settings.region}.nebius.cloud:443"
    prices = _prices(settings)
    if settings.section.orchestrator == "kubernetes":
        return kubernetes_plan(settings, bucket, prices, endpoint)
    if settings.section.orchestrator == "soperator":
        return soperator_plan(settings, prices)
    return _machines_plan(settings, bucket, prices, endpoint)


def _prices(settings: NebiusSettings) -> tuple[PriceLine, ...]:
    """Of the GPU nodes and the shared file system."""
    pool, facts, gib = settings.pool, settings.facts, settings.section.filesystem_gib
    lines = cluster_prices((pool,), settings.creation, facts, controllers=False, way_out=False)
    if gib is None:
        return lines
    return (
        *lines,
        stored_price("shared file system", gib, "nebius-filesystem", facts, pool.region),
    )


def _machines_plan(
    settings: NebiusSettings, bucket: PlannedResource, prices: tuple[PriceLine, ...], endpoint: str
) -> ClusterPlan:
    cluster, section, pool = settings.cluster, settings.section, settings.pool
    document = TerraformDocument()
    subnet, group = add_network(document, settings)
    hosts = add_nodes(document, settings, subnet, group)
    launch = ssh_launch_settings(
        cluster,
        user=settings.user,
        identity_file=section.identity_file,
        directory=section.directory,
    )
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
            {LAUNCH_OUTPUT: {"value": _launch_text(launch, hosts)}},
        ),
        state_bucket=bucket.name,
        state_endpoint=endpoint,
        resources=(bucket, *document.resources),
        prices=prices,
        quotas=tuple(quota_needed(cluster, settings.facts)),
        warnings=tuple(_warnings(settings)),
        fields=tuple(document.fields),
        labels=settings.labels,
        launch_settings=launch,
        login=HostLogin(settings.user, section.identity_file, False, hosts),
    )


def _launch_text(launch: Body, hosts: Sequence[str]) -> str:
    """The config of platform ssh, in which Terraform fills in the addresses that Nebius has given:
    the public ones, and under which the others reach the first."""
    plain = _verbatim(launch)
    ssh = {
        "hosts": [_address(each, "public_ip_address") for each in hosts],
        **plain["ssh"],
        "rendezvous_host": _address(hosts[0], "ip_address"),
    }
    return yaml_text({**plain, "ssh": ssh}, width=_UNBROKEN)


def _verbatim(value: Any) -> Any:
    """The values of a config, in which Terraform reads no expressions."""
    if isinstance(value, str):
        return verbatim(value)
    if isinstance(value, Mapping):
        return {key: _verbatim(each) for key, each in value.items()}
    return [_verbatim(each) for each in value] if isinstance(value, list) else value


def _address(host: str, kind: str) -> str:
    """An expression: one address of a node, which the provider gives with its prefix."""
    where = f"{host}.status.network_interfaces[0].{kind}.address"
    return f'${{split("/", {where})[0]}}'


def _warnings(settings: NebiusSettings) -> Iterator[str]:
    """What cannot be undone, and what the plan cannot check."""
    pool, section = settings.pool, settings.section
    yield "name, location and fabric cannot be changed later: another value replaces the nodes"
    yield f"{pool.name}: its {pool.nodes} nodes are billed until they are destroyed, used or not"
    if pool.consumption == "spot":
        yield f"{pool.name}: Nebius may take spot nodes back; the next up starts those again"
    if pool.nodes > 1 and fabric_of(settings) is None:
        yield f"{pool.name}: no InfiniBand joins its nodes: a step waits for Ethernet"
    if section.filesystem_gib is not None:
        yield (
            f"{FILESYSTEM_KIND}.shared: it has the runs' data: down keeps it, and Terraform does"
            " not destroy it while its lifecycle says prevent_destroy"
        )
    if section.filesystem is not None:
        yield f"nebius.filesystem: {section.filesystem} must exist in the project and its region"
    if pool.nodes > 1 and settings.cluster.storage.directory is None:
        yield (
            "runs on several nodes need a directory that all of them share: storage.directory, with"
            " nebius.filesystem_gib"
        )
