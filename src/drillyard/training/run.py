"""One rank of `drillyard train` (or of torchrun): join, prepare data, build, resume, train,
evaluate, export.

`train` and `run_rank` read top to bottom in the order of events.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from drillyard.config.run import RunConfig
from drillyard.config.run_checks import require_valid, resolve_global_batch
from drillyard.data import DATA_RECORD
from drillyard.data.data_changes import read_record, write_record
from drillyard.data.prepared_data import PreparedData, prepare
from drillyard.data.tokenizer import today
from drillyard.data.tokenizer_files import save_tokenizer
from drillyard.errors import UserError
from drillyard.evaluation.failures import EvaluationStopped
from drillyard.models.export import export
from drillyard.parallel.collectives import from_first_rank, gather
from drillyard.parallel.ranks import Ranks, start_ranks, stop_ranks
from drillyard.reporting.summary import closing_lines, model_of, required_failure, write_summary
from drillyard.supervise.heartbeat import HeartbeatWriter
from drillyard.supervise.launch_contract import EXIT_CHECKPOINTED, failure_elsewhere
from drillyard.supervise.rank_supervision import RankSupervision
from drillyard.supervise.scheduler_restarts import (
    belong_to,
    end_soon_without_claim,
    end_without_claim,
    own_start,
    write_claim,
)
from drillyard.telemetry import RunLog
from drillyard.telemetry.runlog import ConsoleMode
from drillyard.training.base_record import (
    Dtypes,
    export_dtypes,
    save_base_record,
    saved_base_documents,
)
from drillyard.training.build import RunParts, build_callbacks, build_run, describe_length
from drillyard.training.callbacks import StepCallbacks
from drillyard.training.checkpoint.inventory import list_checkpoints
from drillyard.training.model_setup import (
    ShardedModel,
    fill_frozen_weights,
    fill_weights,
    require_trainable,
    set_determinism,
)
from drillyard.training.numerics import versions
from drillyard.training.out_of_memory import RanOutOfMemory, out_of_memory, part_out_of_memory
from drillyard.training.resolved_record import (
    AutoSettings,
    load_auto_settings,
    replace_settings,
    report_auto_settings,
    report_estimate,
    save_auto_settings,
)
from drillyard.training.resume import checkpoint_state, resume, seed_rank
from drillyard.training.run_directory import (
    SAVED_BASE,
    SAVED_TOKENIZER,
    claim_run_directory,
    holds_training,
    remove_summary,
    run_directory_of,
)


class StoppedWithoutCheckpoint(RuntimeError):
    """The ranks stopped on request, and the step that they stopped after could not be saved."""


def train(
    config: RunConfig,
    side: RankSupervision,
    *,
    console: ConsoleMode = "text",
    attempt: int = 0,
    is_claimed: bool = False,
) -> int:
    """Train `config` as one rank of however many there are.

    Returns exit code 0, 85 when stopped on request, or 1 when a required metric could not be
    measured. `attempt`: the number of this start, from 0; `is_claimed`: a supervisor has claimed
    the run directory. Raises UserError for mistakes of the user, StoppedWithoutCheckpoint when the
    last step before a stop could not be saved, RanOutOfMemory when a step ran out of memory and the
    next start may get further.
    """
    side.begin("joining", "waiting")
    set_determinism(config)
    ranks = start_ranks(
        config.training, config.parallelism, timedelta(seconds=config.timeouts.collective)
    )
    # Each of torchrun's agents counts its own restarts: the number that the ranks agreed on holds
    # for all of them.
    attempt = side.attempt = max(attempt, ranks.restarts)
    require_valid(config, ranks.world_size)
    directory = run_directory_of(config)
    if ranks.rank == 0 and attempt == 0 and not is_claimed:
        claim_run_directory(config, ranks.world_size)
    if ranks.rank == 0 and not is_claimed:
        write_claim(directory)
    belong_to(from_first_rank(own_start))
    if ranks.rank == 0:
        end_without_claim(directory)()
    side.owns_directory = True
    begins = not holds_training(directory) and config.checkpoint.resume in ("auto", "never")
    require_trainable(config, ranks.device, needs_weights=begins)
    side.begin("data", "waiting")
    known = read_record(directory) if holds_training(directory) else None
    # One for all ranks, whose nodes may be in other time zones.
    date = from_first_rank(today)
    with ranks.in_turn() as is_first, side.during("data"):
        data = prepare(
            config,
            on_progress=lambda *_: side.signs.show(),
            known=known,
            only_open=not is_first,
            date=date,
        )
    require_same_data(data)
    side.begin("model", "working")
    may_log = end_soon_without_claim(directory) if ranks.rank == 0 else lambda: None
    with RunLog(
        directory,
        rank=ranks.rank,
        config=config,
        console=console,
        attempt=attempt,
        before_write=may_log,
    ) as log:
        if attempt == 0 and not is_claimed:
            log.event("run_start", world_size=ranks.world_size)
        log.event("round_start", world_size=ranks.world_size, threads=ranks.threads, **versions())
        if ranks.rank == 0:
            data.report.notes += data.before_training(
                config, resolve_global_batch(config, ranks.num_data_ranks)
            )
        log.event("data", parts=data.report.parts, notes=data.report.notes or None)
        if ranks.rank == 0:
            what = f"writing {directory / DATA_RECORD} (without it a change of data is not named)"
            with log.optional(what, OSError):
                write_record(directory, data.record)
        for note in data.report.notes:
            log.message(note)
        exit_code = run_rank(config, ranks, data, log, directory, side)
    if exit_code == 0 and ranks.rank == 0:
        end_without_claim(directory)()
        summary = write_summary(directory)
        log.closing(
            closing_lines(summary, directory),
            {**summary, "model": str(model_of(summary, directory))},
        )
        if (
            config.evaluation.required
            and not is_claimed
            and (failure := required_failure(directory)) is not None
        ):
            # A supervisor reports this itself, also for a run that had finished before.
            sys.stderr.write(f"error: {failure}\n")
            exit_code = 1
    # After an error this could hang: a rank may be missing or inside a collective.
    stop_ranks()
    side.close()
    return exit_code


def run_rank(
    config: RunConfig,
    ranks: Ranks,
    data: PreparedData,
    log: RunLog,
    directory: Path,
    side: RankSupervision,
) -> int:
    """Build, resume, train and finish; returns the exit code."""
    auto = load_auto_settings(config, ranks, directory)
    config = auto.config
    parts = build_run(config, ranks, data, log, memory_gib=auto.trusted_gib)
    model, trainer = parts.model, parts.trainer
    config = trainer.config
    callbacks = build_callbacks(config, ranks, parts, data, log, directory, side)
    checkpointer = callbacks.checkpointer
    if ranks.rank == 0:
        save_auto_settings(
            auto,
            model.resolved,
            directory,
            log,
            model.left_in_bf16,
            model.stores_fp8,
            model.gathers_fp8,
        )
        report_auto_settings(auto, model.resolved, log)
        with log.optional("the estimate"):
            report_estimate(auto, model.resolved, log)
    seed_rank(config.training.seed, 0, ranks)
    log.total_steps = trainer.total_steps
    for line in describe_length(trainer):
        log.message(line)
    side.begin("loading", "working")
    first_step, origin = resume(config, checkpointer, trainer.optimizer, ranks, parts.identity, log)
    callbacks.metadata["resume"] = origin
    side.signs.step(first_step, trainer.total_steps, trained=False)
    if ranks.rank == 0:
        end_without_claim(directory)()
        with log.optional(f"removing the summary of its earlier end from {directory}", OSError):
            remove_summary(directory)
        save_tokenizer(data.tokenizer_files, directory / SAVED_TOKENIZER)
    dtypes = record_base_model(config, parts, log, directory, begins=first_step == 0)
    beat_at_forwards(model, side.signs)
    if first_step > 0:
        fill_frozen_weights(config, model)
    else:
        fill_weights(config, model)
        if config.evaluation.at_start:
            with side.during("evaluation"):
                callbacks.evaluate(0)
    if config.checkpoint.every_steps:
        checkpointer.prepare(checkpoint_state(trainer.optimizer, ranks))
    # The first step includes compiling. Until it is done, a rank that is asked to stop has nothing
    # to save.
    side.begin("first step", "working")
    try:
        finished = trainer.train(first_step, callbacks)
    except Exception as error:
        explain_end(error, parts, auto, directory, first_step)
        raise
    if finished:
        finished = finish(parts, callbacks, data, directory, dtypes)
    else:
        checkpointer.close()
    side.answer("ignore")
    if checkpointer.saves_failed:
        log.message(f"{checkpointer.saves_failed} checkpoints could not be saved: see events.jsonl")
    step = trainer.steps_done
    stopped = "interrupted" if failure_elsewhere() is None else "failed"
    status = "completed" if finished else stopped
    log.event("end", step=step, status=status, sequences=data.train.coverage(step, trainer.shape))
    if ranks.world_size > 1:
        dist.barrier()
    callbacks.stop.close()
    if not finished and checkpointer.step_on_disk != step:
        raise StoppedWithoutCheckpoint(
            describe_unsaved_stop(trainer.in_nonfinite_row(), step, directory)
        )
    return 0 if finished else EXIT_CHECKPOINTED


def explain_end(
    error: Exception, parts: RunParts, auto: AutoSettings, directory: Path, first_step: int
) -> None:
    """Raise what a step that ran out of memory means for the run: RanOutOfMemory where another
    start may get further, with other settings or from a checkpoint, else UserError. Any other error
    is left to the caller."""
    trainer, resolved = parts.trainer, parts.model.resolved
    if (part := part_out_of_memory(error)) is None:
        return
    text = out_of_memory(resolved.setup, part, trainer.ranks, error)
    if trainer.steps_done > first_step:
        raise RanOutOfMemory(text) from error
    end_without_claim(directory)()
    changes = replace_settings(auto, resolved, directory, part, first_step=first_step)
    if changes is None:
        raise UserError(text) from error
    raise RanOutOfMemory(f"{text}\nthe next start takes {changes}") from error


def require_same_data(data: PreparedData) -> None:
    """Raise UserError on all ranks when a node has other data than rank 0, from its own copy of the
    source."""
    prints = gather(data.train.fingerprint)
    others = [rank for rank, fingerprint in enumerate(prints) if fingerprint != prints[0]]
    if others:
        raise UserError(
            f"rank {others[0]}: its data are not those of rank 0 (another source or tokenizer on"
            " its host); give all hosts the same files, or put them on storage that all share"
        )


def record_base_model(
    config: RunConfig, parts: RunParts, log: RunLog, directory: Path, *, begins: bool
) -> Dtypes:
    """Record what exports need of the base model; returns the dtype of each parameter in `final/`.
    Collective."""

    def record() -> Dtypes:
        try:
            return save_base_record(config.model, parts.model.causal_lm, directory, begins=begins)
        except OSError as error:
            log.warn(
                f"{directory / SAVED_BASE}: not written ({error.strerror}): exports will need the"
                " base model"
            )
            return export_dtypes(config.model, parts.model.causal_lm)

    return from_first_rank(record)


def describe_unsaved_stop(in_nonfinite_row: bool, step: int, directory: Path) -> str:
    """The cost of a stop after `step` without a checkpoint of it, and what to do."""
    try:
        saved = [info.step for info in list_checkpoints(directory) if info.complete]
    except OSError:
        saved = []  # the next start reports what is wrong with the storage
    newest = (
        f"the newest checkpoint is of step {saved[-1]}"
        if saved
        else "no earlier checkpoint can be read"
    )
    if in_nonfinite_row:
        why = "it ended a row of skipped steps (not finite), in which nothing is saved"
        advice = "look at nonfinite_step in events.jsonl"
    else:
        why = "it could not be saved"
        advice = "fix the cause given in checkpoint_failed in events.jsonl"
    return (
        f"stopped on request after step {step}, but {why}: {newest}, the steps since then are"
        f" lost\n{advice}, then give the same command again"
    )


def beat_at_forwards(model: ShardedModel, signs: HeartbeatWriter) -> None:
    """Make each forward of `model` a heartbeat."""
    for module in (model.root, model.causal_lm):
        module.register_forward_pre_hook(lambda *_: signs.show(), prepend=True)


def finish(
    parts: RunParts, callbacks: StepCallbacks, data: PreparedData, directory: Path, dtypes: Dtypes
) -> bool:
    """Save the last checkpoint, evaluate, then write `final/`: what was trained is safe before it
    is measured.

    False when all ranks have agreed to stop in that evaluation: the next start does the rest.
    """
    step, side, log, checkpointer = (
        parts.trainer.total_steps,
        callbacks.side,
        callbacks.log,
        callbacks.checkpointer,
    )
    failed_before = checkpointer.saves_failed
    side.begin("last checkpoint", "working")
    if parts.trainer.in_nonfinite_row():
        with log.span("checkpoint", step):  # an earlier save may still be in flight
            checkpointer.close()
    else:
        callbacks.save(step, wait=True)
        checkpointer.close()
        checkpointer.end_at(step)
        if checkpointer.saves_failed == failed_before:
            # The rest can be repeated from that checkpoint.
            side.answer("leave")
    side.begin("evaluation", "working")
    try:
        callbacks.evaluate(step)
    except EvaluationStopped:
        return False
    side.begin("export", "working")
    with log.span("export", step) as found:
        final = directory / "final"
        model_config = parts.trainer.config.model
        written = export(
            parts.model.causal_lm,
            final,
            tokenizer=data.tokenizer_files if callbacks.ranks.rank == 0 else None,
            base=saved_base_documents(directory, model_config, model_config.id),
            dtype=dtypes,
            overwrite=True,
            otherwise=directory / f"final-step-{step:08d}",
            adapters="left out" if parts.trainer.config.model.lora is None else "alone",
            before_write=end_without_claim(directory),
        )
        found["directory"] = written.name
    if written != final:
        log.warn(
            f"{final}: holds files that no export of this run wrote, so the model was written to"
            f" {written}"
        )
    return True
