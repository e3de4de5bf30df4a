"""A rank whose hardware fails, for test_replay.py: `python flipped_gradient.py STEP:BIT[,STEP:BIT]
ARGUMENTS...`.

It is `drillyard ARGUMENTS`, but that in each STEP (from 1) one bit of one gradient is flipped
before the optimizer sees it: bit 0 is the lowest of an fp32's mantissa, bit 30 the highest of its
exponent.
"""

from __future__ import annotations

import sys

import torch

from drillyard.cli.main import main
from drillyard.models.sharding import local_tensor
from drillyard.training.optimizer import ShardedAdamW


def flip(bits: dict[int, int]) -> None:
    """Replace the optimizer's step by one that flips `bits[step]` first."""
    original, done = ShardedAdamW.step, 0

    def step(
        self: ShardedAdamW, loss_sum: torch.Tensor, learning_rate: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal done
        done += 1
        if done in bits:
            gradient = local_tensor(self.shards[-1].parameter.grad)
            gradient.view(torch.int32).view(-1)[0].bitwise_xor_(1 << bits[done])
        return original(self, loss_sum, learning_rate)

    ShardedAdamW.step = step


if __name__ == "__main__":
    flip(
        {
            int(step): int(bit)
            for step, _, bit in (item.partition(":") for item in sys.argv[1].split(","))
        }
    )
    main(sys.argv[2:])
