"""The parts of a run on one rank: model, optimizer and trainer, and what is called between its
steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from drillyard.config.run import RunConfig, TimeoutsConfig
from drillyard.config.run_checks import resolve_accumulation
from drillyard.config.run_identity import recorded_settings, with_values
from drillyard.data.prepared_data import PreparedData
from drillyard.data.sampler import BatchShape
from drillyard.evaluation.evaluator import HeldOutEvaluator
from drillyard.evaluation.failures import EvaluationStopped
from drillyard.parallel.ranks import Ranks
from drillyard.supervise.launch_contract import stop_seconds
from drillyard.supervise.rank_supervision import RankSupervision
from drillyard.supervise.scheduler_restarts import end_without_claim
from drillyard.telemetry import RunLog, describe_model
from drillyard.telemetry.events import EventName
from drillyard.training.base_checksum import base_checksum
from drillyard.training.callbacks import StepCallbacks, StopRequest
from drillyard.training.checkpoint.checkpointer import Checkpointer
from drillyard.training.model_setup import ShardedModel, build_sharded_model
from drillyard.training.numerics import numerics
from drillyard.training.optimizer import ShardedAdamW
from drillyard.training.order_check import num_steps, order_identity
from drillyard.training.spikes import SpikeReporter
from drillyard.training.trainer import Trainer


@dataclass(frozen=True)
class RunParts:
    """Objects that do the steps of a run, and the records that its checkpoints compare.

    `identity`: what a checkpoint must agree with to continue in the same sample order; `numerics`:
    the conditions on which the rounding of steps depends (numerics.py).
    """

    model: ShardedModel
    trainer: Trainer
    identity: dict[str, Any]
    numerics: dict[str, Any]


def batch_shape(config: RunConfig, num_data_ranks: int) -> BatchShape:
    """Division of steps into micro-batches by a run config. Raises UserError where the global batch
    does not divide."""
    training = config.training
    assert training.micro_batch_size != "auto", "decided before (estimation/resolved_setup.py)"
    accumulation = resolve_accumulation(config, num_data_ranks)
    return BatchShape(
        training.micro_batch_size,
        accumulation,
        num_data_ranks,
        by_epoch=training.epochs is not None,
    )


def build_run(
    config: RunConfig,
    ranks: Ranks,
    data: PreparedData,
    log: RunLog,
    *,
    memory_gib: float | None = None,
) -> RunParts:
    """Build model, optimizer and trainer, and log them. Parameters have no values yet: load a
    checkpoint or fill them.

    `memory_gib`: see `build_sharded_model`.
    """
    model = build_sharded_model(config, data.tokenizer, ranks, memory_gib=memory_gib)
    config = with_micro_batch(config, model)
    training = config.training
    shape = batch_shape(config, ranks.num_data_ranks)
    total_steps = num_steps(config, data.train.num_sequences, shape.global_batch_size)
    optimizer = ShardedAdamW(model.root, training.optimizer, training.gradient_clipping, ranks)
    trainer = Trainer(config, ranks, model, optimizer, data.train, shape, total_steps)
    identity = order_identity(
        config,
        data.train.fingerprint,
        data.train.num_sequences,
        shape.global_batch_size,
        total_steps,
    )
    if config.model.lora is not None:
        identity["base"] = base_checksum(config.model.id)
    parts = RunParts(model, trainer, identity, numerics(config, ranks, model))
    log_parts(config, ranks, parts, log)
    return parts


def with_micro_batch(config: RunConfig, model: ShardedModel) -> RunConfig:
    """`config` with the micro-batch that was decided with the model's layout."""
    return with_values(config, {"training.micro_batch_size": model.resolved.setup.micro_batch_size})


def log_parts(config: RunConfig, ranks: Ranks, parts: RunParts, log: RunLog) -> None:
    """Log the model's notes and parameters, and the event `order`, by which batch_lookup.py finds
    samples again."""
    model, shape = parts.model, parts.trainer.shape
    for note in model.notes:
        log.message(note)
    log.parameters(
        **describe_model(
            model.causal_lm.config.to_dict(),
            count=model.num_parameters,
            trainable=sum(shard.parameter.numel() for shard in parts.trainer.optimizer.shards),
            device=(
                torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "cpu"
            ),
            precision=config.training.precision,
        )
    )
    log.event(
        "order",
        **parts.identity,
        settings=recorded_settings(config),
        micro_batch_size=shape.micro_batch_size,
        gradient_accumulation=shape.accumulation,
        world_size=ranks.world_size,
        hardware=parts.numerics["conditions"]["hardware"],
        numerics=parts.numerics,
    )


def warns_of_long_saves(log: RunLog) -> Callable[..., None]:
    """`log.event`, with one warning for a save that took over half of the time that a stopped run
    has.

    The other half is for the step that it finishes first, and for what else shares the storage at
    that moment.
    """
    limit = stop_seconds()

    def event(name: EventName, **fields: Any) -> None:
        nonlocal limit
        log.event(name, **fields)
        if limit is not None and name == "checkpoint" and fields["seconds"] > limit / 2:
            log.warn(
                f"a save took {fields['seconds']:.0f} s, and a run that is stopped has {limit:.0f}"
                " s to finish its step and save: it may lose the steps since its last checkpoint."
                " Give it twice the time of a save (kubernetes.grace_seconds, slurm.signal_seconds"
                " of the cluster config), or save to faster storage"
            )
            limit = None

    return event


def build_callbacks(
    config: RunConfig,
    ranks: Ranks,
    parts: RunParts,
    data: PreparedData,
    log: RunLog,
    directory: Path,
    side: RankSupervision,
) -> StepCallbacks:
    """Build what the trainer calls between steps: checkpoints, evaluation and logs go into
    `directory`."""
    checkpointer = Checkpointer(
        directory / "checkpoints",
        keep=config.checkpoint.keep,
        keep_best=config.checkpoint.keep_best,
        asynchronous=config.checkpoint.asynchronous,
        identity={"name": config.name},
        on_event=warns_of_long_saves(log),
        timeout=save_timeout(config.timeouts),
        before_write=end_without_claim(directory),
    )
    stop = StopRequest(ranks.world_size, side, ranks.collective_timeout)

    def raise_when_stopped() -> None:
        if stop.agreed():
            raise EvaluationStopped

    evaluator = HeldOutEvaluator(
        config,
        data,
        parts.model.root,
        ranks,
        directory / "evaluations",
        attention=parts.model.attention,
        warn=log.warn,
        before_forward=raise_when_stopped,
        before_write=end_without_claim(directory),
    )
    metadata = {
        **parts.identity,
        "world_size": ranks.world_size,
        "device": ranks.device.type,
        "settings": recorded_settings(config),
        "parallelism": config.parallelism.model_dump(),
    }
    warmup_steps = config.training.schedule.warmup_steps
    spikes = (
        SpikeReporter(log, directory, data.train, parts.trainer.shape, warmup_steps)
        if ranks.rank == 0
        else None
    )
    return StepCallbacks(
        config, ranks, parts.trainer, checkpointer, evaluator, log, side, stop, metadata, spikes
    )


def save_timeout(timeouts: TimeoutsConfig) -> timedelta:
    """Limit on a rank's wait for the slowest to write its part of a checkpoint: the watchdog's
    limit.

    The collectives' limit is too short for a slow shared disk. Without a watchdog there is no limit
    here; the collectives of training notice a rank that dies meanwhile.
    """
    return (
        timedelta(seconds=timeouts.watchdog_seconds)
        if timeouts.watchdog_seconds
        else timedelta(days=7)
    )


def describe_length(trainer: Trainer) -> list[str]:
    """For people: how many steps of how many sequences the run has, and how much of the data they
    cover."""
    data, shape, steps = trainer.data, trainer.shape, trainer.total_steps
    covered = data.coverage(steps, shape)
    last = len(data.samples_of_step(steps - 1, shape))
    short = f" ({last} in the last one)" if last < shape.global_batch_size else ""
    lines = [
        f"{steps} steps of {shape.global_batch_size} sequences{short}: {covered['seen']} of"
        f" {covered['of']} sequences are seen, in {covered['epochs']:.3g} epochs"
    ]
    if "sources" in covered:
        passes = (f"{name} {each['epochs']:.3g} times" for name, each in covered["sources"].items())
        weights = (
            "The weights of data.source decide how often each of several sources is seen:"
            f" {', '.join(passes)}"
        )
        advice = (
            ". To train every sequence once an epoch, put the files into one directory and name"
            " that as the only source"
        )
        lines.append(weights + advice if shape.by_epoch else weights)
    return lines
