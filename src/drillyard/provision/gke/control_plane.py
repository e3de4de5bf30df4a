"""The GKE cluster itself, and the CPU pool on which its controllers run."""

from __future__ import annotations

from collections.abc import Mapping

from drillyard.config.creation import CreationConfig
from drillyard.provision.terraform_document import Body, TerraformDocument, reference

SCOPES = ["https://www.googleapis.com/auth/cloud-platform"]


def add_control_plane(
    document: TerraformDocument,
    name: str,
    region: str,
    creation: CreationConfig,
    vpc: str,
    subnet: str,
    labels: Mapping[str, str],
) -> str:
    """The cluster with its CPU pool; the cluster's address."""
    body: Body = {
        "name": name,
        "location": region,
        "network": reference(vpc),
        "subnetwork": reference(subnet),
        "networking_mode": "VPC_NATIVE",
        "datapath_provider": "ADVANCED_DATAPATH",
        "enable_multi_networking": True,
        "remove_default_node_pool": True,
        "initial_node_count": 1,
        "deletion_protection": creation.deletion_protection,
        "resource_labels": dict(labels),
        "default_max_pods_per_node": creation.max_pods_per_node,
        "ip_allocation_policy": [
            {
                "cluster_secondary_range_name": "pods",
                "services_secondary_range_name": "services",
            }
        ],
        "release_channel": [{"channel": creation.release_channel.upper()}],
        "workload_identity_config": [
            {"workload_pool": "${google_compute_network.system.project}.svc.id.goog"}
        ],
        "addons_config": [{"gcs_fuse_csi_driver_config": [{"enabled": True}]}],
    }
    if creation.version is not None:
        body["min_master_version"] = creation.version
    address = document.add(
        "google_container_cluster", "cluster", body, name=name, location=region, labelled=True
    )
    document.add(
        "google_container_node_pool",
        "cpu",
        {
            "name": "cpu",
            "cluster": reference(address),
            "node_count": creation.cpu_pool.nodes,
            "node_config": [
                {
                    "machine_type": creation.cpu_pool.machine,
                    "disk_size_gb": creation.disk_gib,
                    "oauth_scopes": SCOPES,
                    "resource_labels": dict(labels),
                    "workload_metadata_config": [{"mode": "GKE_METADATA"}],
                }
            ],
        },
        name="cpu",
        location=region,
        labelled=True,
    )
    return address
