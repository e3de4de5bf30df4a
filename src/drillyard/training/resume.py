"""Where a run starts from: nothing, its own newest good checkpoint, or one that the user names."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drillyard.config.run import RunConfig
from drillyard.config.run_identity import changed_settings, describe_changes, recorded_settings
from drillyard.parallel.ranks import Ranks
from drillyard.telemetry import RunLog
from drillyard.training.checkpoint import Checkpointer, LoadedCheckpoint
from drillyard.training.checkpoint.loading import StateSource
from drillyard.training.optimizer import ShardedAdamW
from drillyard.training.sample_order import require_same_order
from drillyard.training.state import checkpoint_state, random_key, restore, seed_rank


def resume(
    config: RunConfig,
    checkpointer: Checkpointer,
    optimizer: ShardedAdamW,
    ranks: Ranks,
    identity: dict[str, Any],
    log: RunLog,
) -> int:
    """Load what `checkpoint.resume` asks for; returns the number of steps that are already done.

    Raises UserError where a checkpoint belongs to other data or another batch, which would be another sample order.
    Settings that may change are told of as an event.
    """
    wanted = config.checkpoint.resume
    started = time.perf_counter()
    newest = checkpointer.latest()
    # The checkpoint that a user names is where the run begins; once it has saved, it goes on from its own. After
    # `never` there are checkpoints only of this very run: a directory with others was refused.
    begins_elsewhere = wanted not in ("auto", "never") and (newest is None or newest.metadata.get("resume") != wanted)
    loaded = checkpointer.load(
        state_for(optimizer, ranks),
        Path(wanted) if begins_elsewhere else None,
        accept=lambda saved: require_same_order(saved, identity),
    )
    checkpointer.remove_leftovers()
    if loaded is None:
        return 0
    finish_load(loaded, config, optimizer, ranks)
    log.event("resume", step=loaded.step, path=str(loaded.info.path), seconds=time.perf_counter() - started)
    if changes := settings_changed(loaded.metadata, identity, config):
        log.event("settings_changed", step=loaded.step, changes=changes)
        log.message(f"From step {loaded.step} on other settings hold: {describe_changes(changes)}")
    return loaded.step


def state_for(optimizer: ShardedAdamW, ranks: Ranks) -> StateSource:
    """What a load fills; random state only from as many ranks on the same kind of device."""
    same_generators = {"world_size": ranks.world_size, "device": ranks.device.type}
    return lambda saved: checkpoint_state(
        optimizer, ranks, with_random_state=all(saved.get(key) == value for key, value in same_generators.items())
    )


def finish_load(loaded: LoadedCheckpoint, config: RunConfig, optimizer: ShardedAdamW, ranks: Ranks) -> None:
    """Bring what was loaded into force; random state that could not be loaded is drawn anew."""
    restore(loaded.state, optimizer, ranks)
    if random_key(ranks) not in loaded.state:
        seed_rank(config.training.seed, loaded.step, ranks)


def settings_changed(saved: Mapping[str, Any], identity: Mapping[str, Any], config: RunConfig) -> dict[str, list[Any]]:
    """{setting: [value of the checkpoint, value now]} for what changes what is trained from here on."""
    if "settings" in saved:
        return changed_settings(saved["settings"], recorded_settings(config))
    # Checkpoints of earlier versions hold no settings but the length.
    return changed_settings({"total_steps": saved.get("total_steps")}, {"total_steps": identity["total_steps"]})
