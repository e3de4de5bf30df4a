"""A pool of GPU nodes for each way of buying them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from drillyard.config.creation import CreationConfig
from drillyard.provision.cluster_plan import Pool
from drillyard.provision.gke.control_plane import SCOPES
from drillyard.provision.gke.networks import NodeInterface
from drillyard.provision.terraform_document import Body, TerraformDocument, reference


def add_gpu_pool(
    document: TerraformDocument,
    pool: Pool,
    cluster: str,
    creation: CreationConfig,
    interfaces: Sequence[NodeInterface],
    labels: Mapping[str, str],
) -> None:
    """Add the pool. `cluster` is the address of its cluster."""
    machine = pool.machine
    node: Body = {
        "machine_type": machine.name,
        "disk_size_gb": creation.disk_gib,
        "disk_type": machine.boot_disk,
        "oauth_scopes": SCOPES,
        "resource_labels": dict(labels),
        "gvnic": [{"enabled": True}],
        "workload_metadata_config": [{"mode": "GKE_METADATA"}],
        "guest_accelerator": [
            {
                "type": machine.accelerator_type,
                "count": machine.num_accelerators,
                "gpu_driver_installation_config": [{"gpu_driver_version": "LATEST"}],
            }
        ],
    }
    body: Body = {
        "name": pool.name,
        "cluster": reference(cluster),
        "node_locations": [pool.zone],
        "node_config": [node],
        "management": [{"auto_repair": True, "auto_upgrade": True}],
    }
    if pool.scales_from_zero:
        node["flex_start"] = True
        node["reservation_affinity"] = [{"consume_reservation_type": "NO_RESERVATION"}]
        body["management"] = [{"auto_repair": False, "auto_upgrade": True}]
        body["initial_node_count"] = 0
        body["autoscaling"] = [
            {
                "total_min_node_count": 0,
                "total_max_node_count": pool.nodes,
                "location_policy": "ANY",
            }
        ]
        if pool.is_queued:
            body["queued_provisioning"] = [{"enabled": True}]
    else:
        body["node_count"] = pool.nodes
    if interfaces:
        body["network_config"] = [
            {
                "additional_node_network_configs": [
                    {
                        "network": reference(each.vpc_address, "name"),
                        "subnetwork": reference(each.subnet_address, "name"),
                    }
                    for each in interfaces
                ]
            }
        ]
    document.add(
        "google_container_node_pool",
        pool.name.replace("-", "_"),
        body,
        name=pool.name,
        location=pool.zone,
        labelled=True,
    )
