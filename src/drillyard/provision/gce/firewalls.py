"""Firewall rules of the nodes' own VPC: ssh, and everything between the nodes.

Without public addresses the nodes are reached by Google's tunnel, Identity-Aware Proxy, which
decides by the role roles/iap.tunnelResourceAccessor who comes in
(https://cloud.google.com/iap/docs/using-tcp-forwarding). Nodes with public addresses let in the
ranges of the config alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drillyard.provision.gcp.names import described, named
from drillyard.provision.gcp.node_network import IAP_RANGE, NodeNetwork
from drillyard.provision.gcp.settings import GoogleSettings
from drillyard.provision.terraform_document import TerraformDocument, because

SSH_PORT = "22"
_IAP = "https://cloud.google.com/iap/docs/using-tcp-forwarding"


def add_firewalls(
    document: TerraformDocument, settings: GoogleSettings, network: NodeNetwork, nodes: str
) -> None:
    """Add both rules, to a VPC of the cluster's own. `nodes`: the range of its subnet."""
    creation = settings.creation
    if creation.network is not None:
        return
    if creation.private_nodes:
        sources = because([IAP_RANGE], "Google's tunnel alone: nodes have no public address", _IAP)
    else:
        sources = because(
            list(creation.authorized_networks),
            "who may reach the nodes by ssh",
            "cluster.yaml: cluster.authorized_networks",
        )
    _add(document, settings, "ssh", network, sources, [{"protocol": "tcp", "ports": [SSH_PORT]}])
    within = because([nodes], "only the nodes of this subnet")
    every = [{"protocol": each} for each in ("tcp", "udp", "icmp")]
    _add(document, settings, "internal", network, within, every)


def _add(
    document: TerraformDocument,
    settings: GoogleSettings,
    label: str,
    network: NodeNetwork,
    sources: Any,
    allowed: Sequence[dict[str, Any]],
) -> None:
    why = "agents and ranks open ports as they need them" if label == "internal" else "logins"
    document.add(
        "google_compute_firewall",
        label,
        {
            "name": named(f"{settings.name}-{label}"),
            "network": because(network.network, "the VPC of the nodes"),
            "direction": because("INGRESS", "what leaves is allowed already"),
            "source_ranges": sources,
            "allow": because(list(allowed), why),
            "description": described(settings.name),
        },
        name=f"{settings.name}-{label}",
    )
