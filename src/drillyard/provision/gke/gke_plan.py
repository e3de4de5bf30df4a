"""The plan of a cluster on GKE: Terraform's resources, the charts, prices and quotas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from drillyard.config.cluster import ClusterConfig
from drillyard.config.problems import Problem, raise_all
from drillyard.hardware.capacity import quota_needed
from drillyard.hardware.catalog import Catalog
from drillyard.hardware.cloud_limits import limit
from drillyard.hardware.cluster_parts import ZONES_OF_A_REGION
from drillyard.provision.cluster_chart import cluster_releases, launch_settings
from drillyard.provision.cluster_plan import (
    ClusterPlan,
    ExistingNetwork,
    NodeInterface,
    PlannedResource,
)
from drillyard.provision.gcp.address_ranges import (
    ClusterRanges,
    RangeSizes,
    cluster_ranges,
    pods_prefix,
    range_problems,
)
from drillyard.provision.gcp.names import state_bucket_name
from drillyard.provision.gcp.networks import add_data_networks, add_system_network
from drillyard.provision.gcp.node_identity import add_node_identity
from drillyard.provision.gcp.node_network import GKE_AGENT, GOOGLE_ACCOUNT, existing_network
from drillyard.provision.gcp.place_rules import place_problems
from drillyard.provision.gcp.pool_networks import (
    InterfaceNeed,
    PoolNetwork,
    merged_needs,
    network_objects,
    pool_networks,
)
from drillyard.provision.gcp.project_services import add_project_services
from drillyard.provision.gcp.providers import required_providers
from drillyard.provision.gcp.settings import GoogleSettings, read_settings
from drillyard.provision.gcp.storage import add_bucket, add_registry
from drillyard.provision.gke.cluster_rules import setting_problems
from drillyard.provision.gke.control_plane import add_control_plane
from drillyard.provision.gke.gke_warnings import gke_warnings
from drillyard.provision.gke.identities import NODE_ROLES, add_run_access
from drillyard.provision.gke.node_pools import add_gpu_pool
from drillyard.provision.gke.pool_rules import pool_problems, version_needs
from drillyard.provision.pools import read_pools
from drillyard.provision.prices import cluster_prices
from drillyard.provision.terraform_document import TerraformDocument

SERVICES = {
    "cloudresourcemanager.googleapis.com": "roles on the project",
    "compute.googleapis.com": "networks, and the nodes",
    "container.googleapis.com": "the cluster",
    "iam.googleapis.com": "the nodes' service account",
    "iamcredentials.googleapis.com": "Workload Identity of the pods",
    "logging.googleapis.com": "logs of the nodes",
    "monitoring.googleapis.com": "metrics of nodes and GPUs",
    "storage.googleapis.com": "the bucket, and Terraform's state",
    "artifactregistry.googleapis.com": "images",
    "cloudasset.googleapis.com": "`drillyard cluster leaks` looks for what is left",
}
"""The APIs of the project, each with what needs it, in the order of creation."""
Needs = Mapping[str, tuple[InterfaceNeed, int]]


def gke_plan(cluster: ClusterConfig, facts: Catalog) -> ClusterPlan:
    """The plan. Raises one UserError with all that the config, the machines or GKE's rules do not
    allow."""
    settings = read_settings(cluster, facts)
    creation, project, region = settings.creation, settings.project, settings.region
    state_bucket = creation.state_bucket or state_bucket_name(project, cluster.name)
    raise_all(gke_problems(cluster, facts), cluster._origin.places)
    pools, _ = read_pools(cluster, facts)
    networks = pool_networks(cluster, pools, facts)
    needs = merged_needs(networks, network_objects(facts))
    sizes = _range_sizes(settings, networks, needs)
    document = TerraformDocument()
    ranges = cluster_ranges(creation.ranges, sizes)
    interfaces = _render(document, settings, networks, needs, ranges)
    state = PlannedResource(
        "", "google_storage_bucket", state_bucket, region, labelled=True, made_by="drillyard"
    )
    return ClusterPlan(
        name=cluster.name,
        platform=cluster.platform,
        project=project,
        region=region,
        zone=pools[0].zone,
        pools=pools,
        terraform=document.as_json(
            {"google": {"project": project, "region": region}}, required_providers()
        ),
        state_bucket=state_bucket,
        resources=(state, *document.resources),
        interfaces=interfaces,
        prices=cluster_prices(pools, creation, facts),
        quotas=tuple(quota_needed(cluster, facts)),
        services=tuple(SERVICES),
        warnings=tuple(gke_warnings(settings, networks)),
        fields=tuple(document.fields),
        labels=settings.labels,
        version_needs=tuple(
            dict.fromkeys(
                (what, tuple(versions))
                for network in networks
                for what, versions in version_needs(network)
                if versions
            )
        ),
        existing_bucket=cluster.storage.bucket if creation.existing_bucket else None,
        network=_existing_network(settings, sizes),
        releases=cluster_releases(cluster, pools, interfaces, facts),
        launch_settings=launch_settings(cluster, pools),
    )


def gke_problems(cluster: ClusterConfig, facts: Catalog) -> list[Problem]:
    """What the config, the machines or GKE's rules do not allow. A config without project, region,
    machine or consumption has the problems that its own check names, and no others."""
    location = cluster.location
    if location is None or location.project is None or location.region is None:
        return []
    settings = read_settings(cluster, facts)
    creation = settings.creation
    state_bucket = creation.state_bucket or state_bucket_name(settings.project, cluster.name)
    pools, problems = read_pools(cluster, facts)
    networks = pool_networks(cluster, pools, facts)
    needs = merged_needs(networks, network_objects(facts))
    places = [*place_problems(cluster, pools, facts)]
    misplaced = {each.path for each in places}
    of_pools = pool_problems(cluster, creation, networks, facts)
    sizes = _range_sizes(settings, networks, needs)
    # More nodes than a cluster may have need no ranges.
    fits = limit("nodes-of-a-cluster").allows(sizes.nodes)
    return [
        *problems,
        *places,
        *setting_problems(cluster, creation, state_bucket, pools, facts),
        # A zone that is not one is not also that of another network.
        *(each for each in of_pools if each.path not in misplaced),
        *(range_problems(creation.ranges, sizes) if fits else ()),
    ]


def _existing_network(settings: GoogleSettings, sizes: RangeSizes) -> ExistingNetwork | None:
    given = settings.creation.network
    if given is None:
        return None
    assert given.pods and given.services and sizes.max_pods, "refused by network_setting_problems"
    pods = 2 ** (32 - pods_prefix(sizes.nodes, sizes.max_pods))
    least = limit("services-prefix").most
    assert least is not None
    return existing_network(
        settings,
        sizes.addresses,
        ranges={given.pods: pods, given.services: 2 ** (32 - least)},
        users=(GOOGLE_ACCOUNT, GKE_AGENT),
        agents=(GKE_AGENT,),
        own_firewall=False,
    )


def _range_sizes(
    settings: GoogleSettings, networks: Sequence[PoolNetwork], needs: Needs
) -> RangeSizes:
    cpu_nodes = settings.creation.cpu_pool.nodes * ZONES_OF_A_REGION
    # An upgrade of the CPU pool adds a node; the control plane has an address in the subnet.
    nodes = sum(each.pool.nodes for each in networks) + cpu_nodes + 1
    users = {name: number for name, (_, number) in needs.items()}
    data_nodes = tuple(users.get(name, 0) for name in network_objects(settings.facts))
    return RangeSizes(nodes + 1, nodes, settings.creation.max_pods_per_node, data_nodes)


def _render(
    document: TerraformDocument,
    settings: GoogleSettings,
    networks: Sequence[PoolNetwork],
    needs: Needs,
    ranges: ClusterRanges,
) -> tuple[NodeInterface, ...]:
    """Add all resources in the order of creation; the additional interfaces of all nodes."""
    add_project_services(document, SERVICES)
    network = add_system_network(document, settings, ranges)
    interfaces = add_data_networks(document, settings, needs, ranges.data)
    identity = add_node_identity(document, settings, NODE_ROLES)
    bucket = add_bucket(document, settings)
    if settings.creation.registry:
        add_registry(document, settings)
    made = add_control_plane(document, settings, network, identity)
    if bucket is not None:
        add_run_access(document, settings, *bucket, made)
    for each in networks:
        add_gpu_pool(document, settings, each, made, identity)
    return interfaces
