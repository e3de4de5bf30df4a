"""Which pools have nodes near each other, and which must.

Rules: the checks of Cluster Toolkit's module gke-node-pool, and
https://cloud.google.com/compute/docs/instances/placement-policies-overview.
"""

from __future__ import annotations

from drillyard.config.creation import CreationConfig
from drillyard.hardware.machines import Machine
from drillyard.provision.cluster_plan import Pool


def nodes_of_domain(machine: Machine) -> int | None:
    """The most nodes of a pool whose GPUs are one NVLink domain: 18 of four GPUs each; None for
    machines without domains over nodes."""
    domain = machine.link_domain_accelerators
    if domain is None or domain <= machine.num_accelerators:
        return None
    return domain // machine.num_accelerators


def placement_problem(pool: Pool, compact: bool) -> str | None:
    """Why a pool cannot have what `cluster.compact_placement` asks for, or None."""
    if nodes_of_domain(pool.machine) is not None:
        return f"{pool.machine.name} is always placed by its NVLink domain"
    if compact and pool.is_queued:
        return "flex-start-queued nodes are placed by DWS, near each other already"
    if compact and pool.consumption == "flex-start" and not pool.machine.compact_flex_start:
        return f"flex-start nodes of {pool.machine.name} cannot be placed so"
    return None


def is_compact(pool: Pool, creation: CreationConfig) -> bool:
    """Whether the pool has compact placement. By default on machines with NICs for data,
    where the nodes are not spot's (which would be harder to get) and no reservation has placed
    them. The number of nodes does not count: another placement would replace a pool that grows."""
    if creation.compact_placement is not None:
        return creation.compact_placement
    has_data_nics = pool.machine.data_nics.count > 0
    chosen = pool.consumption in ("on-demand", "flex-start") and has_data_nics
    return chosen and placement_problem(pool, compact=True) is None
