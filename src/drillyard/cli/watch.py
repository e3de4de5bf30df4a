"""Follow a run until it is over: `drillyard watch RUN_DIR`, and `runs watch` and `runs logs` of a
launched run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from drillyard.cli.options import (
    Cluster,
    Interval,
    PricePerGpuHour,
    RunArgument,
    RunDirectory,
    find_run,
)

if TYPE_CHECKING:
    from drillyard.launch.cluster_registry import FoundRun
    from drillyard.launch.request import LogSelection

LINES, FORM = "Which lines", "How they are shown"


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("watch")(watch)


def watch(
    run_directory: RunDirectory, price: PricePerGpuHour = None, interval: Interval = None
) -> None:
    """Follow a run live: loss, speed, time left, cost and the last events, until it ends or you
    press q.

    Without a terminal it prints a line for each event and, at intervals, one for the steps. The run
    may be finished.

    Exit code 0; 1 if the run has failed.
    """
    from drillyard.console import SafeConsole
    from drillyard.reporting.gpu_price import gpu_price
    from drillyard.watch.watcher import FollowedRun, watch_run

    run_directory = find_run(run_directory)
    if watch_run(
        FollowedRun(run_directory, gpu_price(run_directory, price)), SafeConsole(), interval
    ).failed:
        raise typer.Exit(1)


def runs_watch(
    run: RunArgument,
    cluster: Cluster = None,
    price: PricePerGpuHour = None,
    interval: Interval = None,
) -> None:
    """Follow a run live: loss, speed, time left, cost and the last events, until it ends or you
    press q.

    Waits for a queued run. The log of a `workload:` is measured as by `drillyard metrics`.

    Exit code 0; 1 if the run has failed.
    """
    from drillyard.console import SafeConsole
    from drillyard.launch.cluster_registry import find_launched_run
    from drillyard.watch.remote_run import watch_launched_run

    if watch_launched_run(find_launched_run(run, cluster), SafeConsole(), price, interval):
        raise typer.Exit(1)


def runs_logs(
    run: RunArgument,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            "-f",
            help="Follow from its newest submission on until the run is over.",
            rich_help_panel=LINES,
        ),
    ] = False,
    node: Annotated[
        int | None,
        typer.Option(min=0, metavar="K", help="Only of this node.", rich_help_panel=LINES),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(min=0, metavar="R", help="Only of this rank.", rich_help_panel=LINES),
    ] = None,
    tail: Annotated[
        int | None,
        typer.Option(
            "--tail", "-n", min=0, metavar="N", help="Only the last N.", rich_help_panel=LINES
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Only newer ones: 90s, 10m, 2h, 3d or 2026-01-31T12:00:00Z.",
            rich_help_panel=LINES,
        ),
    ] = None,
    timestamps: Annotated[
        bool,
        typer.Option(
            "--timestamps", "-t", help="With the time of each line, UTC.", rich_help_panel=FORM
        ),
    ] = False,
    cluster: Cluster = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per line.", rich_help_panel=FORM)
    ] = False,
) -> None:
    """Print the output of a run's nodes in order of time, each line after its node's number.

    Without -f this includes all submissions of the run; -f begins with the newest one, or at
    --since.

    `drillyard metrics` reads it: drillyard runs logs -t RUN | drillyard metrics -

    Ctrl-C stops following, not the run.
    """
    from drillyard.launch.cluster_registry import find_launched_run
    from drillyard.launch.request import LogSelection, parse_since

    found = find_launched_run(run, cluster)
    wanted = LogSelection(
        follow, rank, node, tail, None if since is None else parse_since(since, time.time())
    )
    try:
        _print_logs(found, wanted, timestamps=timestamps, as_json=as_json)
    except KeyboardInterrupt:
        typer.echo(f"drillyard: {found.handle} is still running", err=True)
        raise


def _print_logs(found: FoundRun, wanted: LogSelection, *, timestamps: bool, as_json: bool) -> None:
    from drillyard.control_characters import standard_output
    from drillyard.launch.logs.reader import as_json_lines, plain
    from drillyard.launch.remote_files import print_notice
    from drillyard.launch.status_text import headline

    status = found.status() if wanted.follow else None
    if status is not None and not status.state.over:
        print_notice(f"{found.handle}: {headline(status, time.time())}")
    prefixes = wanted.node is None and wanted.rank is None
    out = standard_output()
    colours = out.isatty()
    printed = False
    for piece in found.logs(wanted, status):
        printed = True
        lines = (
            as_json_lines(piece) if as_json else plain(piece, stamps=timestamps, prefixes=prefixes)
        )
        out.write_lines(lines, colours=colours)
    if wanted.follow or not printed:
        status = found.status()
        no_rank = "" if wanted.rank is None else " (none names its rank; torchrun --tee 3 adds it)"
        nothing = "" if printed else f"no such lines{no_rank}; it is "
        print_notice(f"{found.handle}: {nothing}{headline(status, time.time())}")
