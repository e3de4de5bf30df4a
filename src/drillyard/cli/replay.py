"""`drillyard train RUN.YAML --replay STEP`: start the ranks that do a step again, or be one of them."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from drillyard.cli.process_exit import exit_process, is_rank
from drillyard.errors import UserError

if TYPE_CHECKING:
    from drillyard.config.run import RunConfig


def replay(run: RunConfig, step: int, nproc_per_node: int | None) -> NoReturn:
    """Replay `step` of the run that `run` names: exit code 0 when the bits agree, 1 when they do not."""
    from drillyard.config import load_run_config
    from drillyard.telemetry.events import refusing_odd_values
    from drillyard.training.replay import plan_replay, read_verdict, remove_earlier_replay
    from drillyard.training.run_directory import SAVED_CONFIG, require_same_run, run_directory_of

    run_directory = run_directory_of(run)
    if is_rank():
        _be_a_rank(run_directory, step)
    with refusing_odd_values(run_directory):
        plan = plan_replay(run_directory, step)
    saved = run_directory / SAVED_CONFIG
    require_same_run(run_directory, load_run_config(saved, resolve_environment=False), run)
    if nproc_per_node not in (None, plan.world_size):
        raise UserError(
            f"--nproc-per-node {nproc_per_node}: step {step} was done on {plan.ranks_in_words}, and bits can be "
            "compared on as many only; leave the option out"
        )
    from drillyard.console import SafeConsole
    from drillyard.supervise.supervisor import supervise
    from drillyard.supervise.training_supervisor import threads_per_rank
    from drillyard.telemetry.events import append_event

    def start() -> bool:
        remove_earlier_replay(plan)
        return True

    code = supervise(
        [sys.executable, "-m", "drillyard", "train", str(saved), "--replay", str(step)],
        num_ranks=plan.world_size,
        run_directory=plan.directory,
        max_restarts=0,
        environment={"OMP_NUM_THREADS": str(threads_per_rank(plan.config, plan.world_size))},
        on_event=functools.partial(append_event, plan.directory),
        console=SafeConsole(stderr=True),
        before_start=start,
    )
    if code != 0:
        raise typer.Exit(code)
    verdict = read_verdict(plan.directory)
    typer.echo(verdict.in_words())
    raise typer.Exit(0 if verdict.equal else 1)


def _be_a_rank(run_directory: Path, step: int) -> NoReturn:
    from drillyard.cli.main import error_text
    from drillyard.training.replay import plan_replay, read_verdict
    from drillyard.training.replay_rank import replay as replay_on_ranks

    code = 0
    try:
        plan = plan_replay(run_directory, step)
        plan.directory.mkdir(parents=True, exist_ok=True)
        replay_on_ranks(plan)
        if os.environ["RANK"] == "0" and os.environ.get("DRILLYARD_SUPERVISED") != "1":
            verdict = read_verdict(plan.directory)
            typer.echo(verdict.in_words())
            code = 0 if verdict.equal else 1
    except UserError as error:
        sys.stderr.write(f"{error_text(str(error))}\n\n")
        code = 2
    except BaseException:
        traceback.print_exc()
        code = 1
    exit_process(code)
