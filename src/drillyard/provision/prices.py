"""What a cluster costs per hour, part by part, before it exists.

A GPU pool costs its nodes' price for the machine, the way of buying and the region, as `drillyard
estimate` has it: from the catalog, the user's hardware file, or the price given on the command
line. Where none of them has one nothing is guessed: `up` refuses, and the line says what to give.
A part that only runs need (nodes that scale from zero, their disks and addresses) is not counted
while the cluster is idle.

Left out: stored data, traffic, images and logs, which depend on use; discounts and taxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from drillyard.config.creation import CreationConfig
from drillyard.errors import NotFoundError, UserError
from drillyard.formatting import plural
from drillyard.hardware.catalog import Catalog
from drillyard.hardware.cluster_parts import (
    HOURS_PER_MONTH,
    ZONES_OF_A_REGION,
    CpuMachine,
    nat_addresses,
)
from drillyard.hardware.facts import Fact, FactSource, combine
from drillyard.provision.cluster_plan import ClusterPlan, Pool, PriceLine

CPU_POOL = "cpu"
"""Name of the pool of the controllers, also in --price cpu=USD."""
GIVEN = FactSource("given by --price", None)
HOURS_PER_DAY = 24
DEFAULT_DISK = "pd-balanced"
"""Boot disk of a machine of which none is known: GKE's default."""


@dataclass(frozen=True)
class PriceTotals:
    """Dollars per hour: `idle` while no run needs nodes, `full` with all nodes; `unknown` names the
    parts that are missing in both."""

    idle: Fact[float]
    full: Fact[float]
    unknown: tuple[str, ...]


def cluster_prices(
    pools: Sequence[Pool],
    creation: CreationConfig,
    facts: Catalog,
    *,
    controllers: bool = True,
    hosts: int = 0,
    way_out: bool = True,
) -> tuple[PriceLine, ...]:
    """The parts of a cluster and their prices in US dollars per hour, in the order of creation.

    `controllers`: whether it has a control plane, and nodes for controllers; `hosts`: machines
    beside the pools, which the caller prices, and which are counted where a price is one of each
    machine; `way_out`: whether its nodes have a way to the internet of their own, by a gateway or
    addresses. The gateway of a VPC that the config names is its owner's. Raises UserError for a
    machine of the controllers that the catalog does not know.
    """
    region = pools[0].region
    cpu_nodes = creation.cpu_pool.nodes * ZONES_OF_A_REGION if controllers else 0
    lines: list[PriceLine] = []
    if controllers:
        lines.append(_part("control plane", 1, facts, "gke-control-plane", region))
        try:
            machine = facts.cpu_machine(creation.cpu_pool.machine)
        except NotFoundError as error:
            raise UserError(f"cluster.cpu_pool.machine: {error}") from None
        lines += cpu_pool_prices(machine, cpu_nodes, creation, facts, region)
    for pool in pools:
        lines += _gpu_pool(pool, creation, facts)
    running = hosts + cpu_nodes + sum(pool.nodes for pool in pools if not pool.scales_from_zero)
    every = hosts + cpu_nodes + sum(pool.nodes for pool in pools)
    if not way_out or (creation.private_nodes and creation.network is not None):
        return tuple(lines)
    if creation.private_nodes:
        return (*lines, *_nat(running, every, facts, region))
    return (*lines, *_addresses("addresses of nodes", running, every, facts, region))


def stored_price(what: str, gib: int, part: str, facts: Catalog, region: str) -> PriceLine:
    """The price of storage that is billed by its size, used or not."""
    month = facts.part_price(part, region, "usd_per_gib_month")
    hour = None if month is None else month * gib / HOURS_PER_MONTH
    return _line(f"{what}, {gib} GiB", 1, hour, _missing_part(part, region, "gib_month"))


def prices_given(
    texts: Sequence[str], pools: Sequence[Pool], *, controllers: bool = True
) -> dict[str, float]:
    """The prices of `--price`: `USD` of a node-hour of the only GPU pool, or `POOL=USD`. Raises
    UserError for a pool that there is not, a price given twice, and one that is not above 0."""
    found: dict[str, float] = {}
    names = [pool.name for pool in pools]
    if texts and not names:
        raise UserError(f"--price {texts[0]}: nothing is bought for this cluster: leave it out")
    for text in texts:
        name, _, number = text.rpartition("=")
        usd = _above_zero(text, number)
        if not name:
            if len(names) > 1:
                raise UserError(
                    f"--price {text}: there are {len(names)} pools; say of which:"
                    f" {' or '.join(f'--price {each}={text}' for each in names)}"
                )
            name = names[0]
        known = (*names, CPU_POOL) if controllers else names
        if name not in known:
            raise UserError(
                f"--price {text}: there is no pool {name}; the pools are {', '.join(known)}"
            )
        if name in found:
            raise UserError(f"--price {text}: the price of {name} is given twice; give one")
        found[name] = usd
    return found


def with_own_prices(
    lines: Sequence[PriceLine], given: Mapping[str, float]
) -> tuple[PriceLine, ...]:
    """The lines with the user's prices of a node-hour by the pool's name (`prices_given`)."""
    options = {_price_option(name): usd for name, usd in given.items()}
    return tuple(
        replace(
            line, usd_per_hour=Fact(options[line.price_option], (GIVEN,)) * line.count, missing=""
        )
        if line.price_option in options
        else line
        for line in lines
    )


def price_totals(lines: Sequence[PriceLine]) -> PriceTotals:
    """The sums of the lines whose price is known."""
    known = [(line, line.usd_per_hour) for line in lines if line.usd_per_hour is not None]
    return PriceTotals(
        idle=_sum([price for line, price in known if line.running]),
        full=_sum([price for _, price in known]),
        unknown=tuple(line.what for line in lines if line.usd_per_hour is None),
    )


@dataclass(frozen=True)
class UsePrice:
    """Price of what depends on use and is in no sum: US dollars per `unit`."""

    what: str
    usd: Fact[float]
    unit: str


def prices_of_use(facts: Catalog, region: str) -> tuple[UsePrice, ...]:
    """The known prices of stored data and of traffic."""
    found = (
        ("data in buckets", "bucket", "usd_per_gib_month", "GiB and month"),
        ("traffic through NAT", "cloud-nat-traffic", "usd_per_gib", "GiB"),
    )
    priced = [(what, facts.part_price(part, region, by), unit) for what, part, by, unit in found]
    return tuple(UsePrice(what, price, unit) for what, price, unit in priced if price is not None)


def require_prices(plan: ClusterPlan) -> None:
    """Raise UserError, with what to give, where the price of a pool's nodes is not known. Where a
    service makes the nodes of each run, nothing is bought yet."""
    bought = () if plan.job_service is not None else plan.prices
    missing = [line for line in bought if line.pool and line.usd_per_hour is None]
    if missing:
        raise UserError(
            "\n".join(f"pool {line.pool}: {line.missing}" for line in missing)
            + "\nNothing was made."
        )


def missing_price(pool: Pool) -> str:
    """What to do where the price of a pool's nodes is not known."""
    row = (
        f"machine: {pool.machine.name}, consumption: {pool.consumption}, region: {pool.region},"
        " usd_per_node_hour: USD"
    )
    return (
        f"no price of {pool.machine.name} by {pool.consumption} in {pool.region} is known; give"
        f" {_price_option(pool.name)}, the dollars of a node-hour, or --hardware FILE with a row\n"
        f"  prices: [{{{row}}}]"
    )


def _gpu_pool(pool: Pool, creation: CreationConfig, facts: Catalog) -> Iterator[PriceLine]:
    running = not pool.scales_from_zero
    what = f"{pool.name}: {pool.nodes} x {pool.machine.name}, {pool.consumption}"
    listed = facts.price(pool.machine.name, pool.consumption, pool.region)
    node = None if listed is None else listed.node_hour(pool.machine)
    line = _line(what, pool.nodes, node, missing_price(pool), running)
    yield replace(line, pool=pool.name, price_option=_price_option(pool.name))
    disk = pool.machine.boot_disk or DEFAULT_DISK
    yield _disks(pool.name, pool.nodes, creation, disk, facts, pool.region, running)


def cpu_pool_prices(
    machine: CpuMachine, nodes: int, creation: CreationConfig, facts: Catalog, region: str
) -> Iterator[PriceLine]:
    """The prices of the controllers' nodes and of their boot disks."""
    what = f"{CPU_POOL}: {nodes} x {machine.name}, for the controllers"
    option = _price_option(CPU_POOL)
    missing = _missing_part(machine.name, region, "hour", f"{option}, or ")
    line = _line(what, nodes, facts.cpu_machine_price(machine, region), missing)
    yield replace(line, price_option=option)
    disk = machine.boot_disk or DEFAULT_DISK
    yield _disks(CPU_POOL, nodes, creation, disk, facts, region, True)


def _disks(
    pool: str,
    nodes: int,
    creation: CreationConfig,
    disk: str,
    facts: Catalog,
    region: str,
    running: bool,
) -> PriceLine:
    what = f"{pool}: boot disks, {nodes} x {creation.disk_gib} GiB of {disk}"
    gib = facts.part_price(disk, region, "usd_per_gib_month")
    hour = None if gib is None else gib * creation.disk_gib / HOURS_PER_MONTH
    return _line(what, nodes, hour, _missing_part(disk, region, "gib_month"), running)


def _nat(running: int, every: int, facts: Catalog, region: str) -> Iterator[PriceLine]:
    """Cloud NAT: a price for each machine behind it, above a number of them one for all, and its
    addresses. What more machines add exists only while runs use them."""
    idle, full = (_gateway(nodes, facts, region) for nodes in (running, every))
    missing = _missing_part("cloud-nat-gateway", region, "hour")
    yield _line(f"NAT gateway, {plural(running, 'node')}", 1, idle, missing)
    if idle is not None and full is not None and full.value > idle.value:
        more = f"NAT gateway, {plural(every - running, 'node')} more"
        yield _line(more, 1, full - idle, "", running=False)
    what = "addresses of the NAT gateway"
    yield from _addresses(what, nat_addresses(running), nat_addresses(every), facts, region)


def _gateway(nodes: int, facts: Catalog, region: str) -> Fact[float] | None:
    row = facts.part_row("cloud-nat-node", region, "usd_per_hour")
    if row is not None and nodes <= (row.most_nodes or nodes):
        return row.fact("usd_per_hour") * nodes
    return facts.part_price("cloud-nat-gateway", region)


def _addresses(
    what: str, running: int, every: int, facts: Catalog, region: str
) -> Iterator[PriceLine]:
    for count, runs in ((running, True), (every - running, False)):
        if count:
            more = "" if runs else " more"
            yield _part(f"{what}, {count}{more}", count, facts, "external-address", region, runs)


def _part(
    what: str, count: int, facts: Catalog, part: str, region: str, running: bool = True
) -> PriceLine:
    price = facts.part_price(part, region)
    return _line(what, count, price, _missing_part(part, region, "hour"), running)


def part_line(
    what: str, part: str, region: str, price: Fact[float] | None, unit: str = "hour"
) -> PriceLine:
    """The price of one thing that is billed as `part`, or the row that gives it."""
    return _line(what, 1, price, _missing_part(part, region, unit))


def _line(
    what: str, count: int, each: Fact[float] | None, missing: str, running: bool = True
) -> PriceLine:
    """The price of `count` parts at the price of `each`, or what to do where there is none."""
    if each is None:
        return PriceLine(what, count, None, missing, running)
    return PriceLine(what, count, each * count, "", running)


def _missing_part(part: str, region: str, unit: str, otherwise: str = "") -> str:
    return (
        f"no price of {part} in {region} is known; give {otherwise}--hardware FILE with a row\n"
        f"  part_prices: [{{part: {part}, region: {region}, usd_per_{unit}: USD}}]"
    )


def _price_option(pool: str) -> str:
    return f"--price {pool}=USD"


def _sum(prices: Sequence[Fact[float]]) -> Fact[float]:
    return combine(math.fsum(price.value for price in prices), *prices)


def _above_zero(text: str, number: str) -> float:
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise UserError(
            f"--price {text}: not a price above 0; write dollars per node-hour, such as 12.5"
        )
    return value
