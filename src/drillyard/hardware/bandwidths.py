"""Reference bandwidths of collectives, the curve between measured sizes, and the bound that no
measurement may exceed.

Bus bandwidth is what nccl-tests calls it: algbw, the bytes of the collective over its time, times a
factor that makes collectives comparable (2(n-1)/n for all_reduce, (n-1)/n for the others, n ranks).
It is not a wire speed: between nodes it exceeds the NICs' rate, because only part of the traffic
crosses nodes. The facts are in bandwidths.yaml.

Limits: one row per machine, collective and number of nodes. For more nodes than were measured, the
largest measurement counts, and its row states it. One collective is never taken for another: on one
machine they differ twofold.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from drillyard.hardware.accelerators import Accelerator
from drillyard.hardware.facts import CatalogRow, Fact, combine
from drillyard.hardware.machines import Machine

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "alltoall"]
MIB = 2**20


class Bandwidth(CatalogRow):
    """Bus (or algorithm) bandwidth in GB/s by message size in MiB; `latency_us` is the time of tiny
    messages."""

    collective: Collective
    nodes: PositiveInt
    num_accelerators: PositiveInt
    gb_per_s: dict[PositiveInt, PositiveFloat]
    machine: str | None = None
    accelerator: str | None = None
    figure: Literal["busbw", "algbw"] = "busbw"
    role: Literal["measured", "minimum"] = "measured"
    in_network: bool = False
    latency_us: PositiveFloat | None = None

    def bus_gb_per_s(self, size_bytes: float) -> Fact[float]:
        """Bus bandwidth for messages of `size_bytes`.

        Between measured sizes it is interpolated in log size and log bandwidth; below the smallest
        it falls in proportion to the size (the time is that of the smallest); above the largest it
        is constant.
        """
        sizes = sorted(self.gb_per_s)
        factor = (
            1.0 if self.figure == "busbw" else bus_factor(self.collective, self.num_accelerators)
        )
        size_mib = size_bytes / MIB
        at = bisect_left(sizes, size_mib)
        if at == 0:
            value = self.gb_per_s[sizes[0]] * min(1.0, size_mib / sizes[0])
        elif at == len(sizes):
            value = self.gb_per_s[sizes[-1]]
        else:
            small, large = sizes[at - 1], sizes[at]
            share = math.log(size_mib / small) / math.log(large / small)
            value = float(self.gb_per_s[small] ** (1 - share) * self.gb_per_s[large] ** share)
        return combine(value * factor, self.fact("gb_per_s"))


@dataclass(frozen=True, slots=True)
class BusBandwidth:
    """A bandwidth and its row, which has the number of measured nodes."""

    gb_per_s: Fact[float]
    row: Bandwidth


_AS_FAST_AS_A_LINK = ("broadcast", "reduce", "sendrecv", "hypercube")


def bus_factor(collective: str, ranks: int) -> float:
    """busbw over algbw for `ranks` ranks, by the definitions of nccl-tests (doc/PERFORMANCE.md)."""
    if collective in _AS_FAST_AS_A_LINK:
        return 1.0
    return 2 * (ranks - 1) / ranks if collective == "all_reduce" else (ranks - 1) / ranks


def bus_bandwidth(
    rows: Iterable[Bandwidth], machine: Machine, collective: str, num_nodes: int, size_bytes: float
) -> BusBandwidth | None:
    """Bandwidth measured on `machine`, or for one node on any host with as many of its GPUs; None
    if there is none.

    Of several rows, take the one with the most nodes up to `num_nodes`; of those the fastest.
    """
    found = [
        BusBandwidth(row.bus_gb_per_s(size_bytes), row)
        for row in rows
        if row.collective == collective
        and row.role == "measured"
        and (row.nodes == 1 if num_nodes == 1 else 1 < row.nodes <= num_nodes)
        and row.num_accelerators == row.nodes * machine.num_accelerators
        and (
            row.machine == machine.name
            or (row.nodes == 1 and row.accelerator == machine.accelerator)
        )
    ]
    return max(found, key=lambda one: (one.row.nodes, one.gb_per_s.value), default=None)


def bus_bandwidth_bound(
    machine: Machine, accelerator: Accelerator, collective: str, num_nodes: int
) -> Fact[float] | None:
    """The bus bandwidth in GB/s that line rates allow, n GPUs on k nodes of g GPUs each; None where
    no rate is known.

    Between nodes, with b the NIC rate per GPU: b (n-1)/(k-1), for alltoall b (n-1)/(n-g): the share
    of the traffic that must leave a node, spread over its NICs. In one node, or where one NVLink
    domain joins them, the one-way rate of the GPU's link; all_reduce may reach 2(n-1)/n times that
    where the switch adds up.
    """
    per_node, ranks = machine.num_accelerators, machine.num_accelerators * num_nodes
    if num_nodes == 1 or ranks <= (machine.link_domain_accelerators or 0):
        link = accelerator.one_way_link_gb_per_s()
        if link is None or ranks == 1:
            return None
        return link * (bus_factor(collective, ranks) if collective == "all_reduce" else 1.0)
    nic = machine.nic_gb_per_s_per_accelerator()
    if nic is None:
        return None
    leaving = (ranks - per_node) if collective == "alltoall" else (num_nodes - 1)
    return nic * (ranks - 1) / leaving
