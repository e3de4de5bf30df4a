"""Reservations that pools on Google Cloud take their nodes from: rules, and how they are named."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from drillyard.config.problems import Problem
from drillyard.config.reservation_name import RESERVATION_FORMS, read_reservation
from drillyard.provision.cluster_plan import Pool
from drillyard.provision.pools import key_path

RESERVATION_KEY = "compute.googleapis.com/reservation-name"


def reservation_problems(
    pool: Pool, project: str, *, shared_blocks: bool = True
) -> Iterator[Problem]:
    """What is wrong with a pool's reservations. `shared_blocks`: whether the platform takes a block
    of a reservation that another project shares."""
    path = key_path(pool, "reservations")
    if pool.consumption not in ("reservation", "calendar"):
        # Of the first pool, the config's own check says both.
        if pool.reservations and pool.key:
            yield Problem(path, f"{pool.consumption} uses no reservation: remove it")
        return
    if not pool.reservations and pool.key:
        message = f"missing: a pool of {pool.consumption} is made from one: reservations: [NAME]"
        yield Problem(path, message)
    elif len(pool.reservations) > 1:
        message = (
            f"found {len(pool.reservations)}; a pool of {pool.consumption} is made from exactly"
            " one: give each reservation a pool of its own"
        )
        yield Problem(path, message)
    for text in pool.reservations:
        found = read_reservation(text)
        if found is None:
            yield Problem(path, f"'{text}': write {RESERVATION_FORMS}")
        elif not shared_blocks and found.block and found.project not in (None, project):
            message = (
                f"{text}: GKE takes no block of a reservation that another project shares: name"
                " the reservation alone"
            )
            yield Problem(path, message)


def shared_reservation_problems(pools: Sequence[Pool], project: str) -> Iterator[Problem]:
    """A reservation is of one machine, zone and way of buying: pools that differ cannot share it.
    Pools that do not differ take their nodes from the same number (`plan --check` counts)."""
    first: dict[tuple[str, str], Pool] = {}
    for pool in pools:
        for text in pool.reservations:
            found = read_reservation(text)
            if found is None or pool.consumption not in ("reservation", "calendar"):
                continue
            other = first.setdefault((found.project or project, found.name), pool)
            mine, its = (
                {"machine": each.machine.name, "zone": each.zone, "consumption": each.consumption}
                for each in (pool, other)
            )
            differ = [f"{key} {its[key]}" for key, value in mine.items() if value != its[key]]
            if differ:
                message = (
                    f"{text} is the reservation of pool {other.name} ({', '.join(differ)}), and a"
                    " reservation is of one machine, zone and way of buying: name another"
                )
                yield Problem(key_path(pool, "reservations"), message)


def reservation_value(text: str, project: str) -> str:
    """The reservation as its nodes name it: a block by its path, others' by their project."""
    found = read_reservation(text)
    assert found is not None, "refused by the rules"
    if found.project in (None, project):
        return f"{found.name}{found.block}"
    return text
