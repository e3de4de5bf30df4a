"""`drillyard report` writes a run's results as one HTML file; `drillyard diff` compares two runs
step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from drillyard.cli.options import RUN_FACTS, AsJson, RunDirectory, add_options, find_run, find_runs

LOGS = "For the logs of other frameworks: what they do not say"


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command("report")(add_options(report, RUN_FACTS, LOGS))
    app.command("diff")(diff)


def report(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN_DIR | PATH...",
            help="Directory of a run, or logs of one run of any framework.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Default: RUN_DIR/report.html, or ./report.html."
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace FILE even if it is not a report, or was edited."),
    ] = False,
    **facts: Any,
) -> None:
    """Write a report of a run as one HTML file: curves, goodput, evaluation, events, configuration.

    The run may still be going, and may be of any framework whose logs `drillyard metrics` reads.
    The file needs no network, follows light and dark mode, and shows its charts as tables without
    JavaScript.
    """
    from drillyard import api, formatting

    target = api.report(find_runs(paths), output, overwrite=overwrite, **facts)
    typer.echo(f"{target} ({formatting.size(target.stat().st_size)})")


def diff(first: RunDirectory, second: RunDirectory, as_json: AsJson = False) -> None:
    """Compare the logged losses and gradient norms of two runs to the bit.

    Exit code 0: equal; 1: they differ, or one has steps that the other lacks; 2: an error.
    """
    from dataclasses import asdict

    from drillyard.telemetry.difference import compare_runs, format_difference
    from drillyard.telemetry.events import refusing_odd_values
    from drillyard.telemetry.jsonlines import encode

    first, second = find_run(first), find_run(second)
    with refusing_odd_values(first, second):
        difference = compare_runs(first, second)
    if as_json:
        typer.echo(encode({"version": 1, "equal": difference.equal, **asdict(difference)}))
    else:
        typer.echo(format_difference(difference, first, second))
    if not difference.equal:
        raise typer.Exit(1)
