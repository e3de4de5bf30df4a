"""The catalog: all rows of our data files, with the rows of a user's own file laid over them.

In a user's file a row with a known name changes the fields that it gives and any other row is
added; its prices and bandwidths come before ours. The file is the source of its values.

    catalog().machine("a4-highgpu-8g").fact("network_gbps")      # value, source, date, unverified
    load_catalog("my-hardware.yaml").accelerator("my-gpu")

A data file is read on the first lookup of its kind, in 2 to 15 ms. Lookups that find nothing raise
UserError with the nearest names; the `find_` lookups return None instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache, cached_property
from typing import Any, NoReturn, TypeVar

from drillyard.errors import NotFoundError
from drillyard.hardware.accelerators import Accelerator
from drillyard.hardware.bandwidths import Bandwidth
from drillyard.hardware.cluster_parts import CpuMachine, PartPrice, Region
from drillyard.hardware.facts import PROVENANCE_KEYS, CatalogRow, Fact, FactSource, read_row
from drillyard.hardware.machines import BILLED_AS, Machine, Price
from drillyard.hardware.network_stacks import NetworkStack
from drillyard.packaged_yaml import read_packaged_yaml

R = TypeVar("R", bound=CatalogRow)
Key = Callable[[Mapping[str, Any]], object]


def _by_name(row: Mapping[str, Any]) -> object:
    return str(row.get("name"))


def _by_measurement(row: Mapping[str, Any]) -> object:
    place = [str(row.get(field)) for field in ("machine", "accelerator", "collective", "nodes")]
    return (*place, str(row.get("role", "measured")), str(row.get("in_network", False)))


def _by_offer(row: Mapping[str, Any]) -> object:
    return tuple(str(row.get(field)) for field in ("machine", "consumption", "region"))


def _by_part(row: Mapping[str, Any]) -> object:
    return tuple(str(row.get(field)) for field in ("part", "region"))


KINDS: dict[str, tuple[type[CatalogRow], Key]] = {
    "accelerators": (Accelerator, _by_name),
    "machines": (Machine, _by_name),
    "network_stacks": (NetworkStack, _by_name),
    "bandwidths": (Bandwidth, _by_measurement),
    "prices": (Price, _by_offer),
    "cpu_machines": (CpuMachine, _by_name),
    "part_prices": (PartPrice, _by_part),
    "regions": (Region, _by_name),
}
"""Sections of a hardware file: the class of their rows, and the key that identifies a row."""

HARDWARE_FILE_HINT = (
    "give your own in a file: --hardware FILE (`drillyard hardware --help` shows its form)"
)


class Catalog:
    """Every kind of row by name; `own` are the checked rows of a user's file, laid over ours."""

    def __init__(
        self,
        own: Mapping[str, list[dict[str, Any]]] | None = None,
        own_source: FactSource | None = None,
    ) -> None:
        self._own = own or {}
        self._own_source = own_source

    @cached_property
    def accelerators(self) -> dict[str, Accelerator]:
        """Accelerators by name, in the order of the data file."""
        return {row.name: row for row in self._rows("accelerators", Accelerator)}

    @cached_property
    def machines(self) -> dict[str, Machine]:
        """Machines by name."""
        return {row.name: row for row in self._rows("machines", Machine)}

    @cached_property
    def network_stacks(self) -> dict[str, NetworkStack]:
        """Network stacks by name."""
        return {row.name: row for row in self._rows("network_stacks", NetworkStack)}

    @cached_property
    def bandwidths(self) -> tuple[Bandwidth, ...]:
        """Reference bandwidths, a user's own first."""
        return tuple(self._rows("bandwidths", Bandwidth))

    @cached_property
    def prices(self) -> tuple[Price, ...]:
        """Prices, a user's own first."""
        return tuple(self._rows("prices", Price))

    @cached_property
    def cpu_machines(self) -> dict[str, CpuMachine]:
        """Machines without GPUs by name."""
        return {row.name: row for row in self._rows("cpu_machines", CpuMachine)}

    @cached_property
    def part_prices(self) -> tuple[PartPrice, ...]:
        """Prices of what a cluster has beside its GPU nodes, a user's own first."""
        return tuple(self._rows("part_prices", PartPrice))

    @cached_property
    def regions(self) -> dict[str, Region]:
        """Regions by name."""
        return {row.name: row for row in self._rows("regions", Region)}

    def find_accelerator(self, name: str) -> Accelerator | None:
        """The accelerator with our name (`h100`) or the driver's (`NVIDIA H100 80GB HBM3`); never
        `cpu`.

        The whole name must match: a partitioned or virtual GPU (`... MIG 1g.10gb`, `GRID A100-10C`)
        is unknown.
        """
        return next(
            (
                row
                for row in self.accelerators.values()
                if row.name != "cpu" and row.is_called(name)
            ),
            None,
        )

    def find_machine(self, name: str) -> Machine | None:
        """The machine with this name or alias."""
        return self.machines.get(name) or next(
            (row for row in self.machines.values() if name in row.aliases), None
        )

    def accelerator(self, name: str) -> Accelerator:
        """The accelerator called `name`, `cpu` included. UserError with the nearest names when
        there is none."""
        found = self.accelerators.get(name) or self.find_accelerator(name)
        return found or _missing("accelerator", name, self.accelerators)

    def machine(self, name: str, cloud: str | None = None) -> Machine:
        """The machine called `name`. UserError when there is none, with the nearest names, or the
        machines that have the accelerator of this name; `cloud`: those of it alone."""
        if (found := self.find_machine(name)) is not None:
            return found
        rows = [row for row in self.machines.values() if cloud in (None, row.cloud)]
        gpu = self.find_accelerator(name)
        with_it = [row.name for row in rows if gpu is not None and row.accelerator == gpu.name]
        _missing("machine", name, [row.name for row in rows], with_it)

    def network_stack(self, name: str) -> NetworkStack:
        """The network stack called `name`. UserError with the nearest names when there is none."""
        return self.network_stacks.get(name) or _missing("network stack", name, self.network_stacks)

    def cpu_machine(self, name: str) -> CpuMachine:
        """The machine without GPUs called `name`. UserError with the nearest names when there is
        none."""
        return self.cpu_machines.get(name) or _missing("CPU machine", name, self.cpu_machines)

    def accelerator_of(self, machine: Machine) -> Accelerator:
        """The accelerator of `machine`; checked rows name a known one."""
        return self.accelerators[machine.accelerator]

    def price(self, machine: str, consumption: str, region: str | None = None) -> Price | None:
        """The price of `machine` by `consumption` in `region` (None: the first known region); None
        if unknown.

        A price without a region (a user's own) is valid everywhere.
        """
        billed = BILLED_AS.get(consumption, consumption)
        for price in self.prices:
            same_offer = (
                price.machine == machine
                and BILLED_AS.get(price.consumption, price.consumption) == billed
            )
            if same_offer and (region is None or price.region in (None, region)):
                return price
        return None

    def part_price(self, part: str, region: str, field: str = "usd_per_hour") -> Fact[float] | None:
        """The price of `part` in `region`, in the unit that `field` names (`PartPrice`); None if
        unknown. One without a region is valid everywhere."""
        row = self.part_row(part, region, field)
        return None if row is None else row.fact(field)

    def cpu_machine_price(self, machine: CpuMachine, region: str) -> Fact[float] | None:
        """Dollars for one hour of `machine` in `region`: its own, or by its share of the vCPUs of a
        machine of its shape; None if unknown."""
        own = self.part_row(machine.name, region, "usd_per_hour")
        if own is not None:
            return own.fact("usd_per_hour")
        row = self.part_row(machine.shape or "", region, "usd_per_hour")
        if row is None or row.vcpus is None:
            return None
        return row.fact("usd_per_hour") * machine.vcpus / row.vcpus

    def part_row(self, part: str, region: str, field: str) -> PartPrice | None:
        """The row of `part_price`."""
        return next(
            (
                row
                for row in self.part_prices
                if row.part == part
                and row.region in (None, region)
                and getattr(row, field) is not None
            ),
            None,
        )

    def _rows(self, kind: str, cls: type[R]) -> list[R]:
        raws, own = raw_rows(kind), self._own.get(kind, [])
        key = KINDS[kind][1]
        keys = [key(raw) for raw in raws]
        replaced = {key(raw) for raw in own}
        laid_over = [
            read_row(cls, merged(raw, raws, keys, key), sources(), self._own_source) for raw in own
        ]
        kept = [
            read_row(cls, raw, sources())
            for raw, its in zip(raws, keys, strict=True)
            if its not in replaced
        ]
        return [*laid_over, *kept] if key is not _by_name else [*kept, *laid_over]


def nearest_names(name: str, names: Iterable[str]) -> list[str]:
    """Up to three of `names` that resemble `name`, the best first."""
    by_lower = {known.lower(): known for known in names}
    return [by_lower[close] for close in get_close_matches(name.lower(), by_lower, n=3, cutoff=0.5)]


def _missing(kind: str, name: str, names: Iterable[str], better: Sequence[str] = ()) -> NoReturn:
    close = [*better] or nearest_names(name, names)
    hint = (
        f"did you mean {' or '.join(close)}?"
        if close
        else f"`drillyard hardware` lists every {kind}."
    )
    raise NotFoundError(f"{kind} '{name}' is not known; {hint}\nOr {HARDWARE_FILE_HINT}.")


def merged(
    raw: dict[str, Any], raws: list[dict[str, Any]], keys: list[object], key: Key
) -> dict[str, Any]:
    """`raw`, of a user's file, over our row of the same name; prices and bandwidths are not merged.

    Mappings are merged by key. Values of ours keep their source and whether they are unverified.
    """
    if key is not _by_name or key(raw) not in keys:
        return raw
    ours = raws[keys.index(key(raw))]
    body = {field: value for field, value in ours.items() if field not in PROVENANCE_KEYS}
    kept: list[str] = []
    for field, value in body.items():
        own = raw.get(field)
        if isinstance(value, dict) and isinstance(own, dict):
            body[field] = {**value, **own}
            kept += [f"{field}.{inner}" for inner in value if inner not in own]
        elif field in raw:
            body[field] = own
        else:
            kept.append(field)
    texts, doubts = ours.get("sources", {}), ours.get("unverified", [])
    origins = {
        path: texts.get(path) or texts.get(path.split(".")[0]) or ours["source"] for path in kept
    }
    finer = {path: text for path, text in texts.items() if path.split(".")[0] in kept}
    doubted = [path for path in kept if path in doubts or path.split(".")[0] in doubts]
    finer_doubts = [path for path in doubts if path.split(".")[0] in kept and path not in doubted]
    own_texts, own_doubts = raw.get("sources", {}), raw.get("unverified", [])
    if own_doubts is True:
        own_doubts = [field for field in raw if field not in PROVENANCE_KEYS]
    return {
        **raw,
        **body,
        "sources": {**origins, **finer, **own_texts} if isinstance(own_texts, dict) else own_texts,
        "unverified": [*doubted, *finer_doubts, *own_doubts]
        if isinstance(own_doubts, list)
        else own_doubts,
    }


@cache
def raw_rows(kind: str) -> list[dict[str, Any]]:
    """The rows of one of our files, as they are written."""
    rows = read_packaged_yaml("drillyard.hardware", f"{kind}.yaml")
    assert isinstance(rows, list)
    return rows


@cache
def sources() -> dict[str, FactSource]:
    """The sources that rows refer to, by key."""
    return {
        key: FactSource(row["text"], str(row["date"]), row.get("unverified", False))
        for key, row in read_packaged_yaml("drillyard.hardware", "sources.yaml").items()
    }


def packaged_rows(cls: type[R], kind: str) -> tuple[R, ...]:
    """The rows of one of our files."""
    return tuple(read_row(cls, raw, sources()) for raw in raw_rows(kind))


@cache
def catalog() -> Catalog:
    """Our own catalog, without a user's file."""
    return Catalog()


def find_accelerator(name: str) -> Accelerator | None:
    """The accelerator of our catalog with our name or the driver's, in any case; None if
    unknown."""
    return catalog().find_accelerator(name)
