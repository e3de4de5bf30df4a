"""The plan of a cluster on GKE: Terraform's resources, the charts, prices and quotas."""

from __future__ import annotations

from collections.abc import Sequence

from drillyard.config.cluster import ClusterConfig
from drillyard.config.creation import CreationConfig
from drillyard.config.problems import Problem, raise_all
from drillyard.hardware.catalog import Catalog
from drillyard.hardware.cluster_parts import ZONES_OF_A_REGION
from drillyard.provision.cluster_plan import ClusterPlan, NodeInterface, PlannedResource
from drillyard.provision.gke.address_ranges import (
    ClusterRanges,
    RangeSizes,
    cluster_ranges,
    range_problems,
)
from drillyard.provision.gke.cluster_rules import CLUSTER_LABEL, cluster_problems
from drillyard.provision.gke.control_plane import add_control_plane
from drillyard.provision.gke.gke_warnings import gke_warnings
from drillyard.provision.gke.identities import add_node_identity, add_run_access
from drillyard.provision.gke.names import state_bucket_name
from drillyard.provision.gke.networks import add_data_networks, add_system_network
from drillyard.provision.gke.node_pools import add_gpu_pool
from drillyard.provision.gke.pool_networks import PoolNetwork, merged_needs, pool_networks
from drillyard.provision.gke.pool_rules import pool_problems
from drillyard.provision.gke.project_services import SERVICES, add_project_services
from drillyard.provision.gke.storage import add_bucket, add_registry
from drillyard.provision.plan_quotas import plan_quotas
from drillyard.provision.pools import read_pools
from drillyard.provision.prices import cluster_prices
from drillyard.provision.terraform_document import TerraformDocument

PROVIDER_VERSION = ">= 7.45.0, < 9.0.0"
"""7.45 and 8.7 accept the same resources (terraform providers schema; tests hold both)."""
TERRAFORM_VERSION = ">= 1.9.0"


def gke_plan(cluster: ClusterConfig, facts: Catalog) -> ClusterPlan:
    """The plan. Raises one UserError with all that the config, the machines or GKE's rules do not
    allow."""
    creation = cluster.cluster or CreationConfig()
    location = cluster.location
    assert location is not None and location.project is not None and location.region is not None
    project, region = location.project, location.region
    state_bucket = creation.state_bucket or state_bucket_name(project, cluster.name)
    pools, problems = read_pools(cluster, facts)
    networks = pool_networks(cluster, pools, facts)
    sizes = _range_sizes(creation, networks)
    problems += _problems(cluster, creation, state_bucket, networks, sizes, facts)
    raise_all(problems, cluster._origin.places)
    labels = {CLUSTER_LABEL: cluster.name, **creation.labels}
    document, interfaces = _render(
        cluster, creation, networks, cluster_ranges(creation.ranges, sizes), labels
    )
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
            {"google": {"project": project, "region": region}},
            {
                "required_version": TERRAFORM_VERSION,
                "required_providers": {
                    "google": {"source": "hashicorp/google", "version": PROVIDER_VERSION}
                },
            },
        ),
        state_bucket=state_bucket,
        resources=(state, *document.resources),
        interfaces=interfaces,
        prices=cluster_prices(pools, creation, facts),
        quotas=plan_quotas(cluster, facts, document.resources),
        services=tuple(SERVICES),
        warnings=tuple(gke_warnings(cluster, creation, region, networks)),
        fields=tuple(document.fields),
        labels=labels,
    )


def _problems(
    cluster: ClusterConfig,
    creation: CreationConfig,
    state_bucket: str,
    networks: Sequence[PoolNetwork],
    sizes: RangeSizes,
    facts: Catalog,
) -> list[Problem]:
    return [
        *cluster_problems(cluster, creation, state_bucket, facts),
        *pool_problems(cluster, creation, networks),
        *range_problems(creation.ranges, sizes),
    ]


def _range_sizes(creation: CreationConfig, networks: Sequence[PoolNetwork]) -> RangeSizes:
    cpu_nodes = creation.cpu_pool.nodes * ZONES_OF_A_REGION
    # An upgrade of the CPU pool adds a node; the control plane has an address in the subnet.
    nodes = sum(each.pool.nodes for each in networks) + cpu_nodes + 1
    data_nodes = tuple(users for _, users in merged_needs(networks).values())
    return RangeSizes(nodes + 1, nodes, creation.max_pods_per_node, data_nodes)


def _render(
    cluster: ClusterConfig,
    creation: CreationConfig,
    networks: Sequence[PoolNetwork],
    ranges: ClusterRanges,
    labels: dict[str, str],
) -> tuple[TerraformDocument, tuple[NodeInterface, ...]]:
    """All resources in the order of creation, and the additional interfaces of all nodes."""
    location, name = cluster.location, cluster.name
    assert location is not None and location.project is not None and location.region is not None
    project, region = location.project, location.region
    document = TerraformDocument()
    add_project_services(document)
    network = add_system_network(document, name, region, ranges, networks, creation.private_nodes)
    interfaces = add_data_networks(document, name, region, project, networks, ranges)
    identity = add_node_identity(document, name, project)
    bucket = add_bucket(document, cluster, creation, project, region, labels)
    if creation.registry:
        add_registry(document, name, region, labels)
    made = add_control_plane(document, name, project, region, creation, network, identity, labels)
    if bucket is not None:
        add_run_access(document, cluster, project, *bucket, made)
    for each in networks:
        add_gpu_pool(document, each, made, name, region, project, creation, identity, labels)
    return document, interfaces
