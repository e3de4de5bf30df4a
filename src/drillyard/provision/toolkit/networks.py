"""The networks of a Slurm cluster's blueprint: the nodes' VPC, its own or one of the user's, and
those of second host and data NICs, which are made either way."""

from __future__ import annotations

from typing import Any

from drillyard.provision.gcp.names import described
from drillyard.provision.gcp.node_network import PEERING, is_shared
from drillyard.provision.terraform_document import Body, because
from drillyard.provision.toolkit.blueprint_document import BlueprintDocument
from drillyard.provision.toolkit.settings import SlurmCluster

PRIVATE = "cluster.yaml: cluster.private_nodes"
_VPC = "modules/network/vpc"
_RANGES = "cluster.yaml: cluster.ranges"
_NETWORK = "cluster.yaml: cluster.network"
_FILESTORE = "https://cloud.google.com/filestore/docs/shared-vpc"


def _vpc(slurm: SlurmCluster, name: str, address_range: Any, mtu: int | None) -> Body:
    subnet = {
        "subnet_name": name,
        "subnet_region": slurm.settings.region,
        "subnet_ip": str(address_range),
        "subnet_private_access": "true",
    }
    body: Body = {
        "network_name": because(name, "the cluster's name, and what it is", "cluster.yaml: name"),
        "network_description": described(slurm.settings.name),
        "subnetworks": because([subnet], "one subnet, in the cluster's region", _RANGES),
        "enable_internal_traffic": because(True, "agents and ranks open ports as they need them"),
    }
    if mtu is not None:
        body["mtu"] = because(mtu, "the largest packets of the NICs", _mtu_source(slurm))
    return body


def _mtu_source(slurm: SlurmCluster) -> str:
    return slurm.network.interfaces[0].source


def add_network(document: BlueprintDocument, slurm: SlurmCluster) -> None:
    """Add the module `network`, by which all others know the VPC and subnet of the nodes."""
    creation, (nodes, _, _) = slurm.settings.creation, slurm.ranges()
    if creation.network is not None:
        host = creation.network.project or slurm.settings.project
        names = {"network_name": creation.network.name, "subnetwork_name": creation.network.subnet}
        body = {
            "project_id": because(host, "where the VPC is, also a shared one", _NETWORK),
            **{key: because(name, "it exists, and stays", _NETWORK) for key, name in names.items()},
        }
        document.add("network", "modules/network/pre-existing-vpc", body)
        return
    private = creation.private_nodes
    mtu = next((each.mtu for each in slurm.host or slurm.data), None)
    body = _vpc(slurm, slurm.settings.name, nodes, mtu)
    body |= {
        "enable_iap_ssh_ingress": because(private, "logins through Google's tunnel", PRIVATE),
        "enable_cloud_router": because(private, "NAT needs a router", PRIVATE),
        "enable_cloud_nat": because(private, "how private nodes reach the internet", PRIVATE),
        "allowed_ssh_ip_ranges": because(
            list(creation.authorized_networks),
            "who may reach the nodes by ssh",
            "cluster.yaml: cluster.authorized_networks",
        ),
    }
    document.add("network", _VPC, body)


def add_data_networks(
    document: BlueprintDocument, slurm: SlurmCluster
) -> tuple[list[str], str | None]:
    """The modules whose networks the nodes use, and the expression of the others."""
    _, host_range, data_range = slurm.ranges()
    if not slurm.data:
        return [], None
    name, data = slurm.settings.name, slurm.data
    if data[0].profile is None:
        document.add(
            "gpu-networks",
            "modules/network/multivpc",
            {
                "network_name_prefix": because(f"{name}-gpu", "one VPC for each data NIC"),
                "network_description": described(name),
                "network_count": because(len(data), "data NICs", data[0].source),
                "global_ip_address_range": because(str(data_range), "all of them", _RANGES),
                "subnetwork_cidr_suffix": because(slurm.data_prefix, "of each VPC", _RANGES),
                "mtu": because(data[0].mtu, "the largest packets of the NICs", data[0].source),
            },
        )
        return ["gpu-networks"], None
    if host_range is not None:
        document.add(
            "host-network", _VPC, _vpc(slurm, f"{name}-host", host_range, slurm.host[0].mtu)
        )
    project = slurm.settings.project
    profile = f"projects/{project}/global/networkProfiles/{data[0].profile}"
    document.add(
        "rdma-network",
        "modules/network/gpu-rdma-vpc",
        {
            "network_name": because(f"{name}-rdma", "one VPC for all data NICs"),
            "network_description": described(name),
            "network_profile": because(
                f"https://www.googleapis.com/compute/beta/{profile}",
                "RDMA, with the MTU and without firewall rules",
                data[0].source,
            ),
            "network_routing_mode": because("REGIONAL", "one region"),
            "subnetworks_template": because(
                {
                    "name_prefix": f"{name}-rdma",
                    "count": len(data),
                    "ip_range": str(data_range),
                    "region": slurm.settings.region,
                },
                "a subnet for each data NIC",
                data[0].source,
            ),
        },
    )
    interfaces = "rdma-network.subnetwork_interfaces"
    if host_range is None:
        return [], f"$({interfaces})"
    second = (
        "network=null, subnetwork=host-network.subnetwork_self_link,"
        ' subnetwork_project=vars.project_id, nic_type="GVNIC", queue_count=null, network_ip="",'
        " stack_type=null, access_config=[], ipv6_access_config=[], alias_ip_range=[]"
    )
    return [], f"$(concat([{{{second}}}], {interfaces}))"


def image_network(slurm: SlurmCluster) -> Body:
    """What the image's machine needs to know of a subnet in another project."""
    given = slurm.settings.creation.network
    if given is None or not is_shared(given, slurm.settings.project):
        return {}
    return {"network_project_id": because(given.project, "the host of the shared VPC", _NETWORK)}


def home_connection(slurm: SlurmCluster) -> Body:
    """How /home is reached where the VPC is the user's: Lustre, and Filestore in a shared VPC, by
    the private services access that the VPC has. Empty: in the module's own way."""
    given = slurm.settings.creation.network
    if given is None:
        return {}
    if slurm.own.home == "lustre":
        why = "the private services access that the VPC has"
        return {"private_vpc_connection_peering": because(PEERING, why, _NETWORK)}
    if not is_shared(given, slurm.settings.project):
        return {}
    why = "in a shared VPC, Filestore is reached by private services access alone"
    return {"connect_mode": because("PRIVATE_SERVICE_ACCESS", why, _FILESTORE)}
