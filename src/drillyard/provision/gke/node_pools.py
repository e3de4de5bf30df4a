"""A pool of GPU nodes for each way of buying them.

What each way demands is that of
https://cloud.google.com/kubernetes-engine/docs/how-to/provisioningrequest, .../concepts/dws,
.../concepts/spot-vms and .../how-to/consuming-reservations, and of the checks of Cluster Toolkit's
module gke-node-pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from drillyard.config.creation import CreationConfig
from drillyard.hardware.cloud_limits import way_of_buying
from drillyard.hardware.facts import cited
from drillyard.hardware.machines import Machine
from drillyard.provision.cluster_plan import Pool
from drillyard.provision.gcp.names import labelled
from drillyard.provision.gcp.pool_networks import PoolNetwork
from drillyard.provision.gcp.reservation_rules import RESERVATION_KEY, reservation_value
from drillyard.provision.gcp.settings import GoogleSettings
from drillyard.provision.gke.control_plane import node_basics
from drillyard.provision.gke.placement import add_placement
from drillyard.provision.pools import key_path
from drillyard.provision.terraform_document import (
    OURS,
    Body,
    TerraformDocument,
    because,
    reference,
)

SECONDS_OF_AN_HOUR = 3600
CREATION_TIME = "60m"
DRANET_LABEL = "cloud.google.com/gke-networking-dra-driver"


def add_gpu_pool(
    document: TerraformDocument,
    settings: GoogleSettings,
    network: PoolNetwork,
    cluster: str,
    identity: Sequence[str],
) -> None:
    """Add the pool. `cluster`: the address of its cluster; `identity`: those of the nodes' service
    account and its roles."""
    pool, creation, (account, *roles) = network.pool, settings.creation, identity
    node: Body = {
        "machine_type": because(pool.machine.name, "the machine", _key(pool, "machine")),
        **_disks(pool.machine, creation),
        "gvnic": because([{"enabled": True}], "the network card that GPU machines have"),
        "guest_accelerator": [_accelerator(network, creation)],
        "resource_labels": labelled(settings.labels),
        "taint": because(
            [{"key": key, "value": value, "effect": "NO_SCHEDULE"} for key, value in _taints(pool)],
            "pods that do not ask for such nodes stay away; runs tolerate these",
            _key(pool, "consumption"),
        ),
        **node_basics(account),
        **_buying(pool, settings.project),
    }
    if network.dranet:
        node["labels"] = because(
            {DRANET_LABEL: "true"}, "GKE's driver gives the NICs to pods", _dranet_source(network)
        )
    body: Body = {
        "name": because(pool.name, "the pool and its queue", _key(pool, "name")),
        "cluster": because(reference(cluster), "its cluster"),
        "node_locations": because([pool.zone], "one zone", _key(pool, "zone")),
        "node_config": [node],
        **_size(pool),
        **_upkeep(pool),
        **_network(network),
        **add_placement(document, settings, pool),
        "timeouts": because(
            {"create": CREATION_TIME, "update": CREATION_TIME}, "creating many nodes takes long"
        ),
    }
    document.add(
        "google_container_node_pool",
        pool.name.replace("-", "_"),
        body,
        name=pool.name,
        location=settings.region,
        labelled=True,
        after=roles,
    )


def _taints(pool: Pool) -> Iterator[tuple[str, str]]:
    """Those that pods of a run tolerate (`launch/kubernetes/gke.py`)."""
    yield "nvidia.com/gpu", "present"
    if pool.consumption == "spot":
        yield "cloud.google.com/gke-spot", "true"
    if pool.is_queued:
        yield "cloud.google.com/gke-queued", "true"


def _disks(machine: Machine, creation: CreationConfig) -> Body:
    body: Body = {
        "disk_size_gb": because(
            creation.disk_gib, "the boot disk", "cluster.yaml: cluster.disk_gib"
        )
    }
    if machine.boot_disk is not None:
        why = "a boot disk that the machine can have"
        body["disk_type"] = because(machine.boot_disk, why, cited(machine, "boot_disk"))
    # The disks of NVLink domains are of another size; GKE counts them itself.
    if machine.local_disks is not None and machine.link_domain_accelerators is None:
        body["ephemeral_storage_local_ssd_config"] = because(
            [{"local_ssd_count": machine.local_disks.count}],
            "all local disks, for the files of pods: caches and copies of data",
            cited(machine, "local_disks"),
        )
    return body


def _accelerator(network: PoolNetwork, creation: CreationConfig) -> Body:
    machine, stack = network.pool.machine, network.stack
    assert stack is not None
    driver, source = "DEFAULT", OURS
    if creation.gpu_driver is not None:
        driver, source = creation.gpu_driver.upper(), "cluster.yaml: cluster.gpu_driver"
    elif stack.gke.driver is not None:
        driver, source = stack.gke.driver, cited(stack, "gke.driver")
    return {
        "type": because(
            machine.accelerator_type, "the machine's GPU", cited(machine, "accelerator_type")
        ),
        "count": because(
            machine.num_accelerators, "the machine's GPUs", cited(machine, "num_accelerators")
        ),
        "gpu_driver_installation_config": because(
            [{"gpu_driver_version": driver}], "GKE installs the driver", source
        ),
    }


def _buying(pool: Pool, project: str) -> Body:
    source = _key(pool, "consumption")
    if pool.consumption in ("reservation", "calendar"):
        values = [reservation_value(each, project) for each in pool.reservations]
        return {
            "reservation_affinity": because(
                [
                    {
                        "consume_reservation_type": "SPECIFIC_RESERVATION",
                        "key": RESERVATION_KEY,
                        "values": values,
                    }
                ],
                "the nodes are taken from this reservation alone",
                _key(pool, "reservations"),
            )
        }
    body: Body = {
        "reservation_affinity": because(
            [{"consume_reservation_type": "NO_RESERVATION"}],
            "these nodes must not consume a reservation",
            source,
        )
    }
    if pool.consumption == "spot":
        body["spot"] = because(True, "the cloud may take the nodes back", source)
    if pool.scales_from_zero:
        body["flex_start"] = because(True, "nodes are provided when capacity is free (DWS)", source)
    way = way_of_buying(pool.consumption)
    # A queued pool's nodes live as long as the run asked for.
    if way.longest_hours is not None and not pool.is_queued:
        body["max_run_duration"] = because(
            f"{way.longest_hours * SECONDS_OF_AN_HOUR}s",
            "the longest life of such a node",
            cited(way, "longest_hours"),
        )
    return body


def _size(pool: Pool) -> Body:
    nodes = _key(pool, "nodes")
    if not pool.scales_from_zero:
        return {"node_count": because(pool.nodes, "as many nodes, all the time", nodes)}
    body: Body = {
        "initial_node_count": because(0, "no nodes until a run asks for them"),
        "autoscaling": because(
            [
                {
                    "total_min_node_count": 0,
                    "total_max_node_count": pool.nodes,
                    "location_policy": "ANY",
                }
            ],
            "from zero, for the runs that ask",
            nodes,
        ),
        # GKE counts the nodes there are into it; a difference would replace the pool.
        "lifecycle": because(
            {"ignore_changes": ["initial_node_count"]}, "it changes as the pool scales"
        ),
    }
    if pool.is_queued:
        body["queued_provisioning"] = because(
            [{"enabled": True}], "all nodes of a run at once, or none", _key(pool, "consumption")
        )
    return body


def _upkeep(pool: Pool) -> Body:
    repair = not pool.scales_from_zero
    why = (
        "a broken node is replaced"
        if repair
        else "flex-start nodes are not repaired: that would ask for a new one"
    )
    return {
        "management": because(
            [{"auto_repair": repair, "auto_upgrade": True}],
            f"{why}; a release channel demands auto_upgrade, and the maintenance exclusion of the"
            " cluster keeps node upgrades away",
            _key(pool, "consumption"),
        ),
        "upgrade_settings": because(
            [{"strategy": "SURGE", "max_surge": 0, "max_unavailable": 1}],
            "there are no spare GPUs for a surge: an old node is removed before a new one is made",
        ),
    }


def _network(network: PoolNetwork) -> Body:
    if network.dranet:
        return {
            "network_config": because(
                [{"accelerator_network_profile": "auto"}],
                "GKE makes the data networks, and devices of the NICs",
                _dranet_source(network),
            )
        }
    if not network.interfaces:
        return {}
    return {
        "network_config": because(
            [
                {
                    "additional_node_network_configs": [
                        {
                            "network": reference(each.vpc_address, "name"),
                            "subnetwork": reference(each.subnet_address, "name"),
                        }
                        for each in network.interfaces
                    ]
                }
            ],
            "an interface for each further NIC, in the order of the NICs",
            network.interfaces[0].source,
        )
    }


def _dranet_source(network: PoolNetwork) -> str:
    machine = network.pool.machine
    if machine.pods is not None:
        return cited(machine, "pods")
    return "cluster.yaml: kubernetes.pod_network"


def _key(pool: Pool, key: str) -> str:
    return f"cluster.yaml: {'.'.join(map(str, key_path(pool, key)))}"
