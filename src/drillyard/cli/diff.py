"""`drillyard diff RUN RUN`: the first step at which two runs differ, and by how much."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from drillyard.cli.options import find_run


def register(app: typer.Typer) -> None:
    """Add the command to the app."""

    @app.command()
    def diff(
        first: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run.")],
        second: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run to compare it with.")],
        as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
    ) -> None:
        """Compare the logged losses and gradient norms of two runs to the bit.

        Exit code 0 when they are equal, 1 when they differ (or one has steps that the other lacks), 2 for an error.
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
