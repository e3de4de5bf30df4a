"""Read a user's hardware file, report all its mistakes with their lines, and lay it over our
catalog.

    accelerators:
      - {name: my-gpu, title: My GPU, peak_tflops: {bf16: 400}, memory_gib: 94}
    machines:
      - {name: my-node, accelerator: my-gpu, num_accelerators: 8, network_stack: infiniband}
    prices:
      - {machine: my-node, consumption: on-demand, usd_per_node_hour: 20}

Sections and fields are those of our data files. A row with a known name changes only the fields
that it gives. `source` and `date` are optional; the source of a value always names the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from drillyard.config.problems import Path, Problem, closest_name, raise_all
from drillyard.config.validation_errors import describe_value, find_problems, pydantic_problems
from drillyard.config.yaml_document import YamlDocument, read_document
from drillyard.errors import NotFoundError
from drillyard.hardware.bandwidths import Bandwidth
from drillyard.hardware.catalog import KINDS, Catalog, merged, raw_rows, sources
from drillyard.hardware.catalog import catalog as catalog_of_ours
from drillyard.hardware.cluster_parts import (
    PARTS_WITHOUT_PRICE,
    PRICE_UNITS,
    CpuMachine,
    PartPrice,
)
from drillyard.hardware.facts import CatalogRow, Citations, FactSource, read_row, split_row
from drillyard.hardware.machines import Machine, Price


def read_user_file(path: str | os.PathLike[str]) -> Catalog:
    """Our catalog with the rows of the file at `path` laid over it.

    Raises UserError with every mistake of the file, each with its line.
    """
    label = os.fspath(path)
    if not os.path.exists(label):
        raise NotFoundError(
            f"{label}: no such file; a hardware file holds {', '.join(KINDS)}, see `drillyard"
            " hardware --help`"
        )
    document = read_document(path)
    own_source = FactSource(label, None)
    problems = [*document.problems, *_shape(document)]
    raise_all(problems, document.places)
    sections: dict[str, list[dict[str, Any]]] = document.value
    rows: dict[Path, CatalogRow] = {}
    for kind, raws in sections.items():
        problems += _repeated(kind, raws)
        for index, raw in enumerate(raws):
            row = _read_one(kind, raw, own_source)
            if isinstance(row, CatalogRow):
                rows[kind, index] = row
            else:
                problems += [Problem((kind, index, *each.path), each.message) for each in row]
    right: dict[str, list[dict[str, Any]]] = {kind: [] for kind in sections}
    for section, number in rows:
        right[str(section)].append(sections[str(section)][int(number)])
    catalog = Catalog(right, own_source)
    unread = {
        str(raw.get("name"))
        for kind, raws in sections.items()
        for index, raw in enumerate(raws)
        if isinstance(raw, dict) and (kind, index) not in rows
    }
    # What refers to a row that cannot be read is not another mistake.
    problems += [
        Problem((*at, field), text)
        for at, row in rows.items()
        for field, text in contradictions(row, catalog)
        if str(getattr(row, field, None)) not in unread
    ]
    raise_all(problems, document.places)
    return catalog


def contradictions(row: CatalogRow, catalog: Catalog) -> Iterator[tuple[str, str]]:
    """Contradictions between the fields of a row, or with other rows: (field, message)."""
    if isinstance(row, Machine):
        yield from _known("accelerator", row.accelerator, catalog.accelerators)
        yield from _known("network_stack", row.network_stack, catalog.network_stacks)
        nics = row.data_nics.count * row.data_nics.gbps + row.host_nics.count * row.host_nics.gbps
        if row.network_gbps is not None and abs(nics - row.network_gbps) > 1e-6 * nics:
            yield (
                "network_gbps",
                f"found {row.network_gbps:g}, but data and host NICs together have {nics:g} Gb/s",
            )
        if row.cloud is not None and row.gpu_quota is None:
            yield (
                "cloud",
                (
                    "a cloud's machine needs gpu_quota, the word for its GPU in the names of the"
                    " cloud's quotas"
                ),
            )
        if row.cloud == "gcp" and row.gpu_quota_form is None:
            yield (
                "cloud",
                (
                    "a machine of Google Cloud needs gpu_quota_form: metric for A100, L4 and older,"
                    " else family"
                ),
            )
    if isinstance(row, Price):
        yield from _known("machine", row.machine, catalog.machines)
        if (row.usd_per_node_hour is None) == (row.usd_per_gpu_hour is None):
            yield (
                "machine",
                "a price is either usd_per_node_hour or usd_per_gpu_hour: give one of them",
            )
        machine = catalog.machines.get(row.machine)
        if machine is not None:
            if machine.cloud == "gcp":
                yield from _known_region(row.region, catalog)
            if machine.consumption and row.consumption not in machine.consumption:
                yield (
                    "consumption",
                    f"{machine.name} cannot be had by '{row.consumption}', so nothing has this"
                    f" price; it can by {', '.join(machine.consumption)}",
                )
    if isinstance(row, PartPrice):
        yield from _part_price(row, catalog)
    if isinstance(row, CpuMachine) and row.shape is not None:
        yield from _known("shape", row.shape, {each.part for each in catalog.part_prices})
    if isinstance(row, Bandwidth):
        if (row.machine is None) == (row.accelerator is None):
            yield (
                "collective",
                "a bandwidth is of a machine or, in one node, of an accelerator: give one of them",
            )
        if row.machine is not None:
            yield from _known("machine", row.machine, catalog.machines)
        if row.accelerator is not None:
            yield from _known("accelerator", row.accelerator, catalog.accelerators)
            if row.nodes != 1:
                yield (
                    "nodes",
                    (
                        f"found {row.nodes}; only within one node is a bandwidth that of the"
                        " accelerator"
                    ),
                )
        if not row.gb_per_s:
            yield "gb_per_s", "at least one size in MiB with its GB/s is needed"


def _part_price(row: PartPrice, catalog: Catalog) -> Iterator[tuple[str, str]]:
    given = [unit for unit in PRICE_UNITS if getattr(row, unit) is not None]
    if len(given) != 1:
        yield "part", f"a price is one of {', '.join(PRICE_UNITS)}: give one of them"
    elif row.part in catalog.cpu_machines:
        if given != ["usd_per_hour"]:
            yield given[0], "a machine has a price per hour: give usd_per_hour"
    else:
        parts = {each.part: each for each in catalog_of_ours().part_prices}
        own = {each.shape for each in catalog.cpu_machines.values() if each.shape is not None}
        names = {*parts, *PARTS_WITHOUT_PRICE, *own, *catalog.cpu_machines}
        yield from _known("part", row.part, names)
        known = parts.get(row.part)
        if known is not None and getattr(known, given[0]) is None:
            unit = next(each for each in PRICE_UNITS if getattr(known, each) is not None)
            yield given[0], f"{row.part} has a price in another unit: give {unit}"
        elif (unit := PARTS_WITHOUT_PRICE.get(row.part, given[0])) != given[0]:
            yield given[0], f"{row.part} has a price in another unit: give {unit}"
    yield from _known_region(row.region, catalog)


def _known_region(region: str | None, catalog: Catalog) -> Iterator[tuple[str, str]]:
    if region is not None:
        fabrics = [name for row in catalog.machines.values() for name in row.infiniband_fabrics]
        yield from _known("region", region, [*catalog.regions, *dict.fromkeys(fabrics)])


def _known(field: str, name: str, names: Any) -> Iterator[tuple[str, str]]:
    if name not in names:
        meant = closest_name(name, names)
        yield (
            field,
            (
                f"'{name}' is not"
                f" known{f'; did you mean {meant}?' if meant else '; give it a row of its own'}"
            ),
        )


def _shape(document: YamlDocument) -> Iterator[Problem]:
    """Sections are known and hold lists."""
    value = document.value
    if not isinstance(value, dict):
        found = "is empty" if value is None else f"holds {describe_value(value)}"
        yield Problem((), f"{found}; a hardware file is a mapping with {', '.join(KINDS)}")
        return
    for kind, rows in value.items():
        if kind not in KINDS:
            meant = closest_name(kind, KINDS)
            yield Problem(
                (kind,),
                "unknown section;"
                f" {f'did you mean {meant}?' if meant else 'known: ' + ', '.join(KINDS)}",
            )
        elif not isinstance(rows, list):
            yield Problem((kind,), f"found {describe_value(rows)}; a list of rows is needed")


def _repeated(kind: str, raws: list[Any]) -> Iterator[Problem]:
    """Rows with the key of an earlier row."""
    seen: dict[object, int] = {}
    for index, raw in enumerate(raws):
        if not isinstance(raw, dict):
            continue
        key = KINDS[kind][1](raw)
        if key in seen:
            yield Problem(
                (kind, index), f"the same row as number {seen[key] + 1} of {kind}; keep one"
            )
        seen.setdefault(key, index)


def _read_one(kind: str, raw: Any, own_source: FactSource) -> CatalogRow | list[Problem]:
    """The row in `raw`, or all that is wrong with it."""
    cls, key = KINDS[kind]
    if not isinstance(raw, dict):
        return [Problem((), f"found {describe_value(raw)}; a row is a mapping")]
    ours = raw_rows(kind)
    raw = merged(raw, ours, [key(row) for row in ours], key)
    fields, cited = split_row(raw)
    if unknown := list(_unknown_fields(cls, cited)):
        return [*find_problems(cls, fields), *find_problems(Citations, cited), *unknown]
    try:
        return read_row(cls, raw, sources(), own_source)
    except ValidationError as error:
        return [*find_problems(cls, fields), *find_problems(Citations, cited)] or list(
            pydantic_problems(error)
        )


def _unknown_fields(cls: type[CatalogRow], cited: dict[str, Any]) -> Iterator[Problem]:
    """Names under `sources` and `unverified` that are no field of the row."""
    named, unverified = cited.get("sources"), cited.get("unverified")
    paths: list[tuple[Path, str]] = [
        (("sources", name), name) for name in (named if isinstance(named, dict) else ())
    ]
    paths += [
        (("unverified",), name) for name in (unverified if isinstance(unverified, list) else ())
    ]
    for path, name in paths:
        if (field := str(name).split(".")[0]) not in cls.model_fields:
            meant = closest_name(field, cls.model_fields)
            hint = (
                f"did you mean '{meant}'?" if meant else f"allowed: {', '.join(cls.model_fields)}"
            )
            yield Problem(path, f"'{name}' is no field of the row; {hint}")
