"""One rank's whole life: join, prepare, build, resume, train, evaluate, export, tell.

`train` is what every rank of `drillyard train` and of torchrun executes. It reads top to bottom in the order in which
things happen; each step of it is a function of its own room.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from drillyard.config import require_valid, resolve_global_batch
from drillyard.config.run import RunConfig
from drillyard.data import PreparedData, prepare
from drillyard.data.data_record import DATA_RECORD, read_record, write_record
from drillyard.errors import UserError
from drillyard.evaluation.failures import EvaluationStopped
from drillyard.models import export, save_tokenizer
from drillyard.parallel.model_setup import ShardedModel, fill_weights, require_trainable, set_determinism
from drillyard.parallel.ranks import Ranks, start_ranks, stop_ranks
from drillyard.supervise import EXIT_CHECKPOINTED
from drillyard.supervise.heartbeat import TRAINING, HeartbeatWriter
from drillyard.supervise.progress_monitor import ProgressMonitor
from drillyard.supervise.rank_supervision import RankSupervision
from drillyard.telemetry import RunLog, write_summary
from drillyard.telemetry.runlog import ConsoleMode
from drillyard.telemetry.summary import required_failure
from drillyard.training.auto_settings import (
    load_auto_settings,
    report_auto_settings,
    report_estimate,
    save_auto_settings,
)
from drillyard.training.base import Dtypes, export_dtypes, save_base_record
from drillyard.training.build import RunParts, build_run, length_lines
from drillyard.training.checkpoint import list_checkpoints
from drillyard.training.checkpoint.loading import on_all_ranks
from drillyard.training.numerics import versions
from drillyard.training.resume import resume
from drillyard.training.run_directory import (
    SAVED_TOKENIZER,
    claim_run_directory,
    holds_training,
    remove_summary,
    run_directory_of,
)
from drillyard.training.saved_model import SAVED_BASE
from drillyard.training.signals import StopRequest
from drillyard.training.state import checkpoint_state, seed_rank


@dataclass(frozen=True)
class RankOutcome:
    """How this rank's part of the run ended."""

    exit_code: int
    run_directory: Path


def train(
    config: RunConfig,
    side: RankSupervision,
    *,
    console: ConsoleMode = "text",
    round_number: int = 0,
    is_claimed: bool = False,
) -> RankOutcome:
    """Train `config` as one rank of however many there are; returns exit code 0, 85 when stopped on request, or 1
    where a metric that is required could not be measured.

    Raises StoppedUnsaved when it was stopped and the step that it stopped after could not be saved.
    `round_number` counts the starts of these ranks; `is_claimed` says that a supervisor has claimed the run directory.
    Raises UserError for everything that the user can mend.
    """
    watch = side.watch
    watch.begin("joining", "waiting")
    set_determinism(config)
    ranks = start_ranks(config.training, config.parallelism, timedelta(seconds=config.timeouts.collective))
    # Each of torchrun's agents counts its own restarts: what the ranks have agreed on holds for all of them.
    round_number = side.round_number = max(round_number, ranks.restarts)
    require_valid(config, ranks.world_size)
    directory = run_directory_of(config)
    if ranks.rank == 0 and round_number == 0 and not is_claimed:
        claim_run_directory(config, ranks.world_size)
    side.owns_directory = True
    begins = not holds_training(directory) and config.checkpoint.resume in ("auto", "never")
    require_trainable(config, ranks.device, needs_weights=begins)
    watch.begin("data", "waiting")
    data = prepare_on_all(config, ranks, watch)
    require_same_data(data)
    watch.begin("model", "working")
    with RunLog(directory, rank=ranks.rank, config=config, console=console, round_number=round_number) as log:
        if round_number == 0 and not is_claimed:
            log.event("run_start", world_size=ranks.world_size)
        log.event("round_start", world_size=ranks.world_size, threads=ranks.threads, **versions())
        if ranks.rank == 0:
            data.report.notes += data.before_training(config, resolve_global_batch(config, ranks.world_size))
        log.event("data", parts=data.report.parts, notes=data.report.notes or None)
        remember_data(data, log, directory, ranks)
        for note in data.report.notes:
            log.message(note)
        exit_code = run_rank(config, ranks, data, log, directory, side)
    if exit_code == 0 and ranks.rank == 0:
        log.closing(write_summary(directory), directory)
        if config.evaluation.required and not is_claimed and (failure := required_failure(directory)) is not None:
            # A supervisor says so itself, also where the run was finished before.
            sys.stderr.write(f"error: {failure}\n")
            exit_code = 1
    # Only a run that ended well takes its leave: with a rank missing, or amid a collective, this could hang.
    stop_ranks()
    watch.close()
    return RankOutcome(exit_code, directory)


def prepare_on_all(config: RunConfig, ranks: Ranks, watch: ProgressMonitor) -> PreparedData:
    """Tokenise on one rank while the others wait, then open the caches on all of them.

    Raises UserError when the data are not what this run has been trained on so far.
    """
    directory = run_directory_of(config)
    known = read_record(directory) if holds_training(directory) else None

    def prepared(first: bool) -> PreparedData:
        with watch.during("data"):
            return prepare(config, on_progress=lambda *_: watch.signs.show(), known=known, only_open=not first)

    return ranks.in_turn(prepared)


def require_same_data(data: PreparedData) -> None:
    """Raise UserError on all ranks where nodes, each with a source of its own, have other data than rank 0."""
    prints = on_all_ranks(None, lambda: data.train.fingerprint)
    others = [rank for rank, fingerprint in enumerate(prints) if fingerprint != prints[0]]
    if others:
        raise UserError(
            f"rank {others[0]}: its data are not those of rank 0 (another source or tokenizer on its host); give all "
            "hosts the same files, or put them on storage that all share"
        )


def remember_data(data: PreparedData, log: RunLog, directory: Path, ranks: Ranks) -> None:
    """Let later rounds know what the data were. A disk that takes no more ends no run."""
    if ranks.rank == 0:
        try:
            write_record(directory, data.record)
        except OSError as error:
            log.warn(f"{directory / DATA_RECORD}: not written ({error.strerror}): a change of data will not be named")


def remember_base(
    config: RunConfig, parts: RunParts, log: RunLog, directory: Path, ranks: Ranks, *, begins: bool
) -> Dtypes:
    """Keep what exports need of the base model; the dtype of each parameter in `final/`. Collective."""

    def kept() -> Dtypes:
        if ranks.rank != 0:
            return {}
        try:
            return save_base_record(config.model, parts.model.causal_lm, directory, begins=begins)
        except OSError as error:
            log.warn(f"{directory / SAVED_BASE}: not written ({error.strerror}): exports will need the base model")
            return export_dtypes(config.model, parts.model.causal_lm)

    return on_all_ranks(None, kept)[0]


def run_rank(
    config: RunConfig, ranks: Ranks, data: PreparedData, log: RunLog, directory: Path, side: RankSupervision
) -> int:
    """Build, resume, train and finish, with everything that is shared between ranks in place; returns the exit code."""
    watch, stop = side.watch, StopRequest(ranks.world_size, side.stops, ranks.collective_timeout)
    kept = load_auto_settings(config, ranks, directory)
    config = kept.config
    parts = build_run(config, ranks, data, log, directory, stop, memory_gib=kept.memory_gib)
    if ranks.rank == 0:
        save_auto_settings(kept, parts.model.resolved, directory, log)
        report_auto_settings(kept, parts.model.resolved, log)
        with log.optional("the estimate"):
            report_estimate(kept, parts.model.resolved, log)
    seed_rank(config.training.seed, 0, ranks)
    log.total_steps = parts.trainer.total_steps
    for line in length_lines(parts.trainer):
        log.message(line)
    watch.begin("loading", "working")
    first_step = resume(config, parts.checkpointer, parts.optimizer, ranks, parts.identity, log)
    watch.signs.step(first_step, parts.trainer.total_steps)
    if ranks.rank == 0:
        try:
            remove_summary(directory)
        except OSError as error:
            log.warn(f"{directory}: the summary of its earlier end cannot be removed ({error.strerror})")
        save_tokenizer(data.tokenizer, directory / SAVED_TOKENIZER)
    dtypes = remember_base(config, parts, log, directory, ranks, begins=first_step == 0)
    show_forwards(parts.model, watch.signs)
    if first_step == 0:
        fill_weights(config, parts.model.causal_lm)
        if config.evaluation.at_start:
            with watch.during("evaluation"):
                parts.between.run_evaluation(0)
    if config.checkpoint.every_steps:
        parts.checkpointer.prepare(checkpoint_state(parts.optimizer, ranks))
    # Compiling is part of the first step. Until that is done, a rank that is asked to stop has nothing to save.
    watch.begin("first step", "working")
    between = Between(parts, side, log)
    finished = parts.trainer.train(
        first_step,
        on_first=between.first_step,
        on_logged=parts.reporter.logged,
        after_step=between.after_step,
        stop=stop,
    )
    if finished:
        finished = finish(parts, data, log, directory, side, dtypes)
    else:
        parts.checkpointer.close()
    side.stops.answer("ignore")
    report_failed_saves(parts, log)
    log.event(
        "end",
        step=parts.trainer.steps_done,
        status="completed" if finished else "interrupted",
        sequences=parts.trainer.coverage(parts.trainer.steps_done),
    )
    if ranks.world_size > 1:
        dist.barrier()
    stop.close()
    if not finished and parts.checkpointer.step_on_disk != parts.trainer.steps_done:
        raise StoppedWithoutCheckpoint(describe_unsaved_stop(parts, directory))
    return 0 if finished else EXIT_CHECKPOINTED


class StoppedWithoutCheckpoint(RuntimeError):
    """The ranks have stopped on request, and the step that they stopped after is on no disk."""


def describe_unsaved_stop(parts: RunParts, directory: Path) -> str:
    """What a stop without a checkpoint of that moment costs, and what to do."""
    step = parts.trainer.steps_done
    try:
        saved = [info.step for info in list_checkpoints(directory) if info.complete]
    except OSError:
        saved = []  # the storage is gone: what lies there is told by the next start
    newest = f"the newest checkpoint is of step {saved[-1]}" if saved else "no earlier checkpoint can be read"
    if parts.trainer.in_nonfinite_row():
        why = "it ended a row of skipped steps (not finite), in which nothing is saved"
        advice = "look at nonfinite_step in events.jsonl"
    else:
        why = "it could not be saved"
        advice = "mend what checkpoint_failed in events.jsonl names"
    return (
        f"stopped on request after step {step}, but {why}: {newest}, the steps since then are lost\n"
        f"{advice}, then give the same command again"
    )


def show_forwards(model: ShardedModel, signs: HeartbeatWriter) -> None:
    """Let every forward of `model` be a sign of life."""
    for module in (model.root, model.causal_lm):
        module.register_forward_pre_hook(lambda *_: signs.show(), prepend=True)


@dataclass(frozen=True)
class Between:
    """What the trainer calls between steps, with signs of life and an ear for stop signals."""

    parts: RunParts
    side: RankSupervision
    log: RunLog

    def first_step(self, step: int) -> None:
        """The first step of this round is done: from here on there is something to save."""
        self.side.stops.answer("note")
        self.side.watch.begin(TRAINING, "strict")
        self.log.event("first_step", step=step)

    def after_step(self, steps_done: int, stopping: bool) -> float:
        """Evaluate and save what is due; returns the seconds it took. A stop ends an evaluation early."""
        self.side.watch.signs.step(steps_done, self.parts.trainer.total_steps)
        started = time.perf_counter()
        with self.side.watch.during("between steps"):
            try:
                return self.parts.between.after_step(steps_done, stopping)
            except EvaluationStopped:
                # The next step is the last: all ranks hear after it that they are to stop.
                return time.perf_counter() - started


def finish(
    parts: RunParts, data: PreparedData, log: RunLog, directory: Path, side: RankSupervision, dtypes: Dtypes
) -> bool:
    """Last checkpoint, last evaluation and `final/`, in this order: what was trained is safe before it is measured.

    False when all ranks have agreed to stop in that evaluation: the next start does what is left.
    """
    step = parts.trainer.total_steps
    failed_before = parts.checkpointer.saves_failed
    side.watch.begin("last checkpoint", "working")
    is_saved = not parts.trainer.in_nonfinite_row()
    if is_saved:
        parts.between.save(step, wait=True)
    if is_saved:
        parts.checkpointer.close()
    else:
        with log.span("checkpoint", step):  # an earlier one may still be on its way
            parts.checkpointer.close()
    if is_saved and parts.checkpointer.saves_failed == failed_before:
        # Whatever is left can be done again from that checkpoint.
        side.stops.answer("leave")
    side.watch.begin("evaluation", "working")
    try:
        parts.between.run_evaluation(step)
    except EvaluationStopped:
        return False
    side.watch.begin("export", "working")
    with log.span("export", step) as found:
        final = directory / "final"
        written = export(
            parts.model.causal_lm,
            final,
            tokenizer=data.tokenizer,
            dtype=dtypes,
            overwrite=True,
            otherwise=directory / f"final-step-{step:08d}",
        )
        found["directory"] = written.name
    if written != final:
        log.warn(f"{final}: holds files that no export of this run wrote, so the model was written to {written}")
    return True


def report_failed_saves(parts: RunParts, log: RunLog) -> None:
    """Say how many checkpoints of this round could not be saved, if any."""
    if parts.checkpointer.saves_failed:
        log.message(f"{parts.checkpointer.saves_failed} checkpoints could not be saved: see events.jsonl")
