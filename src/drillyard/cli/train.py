"""`drillyard train`: start a run's ranks under a supervisor, or be one of them."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import traceback
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from drillyard.cli.leaving import is_rank, leave
from drillyard.errors import UserError

if TYPE_CHECKING:
    from drillyard.config.run import RunConfig
    from drillyard.telemetry.runlog import ConsoleMode


class Console(StrEnum):
    """What is printed for each logged step."""

    auto = "auto"
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
        int, typer.Option(min=0, help="Times that the ranks are started again after a crash.", metavar="N")
    ] = 3,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override a setting: training.steps=100.", metavar="KEY=VALUE")
    ] = None,
    console: Annotated[
        Console, typer.Option(help="Lines per step: text, json, or auto (text on a terminal).")
    ] = Console.auto,
) -> None:
    """Train a model as RUN.YAML says, on this host; under torchrun or any rendezvous, be one rank of the run.

    Exit code 0: done. 2: something to mend in the config or the data. 85: stopped after a checkpoint, start it again.
    """
    from drillyard.config import load_run_config, require_valid

    run = load_run_config(config, set_ or [])
    if is_rank():
        _be_a_rank(run, console.value)
    num_ranks = nproc_per_node or (run.training.device != "cpu" and num_gpus()) or 1
    require_valid(run, num_ranks)
    from drillyard.supervise import supervise_training
    from drillyard.training.directory import SAVED_CONFIG, claim_run_directory, is_finished

    directory = claim_run_directory(run, num_ranks)
    if is_finished(run):
        typer.echo(f"{directory}: this run is finished; its model is in final/, its figures in summary.txt")
        raise typer.Exit(0)

    if console is Console.auto:
        console = Console.text if sys.stdout.isatty() else Console.json
    # The ranks of every round read the saved config: editing RUN.YAML meanwhile changes nothing.
    command = [sys.executable, "-m", "drillyard", "train", str(directory / SAVED_CONFIG), "--console", console.value]
    raise typer.Exit(
        supervise_training(
            command,
            run,
            num_ranks=num_ranks,
            max_restarts=max_restarts,
        )
    )


def num_gpus() -> int:
    """GPUs that ranks may use, without importing torch: CUDA_VISIBLE_DEVICES, or this host's device files."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    return len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()])


def _be_a_rank(run: RunConfig, console: ConsoleMode) -> NoReturn:
    from drillyard.cli.main import error_text
    from drillyard.training.run import train as train_rank

    round_number = int(os.environ.get("DRILLYARD_ROUND", os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
    is_claimed = os.environ.get("DRILLYARD_SUPERVISED") == "1"
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    try:
        code = train_rank(run, console=console, round_number=round_number, is_claimed=is_claimed).exit_code
    except UserError as error:
        # In one write and ended by an empty line: the supervisor reads it from a log to which others append meanwhile.
        sys.stderr.write(f"{error_text(str(error))}\n\n")
        code = 2
    except BaseException:
        traceback.print_exc()
        code = 1
    leave(code)
