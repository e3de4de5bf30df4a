"""The training state in checkpoints, and where a run starts: step 0, its own newest checkpoint, or
a named one.

State is a flat dictionary of sharded tensors that any number of ranks can load. Parameters are
FSDP2's own DTensors; AdamW's moments live on local shards and are wrapped as DTensors with the
parameter's mesh, placements and shape, so torch.distributed.checkpoint writes each piece once and
re-slices it for another number of ranks. A model that one rank holds whole has plain tensors, which
are written and read as one piece. Random state belongs to a data rank: it is restored on the same
number of ranks and drawn again otherwise. The schedule and the sample order need only the step.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from drillyard.config.run import RunConfig
from drillyard.config.run_identity import changed_settings, describe_changes, recorded_settings
from drillyard.parallel.collectives import from_first_rank
from drillyard.parallel.ranks import Ranks
from drillyard.telemetry import RunLog
from drillyard.training.checkpoint.checkpointer import Checkpointer
from drillyard.training.checkpoint.loading import LoadedCheckpoint, StateSource
from drillyard.training.optimizer import LocalShard, ShardedAdamW
from drillyard.training.order_check import require_same_order
from drillyard.training.run_directory import named_beginning, origin_to_record


def checkpoint_state(
    optimizer: ShardedAdamW, ranks: Ranks, *, with_random_state: bool = True
) -> dict[str, Any]:
    """Everything to be saved, as tensors that share memory with the live state.

    Keys: `model.<name>`, `optimizer.<moment>.<name>`, `optimizer.step`, `random.<rank>`.
    """
    state: dict[str, Any] = {}
    for shard in optimizer.shards:
        state[f"model.{shard.name}"] = shard.parameter.detach()
        for moment, local in optimizer.optimizer.state[shard.local].items():
            if moment != "step":
                state[f"optimizer.{moment}.{shard.name}"] = _like_parameter(local, shard)
    state["optimizer.step"] = optimizer.optimizer.state[optimizer.shards[0].local]["step"]
    state["optimizer.skipped"] = optimizer.skipped
    if with_random_state:
        state[random_key(ranks)] = get_random_state(ranks.device)
    return state


def model_state(shards: list[LocalShard]) -> dict[str, Any]:
    """The parameters alone, under the names a checkpoint gives them."""
    return {f"model.{shard.name}": shard.parameter.detach() for shard in shards}


def random_key(ranks: Ranks) -> str:
    """The key of this rank's random state."""
    return f"random.{ranks.data_rank:05d}"


def seed_rank(seed: int, step: int, ranks: Ranks) -> None:
    """Seed dropout for this rank and step: no two ranks, and no two starts, draw the same
    numbers."""
    text = f"{seed}/{step}/{ranks.data_rank}/{ranks.num_data_ranks}"
    torch.manual_seed(
        int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
    )


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


def _like_parameter(local: torch.Tensor, shard: LocalShard) -> torch.Tensor:
    parameter: torch.Tensor = shard.parameter
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        # Scales of 8-bit moments have a row for each row of the parameter, and fewer columns.
        shape=torch.Size((parameter.shape[0], *local.shape[1:])),
        stride=local.stride(),
    )


def resume(
    config: RunConfig,
    checkpointer: Checkpointer,
    optimizer: ShardedAdamW,
    ranks: Ranks,
    identity: dict[str, Any],
    log: RunLog,
) -> tuple[int, str]:
    """Load what `checkpoint.resume` names; returns the number of steps that are already done, and
    what checkpoints record as the run's beginning.

    Raises UserError where a checkpoint belongs to other data or another batch, which would be
    another sample order. Changed settings are an event.
    """
    wanted = config.checkpoint.resume
    started = time.perf_counter()
    # After `never` there are checkpoints only of this very run: a directory with others was
    # refused.
    newest = checkpointer.latest()
    loaded = checkpointer.load(
        state_for(optimizer, ranks),
        from_first_rank(lambda: named_beginning(wanted, newest)),
        accept=lambda saved: require_same_order(saved, identity),
    )
    checkpointer.remove_leftovers()
    if loaded is None:
        return 0, origin_to_record(wanted, None)
    finish_load(loaded, config.training.seed, optimizer, ranks)
    log.event(
        "resume",
        step=loaded.step,
        path=str(loaded.info.path),
        seconds=time.perf_counter() - started,
    )
    if changes := settings_changed(loaded.metadata, identity, config):
        log.event("settings_changed", step=loaded.step, changes=changes)
        log.message(f"From step {loaded.step} on other settings hold: {describe_changes(changes)}")
    return loaded.step, origin_to_record(wanted, loaded.metadata)


def state_for(optimizer: ShardedAdamW, ranks: Ranks) -> StateSource:
    """State to fill by a load; random state only from as many ranks on the same kind of device."""
    same_generators = {"world_size": ranks.world_size, "device": ranks.device.type}
    return lambda saved: checkpoint_state(
        optimizer,
        ranks,
        with_random_state=all(saved.get(key) == value for key, value in same_generators.items()),
    )


def finish_load(loaded: LoadedCheckpoint, seed: int, optimizer: ShardedAdamW, ranks: Ranks) -> None:
    """Finish a load: tensors are filled in place; what is left is every shard's step count and the
    random state, which is seeded where it could not be loaded."""
    optimizer.mark_written()
    for shard in optimizer.shards:
        optimizer.optimizer.state[shard.local]["step"].copy_(loaded.state["optimizer.step"])
    # A row of skipped steps that ended before the save must not end the run now.
    optimizer.skipped[2] = optimizer.skipped[1]
    random_state = loaded.state.get(random_key(ranks))
    if random_state is None:
        seed_rank(seed, loaded.step, ranks)
    else:
        set_random_state(random_state, ranks.device)


def settings_changed(
    saved: Mapping[str, Any], identity: Mapping[str, Any], config: RunConfig
) -> dict[str, list[Any]]:
    """{setting: [value of the checkpoint, value now]} for what changes what is trained from here
    on."""
    if "settings" in saved:
        return changed_settings(saved["settings"], recorded_settings(config))
    # Checkpoints of earlier versions hold no settings but the length.
    return changed_settings(
        {"total_steps": saved.get("total_steps")}, {"total_steps": identity["total_steps"]}
    )
