"""Cost of a run: dollars per step, per million tokens and for the whole run, with the source of the
price.

Nodes are paid for by the hour, whole nodes also where some of their GPUs are idle. The price is the
user's own, or that of the catalog for the machine, the way of buying and the region. Where no price
is known nothing is guessed: the answer is GPU-hours, and the flag that gives the price.

Left out: the time in which nodes are up before the first step, storage, network traffic, discounts
and taxes.
"""

from __future__ import annotations

from dataclasses import dataclass

from drillyard.errors import UserError
from drillyard.estimation.quantity import (
    SECONDS_PER_HOUR,
    Quantity,
    Range,
    above_zero,
    given,
    quantity,
)
from drillyard.estimation.target import Target
from drillyard.hardware import Catalog, Fact, Price

PREFERRED = ("on-demand", "flex-start", "flex-start-queued", "calendar", "reservation", "spot")
"""Order of prices where the way of buying is not given: what is open to all comes first."""


@dataclass(frozen=True, slots=True)
class PriceOptions:
    """The price that the user gave, per GPU or per node, whichever it was; neither: that of the
    catalog."""

    usd_per_gpu_hour: float | None = None
    usd_per_node_hour: float | None = None

    def __post_init__(self) -> None:
        if self.usd_per_gpu_hour is not None and self.usd_per_node_hour is not None:
            raise UserError("a price is per GPU-hour or per node-hour: give one of them")
        for unit, usd in (("GPU", self.usd_per_gpu_hour), ("node", self.usd_per_node_hour)):
            if usd is not None:
                above_zero(f"the price of a {unit}-hour", usd)


@dataclass(frozen=True, slots=True)
class HourlyPrice:
    """Price of one hour: of all nodes (`of_all`), of one, and of one GPU with its share of the
    host.

    `bought` is the way of buying and the region; empty for a user's own price.
    """

    of_all: Quantity
    of_node: Quantity
    of_gpu: Quantity
    bought: str

    @property
    def about(self) -> str:
        return ", ".join(
            part for part in (self.bought, self.of_gpu.source, self.of_gpu.date) if part
        )


@dataclass(frozen=True, slots=True)
class RunCost:
    """Dollars, each a range that follows from the range of times; `of_run` where the length of the
    run is known."""

    price: HourlyPrice
    of_step: Range
    of_million_tokens: Range
    of_run: Range | None


def hourly_price(target: Target, facts: Catalog, own: PriceOptions) -> HourlyPrice | None:
    """Price of the nodes of `target` per hour; None where no price is known for this machine,
    purchase and region."""
    if own.usd_per_gpu_hour is not None:
        gpu = given(own.usd_per_gpu_hour)
        # A made-up node is not sold as a whole: there the GPUs are what is paid for.
        gpus = target.num_gpus if target.made_up else target.num_nodes * target.gpus_per_node
        return _hourly(target, gpu, gpu * target.gpus_per_node, gpu * gpus, "")
    if own.usd_per_node_hour is not None:
        node = given(own.usd_per_node_hour)
        return _hourly(target, node / target.gpus_per_node, node, node * target.num_nodes, "")
    price = None if target.made_up else _listed(target, facts)
    if price is None:
        return None
    bought = ", ".join(part for part in (price.consumption, price.region) if part)
    node = price.node_hour(target.machine)
    return _hourly(target, price.gpu_hour(target.machine), node, node * target.num_nodes, bought)


def run_cost(
    price: HourlyPrice, step_seconds: Range, tokens_per_step: float, run_seconds: Range | None
) -> RunCost:
    """Cost of steps of `step_seconds`, and of a run that takes `run_seconds` of wall time, at
    `price`."""
    per_second = price.of_all.value / SECONDS_PER_HOUR

    def dollars(name: str, seconds: Range, which: str) -> Range:
        formula = f"{which} time / 3600 x price of an hour of all nodes"
        return seconds.map(name, lambda value: value * per_second, "$", formula, price.of_all)

    of_step = dollars("cost of a step", step_seconds, "step")
    steps, formula = 1e6 / tokens_per_step, "cost of a step / tokens in a step x 10^6"
    of_million = of_step.map("cost of a million tokens", lambda value: value * steps, "$", formula)
    of_run = None if run_seconds is None else dollars("cost of the run", run_seconds, "wall")
    return RunCost(price, of_step, of_million, of_run)


def missing_price_reason(target: Target) -> str:
    """Reason why there is no price, for the user."""
    if target.made_up:
        return (
            f"a price belongs to a machine, and only the accelerator {target.accelerator.name} is"
            " given"
        )
    how = f" by {target.consumption}" if target.consumption else ""
    where = f" in {target.region}" if target.region else ""
    return f"no price of {target.machine.name}{how}{where} is known"


def _listed(target: Target, facts: Catalog) -> Price | None:
    """The catalog's price; without a way of buying the first known one of those that anybody can
    have."""
    ways = PREFERRED if target.consumption is None else (target.consumption,)
    prices = (facts.price(target.machine.name, way, target.region) for way in ways)
    return next((price for price in prices if price is not None), None)


def _hourly(
    target: Target, gpu: Fact[float], node: Fact[float], total: Fact[float], bought: str
) -> HourlyPrice:
    many = "price of a GPU-hour x GPUs" if target.made_up else "price of a node-hour x nodes"
    of_gpu, of_node = (
        "as given or listed, or node-hour / GPUs of a node",
        "as given or listed, or GPU-hour x GPUs",
    )
    return HourlyPrice(
        of_all=quantity("price of an hour of all nodes", total.value, "$/h", many, total),
        of_node=quantity("price of a node-hour", node.value, "$/h", of_node, node),
        of_gpu=quantity("price of a GPU-hour", gpu.value, "$/h", of_gpu, gpu),
        bought=bought,
    )
