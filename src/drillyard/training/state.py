"""What a checkpoint holds, as a flat dictionary of sharded tensors that any layout of ranks can load.

Parameters are FSDP2's own DTensors; AdamW's moments live on local shards and are dressed as DTensors with the
parameter's mesh, placements and shape, so that torch.distributed.checkpoint writes each piece once and re-slices it for
another number of ranks. Random state belongs to a rank: it is restored where the layout is the same and drawn anew
where it is not. The schedule and the loader need no state beyond the step: both are pure functions of it.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from drillyard.parallel.ranks import Ranks
from drillyard.training.optimizer import LocalShard, ShardedAdamW

MOMENTS = ("exp_avg", "exp_avg_sq")


def checkpoint_state(optimizer: ShardedAdamW, ranks: Ranks, *, with_random_state: bool = True) -> dict[str, Any]:
    """Everything to be saved, as tensors that share memory with the live state.

    Keys: `model.<name>`, `optimizer.<moment>.<name>`, `optimizer.step`, `random.<rank>`.
    """
    state: dict[str, Any] = {}
    for shard in optimizer.shards:
        state[f"model.{shard.name}"] = shard.parameter.detach()
        for moment in MOMENTS:
            local = optimizer.optimizer.state[shard.local][moment]
            state[f"optimizer.{moment}.{shard.name}"] = _like_parameter(local, shard)
    state["optimizer.step"] = optimizer.optimizer.state[optimizer.shards[0].local]["step"]
    state["optimizer.skipped"] = optimizer.skipped
    if with_random_state:
        state[random_key(ranks)] = get_random_state(ranks.device)
    return state


def model_state(shards: list[LocalShard]) -> dict[str, Any]:
    """The parameters alone, under the names a checkpoint gives them."""
    return {f"model.{shard.name}": shard.parameter.detach() for shard in shards}


def restore(state: dict[str, Any], optimizer: ShardedAdamW, ranks: Ranks) -> None:
    """Finish a load: tensors are filled in place; what is left is every shard's step count and the random state."""
    for shard in optimizer.shards:
        optimizer.optimizer.state[shard.local]["step"].copy_(state["optimizer.step"])
    # A row of skipped steps that ended before the save must not end the run now.
    optimizer.skipped[2] = optimizer.skipped[1]
    if random_key(ranks) in state:
        set_random_state(state[random_key(ranks)], ranks.device)


def random_key(ranks: Ranks) -> str:
    """The key of this rank's random state."""
    return f"random.{ranks.rank:05d}"


def seed_rank(seed: int, step: int, ranks: Ranks) -> None:
    """Seed dropout for this rank and step: no two ranks, and no two starts, draw the same numbers."""
    text = f"{seed}/{step}/{ranks.rank}/{ranks.world_size}"
    torch.manual_seed(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1)


def get_random_state(device: torch.device) -> torch.Tensor:
    """The random generators' state as one uint8 tensor (CPU, and this rank's GPU behind it)."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states)


def set_random_state(state: torch.Tensor, device: torch.device) -> None:
    """Put back what `get_random_state` took."""
    size = torch.get_rng_state().numel()
    torch.set_rng_state(state[:size])
    if device.type == "cuda" and state.numel() > size:
        torch.cuda.set_rng_state(state[size:], device)


def _like_parameter(local: torch.Tensor, shard: LocalShard) -> DTensor:
    parameter = shard.parameter
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
