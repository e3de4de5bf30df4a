"""`drillyard metrics PATH...`: what a run of any framework achieved, by one ruler."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from drillyard.hardware import Catalog
    from drillyard.measurement.run_result import RunResult
    from drillyard.measurement.user_facts import UserFacts

RUN = "What the run was, where its log does not say"
RANGE = "Which steps and which time"
MONEY = "Money"
OUTPUT = "Output"
FOLLOW_SECONDS = 1.0
GPU_RECIPES = "With --format gpu-recipes"
ALSO_OF_GPU_RECIPES = frozenset({"paths", "output_format", "precision", "start_step", "end_step", "sequence_length"})


def register(app: typer.Typer) -> None:
    """Add the command to the app."""

    @app.command()
    def metrics(
        context: typer.Context,
        paths: Annotated[
            list[str] | None,
            typer.Argument(
                metavar="PATH...",
                help="Logs of one run: files, directories, gs:// objects, - for standard input; gzip and zstd too.",
            ),
        ] = None,
        follow: Annotated[
            bool,
            typer.Option(
                "--follow", "-f", help="Follow what grows; ends with Ctrl-C, or with its input.", rich_help_panel=OUTPUT
            ),
        ] = False,
        framework: Annotated[
            str | None,
            typer.Option(help="Read as this format only, such as megatron; default: detected.", rich_help_panel=RANGE),
        ] = None,
        accelerator: Annotated[
            str | None, typer.Option(help="GPU, such as b200, for MFU.", rich_help_panel=RUN)
        ] = None,
        num_gpus: Annotated[int | None, typer.Option(help="GPUs of the whole run.", rich_help_panel=RUN)] = None,
        gpus_per_node: Annotated[int | None, typer.Option(help="For a price per node.", rich_help_panel=MONEY)] = None,
        params: Annotated[
            str | None, typer.Option(help="Parameters of the model, such as 70.55e9 or 70.55B.", rich_help_panel=RUN)
        ] = None,
        active_params: Annotated[
            str | None, typer.Option(help="Of these, what one token uses.", rich_help_panel=RUN)
        ] = None,
        config: Annotated[
            Path | None,
            typer.Option(help="config.json of the model, for any formula.", metavar="FILE", rich_help_panel=RUN),
        ] = None,
        batch_size_per_gpu: Annotated[
            int | None, typer.Option(help="Sequences of a step on one GPU.", rich_help_panel=RUN)
        ] = None,
        global_batch_size: Annotated[
            int | None, typer.Option(help="Sequences of a step on all GPUs.", rich_help_panel=RUN)
        ] = None,
        sequence_length: Annotated[int | None, typer.Option(help="Tokens of a sequence.", rich_help_panel=RUN)] = None,
        precision: Annotated[
            str | None, typer.Option(help="Of the peak: bf16 (default), fp8, ...", rich_help_panel=RUN)
        ] = None,
        formula: Annotated[
            str | None,
            typer.Option(
                help="FLOPs per token: 6N (default), palm, causal, torchtitan, megatron, hfu-full, hfu-attention.",
                rich_help_panel=RUN,
            ),
        ] = None,
        hardware: Annotated[
            Path | None,
            typer.Option(help="Your own hardware, laid over what is known.", metavar="FILE", rich_help_panel=RUN),
        ] = None,
        price_per_gpu_hour: Annotated[float | None, typer.Option(help="In dollars.", rich_help_panel=MONEY)] = None,
        price_per_node_hour: Annotated[float | None, typer.Option(help="In dollars.", rich_help_panel=MONEY)] = None,
        start_step: Annotated[
            int | None,
            typer.Option(
                "--start-step",
                "--start_step",
                help="First step that counts; default: warm-up is detected.",
                rich_help_panel=RANGE,
            ),
        ] = None,
        end_step: Annotated[
            int | None, typer.Option("--end-step", "--end_step", help="Last step that counts.", rich_help_panel=RANGE)
        ] = None,
        job_start: Annotated[
            str | None,
            typer.Option(
                help="When the job began, such as 2026-01-31T12:00:00Z, if not at its first line.",
                rich_help_panel=RANGE,
            ),
        ] = None,
        job_end: Annotated[
            str | None, typer.Option(help="When it ended, if not at its last line.", rich_help_panel=RANGE)
        ] = None,
        timezone: Annotated[
            str | None,
            typer.Option(help="Of time stamps without one, such as Europe/Zurich; default UTC.", rich_help_panel=RANGE),
        ] = None,
        compare: Annotated[
            bool,
            typer.Option(
                "--compare", help="Each PATH is a run of its own; show them side by side.", rich_help_panel=OUTPUT
            ),
        ] = False,
        as_json: Annotated[
            bool, typer.Option("--json", help="Print the result as JSON.", rich_help_panel=OUTPUT)
        ] = False,
        schema: Annotated[
            bool,
            typer.Option("--json-schema", help="Print the JSON Schema of --json and exit.", rich_help_panel=OUTPUT),
        ] = False,
        fail_if: Annotated[
            list[str],
            typer.Option(
                metavar="CONDITION",
                help="Exit with 1 if it holds or cannot be judged, such as 'mfu<0.38'; repeatable.",
                rich_help_panel=OUTPUT,
            ),
        ] = [],  # noqa: B006
        output_format: Annotated[
            str | None,
            typer.Option(
                "--format", metavar="gpu-recipes", help="Print the lines of another tool.", rich_help_panel=OUTPUT
            ),
        ] = None,
        file: Annotated[str | None, typer.Option("--file", help="DLLogger file.", rich_help_panel=GPU_RECIPES)] = None,
        batch_size: Annotated[
            int | None,
            typer.Option("--batch_size", help="Sequences of a step on all GPUs.", rich_help_panel=GPU_RECIPES),
        ] = None,
        num_accelerators: Annotated[
            int | None, typer.Option("--num_accelerators", help="GPUs of the run.", rich_help_panel=GPU_RECIPES)
        ] = None,
        model_type: Annotated[
            str | None, typer.Option("--model_type", help="A model of the tool's table.", rich_help_panel=GPU_RECIPES)
        ] = None,
        model_flops: Annotated[
            float | None, typer.Option("--model_flops", help="FLOPs of a step per sample.", rich_help_panel=GPU_RECIPES)
        ] = None,
        accelerator_type: Annotated[
            str | None,
            typer.Option("--accelerator_type", help="An accelerator of the tool's table.", rich_help_panel=GPU_RECIPES),
        ] = None,
        max_flops: Annotated[
            float | None, typer.Option("--max_flops", help="Peak in TFLOP/s.", rich_help_panel=GPU_RECIPES)
        ] = None,
    ) -> None:
        """Say what a run achieved: step times, tokens/s and TFLOP/s per GPU, MFU, goodput, loss and cost.

        Reads DLLogger, NeMo, Megatron-LM, torchtitan, torchtune, MaxText, PerfLogger, HF Trainer, TensorBoard and
        Drillyard's own logs, behind any launcher's prefix. What a log does not say is asked for by flag, and null in
        JSON until then.

        Exit code 0; 1 where a --fail-if holds; 2 for an error.
        """
        from drillyard.errors import UserError

        if schema:
            _print_schema()
            return
        recipes = {
            "--file": file,
            "--batch_size": batch_size,
            "--num_accelerators": num_accelerators,
            "--model_type": model_type,
            "--model_flops": model_flops,
            "--accelerator_type": accelerator_type,
            "--max_flops": max_flops,
        }
        if output_format is not None:
            others = _others(context, ALSO_OF_GPU_RECIPES | {flag[2:] for flag in recipes})
            range_of_steps = start_step, end_step
            _gpu_recipes(output_format, paths or [], recipes, range_of_steps, precision, sequence_length, others)
            return
        if used := [flag for flag, value in recipes.items() if value is not None]:
            raise UserError(f"{', '.join(used)}: only with --format gpu-recipes.")
        if not paths:
            raise UserError("give the log of a run: drillyard metrics PATH (or - for standard input)")
        from drillyard.hardware import load_catalog
        from drillyard.loglines.stamps import time_zone
        from drillyard.measurement.user_facts import UserFacts, moment_us, to_formula

        zone = None if timezone is None else time_zone(timezone)
        asked = UserFacts(
            accelerator=accelerator,
            num_gpus=num_gpus,
            gpus_per_node=gpus_per_node,
            params=_count("--params", params),
            active_params=_count("--active-params", active_params),
            config=config,
            batch_size_per_gpu=batch_size_per_gpu,
            global_batch_size=global_batch_size,
            sequence_length=sequence_length,
            precision=precision,
            formula=to_formula(formula),
            price_per_gpu_hour=price_per_gpu_hour,
            price_per_node_hour=price_per_node_hour,
            start_step=start_step,
            end_step=end_step,
            job_start_us=moment_us("--job-start", job_start, zone),
            job_end_us=moment_us("--job-end", job_end, zone),
        )
        reading = {"timezone": timezone, "framework": framework}
        facts = load_catalog(hardware)
        if follow:
            if compare or fail_if:
                raise UserError("--follow shows one run as it goes on: not with --compare or --fail-if.")
            _follow(paths, asked, facts, reading, as_json=as_json)
            return
        _measure(paths, asked, facts, reading, compare=compare, as_json=as_json, fail_if=fail_if)


def _others(context: typer.Context, expected: frozenset[str]) -> list[str]:
    """The flags on the command line whose parameters are not among those expected."""
    return [
        option.opts[0]
        for option in context.command.params
        if option.name not in expected
        and (source := context.get_parameter_source(option.name or "")) is not None
        and source.name == "COMMANDLINE"
    ]


def _count(flag: str, text: str | None) -> int | None:
    """A number of parameters. Without one the import, which brings the whole config room, is saved."""
    if text is None:
        return None
    from drillyard.estimation.request import parse_count

    return parse_count(flag, text)


def _print_schema() -> None:
    import json

    from drillyard.measurement.metrics_document import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))


def _measure(
    paths: list[str],
    asked: UserFacts,
    facts: Catalog,
    reading: dict[str, Any],
    *,
    compare: bool,
    as_json: bool,
    fail_if: list[str],
) -> None:
    """Read, measure and print; exit with 1 where a gate trips."""
    from drillyard.measurement.gates import parse_gate
    from drillyard.measurement.read_logs import read_logs
    from drillyard.measurement.run_result import measure

    gates = [parse_gate(text) for text in fail_if]
    runs = [
        measure(read_logs(one, **reading), asked, facts) for one in ([[path] for path in paths] if compare else [paths])
    ]
    if compare:
        _print_comparison(runs, as_json)
    else:
        _print_result(runs[0], as_json)
    tripped = [(run, why) for run in runs for gate in gates if (why := gate.trips(run.as_json())) is not None]
    for run, why in tripped:
        typer.echo(f"failed: {run.name + ': ' if compare else ''}{why}", err=True)
    if tripped:
        raise typer.Exit(1)


def _follow(paths: list[str], asked: UserFacts, facts: Catalog, reading: dict[str, Any], *, as_json: bool) -> None:
    """Measure again whenever something was appended: on a terminal in place, else one result after the other, in JSON
    one a line. Ends with Ctrl-C, or when standard input does."""
    import json
    import time

    from rich.live import Live

    from drillyard.console import SafeConsole
    from drillyard.measurement.parsed_log import ParsedLog
    from drillyard.measurement.read_logs import Tail
    from drillyard.measurement.result_text import render_result
    from drillyard.measurement.run_result import measure

    def show(log: ParsedLog | None) -> None:
        if log is None:
            return
        result = measure(log, asked, facts)
        if as_json:
            print(json.dumps(result.as_json(), ensure_ascii=False, allow_nan=False), flush=True)
        elif live.is_started:
            live.update(render_result(result), refresh=True)
        else:
            console.print(render_result(result))

    console = SafeConsole()
    tail = Tail(paths, **reading)
    for path in tail.absent():
        typer.echo(f"{path}: not there yet; waiting for it", err=True)
    live = Live("waiting for the first lines", console=console, auto_refresh=False)
    if console.is_terminal and not as_json:
        live.start(refresh=True)
    try:
        while True:
            # The log is gone before the next poll: its columns share the memory that grows there and would be copied.
            show(tail.poll())
            if tail.ended:
                return
            if not tail.behind:
                time.sleep(FOLLOW_SECONDS)
    finally:
        live.stop()


def _print_result(result: RunResult, as_json: bool) -> None:
    if as_json:
        import json

        typer.echo(json.dumps(result.as_json(), indent=2, ensure_ascii=False, allow_nan=False))
        return
    from drillyard.console import SafeConsole
    from drillyard.measurement.result_text import render_result

    SafeConsole().print(render_result(result))


def _print_comparison(runs: list[RunResult], as_json: bool) -> None:
    from drillyard.measurement.comparison import compare_runs

    comparison = compare_runs(runs)
    if as_json:
        import json

        typer.echo(json.dumps(comparison.as_json(), indent=2, ensure_ascii=False, allow_nan=False))
        return
    from drillyard.console import SafeConsole
    from drillyard.measurement.comparison_text import render_comparison

    SafeConsole().print(render_comparison(comparison))


def _gpu_recipes(
    name: str,
    paths: list[str],
    recipes: dict[str, Any],
    steps: tuple[int | None, int | None],
    precision: str | None,
    sequence_length: int | None,
    others: list[str],
) -> None:
    """The three lines on stdout, everything else on stderr."""
    from drillyard.errors import UserError
    from drillyard.measurement.gpu_recipes import GpuRecipesRequest, gpu_recipes_lines

    if name != "gpu-recipes":
        raise UserError(f"--format {name}: there is only gpu-recipes; --json prints the result as JSON.")
    if others:
        raise UserError(f"{', '.join(others)}: not with --format gpu-recipes.")
    files = [*paths, *([recipes["--file"]] if recipes["--file"] else [])]
    if len(files) > 1:
        raise UserError(f"{', '.join(files)}: --format gpu-recipes reads one DLLogger file.")
    request = GpuRecipesRequest(
        file=files[0] if files else None,
        batch_size=recipes["--batch_size"],
        num_accelerators=recipes["--num_accelerators"],
        model_type=recipes["--model_type"],
        model_flops=recipes["--model_flops"],
        accelerator_type=recipes["--accelerator_type"],
        max_flops=recipes["--max_flops"],
        precision=precision or "bf16",
        start_step=steps[0],
        end_step=steps[1],
        sequence_length=sequence_length,
    )
    lines, doubts = gpu_recipes_lines(request)
    typer.echo(lines, nl=False)
    for doubt in doubts:
        typer.echo(f"warning: {doubt}", err=True)
