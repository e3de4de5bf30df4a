"""`drillyard train`: start a run's ranks under a supervisor, or be one of them."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import traceback
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from drillyard.cli.crash_report import missing_extra, require_training
from drillyard.cli.process_exit import exit_on_signal, exit_process, is_rank
from drillyard.errors import UserError

if TYPE_CHECKING:
    from drillyard.config.run import RunConfig
    from drillyard.supervise.rank_process import NodePlacement
    from drillyard.telemetry.runlog import ConsoleMode


class Console(StrEnum):
    """What a run prints while it trains."""

    text = "text"
    json = "json"
    none = "none"


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("train")(train)


def train(
    config: Annotated[Path, typer.Argument(help="The run config, run.yaml.", metavar="RUN.YAML")],
    nproc_per_node: Annotated[
        int | None, typer.Option(min=1, help="Ranks on this host; default: one per GPU, or one.", metavar="N")
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Times that the ranks are started again after a crash.",
            metavar="N",
            show_default="3; with --nnodes 0, all nodes are to be started again together",
        ),
    ] = None,
    nnodes: Annotated[
        int, typer.Option(min=1, help="Nodes of the run; the same command is given on each of them.", metavar="N")
    ] = 1,
    node_rank: Annotated[int, typer.Option(min=0, help="This node's number, from 0.", metavar="N")] = 0,
    master_addr: Annotated[
        str | None, typer.Option(help="Name or address of node 0, where all ranks meet.", metavar="HOST")
    ] = None,
    master_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="A free port of node 0.", metavar="PORT")
    ] = None,
    watchdog: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="End and restart ranks that get no further for so long; 0: never. Sets timeouts.watchdog_seconds.",
            metavar="SECONDS",
            show_default="1800",
        ),
    ] = None,
    standby: Annotated[
        bool | None,
        typer.Option(
            "--standby/--no-standby",
            help="Keep ranks ready that have everything imported, so that a restart takes seconds less.",
            show_default="where there are 4 cores per rank",
        ),
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override a setting: training.steps=100.", metavar="KEY=VALUE")
    ] = None,
    console: Annotated[
        Console, typer.Option(help="Lines for people, JSON objects for programs, or none.")
    ] = Console.text,
    replay: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Train nothing: do STEP again from the checkpoint before it and compare the bits of loss and gradient "
            "norm with metrics.jsonl, a test for silent data corruption. Exit code 0: equal; 1: different.",
            metavar="STEP",
        ),
    ] = None,
) -> None:
    """Train a model as RUN.YAML says, on this host; under torchrun or any rendezvous, be one rank of the run.

    SIGTERM, SIGUSR1 or Ctrl-C: the ranks finish their step, save and stop; another one 2 s later ends them at once.

    What was stopped, or has crashed, goes on from its newest checkpoint when the same command is given again.

    Exit codes:

    [bold]0[/bold] The run is done (1 with evaluation.required where a metric could not be measured).

    [bold]2[/bold] Something to mend in the config or the data; trying again does not help.

    [bold]85[/bold] Stopped on request, with everything saved that was trained: start it again.

    [bold]128+N[/bold] Ended at once by signal N (137: killed, often for lack of memory).

    Any other: that of the rank that failed first, after all restarts (1: an exception, ranks that hung, or a stop whose
    checkpoint could not be saved: the earlier one is whole).
    """
    from drillyard.config import load_run_config, require_valid
    from drillyard.config.auto_values import num_gpus
    from drillyard.config.model_files import require_weight_files

    node = _node(nnodes, node_rank, master_addr, master_port, max_restarts)
    overrides = [*(set_ or []), *([] if watchdog is None else [f"timeouts.watchdog_seconds={watchdog:g}"])]
    run = load_run_config(config, overrides)
    require_training()
    if replay is not None:
        from drillyard.cli.replay import replay as replay_step

        replay_step(run, replay, nproc_per_node)
    if is_rank():
        _be_a_rank(run, console.value)
    exit_on_signal()
    num_ranks = nproc_per_node or (run.training.device != "cpu" and num_gpus()) or 1
    require_valid(run, num_ranks * node.count, has_gpu=num_gpus() > 0)
    from drillyard.supervise import is_started, supervise_training
    from drillyard.training.run_directory import SAVED_CONFIG, claim_run_directory, is_finished, run_directory_of

    directory = run_directory_of(run)
    if not directory.exists() and run.checkpoint.resume in ("auto", "never"):
        require_weight_files(run.model)

    def claim() -> bool:
        # Asked first: the claim saves what is configured now over what the run ended with.
        finished = is_finished(run)
        if node.is_first:
            goes_on = run.checkpoint.resume == "never" and is_started(directory)
            claim_run_directory(run, num_ranks * node.count, goes_on=goes_on)
        if finished and node.is_first:
            typer.echo(
                f"{directory}: this run is finished; its model is in final/, its figures in summary.txt. "
                "With more training.steps (or epochs) it goes on"
            )
        return not finished

    # The ranks of every round read the saved config: editing RUN.YAML meanwhile changes nothing. Of several nodes only
    # the first one saves it, and the others may be earlier: their launcher gives all of them the same file.
    saved = directory / SAVED_CONFIG if node.count == 1 else config
    command = [sys.executable, "-m", "drillyard", "train", str(saved), "--console", console.value]
    if node.count > 1:
        command += [word for override in overrides for word in ("--set", override)]
    raise typer.Exit(
        supervise_training(
            command,
            run,
            num_ranks=num_ranks,
            max_restarts=(3 if node.count == 1 else 0) if max_restarts is None else max_restarts,
            before_start=claim,
            standby=standby,
            node=node,
        )
    )


def _node(
    nnodes: int, node_rank: int, master_addr: str | None, master_port: int | None, max_restarts: int | None
) -> NodePlacement:
    """This host's place among the run's nodes, from the options. Raises UserError where they do not fit together."""
    from drillyard.supervise.rank_process import NodePlacement

    if nnodes == 1:
        if node_rank or master_addr is not None or master_port is not None:
            raise UserError("--node-rank, --master-addr and --master-port belong to --nnodes N with more than one node")
        return NodePlacement()
    if node_rank >= nnodes:
        raise UserError(f"--node-rank {node_rank}: of {nnodes} nodes the last one is {nnodes - 1}")
    if master_addr is None or master_port is None:
        raise UserError("--nnodes needs --master-addr and --master-port: where node 0 is, and a free port of it")
    if max_restarts:
        raise UserError("--max-restarts: a node of several cannot start again alone; whatever started it starts all")
    return NodePlacement(nnodes, node_rank, master_addr, master_port)


def _import_trainer() -> None:
    """Import torch and the trainer, which is most of a rank's start, without garbage collections: what modules create
    stays, and looking through it again and again takes a sixth of the time."""
    gc.disable()
    try:
        importlib.import_module("drillyard.training.run")
    finally:
        gc.enable()


def _be_a_rank(run: RunConfig, console: ConsoleMode) -> NoReturn:
    from drillyard.safe_files import tolerate_lost_stderr
    from drillyard.supervise.rank_supervision import start_supervision
    from drillyard.supervise.standby import await_turn

    await_turn(_import_trainer)
    # It is a log in the run directory: a full disk must not turn a warning into a crash.
    dropped = tolerate_lost_stderr()
    round_number = int(os.environ.get("DRILLYARD_ROUND", os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
    is_claimed = os.environ.get("DRILLYARD_SUPERVISED") == "1"
    directory = Path(run.output) / run.name
    # Before torch is imported: signals are answered and stacks are told from here on.
    side = start_supervision(directory, run.timeouts.watchdog_seconds, attempt=round_number, is_claimed=is_claimed)
    _import_trainer()
    from drillyard.cli.main import error_text
    from drillyard.supervise import EXIT_NOT_SAVED
    from drillyard.training.run import StoppedWithoutCheckpoint
    from drillyard.training.run import train as train_rank

    def tell(error: Exception) -> None:
        # In one write and ended by an empty line: the supervisor reads it from a log to which others append meanwhile.
        sys.stderr.write(f"{error_text(str(error))}\n\n")
        if dropped():
            sys.stdout.write(f"{error_text(str(error))}\n")

    try:
        code = train_rank(run, side, console=console, round_number=round_number, is_claimed=is_claimed)
    except UserError as error:
        tell(error)
        code = 2
    except StoppedWithoutCheckpoint as stopped:
        tell(stopped)
        code = EXIT_NOT_SAVED if is_claimed else 1
    except BaseException as error:
        if (missing := missing_extra(error)) is not None:
            tell(UserError(missing))
            code = 2
        else:
            traceback.print_exc()
            code = 1
    exit_process(code)
