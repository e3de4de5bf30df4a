"""What a Slurm cluster costs per hour: its nodes, as every cluster's, then controller, login node
and /home."""

from __future__ import annotations

from collections.abc import Iterator

from drillyard.hardware.cluster_parts import HOURS_PER_MONTH
from drillyard.provision.cluster_plan import PriceLine
from drillyard.provision.prices import cluster_prices, part_line
from drillyard.provision.toolkit.settings import CONTROLLER_DISK, HOME, SlurmCluster


def slurm_prices(slurm: SlurmCluster) -> tuple[PriceLine, ...]:
    """The parts in the order of creation, nodes first."""
    settings = slurm.settings
    nodes = cluster_prices(
        (slurm.pool,), settings.creation, settings.facts, controllers=False, hosts=2
    )
    return (*nodes, *_hosts(slurm), _home(slurm))


def _hosts(slurm: SlurmCluster) -> Iterator[PriceLine]:
    facts, region = slurm.settings.facts, slurm.pool.region
    for key in ("controller", "login"):
        machine = facts.cpu_machine(getattr(slurm.own, key))
        price = facts.cpu_machine_price(machine, region)
        yield part_line(f"{key}: {machine.name}", machine.shape or machine.name, region, price)
        disk, gib = CONTROLLER_DISK, slurm.settings.creation.disk_gib
        each = facts.part_price(disk, region, "usd_per_gib_month")
        hour = None if each is None else each * gib / HOURS_PER_MONTH
        yield part_line(f"{key}: boot disk, {gib} GiB of {disk}", disk, region, hour, "gib_month")


def _home(slurm: SlurmCluster) -> PriceLine:
    part, region = slurm.own.home, slurm.pool.region
    gib = slurm.settings.facts.part_price(part, region, "usd_per_gib_month")
    hour = None if gib is None else gib * slurm.home_gib / HOURS_PER_MONTH
    return part_line(f"{HOME}: {slurm.home_gib} GiB of {part}", part, region, hour, "gib_month")
