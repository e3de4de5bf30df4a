"""`drillyard`: the table of commands, and their exit codes.

A command is a row of `COMMANDS` and a function that a module's `register(app)` adds. The module is
imported when its command is called, so `drillyard --help` imports only typer and rich (about 0.15
s).

Exit codes: 0 done; 2 the user's mistake, as `error: ...` on stderr without a traceback; 130
interrupted; that of a command's `typer.Exit`; 70 for a bug of ours (`process_exit.py`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from drillyard.cli.process_exit import (
    EXIT_UNEXPECTED,
    describe_unexpected,
    disk_problem,
    is_rank,
    missing_extra,
)
from drillyard.cli.torch_import import hide_warnings_of_imports
from drillyard.control_characters import CleanedText, clean, clean_standard_streams
from drillyard.deprecation import RENAMED_FLAGS, RenamedWarning, rename_flags
from drillyard.errors import UserError
from drillyard.redaction import add_inherited_secrets, redact
from drillyard.version import __version__


class Command(NamedTuple):
    """A command by name: the module whose `register(app)` adds it, and its line in `drillyard
    --help`."""

    module: str
    help: str


COMMANDS = {
    "init": Command(
        "drillyard.cli.config_files", "Write a commented run.yaml and cluster.yaml to start from."
    ),
    "schema": Command(
        "drillyard.cli.config_files", "Print the JSON Schema of a config, or of an estimate."
    ),
    "data": Command("drillyard.cli.data", "Show the data as the model sees it."),
    "hardware": Command(
        "drillyard.cli.hardware", "Look up accelerators, machines, network stacks and prices."
    ),
    "estimate": Command(
        "drillyard.cli.estimate", "Estimate memory, speed, cost and failures before a run."
    ),
    "train": Command(
        "drillyard.cli.train", "Train a model on this machine, or as one rank of a launcher."
    ),
    "bench": Command(
        "drillyard.cli.bench", "Measure the training step of a run config, by its parts."
    ),
    "cluster": Command(
        "drillyard.cli.cluster", "Create a cluster of a cloud, look at it, and remove it."
    ),
    "image": Command("drillyard.cli.image", "Build and push container images."),
    "accept": Command(
        "drillyard.cli.accept", "Check the nodes of a cluster, and find the bad one."
    ),
    "launch": Command(
        "drillyard.cli.launch", "Submit a run to a cluster's scheduler, or start it on hosts."
    ),
    "runs": Command(
        "drillyard.cli.runs",
        "List and follow launched runs: status, logs, watch, cancel, artifacts.",
    ),
    "eval": Command("drillyard.cli.saved_model", "Measure a checkpoint or a finished model."),
    "generate": Command(
        "drillyard.cli.generate",
        "Let a model answer a prompt, a file of prompts, or you in a chat.",
    ),
    "chat": Command("drillyard.cli.generate", "The same as generate."),
    "export": Command(
        "drillyard.cli.saved_model", "Write a checkpoint as a Hugging Face model directory."
    ),
    "checkpoint": Command(
        "drillyard.cli.checkpoint", "List, verify and prune the checkpoints of a run."
    ),
    "chaos": Command(
        "drillyard.cli.chaos",
        "Inject faults into a run, and check that it ends with the same bits.",
    ),
    "watch": Command("drillyard.cli.watch", "Follow a run live in the terminal."),
    "report": Command("drillyard.cli.report", "Write a report of a run as one HTML file."),
    "metrics": Command("drillyard.cli.metrics", "Measure a run of any framework from its log."),
    "diff": Command(
        "drillyard.cli.report", "Find the first step at which two runs differ, and by how much."
    ),
}


def load_command(name: str) -> Any:
    """Import the command `name`."""
    app = typer.Typer()
    importlib.import_module(COMMANDS[name].module).register(app)
    command = typer.main.get_group(app).commands[name]
    _unwrap_help(command)
    _prepare_calls(command)
    return command


def _unwrap_help(command: Any) -> None:
    """One line per paragraph of help, for the terminal to wrap."""
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    for inner in getattr(command, "commands", {}).values():
        _unwrap_help(inner)


def _prepare_calls(command: Any) -> None:
    """Clean what each command prints, and refuse addresses such as gs://b/x for local paths."""
    from drillyard.config.problems import refused_address

    def prepared(function: Any) -> Any:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            clean_standard_streams()
            add_inherited_secrets()
            for value in (*arguments, *options.values()):
                if isinstance(value, Path) and (refused := refused_address(value)):
                    raise UserError(refused)
            return function(*arguments, **options)

        return call

    for one in (command, *getattr(command, "commands", {}).values()):
        if one.callback is not None:
            one.callback = prepared(one.callback)


class LazyGroup(TyperGroup):
    """Lists commands from the table and imports the one that is called."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {
            name: TyperCommand(name=name, help=row.help) for name, row in COMMANDS.items()
        }

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, listed, rest = super().resolve_command(ctx, args)
        command = listed and load_command(listed.name or "")
        inner = (
            f"{name} {rest[0]}"
            if rest and rest[0] in getattr(command, "commands", {})
            else str(name)
        )
        if inner in RENAMED_FLAGS:
            rest = rename_flags(rest, RENAMED_FLAGS[inner])
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            # From here on a command may have something to clean up (see __main__.py).
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            from pydantic import ValidationError

            from drillyard.config.validation_errors import option_problem

            if isinstance(error.__cause__, ValidationError):
                error.message = option_problem(error.__cause__)
            raise


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"drillyard {__version__}")
        raise typer.Exit


@app.callback()
def drillyard(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """From two YAML files to a trained, measured model."""


def _format_warning(
    message: Warning | str, category: type[Warning], *place: Any, **more: Any
) -> str:
    """`warning: text` for old names; other warnings as Python formats them."""
    if issubclass(category, RenamedWarning):
        return f"warning: {message}\n"
    return _python_format(message, category, *place, **more)


_python_format = warnings.formatwarning


def main(arguments: list[str] | None = None) -> None:
    """Run `drillyard` with `arguments` (default: the process's) and exit with its code."""
    warnings.formatwarning = _format_warning
    hide_warnings_of_imports()
    code: str | int | None = 0
    unexpected: Exception | None = None
    try:
        app(arguments, prog_name="drillyard")
    except SystemExit as ended:
        code = ended.code
    except UserError as error:
        print_error(str(error))
        code = 2
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        code = 1
    except Exception as error:
        if is_rank() and missing_extra(error) is None:
            raise  # into the rank's log
        unexpected = error
    problem = _end_output()
    if isinstance(problem, BrokenPipeError):
        code = code or 1
    elif (trouble := unexpected or problem) is not None:
        code = code or _print_unexpected(trouble)
    sys.exit(code)


def _end_output() -> OSError | None:
    """Flush standard output; returns the error if that fails, and drops the rest of the output."""
    try:
        sys.stdout.flush()
    except OSError as error:
        # Otherwise the interpreter complains when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error
    return None


def _print_unexpected(error: Exception) -> int:
    if (mistake := missing_extra(error) or disk_problem(error)) is not None:
        print_error(mistake)
        return 2
    print_error(describe_unexpected(error))
    return EXIT_UNEXPECTED


def print_error(message: str) -> None:
    """Print `error: message` on stderr, the word red on a terminal."""
    with contextlib.suppress(OSError):  # stderr may be on a full disk
        print(CleanedText(error_text(message)), file=sys.stderr)


def error_text(message: str) -> str:
    """`error: message`, cleaned, with further lines indented below the first."""
    word = (
        "\033[1;31merror:\033[0m"
        if sys.stderr.isatty() and "NO_COLOR" not in os.environ
        else "error:"
    )
    return f"{word} " + clean(redact(message)).replace("\n", "\n       ")


if __name__ == "__main__":
    main()
