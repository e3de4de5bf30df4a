"""The least time of each part of a training step on one rank: its floating-point operations at the
rate of a large product, plus the bytes that no product hides at the rate of a large copy.

FLOPs and bytes are those of `step_work`, counted from shapes; the rates are given, best as measured
on the same device a moment before. Of one stream, products and elementwise kernels run one after
the other, so their times add up. Limits: attention is taken at the rate of products (fused kernels
reach a third to two thirds of it on Hopper); a product too small to fill the device is slower;
communication between ranks, reading data and waiting have no bound here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from drillyard.estimation.setup import Setup
from drillyard.estimation.step_work import count_work, optimizer_bytes
from drillyard.estimation.timeline import unit_copies

Part = Literal["data", "forward", "loss", "backward", "gather and reduce", "optimizer", "waiting"]
PARTS: Final[tuple[Part, ...]] = get_args(Part)
"""A step's parts, in their order. `loss` is the head with the loss and, as its gradients are made
along with it, their products; `gather and reduce` is what FSDP2 does, or what stands in its place
on a rank that is alone; `waiting` is for other ranks."""


@dataclass(frozen=True, slots=True)
class PartWork:
    """FLOPs that a part executes on one rank in a step, bytes of device memory that it moves beside
    its products, and those of the FLOPs that are products in fp8."""

    flops: float
    moved_bytes: float
    fp8_flops: float = 0.0

    def seconds(
        self,
        flops_per_second: float,
        bytes_per_second: float,
        fp8_flops_per_second: float | None = None,
    ) -> float:
        """The least time at these rates; without one of fp8 its products are taken at that of the
        others."""
        return (
            (self.flops - self.fp8_flops) / flops_per_second
            + self.fp8_flops / (fp8_flops_per_second or flops_per_second)
            + self.moved_bytes / bytes_per_second
        )


def part_work(setup: Setup) -> Mapping[Part, PartWork]:
    """The work of each part of a step that has a bound; of a model of which only counts are known,
    forward and backward are the root's."""
    work = count_work(setup)
    blocks, root, tokens = work.blocks, work.root, work.tokens
    if not blocks:
        forward = PartWork(tokens * root.forward_flops, tokens * root.forward_bytes)
        backward = PartWork(tokens * root.backward_flops, tokens * root.backward_bytes)
        loss = PartWork(0.0, 0.0)
    else:
        forward, backward = (
            PartWork(
                tokens * sum(unit.count * getattr(unit, f"{way}_flops") for unit in blocks),
                tokens * sum(unit.count * getattr(unit, f"{way}_bytes") for unit in blocks),
                tokens * sum(unit.count * getattr(unit, f"{way}_fp8") for unit in blocks),
            )
            for way in ("forward", "backward")
        )
        loss = PartWork(
            tokens * (root.forward_flops + root.backward_flops),
            tokens * (root.forward_bytes + root.backward_bytes),
        )
    copies = sum(unit.count * sum(unit_copies(setup, work, unit)) for unit in work.units)
    return {
        "forward": forward,
        "loss": loss,
        "backward": backward,
        "gather and reduce": PartWork(0.0, work.micro_batches * copies),
        "optimizer": PartWork(0.0, optimizer_bytes(setup, work.trainable // setup.shard)),
    }
