"""`drillyard train`: start a run's ranks under a supervisor, or be one of them; with --replay
repeat a step."""

from __future__ import annotations

import os
import shlex
import sys
import time
import traceback
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from drillyard.cli.options import (
    TRUST_CONFIG,
    Overrides,
    config_to_read,
    print_trusted,
    with_flags,
)
from drillyard.cli.process_exit import (
    exit_on_signal,
    exit_process,
    is_rank,
    missing_extra,
    require_training,
)
from drillyard.cli.torch_import import import_without_collection
from drillyard.errors import UserError

if TYPE_CHECKING:
    from drillyard.config.run import RunConfig
    from drillyard.supervise.rank_process import NodePlacement
    from drillyard.telemetry.runlog import ConsoleMode


class Console(StrEnum):
    """The console output of a run."""

    text = "text"
    json = "json"
    none = "none"


FLAGS = {
    "config": typer.Argument(help="The run config, run.yaml.", metavar="RUN.YAML"),
    "console": typer.Option(help="Lines for people, JSON objects for programs, or none."),
    "dry_run": typer.Option(
        "--dry-run",
        help=(
            "Do not train and write nothing: check config, paths, model and first rows, and print"
            " memory, disk, time and cost in ten lines."
        ),
    ),
    "replay": typer.Option(
        min=1,
        help=(
            "Do not train: repeat STEP from the checkpoint before it and compare loss and gradient"
            " norm with metrics.jsonl to the bit, a test for silent data corruption. Exit code 0:"
            " equal; 1: different."
        ),
        metavar="STEP",
    ),
    "trust_config": typer.Option(
        "--trust-config",
        help=f"With --replay or --dry-run. {TRUST_CONFIG} Training needs no such flag.",
    ),
    # The ranks of this host.
    "nproc_per_node": typer.Option(
        min=1, help="Ranks on this host; default: one per GPU, or one.", metavar="N"
    ),
    "max_restarts": typer.Option(
        min=0,
        help=(
            "Restarts of the ranks after a crash; none with several nodes, which must all start"
            " again together."
        ),
        metavar="N",
        show_default="3",
    ),
    "watchdog": typer.Option(
        min=0,
        help=(
            "Restart ranks that make no progress for so long; 0: never. Sets"
            " timeouts.watchdog_seconds."
        ),
        metavar="SECONDS",
        show_default="1800",
    ),
    "standby": typer.Option(
        "--standby/--no-standby",
        help="Keep standby ranks with everything imported: a restart takes seconds less.",
        show_default="where there are 4 cores per rank",
    ),
    # The nodes of a run that no launcher starts.
    "nnodes": typer.Option(
        min=1, help="Nodes of the run; run the same command on each.", metavar="N"
    ),
    "node_rank": typer.Option(min=0, help="This node's number, from 0.", metavar="N"),
    "master_addr": typer.Option(
        help="Name or address of node 0, where all ranks meet.", metavar="HOST"
    ),
    "master_port": typer.Option(min=1, max=65535, help="A free port of node 0.", metavar="PORT"),
}


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("train")(with_flags(train, FLAGS))


def train(
    config: Path,
    nproc_per_node: int | None = None,
    max_restarts: int | None = None,
    nnodes: int = 1,
    node_rank: int = 0,
    master_addr: str | None = None,
    master_port: int | None = None,
    watchdog: float | None = None,
    standby: bool | None = None,
    set_: Overrides = None,
    console: Console = Console.text,
    dry_run: bool = False,
    replay: int | None = None,
    trust_config: bool = False,
) -> None:
    """Train a model as RUN.YAML says, on this host; under torchrun or any rendezvous, be one rank
    of the run.

    On SIGTERM, SIGUSR1 or Ctrl-C the ranks finish their step, save and stop; a second one 2 s later
    kills them.

    The same command resumes a stopped or crashed run from its newest checkpoint.

    Exit codes:

    [bold]0[/bold] The run is done (1 with evaluation.required where a metric could not be
    measured).

    [bold]2[/bold] The config or the data must be fixed; a retry does not help.

    [bold]85[/bold] Stopped on request with everything saved: start it again.

    [bold]128+N[/bold] Killed by signal N (137: often out of memory).

    Any other: that of the rank that failed first, after all restarts (1: an exception, ranks that
    hung, or a stop whose checkpoint could not be saved; the one before it is intact).
    """
    from drillyard.config.load import load_run_config

    node = _node(nnodes, node_rank, master_addr, master_port, max_restarts)
    overrides = [
        *(set_ or []),
        *([] if watchdog is None else [f"timeouts.watchdog_seconds={watchdog:g}"]),
    ]
    if dry_run and (replay is not None or is_rank()):
        raise UserError("--dry-run is of a start: leave out --replay, and torchrun")
    if replay is not None:
        require_training()
        _replay(config, overrides, replay, nproc_per_node, trust_config=trust_config)
    if dry_run:
        require_training()
        # Of a run directory that somebody else made, too: it is looked at as `data preview` does.
        with config_to_read(config, overrides, trust_config=trust_config) as run:
            _dry_run(run, config, node, nproc_per_node)
    run = load_run_config(config, overrides)
    require_training()
    if is_rank():
        _be_a_rank(run, console.value)
    exit_on_signal()
    _supervise(run, config, overrides, console.value, node, nproc_per_node, max_restarts, standby)


def _dry_run(
    run: RunConfig, config: Path, node: NodePlacement, nproc_per_node: int | None
) -> NoReturn:
    """Print what the run would do."""
    from drillyard.config.run_checks import require_valid

    num_ranks = _ranks_of_host(run, nproc_per_node) * node.count
    require_valid(run, num_ranks, has_gpu=_has_gpu())
    import_without_collection("drillyard.training.dry_run")
    from drillyard.training.dry_run import dry_run

    for line in dry_run(run, num_ranks=num_ranks, num_nodes=node.count):
        typer.echo(line)
    typer.echo(f"Next:     drillyard train {shlex.quote(str(config))}; nothing was written")
    raise typer.Exit


def _ranks_of_host(run: RunConfig, nproc_per_node: int | None) -> int:
    from drillyard.config.kernel_rules import num_gpus

    return nproc_per_node or (run.training.device != "cpu" and num_gpus()) or 1


def _has_gpu() -> bool:
    from drillyard.config.kernel_rules import num_gpus

    return num_gpus() > 0


def _supervise(
    run: RunConfig,
    config: Path,
    overrides: list[str],
    console: ConsoleMode,
    node: NodePlacement,
    nproc_per_node: int | None,
    max_restarts: int | None,
    standby: bool | None,
) -> NoReturn:
    """Run the ranks of this host until the run is over; exit with its code. `run`: `config` with
    `overrides`."""
    from drillyard.config.model_files import require_weight_files
    from drillyard.config.run_checks import require_valid

    num_ranks = _ranks_of_host(run, nproc_per_node)
    require_valid(run, num_ranks * node.count, has_gpu=_has_gpu())
    from drillyard.supervise.run_lock import exclusive_run_lock, open_logs
    from drillyard.supervise.scheduler_restarts import end_claim, scheduler_restarts, write_claim
    from drillyard.supervise.supervisor import is_started, required_metrics_code, supervise_training
    from drillyard.training.run_directory import (
        SAVED_CONFIG,
        claim_run_directory,
        is_finished,
        run_directory_of,
    )

    directory = run_directory_of(run)
    if not directory.exists() and run.checkpoint.resume in ("auto", "never"):
        require_weight_files(run.model)
    # Ranks read the saved config in every attempt: later edits of RUN.YAML change nothing. With
    # several nodes only the first one saves it, perhaps after the others start: there the launcher
    # provides the same file to all.
    saved = directory / SAVED_CONFIG if node.count == 1 else config
    command = [sys.executable, "-m", "drillyard", "train", str(saved), "--console", console]
    if node.count > 1:
        command += [word for override in overrides for word in ("--set", override)]
    code, restarts = 0, scheduler_restarts(directory)
    if restarts is not None:
        time.sleep(restarts.pause_seconds)
    with exclusive_run_lock(directory) if node.is_first else open_logs(directory) as lock:
        # Before the claim, which overwrites the saved config.
        finished = is_finished(run)
        if node.is_first:
            goes_on = run.checkpoint.resume == "never" and is_started(directory)
            claim_run_directory(run, num_ranks * node.count, goes_on=goes_on)
            write_claim(directory)
        if not finished:
            code = supervise_training(
                command,
                run,
                num_ranks=num_ranks,
                lock=lock,
                max_restarts=(
                    (3 if node.count == 1 else 0) if max_restarts is None else max_restarts
                ),
                standby=standby,
                node=node,
            )
        elif node.is_first:
            typer.echo(
                f"{directory}: this run is finished; its model is in final/, its figures in"
                " summary.txt. To train longer, raise training.steps (or epochs)"
            )
        if node.is_first:
            end_claim(directory)
    if restarts is not None:
        code = restarts.exit_code(code)
    raise typer.Exit(code or required_metrics_code(run))


def _node(
    nnodes: int,
    node_rank: int,
    master_addr: str | None,
    master_port: int | None,
    max_restarts: int | None,
) -> NodePlacement:
    """This host's place among the run's nodes. Raises UserError for options that contradict each
    other."""
    from drillyard.supervise.rank_process import NodePlacement

    if nnodes == 1:
        if node_rank or master_addr is not None or master_port is not None:
            raise UserError(
                "--node-rank, --master-addr and --master-port need --nnodes N with more than one"
                " node"
            )
        return NodePlacement()
    if node_rank >= nnodes:
        raise UserError(f"--node-rank {node_rank}: of {nnodes} nodes the last one is {nnodes - 1}")
    if master_addr is None or master_port is None:
        raise UserError(
            "--nnodes needs --master-addr and --master-port: the address of node 0, and a free port"
            " of it"
        )
    if max_restarts:
        raise UserError(
            "--max-restarts: one node of several cannot restart alone; restart all of them together"
        )
    return NodePlacement(nnodes, node_rank, master_addr, master_port)


def _import_trainer() -> None:
    import_without_collection("drillyard.training.run")


def _be_a_rank(run: RunConfig, console: ConsoleMode) -> NoReturn:
    from drillyard.safe_files import tolerate_lost_stderr
    from drillyard.supervise.rank_process import STANDBY, await_turn
    from drillyard.supervise.rank_supervision import RankSupervision

    if STANDBY in os.environ:
        await_turn(_import_trainer)
    # stderr is a log in the run directory: a full disk must not turn a warning into a crash.
    dropped = tolerate_lost_stderr()
    attempt = int(
        os.environ.get("DRILLYARD_ROUND", os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    )
    is_claimed = os.environ.get("DRILLYARD_SUPERVISED") == "1"
    directory = Path(run.output) / run.name
    # Before torch is imported, so that signals and stack requests are answered from here on.
    side = RankSupervision(
        directory, run.timeouts.watchdog_seconds, attempt=attempt, is_claimed=is_claimed
    )
    _import_trainer()
    from drillyard.cli.main import error_text
    from drillyard.supervise.launch_contract import EXIT_NOT_SAVED
    from drillyard.training import run as training
    from drillyard.training.out_of_memory import RanOutOfMemory

    def report(error: Exception) -> None:
        # One write that ends in an empty line: the supervisor reads it from a log that other
        # processes append to.
        sys.stderr.write(f"{error_text(str(error))}\n\n")
        if dropped():
            sys.stdout.write(f"{error_text(str(error))}\n")

    try:
        code = training.train(run, side, console=console, attempt=attempt, is_claimed=is_claimed)
    except UserError as error:
        report(error)
        code = 2
    except training.StoppedWithoutCheckpoint as stopped:
        report(stopped)
        code = EXIT_NOT_SAVED if is_claimed else 1
    except RanOutOfMemory as ended:
        report(ended)
        code = 1
    except BaseException as error:
        if (missing := missing_extra(error)) is not None:
            report(UserError(missing))
            code = 2
        else:
            traceback.print_exc()
            code = 1
    exit_process(code)


def _replay(
    config: Path,
    overrides: list[str],
    step: int,
    nproc_per_node: int | None,
    *,
    trust_config: bool,
) -> NoReturn:
    """Replay `step` of the run that `config` names; exit with 0 when the bits agree, with 1 when
    they do not."""
    from drillyard.config.environment import OPENING
    from drillyard.config.fetch_limits import FetchLimits, limited, withheld_error
    from drillyard.config.load import load_run_config
    from drillyard.config.saved_config import (
        is_saved_config,
        load_saved_config,
        settings_to_fetch,
        typed_texts,
    )
    from drillyard.telemetry.events import refusing_odd_values
    from drillyard.training.replay import plan_replay, read_verdict, remove_earlier_replay
    from drillyard.training.run_directory import (
        SAVED_CONFIG,
        require_same_run,
        require_usual_run_files,
        run_directory_of,
    )

    is_typed = not is_saved_config(config)
    is_trusted = is_typed or trust_config
    run = load_run_config(config, overrides) if is_trusted else load_saved_config(config, overrides)
    if not is_trusted and OPENING in run.output:
        with limited(FetchLimits(settings_to_fetch(run, config, sections=["output"]))):
            raise withheld_error(f"{config}: output")
    run_directory = run_directory_of(run)
    require_usual_run_files(run_directory)
    saved = run_directory / SAVED_CONFIG
    limits = FetchLimits()
    if saved.is_file():
        typed = typed_texts(run) if is_typed else frozenset()
        settings = settings_to_fetch(load_saved_config(saved), saved, typed=typed)
        limits = FetchLimits(settings, typed)
    if trust_config:
        print_trusted(limits)
    with limited(None if trust_config else limits):
        if is_rank():
            _replay_as_rank(run_directory, step)
        with refusing_odd_values(run_directory):
            plan = plan_replay(run_directory, step)
        require_same_run(run_directory, load_saved_config(saved), run)
    if nproc_per_node not in (None, plan.world_size):
        raise UserError(
            f"--nproc-per-node {nproc_per_node}: step {step} ran on {plan.ranks_in_words}, and only"
            " as many give the same bits; leave the option out"
        )
    from drillyard.console import SafeConsole
    from drillyard.supervise.run_lock import exclusive_run_lock
    from drillyard.supervise.supervisor import supervise, threads_per_rank

    # Ranks read the config that the user typed: it says what may be fetched.
    command = [sys.executable, "-m", "drillyard", "train", str(config), "--replay", str(step)]
    command += [word for override in overrides for word in ("--set", override)]
    command += ["--trust-config"] if trust_config else []
    with exclusive_run_lock(plan.directory) as lock:
        remove_earlier_replay(plan)
        code = supervise(
            command,
            num_ranks=plan.world_size,
            run_directory=plan.directory,
            lock=lock,
            max_restarts=0,
            environment={"OMP_NUM_THREADS": str(threads_per_rank(plan.config, plan.world_size))},
            console=SafeConsole(stderr=True),
        )
    if code != 0:
        raise typer.Exit(code)
    verdict = read_verdict(plan.directory)
    typer.echo(verdict.in_words())
    raise typer.Exit(0 if verdict.equal else 1)


def _replay_as_rank(run_directory: Path, step: int) -> NoReturn:
    from drillyard.cli.main import error_text
    from drillyard.training.replay import plan_replay, read_verdict, replay_on_ranks

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
