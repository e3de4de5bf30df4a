"""The catalog as text and as JSON: the list of entries, and one entry with source and date of every
value.

A value without a primary source is marked `unverified`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic_core import to_jsonable_python

from drillyard.errors import NotFoundError
from drillyard.hardware.accelerators import Accelerator
from drillyard.hardware.bandwidths import Bandwidth
from drillyard.hardware.catalog import HARDWARE_FILE_HINT, Catalog, nearest_names
from drillyard.hardware.cluster_parts import PartPrice
from drillyard.hardware.facts import CatalogRow, Fact, Record
from drillyard.hardware.machines import Machine, Price
from drillyard.hardware.network_stacks import NetworkStack

JSON_VERSION = 1
Entry = Accelerator | Machine | NetworkStack
NAMES = ("name", "title", "aliases")
"""Fields that we named ourselves, so they have no source."""
TITLES = {Accelerator: "accelerator", Machine: "machine", NetworkStack: "network stack"}


def find_entry(catalog: Catalog, name: str) -> Entry:
    """The accelerator, machine or network stack called `name`. NotFoundError, with the nearest
    names, if none is."""
    found: Entry | None = (
        catalog.accelerators.get(name)
        or catalog.find_accelerator(name)
        or catalog.find_machine(name)
        or catalog.network_stacks.get(name)
    )
    if found is not None:
        return found
    known = [*catalog.accelerators, *catalog.machines, *catalog.network_stacks]
    reported = [device for row in catalog.accelerators.values() for device in row.reported_as]
    close = nearest_names(name, [*known, *reported])
    hint = (
        f"did you mean {' or '.join(close)}?"
        if close
        else "`drillyard hardware` lists what is known"
    )
    raise NotFoundError(
        f"'{name}' is no accelerator, machine or network stack that is known; {hint}\nOr"
        f" {HARDWARE_FILE_HINT}."
    )


def list_text(catalog: Catalog) -> str:
    """All entries by kind, with their main values."""
    accelerators = [
        ("accelerator", "bf16 TFLOP/s", "memory GiB", "HBM GB/s", "GPU link GB/s", "what")
    ]
    for gpu in catalog.accelerators.values():
        bf16 = gpu.peak("bf16")
        peak = None if bf16 is None else Fact(bf16.value / 1e12, bf16.sources)
        memory, bandwidth = (
            _cell(gpu.fact("memory_gib")),
            _cell(gpu.fact("memory_bandwidth_gb_per_s")),
        )
        accelerators.append(
            (
                gpu.name,
                _cell(peak),
                memory,
                bandwidth,
                _cell(gpu.fact("gpu_link_gb_per_s")),
                gpu.title,
            )
        )
    machines = [("machine", "GPUs", "data NICs", "Gb/s", "stack", "host GiB", "cloud")]
    for one in catalog.machines.values():
        nics = f"{one.data_nics.count} x {one.data_nics.gbps:g}" if one.data_nics.count else "-"
        gpus, rate = f"{one.num_accelerators} x {one.accelerator}", _cell(one.fact("network_gbps"))
        host = _cell(one.fact("host_memory_gib"))
        machines.append((one.name, gpus, nics, rate, one.network_stack, host, one.cloud or "-"))
    stacks = [
        ("network stack", "what"),
        *((row.name, row.title) for row in catalog.network_stacks.values()),
    ]
    prices = [("price of", "bought", "region", "$ per node-hour", "$ per GPU-hour", "date")]
    for price in catalog.prices:
        machine = catalog.machines[price.machine]
        node, gpu_hour = price.node_hour(machine), _cell(price.gpu_hour(machine))
        region = price.region or "any"
        prices.append(
            (price.machine, price.consumption, region, _cell(node), gpu_hour, node.date or "-")
        )
    cpu_machines = [("CPU machine", "vCPUs", "priced as", "boot disk", "quota")]
    for cpu in catalog.cpu_machines.values():
        words = (cpu.shape or cpu.name, cpu.boot_disk or "-", cpu.cpu_quota or "-")
        cpu_machines.append((cpu.name, str(cpu.vcpus), *words))
    parts: list[tuple[str, ...]] = [("part of a cluster", "$", "per", "region", "date")]
    parts += [_part_row(row) for row in catalog.part_prices]
    regions = [("region", "zones, or for buckets alone")]
    regions += [(row.name, ", ".join(row.zones) or "-") for row in catalog.regions.values()]
    tables = [_table(accelerators), _table(machines), _table(stacks), _table(prices)]
    tables += [_table(cpu_machines), _table(parts), _table(regions)]
    note = (
        f"{len(catalog.bandwidths)} reference bandwidths: see the machine or accelerator by its"
        " name.\n? unverified"
    )
    return "\n\n".join([*tables, note])


def entry_text(catalog: Catalog, entry: Entry) -> str:
    """One entry with source and date of every value, then its prices, bandwidths or machines."""
    also = (
        f" (also {', '.join(entry.aliases)})"
        if not isinstance(entry, NetworkStack) and entry.aliases
        else ""
    )
    title = f": {entry.title}" if not isinstance(entry, Machine) else ""
    lines = [f"{TITLES[type(entry)]} {entry.name}{also}{title}", ""]
    facts = list(_facts(entry))
    numbers = {
        source: index
        for index, source in enumerate(
            dict.fromkeys(_source_text(fact) for _, fact in facts), start=1
        )
    }
    width = max((len(path) for path, _ in facts), default=0)
    for path, fact in facts:
        sign = "  unverified" if fact.unverified else ""
        first, *others = _plain_lines(fact.value)
        lines.append(f"  {path:<{width}}  {first}  [{numbers[_source_text(fact)]}]{sign}")
        lines += [f"  {'':<{width}}  {other}" for other in others]
    lines += ["", *(f"  [{number}] {source}" for source, number in numbers.items())]
    for title, rows in _related(catalog, entry):
        lines += ["", f"  {title}", *(f"    {line}" for line in rows)]
    return "\n".join(lines)


def entry_json(catalog: Catalog, entry: Entry) -> dict[str, Any]:
    """The same as a value for JSON: each field with value, source, date and `unverified`."""
    result: dict[str, Any] = {
        "version": JSON_VERSION,
        "kind": TITLES[type(entry)],
        "name": entry.name,
    }
    result["facts"] = {
        path: {**fact.as_json(), "value": to_jsonable_python(fact.value)}
        for path, fact in _facts(entry)
    }
    if not isinstance(entry, NetworkStack):
        result["bandwidths"] = [_row_json(row) for row in _bandwidths(catalog, entry)]
    if isinstance(entry, Machine):
        result["prices"] = [_row_json(row) for row in catalog.prices if row.machine == entry.name]
    else:
        result["machines"] = _machines_with(catalog, entry)
    return result


def list_json(catalog: Catalog) -> dict[str, Any]:
    """All rows by kind, each with its values, their sources and which of them are unverified."""
    rows: dict[str, Iterable[CatalogRow]] = {
        "accelerators": catalog.accelerators.values(),
        "machines": catalog.machines.values(),
        "network_stacks": catalog.network_stacks.values(),
        "bandwidths": catalog.bandwidths,
        "prices": catalog.prices,
        "cpu_machines": catalog.cpu_machines.values(),
        "part_prices": catalog.part_prices,
        "regions": catalog.regions.values(),
    }
    return {
        "version": JSON_VERSION,
        **{kind: [_row_json(row) for row in each] for kind, each in rows.items()},
    }


def _facts(row: CatalogRow) -> Iterator[tuple[str, Fact[Any]]]:
    """Every value of a row by its path, also inside mappings and groups of fields; defaults are
    left out."""
    for name, value in _fields_of(row):
        if name not in NAMES:
            yield from _facts_below(row, name, value)


def _facts_below(row: CatalogRow, path: str, value: Any) -> Iterator[tuple[str, Fact[Any]]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _facts_below(row, f"{path}.{key}", item)
    elif isinstance(value, Record):
        for name, item in _fields_of(value):
            yield from _facts_below(row, f"{path}.{name}", item)
    elif value is not None and value != ():
        yield path, Fact(value, (row.provenance.of(path),))


def _fields_of(value: Record) -> Iterator[tuple[str, Any]]:
    """The fields whose value is not the default."""
    for name, field in type(value).model_fields.items():
        if getattr(value, name) != field.default:
            yield name, getattr(value, name)


def _row_json(row: CatalogRow) -> dict[str, Any]:
    """A row with its source, the sources of single fields that have another one, and the unverified
    fields."""
    return {
        **row.model_dump(mode="json"),
        "source": row.provenance.row.text,
        "date": row.provenance.row.date,
        "sources": {
            path: {"source": one.text, "date": one.date}
            for path, one in row.provenance.by_field.items()
        },
        "unverified": [path for path, fact in _facts(row) if fact.unverified],
    }


def _related(catalog: Catalog, entry: Entry) -> Iterator[tuple[str, list[str]]]:
    if not isinstance(entry, NetworkStack) and (bandwidths := _bandwidths(catalog, entry)):
        yield (
            "reference bandwidths (busbw, GB/s by MiB)",
            [_bandwidth_line(row) for row in bandwidths],
        )
    if isinstance(entry, Machine):
        prices = [_price_line(row, entry) for row in catalog.prices if row.machine == entry.name]
        yield "prices", prices or [f"none known; {HARDWARE_FILE_HINT}"]
    elif machines := _machines_with(catalog, entry):
        yield "machines", [", ".join(machines)]


def _bandwidths(catalog: Catalog, entry: Accelerator | Machine) -> list[Bandwidth]:
    field = "accelerator" if isinstance(entry, Accelerator) else "machine"
    return [row for row in catalog.bandwidths if getattr(row, field) == entry.name]


def _machines_with(catalog: Catalog, entry: Accelerator | NetworkStack) -> list[str]:
    field = "accelerator" if isinstance(entry, Accelerator) else "network_stack"
    return [
        machine.name
        for machine in catalog.machines.values()
        if getattr(machine, field) == entry.name
    ]


def _bandwidth_line(row: Bandwidth) -> str:
    per_node = row.num_accelerators // row.nodes
    sizes = ", ".join(f"{size}: {rate:g}" for size, rate in row.gb_per_s.items())
    role = "at least" if row.role == "minimum" else "measured"
    network = ", summed in the switch" if row.in_network else ""
    source = _source_text(row.fact("gb_per_s"))
    return f"{row.collective}, {row.nodes} x {per_node} GPUs, {role}{network}: {sizes}  ({source})"


def _price_line(row: Price, machine: Machine) -> str:
    node, gpu = row.node_hour(machine), row.gpu_hour(machine)
    dollars = f"${node.value:.2f} per node-hour, ${gpu.value:.2f} per GPU-hour"
    sign = "  unverified" if node.unverified else ""
    return (
        f"{row.consumption}, {row.region or 'any region'}: {dollars}  ({_source_text(node)}){sign}"
    )


def _part_row(row: PartPrice) -> tuple[str, ...]:
    hour = "hour" if row.vcpus is None else f"hour of {row.vcpus} vCPUs"
    units = {"usd_per_hour": hour, "usd_per_gib_month": "GiB and month", "usd_per_gib": "GiB"}
    field = next(name for name in units if getattr(row, name) is not None)
    price = row.fact(field)
    dollars = f"{price.value:g}{'?' if price.unverified else ''}"
    return (row.part, dollars, units[field], row.region or "any", price.date or "-")


def _source_text(fact: Fact[Any]) -> str:
    return f"{fact.source}, {fact.date}" if fact.date else fact.source


def _cell(fact: Fact[Any] | None) -> str:
    if fact is None or fact.value is None:
        return "-"
    number = f"{fact.value:,.2f}".rstrip("0").rstrip(".")
    return f"{number}{'?' if fact.unverified else ''}"


def _plain_lines(value: Any) -> list[str]:
    """One line, or a line for each item of a list of groups or sentences."""
    is_long = isinstance(value, tuple) and any(
        not isinstance(item, str) or " " in item for item in value
    )
    return [_plain(item) for item in value] if is_long else [_plain(value)]


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return f"{value:g}" if value < 1e6 else f"{value:,.0f}"
    if isinstance(value, tuple):
        return ", ".join(_plain(item) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    if isinstance(value, Record):
        return ", ".join(
            f"{name} {_plain(part)}" for name, part in _fields_of(value) if part is not None
        )
    return str(value)


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "-" * max(len(line) for line in lines), *lines[1:]])
