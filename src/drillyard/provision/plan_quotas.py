"""What a planned cluster counts against the quotas of its project.

The rules are those of `drillyard estimate` (`hardware/capacity.py`); of networks and firewall rules
the plan knows the number.
"""

from __future__ import annotations

from collections.abc import Sequence

from drillyard.config.cluster import ClusterConfig
from drillyard.hardware.capacity import Quota, quota_needed
from drillyard.hardware.catalog import Catalog
from drillyard.provision.cluster_plan import PlannedResource

_KINDS = {
    "networks": "google_compute_network",
    "subnetworks": "google_compute_subnetwork",
    "firewalls": "google_compute_firewall",
    "routers": "google_compute_router",
}
"""Amounts of quotas.yaml, and the resources that count in them."""


def plan_quotas(
    cluster: ClusterConfig, facts: Catalog, resources: Sequence[PlannedResource]
) -> tuple[Quota, ...]:
    """The quotas that the cluster with these resources needs, one for each metric and place."""
    kinds = [resource.kind for resource in resources]
    planned = {amount: kinds.count(kind) for amount, kind in _KINDS.items()}
    return tuple(quota_needed(cluster, facts, planned))
