"""How the work of a step and its collectives lie beside each other in time.

FSDP2 gathers the next block while one computes and scatters the gradients of the last one, so of each block's forward
and backward the longer of computing and communicating counts. The root is gathered before anything can compute and
scattered when nothing is left to, as is the first block's gather. The optimizer comes last, alone. (A model of which
only counts are known is one piece, so that its blocks, which nobody has described, hide their communication too.)

    seconds(x) = sum over pieces of max(x * busy, communication) + fixed + x * alone,    x = 1 / efficiency

`busy` and `alone` are what FLOPs and bytes take at the best rates that are known for the accelerator; `efficiency` is
the share of these rates that a run reaches. The sum is increasing and convex in x, so a measured time gives the
efficiency exactly, by Newton's method from above in as many steps as there are pieces, or fewer.
"""

from __future__ import annotations

from dataclasses import dataclass

from drillyard.estimation.communication import StepTraffic
from drillyard.estimation.setup import Setup
from drillyard.estimation.step_work import UnitWork, Work, optimizer_bytes


@dataclass(frozen=True, slots=True)
class Rates:
    """The best that the accelerator is known to do: FLOP/s of matrix products, bytes per second of device memory."""

    flops_per_second: float
    bytes_per_second: float

    def seconds(self, flops: float, moved_bytes: float) -> float:
        """Products and elementwise kernels run one after the other, on one stream."""
        return flops / self.flops_per_second + moved_bytes / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class TimelinePiece:
    """`count` times in a step: seconds of computing at the best rates, beside seconds of communication."""

    count: int
    busy: float
    communication: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A step as pieces; `fixed` is communication that nothing hides, `alone` computing beside no communication."""

    pieces: tuple[TimelinePiece, ...]
    fixed: float
    alone: float

    def seconds(self, efficiency: float, network_slowdown: float = 1.0) -> float:
        """The step at `efficiency`, above 0, with communication that takes `network_slowdown` times as long."""
        return self._at(1 / efficiency, network_slowdown)

    def exposed(self, efficiency: float) -> float:
        """Seconds of communication that computing does not hide."""
        slower = 1 / efficiency
        return self.fixed + sum(p.count * max(0.0, p.communication - slower * p.busy) for p in self.pieces)

    def efficiency(self, seconds: float) -> float | None:
        """The efficiency at which the step takes `seconds`; None where communication alone takes as long."""
        work = self.alone + sum(piece.count * piece.busy for piece in self.pieces)
        slower = (seconds - self.fixed) / work if work else 0.0
        if slower <= 0:
            return None
        for _ in range(len(self.pieces) + 1):
            slope = self.alone + sum(p.count * p.busy for p in self.pieces if slower * p.busy >= p.communication)
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
        pieces = sum(p.count * max(slower * p.busy, network_slowdown * p.communication) for p in self.pieces)
        return pieces + network_slowdown * self.fixed + slower * self.alone


def timeline(setup: Setup, work: Work, traffic: StepTraffic | None, rates: Rates) -> Timeline:
    """The pieces of a step; without `traffic` as if ranks needed nothing of one another."""
    tokens, times = work.tokens / work.micro_batches, work.micro_batches
    pieces: list[TimelinePiece] = []
    fixed = 0.0
    alone = rates.seconds(0.0, optimizer_bytes(setup, work.trainable // setup.shard))
    for index, unit in enumerate(work.units):
        there, back = unit_copies(setup, work, unit)
        forward = rates.seconds(tokens * unit.forward_flops, tokens * unit.forward_bytes + there)
        backward = rates.seconds(tokens * unit.backward_flops, tokens * unit.backward_bytes + back)
        ahead, behind = (traffic.units[index].forward, traffic.units[index].backward) if traffic else (0.0, 0.0)
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
    """Bytes that FSDP2 itself moves in device memory for a unit and micro-batch, forward and backward.

    A gather casts the local shard from the master to the compute precision (read, write) and copies the gathered buffer
    into the weights (read, write); a reduction casts the gradients into a buffer of the master precision.
    """
    low, high = work.compute_bytes, work.master_bytes
    gather = unit.parameters / setup.shard * (low + high) + (2 * low * unit.parameters if setup.shard > 1 else 0)
    again = 0.0 if setup.keeps_unsharded or unit is work.root else gather
    return gather, again + unit.trainable * (low + high)
