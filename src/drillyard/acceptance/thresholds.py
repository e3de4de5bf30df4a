"""Thresholds of collectives: a fraction of a measured row of bandwidths.yaml, or of this cluster's
earlier run.

The fraction is above 7/8: a node that lost one NIC of eight falls below it. Large messages decide,
because small ones measure latency. A row counts for the machine, the collective, the number of
nodes and the sizes that were measured, and for nothing else: `bus_bandwidth` also answers with a
row of fewer nodes or a curve's continuation, which is good for an estimate and not for a judgement.
Rows of `role: minimum` are what others accept. They are quoted and never used: three of them let a
dead NIC pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, get_args

from drillyard.acceptance.results import Status, Threshold
from drillyard.hardware.bandwidths import (
    MIB,
    Bandwidth,
    BusBandwidth,
    Collective,
    bus_bandwidth,
    bus_bandwidth_bound,
)
from drillyard.hardware.facts import cited
from drillyard.hardware.machines import Machine

if TYPE_CHECKING:
    from drillyard.acceptance.check import Expected

FRACTION: Final = 0.9
"""Of the reference. Above 7/8, so that one NIC of eight lost fails; the rest is left to the
difference between healthy clusters."""
CPU_FRACTION: Final = 0.5
"""Of a baseline of nodes without accelerators: their ranks share cores with all that runs there."""
LARGE_MIB: Final = 1024
"""From here on messages decide, or from the row's largest where that is smaller."""
SIZE_TOLERANCE: Final = 1.05
"""Between a size and a row's: 1 GB of one program is 1000 MiB, of another 1 GiB."""
UNIT: Final = "GB/s"


@dataclass(frozen=True, slots=True)
class NoReference:
    """Why a figure cannot be judged."""

    reason: str


def collective_threshold(
    expected: Expected, collective: str, num_nodes: int, size_bytes: int
) -> Threshold | NoReference:
    """The least bus bandwidth of messages of `size_bytes` on `num_nodes` healthy nodes."""
    machine = expected.machine
    if machine is None or expected.accelerator is None:
        return NoReference("no machine is named, so there is no reference")
    rows = expected.catalog.bandwidths
    found = bus_bandwidth(
        (row for row in rows if row.nodes == num_nodes and _covers(row, size_bytes)),
        machine, collective, num_nodes, size_bytes,
    )  # fmt: skip
    what = f"{collective} on {nodes_text(num_nodes)} of {machine.name}"
    if found is None:
        return NoReference(
            f"no measured row of {what} at {size_text(size_bytes)}"
            f"{_nearest(rows, machine, collective, num_nodes, size_bytes)}"
        )
    reference = found.gb_per_s.value
    bound = bus_bandwidth_bound(machine, expected.accelerator, collective, num_nodes)
    source = f"{_named(found.row)}: {cited(found.row, 'gb_per_s')}"
    if bound is not None and reference > bound.value:
        return NoReference(
            f"the row of {what} has {reference:.1f} {UNIT}, and line rates allow"
            f" {bound.value:.1f}: it is not a reference ({source})"
        )
    return Threshold(
        FRACTION * reference, UNIT, True, source, reference, None if bound is None else bound.value
    )


def baseline_threshold(expected: Expected, least: float, metric: str) -> Threshold:
    """A limit from an earlier run of this cluster, whose slowest repeat gave `least`."""
    gpus = expected.accelerator is not None and bool(expected.accelerator.peak_tflops)
    source = f"baseline: {metric}, the least of its repeats"
    return Threshold((FRACTION if gpus else CPU_FRACTION) * least, UNIT, True, source, least)


def deciding_size(
    expected: Expected, collective: str, num_nodes: int, sizes: Iterable[int]
) -> int | NoReference:
    """The largest of the measured `sizes` (bytes) for which there is a threshold."""
    why: NoReference | None = None
    for size in sorted(sizes, reverse=True):
        found = collective_threshold(expected, collective, num_nodes, size)
        if isinstance(found, Threshold):
            if size * SIZE_TOLERANCE >= _large_from(expected, collective, num_nodes) * MIB:
                return size
            return NoReference(
                f"{size_text(size)} is the largest message that was measured and has a reference;"
                f" from {_large_from(expected, collective, num_nodes)} MiB on messages decide"
            )
        why = why or found
    return why or NoReference("no message was measured")


def reference_rows(expected: Expected, collective: str, num_nodes: int) -> list[Bandwidth]:
    """The measured rows of exactly this machine, collective and number of nodes."""
    machine = expected.machine
    if machine is None:
        return []
    return [
        row
        for row in expected.catalog.bandwidths
        if row.nodes == num_nodes
        and bus_bandwidth([row], machine, collective, num_nodes, MIB) is not None
    ]


def required_sizes(expected: Expected, num_nodes: int) -> dict[str, tuple[int, ...]]:
    """By collective that has a row for so many nodes: the sizes in bytes that decide."""
    found: dict[str, tuple[int, ...]] = {}
    for collective in get_args(Collective):
        rows = reference_rows(expected, collective, num_nodes)
        if rows:
            sizes = {max(row.gb_per_s) for row in rows}
            found[collective] = tuple(size * MIB for size in sorted(sizes))
    return found


def reference_curve(
    expected: Expected, collective: str, num_nodes: int
) -> tuple[tuple[float, float], ...]:
    """(bytes, GB/s) of the rows, the fastest at each size, in order of size."""
    points: dict[int, float] = {}
    for row in reference_rows(expected, collective, num_nodes):
        for size in row.gb_per_s:
            value = row.bus_gb_per_s(size * MIB).value
            points[size * MIB] = max(value, points.get(size * MIB, 0.0))
    return tuple((float(size), points[size]) for size in sorted(points))


def accepted_elsewhere(expected: Expected, collective: str, num_nodes: int) -> list[str]:
    """What rows of `role: minimum` say that others accept. Quoted, never used."""
    machine = expected.machine
    return [
        f"others accept from {max(row.gb_per_s.values()):g} {UNIT} ({cited(row, 'gb_per_s')})"
        for row in expected.catalog.bandwidths
        if machine is not None
        and row.role == "minimum"
        and row.collective == collective
        and row.nodes == num_nodes
        and row.num_accelerators == num_nodes * machine.num_accelerators
        and (row.machine == machine.name or row.accelerator == machine.accelerator)
    ]


def lost_nic_text(machine: Machine | None, num_nodes: int, reference: float) -> str:
    """What a node would reach that lost one of its NICs; empty where NICs carry nothing."""
    count = 0 if machine is None else machine.data_nics.count
    if num_nodes == 1 or count < 2:
        return ""
    return (
        f"one of {count} NICs lost would give {reference * (count - 1) / count:.4g} {UNIT}"
        f" ({count - 1}/{count} of the reference)"
    )


def judged(
    values: Sequence[float], threshold: Threshold
) -> tuple[Status, float, tuple[float, float]]:
    """Status, median and interval of repeated measurements of one figure.

    The interval is from the least to the greatest of n repeats; it covers the median with a
    probability of 1 - 2^(1-n). A fail needs all of it on the wrong side. Where only the median is,
    the repeats do not agree and the figure is `incomplete`.
    """
    ordered = sorted(values)
    middle = len(ordered) // 2
    median = (ordered[middle] + ordered[-1 - middle]) / 2
    low, high = ordered[0], ordered[-1]
    if threshold.at_least:
        good, bad = median >= threshold.value, high < threshold.value
    else:
        good, bad = median <= threshold.value, low > threshold.value
    status = Status.passed if good else Status.fail if bad else Status.incomplete
    return status, median, (low, high)


def size_text(size_bytes: float) -> str:
    """`8 GiB`, `1000 MiB`."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= unit and size_bytes % unit == 0:
            return f"{size_bytes // unit:g} {name}"
    return f"{size_bytes / MIB:.1f} MiB" if size_bytes >= MIB else f"{size_bytes:g} bytes"


def nodes_text(num_nodes: int) -> str:
    """`one node`, `2 nodes`."""
    return "one node" if num_nodes == 1 else f"{num_nodes} nodes"


def _covers(row: Bandwidth, size_bytes: int) -> bool:
    size = size_bytes / MIB
    return min(row.gb_per_s) / SIZE_TOLERANCE <= size <= max(row.gb_per_s) * SIZE_TOLERANCE


def _large_from(expected: Expected, collective: str, num_nodes: int) -> int:
    """MiB. Of several rows, those of smaller sizes alone lower it."""
    rows = reference_rows(expected, collective, num_nodes)
    return min([LARGE_MIB, *(max(row.gb_per_s) for row in rows)])


def _named(row: Bandwidth) -> str:
    added_up = ", added up by the switch" if row.in_network else ""
    return f"{row.collective}, {row.machine or row.accelerator}, {nodes_text(row.nodes)}{added_up}"


def _nearest(
    rows: Iterable[Bandwidth], machine: Machine, collective: str, num_nodes: int, size_bytes: int
) -> str:
    """The row that an estimate would use, named with what it was measured at."""
    found: BusBandwidth | None = bus_bandwidth(rows, machine, collective, num_nodes, size_bytes)
    if found is None:
        return ""
    sizes = ", ".join(size_text(size * MIB) for size in sorted(found.row.gb_per_s))
    return f"; the nearest row has {_named(found.row)}, {sizes}"
