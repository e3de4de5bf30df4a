"""`drillyard runs logs` and `runs watch`: follow a run until it is over."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from drillyard.cli.options import Cluster, Interval, PricePerGpuHour, RunArgument
from drillyard.errors import UserError

if TYPE_CHECKING:
    from drillyard.console import SafeConsole
    from drillyard.launch.cluster_registry import FoundRun
    from drillyard.launch.request import LogSelection
    from drillyard.launch.run_status import RunStatus

WHICH = "Which lines"
HOW = "How they are shown"
WAITING_SECONDS = 5.0


def logs_command(
    run: RunArgument,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", "-f", help="From the newest submission on, until the run is over.", rich_help_panel=WHICH
        ),
    ] = False,
    node: Annotated[
        int | None, typer.Option(min=0, metavar="K", help="Only of this node.", rich_help_panel=WHICH)
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=0, metavar="R", help="Only of this rank.", rich_help_panel=WHICH)
    ] = None,
    tail: Annotated[
        int | None, typer.Option("--tail", "-n", min=0, metavar="N", help="Only the last N.", rich_help_panel=WHICH)
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Only newer ones: 90s, 10m, 2h, 3d or 2026-01-31T12:00:00Z.", rich_help_panel=WHICH
        ),
    ] = None,
    timestamps: Annotated[
        bool, typer.Option("--timestamps", "-t", help="With the time of each line, UTC.", rich_help_panel=HOW)
    ] = False,
    cluster: Cluster = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object a line.", rich_help_panel=HOW)] = False,
) -> None:
    """Print what a run's nodes printed, in order of time, each line after its node's number.

    The logs of a run have all its submissions. Without -f all of them are printed; -f begins with the newest one, or at
    --since.

    To measure it: drillyard runs logs -t RUN | drillyard metrics -

    Ctrl-C ends the following, never the run.
    """
    from drillyard.launch.cluster_registry import find_launched_run
    from drillyard.launch.request import LogSelection, parse_since

    found = find_launched_run(run, cluster)
    wanted = LogSelection(follow, rank, node, tail, None if since is None else parse_since(since, time.time()))
    try:
        _print_logs(found, wanted, timestamps=timestamps, as_json=as_json)
    except KeyboardInterrupt:
        typer.echo(f"drillyard: {found.handle} continues", err=True)
        raise


def watch_command(
    run: RunArgument,
    cluster: Cluster = None,
    price: PricePerGpuHour = None,
    interval: Interval = None,
) -> None:
    """Follow a run live: loss, speed, time left, cost and the last events, until it ends or q is pressed.

    Waits for a run that is queued. The log of a `workload:` is measured as `drillyard metrics` does.

    Exit code 0; 1 when the run has failed.
    """
    from drillyard.console import SafeConsole
    from drillyard.launch.cluster_registry import find_launched_run
    from drillyard.watch.remote_run import mirror_run
    from drillyard.watch.watcher import watch_run

    found = find_launched_run(run, cluster)
    console = SafeConsole()
    seconds = interval or (1.0 if console.is_terminal else 10.0)
    if not _writes_events(found):
        _watch_log(found, console, price, seconds)
        return
    with mirror_run(found.launcher, found.handle.run, price, min(seconds, 2.0)) as followed:
        seen = watch_run(followed, console, interval)
    if seen.over and seen.phase == "failed":
        raise typer.Exit(1)


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
        lines = as_json_lines(piece) if as_json else plain(piece, stamps=timestamps, prefixes=prefixes)
        out.write_lines(lines, colours=colours)
    if wanted.follow or not printed:
        status = found.status()
        no_rank = "" if wanted.rank is None else " (none names its rank; torchrun --tee 3 has them do so)"
        nothing = "" if printed else f"no such lines{no_rank}; it is "
        print_notice(f"{found.handle}: {nothing}{headline(status, time.time())}")


def _writes_events(found: FoundRun) -> bool:
    """Wait for the run's first output: True for events of Drillyard's trainer, False for the log of a workload.

    Raises UserError for a run that is over and has written nothing.
    """
    from drillyard.launch.remote_files import print_notice
    from drillyard.launch.request import LogSelection
    from drillyard.launch.status_text import headline
    from drillyard.telemetry.events import EVENTS_FILE

    run = found.handle.run
    printed = None
    for status in _statuses(found):
        if found.launcher.read(run, EVENTS_FILE, 0):
            return True
        is_workload = "\nworkload:" in found.launcher.read(run, "launch/run.yaml", 0).decode(errors="replace")
        if is_workload and next(found.launcher.logs(run, LogSelection(tail=1)), b""):
            return False
        now = headline(status, time.time())
        if status.state.over:
            raise UserError(f"{found.handle}: {now}, and it wrote nothing to watch; see drillyard runs status {run}")
        if status.state is not printed:
            printed = status.state
            print_notice(f"{found.handle}: {now}; waiting for its first output")
    raise AssertionError("a run's states come until it is over")


def _watch_log(found: FoundRun, console: SafeConsole, price: float | None, seconds: float) -> None:
    import json

    from drillyard.hardware import load_catalog
    from drillyard.launch.run_status import State
    from drillyard.measurement.user_facts import UserFacts
    from drillyard.watch.remote_log import watch_log

    cluster, run = found.cluster, found.handle.run
    facts = load_catalog(cluster.hardware)
    machine = None if cluster.machine is None else facts.find_machine(cluster.machine)
    job = json.loads(found.launcher.read(run, "launch/job.json", 0))
    facts_given = UserFacts(
        accelerator=None if machine is None else machine.accelerator,
        num_gpus=job["nodes"] * job["processes_per_node"],
        gpus_per_node=job["processes_per_node"],
        price_per_gpu_hour=price,
    )
    watch_log(found.launcher, run, console, facts_given, facts, seconds)
    if found.status().state is State.failed:
        raise typer.Exit(1)


def _statuses(found: FoundRun) -> Iterator[RunStatus]:
    while True:
        yield found.status()
        time.sleep(WAITING_SECONDS)
