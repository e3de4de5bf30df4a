"""The plan of a cluster of virtual machines: Terraform's resources, prices, quotas, and the config
by which `launch` reaches the hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from drillyard.config.cluster import ClusterConfig
from drillyard.config.problems import Problem, raise_all
from drillyard.hardware.capacity import quota_needed
from drillyard.hardware.catalog import Catalog
from drillyard.hardware.cloud_limits import way_of_buying
from drillyard.provision.cluster_plan import (
    ClusterPlan,
    HostLogin,
    NodeGroup,
    PlannedResource,
    Pool,
)
from drillyard.provision.gce.config import GceConfig
from drillyard.provision.gce.firewalls import add_firewalls
from drillyard.provision.gce.gce_rules import gce_machine_problems, gce_setting_problems
from drillyard.provision.gce.instances import add_instances
from drillyard.provision.gce.login import user_of
from drillyard.provision.gce.node_group import add_node_group
from drillyard.provision.gcp.address_ranges import RangeSizes, cluster_ranges, range_problems
from drillyard.provision.gcp.names import state_bucket_name
from drillyard.provision.gcp.networks import add_data_networks, add_system_network
from drillyard.provision.gcp.node_identity import add_node_identity
from drillyard.provision.gcp.node_network import (
    GOOGLE_ACCOUNT,
    existing_network,
    network_warning,
)
from drillyard.provision.gcp.place_rules import place_problems
from drillyard.provision.gcp.pool_networks import (
    PoolNetwork,
    merged_needs,
    network_objects,
    pool_networks,
)
from drillyard.provision.gcp.project_services import VM_SERVICES, add_project_services
from drillyard.provision.gcp.providers import required_providers
from drillyard.provision.gcp.settings import GoogleSettings, read_settings
from drillyard.provision.gcp.storage import add_bucket, add_bucket_access, add_registry
from drillyard.provision.pools import read_pools
from drillyard.provision.prices import cluster_prices
from drillyard.provision.ssh_launch import ssh_launch_settings
from drillyard.provision.terraform_document import TerraformDocument, reference

NODE_ROLES = {
    "roles/logging.logWriter": "logs of the nodes",
    "roles/monitoring.metricWriter": "metrics of the nodes",
    "roles/artifactregistry.reader": "images of any repository of the project",
}
IAP_SERVICE = "iap.googleapis.com"


def gce_plan(cluster: ClusterConfig, facts: Catalog) -> ClusterPlan:
    """The plan. Raises one UserError with all that the config, the machine or the rules do not
    allow."""
    raise_all(gce_problems(cluster, facts), cluster._origin.places)
    settings = read_settings(cluster, facts)
    creation, project, region = settings.creation, settings.project, settings.region
    parts = _read(settings)
    assert parts is not None, "refused by gce_problems"
    document = TerraformDocument()
    services = _services(settings)
    hosts, group = _render(document, settings, parts, services)
    state_bucket = _state_bucket(settings)
    state = PlannedResource(
        "", "google_storage_bucket", state_bucket, region, labelled=True, made_by="drillyard"
    )
    login = _login(settings, hosts, group)
    return ClusterPlan(
        name=cluster.name,
        platform=cluster.platform,
        project=project,
        region=region,
        zone=parts.pool.zone,
        pools=(parts.pool,),
        terraform=document.as_json(
            {"google": {"project": project, "region": region}}, required_providers()
        ),
        state_bucket=state_bucket,
        resources=(state, *document.resources),
        prices=cluster_prices((parts.pool,), creation, facts, controllers=False),
        quotas=tuple(quota_needed(cluster, facts)),
        services=tuple(services),
        warnings=tuple(_warnings(settings, parts.pool)),
        fields=tuple(document.fields),
        labels=settings.labels,
        existing_bucket=cluster.storage.bucket if creation.existing_bucket else None,
        network=existing_network(
            settings,
            parts.sizes.addresses,
            users=(GOOGLE_ACCOUNT,) if login.group is not None else (),
        ),
        launch_settings=_launch_settings(cluster, login),
        login=login,
    )


def gce_problems(cluster: ClusterConfig, facts: Catalog) -> list[Problem]:
    """What the config, the machine or the rules do not allow. A config without project, zone,
    machine or consumption has the problems that its own check names, and no others."""
    location = cluster.location
    if location is None or location.project is None or location.zone is None:
        return []
    settings = read_settings(cluster, facts)
    found, problems = read_pools(cluster, facts)
    # Of `cluster.pools` one rule says all.
    own = [each for each in problems if each.path[:2] != ("cluster", "pools")]
    parts = _read(settings)
    if parts is None or not found:
        return own
    creation, pool = settings.creation, parts.pool
    return [
        *own,
        *place_problems(cluster, [pool], facts),
        *gce_setting_problems(cluster, creation, _state_bucket(settings), pool, facts),
        *gce_machine_problems(cluster, creation, parts.network, facts),
        *range_problems(creation.ranges, parts.sizes),
    ]


@dataclass(frozen=True)
class _Parts:
    """The only pool, with its networks and what its address ranges must hold."""

    pool: Pool
    network: PoolNetwork
    sizes: RangeSizes


def _read(settings: GoogleSettings) -> _Parts | None:
    """None where the machine is not known, or nothing says how it is bought."""
    found, _ = read_pools(settings.cluster, settings.facts)
    pools = [replace(each, kept=True) for each in found if not each.key]
    if not pools:
        return None
    (network,) = pool_networks(settings.cluster, pools, settings.facts)
    objects = network_objects(settings.facts)
    users = {name: nodes for name, (_, nodes) in merged_needs([network], objects).items()}
    data_nodes = tuple(users.get(name, 0) for name in objects)
    nodes = pools[0].nodes
    return _Parts(pools[0], network, RangeSizes(nodes, nodes, None, data_nodes))


def _state_bucket(settings: GoogleSettings) -> str:
    return settings.creation.state_bucket or state_bucket_name(settings.project, settings.name)


def _services(settings: GoogleSettings) -> dict[str, str]:
    services = dict(VM_SERVICES)
    if settings.creation.private_nodes:
        services[IAP_SERVICE] = "ssh to nodes without public addresses"
    return services


def _render(
    document: TerraformDocument,
    settings: GoogleSettings,
    parts: _Parts,
    services: dict[str, str],
) -> tuple[tuple[str, ...], NodeGroup | None]:
    """Add all resources in the order of creation; the addresses of the nodes, or their group."""
    ranges = cluster_ranges(settings.creation.ranges, parts.sizes)
    needs = merged_needs([parts.network], network_objects(settings.facts))
    add_project_services(document, services)
    network = add_system_network(document, settings, ranges)
    add_data_networks(document, settings, needs, ranges.data)
    add_firewalls(document, settings, network, str(ranges.nodes))
    identity = add_node_identity(document, settings, NODE_ROLES)
    bucket = settings.cluster.storage.bucket
    if bucket is not None:
        if not settings.creation.existing_bucket:
            made = add_bucket(document, settings)
            assert made is not None
            bucket = made[0]
        add_bucket_access(document, settings, bucket, reference(identity[0], "member"))
    if settings.creation.registry:
        add_registry(document, settings)
    if parts.pool.consumption == "flex-start":
        return (), add_node_group(document, settings, parts.network, network, identity)
    return add_instances(document, settings, parts.network, network, identity), None


def _login(settings: GoogleSettings, hosts: Sequence[str], group: NodeGroup | None) -> HostLogin:
    section, private = settings.cluster.section_as(GceConfig), settings.creation.private_nodes
    return HostLogin(user_of(section), section.identity_file, private, tuple(hosts), group)


def _launch_settings(cluster: ClusterConfig, login: HostLogin) -> dict[str, Any]:
    return ssh_launch_settings(
        cluster,
        user=login.user,
        identity_file=login.identity_file,
        directory=cluster.section_as(GceConfig).directory,
    )


def _warnings(settings: GoogleSettings, pool: Pool) -> Iterator[str]:
    """What cannot be undone, and what the plan cannot check."""
    cluster, creation = settings.cluster, settings.creation
    yield (
        "name, location and cluster.ranges cannot be changed later: another value replaces the"
        " nodes"
    )
    yield from network_warning(settings)
    if pool.consumption == "flex-start":
        yield from _of_flex_start(cluster, pool)
    else:
        yield f"{pool.name}: its {pool.nodes} nodes are billed from `up` to `down`, used or not"
    if pool.consumption == "spot":
        yield f"{pool.name}: Google may take spot nodes back; `up` starts those that were stopped"
    if (ahead := way_of_buying(pool.consumption).hours_ahead) is not None:
        yield (
            f"{pool.name}: a reservation of calendar mode must be asked for {ahead} hours ahead,"
            " and cannot be cancelled or changed"
        )
    bucket = cluster.storage.bucket
    if bucket is not None and creation.existing_bucket:
        yield f"storage.bucket: gs://{bucket} must exist; the nodes may then write to it and delete"
    if pool.nodes > 1 and cluster.storage.directory is None:
        yield (
            "storage.directory is not given: a run on several nodes needs a directory that all of"
            " them share, which gce.startup_script mounts"
        )
    if pool.machine.local_disks is not None:
        yield (
            f"{pool.machine.name}: local SSDs come without a file system, and are empty after each"
            " stop; gce.startup_script may make one"
        )
    if not creation.private_nodes:
        yield "cluster.authorized_networks: must contain this machine, or no run can be launched"


def _of_flex_start(cluster: ClusterConfig, pool: Pool) -> Iterator[str]:
    longest = way_of_buying("flex-start").longest_hours
    hours = cluster.section_as(GceConfig).max_run_hours or longest
    yield (
        f"{pool.name}: `up` waits until Google grants all {pool.nodes} nodes at once, which may"
        " take days; Ctrl-C leaves the request, and `down` cancels it"
    )
    yield (
        f"{pool.name}: its nodes are billed from then on, used or not, and are deleted with their"
        f" disks after {hours:g} hours, whatever runs on them; `up` asks again"
    )
