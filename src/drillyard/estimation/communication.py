"""What FSDP moves between GPUs, and how long that takes on a machine's own measured bandwidths.

Each unit (a block, or the root) is gathered in the compute precision before its forward and again before its backward,
unless its weights are kept between the two; its gradients are reduced and scattered in the master precision. With
several copies of the model (HSDP) the shards' gradients are then summed over the copies. Messages are as large as a
unit, and the bandwidth is that of messages of that size (`hardware/bandwidths.yaml`).

Where nothing was measured, the bound that line rates allow is taken, and the term says so: it is optimistic. A GPU that
must receive (n - 1)/n of a message gets it over its link and its NIC together, so no bus bandwidth is above their sum;
of k nodes each must take in (k - 1)/k of it over its NICs (`bus_bandwidth_bound`).

Messages below the smallest size that was measured ramp up as t0 + size / bandwidth does: half of the bandwidth is
reached at HALF_SPEED_MIB, as on machines that were measured down to small messages.

Limits: no contention with other jobs, no stragglers, and no time lost where ranks wait for one another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from drillyard.estimation.setup import Setup
from drillyard.estimation.step_work import UnitWork, Work
from drillyard.hardware import Accelerator, Bandwidth, Fact, FactSource, Machine
from drillyard.hardware.bandwidths import MIB, Collective, bus_bandwidth, bus_bandwidth_bound, bus_factor
from drillyard.hardware.facts import Provenance, combine

GIGA: Final = 1e9
HALF_SPEED_MIB: Final = 32
"""Where collectives between nodes reach half of their final bandwidth: the median of `size (final / bandwidth - 1)`
over the curves of bandwidths.yaml is 31 MiB (18 to 43 on A4, A3 Mega and gpu-h100-sxm, 29 to 123 on p5)."""
RAMP: Final = FactSource("smaller messages than were measured: ramp of other machines", None, True)
LINE_RATE: Final = FactSource(
    "line rate: nothing was measured for this machine, collective and number of nodes", None, True
)
HOST_LINK: Final = FactSource("GPUs of a node joined by their host links alone", None, True)
ANY_HOST: Final = FactSource("any host with this accelerator", None)


@dataclass(frozen=True, slots=True)
class CollectiveNetwork:
    """How ranks reach each other. `machine` is None where only the number of GPUs in a node is known."""

    accelerator: Accelerator
    machine: Machine | None
    gpus_per_node: int
    bandwidths: tuple[Bandwidth, ...]

    def seconds(self, collective: Collective, ranks: int, size_bytes: float) -> Fact[float] | None:
        """Time of one collective of `size_bytes` (as nccl-tests count them) over `ranks` neighbouring ranks.

        0 for one rank; None where no bandwidth is known at all.
        """
        if ranks == 1 or size_bytes == 0:
            return Fact(0.0, ())
        bandwidth = self.bus_gb_per_s(collective, ranks, size_bytes)
        if bandwidth is None:
            return None
        return combine(size_bytes * bus_factor(collective, ranks) / (bandwidth.value * GIGA), bandwidth)

    def bus_gb_per_s(self, collective: Collective, ranks: int, size_bytes: float) -> Fact[float] | None:
        """Measured, or what line rates allow; None where neither is known."""
        nodes = -(-ranks // self.gpus_per_node)
        host = self.machine or unknown_host(self.accelerator, self.gpus_per_node)
        measured = bus_bandwidth(self.bandwidths, host, collective, nodes, size_bytes)
        if measured is not None:
            return (
                _ramped(measured.row, size_bytes)
                if size_bytes < MIB * min(measured.row.gb_per_s)
                else measured.gb_per_s
            )
        link = self._link(collective, ranks)
        if nodes == 1 or ranks <= (host.link_domain_accelerators or 0):
            return None if link is None else combine(link.value, link, Fact(None, (LINE_RATE,)))
        nic, between = (
            host.nic_gb_per_s_per_accelerator(),
            bus_bandwidth_bound(host, self.accelerator, collective, nodes),
        )
        if nic is None or between is None:
            return None
        together = nic if link is None else nic + link
        return combine(min(between.value, together.value), between, together, Fact(None, (LINE_RATE,)))

    def _link(self, collective: str, ranks: int) -> Fact[float] | None:
        """One direction of a GPU's link to its neighbours, of the host's where it has none of its own."""
        link = self.accelerator.one_way_link_gb_per_s()
        if link is None and self.accelerator.host_link_gb_per_s is not None:
            host_link: Fact[float] = self.accelerator.fact("host_link_gb_per_s")
            link = combine(host_link.value, host_link, Fact(None, (HOST_LINK,)))
        if link is None or collective != "all_reduce":
            return link
        return link * bus_factor(collective, ranks)


def _ramped(row: Bandwidth, size_bytes: float) -> Fact[float]:
    """The bandwidth below the smallest size of `row`, from the one at that size."""
    smallest, size = min(row.gb_per_s), size_bytes / MIB
    share = size / (size + HALF_SPEED_MIB) * (smallest + HALF_SPEED_MIB) / smallest
    return combine(row.bus_gb_per_s(smallest * MIB).value * share, row.fact("gb_per_s"), Fact(None, (RAMP,)))


@dataclass(frozen=True, slots=True)
class UnitTraffic:
    """Seconds of one unit's collectives in one micro-batch: beside its forward, and beside its backward."""

    forward: float
    backward: float


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """Collectives of a step, unit by unit in the order of `Work.units`, with everything that they rest on."""

    units: tuple[UnitTraffic, ...]
    basis: Fact[None]


def unknown_host(accelerator: Accelerator, gpus: int) -> Machine:
    """A node with that many of the accelerator, of which nothing else is known."""
    return Machine.create(
        Provenance(ANY_HOST),
        name="",
        accelerator=accelerator.name,
        num_accelerators=gpus,
        network_stack="ethernet",
    )


def step_traffic(setup: Setup, work: Work, network: CollectiveNetwork) -> StepTraffic | None:
    """Collectives of one micro-batch; None where ranks are joined by something of which nothing is known."""
    facts: list[Fact[float]] = []
    units: list[UnitTraffic] = []
    for unit in work.units:
        gather = network.seconds("all_gather", setup.shard, unit.parameters * work.compute_bytes)
        scatter = network.seconds("reduce_scatter", setup.shard, unit.trainable * work.master_bytes)
        copies = _copies_seconds(setup, work, network, unit)
        if gather is None or scatter is None or copies is None:
            return None
        facts += [gather, scatter, copies]
        again = 0.0 if setup.keeps_unsharded or unit is work.root else gather.value
        units.append(UnitTraffic(gather.value, again + scatter.value + copies.value))
    return StepTraffic(tuple(units), combine(None, *facts))


def _copies_seconds(setup: Setup, work: Work, network: CollectiveNetwork, unit: UnitWork) -> Fact[float] | None:
    """The sum of a unit's gradients over the copies of the model.

    The copies of one shard lie `shard` ranks apart, and the GPUs of a node reduce their shards at the same time:
    together an all_reduce of what a node holds of the unit, over the nodes that hold the same.
    """
    if setup.replicate == 1:
        return Fact(0.0, ())
    held = min(setup.shard, setup.gpus_per_node) / setup.shard
    ranks = min(setup.shard, setup.gpus_per_node) * setup.replicate if setup.shard >= setup.gpus_per_node else 0
    return network.seconds("all_reduce", ranks or setup.world_size, held * unit.trainable * work.master_bytes)
