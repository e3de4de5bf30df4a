"""`drillyard estimate run.yaml`: will it fit, how fast, how long, how much, how often will it
fail."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from drillyard.cli.options import with_options
from drillyard.console import SafeConsole
from drillyard.errors import MissingExtraError, UserError
from drillyard.estimation.request import FAILURES, MODEL, EstimateOptions, build_request

if TYPE_CHECKING:
    from drillyard.estimation.model_source import BuildSpec
    from drillyard.estimation.request import EstimateRequest

WIDTH_OF_FILES = 120
WIDTH_OF_TABLES = 110
SHOW = "What is shown"


def register(app: typer.Typer) -> None:
    """Add the command `estimate`."""

    @app.command()
    @with_options(EstimateOptions)
    def estimate(
        options: EstimateOptions,
        build: Annotated[
            bool,
            typer.Option(
                "--build",
                help="Let transformers build a model whose family is not known (needs torch).",
                rich_help_panel=MODEL,
            ),
        ] = False,
        simulate: Annotated[
            bool,
            typer.Option(
                "--simulate",
                help="Simulate failures: goodput with its spread, best interval, spares.",
                rich_help_panel=FAILURES,
            ),
        ] = False,
        seed: Annotated[
            int, typer.Option(help="Seed of --simulate.", rich_help_panel=FAILURES)
        ] = 0,
        sweep: Annotated[
            list[str] | None,
            typer.Option(
                help="Values of a key: a,b or 1..16 or 1..64..x2; repeated: every combination.",
                metavar="KEY=VALUES",
                rich_help_panel=SHOW,
            ),
        ] = None,
        plot: Annotated[
            Path | None,
            typer.Option(
                help="Write the plot of --sweep as SVG.", metavar="FILE", rich_help_panel=SHOW
            ),
        ] = None,
        overwrite: Annotated[
            bool,
            typer.Option(
                "--overwrite",
                help="Replace the FILE of --plot even if it is not a plot, or was edited.",
                rich_help_panel=SHOW,
            ),
        ] = False,
        explain: Annotated[
            bool,
            typer.Option(
                "--explain",
                help="Print quantities with formulas and sources.",
                rich_help_panel=SHOW,
            ),
        ] = False,
        as_json: Annotated[
            bool,
            typer.Option(
                "--json", help="Print as JSON (`drillyard schema estimate`).", rich_help_panel=SHOW
            ),
        ] = False,
    ) -> None:
        """Estimate a run before money is spent: memory, speed, time, cost, failures. Needs no GPU,
        torch or weights.

        Where: --cluster FILE, or --machine and --nodes, or --accelerator and --num-gpus. Exit code
        1: it does not fit.

        With --sweep, a key is a setting of the run config, nodes or machine: a..b, a..b..step,
        a..b..xfactor or a list.
        """
        if plot is not None and not sweep:
            raise UserError("--plot draws a sweep: give --sweep too")
        if sweep and (simulate or explain):
            raise UserError(
                "--sweep gives a table of runs; take --simulate and --explain for one of them"
            )
        request = build_request(options, build=_builder() if build else None)
        if sweep:
            _sweep(request, sweep, plot, overwrite=overwrite, as_json=as_json)
        else:
            _estimate(request, explain=explain, as_json=as_json, seed=seed if simulate else None)


def _estimate(request: EstimateRequest, *, explain: bool, as_json: bool, seed: int | None) -> None:
    """Print one estimate, simulated where there is a `seed`. Exit with 1 where the run does not
    fit."""
    from drillyard.estimation.estimate_text import explanation, simulation_text, summary
    from drillyard.estimation.run_estimate import estimate_run
    from drillyard.estimation.simulation_estimate import simulate_run

    found = estimate_run(request)
    simulated = None if seed is None else simulate_run(found, seed=seed)
    if as_json:
        from drillyard.estimation.document import estimate_document

        print(estimate_document(found, simulated).as_text())
    else:
        shown = [summary(found)]
        if simulated is not None:
            shown.append(simulation_text(simulated))
        if explain:
            shown.append(explanation(found))
        console().print(*shown, sep="\n")
    if found.verdict == "does not fit":
        raise typer.Exit(1)


def _sweep(
    request: EstimateRequest, keys: list[str], plot: Path | None, *, overwrite: bool, as_json: bool
) -> None:
    """Print a sweep, and write its plot."""
    from rich.progress import track

    from drillyard.config.sweep_grammar import parse_axes
    from drillyard.estimation.sweep import run_sweep
    from drillyard.estimation.sweep_text import plot_of, sweep_text, write_svg

    if plot is not None and not plot.parent.is_dir():
        raise UserError(f"{plot}: cannot be written: there is no directory {plot.parent}")
    waiting = SafeConsole(stderr=True, quiet=not sys.stderr.isatty())
    swept = run_sweep(
        request, parse_axes(keys), lambda points: track(points, "estimating", console=waiting)
    )
    if as_json:
        from drillyard.estimation.document import sweep_document

        print(sweep_document(swept, request.config.name).as_text())
    else:
        console(at_least=WIDTH_OF_TABLES).print(sweep_text(swept, request.config.name))
    if plot is not None:
        write_svg(plot_of(swept, request.config.name), plot, overwrite=overwrite)


def console(at_least: int = 0) -> SafeConsole:
    """As wide as the terminal, and `at_least` so many columns; a file gets lines of a fixed
    width."""
    found = SafeConsole(highlight=False, markup=False, emoji=False)
    width = found.width if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDTH_OF_FILES
    found.width = max(width, at_least)
    return found


def _builder() -> BuildSpec:
    """Return the function that builds a model on the meta device."""
    try:
        from drillyard.models.meta_model import build_spec
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"--build needs {error.name}, which is not installed: pip install 'drillyard[train]'\n"
            "or give --params and --active-params instead"
        ) from None
    return build_spec
