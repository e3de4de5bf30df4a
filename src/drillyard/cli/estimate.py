"""`drillyard estimate run.yaml`: will it fit, how fast, how long, how much, how often will it fail."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from drillyard.console import SafeConsole
from drillyard.errors import UserError

if TYPE_CHECKING:
    from drillyard.estimation.model_source import BuildSpec
    from drillyard.estimation.request import EstimateRequest

WIDTH_OF_FILES = 120
WIDTH_OF_TABLES = 110
WHERE, MODEL, MONEY, FAILURES, SHOW = "Where", "The model", "Money", "Failures", "What is shown"


def register(app: typer.Typer) -> None:
    """Add the command `estimate`."""

    @app.command()
    def estimate(
        run: Annotated[Path, typer.Argument(metavar="RUN", help="The run config.")],
        cluster: Annotated[
            Path | None, typer.Option(help="The cluster config.", metavar="FILE", rich_help_panel=WHERE)
        ] = None,
        machine: Annotated[
            str | None, typer.Option(help="Machine type, in place of the cluster's.", rich_help_panel=WHERE)
        ] = None,
        nodes: Annotated[
            int | None, typer.Option(help="Number of machines, in place of the cluster's.", rich_help_panel=WHERE)
        ] = None,
        accelerator: Annotated[
            str | None,
            typer.Option(help="An accelerator without a machine, with --num-gpus.", rich_help_panel=WHERE),
        ] = None,
        num_gpus: Annotated[int | None, typer.Option(help="Number of GPUs.", rich_help_panel=WHERE)] = None,
        gpus_per_node: Annotated[
            int | None, typer.Option(help="GPUs in a node, with --accelerator; default: 8.", rich_help_panel=WHERE)
        ] = None,
        hardware: Annotated[
            Path | None,
            typer.Option(
                help="Your own hardware and prices, laid over what is known.", metavar="FILE", rich_help_panel=WHERE
            ),
        ] = None,
        overrides: Annotated[
            list[str],
            typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the run config; repeatable."),
        ] = [],  # noqa: B006
        config: Annotated[
            Path | None,
            typer.Option(
                help="The model's config.json, in place of the run config's.", metavar="FILE", rich_help_panel=MODEL
            ),
        ] = None,
        params: Annotated[
            str | None,
            typer.Option(
                help="Number of parameters, such as 70.6B, of a model whose family is not known.", rich_help_panel=MODEL
            ),
        ] = None,
        active_params: Annotated[
            str | None, typer.Option(help="Of these, what one token uses.", rich_help_panel=MODEL)
        ] = None,
        build: Annotated[
            bool,
            typer.Option(
                "--build",
                help="Let transformers build a model whose family is not known (needs torch).",
                rich_help_panel=MODEL,
            ),
        ] = False,
        consumption: Annotated[
            str | None, typer.Option(help="How capacity is bought, such as spot.", rich_help_panel=MONEY)
        ] = None,
        region: Annotated[str | None, typer.Option(help="Region, for its price.", rich_help_panel=MONEY)] = None,
        price_per_gpu_hour: Annotated[
            float | None, typer.Option(help="Your own price, in dollars.", rich_help_panel=MONEY)
        ] = None,
        price_per_node_hour: Annotated[
            float | None, typer.Option(help="Your own price, in dollars.", rich_help_panel=MONEY)
        ] = None,
        data_tokens: Annotated[
            str | None,
            typer.Option(
                help="Tokens of one epoch, such as 15T, where the run is given in epochs.", rich_help_panel=MONEY
            ),
        ] = None,
        failure_rate: Annotated[
            str | None,
            typer.Option(
                help="llama3, rsc1, rsc2 or failures per 1,000 node-days; default: all three.", rich_help_panel=FAILURES
            ),
        ] = None,
        preemptions_per_node_day: Annotated[
            float | None, typer.Option(help="For spot capacity.", rich_help_panel=FAILURES)
        ] = None,
        restart_seconds: Annotated[
            float | None, typer.Option(help="From a failure to the next step.", rich_help_panel=FAILURES)
        ] = None,
        storage_gb_per_s: Annotated[
            float | None, typer.Option(help="Storage bandwidth of all nodes together.", rich_help_panel=FAILURES)
        ] = None,
        host_device_gb_per_s: Annotated[
            float | None, typer.Option(help="Copies from one GPU to its host.", rich_help_panel=FAILURES)
        ] = None,
        simulate: Annotated[
            bool,
            typer.Option(
                "--simulate",
                help="Simulate failures: goodput with its spread, best interval, spares.",
                rich_help_panel=FAILURES,
            ),
        ] = False,
        seed: Annotated[int, typer.Option(help="Seed of --simulate.", rich_help_panel=FAILURES)] = 0,
        calibrate: Annotated[
            Path | None,
            typer.Option(help="Take the speed that this run directory has measured.", metavar="RUN_DIR"),
        ] = None,
        without_source: Annotated[
            str | None, typer.Option(help="Leave out the measured runs of one publisher.", metavar="NAME")
        ] = None,
        sweep: Annotated[
            str | None,
            typer.Option(
                help="Combinations: micro_batch_size=1..16,nodes=1..64..x2,machine=a,b.",
                metavar="KEYS",
                rich_help_panel=SHOW,
            ),
        ] = None,
        plot: Annotated[
            Path | None,
            typer.Option(help="Write the plot of --sweep as SVG.", metavar="FILE", rich_help_panel=SHOW),
        ] = None,
        overwrite: Annotated[
            bool,
            typer.Option(
                "--overwrite", help="Replace the FILE of --plot if it is no plot, or edited.", rich_help_panel=SHOW
            ),
        ] = False,
        explain: Annotated[
            bool, typer.Option("--explain", help="Print each term with its formula and source.", rich_help_panel=SHOW)
        ] = False,
        as_json: Annotated[
            bool, typer.Option("--json", help="Print as JSON (`drillyard schema estimate`).", rich_help_panel=SHOW)
        ] = False,
    ) -> None:
        """Predict a run before money is spent: memory, speed, time, cost, failures. Needs no GPU, torch or weights.

        Where: --cluster FILE, or --machine and --nodes, or --accelerator and --num-gpus. Exit code 1: it does not fit.

        With --sweep, a key is a setting of the run config, nodes or machine: a..b, a..b..step, a..b..xfactor or a list.
        """
        from drillyard.estimation.asking import EstimateOptions, TargetOptions, build_request
        from drillyard.estimation.cost import PriceOptions
        from drillyard.estimation.run_time import FailureOptions

        if plot is not None and sweep is None:
            raise UserError("--plot draws a sweep: give --sweep too")
        if sweep is not None and (simulate or explain):
            raise UserError("--sweep gives a table of runs; take --simulate and --explain for one of them")
        options = EstimateOptions(
            run=run,
            where=TargetOptions(
                cluster=cluster,
                machine=machine,
                nodes=nodes,
                accelerator=accelerator,
                num_gpus=num_gpus,
                gpus_per_node=gpus_per_node,
                hardware=hardware,
                consumption=consumption,
                region=region,
            ),
            overrides=tuple(overrides),
            config=config,
            params=params,
            active_params=active_params,
            data_tokens=data_tokens,
            price=PriceOptions(price_per_gpu_hour, price_per_node_hour),
            failures=FailureOptions(
                rate=failure_rate,
                preemptions_per_node_day=preemptions_per_node_day,
                restart_seconds=restart_seconds,
                storage_gb_per_s=storage_gb_per_s,
                host_device_gb_per_s=host_device_gb_per_s,
            ),
            calibrate=calibrate,
            without_source=without_source,
        )
        question = build_request(options, build=_builder() if build else None)
        if sweep is not None:
            tell_sweep(question, sweep, plot, overwrite=overwrite, as_json=as_json)
        else:
            tell_prediction(question, explain=explain, as_json=as_json, seed=seed if simulate else None)


def tell_prediction(question: EstimateRequest, *, explain: bool, as_json: bool, seed: int | None) -> None:
    """Print one prediction, simulated where there is a `seed`. Exit with 1 where the run does not fit."""
    from drillyard.estimation.estimate_text import explanation, summary
    from drillyard.estimation.run_estimate import estimate_run

    prediction = estimate_run(question)
    simulated = None
    if seed is not None:
        from drillyard.estimation.simulated_run import simulate_run

        simulated = simulate_run(prediction, seed=seed)
    if as_json:
        from drillyard.estimation.as_json import prediction_json

        print(json.dumps(prediction_json(prediction, simulated), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        shown = [summary(prediction)]
        if simulated is not None:
            from drillyard.estimation.show_simulation import simulation_text

            shown.append(simulation_text(simulated))
        if explain:
            shown.append(explanation(prediction))
        console().print(*shown, sep="\n")
    if prediction.verdict == "does not fit":
        raise typer.Exit(1)


def tell_sweep(question: EstimateRequest, keys: str, plot: Path | None, *, overwrite: bool, as_json: bool) -> None:
    """Print a sweep, and write its plot where one is asked for."""
    from rich.progress import track

    from drillyard.estimation.axes import parse_axes
    from drillyard.estimation.sweep import run_sweep
    from drillyard.estimation.sweep_text import plot_of, sweep_text, write_svg

    if plot is not None and not plot.parent.is_dir():
        raise UserError(f"{plot}: cannot be written: there is no directory {plot.parent}")
    waiting = SafeConsole(stderr=True, quiet=not sys.stderr.isatty())
    swept = run_sweep(question, parse_axes(keys), lambda points: track(points, "predicting", console=waiting))
    if as_json:
        from drillyard.estimation.as_json import sweep_json

        print(json.dumps(sweep_json(swept, question.config.name), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        console(at_least=WIDTH_OF_TABLES).print(sweep_text(swept, question.config.name))
    if plot is not None:
        write_svg(plot_of(swept, question.config.name), plot, overwrite=overwrite)


def console(at_least: int = 0) -> SafeConsole:
    """As wide as the terminal, and `at_least` so many columns; what goes into a file gets lines of some length."""
    told = SafeConsole(highlight=False, markup=False, emoji=False)
    width = told.width if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDTH_OF_FILES
    told.width = max(width, at_least)
    return told


def _builder() -> BuildSpec:
    """What builds a model on the meta device."""
    try:
        from drillyard.models.shapes import build_spec
    except ModuleNotFoundError as error:
        raise UserError(
            f"--build needs {error.name}, which is not installed: pip install 'drillyard[train]'\n"
            "or give --params and --active-params instead"
        ) from None
    return build_spec
