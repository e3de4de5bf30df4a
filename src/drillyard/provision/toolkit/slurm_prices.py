"""What a Slurm cluster costs per hour: its nodes, as every cluster's, then controller, login node
and /home."""

from __future__ import annotations

from collections.abc import Iterator

from drillyard.hardware.cluster_parts import HOURS_PER_MONTH
from drillyard.provision.cluster_plan import PriceLine
from drillyard.provision.prices import cluster_prices, part_line
from drillyard.provision.toolkit.settings import CONTROLLER_DISK, HOME, SlurmCluster


def slurm_prices(found: SlurmCluster) -> tuple[PriceLine, ...]:
    """The parts in the order of creation, nodes first."""
    settings = found.settings
    nodes = cluster_prices(
        (found.pool,), settings.creation, settings.facts, controllers=False, hosts=2
    )
    return (*nodes, *_hosts(found), _home(found))


def _hosts(found: SlurmCluster) -> Iterator[PriceLine]:
    facts, region = found.settings.facts, found.pool.region
    for key in ("controller", "login"):
        machine = facts.cpu_machine(getattr(found.own, key))
        price = facts.cpu_machine_price(machine, region)
        yield part_line(f"{key}: {machine.name}", machine.shape or machine.name, region, price)
        disk, gib = CONTROLLER_DISK, found.settings.creation.disk_gib
        each = facts.part_price(disk, region, "usd_per_gib_month")
        hour = None if each is None else each * gib / HOURS_PER_MONTH
        yield part_line(f"{key}: boot disk, {gib} GiB of {disk}", disk, region, hour, "gib_month")


def _home(found: SlurmCluster) -> PriceLine:
    part, region = found.own.home, found.pool.region
    gib = found.settings.facts.part_price(part, region, "usd_per_gib_month")
    hour = None if gib is None else gib * found.home_gib / HOURS_PER_MONTH
    return part_line(f"{HOME}: {found.home_gib} GiB of {part}", part, region, hour, "gib_month")
