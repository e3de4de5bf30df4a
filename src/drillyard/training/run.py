"""One rank's whole life: join, prepare, build, resume, train, evaluate, export, tell.

`train` is what every rank of `drillyard train` and of torchrun executes. It reads top to bottom in the order in which
things happen; each step of it is a function of its own room.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from drillyard.config import require_valid
from drillyard.config.run import RunConfig
from drillyard.data import PreparedData, prepare
from drillyard.models import export
from drillyard.parallel.ranks import Ranks, start_ranks, stop_ranks
from drillyard.parallel.setup import fill_weights, set_determinism
from drillyard.supervise import EXIT_CHECKPOINTED
from drillyard.telemetry import RunLog, write_summary
from drillyard.telemetry.runlog import ConsoleMode
from drillyard.training.assemble import Parts, assemble
from drillyard.training.directory import SAVED_TOKENIZER, claim_run_directory, run_directory_of
from drillyard.training.resume import resume
from drillyard.training.signals import StopRequest
from drillyard.training.state import checkpoint_state, seed_rank


@dataclass(frozen=True)
class Outcome:
    """How this rank's part of the run ended."""

    exit_code: int
    run_directory: Path


def train(
    config: RunConfig, *, console: ConsoleMode = "auto", round_number: int = 0, is_claimed: bool = False
) -> Outcome:
    """Train `config` as one rank of however many there are; returns exit code 0, or 85 when stopped after a checkpoint.

    `round_number` counts the starts of these ranks; `is_claimed` says that a supervisor has claimed the run directory.
    Raises UserError for everything that the user can mend.
    """
    set_determinism(config)
    ranks = start_ranks(config.training, config.parallelism)
    require_valid(config, ranks.world_size)
    directory = run_directory_of(config)
    if ranks.rank == 0 and round_number == 0 and not is_claimed:
        claim_run_directory(config, ranks.world_size)
    data = prepare_on_all(config, ranks)
    with RunLog(directory, rank=ranks.rank, config=config, console=console, round_number=round_number) as log:
        if round_number == 0 and not is_claimed:
            log.event("run_start", world_size=ranks.world_size)
        log.event("round_start", world_size=ranks.world_size, threads=ranks.threads, **versions())
        log.event("data", parts=data.report.parts, notes=data.report.notes or None)
        for note in data.report.notes:
            log.message(note)
        exit_code = run_rank(config, ranks, data, log, directory)
    if exit_code == 0 and ranks.rank == 0:
        write_summary(directory)
    # Only a run that ended well takes its leave: with a rank missing, or amid a collective, this could hang.
    stop_ranks()
    return Outcome(exit_code, directory)


def prepare_on_all(config: RunConfig, ranks: Ranks) -> PreparedData:
    """Tokenise on one rank while the others wait, then open the caches on all of them."""
    return ranks.in_turn(lambda first: prepare(config, only_open=not first))


def run_rank(config: RunConfig, ranks: Ranks, data: PreparedData, log: RunLog, directory: Path) -> int:
    """Build, resume, train and finish, with everything that is shared between ranks in place; returns the exit code."""
    stop = StopRequest(ranks.world_size)
    parts = assemble(config, ranks, data, log, directory, stop)
    seed_rank(config.training.seed, 0, ranks)
    log.total_steps = parts.trainer.total_steps
    first_step = resume(config, parts.checkpointer, parts.optimizer, ranks, parts.identity, log)
    if ranks.rank == 0:
        data.tokenizer.save_pretrained(directory / SAVED_TOKENIZER)
    if first_step == 0:
        fill_weights(config, parts.model.causal_lm)
        if config.evaluation.at_start:
            parts.between.run_evaluation(0)
    if config.checkpoint.every_steps:
        parts.checkpointer.prepare(checkpoint_state(parts.optimizer, ranks))
    finished = parts.trainer.train(
        first_step,
        on_first=lambda step: log.event("first_step", step=step),
        on_logged=parts.reporter.logged,
        after_step=parts.between.after_step,
        stop=stop,
    )
    if finished:
        finish(parts, data, log, directory)
    else:
        parts.checkpointer.close()
    log.event("end", step=parts.trainer.steps_done, status="completed" if finished else "interrupted")
    if ranks.world_size > 1:
        dist.barrier()
    stop.close()
    return 0 if finished else EXIT_CHECKPOINTED


def finish(parts: Parts, data: PreparedData, log: RunLog, directory: Path) -> None:
    """Last checkpoint, last evaluation and `final/`, in this order: what was trained is safe before it is measured."""
    step = parts.trainer.total_steps
    if not parts.trainer.in_nonfinite_row():
        parts.between.save(step, wait=True)
    with log.span("checkpoint", step):
        parts.checkpointer.close()
    if parts.checkpointer.saves_failed:
        log.message(f"{parts.checkpointer.saves_failed} checkpoints could not be saved: see events.jsonl")
    parts.between.run_evaluation(step)
    with log.span("export", step):
        export(parts.model.causal_lm, directory / "final", tokenizer=data.tokenizer)


def versions() -> dict[str, Any]:
    """Versions that a run's numbers depend on."""
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__, "python": sys.version.split()[0]}
