"""The GPU pools of a cluster config: the file itself has the first, `cluster.pools` the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from drillyard.config.cluster import ClusterConfig
from drillyard.config.creation import FurtherPool, default_pool_name
from drillyard.config.problems import Path, Problem, raise_all
from drillyard.errors import UserError
from drillyard.hardware.capacity import consumption_problem, region_of
from drillyard.hardware.catalog import Catalog
from drillyard.provision.cluster_plan import Pool

_OF_THE_FILE: dict[str, Path] = {"zone": ("location", "zone"), "reservations": ("reservation",)}
"""Keys of the file itself that mean what a key of `cluster.pools` means, where they differ."""


def pools_of(cluster: ClusterConfig, facts: Catalog) -> tuple[Pool, ...]:
    """The pools in the order of the file. Raises one UserError with every machine that is unknown
    or not sold in this way, every name given twice, and a missing zone."""
    found, problems = read_pools(cluster, facts)
    raise_all(problems, cluster._origin.places)
    return found


def read_pools(
    cluster: ClusterConfig, facts: Catalog, *, per_run: bool = False, zonal: bool = True
) -> tuple[tuple[Pool, ...], list[Problem]]:
    """The pools whose machines are known, and what is wrong with any. `per_run`: a service makes
    their nodes for each run, in a zone that it may choose; `zonal`: whether the cloud has zones."""
    zone = cluster.location.zone if cluster.location and zonal else None
    if zone is None and (per_run or not zonal):
        zone = region_of(cluster)
    problems: list[Problem] = []
    found = tuple(
        replace(pool, per_run=per_run) for pool in _pools(cluster, zone or "", facts, problems)
    )
    if zone is None:
        message = "missing: a GPU pool is made in one zone: write one, such as us-central1-b"
        problems.append(Problem(("location", "zone"), message))
    names: set[str] = set()
    for pool in found:
        if pool.name in names:
            message = f"two pools are called {pool.name}; give this one another name"
            problems.append(Problem(key_path(pool, "name"), message))
        names.add(pool.name)
    return found, problems


def key_path(pool: Pool, key: str) -> Path:
    """The path in the config of one of the pool's keys, named as in `cluster.pools`."""
    return (*key_path_of(pool.key), key) if pool.key else _OF_THE_FILE.get(key, (key,))


def _pools(
    cluster: ClusterConfig, zone: str, facts: Catalog, problems: list[Problem]
) -> Iterator[Pool]:
    further: list[FurtherPool | None] = [*cluster.cluster.pools] if cluster.cluster else []
    first = None
    if cluster.consumption is not None and cluster.machine is not None:
        first = FurtherPool(
            machine=cluster.machine,
            consumption=cluster.consumption,
            nodes=cluster.nodes,
            reservations=[cluster.reservation] if cluster.reservation else [],
        )
    for number, given in enumerate([first, *further]):
        key = f"cluster.pools.{number - 1}" if number else ""
        name = None if given is None else given.machine or cluster.machine
        if given is None or name is None:
            continue  # The config's own check names what is missing.
        try:
            machine = facts.machine(name, cluster.cloud)
        except UserError as error:
            if given.machine is not None:
                message = str(error).replace("\n", " ")
                problems.append(Problem((*key_path_of(key), "machine"), message))
            continue
        pool = Pool(
            given.name or default_pool_name(cluster.name, given.consumption),
            machine,
            given.consumption,
            given.nodes,
            given.zone or zone,
            tuple(given.reservations),
            key,
        )
        if (unsold := consumption_problem(pool.consumption, machine)) is not None:
            problems.append(Problem(key_path(pool, "consumption"), unsold))
        yield pool


def key_path_of(key: str) -> Path:
    """`cluster.pools.0` as a path, and the empty key of the first pool as the top of the file."""
    return tuple(int(part) if part.isdigit() else part for part in key.split(".")) if key else ()
