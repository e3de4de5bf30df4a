"""Where a run starts from: nothing, its own newest good checkpoint, or one that the user names."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from drillyard.config.comparing import changed_settings, changes_in_words, recorded_settings
from drillyard.config.run import RunConfig
from drillyard.errors import UserError
from drillyard.parallel.ranks import Ranks
from drillyard.telemetry import RunLog
from drillyard.training.checkpoint import Checkpointer, LoadedCheckpoint
from drillyard.training.checkpoint.loading import StateSource
from drillyard.training.optimizer import ShardedAdamW
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
        log.message(f"From step {loaded.step} on other settings hold: {changes_in_words(changes)}")
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


def require_same_order(saved: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raise UserError where going on from `saved`, a checkpoint's metadata, would not be the run of this config.

    `identity` is what the config and its data come to (assemble.py). Other settings may differ (config/comparing.py).
    """
    for problem in _other_orders(saved, identity):
        raise UserError(f"cannot go on from {saved.get('path', 'the checkpoint')}: {problem}")


def _other_orders(saved: Mapping[str, Any], identity: Mapping[str, Any]) -> Iterator[str]:
    """What makes the samples of a checkpoint's steps, or the next ones, others than those of the config."""
    step, data, batch = saved.get("step", 0), saved.get("data"), saved.get("global_batch_size")
    own_run = "or begin a run of its own: another `name`, without checkpoint.resume"
    for key, setting in (("seed", "training.seed"), ("sequence_length", "data.sequence_length")):
        if key in saved and saved[key] != identity[key]:
            yield (
                f"it was trained with {setting}: {saved[key]}, and this config has {identity[key]}, which gives "
                f"other samples; set {setting}={saved[key]}, {own_run}"
            )
    if data != identity["data"]:
        yield (
            "the data (source, weights, tokenizer, format or drillyard version) are not what it was trained on "
            f"(fingerprint {data}, now {identity['data']}); undo the change, {own_run}"
        )
    if batch != identity["global_batch_size"]:
        yield (
            f"it was trained with {batch} sequences per step, and this start has {identity['global_batch_size']}; "
            f"set training.global_batch_size={batch}, {own_run}"
        )
    if not _same_cut(saved, identity):
        yield (
            f"the last batch of each of its epochs is short, as with training.epochs, and after its step {step} those "
            f"of training.steps are others; give training.epochs instead of training.steps, {own_run}"
            if saved.get("by_epoch")
            else f"its batches go on over the ends of epochs, as with training.steps, and after its step {step} those "
            f"of training.epochs are others; set training.epochs=null and training.steps={saved.get('total_steps')} "
            f"(or more), {own_run}"
        )
    if step > identity["total_steps"]:
        yield (
            f"it has done {step} steps, and this run ends after {identity['total_steps']}; raise training.steps (or "
            "training.epochs), or name an earlier checkpoint by checkpoint.resume"
        )


def _same_cut(saved: Mapping[str, Any], identity: Mapping[str, Any]) -> bool:
    """Whether the samples are cut into the same steps: always until the first epoch ends within a batch."""
    # Checkpoints of earlier versions do not say; all their batches go on over the ends of epochs.
    batch, sequences = identity["global_batch_size"], identity["num_sequences"]
    same = saved.get("by_epoch", False) == identity["by_epoch"]
    return same or bool(sequences % batch == 0) or bool(saved.get("step", 0) <= sequences // batch)


def settings_changed(saved: Mapping[str, Any], identity: Mapping[str, Any], config: RunConfig) -> dict[str, list[Any]]:
    """{setting: [value of the checkpoint, value now]} for what changes what is trained from here on."""
    if "settings" in saved:
        return changed_settings(saved["settings"], recorded_settings(config))
    # Checkpoints of earlier versions hold no settings but the length.
    return changed_settings({"total_steps": saved.get("total_steps")}, {"total_steps": identity["total_steps"]})
