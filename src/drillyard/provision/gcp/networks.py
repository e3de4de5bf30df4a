"""The VPCs of a cluster: its own with router and NAT, and those of the data NICs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ipaddress import IPv4Network

from drillyard.provision.cluster_plan import NodeInterface
from drillyard.provision.gcp.address_ranges import ClusterRanges
from drillyard.provision.gcp.names import described, named
from drillyard.provision.gcp.node_network import NodeNetwork, given_network, host_mtu
from drillyard.provision.gcp.pool_networks import InterfaceNeed
from drillyard.provision.gcp.settings import GoogleSettings
from drillyard.provision.terraform_document import Body, TerraformDocument, because, reference

COMPUTE = "google_project_service.compute"
_REGION = "cluster.yaml: location.region"
_SUBNETS = "only the subnets of this plan, in ranges that are known"


def add_system_network(
    document: TerraformDocument, settings: GoogleSettings, ranges: ClusterRanges
) -> NodeNetwork:
    """The cluster's own VPC and subnet, and NAT for nodes without public addresses; or nothing,
    where the nodes are in a VPC of the user's."""
    if (given := given_network(settings)) is not None:
        return given
    name, region = settings.name, settings.region
    body: Body = {
        "name": named(name),
        "auto_create_subnetworks": because(False, _SUBNETS),
        "description": described(name),
        # The same for every machine: where a further pool changed it, the VPC would be replaced.
        "mtu": because(*host_mtu(settings.facts)),
    }
    vpc = document.add("google_compute_network", "system", body, name=name, after=[COMPUTE])
    body = {
        "name": named(name),
        "network": because(reference(vpc), "the cluster's own VPC"),
        "region": because(region, "where the nodes are", _REGION),
        "ip_cidr_range": because(
            str(ranges.nodes),
            "addresses of nodes and control plane, apart from all others",
            "cluster.yaml: cluster.ranges.nodes, or computed from the nodes",
        ),
        "private_ip_google_access": because(True, "nodes reach Google's APIs without NAT"),
        "description": described(name),
    }
    if ranges.pods is not None:
        body["secondary_ip_range"] = _of_pods(ranges)
    subnet = document.add("google_compute_subnetwork", "system", body, name=name, location=region)
    after: tuple[str, ...] = ()
    if settings.creation.private_nodes:
        after = (_add_nat(document, name, region, vpc),)
    return NodeNetwork(reference(vpc), reference(subnet), after=after)


def _of_pods(ranges: ClusterRanges) -> list[Body]:
    """The ranges of pods and services in the subnet of the nodes."""
    return [
        {
            "range_name": because("pods", "as the cluster refers to it"),
            "ip_cidr_range": because(
                str(ranges.pods),
                "a block of twice the most pods for each node",
                "cluster.yaml: cluster.ranges.pods, or computed from the nodes",
            ),
        },
        {
            "range_name": because("services", "as the cluster refers to it"),
            "ip_cidr_range": because(
                str(ranges.services),
                "addresses of services",
                "cluster.yaml: cluster.ranges.services, or 4,096 addresses",
            ),
        },
    ]


def _add_nat(document: TerraformDocument, name: str, region: str, vpc: str) -> str:
    """The address of the NAT."""
    why = "nodes without public addresses reach images and the hub through it"
    source = "cluster.yaml: cluster.private_nodes"
    router = document.add(
        "google_compute_router",
        "system",
        {
            "name": named(name),
            "network": because(reference(vpc), why, source),
            "region": because(region, "where the nodes are", _REGION),
            "description": described(name),
        },
        name=name,
        location=region,
    )
    return document.add(
        "google_compute_router_nat",
        "system",
        {
            "name": named(name),
            "router": because(reference(router, "name"), why, source),
            "region": because(region, "where the nodes are", _REGION),
            "nat_ip_allocate_option": because("AUTO_ONLY", "addresses as many as are needed"),
            "source_subnetwork_ip_ranges_to_nat": because(
                "ALL_SUBNETWORKS_ALL_IP_RANGES", "nodes and pods"
            ),
        },
        name=name,
        location=region,
    )


def add_data_networks(
    document: TerraformDocument,
    settings: GoogleSettings,
    needs: Mapping[str, tuple[InterfaceNeed, int]],
    subnets: Sequence[IPv4Network],
) -> tuple[NodeInterface, ...]:
    """Add the VPCs, subnets and firewall rules of all additional interfaces; `needs` and `subnets`
    in one order."""
    name, region = settings.name, settings.region
    vpcs: set[str] = set()
    found: list[NodeInterface] = []
    for (label, (need, nodes)), cidr in zip(needs.items(), subnets, strict=True):
        if need.vpc not in vpcs:
            _add_vpc(document, settings, need)
            vpcs.add(need.vpc)
        vpc = need.vpc_address
        document.add(
            "google_compute_subnetwork",
            label.replace("-", "_"),
            {
                "name": named(f"{name}-{label}"),
                "network": because(reference(vpc), "the VPC of the interface", need.source),
                "region": because(region, "where the nodes are", _REGION),
                "ip_cidr_range": because(
                    str(cidr),
                    f"an address for each of {nodes} nodes, with room to grow",
                    "cluster.yaml: cluster.ranges.data, or computed from the nodes",
                ),
                "description": described(name),
            },
            name=f"{name}-{label}",
            location=region,
        )
        found.append(
            NodeInterface(label, f"{name}-{need.vpc}", f"{name}-{label}", need.device_mode)
        )
        if need.firewall:
            _add_firewall(document, name, label, vpc, str(cidr), need)
    return tuple(found)


def _add_vpc(document: TerraformDocument, settings: GoogleSettings, need: InterfaceNeed) -> None:
    name = settings.name
    body: Body = {
        "name": named(f"{name}-{need.vpc}"),
        "auto_create_subnetworks": because(False, _SUBNETS),
        "description": described(name),
    }
    if need.mtu is not None:
        body["mtu"] = because(need.mtu, "the frame size of the network stack", need.source)
    if need.profile is not None:
        body["network_profile"] = because(
            f"projects/{settings.project}/global/networkProfiles/{need.profile}",
            "the zone's profile makes it an RDMA network, and sets its MTU",
            need.source,
        )
    document.add(
        "google_compute_network",
        need.vpc.replace("-", "_"),
        body,
        name=f"{name}-{need.vpc}",
        after=[COMPUTE],
    )


def _add_firewall(
    document: TerraformDocument, name: str, label: str, vpc: str, cidr: str, need: InterfaceNeed
) -> None:
    document.add(
        "google_compute_firewall",
        label.replace("-", "_"),
        {
            "name": named(f"{name}-{label}"),
            "network": because(reference(vpc, "name"), "the VPC of the interface", need.source),
            "direction": because("INGRESS", "what leaves is allowed already"),
            "source_ranges": because([cidr], "only the nodes of this subnet"),
            "allow": because(
                [{"protocol": each} for each in ("tcp", "udp", "icmp")],
                "NCCL opens ports as it needs them",
                need.source,
            ),
            "description": described(name),
        },
        name=f"{name}-{label}",
    )
