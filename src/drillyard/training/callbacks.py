"""Work of a run between its steps: log, look for loss spikes, save, evaluate, and stop on request.

None of it changes a bit of training: random state is forked around an evaluation, and a save copies
what it writes. A save that falls due in a row of skipped (non-finite) steps waits for the next
finite step. Where both are due, the save comes before the evaluation. A failed evaluation is an
event; it does not end the run.
"""

from __future__ import annotations

import contextlib
import signal
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from drillyard.config.run import RunConfig
from drillyard.evaluation.evaluator import EvaluationResults, HeldOutEvaluator
from drillyard.evaluation.failures import EvaluationStopped
from drillyard.parallel.collectives import own_cpu_group
from drillyard.parallel.ranks import COLLECTIVE_TIMEOUT, Ranks
from drillyard.supervise.launch_contract import failure_elsewhere
from drillyard.supervise.rank_supervision import RankSupervision
from drillyard.telemetry import RunLog
from drillyard.training.checkpoint.checkpointer import Checkpointer
from drillyard.training.resume import checkpoint_state
from drillyard.training.spikes import SpikeReporter
from drillyard.training.trainer import LoggedStep, Trainer


class StopRequest:
    """Whether this run was asked to stop; every rank gets the same answer at the same call of
    `agreed`.

    Each call starts an asynchronous all-reduce between CPUs and reads the result of the call
    before, which has long arrived: no rank waits and no device is synchronised. Forwards of an
    evaluation call it too, so a long evaluation ends early and the trained steps are saved within
    the launcher's grace period.

    `side` receives the stop signals of this rank; None: there are none.
    """

    def __init__(
        self,
        world_size: int,
        side: RankSupervision | None = None,
        timeout: timedelta = COLLECTIVE_TIMEOUT,
    ) -> None:
        self.side = side
        self._group = own_cpu_group(timeout) if world_size > 1 else None
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._pending: dist.Work | None = None
        self._agreed: signal.Signals | None = None

    @property
    def received(self) -> signal.Signals | None:
        """The stop signal that this rank received or that the ranks agreed on, if any."""
        return self._agreed or (self.side.received if self.side else None)

    def agreed(self) -> bool:
        """True on all ranks, one call after the first rank received a signal. Every rank must call
        it equally often."""
        if self._group is None:
            return self.received is not None
        if self._pending is not None:
            self._pending.wait()
            number = int(self._flag.item())
            self._agreed = signal.Signals(number) if number else None
        self._flag.fill_(self.received or 0)
        self._pending = dist.all_reduce(
            self._flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True
        )
        return self._agreed is not None

    def close(self) -> None:
        """Wait for the pending all-reduce."""
        if self._pending is not None:
            self._pending.wait()


@dataclass
class StepCallbacks:
    """Callbacks of the trainer between steps, the same on every rank. `metadata` goes into each
    checkpoint."""

    config: RunConfig
    ranks: Ranks
    trainer: Trainer
    checkpointer: Checkpointer
    evaluator: HeldOutEvaluator
    log: RunLog
    side: RankSupervision
    stop: StopRequest
    metadata: dict[str, Any]
    spikes: SpikeReporter | None
    evaluated_at: int | None = None
    last_loss: float | None = None
    save_is_due: bool = False

    def first_step(self, step: int) -> None:
        """The first step of this attempt is done: from here on there is something to save."""
        self.side.answer("note")
        self.side.signs.step(step, self.trainer.total_steps)
        self.side.begin("training", "strict")
        self.log.event("first_step", step=step)

    def logged_step(self, figures: LoggedStep) -> None:
        """Log one step. Raises UserError when too many steps in a row were not finite."""
        if self.spikes is not None:
            with self.log.optional("the search for spikes"):
                self.spikes.examine(figures.recent)
        figures.require_finite(self.config.training.max_nonfinite_steps)
        self.log.step(figures.record)

    def after_step(self, steps_done: int) -> tuple[float, bool]:
        """Save and evaluate if due; returns the seconds training waited, and whether all ranks
        agreed to stop."""
        stopping = self.stop.agreed()
        if self._work_is_due(steps_done, stopping):
            # The events of a step come in order, and a row of skipped steps ends the run before its
            # state is saved.
            self.trainer.deliver_figures()
        started = time.perf_counter()
        self.side.signs.step(steps_done, self.trainer.total_steps)
        # After EvaluationStopped the next step is the last one: only then have all ranks agreed.
        with self.side.during("between steps"), contextlib.suppress(EvaluationStopped):
            self._run_due_work(steps_done, stopping)
        return time.perf_counter() - started, stopping

    def _work_is_due(self, steps_done: int, stopping: bool) -> bool:
        return (
            stopping
            or self.save_is_due
            or _is_multiple(steps_done, self.config.checkpoint.every_steps)
            or _is_multiple(steps_done, self.config.evaluation.every_steps)
        )

    def _run_due_work(self, steps_done: int, stopping: bool) -> None:
        if stopping:
            if self.trainer.in_nonfinite_row():
                self.log.message(
                    "stopping in a row of skipped steps: the newest checkpoint is an earlier one"
                )
            if failure_elsewhere() is None:
                # Else another node's failure is the reason, and the supervisor writes that.
                self.log.event(
                    "signal",
                    step=steps_done,
                    signal=self.stop.received.name if self.stop.received else None,
                )
        if stopping or _is_multiple(steps_done, self.config.checkpoint.every_steps):
            self.save_is_due = True
        if self.save_is_due and not self.trainer.in_nonfinite_row():
            self.save(steps_done, wait=stopping)
        if not stopping and _is_multiple(steps_done, self.config.evaluation.every_steps):
            self.evaluate(steps_done)

    def evaluate(self, step: int) -> None:
        """Evaluate held-out data, once per step; a failure is an event. Raises
        EvaluationStopped."""
        if not self.evaluator.parts or self.evaluated_at == step:
            return
        started = time.perf_counter()
        self.log.event("evaluation_begin", step=step)
        devices = [self.ranks.device] if self.ranks.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices):
                found = self.evaluator.evaluate(f"step-{step:08d}")
        finally:
            self.log.event("evaluation_end", step=step, seconds=time.perf_counter() - started)
        self.evaluated_at, self.last_loss = step, mean_loss(found)
        for failure in found.failures:
            self.log.event("evaluation_failed", step=step, **vars(failure))
        if found.results:
            self.log.evaluation(step, found.results)
        if self.last_loss is not None:
            self.checkpointer.record_held_out_loss(step, self.last_loss)

    def save(self, step: int, *, wait: bool) -> None:
        """Save the state after `step` steps, unless it is on disk already; a failed save is tried
        again."""
        self.save_is_due = False
        loss = self.last_loss if self.evaluated_at == step else None
        metadata = {**self.metadata, "step": step, "held_out_loss": loss}
        with self.log.span("checkpoint", step):
            state = checkpoint_state(self.trainer.optimizer, self.ranks)
            self.checkpointer.save(step, state, metadata=metadata, wait=wait)


def mean_loss(evaluated: EvaluationResults) -> float | None:
    """Mean held-out loss per token over all parts; None unless it was measured on each of them.

    `checkpoint.keep_best` compares checkpoints by it: a mean without the hardest part would win.
    """
    if any(failure.metric == "loss" for failure in evaluated.failures):
        return None
    parts = [
        result for result in evaluated.results.values() if "loss" in result and result.get("tokens")
    ]
    tokens = sum(part["tokens"] for part in parts)
    return sum(part["loss"] * part["tokens"] for part in parts) / tokens if tokens else None


def _is_multiple(step: int, interval: int | None) -> bool:
    return interval is not None and interval > 0 and step % interval == 0
