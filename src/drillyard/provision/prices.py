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
from dataclasses import dataclass

from drillyard.config.creation import CreationConfig
from drillyard.errors import UserError
from drillyard.formatting import plural
from drillyard.hardware.catalog import Catalog
from drillyard.hardware.cluster_parts import ZONES_OF_A_REGION, nat_addresses
from drillyard.hardware.facts import Fact, FactSource, combine
from drillyard.provision.cluster_plan import ClusterPlan, Pool, PriceLine

CPU_POOL = "cpu"
"""Name of the pool of the controllers, also in --price cpu=USD."""
GIVEN = FactSource("given by --price", None)
HOURS_PER_DAY = 24
_DEFAULT_DISK = "pd-balanced"
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
    given: Mapping[str, float] | None = None,
) -> tuple[PriceLine, ...]:
    """The parts of a cluster and their prices in US dollars per hour, in the order of creation.

    `given` are the user's prices of a node-hour by the pool's name (`prices_given`). Raises
    UserError for a machine of the controllers that the catalog does not know.
    """
    region, own = pools[0].region, given or {}
    cpu_nodes = creation.cpu_pool.nodes * ZONES_OF_A_REGION
    lines = [_part("control plane", 1, facts, "gke-control-plane", region)]
    lines += _cpu_pool(creation, cpu_nodes, facts, region, own.get(CPU_POOL))
    for pool in pools:
        lines += _gpu_pool(pool, creation, facts, own.get(pool.name))
    running = cpu_nodes + sum(pool.nodes for pool in pools if not pool.scales_from_zero)
    every = cpu_nodes + sum(pool.nodes for pool in pools)
    if creation.private_nodes:
        return (*lines, *_nat(running, every, facts, region))
    return (*lines, *_addresses("addresses of nodes", running, every, facts, region))


def prices_given(texts: Sequence[str], pools: Sequence[Pool]) -> dict[str, float]:
    """The prices of `--price`: `USD` of a node-hour of the only GPU pool, or `POOL=USD`. Raises
    UserError for a pool that there is not, a price given twice, and one that is not above 0."""
    found: dict[str, float] = {}
    names = [pool.name for pool in pools]
    for text in texts:
        name, _, number = text.rpartition("=")
        if not name:
            if len(names) > 1:
                raise UserError(
                    f"--price {text}: there are {len(names)} pools; say of which:"
                    f" {' or '.join(f'--price {each}={text}' for each in names)}"
                )
            name = names[0]
        if name not in (*names, CPU_POOL):
            raise UserError(
                f"--price {text}: there is no pool {name}; the pools are"
                f" {', '.join((*names, CPU_POOL))}"
            )
        if name in found:
            raise UserError(f"--price {text}: the price of {name} is given twice; give one")
        found[name] = _above_zero(text, number)
    return found


def price_totals(lines: Sequence[PriceLine]) -> PriceTotals:
    """The sums of the lines whose price is known."""
    known = [(line, line.usd_per_hour) for line in lines if line.usd_per_hour is not None]
    return PriceTotals(
        idle=_sum([price for line, price in known if line.running]),
        full=_sum([price for _, price in known]),
        unknown=tuple(line.what for line in lines if line.usd_per_hour is None),
    )


def require_prices(plan: ClusterPlan) -> None:
    """Raise UserError, with what to give, where the price of a pool's nodes is not known."""
    missing = [line for line in plan.prices if line.pool and line.usd_per_hour is None]
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
        f" --price {pool.name}=USD, the dollars of a node-hour, or --hardware FILE with a row\n"
        f"  prices: [{{{row}}}]"
    )


def _gpu_pool(
    pool: Pool, creation: CreationConfig, facts: Catalog, own: float | None
) -> Iterator[PriceLine]:
    running = not pool.scales_from_zero
    what = f"{pool.name}: {pool.nodes} x {pool.machine.name}, {pool.consumption}"
    listed = facts.price(pool.machine.name, pool.consumption, pool.region)
    node = (
        Fact(own, (GIVEN,))
        if own is not None
        else listed.node_hour(pool.machine)
        if listed is not None
        else None
    )
    yield PriceLine(
        what,
        pool.nodes,
        None if node is None else node * pool.nodes,
        "" if node is not None else missing_price(pool),
        running,
        pool.name,
    )
    disk = pool.machine.boot_disk or _DEFAULT_DISK
    yield _disks(pool.name, pool.nodes, creation, disk, facts, pool.region, running)


def _cpu_pool(
    creation: CreationConfig, nodes: int, facts: Catalog, region: str, own: float | None
) -> Iterator[PriceLine]:
    machine = facts.cpu_machine(creation.cpu_pool.machine)
    listed = facts.part_price(machine.name, region) or (
        None if machine.shape is None else facts.part_price(machine.shape, region)
    )
    node = (
        Fact(own, (GIVEN,))
        if own is not None
        else listed.machine_hour(machine)
        if listed is not None
        else None
    )
    what = f"{CPU_POOL}: {nodes} x {machine.name}, for the controllers"
    missing = (
        f"no price of {machine.name} in {region} is known; give --price {CPU_POOL}=USD, or"
        f" --hardware FILE with a row\n"
        f"  part_prices: [{{part: {machine.name}, region: {region}, usd_per_hour: USD}}]"
    )
    yield PriceLine(what, nodes, None if node is None else node * nodes, "" if node else missing)
    disk = machine.boot_disk or _DEFAULT_DISK
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
    listed = facts.part_price(disk, region)
    if listed is None:
        return PriceLine(what, nodes, None, _missing_part(disk, region, "gib_month"), running)
    return PriceLine(what, nodes, listed.disk_hour(creation.disk_gib) * nodes, "", running)


def _nat(running: int, every: int, facts: Catalog, region: str) -> Iterator[PriceLine]:
    """Cloud NAT: a price for each machine behind it, above a number of them one for all, and its
    addresses. What more machines add exists only while runs use them."""
    idle, full = (_gateway(nodes, facts, region) for nodes in (running, every))
    what = f"NAT gateway, {plural(running, 'node')}"
    if idle is None or full is None:
        missing = _missing_part("cloud-nat-gateway", region, "hour")
        yield PriceLine(what, 1, None, missing)
    else:
        yield PriceLine(what, 1, idle)
        if full.value > idle.value:
            yield PriceLine(
                f"NAT gateway, {plural(every - running, 'node')} more", 1, full - idle, "", False
            )
    yield from _addresses(
        "addresses of the NAT gateway", nat_addresses(running), nat_addresses(every), facts, region
    )


def _gateway(nodes: int, facts: Catalog, region: str) -> Fact[float] | None:
    per_node, whole = (
        facts.part_price(f"cloud-nat-{part}", region) for part in ("node", "gateway")
    )
    if per_node is None or whole is None:
        return None
    if per_node.most_nodes is not None and nodes > per_node.most_nodes:
        return whole.fact("usd_per_hour")
    return per_node.fact("usd_per_hour") * nodes


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
    listed = facts.part_price(part, region)
    if listed is None:
        return PriceLine(what, count, None, _missing_part(part, region, "hour"), running)
    return PriceLine(what, count, listed.fact("usd_per_hour") * count, "", running)


def _missing_part(part: str, region: str, unit: str) -> str:
    return (
        f"no price of {part} in {region} is known; give --hardware FILE with a row\n"
        f"  part_prices: [{{part: {part}, region: {region}, usd_per_{unit}: USD}}]"
    )


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
