"""What a cluster has beside its GPU nodes: machines without GPUs, the prices of the other parts,
and the region that it is in.

The facts are in cpu_machines.yaml, part_prices.yaml and regions.yaml. A price of another region
never replaces a missing one.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from drillyard.hardware.facts import CatalogRow

HOURS_PER_MONTH = 730
"""https://cloud.google.com/compute/vm-instance-pricing: a month is billed as 730 hours."""
ZONES_OF_A_REGION = 3
"""Zones over which GKE spreads the control plane and the pools of a regional cluster by default:
https://cloud.google.com/kubernetes-engine/docs/concepts/regional-clusters."""
_NAT_PORTS, _NAT_PORTS_PER_NODE = 64_512, 64
"""Ports of an address of Cloud NAT, and those that it keeps for each machine by default:
https://cloud.google.com/nat/docs/ports-and-addresses."""


def nat_addresses(nodes: int) -> int:
    """The external addresses that Cloud NAT allocates for so many nodes."""
    return math.ceil(nodes * _NAT_PORTS_PER_NODE / _NAT_PORTS)


class CpuMachine(CatalogRow):
    """A machine type without GPUs. `shape`: the part whose price per vCPU it has; None: its own
    name. `cpu_quota`: the cloud's metric that counts its vCPUs."""

    name: str
    vcpus: PositiveInt
    cloud: Literal["gcp", "aws", "nebius"] | None = None
    shape: str | None = None
    cpu_quota: str | None = None
    boot_disk: str | None = None


PRICE_UNITS = ("usd_per_hour", "usd_per_gib_month", "usd_per_gib")
"""Fields of a price, of which each has one."""


class PartPrice(CatalogRow):
    """Price of one part, in US dollars: per hour, per GiB and month, or per GiB of traffic.

    `region` None: everywhere. `vcpus`: the hour is that of a machine of so many vCPUs.
    `most_nodes`: the price holds up to so many nodes.
    """

    part: str
    region: str | None = None
    usd_per_hour: PositiveFloat | None = None
    usd_per_gib_month: PositiveFloat | None = None
    usd_per_gib: PositiveFloat | None = None
    vcpus: PositiveInt | None = None
    most_nodes: PositiveInt | None = None


PARTS_WITHOUT_PRICE = {
    **dict.fromkeys(("network-ssd", "nebius-filesystem", "lustre"), "usd_per_gib_month"),
    "nebius-control-plane": "usd_per_hour",
}
"""Parts of which only a user's file has a price, each with its unit."""


class Region(CatalogRow):
    """A region and the endings of its zones (`b` of us-central1-b). One without zones is a place
    for buckets alone: US, NAM4. New ones come faster than our releases, so a user's file may have
    them too."""

    name: str
    cloud: Literal["gcp"] = "gcp"
    zones: tuple[str, ...] = ()

    @property
    def zone_names(self) -> tuple[str, ...]:
        """The full names of the zones."""
        return tuple(f"{self.name}-{zone}" for zone in self.zones)
