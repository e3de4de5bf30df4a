"""`drillyard launch run.yaml --cluster cluster.yaml`: submit a run to the cluster's scheduler."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from drillyard.cli.options import print_json

if TYPE_CHECKING:
    from drillyard.config.cluster import ClusterConfig
    from drillyard.launch.plan import Plan

SHOW, HOW = "Show the plan", "Launch"


def register(app: typer.Typer) -> None:
    """Add the command `launch`."""
    app.command("launch")(launch)


def launch(
    run: Annotated[Path, typer.Argument(metavar="RUN.YAML", help="The run config: a training run, or a `workload:`.")],
    cluster: Annotated[
        Path, typer.Option(metavar="FILE", help="The cluster config: where to run.", show_default="cluster.yaml")
    ] = Path("cluster.yaml"),
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the run config; repeatable."),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUES",
            help="Launch one run per value: a,b or 1..16; repeated: every combination.",
            rich_help_panel=HOW,
        ),
    ] = None,
    sync: Annotated[
        bool,
        typer.Option("--sync", help="Copy this directory to the nodes, without what git ignores.", rich_help_panel=HOW),
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Cancel a run of this name that is not over.", rich_help_panel=HOW)
    ] = False,
    after: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Start once that run has succeeded.", rich_help_panel=HOW),
    ] = None,
    max_failures: Annotated[
        int, typer.Option(min=0, metavar="N", help="Restarts after failures.", rich_help_panel=HOW)
    ] = 3,
    force: Annotated[
        bool,
        typer.Option("--force", help="Launch even if the estimate says that it does not fit.", rich_help_panel=HOW),
    ] = False,
    wait: Annotated[
        bool,
        typer.Option("--wait", help="Wait for the end; exit with the run's code.", rich_help_panel=HOW),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print exactly what would be executed.", rich_help_panel=SHOW)
    ] = False,
    files: Annotated[
        bool, typer.Option("--files", help="With --dry-run: print every file whole.", rich_help_panel=SHOW)
    ] = False,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Print the reason of each generated field, and stop.", rich_help_panel=SHOW),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write everything as files, with apply.sh, and stop.", rich_help_panel=SHOW),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier plan in DIR.", rich_help_panel=SHOW)
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.", rich_help_panel=SHOW)] = False,
) -> None:
    """Submit a run to a cluster's scheduler, or start it on hosts. It continues when this terminal is closed.

    Prints the run's handle, platform://cluster/run, for `drillyard runs status | logs | watch | cancel | artifacts`.

    Exit codes: 0 it was submitted; 2 a mistake to fix, nothing was submitted. With --wait the run's own: 0 succeeded,
    1 failed, 2 refused, 130 cancelled.
    """
    from drillyard.launch.plan_output import write_plan
    from drillyard.launch.submission import check_memory, plan_launch

    requests, plans = plan_launch(
        run,
        cluster,
        overrides=overrides or [],
        sweep=sweep or [],
        sync=sync,
        max_failures=max_failures,
        after=after,
    )
    if output is not None:
        for plan in plans:
            directory = output if len(plans) == 1 else output / plan.handle.run
            written = write_plan(plan, directory, overwrite=overwrite)
            print(f"{len(written)} files in {directory}; {directory / 'apply.sh'} executes them", file=sys.stderr)
    if dry_run or explain:
        _show(plans, dry_run=dry_run, files=files, explain=explain, as_json=as_json)
    if output is not None or dry_run or explain:
        return
    for line in check_memory(requests, force=force):
        print(line, file=sys.stderr)
    for plan in plans:
        for warning in plan.warnings:
            print(f"warning: {warning}", file=sys.stderr)
    _submit(requests[0].cluster, plans, replace=replace, wait=wait, as_json=as_json)


def _show(plans: list[Plan], *, dry_run: bool, files: bool, explain: bool, as_json: bool) -> None:
    from drillyard.launch.plan_output import explain_text, plan_json, plan_text

    if as_json:
        shown = [plan_json(plan) for plan in plans]
        print_json(shown[0] if len(shown) == 1 else shown)
        return
    for plan in plans:
        if dry_run:
            print(plan_text(plan, whole_files=files), end="")
        if explain:
            print(explain_text(plan), end="")


def _submit(cluster: ClusterConfig, plans: list[Plan], *, replace: bool, wait: bool, as_json: bool) -> None:
    from drillyard.launch.submission import submit_plans

    handles = []
    try:
        for handle in submit_plans(cluster, plans, replace=replace):
            handles.append(handle)
            if not as_json:
                print(handle, flush=True)
    except BaseException:
        if as_json and handles:
            print_json([str(handle) for handle in handles], indent=None)
        raise
    if as_json:
        submitted = [
            {"handle": str(handle), "run_directory": plan.run_directory}
            for handle, plan in zip(handles, plans, strict=True)
        ]
        print_json(submitted[0] if len(submitted) == 1 else submitted, indent=None)
    if wait:
        from drillyard.cli.runs import wait_for
        from drillyard.launch.launcher import launcher_for

        launcher = launcher_for(cluster)
        raise typer.Exit(max(wait_for(launcher, handle.run) for handle in handles))
