"""What Google Cloud allows, whatever the machine: numbers, address ranges, ways of buying, images.

    limit("boot-disk").allows(200)
    way_of_buying("flex-start").longest_hours      # 168

The facts are in limits.yaml, address_ranges.yaml, consumption.yaml and boot_images.yaml, each with
source and date.
"""

from __future__ import annotations

from functools import cache
from ipaddress import IPv4Network

from pydantic import NonNegativeInt, PositiveInt

from drillyard.hardware.catalog import packaged_rows
from drillyard.hardware.facts import CatalogRow
from drillyard.hardware.machines import Consumption, GkeVersion


class Limit(CatalogRow):
    """The least and most of something, in `unit`; None: no bound is known."""

    name: str
    unit: str
    least: NonNegativeInt | None = None
    most: PositiveInt | None = None

    def allows(self, value: int) -> bool:
        """Whether `value` is within the bounds."""
        above = self.least is None or value >= self.least
        return above and (self.most is None or value <= self.most)

    @property
    def in_words(self) -> str:
        """`10 to 65536 GiB`, the numbers as a config has them."""
        bounds = [str(each) for each in (self.least, self.most) if each is not None]
        return f"{' to '.join(bounds)} {self.unit}"


class AddressRange(CatalogRow):
    """A range of IPv4 addresses that the subnets of a VPC may have (`usable`), or may not touch."""

    range: str
    usable: bool
    reason: str

    @property
    def network(self) -> IPv4Network:
        return IPv4Network(self.range)


class WayOfBuying(CatalogRow):
    """What holds for all nodes that are bought so: the longest life of a node, the hours between
    request and start, and the first GKE version of each minor version."""

    name: Consumption
    longest_hours: PositiveInt | None = None
    hours_ahead: PositiveInt | None = None
    gke_versions: tuple[GkeVersion, ...] = ()


class BootImage(CatalogRow):
    """The image of a virtual machine's boot disk. `name`: its architecture, for PROJECT/FAMILY of
    Google Cloud; `nebius`, for a family of Nebius' public images."""

    name: str
    image: str


def limit(name: str) -> Limit:
    """The limit of this name, which limits.yaml has."""
    return _limits()[name]


def disk_limit(disk: str) -> Limit:
    """The sizes of a boot disk of this type: those of the type, and not below those of any boot
    disk; for a type that is not known, the latter."""
    boot, of_type = limit("boot-disk"), _limits().get(disk)
    if of_type is None or of_type.least is None or boot.least is None:
        return boot
    return boot if of_type.least < boot.least else of_type


def way_of_buying(name: str) -> WayOfBuying:
    """What consumption.yaml says of a way of buying; without bounds where it has none."""
    return _ways()[name]


def boot_image(name: str) -> BootImage:
    """The image of this name: an architecture, or `nebius`."""
    rows = {row.name: row for row in packaged_rows(BootImage, "boot_images")}
    return rows[name]


@cache
def address_ranges() -> tuple[AddressRange, ...]:
    """The ranges that subnets may have, then those that they may not touch."""
    return packaged_rows(AddressRange, "address_ranges")


@cache
def _limits() -> dict[str, Limit]:
    return {row.name: row for row in packaged_rows(Limit, "limits")}


@cache
def _ways() -> dict[str, WayOfBuying]:
    return {row.name: row for row in packaged_rows(WayOfBuying, "consumption")}
