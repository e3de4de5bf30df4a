"""The nodes' own network: a subnet with public addresses, and what reaches them.

A security group refuses what none of its rules allows, in both directions
(https://docs.nebius.com/vpc/networking/security-groups).
"""

from __future__ import annotations

from drillyard.provision.nebius.nebius_settings import NebiusSettings, add_named
from drillyard.provision.terraform_document import Body, TerraformDocument, because, reference

SSH_PORT = 22
_RANGE = "cluster.yaml: cluster.ranges.nodes"


def add_network(document: TerraformDocument, settings: NebiusSettings) -> tuple[str, str]:
    """Add network, subnet and security group; the addresses of the last two."""
    network, subnet = add_subnet(document, settings)
    return subnet, _add_security_group(document, settings, network)


def add_subnet(document: TerraformDocument, settings: NebiusSettings) -> tuple[str, str]:
    """Add network and subnet; their addresses."""
    network = add_named(document, settings, "nebius_vpc_v1_network", "nodes", {})
    pools = because(
        {"use_network_pools": True}, "addresses of the network's own pools, which Nebius gives it"
    )
    private = pools
    if (given := settings.creation.ranges.nodes) is not None:
        own = {"use_network_pools": False, "pools": [{"cidrs": [{"cidr": given}]}]}
        private = because(own, "the addresses of the nodes", _RANGE)
    subnet = add_named(
        document,
        settings,
        "nebius_vpc_v1_subnet",
        "nodes",
        {
            "network_id": because(reference(network), "the nodes' own network"),
            "ipv4_private_pools": private,
            "ipv4_public_pools": pools,
        },
    )
    return network, subnet


def _add_security_group(document: TerraformDocument, settings: NebiusSettings, network: str) -> str:
    group = add_named(
        document,
        settings,
        "nebius_vpc_v1_security_group",
        "nodes",
        {"network_id": because(reference(network), "the nodes' own network")},
    )
    _add_rule(
        document,
        settings,
        group,
        "ssh",
        "TCP",
        {
            "ingress": {
                "source_cidrs": because(
                    list(settings.creation.authorized_networks),
                    "who may reach the nodes by ssh",
                    "cluster.yaml: cluster.authorized_networks",
                ),
                "destination_ports": because([SSH_PORT], "logins"),
            }
        },
    )
    inside = because(reference(group), "the nodes of this group alone")
    within: Body = {"ingress": {"source_security_group_id": inside}}
    _add_rule(document, settings, group, "internal", "ANY", within)
    every = because(["0.0.0.0/0"], "the nodes fetch images, models and packages")
    _add_rule(document, settings, group, "out", "ANY", {"egress": {"destination_cidrs": every}})
    return group


def _add_rule(
    document: TerraformDocument,
    settings: NebiusSettings,
    group: str,
    label: str,
    protocol: str,
    body: Body,
) -> None:
    why = "agents and ranks open ports as they need them" if protocol == "ANY" else "logins"
    name = f"{settings.name}-{label}"
    whole: Body = {
        "parent_id": because(reference(group), "the group that it is a rule of"),
        "name": because(name, "the cluster's name, and what it is", "cluster.yaml: name"),
        "access": because("ALLOW", "what no rule allows is refused"),
        "protocol": because(protocol, why),
        "type": because("STATEFUL", "the answers come back without a rule"),
        **body,
        "labels": because(settings.labels, "they identify it", "cluster.yaml: name"),
    }
    document.add(
        "nebius_vpc_v1_security_rule",
        label,
        whole,
        name=name,
        location=settings.region,
        labelled=True,
    )
