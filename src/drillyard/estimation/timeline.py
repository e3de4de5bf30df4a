"""Transfers of FSDP between GPUs, how long they take, and how they overlap with computing.

Each unit (a block, or the root) is gathered in the compute precision, or in fp8, before its forward
and again before its backward, unless its weights are kept between the two; frozen weights that
every rank holds whole are not. Its gradients are reduced and scattered in the master precision.
With several copies of the model (HSDP) the shards' gradients are then summed over the copies.
Messages are as large as a unit, and the bandwidth is that of messages of that size
(`hardware/bandwidths.yaml`).

Where nothing was measured, the bound that line rates allow is taken, and the quantity is called
optimistic. A GPU that must receive (n - 1)/n of a message gets it over its link and its NIC
together, so no bus bandwidth is above their sum; of k nodes each must take in (k - 1)/k of it over
its NICs (`bus_bandwidth_bound`). Messages below the smallest size that was measured ramp up as t0 +
size / bandwidth does: half of the bandwidth is reached at HALF_SPEED_MIB, as on machines that were
measured down to small messages.

FSDP2 gathers the next block while one computes and scatters the gradients of the last one, so of
each block's forward and backward the longer of computing and communicating counts. The root is
gathered before anything can compute and scattered when nothing is left to, as is the first block's
gather. The optimizer comes last, alone. (A model of which only counts are known is one piece, so
its communication is hidden too.)

    seconds(x) = sum over pieces of max(x * busy, communication) + fixed + x * alone,    x = 1 / efficiency

`busy` and `alone` are what FLOPs and bytes take at the best rates that are known for the
accelerator; `efficiency` is the share of these rates that a run reaches. The sum is increasing and
convex in x, so a measured time gives the efficiency exactly, by Newton's method from above in as
many steps as there are pieces, or fewer.

Limits: no contention with other jobs, no stragglers, and no time lost where ranks wait for one
another.
"""  # noqa: E501

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from drillyard.estimation.setup import Setup
from drillyard.estimation.step_work import UnitWork, Work, optimizer_bytes
from drillyard.hardware import Accelerator, Bandwidth, Fact, FactSource, Machine
from drillyard.hardware.bandwidths import (
    MIB,
    Collective,
    bus_bandwidth,
    bus_bandwidth_bound,
    bus_factor,
)
from drillyard.hardware.facts import Provenance, combine

GIGA: Final = 1e9
HALF_SPEED_MIB: Final = 32
"""Size for half of the final bandwidth of collectives between nodes: the median of `size (final /
bandwidth - 1)` over the curves of bandwidths.yaml is 31 MiB (18 to 43 on A4, A3 Mega and
gpu-h100-sxm, 29 to 123 on p5)."""
RAMP: Final = FactSource("smaller messages than were measured: ramp of other machines", None, True)
LINE_RATE: Final = FactSource(
    "line rate: nothing was measured for this machine, collective and number of nodes", None, True
)
HOST_LINK: Final = FactSource("GPUs of a node joined by their host links alone", None, True)
ANY_HOST: Final = FactSource("any host with this accelerator", None)


@dataclass(frozen=True, slots=True)
class CollectiveNetwork:
    """Network between ranks. `machine` is None where only the number of GPUs in a node is known."""

    accelerator: Accelerator
    machine: Machine | None
    gpus_per_node: int
    bandwidths: tuple[Bandwidth, ...]

    def seconds(self, collective: Collective, ranks: int, size_bytes: float) -> Fact[float] | None:
        """Time of one collective of `size_bytes` (as nccl-tests count them) over `ranks`
        neighbouring ranks.

        0 for one rank; None where no bandwidth is known at all.
        """
        if ranks == 1 or size_bytes == 0:
            return Fact(0.0, ())
        bandwidth = self.bus_gb_per_s(collective, ranks, size_bytes)
        if bandwidth is None:
            return None
        return combine(
            size_bytes * bus_factor(collective, ranks) / (bandwidth.value * GIGA), bandwidth
        )

    def bus_gb_per_s(
        self, collective: Collective, ranks: int, size_bytes: float
    ) -> Fact[float] | None:
        """Measured, or what line rates allow; None where neither is known."""
        nodes = -(-ranks // self.gpus_per_node)
        host = self.machine or unknown_host(self.accelerator, self.gpus_per_node)
        if (
            measured := bus_bandwidth(self.bandwidths, host, collective, nodes, size_bytes)
        ) is not None:
            is_small = size_bytes < MIB * min(measured.row.gb_per_s)
            return _ramped(measured.row, size_bytes) if is_small else measured.gb_per_s
        link = self._link(collective, ranks)
        if nodes == 1 or ranks <= (host.link_domain_accelerators or 0):
            return None if link is None else combine(link.value, link, LINE_RATE)
        nic = host.nic_gb_per_s_per_accelerator()
        between = bus_bandwidth_bound(host, self.accelerator, collective, nodes)
        if nic is None or between is None:
            return None
        together = nic if link is None else nic + link
        return combine(min(between.value, together.value), between, together, LINE_RATE)

    def _link(self, collective: str, ranks: int) -> Fact[float] | None:
        """One direction of a GPU's link to its neighbours, of the host's where it has none of its
        own."""
        link = self.accelerator.one_way_link_gb_per_s()
        if link is None and self.accelerator.host_link_gb_per_s is not None:
            host_link: Fact[float] = self.accelerator.fact("host_link_gb_per_s")
            link = combine(host_link.value, host_link, HOST_LINK)
        return (
            link
            if link is None or collective != "all_reduce"
            else link * bus_factor(collective, ranks)
        )


def _ramped(row: Bandwidth, size_bytes: float) -> Fact[float]:
    """The bandwidth below the smallest size of `row`, from the one at that size."""
    smallest, size = min(row.gb_per_s), size_bytes / MIB
    share = size / (size + HALF_SPEED_MIB) * (smallest + HALF_SPEED_MIB) / smallest
    return combine(row.bus_gb_per_s(smallest * MIB).value * share, row.fact("gb_per_s"), RAMP)


@dataclass(frozen=True, slots=True)
class UnitTraffic:
    """Seconds of one unit's collectives in one micro-batch: next to its forward and to its
    backward."""

    forward: float
    backward: float


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """Collectives of a step, unit by unit in the order of `Work.units`, with everything that they
    rest on."""

    units: tuple[UnitTraffic, ...]
    basis: Fact[None]


def unknown_host(accelerator: Accelerator, gpus: int) -> Machine:
    """A node with that many of the accelerator, of which nothing else is known."""
    fields = {
        "accelerator": accelerator.name,
        "num_accelerators": gpus,
        "network_stack": "ethernet",
    }
    return Machine.create(Provenance(ANY_HOST), name="", **fields)


def step_traffic(setup: Setup, work: Work, network: CollectiveNetwork) -> StepTraffic | None:
    """Collectives of one micro-batch; None where ranks are joined by something of which nothing is
    known."""
    facts: list[Fact[float]] = []
    units: list[UnitTraffic] = []
    for unit in work.units:
        gather = network.seconds("all_gather", setup.shard, work.gathered_bytes(unit))
        scatter = network.seconds("reduce_scatter", setup.shard, unit.trainable * work.master_bytes)
        copies = _copies_seconds(setup, work, network, unit)
        if gather is None or scatter is None or copies is None:
            return None
        facts += [gather, scatter, copies]
        again = 0.0 if setup.keeps_unsharded or unit is work.root else gather.value
        units.append(UnitTraffic(gather.value, again + scatter.value + copies.value))
    return StepTraffic(tuple(units), combine(None, *facts))


def _copies_seconds(
    setup: Setup, work: Work, network: CollectiveNetwork, unit: UnitWork
) -> Fact[float] | None:
    """The sum of a unit's gradients over the copies of the model.

    The copies of one shard lie `shard` ranks apart, and the GPUs of a node reduce their shards at
    the same time: together an all_reduce of what a node holds of the unit, over the nodes that hold
    the same.
    """
    if setup.replicate == 1:
        return Fact(0.0, ())
    held = min(setup.shard, setup.gpus_per_node) / setup.shard
    ranks = (
        min(setup.shard, setup.gpus_per_node) * setup.replicate
        if setup.shard >= setup.gpus_per_node
        else 0
    )
    return network.seconds(
        "all_reduce", ranks or setup.world_size, held * unit.trainable * work.master_bytes
    )


@dataclass(frozen=True, slots=True)
class Rates:
    """The best that an accelerator is known to do: FLOP/s of matrix products, by `kind`, and
    bytes/s of its memory. `fp8`: FLOP/s of those that are done in fp8, where some are."""

    kind: Literal["achievable", "peak"]
    flops: Fact[float]
    memory: Fact[float]
    fp8: Fact[float] | None = None

    def seconds(self, flops: float, moved_bytes: float, fp8_flops: float = 0.0) -> float:
        """Products and elementwise kernels run one after the other, on one stream. `fp8_flops` are
        those of `flops` that are done in fp8."""
        seconds = (flops - fp8_flops) / self.flops.value + moved_bytes / self.memory.value
        return seconds if self.fp8 is None else seconds + fp8_flops / self.fp8.value


@dataclass(frozen=True, slots=True)
class TimelinePiece:
    """`count` times in a step: seconds of computing at the best rates, next to seconds of
    communication."""

    count: int
    busy: float
    communication: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A step as pieces; `fixed` is communication that nothing hides, `alone` computing without
    communication."""

    pieces: tuple[TimelinePiece, ...]
    fixed: float
    alone: float

    def seconds(self, efficiency: float, network_slowdown: float = 1.0) -> float:
        """The step at `efficiency`, above 0, with communication that takes `network_slowdown` times
        as long."""
        return self._at(1 / efficiency, network_slowdown)

    def exposed(self, efficiency: float) -> float:
        """Seconds of communication that computing does not hide."""
        slower = 1 / efficiency
        return self.fixed + sum(
            p.count * max(0.0, p.communication - slower * p.busy) for p in self.pieces
        )

    def efficiency(self, seconds: float) -> float | None:
        """The efficiency at which the step takes `seconds`; None where communication alone takes as
        long."""
        work = self.alone + sum(piece.count * piece.busy for piece in self.pieces)
        slower = (seconds - self.fixed) / work if work else 0.0
        if slower <= 0:
            return None
        for _ in range(len(self.pieces) + 1):
            slope = self.alone + sum(
                p.count * p.busy for p in self.pieces if slower * p.busy >= p.communication
            )
            beyond = self._at(slower) - seconds
            if beyond <= 1e-12 * seconds:
                break
            if slope == 0:
                return None
            slower -= beyond / slope
            if slower <= 0:
                return None
        return 1 / slower

    def _at(self, slower: float, network_slowdown: float = 1.0) -> float:
        pieces = sum(
            p.count * max(slower * p.busy, network_slowdown * p.communication) for p in self.pieces
        )
        return pieces + network_slowdown * self.fixed + slower * self.alone


def timeline(setup: Setup, work: Work, traffic: StepTraffic | None, rates: Rates) -> Timeline:
    """The pieces of a step; without `traffic` as if ranks needed nothing of one another."""
    tokens, times = work.tokens / work.micro_batches, work.micro_batches
    pieces: list[TimelinePiece] = []
    fixed = 0.0
    alone = rates.seconds(0.0, optimizer_bytes(setup, work.trainable // setup.shard))
    for index, unit in enumerate(work.units):
        there, back = unit_copies(setup, work, unit)
        forward = rates.seconds(
            tokens * unit.forward_flops,
            tokens * unit.forward_bytes + there,
            tokens * unit.forward_fp8,
        )
        backward = rates.seconds(
            tokens * unit.backward_flops,
            tokens * unit.backward_bytes + back,
            tokens * unit.backward_fp8,
        )
        ahead, behind = (
            (traffic.units[index].forward, traffic.units[index].backward) if traffic else (0.0, 0.0)
        )
        if unit is work.root and work.blocks:
            alone += times * (forward + backward)
            fixed += times * (ahead + behind)
            continue
        pieces += [
            TimelinePiece(times * unit.count, forward, ahead),
            TimelinePiece(times * unit.count, backward, behind),
        ]
        fixed += times * ahead if index == 0 and work.blocks else 0.0
    return Timeline(tuple(pieces), fixed, alone)


def unit_copies(setup: Setup, work: Work, unit: UnitWork) -> tuple[float, float]:
    """Bytes that FSDP2 itself moves in device memory for a unit and micro-batch, forward and
    backward.

    A gather casts the local shard from the master to the compute precision (read, write) and copies
    the gathered buffer into the weights (read, write); a reduction casts the gradients into a
    buffer of the master precision. What is gathered in fp8 is rounded to the compute precision,
    scaled in fp32 and cast, and read once a step for its scale (models/fp8_gather.py). A rank that
    is alone and holds its weights whole has no FSDP2:
    it casts those that are trained once a step, and their gradients with several micro-batches.
    """
    low, high = work.compute_bytes, work.master_bytes
    if setup.holds_whole:
        cast = unit.trainable * (low + high) if low != high else 0
        return cast / work.micro_batches, 0.0 if setup.keeps_gradients_narrow else cast
    whole = work.gathered_bytes(unit)
    fp8 = unit.gathered_fp8 / setup.shard
    in_compute = (whole - unit.gathered_fp8) / low / setup.shard * (low + high)
    in_fp8 = fp8 * ((high + low) + (low + 4) + (4 + 1))
    gather = in_compute + in_fp8 + (2 * whole if setup.shard > 1 else 0)
    again = 0.0 if setup.keeps_unsharded or unit is work.root else gather
    once = fp8 * high / work.micro_batches
    return gather + once, again + unit.trainable * (low + high)
