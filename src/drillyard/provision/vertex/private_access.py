"""The VPC of custom jobs, where the config names one of the cluster's own.

Vertex AI has its machines in a network of Google's, which is peered with the VPC: private services
access, with a range of addresses that the peering may use
(https://cloud.google.com/vertex-ai/docs/general/vpc-peering). The config names the VPC as the
service does, projects/NUMBER/global/networks/NAME. One with the cluster's name is made here; one
with another name exists, and keeps its peering: a second connection would replace the ranges of
those that are using it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from drillyard.config.cluster import ClusterConfig
from drillyard.config.creation import CreationConfig
from drillyard.config.problems import Problem
from drillyard.launch.vertex.config import VertexConfig
from drillyard.provision.gcp.names import described, named
from drillyard.provision.gcp.node_network import PEERING
from drillyard.provision.gcp.project_services import service_address
from drillyard.provision.gcp.settings import GoogleSettings
from drillyard.provision.terraform_document import Body, TerraformDocument, because, reference

SERVICE = "servicenetworking.googleapis.com"
DEFAULT_PREFIX = 16
LONGEST_PREFIX = 21
"""What the service recommends, and the smallest range of one job with some nodes
(https://cloud.google.com/vertex-ai/docs/general/vpc-peering#reserve-ip-range)."""
_GUIDE = "https://cloud.google.com/vertex-ai/docs/general/vpc-peering"
_NETWORK = "cluster.yaml: vertex.network"


def makes_network(cluster: ClusterConfig) -> bool:
    """Whether `vertex.network` is the cluster's own VPC."""
    network = cluster.section_as(VertexConfig).network
    return network is not None and network.rpartition("/")[2] == cluster.name


def peering_range_name(name: str) -> str:
    """The name of the range for the peering, by which a job asks for addresses of it."""
    return f"{name}-peering"


def add_private_access(document: TerraformDocument, settings: GoogleSettings) -> None:
    """Add the VPC, a range for the peering, and the peering."""
    name = settings.name
    network = document.add(
        "google_compute_network",
        "system",
        {
            "name": named(name),
            "auto_create_subnetworks": because(False, "jobs need no subnet of it"),
            "description": described(name),
        },
        name=name,
        after=[service_address("compute.googleapis.com")],
    )
    range_name = peering_range_name(name)
    body: Body = {
        "name": named(range_name),
        "purpose": because("VPC_PEERING", "addresses of the peered network", _GUIDE),
        "address_type": because("INTERNAL", "addresses of the VPC", _GUIDE),
        "network": because(reference(network), "the VPC of the jobs", _NETWORK),
        "description": described(name),
        **_addresses(settings.creation),
    }
    made = document.add("google_compute_global_address", "peering", body, name=range_name)
    document.add(
        "google_service_networking_connection",
        "peering",
        {
            "network": because(reference(network), "the VPC of the jobs", _NETWORK),
            "service": because(SERVICE, "the producer of Vertex AI's networks", _GUIDE),
            "reserved_peering_ranges": because(
                [reference(made, "name")], "the addresses that it may use", _GUIDE
            ),
        },
        name=PEERING,
        after=[service_address(SERVICE)],
    )


def _addresses(creation: CreationConfig) -> Body:
    given = creation.ranges.data
    source = "cluster.yaml: cluster.ranges.data"
    if given is None:
        why = "addresses of the jobs' nodes; which ones, Google chooses"
        return {"prefix_length": because(DEFAULT_PREFIX, why, _GUIDE)}
    network = ipaddress.IPv4Network(given)
    return {
        "address": because(str(network.network_address), "the first of the range", source),
        "prefix_length": because(network.prefixlen, "the size of the range", source),
    }


def network_problems(cluster: ClusterConfig, creation: CreationConfig) -> Iterator[Problem]:
    """What is wrong with the range of the peering, and with the ranges that the config names."""
    section, path = cluster.section_as(VertexConfig), ("cluster", "ranges", "data")
    given = creation.ranges.data
    if not makes_network(cluster):
        if given is not None:
            message = (
                "only a VPC of the cluster's own has such a range: remove it, or set"
                " vertex.network:"
                f" projects/NUMBER/global/networks/{cluster.name}"
            )
            yield Problem(path, message)
        return
    if given is not None:
        with_prefix = ipaddress.IPv4Network(given, strict=False)
        if with_prefix.prefixlen > LONGEST_PREFIX or not with_prefix.is_private:
            message = (
                f"found '{given}'; the peering needs private addresses, a /{LONGEST_PREFIX} or"
                f" more: write one such as 10.64.0.0/{DEFAULT_PREFIX}, or remove it"
            )
            yield Problem(path, message)
    own = peering_range_name(cluster.name)
    if section.reserved_ip_ranges not in ([], [own]):
        message = f"the range of the cluster's own VPC is {own}: write [{own}], or remove it"
        yield Problem(("vertex", "reserved_ip_ranges"), message)
