"""All the parts of a run, put together on one rank: model, optimizer, trainer, checkpoints, evaluation, telemetry."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from drillyard.config import resolve_accumulation, resolve_global_batch
from drillyard.config.run import RunConfig, TimeoutsConfig
from drillyard.config.run_identity import recorded_settings
from drillyard.data import PreparedData
from drillyard.evaluation.evaluator import HeldOutEvaluator
from drillyard.evaluation.failures import EvaluationStopped
from drillyard.parallel.memory import GIB
from drillyard.parallel.model_setup import ShardedModel, build_sharded_model
from drillyard.parallel.parallelize import compiles_blocks
from drillyard.parallel.ranks import Ranks
from drillyard.telemetry import RunLog, StepRecord, describe_model
from drillyard.training.callbacks import StepCallbacks
from drillyard.training.checkpoint import Checkpointer
from drillyard.training.numerics import numerics
from drillyard.training.optimizer import ShardedAdamW
from drillyard.training.sample_order import num_steps
from drillyard.training.signals import StopRequest
from drillyard.training.spikes import SpikeReporter, StepFigures
from drillyard.training.trainer import BatchShape, LoggedStep, Trainer


@dataclass(frozen=True)
class RunParts:
    """What a run consists of. `identity` is what a checkpoint must agree with to go on in the same sample order;
    `numerics` what decides how its steps are rounded (numerics.py)."""

    model: ShardedModel
    optimizer: ShardedAdamW
    trainer: Trainer
    checkpointer: Checkpointer
    between: StepCallbacks
    reporter: StepReporter
    identity: dict[str, Any]
    numerics: dict[str, Any]


def build_run(
    config: RunConfig,
    ranks: Ranks,
    data: PreparedData,
    log: RunLog,
    directory: Path,
    stop: StopRequest,
    *,
    memory_gib: float | None = None,
) -> RunParts:
    """Build every part of the run that writes into `directory`; weights are filled, no checkpoint is loaded yet.

    `memory_gib`: see `set_up_model`.
    """
    shape = batch_shape(config, ranks)
    total_steps = num_steps(config, data.train.num_sequences, shape.global_batch_size)
    model = build_sharded_model(config, data.tokenizer, ranks, memory_gib=memory_gib)
    for note in model.notes:
        log.message(note)
    optimizer = ShardedAdamW(model.root, config.training.optimizer, config.training.gradient_clipping, ranks)
    log.parameters(
        **describe_model(
            model.causal_lm.config.to_dict(),
            count=model.num_parameters,
            trainable=sum(shard.parameter.numel() for shard in optimizer.shards),
            sequence_length=config.data.sequence_length,
            device=torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "cpu",
            precision=config.training.precision,
        )
    )
    trainer = Trainer(
        config,
        ranks,
        model.root,
        optimizer,
        data.train,
        shape,
        total_steps,
        attention=model.attention,
        gather_gradients_once=model.small,
    )
    identity: dict[str, Any] = {
        "data": data.train.fingerprint,
        "global_batch_size": shape.global_batch_size,
        "total_steps": total_steps,
        "by_epoch": shape.by_epoch,
        "num_sequences": data.train.num_sequences,
        "seed": config.training.seed,
        "sequence_length": config.data.sequence_length,
    }
    settings = recorded_settings(config)
    rounding = numerics(config, ranks, model)
    log.event(
        "order",
        **identity,
        settings=settings,
        micro_batch_size=shape.micro_batch_size,
        gradient_accumulation=shape.accumulation,
        world_size=ranks.world_size,
        hardware=rounding["conditions"]["hardware"],
        numerics=rounding,
    )
    if ranks.rank == 0:
        warmup = config.training.schedule.warmup_steps
        spikes = SpikeReporter(log, directory, data.train, shape.global_batch_size, warmup, by_epoch=shape.by_epoch)

        def examine(recent: list[StepFigures]) -> None:
            with log.optional("the search for spikes"):
                spikes.examine(recent)

        trainer.on_read = examine
    checkpointer = Checkpointer(
        directory / "checkpoints",
        keep=config.checkpoint.keep,
        keep_best=config.checkpoint.keep_best,
        asynchronous=config.checkpoint.asynchronous,
        identity={"name": config.name},
        on_event=log.event,
        timeout=save_timeout(config.timeouts),
    )

    def leave_when_stopped() -> None:
        if stop.agreed():
            raise EvaluationStopped

    held_out = HeldOutEvaluator(
        config,
        data,
        model.root,
        ranks,
        directory / "evaluations",
        attention=model.attention,
        warn=log.warn,
        before_forward=leave_when_stopped,
    )
    between = StepCallbacks(
        config,
        ranks,
        trainer,
        optimizer,
        checkpointer,
        log,
        stop,
        (lambda step: held_out.evaluate(f"step-{step:08d}")) if held_out.parts else None,
        metadata={
            **identity,
            "world_size": ranks.world_size,
            "device": ranks.device.type,
            "resume": config.checkpoint.resume,
            "settings": settings,
            "parallelism": config.parallelism.model_dump(),
        },
    )
    reporter = StepReporter(config, ranks, trainer, log, compiled=compiles_blocks(config.training, ranks.device))
    return RunParts(model, optimizer, trainer, checkpointer, between, reporter, identity, rounding)


def save_timeout(timeouts: TimeoutsConfig) -> timedelta:
    """How long a rank waits for the slowest to have written a checkpoint: as long as a round may get no further.

    A shared disk takes its time, so it is no matter of the collectives' limit. Without a watchdog nothing else ends it
    either; a rank that dies meanwhile is noticed by the collectives of training.
    """
    return timedelta(seconds=timeouts.watchdog_seconds) if timeouts.watchdog_seconds else timedelta(days=7)


def batch_shape(config: RunConfig, ranks: Ranks) -> BatchShape:
    """How a step's global batch is cut for these ranks. Raises UserError where it does not divide."""
    return BatchShape(
        config.training.micro_batch_size,
        resolve_accumulation(config, ranks.world_size),
        resolve_global_batch(config, ranks.world_size),
        by_epoch=config.training.epochs is not None,
    )


def length_lines(trainer: Trainer) -> list[str]:
    """For people: how many steps of how many sequences the run has, and what they see of the data."""
    data, shape, steps = trainer.data, trainer.shape, trainer.total_steps
    covered = trainer.coverage(steps)
    last = len(data.samples_of_step(steps - 1, shape.global_batch_size, by_epoch=shape.by_epoch))
    short = f" ({last} in the last one)" if last < shape.global_batch_size else ""
    lines = [
        f"{steps} steps of {shape.global_batch_size} sequences{short}: {covered['seen']} of {covered['of']} sequences "
        f"are seen, in {covered['epochs']:.3g} epochs"
    ]
    if shape.by_epoch and len(data.sources) > 1:
        samples = data.samples_of_step(steps, shape.global_batch_size, by_epoch=True).start
        passes = (f"{name} {count / size:.3g} times" for name, (count, size) in data.drawn(samples).items())
        lines.append(
            f"The weights of data.source decide how often each of several sources is seen: {', '.join(passes)}. To "
            "train every sequence once an epoch, put the files into one directory and name that as the only source"
        )
    return lines


@dataclass
class StepReporter:
    """Turns the figures of a logged step into a telemetry record."""

    config: RunConfig
    ranks: Ranks
    trainer: Trainer
    log: RunLog
    compiled: bool

    def logged(self, figures: LoggedStep) -> None:
        """Write one logged step."""
        shape = self.trainer.shape
        self.log.step(
            StepRecord(
                step=figures.step,
                loss=figures.loss,
                learning_rate=figures.learning_rate,
                grad_norm=figures.gradient_norm,
                step_seconds=figures.step_seconds,
                tokens=round(figures.sequences_per_step * self.config.data.sequence_length),
                valid_tokens=figures.valid_tokens,
                num_gpus=self.ranks.world_size,
                data_seconds=figures.data_seconds,
                compile_seconds=figures.compile_seconds if self.compiled else None,
                memory_gib=memory_gib(self.ranks.device),
                skipped_steps=figures.skipped_steps,
                window_steps=figures.window_steps,
                epoch=self.trainer.data.epoch_of(figures.step - 1, shape.global_batch_size, by_epoch=shape.by_epoch),
            )
        )


def memory_gib(device: torch.device) -> float | None:
    """Peak memory of this rank: allocated on its GPU, or resident on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    if sys.platform != "linux":
        return None
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * 4096 / GIB
