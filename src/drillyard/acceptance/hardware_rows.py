"""`--write-hardware FILE`: what was measured as rows for `--hardware`, so that `estimate` predicts
this cluster by its own figures.

A row of ours that would be chosen before the measured one is replaced by it: in one node a row of
the accelerator may be faster, and a row with sums in the switch has another key. Values are medians
over the groups of nodes and repeats; figures that failed are what this cluster has, and are written
as well. Output that contradicts itself is not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from statistics import median
from typing import Any, get_args

import yaml

from drillyard.acceptance.check import Expected
from drillyard.acceptance.checks import device_rates
from drillyard.acceptance.collective_evidence import measured_collectives
from drillyard.acceptance.judgement import Outcome
from drillyard.acceptance.thresholds import reference_rows
from drillyard.control_characters import clean
from drillyard.errors import UserError
from drillyard.hardware.bandwidths import MIB, Collective
from drillyard.hardware.machines import Machine

_Place = tuple[str, int]


def hardware_file(outcome: Outcome, name: str) -> str:
    """The YAML of the rows; `name` of the acceptance stands in their source. Raises UserError where
    there is nothing to write."""
    machine, name = require_machine(outcome.expected), clean(name)
    sections = {
        "bandwidths": list(_bandwidths(outcome, machine)),
        "accelerators": list(_accelerators(outcome)),
    }
    rows = {kind: found for kind, found in sections.items() if found}
    if not rows:
        raise UserError(
            "--write-hardware: no bandwidth and no rate was measured whole; see the results"
        )
    day = datetime.fromtimestamp(outcome.evidence.ended_at or 0, UTC).date().isoformat()
    for row in (row for found in rows.values() for row in found):
        row["source"] = f"drillyard accept, {name}"
        if outcome.evidence.ended_at:
            row["date"] = day
    text: str = yaml.safe_dump(rows, sort_keys=False, default_flow_style=None, width=200)
    return f"# Measured by drillyard accept ({name}): give it with --hardware.\n{text}"


def require_machine(expected: Expected | None) -> Machine:
    """The machine of which rows are. Raises UserError where none is named."""
    if expected is None or expected.machine is None:
        raise UserError(
            "--write-hardware: rows are those of a machine: set machine in the cluster config, or"
            " give --machine with --from"
        )
    return expected.machine


def _bandwidths(outcome: Outcome, machine: Machine) -> Iterator[dict[str, Any]]:
    assert outcome.expected is not None
    curves: dict[_Place, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for each in measured_collectives(outcome.evidence):
        usable = not each.problems and not each.doubts and not each.wrong
        if usable and each.collective in get_args(Collective):
            for size, values in each.bus.items():
                if size % MIB == 0:
                    curve = curves[str(each.collective), len(each.nodes)]
                    curve[size // MIB].append(median(values))
    for (collective, nodes), curve in sorted(curves.items(), key=lambda one: one[0][::-1]):
        by_size = {size: round(median(found), 3) for size, found in sorted(curve.items())}
        keys: dict[tuple[str, str, bool], None] = {("machine", machine.name, False): None}
        for row in reference_rows(outcome.expected, collective, nodes):
            field = "machine" if row.machine is not None else "accelerator"
            keys[field, str(row.machine or row.accelerator), row.in_network] = None
        for field, named, in_network in keys:
            yield {
                field: named,
                "collective": collective,
                "nodes": nodes,
                "num_accelerators": nodes * machine.num_accelerators,
                **({"in_network": True} if in_network else {}),
                "gb_per_s": by_size,
            }


def _accelerators(outcome: Outcome) -> Iterator[dict[str, Any]]:
    """Rates of the accelerator: the median over nodes of what their slowest devices reach."""
    assert outcome.expected is not None
    accelerator = outcome.expected.accelerator
    rates: dict[str, list[float]] = defaultdict(list)
    copies: dict[str, list[float]] = defaultdict(list)
    for each in outcome.results:
        if not isinstance(each.observed, float):
            continue
        if each.check == device_rates.MATMUL.name:
            rates[each.metric.removeprefix("matmul ")].append(each.observed)
        elif each.check == device_rates.HOST_DEVICE.name:
            copies[each.metric].append(each.observed)
    if accelerator is None or not accelerator.peak_tflops or not (rates or copies):
        return
    row: dict[str, Any] = {"name": accelerator.name}
    if rates:
        row["achievable_tflops"] = {
            kind: round(median(found), 3) for kind, found in sorted(rates.items())
        }
    if copies:
        row["host_device_gb_per_s"] = round(min(map(median, copies.values())), 3)
    yield row
