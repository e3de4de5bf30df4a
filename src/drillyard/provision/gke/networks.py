"""The VPCs of a GKE cluster: its own with router and NAT, and those of the data NICs.

What a network stack needs is in `hardware/network_stacks.yaml` (`networks`).
"""

from __future__ import annotations

from dataclasses import dataclass

from drillyard.hardware.machines import Machine
from drillyard.hardware.network_stacks import NetworkStack
from drillyard.provision.gke.address_ranges import ClusterRanges
from drillyard.provision.terraform_document import TerraformDocument, reference


@dataclass(frozen=True)
class NodeInterface:
    """One additional interface of every GPU node, with the name of its Network object."""

    network_object: str
    vpc: str
    subnet: str
    vpc_address: str
    subnet_address: str
    device_mode: str


def add_system_network(
    document: TerraformDocument, name: str, region: str, ranges: ClusterRanges
) -> tuple[str, str]:
    """The cluster's own VPC and subnet, and NAT for nodes without public addresses; the addresses
    of both."""
    vpc = document.add(
        "google_compute_network",
        "system",
        {
            "name": name,
            "auto_create_subnetworks": False,
            "description": _description(name),
        },
        name=name,
    )
    subnet = document.add(
        "google_compute_subnetwork",
        "system",
        {
            "name": name,
            "network": reference(vpc),
            "region": region,
            "ip_cidr_range": str(ranges.nodes),
            "private_ip_google_access": True,
            "description": _description(name),
            "secondary_ip_range": [
                {"range_name": "pods", "ip_cidr_range": str(ranges.pods)},
                {"range_name": "services", "ip_cidr_range": str(ranges.services)},
            ],
        },
        name=name,
        location=region,
    )
    router = document.add(
        "google_compute_router",
        "system",
        {
            "name": name,
            "network": reference(vpc),
            "region": region,
            "description": _description(name),
        },
        name=name,
        location=region,
    )
    document.add(
        "google_compute_router_nat",
        "system",
        {
            "name": name,
            "router": reference(router, "name"),
            "region": region,
            "nat_ip_allocate_option": "AUTO_ONLY",
            "source_subnetwork_ip_ranges_to_nat": "ALL_SUBNETWORKS_ALL_IP_RANGES",
        },
        name=name,
        location=region,
    )
    return vpc, subnet


def add_data_networks(
    document: TerraformDocument,
    name: str,
    region: str,
    zone: str,
    machine: Machine,
    stack: NetworkStack,
    ranges: ClusterRanges,
) -> tuple[NodeInterface, ...]:
    """The VPCs and subnets of the stack, in the order of the nodes' interfaces.

    Raises nothing: `additional_subnets` of the stack says how many ranges there must be.
    """
    networks, interfaces = stack.networks, stack.interfaces
    if networks is None or interfaces is None or interfaces.network is None:
        return ()
    found: list[NodeInterface] = []
    free = iter(ranges.data)

    def vpc(label: str, mtu: int | None, profile: str | None) -> str:
        body: dict[str, object] = {
            "name": f"{name}-{label}",
            "auto_create_subnetworks": False,
            "description": _description(name),
        }
        if mtu is not None:
            body["mtu"] = mtu
        if profile is not None:
            body["network_profile"] = f"global/networkProfiles/{zone}-{profile}"
        return document.add(
            "google_compute_network", label.replace("-", "_"), body, name=f"{name}-{label}"
        )

    def interface(label: str, network_object: str, vpc_label: str, address: str, mode: str) -> None:
        cidr = next(free)
        subnet = document.add(
            "google_compute_subnetwork",
            label.replace("-", "_"),
            {
                "name": f"{name}-{label}",
                "network": reference(address),
                "region": region,
                "ip_cidr_range": str(cidr),
                "description": _description(name),
            },
            name=f"{name}-{label}",
            location=region,
        )
        found.append(
            NodeInterface(
                network_object, f"{name}-{vpc_label}", f"{name}-{label}", address, subnet, mode
            )
        )

    def firewall(label: str, address: str, source: str) -> None:
        document.add(
            "google_compute_firewall",
            label.replace("-", "_"),
            {
                "name": f"{name}-{label}",
                "network": reference(address, "name"),
                "direction": "INGRESS",
                "source_ranges": [source],
                "allow": [{"protocol": each} for each in ("tcp", "udp", "icmp")],
                "description": _description(name),
            },
            name=f"{name}-{label}",
        )

    for number in range(networks.host_vpcs):
        label = f"gvnic-{number + 1}"
        address = vpc(label, networks.host_mtu, None)
        interface(label, label, label, address, "NetDevice")
        firewall(label, address, str(ranges.data[len(found) - 1]))
    mode = networks.device_mode or "NetDevice"
    if networks.shared_vpcs:
        shared = vpc("rdma", networks.mtu, networks.profile)
    for number in range(machine.data_nics.count):
        label = interfaces.network.format(interfaces.first_network + number)
        if networks.shared_vpcs:
            interface(label, label, "rdma", shared, mode)
            continue
        address = vpc(label, networks.mtu, networks.profile)
        interface(label, label, label, address, mode)
        if networks.firewall:
            firewall(label, address, str(ranges.data[len(found) - 1]))
    return tuple(found)


def _description(name: str) -> str:
    return f"drillyard cluster {name}"
