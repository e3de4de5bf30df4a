"""`drillyard metrics PATH...`: what a run of any framework achieved, measured alike for all of
them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from drillyard.cli.options import (
    OUTPUT,
    RANGE,
    RUN_FACTS,
    SharedOption,
    add_options,
    print_json,
    with_flags,
)
from drillyard.errors import UserError

if TYPE_CHECKING:
    from drillyard.measurement.run_result import RunResult

RECIPES = "With --format gpu-recipes"
RECIPE_OPTIONS = {
    "file": SharedOption(str, "DLLogger file.", RECIPES, None, ("--file",)),
    "batch_size": SharedOption(
        int, "Sequences of a step on all GPUs.", RECIPES, None, ("--batch_size",)
    ),
    "num_accelerators": SharedOption(
        int, "GPUs of the run.", RECIPES, None, ("--num_accelerators",)
    ),
    "model_type": SharedOption(
        str, "A model of the tool's table.", RECIPES, None, ("--model_type",)
    ),
    "model_flops": SharedOption(
        float, "FLOPs of a step per sample.", RECIPES, None, ("--model_flops",)
    ),
    "accelerator_type": SharedOption(
        str, "An accelerator of the tool's table.", RECIPES, None, ("--accelerator_type",)
    ),
    "max_flops": SharedOption(float, "Peak in TFLOP/s.", RECIPES, None, ("--max_flops",)),
}
"""Named as in the tool whose output `--format gpu-recipes` reproduces."""
OF_RECIPES_TOO = ("precision", "start_step", "end_step", "sequence_length")


FLAGS = {
    "paths": typer.Argument(
        metavar="PATH...",
        help=(
            "Logs of one run: files, directories, gs:// objects, - for standard input; gzip and"
            " zstd too."
        ),
    ),
    # What is measured.
    "job_start": typer.Option(
        help="When the job began, such as 2026-01-31T12:00:00Z, if not at its first line.",
        rich_help_panel=RANGE,
    ),
    "job_end": typer.Option(help="When it ended, if not at its last line.", rich_help_panel=RANGE),
    # What is printed.
    "follow": typer.Option(
        "--follow",
        "-f",
        help="Follow growing logs until Ctrl-C or the end of the input.",
        rich_help_panel=OUTPUT,
    ),
    "compare": typer.Option(
        "--compare",
        help="Show each PATH as a run of its own, side by side.",
        rich_help_panel=OUTPUT,
    ),
    "as_json": typer.Option("--json", help="Print the result as JSON.", rich_help_panel=OUTPUT),
    "schema": typer.Option(
        "--json-schema", help="Print the JSON Schema of --json and exit.", rich_help_panel=OUTPUT
    ),
    "fail_if": typer.Option(
        metavar="CONDITION",
        help="Exit with 1 if it holds or cannot be evaluated, such as 'mfu<0.38'; repeatable.",
        rich_help_panel=OUTPUT,
    ),
    "output_format": typer.Option(
        "--format",
        metavar="gpu-recipes",
        help="Print the lines of another tool.",
        rich_help_panel=OUTPUT,
    ),
}


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("metrics")(add_options(with_flags(metrics, FLAGS), {**RUN_FACTS, **RECIPE_OPTIONS}))


def metrics(
    context: typer.Context,
    paths: list[str] | None = None,
    follow: bool = False,
    job_start: str | None = None,
    job_end: str | None = None,
    compare: bool = False,
    as_json: bool = False,
    schema: bool = False,
    fail_if: list[str] | None = None,
    output_format: str | None = None,
    **given: Any,
) -> None:
    """Measure a run from its log: step times, tokens/s and TFLOP/s per GPU, MFU, goodput, loss and
    cost.

    Reads DLLogger, NeMo, Megatron-LM, torchtitan, torchtune, MaxText, PerfLogger, HF Trainer,
    TensorBoard and Drillyard's own logs, behind any launcher's prefix. What a log does not say can
    be given by flag, and is null in JSON until then.

    Exit code 0; 1 if a --fail-if holds; 2 for an error.
    """
    if schema:
        from drillyard.measurement.metrics_document import json_schema

        print_json(json_schema())
        return
    recipes = {name: given.pop(name) for name in RECIPE_OPTIONS}
    if output_format is not None:
        _print_gpu_recipes(
            context,
            output_format,
            paths or [],
            {**recipes, **{name: given[name] for name in OF_RECIPES_TOO}},
        )
        return
    if used := [
        RECIPE_OPTIONS[name].names[0] for name, value in recipes.items() if value is not None
    ]:
        raise UserError(f"{', '.join(used)}: only with --format gpu-recipes.")
    if not paths:
        raise UserError("give the log of a run: drillyard metrics PATH (or - for standard input)")
    if follow and (compare or fail_if):
        raise UserError("--follow shows one growing run: not with --compare or --fail-if.")
    from drillyard.telemetry.events import refusing_odd_values

    with refusing_odd_values(*paths):
        _measure(
            paths,
            {**given, "job_start": job_start, "job_end": job_end},
            follow,
            compare,
            fail_if or [],
            as_json=as_json,
        )


def _measure(
    paths: list[str],
    given: dict[str, Any],
    follow: bool,
    compare: bool,
    fail_if: list[str],
    *,
    as_json: bool,
) -> None:
    """Measure the logs with the facts `given`, and print the result; exit with 1 where one of
    `fail_if` holds."""
    from drillyard.api import user_facts
    from drillyard.hardware import load_catalog
    from drillyard.measurement.gates import parse_gate
    from drillyard.measurement.read_logs import read_logs
    from drillyard.measurement.run_result import measure

    reading = {"timezone": given["timezone"], "framework": given.pop("framework")}
    catalog = load_catalog(given.pop("hardware"))
    facts = user_facts(given)
    if follow:
        from drillyard.console import SafeConsole
        from drillyard.measurement.read_logs import Tail
        from drillyard.watch.log_screen import follow_log

        tail = Tail(paths, **reading)
        for path in tail.absent():
            typer.echo(f"{path}: does not exist yet; waiting for it", err=True)
        follow_log(tail, facts, catalog, SafeConsole(), as_json=as_json)
        return
    gates = [parse_gate(text) for text in fail_if]
    runs = [
        measure(read_logs(each, **reading), facts, catalog)
        for each in ([[path] for path in paths] if compare else [paths])
    ]
    _print_results(runs, compare=compare, as_json=as_json)
    tripped = [
        (run, why)
        for run in runs
        for gate in gates
        if (why := gate.trips(run.as_json())) is not None
    ]
    for run, why in tripped:
        typer.echo(f"failed: {run.name + ': ' if compare else ''}{why}", err=True)
    if tripped:
        raise typer.Exit(1)


def _print_results(runs: list[RunResult], *, compare: bool, as_json: bool) -> None:
    from drillyard.console import SafeConsole
    from drillyard.measurement.comparison import compare_runs
    from drillyard.measurement.comparison_text import render_comparison
    from drillyard.measurement.result_text import render_result

    if as_json:
        print_json((compare_runs(runs) if compare else runs[0]).as_json())
    else:
        SafeConsole().print(
            render_comparison(compare_runs(runs)) if compare else render_result(runs[0])
        )


def _print_gpu_recipes(
    context: typer.Context, name: str, paths: list[str], options: dict[str, Any]
) -> None:
    """Print the tool's three lines on stdout, warnings on stderr."""
    from drillyard.measurement.gpu_recipes import GpuRecipesRequest, gpu_recipes_lines

    if name != "gpu-recipes":
        raise UserError(
            f"--format {name}: there is only gpu-recipes; --json prints the result as JSON."
        )
    if others := _given_flags(context, {*options, "paths", "output_format"}):
        raise UserError(f"{', '.join(others)}: not with --format gpu-recipes.")
    file = options.pop("file")
    files = [*paths, *([file] if file else [])]
    if len(files) > 1:
        raise UserError(f"{', '.join(files)}: --format gpu-recipes reads one DLLogger file.")
    precision = options.pop("precision") or "bf16"
    lines, doubts = gpu_recipes_lines(
        GpuRecipesRequest(file=files[0] if files else None, precision=precision, **options)
    )
    typer.echo(lines, nl=False)
    for doubt in doubts:
        typer.echo(f"warning: {doubt}", err=True)


def _given_flags(context: typer.Context, known: set[str]) -> list[str]:
    """The flags on the command line whose parameters are not `known`."""
    return [
        option.opts[0]
        for option in context.command.params
        if option.name not in known
        and (source := context.get_parameter_source(option.name or "")) is not None
        and source.name == "COMMANDLINE"
    ]
