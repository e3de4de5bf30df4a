"""The loop: step, log, evaluate, save, stop.

A step is `train_step`: read the micro-batches of this rank, run forward and backward, update. Everything else here
happens between steps and changes no bit of them: evaluation runs with the random state forked, logging reads what the
device already holds, saving copies it. The device is waited for only where a number is looked at: at logged steps and
before saves.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from drillyard.config.run import RunConfig
from drillyard.data.sampler import Mixture
from drillyard.errors import UserError
from drillyard.models.loss import LanguageModelLoss, LossInputs, loss_inputs
from drillyard.parallel.parallelize import fsdp_modules
from drillyard.parallel.ranks import Ranks
from drillyard.training.optimizer import ShardedAdamW
from drillyard.training.schedule import learning_rate
from drillyard.training.signals import StopRequest
from drillyard.training.spikes import RecentSteps, StepFigures

STEPS_BETWEEN_GARBAGE_COLLECTIONS = 50


@dataclass(frozen=True)
class BatchShape:
    """How the global batch of a step is dealt out: rank r takes micro-batches r, r + ranks, ... of it.

    `by_epoch`: the last step of each epoch has only the sequences that are left of it (data/sampler.py).
    """

    micro_batch_size: int
    accumulation: int
    global_batch_size: int
    by_epoch: bool = False


@dataclass
class StepWindow:
    """What the steps since the last logged one took, seen from this rank's host."""

    started: float
    steps: int = 0
    data_seconds: float = 0.0
    compile_started: float = 0.0
    sequences: int = 0
    valid_tokens: int = 0


@dataclass(frozen=True)
class LoggedStep:
    """The numbers of a logged step, read from the device at once."""

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    skipped_steps: int
    longest_skipped_row: int
    window_steps: int
    step_seconds: float
    data_seconds: float
    compile_seconds: float | None
    sequences_per_step: float
    valid_tokens: int


class Trainer:
    """Takes a sharded model from `first_step` to `total_steps`; what is done between steps comes in as callables."""

    def __init__(
        self,
        config: RunConfig,
        ranks: Ranks,
        root: LanguageModelLoss,
        optimizer: ShardedAdamW,
        data: Mixture,
        shape: BatchShape,
        total_steps: int,
        *,
        attention: str,
        gather_gradients_once: bool,
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.root = root
        self.optimizer = optimizer
        self.data = data
        self.shape = shape
        self.total_steps = total_steps
        self.attention = attention
        self.accumulate_locally = gather_gradients_once and shape.accumulation > 1
        self.sharded = fsdp_modules(root)
        self.steps_done = 0
        self.recent = RecentSteps(min(config.logging.every_steps, total_steps), ranks.device)
        self.on_read: Callable[[list[StepFigures]], None] = lambda recent: None
        """Called at each logged step with the figures of all steps since the last one."""

    def train_step(self, step: int, window: StepWindow) -> tuple[torch.Tensor, torch.Tensor]:
        """One optimizer step; returns the loss of the global batch and its gradient norm, both still on the device.

        The loss is summed over tokens and divided by the valid tokens of the whole global batch, which every rank reads
        from the index: no communication, and neither ranks nor micro-batches change what is computed. A step with fewer
        sequences than the global batch is the mean over the tokens that it has, at the schedule's learning rate.
        """
        started = time.perf_counter()
        references = self.data.indices(step, self.shape.global_batch_size, by_epoch=self.shape.by_epoch)
        window.sequences += len(references)
        window.valid_tokens = self.data.valid_tokens(references)
        micro_batches = list(self.micro_batches(references))
        window.data_seconds += time.perf_counter() - started

        loss_sum = torch.zeros((), device=self.ranks.device, dtype=torch.float64)
        for number, inputs in enumerate(micro_batches):
            self.synchronise_gradients(last=number == len(micro_batches) - 1)
            loss = self.root(**vars(inputs), scale=1 / max(1, window.valid_tokens))
            loss.backward()
            loss_sum += loss.detach()
        loss_and_norm = self.optimizer.step(loss_sum, self.learning_rate(step))
        self.optimizer.zero_grad()
        return loss_and_norm

    def micro_batches(self, references: Any) -> Iterator[LossInputs]:
        """This rank's micro-batches of the global batch, on the device.

        All ranks have as many, since each gathers weights from all; one that has no sequences left runs padding.
        """
        size, ranks = self.shape.micro_batch_size, self.ranks
        for number in range(math.ceil(len(references) / (size * ranks.world_size))):
            first = (number * ranks.world_size + ranks.rank) * size
            batch = self.data.read_filled(references[first : first + size], size)
            yield loss_inputs(
                batch, self.root.causal_lm, self.attention, ranks.device, self.config.training.loss_chunk_tokens
            )

    def synchronise_gradients(self, *, last: bool) -> None:
        """Reduce gradients after the last micro-batch only, where whole gradients fit in memory; else after each."""
        if self.shape.accumulation == 1:
            return
        root = self.root
        assert isinstance(root, FSDPModule)
        root.set_is_last_backward(last)
        if self.accumulate_locally:
            root.set_requires_gradient_sync(last)
            root.set_reshard_after_backward(last)

    def learning_rate(self, step: int) -> float:
        """The schedule's value at `step`."""
        training = self.config.training
        return learning_rate(
            step, peak=training.optimizer.learning_rate, total_steps=self.total_steps, schedule=training.schedule
        )

    def train(
        self,
        first_step: int,
        *,
        on_first: Callable[[int], None],
        on_logged: Callable[[LoggedStep], None],
        after_step: Callable[[int, bool], float],
        stop: StopRequest,
    ) -> bool:
        """Run steps until the end or until somebody asks to stop; True when all steps are done.

        `on_first` is called when the first of them is done. `on_logged` gets the figures of each logged step.
        `after_step(steps_done, stopping)` evaluates and saves what is due, and returns the seconds it took, which are
        no step's time.
        """
        self.steps_done = first_step
        every = self.config.logging.every_steps
        window = StepWindow(time.perf_counter(), compile_started=compile_seconds())
        _calm_garbage_collector()
        for step in range(first_step, self.total_steps):
            loss, norm = self.train_step(step, window)
            self.recent.keep(step, loss, norm)
            window.steps += 1
            self.steps_done = step + 1
            if step == first_step:
                on_first(self.steps_done)
            if self.steps_done % every == 0 or self.steps_done == self.total_steps:
                figures = self.read_figures(step, loss, norm, window)
                window = StepWindow(time.perf_counter(), compile_started=compile_seconds())
                on_logged(figures)
            if self.steps_done % STEPS_BETWEEN_GARBAGE_COLLECTIONS == 0:
                gc.collect(1)
            stopping = stop.agreed()
            paused = after_step(self.steps_done, stopping)
            window.started += paused
            if stopping:
                break
        gc.enable()
        return self.steps_done == self.total_steps

    def read_figures(self, step: int, loss: torch.Tensor, norm: torch.Tensor, window: StepWindow) -> LoggedStep:
        """Wait for the device, once, and read what the step left there. UserError after a row of skipped steps."""
        kept = self.recent.values.flatten()
        figures = torch.cat([torch.stack([loss, norm]), self.optimizer.skipped.double(), kept]).tolist()
        longest = int(figures[4])
        seconds = (time.perf_counter() - window.started) / window.steps
        self.on_read(self.recent.of(figures[5:], step, window.steps))
        if longest >= self.config.training.max_nonfinite_steps:
            raise UserError(
                f"step {step + 1}: the loss or gradient was not finite in {longest} steps in a row (all skipped, "
                "weights unchanged); go on with a lower training.optimizer.learning_rate, or look at the data of "
                f"these steps: drillyard data show RUN_DIR --step {step + 1} "
                "(training.max_nonfinite_steps is the limit)"
            )
        return LoggedStep(
            step=step + 1,
            loss=figures[0],
            gradient_norm=figures[1],
            learning_rate=self.learning_rate(step),
            skipped_steps=int(figures[2]),
            longest_skipped_row=longest,
            window_steps=window.steps,
            step_seconds=seconds,
            data_seconds=window.data_seconds / window.steps,
            compile_seconds=(compile_seconds() - window.compile_started) / window.steps or None,
            sequences_per_step=window.sequences / window.steps,
            valid_tokens=window.valid_tokens,
        )

    def coverage(self, steps: int) -> dict[str, Any]:
        """What the first `steps` steps train: see `Mixture.coverage`."""
        return self.data.coverage(steps, self.shape.global_batch_size, by_epoch=self.shape.by_epoch)

    def in_nonfinite_row(self) -> bool:
        """Whether the last step was skipped: then nothing is saved. Waits for the device."""
        return bool(self.optimizer.skipped[1].item() > 0)


def compile_seconds() -> float:
    """Seconds that torch.compile has taken in this process so far."""
    spent = torch._dynamo.utils.calculate_time_spent()
    return float(spent.get("total_wall_time", 0.0))


def _calm_garbage_collector() -> None:
    """Collect at chosen steps, the same on all ranks: a pause on one of them is a pause of all."""
    gc.collect()
    gc.freeze()
    gc.disable()
