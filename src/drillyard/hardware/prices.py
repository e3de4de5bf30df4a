"""Prices: dollars for an hour of a node or of a GPU, by machine, region and way of buying. The facts stand in
prices.yaml.

A price is a snapshot: its date is shown wherever it is used. There is no price of another region and no zero: a cost
that rests on a guess is worse than a cost that is reported missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from drillyard.hardware.facts import CatalogRow, Fact, combine
from drillyard.hardware.machines import Consumption, Machine

BILLED_AS = {"flex-start-queued": "flex-start"}
"""Ways of buying that a cloud bills under the name of another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price(CatalogRow):
    """What an hour costs, in US dollars: of a node or of a GPU, whichever is quoted."""

    machine: str
    consumption: Consumption
    region: str | None = None
    usd_per_node_hour: float | None = None
    usd_per_gpu_hour: float | None = None

    def node_hour(self, machine: Machine) -> Fact[float]:
        """Dollars for one hour of one `machine`, host included."""
        if self.usd_per_node_hour is not None:
            return combine(self.usd_per_node_hour, self.fact("usd_per_node_hour"))
        return self.fact("usd_per_gpu_hour") * machine.num_accelerators

    def gpu_hour(self, machine: Machine) -> Fact[float]:
        """Dollars for one hour of one of its GPUs, the host's share included."""
        return self.node_hour(machine) / machine.num_accelerators


def find_price(prices: Iterable[Price], machine: str, consumption: str, region: str | None = None) -> Price | None:
    """The price of `machine`, bought so, in `region`; the first known region where none is asked for; None if unknown.

    A price without a region (a user's own) holds everywhere.
    """
    billed = BILLED_AS.get(consumption, consumption)
    for price in prices:
        if price.machine != machine or BILLED_AS.get(price.consumption, price.consumption) != billed:
            continue
        if region is None or price.region is None or price.region == region:
            return price
    return None
