"""The plan of a cluster on GKE: Terraform's resources, the charts, prices and quotas."""

from __future__ import annotations

from drillyard.config.cluster import ClusterConfig
from drillyard.config.creation import CreationConfig
from drillyard.hardware.capacity import quota_needed
from drillyard.hardware.catalog import Catalog
from drillyard.provision.cluster_chart import cluster_releases, launch_settings
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.gke.address_ranges import cluster_ranges
from drillyard.provision.gke.control_plane import add_control_plane
from drillyard.provision.gke.networks import add_data_networks, add_system_network
from drillyard.provision.gke.node_pools import add_gpu_pool
from drillyard.provision.pools import pools_of
from drillyard.provision.terraform_document import TerraformDocument

CLUSTER_LABEL = "drillyard-cluster"
PROVIDER_VERSION = ">= 7.45.0, < 9.0.0"
"""7.45 and 8.7 accept the same resources (terraform providers schema; tests hold both)."""
TERRAFORM_VERSION = ">= 1.9.0"
SERVICES = (
    "artifactregistry.googleapis.com",
    "compute.googleapis.com",
    "container.googleapis.com",
    "iam.googleapis.com",
    "storage.googleapis.com",
)
_ZONES_OF_A_REGION = 3


def gke_plan(cluster: ClusterConfig, facts: Catalog) -> ClusterPlan:
    """The plan. Raises UserError for what the config, the machine or GKE's rules do not allow."""
    creation = cluster.cluster or CreationConfig()
    pools = pools_of(cluster, facts)
    location = cluster.location
    assert location is not None and location.project is not None
    region, zone = pools[0].region, pools[0].zone
    labels = {CLUSTER_LABEL: cluster.name, **creation.labels}
    machine = pools[0].machine
    stack = facts.network_stack(cluster.network_stack or machine.network_stack)
    ranges = cluster_ranges(
        creation.ranges,
        sum(pool.nodes for pool in pools),
        creation.cpu_pool.nodes * _ZONES_OF_A_REGION,
        creation.max_pods_per_node,
        stack.additional_subnets(machine),
    )
    document = TerraformDocument()
    vpc, subnet = add_system_network(document, cluster.name, region, ranges)
    interfaces = add_data_networks(document, cluster.name, region, zone, machine, stack, ranges)
    made = add_control_plane(document, cluster.name, region, creation, vpc, subnet, labels)
    for pool in pools:
        add_gpu_pool(document, pool, made, creation, interfaces, labels)
    return ClusterPlan(
        name=cluster.name,
        platform=cluster.platform,
        project=location.project,
        region=region,
        zone=zone,
        pools=pools,
        terraform=document.as_json(
            {"google": {"project": location.project, "region": region}},
            {
                "required_version": TERRAFORM_VERSION,
                "required_providers": {
                    "google": {"source": "hashicorp/google", "version": PROVIDER_VERSION}
                },
            },
            {},
        ),
        state_bucket=creation.state_bucket or f"{location.project}-{cluster.name}-tfstate"[:63],
        resources=tuple(document.resources),
        releases=cluster_releases(cluster, pools, interfaces, facts),
        quotas=tuple(quota_needed(cluster, facts)),
        services=SERVICES,
        labels=labels,
        launch_settings=launch_settings(cluster, pools),
    )
