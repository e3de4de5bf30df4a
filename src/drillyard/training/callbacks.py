"""What happens between steps: evaluation, saving, and the events that tell of them.

None of it changes a bit of training: random state is forked around an evaluation, a save copies what it writes. A save
that falls due in a row of skipped (non-finite) steps waits until a step was good again. Where both are due the save
comes first, and what fails in an evaluation is an event: measuring must not cost what was trained.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from drillyard.config.run import RunConfig
from drillyard.evaluation.evaluator import EvaluationResults
from drillyard.parallel.ranks import Ranks
from drillyard.telemetry import RunLog
from drillyard.training.checkpoint import Checkpointer
from drillyard.training.optimizer import ShardedAdamW
from drillyard.training.signals import StopRequest
from drillyard.training.state import checkpoint_state
from drillyard.training.trainer import Trainer

Evaluate = Callable[[int], EvaluationResults]


@dataclass
class StepCallbacks:
    """Evaluates and saves on schedule. Called after every step on every rank, with the same answers on all."""

    config: RunConfig
    ranks: Ranks
    trainer: Trainer
    optimizer: ShardedAdamW
    checkpointer: Checkpointer
    log: RunLog
    stop: StopRequest
    evaluate: Evaluate | None
    metadata: dict[str, Any]
    evaluated_at: int | None = None
    loss_there: float | None = None
    save_is_due: bool = False

    def after_step(self, steps_done: int, stopping: bool) -> float:
        """Do what is due after `steps_done` steps; returns the seconds that training waited for it."""
        started = time.perf_counter()
        evaluation, saving = self.config.evaluation, self.config.checkpoint
        if stopping:
            if self.trainer.in_nonfinite_row():
                self.log.message("stopping in a row of skipped steps: the newest checkpoint is an earlier one")
            self.log.event("signal", step=steps_done, signal=self.stop.received.name if self.stop.received else None)
        if stopping or (saving.every_steps and steps_done % saving.every_steps == 0):
            self.save_is_due = True
        if self.save_is_due and not self.trainer.in_nonfinite_row():
            self.save(steps_done, wait=stopping)
        if evaluation.every_steps and steps_done % evaluation.every_steps == 0 and not stopping:
            self.run_evaluation(steps_done)
        return time.perf_counter() - started

    def run_evaluation(self, step: int) -> None:
        """Evaluate held-out data once per step, with the random state put back afterwards.

        What fails is told, and no reason to end. Raises EvaluationStopped.
        """
        if self.evaluate is None or self.evaluated_at == step:
            return
        started = time.perf_counter()
        self.log.event("evaluation_begin", step=step)
        devices = [self.ranks.device] if self.ranks.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices):
                found = self.evaluate(step)
        finally:
            # Also where the ranks have agreed to stop.
            self.log.event("evaluation_end", step=step, seconds=time.perf_counter() - started)
        self.evaluated_at, self.loss_there = step, mean_loss(found)
        for failure in found.failures:
            about = {"part": failure.part, "metric": failure.metric, "reason": failure.reason, "stack": failure.stack}
            self.log.event("evaluation_failed", step=step, **about)
        if found.results:
            self.log.evaluation(step, found.results)
        if (loss := self.held_out_loss(step)) is not None:
            self.checkpointer.record_held_out_loss(step, loss)

    def save(self, step: int, *, wait: bool) -> None:
        """Save the state after `step` steps, unless it is on disk already; one that failed is tried again."""
        self.save_is_due = False
        self.log.event("checkpoint_begin", step=step)
        started = time.perf_counter()
        metadata = {**self.metadata, "step": step, "held_out_loss": self.held_out_loss(step)}
        self.checkpointer.save(step, checkpoint_state(self.optimizer, self.ranks), metadata=metadata, wait=wait)
        self.log.event("checkpoint_end", step=step, seconds=time.perf_counter() - started)

    def held_out_loss(self, step: int) -> float | None:
        """What `mean_loss` was at this very step; None where it was not evaluated."""
        return self.loss_there if self.evaluated_at == step else None


def mean_loss(evaluated: EvaluationResults) -> float | None:
    """Mean held-out loss per token over all parts; None unless it was measured on each of them.

    Checkpoints are compared by it (`checkpoint.keep_best`): a mean without the hardest part would win.
    """
    if any(failure.metric == "loss" for failure in evaluated.failures):
        return None
    parts = [result for result in evaluated.results.values() if "loss" in result and result.get("tokens")]
    tokens = sum(part["tokens"] for part in parts)
    return sum(part["loss"] * part["tokens"] for part in parts) / tokens if tokens else None
