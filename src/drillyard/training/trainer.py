"""The training step and the loop around it.

`train_step` reads the micro-batches of this rank, runs forward and backward, and updates the
weights. What callbacks do between steps changes no bit of them. The device is waited for only where
a number is read: before saves, and for the figures of the logged step before the last one
(late_figures.py).
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from drillyard.config.kernel_rules import resolve_compile
from drillyard.config.run import RunConfig
from drillyard.data.sampler import BatchShape, Mixture
from drillyard.errors import UserError
from drillyard.models.loss import head_parameters, loss_inputs
from drillyard.parallel.parallelize import end_backward, expect_one_micro_batch
from drillyard.parallel.ranks import Ranks
from drillyard.telemetry import StepRecord
from drillyard.training.late_figures import PendingFigures, device_event
from drillyard.training.model_setup import GIB, ShardedModel
from drillyard.training.optimizer import ShardedAdamW, learning_rate
from drillyard.training.spikes import RecentSteps, StepFigures

STEPS_BETWEEN_GARBAGE_COLLECTIONS = 50


@dataclass
class StepWindow:
    """Time and work of the steps since the last logged one, as measured on this rank's host.

    `began`: when they started on a GPU; `paused`: seconds of callbacks between them.
    """

    started: float
    began: torch.cuda.Event | None = None
    paused: float = 0.0
    steps: int = 0
    data_seconds: float = 0.0
    compile_started: float = 0.0
    sequences: int = 0
    valid_tokens: int = 0


@dataclass(frozen=True)
class LoggedStep:
    """Figures read from the device at a logged step. `recent`: those of all steps since the last
    logged one."""

    record: StepRecord
    longest_skipped_row: int
    recent: list[StepFigures]

    def require_finite(self, most_skipped: int) -> None:
        """Raise UserError when `most_skipped` steps in a row were not finite."""
        step = self.record.step
        if self.longest_skipped_row >= most_skipped:
            raise UserError(
                f"step {step}: the loss or gradient was not finite in {self.longest_skipped_row}"
                " steps in a row (all skipped, weights unchanged; the limit is"
                " training.max_nonfinite_steps); lower training.optimizer.learning_rate, or look"
                f" at the data of these steps: drillyard data show RUN_DIR --step {step}"
            )


class Callbacks(Protocol):
    """Callbacks of `Trainer.train` between steps, on every rank."""

    def first_step(self, step: int) -> None:
        """The first step of this attempt is done."""

    def logged_step(self, figures: LoggedStep) -> None:
        """The figures of a logged step are there, on a GPU when the next logged step has been
        queued. May raise to end the run."""

    def after_step(self, steps_done: int) -> tuple[float, bool]:
        """Called after each step; returns the seconds it took, which are not part of a step, and
        whether to stop. Calls `Trainer.deliver_figures` before what must come after them."""


class Trainer:
    """Trains a sharded model up to `total_steps`."""

    def __init__(
        self,
        config: RunConfig,
        ranks: Ranks,
        model: ShardedModel,
        optimizer: ShardedAdamW,
        data: Mixture,
        shape: BatchShape,
        total_steps: int,
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.model = model
        self.root = model.root
        self.optimizer = optimizer
        self.data = data
        self.shape = shape
        self.total_steps = total_steps
        self.accumulate_locally = model.small and shape.accumulation > 1
        if shape.accumulation == 1:
            expect_one_micro_batch(self.root, head_parameters(model.causal_lm))
        self.steps_done = 0
        self.reads_late = ranks.device.type == "cuda"
        self._pending: PendingFigures[LoggedStep] | None = None
        self._callbacks: Callbacks | None = None
        self.recent = RecentSteps(min(config.logging.every_steps, total_steps), ranks.device)

    def train_step(self, step: int, window: StepWindow) -> tuple[torch.Tensor, torch.Tensor]:
        """One optimizer step; returns the loss of the global batch and its gradient norm, both
        still on the device.

        The loss is summed over tokens and divided by the valid tokens of the whole global batch,
        which every rank reads from the index: no communication, and neither ranks nor micro-batches
        change what is computed. A step with fewer sequences than the global batch is the mean over
        the tokens that it has, at the schedule's learning rate.
        """
        started = time.perf_counter()
        samples, batches = self.data.read_step(step, self.shape, self.ranks.data_rank)
        window.sequences += len(samples)
        window.valid_tokens = self.data.valid_tokens(samples)
        chunk_tokens = self.config.training.loss_chunk_tokens
        micro_batches = [
            loss_inputs(
                batch, self.root.causal_lm, self.model.attention, self.ranks.device, chunk_tokens
            )
            for batch in batches
        ]
        window.data_seconds += time.perf_counter() - started

        loss_sum = torch.zeros((), device=self.ranks.device, dtype=torch.float64)
        for number, inputs in enumerate(micro_batches):
            self.synchronise_gradients(last=number == len(micro_batches) - 1)
            loss = self.root(**vars(inputs), scale=1 / max(1, window.valid_tokens))
            loss.backward()
            loss_sum += loss.detach()
        end_backward(self.root)
        loss_and_norm = self.optimizer.step(loss_sum, self.learning_rate(step))
        self.optimizer.zero_grad()
        return loss_and_norm

    def synchronise_gradients(self, *, last: bool) -> None:
        """Reduce gradients after the last micro-batch only, where whole gradients fit in memory;
        else after each."""
        root: nn.Module = self.root
        if self.shape.accumulation == 1 or not isinstance(root, FSDPModule):
            return
        root.set_is_last_backward(last)
        if self.accumulate_locally:
            root.set_requires_gradient_sync(last)
            root.set_reshard_after_backward(last)

    def learning_rate(self, step: int) -> float:
        """The schedule's value at `step`."""
        training = self.config.training
        return learning_rate(
            step,
            peak=training.optimizer.learning_rate,
            total_steps=self.total_steps,
            schedule=training.schedule,
        )

    def train(self, first_step: int, callbacks: Callbacks) -> bool:
        """Run steps until the end, or until `callbacks` asks to stop; True when all steps are
        done."""
        self.steps_done = first_step
        self._callbacks = callbacks
        _disable_garbage_collection()
        try:
            self._run_steps(first_step, callbacks)
            self.deliver_figures()
        except BaseException:
            # A device that hangs or has failed must not hide why the run ends.
            with contextlib.suppress(Exception):
                if self._pending is not None and self._pending.have_arrived():
                    self.deliver_figures()
            raise
        gc.enable()
        return self.steps_done == self.total_steps

    def _run_steps(self, first_step: int, callbacks: Callbacks) -> None:
        every = self.config.logging.every_steps
        window = self._new_window()
        for step in range(first_step, self.total_steps):
            loss, norm = self.train_step(step, window)
            self.recent.keep(step, loss, norm)
            window.steps += 1
            self.steps_done = step + 1
            if step == first_step:
                callbacks.first_step(self.steps_done)
            if self.steps_done % every == 0 or self.steps_done == self.total_steps:
                figures = self.queue_figures(step, loss, norm, window)
                window = self._new_window()
                self.deliver_figures()
                self._pending = figures
                if not self.reads_late:
                    self.deliver_figures()
            if self.steps_done % STEPS_BETWEEN_GARBAGE_COLLECTIONS == 0:
                gc.collect(1)
            paused, stopping = callbacks.after_step(self.steps_done)
            window.paused += paused
            if stopping:
                break

    def _new_window(self) -> StepWindow:
        return StepWindow(
            time.perf_counter(),
            began=device_event(self.ranks.device),
            compile_started=compile_seconds(),
        )

    def queue_figures(
        self, step: int, loss: torch.Tensor, norm: torch.Tensor, window: StepWindow
    ) -> PendingFigures[LoggedStep]:
        """Have what the step leaves on the device copied to the host, without waiting for it."""
        kept = self.recent.values.flatten()
        values = torch.cat([torch.stack([loss, norm]), self.optimizer.skipped.double(), kept])
        compiles = resolve_compile(self.config.training, self.ranks.device.type)
        on_host = time.perf_counter() - window.started
        record = StepRecord(
            step=step + 1,
            loss=math.nan,
            learning_rate=self.learning_rate(step),
            grad_norm=math.nan,
            tokens=round(window.sequences / window.steps * self.config.data.sequence_length),
            valid_tokens=window.valid_tokens,
            num_gpus=self.ranks.world_size,
            data_seconds=window.data_seconds / window.steps,
            compile_seconds=(
                ((compile_seconds() - window.compile_started) / window.steps or None)
                if compiles
                else None
            ),
            memory_gib=peak_memory_gib(self.ranks.device),
            skipped_steps=0,
            window_steps=window.steps,
            epoch=self.data.epoch_of(step, self.shape),
            step_seconds=0.0,
        )

        def finished(figures: list[float], on_device: float | None) -> LoggedStep:
            seconds = (on_host if on_device is None else on_device) - window.paused
            return LoggedStep(
                replace(
                    record,
                    loss=figures[0],
                    grad_norm=figures[1],
                    skipped_steps=int(figures[2]),
                    step_seconds=seconds / window.steps,
                ),
                int(figures[4]),
                self.recent.of(figures[5:], step, window.steps),
            )

        return PendingFigures(values, window.began, finished)

    def deliver_figures(self) -> None:
        """Give the callbacks the figures that are on their way, if any. Waits for the device."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        assert self._callbacks is not None
        self._callbacks.logged_step(pending.read())

    def in_nonfinite_row(self) -> bool:
        """Whether the last step was skipped: then nothing is saved. Waits for the device."""
        return bool(self.optimizer.skipped[1].item() > 0)


def compile_seconds() -> float:
    """Seconds that torch.compile has taken in this process so far."""
    spent = torch._dynamo.utils.calculate_time_spent()
    return float(spent.get("total_wall_time", 0.0))


def peak_memory_gib(device: torch.device) -> float:
    """Memory of this rank: the peak allocated on its GPU, or what is resident on the host now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * 4096 / GIB


def _disable_garbage_collection() -> None:
    """Collect only at chosen steps, the same on all ranks: a pause of one rank is a pause of
    all."""
    gc.collect()
    gc.freeze()
    gc.disable()
