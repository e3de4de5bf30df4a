"""`drillyard watch RUN_DIR`: a run live in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from drillyard.cli.options import Interval, PricePerGpuHour, find_run


def register(app: typer.Typer) -> None:
    """Add the command to the app."""

    @app.command()
    def watch(
        run_directory: Annotated[
            Path, typer.Argument(metavar="RUN_DIR", help="Directory of a run, such as runs/NAME.")
        ],
        price: PricePerGpuHour = None,
        interval: Interval = None,
    ) -> None:
        """Follow a run live: loss, speed, time left, cost and the last events, until it ends or q is pressed.

        Without a terminal it prints a line for each event and, every so often, one for the steps. It may be a finished
        run. Exit code 0; 1 when the run has failed.
        """
        from drillyard.console import SafeConsole
        from drillyard.reporting.gpu_price import gpu_price
        from drillyard.watch.watcher import FollowedRun
        from drillyard.watch.watcher import watch_run as follow

        run_directory = find_run(run_directory)
        followed = FollowedRun(run_directory, gpu_price(run_directory, price))
        run = follow(followed, SafeConsole(), interval)
        if run.over and run.phase == "failed":
            raise typer.Exit(1)
