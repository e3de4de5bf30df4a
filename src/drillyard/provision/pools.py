"""The GPU pools of a cluster config: the file itself has the first, `cluster.pools` the others."""

from __future__ import annotations

from collections.abc import Iterator

from drillyard.config.cluster import ClusterConfig
from drillyard.config.creation import default_pool_name
from drillyard.errors import UserError
from drillyard.hardware.capacity import consumption_problem, machine_of
from drillyard.hardware.catalog import Catalog
from drillyard.provision.cluster_plan import Pool


def pools_of(cluster: ClusterConfig, facts: Catalog) -> tuple[Pool, ...]:
    """The pools in the order of the file. Raises UserError for a machine that is unknown or not
    sold in this way, a name given twice, and a missing zone."""
    found = tuple(_pools(cluster, facts))
    names = [pool.name for pool in found]
    for pool in found[1:]:
        if names.count(pool.name) > 1:
            raise UserError(
                f"{pool.key}.name: two pools are called {pool.name}; give this one a name"
            )
    return found


def _pools(cluster: ClusterConfig, facts: Catalog) -> Iterator[Pool]:
    zone = cluster.location.zone if cluster.location else None
    if zone is None:
        raise UserError(
            "location.zone: missing: a GPU pool is made in one zone, such as us-central1-b"
        )
    assert cluster.consumption is not None
    yield Pool(
        default_pool_name(cluster.name, cluster.consumption),
        machine_of(cluster, facts),
        cluster.consumption,
        cluster.nodes,
        zone,
        (cluster.reservation,) if cluster.reservation else (),
    )
    further = cluster.cluster.pools if cluster.cluster else []
    for number, pool in enumerate(further):
        key = f"cluster.pools[{number}]"
        machine = (
            machine_of(cluster, facts) if pool.machine is None else facts.machine(pool.machine)
        )
        if (unsold := consumption_problem(pool.consumption, machine)) is not None:
            raise UserError(f"{key}.consumption: {unsold}")
        yield Pool(
            pool.name or default_pool_name(cluster.name, pool.consumption),
            machine,
            pool.consumption,
            pool.nodes,
            pool.zone or zone,
            tuple(pool.reservations),
            key,
        )
