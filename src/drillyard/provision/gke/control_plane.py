"""The GKE cluster itself, and the CPU pool on which its controllers run."""

from __future__ import annotations

from collections.abc import Sequence

from drillyard.config.creation import CreationConfig
from drillyard.provision.gcp.names import labelled, named
from drillyard.provision.gcp.node_identity import SCOPES
from drillyard.provision.gcp.node_network import NodeNetwork
from drillyard.provision.gcp.project_services import service_address
from drillyard.provision.gcp.settings import GoogleSettings
from drillyard.provision.terraform_document import (
    Because,
    Body,
    TerraformDocument,
    because,
    reference,
)

CPU_POOL = "cpu"
DEFAULT_POOL = "default-pool"
"""Google's name of the pool that every cluster begins with."""
METRICS = ["SYSTEM_COMPONENTS", "CADVISOR", "KUBELET", "DCGM"]
"""https://cloud.google.com/kubernetes-engine/docs/how-to/dcgm-metrics"""
EXCLUSION_START = "2026-01-01T00:00:00Z"
"""Any day before the cluster exists: a plan has no clock."""
_SETTINGS = "cluster.yaml: cluster."


def add_control_plane(
    document: TerraformDocument,
    settings: GoogleSettings,
    network: NodeNetwork,
    identity: Sequence[str],
) -> str:
    """The cluster with its CPU pool; the cluster's address. `identity`: the addresses of the nodes'
    service account and its roles."""
    creation, region = settings.creation, settings.region
    account, *roles = identity
    after = [service_address("container.googleapis.com"), *roles, *network.after]
    whose = "its own VPC" if creation.network is None else "the VPC that the config names"
    body: Body = {
        "name": named(settings.name),
        "location": because(
            region, "a regional control plane survives a zone", "cluster.yaml: location.region"
        ),
        "network": because(network.network, whose, network.source),
        "subnetwork": because(network.subnet, "with ranges for pods and services", network.source),
        "networking_mode": because("VPC_NATIVE", "pods have addresses of the VPC"),
        "datapath_provider": because(
            "ADVANCED_DATAPATH", "Dataplane V2: additional interfaces and DRANET need it"
        ),
        "enable_multi_networking": because(True, "pods have an interface for each data NIC"),
        "remove_default_node_pool": because(True, "all pools are resources of their own"),
        "initial_node_count": because(1, "GKE demands a first pool, which is removed at once"),
        # Of the first pool: where the project's default account is disabled, a node without an
        # account of its own cannot be made.
        "node_config": [
            {
                "service_account": _account(account),
                "oauth_scopes": because(SCOPES, "what it may do is decided by its roles"),
            }
        ],
        "lifecycle": because(
            {"ignore_changes": ["node_config"]}, "it was the removed first pool's"
        ),
        "deletion_protection": because(
            creation.deletion_protection,
            "whether `down` is refused",
            f"{_SETTINGS}deletion_protection",
        ),
        "resource_labels": labelled(settings.labels),
        "default_max_pods_per_node": because(
            creation.max_pods_per_node,
            "each node takes twice as many addresses",
            f"{_SETTINGS}max_pods_per_node",
        ),
        "ip_allocation_policy": because(
            [
                {
                    "cluster_secondary_range_name": network.pods,
                    "services_secondary_range_name": network.services,
                }
            ],
            "ranges of the subnet",
            network.source,
        ),
        "private_cluster_config": because(
            [{"enable_private_nodes": creation.private_nodes, "enable_private_endpoint": False}],
            "nodes without public addresses; the control plane is reached with a login",
            f"{_SETTINGS}private_nodes",
        ),
        "workload_identity_config": because(
            [{"workload_pool": f"{settings.project}.svc.id.goog"}],
            "pods get rights of their own, not the node's",
        ),
        "addons_config": because(
            [{"gcs_fuse_csi_driver_config": [{"enabled": True}]}], "pods mount the bucket"
        ),
        "monitoring_config": because(
            [{"enable_components": METRICS, "managed_prometheus": [{"enabled": True}]}],
            "DCGM: metrics of the GPUs, which managed Prometheus collects",
        ),
        **_upgrades(creation),
    }
    if creation.authorized_networks:
        body["master_authorized_networks_config"] = because(
            [{"cidr_blocks": [{"cidr_block": each} for each in creation.authorized_networks]}],
            "who may reach the control plane at all",
            f"{_SETTINGS}authorized_networks",
        )
    address = document.add(
        "google_container_cluster",
        "cluster",
        body,
        name=settings.name,
        location=region,
        labelled=True,
        after=after,
    )
    _add_cpu_pool(document, settings, address, identity)
    return address


def _upgrades(creation: CreationConfig) -> Body:
    body: Body = {
        "release_channel": because(
            [{"channel": creation.release_channel.upper()}],
            "which versions there are, and when",
            f"{_SETTINGS}release_channel",
        ),
        "maintenance_policy": because(
            [
                {
                    "daily_maintenance_window": [{"start_time": "03:00"}],
                    "maintenance_exclusion": [
                        {
                            "exclusion_name": "no-minor-or-node-upgrades",
                            "start_time": EXCLUSION_START,
                            "exclusion_options": [
                                {
                                    "scope": "NO_MINOR_OR_NODE_UPGRADES",
                                    "end_time_behavior": "UNTIL_END_OF_SUPPORT",
                                }
                            ],
                        }
                    ],
                }
            ],
            "an upgrade of nodes would end the runs on them: none before the version's end of"
            " support",
            "https://cloud.google.com/kubernetes-engine/docs/concepts/maintenance-windows-and-exclusions",
        ),
    }
    if creation.version is not None:
        body["min_master_version"] = because(
            creation.version, "the version, or the newest that begins so", f"{_SETTINGS}version"
        )
    return body


def _add_cpu_pool(
    document: TerraformDocument, settings: GoogleSettings, cluster: str, identity: Sequence[str]
) -> None:
    creation, (account, *roles) = settings.creation, identity
    why = "controllers (Kueue, JobSet, DNS) run here, and must run before a queue can"
    document.add(
        "google_container_node_pool",
        CPU_POOL,
        {
            "name": because(CPU_POOL, why),
            "cluster": because(reference(cluster), "its cluster"),
            "node_count": because(
                creation.cpu_pool.nodes, "in each zone", f"{_SETTINGS}cpu_pool.nodes"
            ),
            "node_config": [
                {
                    "machine_type": because(
                        creation.cpu_pool.machine, why, f"{_SETTINGS}cpu_pool.machine"
                    ),
                    "disk_size_gb": because(
                        creation.disk_gib, "the boot disk", f"{_SETTINGS}disk_gib"
                    ),
                    "resource_labels": labelled(settings.labels),
                    **node_basics(account),
                }
            ],
            "management": because(
                [{"auto_repair": True, "auto_upgrade": True}], "no run is on these nodes"
            ),
            "upgrade_settings": because(
                [{"max_surge": 1, "max_unavailable": 0}],
                "a new node is ready before an old one is removed",
            ),
        },
        name=CPU_POOL,
        location=settings.region,
        labelled=True,
        after=roles,
    )


def node_basics(account: str) -> Body:
    """What every node has: its identity and image."""
    return {
        "service_account": _account(account),
        "oauth_scopes": because(SCOPES, "what it may do is decided by its roles"),
        "image_type": because("COS_CONTAINERD", "installers of the network stacks are for it"),
        "workload_metadata_config": because(
            [{"mode": "GKE_METADATA"}], "pods get their own identity, not the node's"
        ),
    }


def _account(address: str) -> Because:
    return because(reference(address, "email"), "the nodes' own account")
