"""`drillyard launch run.yaml --cluster cluster.yaml`: submit a run to the cluster's scheduler."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from drillyard.cli.options import print_json, with_flags

if TYPE_CHECKING:
    from drillyard.config.cluster import ClusterConfig
    from drillyard.launch.plan import Plan

SHOW, HOW = "Show the plan", "Launch"


FLAGS = {
    "run": typer.Argument(
        metavar="RUN.YAML", help="The run config: a training run, or a `workload:`."
    ),
    "cluster": typer.Option(
        metavar="FILE", help="The cluster config: where to run.", show_default="cluster.yaml"
    ),
    "overrides": typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a setting of the run config; repeatable."
    ),
    "nodes": typer.Option(min=1, metavar="N", help="Nodes, in place of the cluster config's."),
    "sweep": typer.Option(
        metavar="KEY=VALUES",
        help="Launch one run per value: a,b or 1..16; repeated: every combination.",
        rich_help_panel=HOW,
    ),
    "sync": typer.Option(
        "--sync",
        help="Copy this directory to the nodes, without what git ignores.",
        rich_help_panel=HOW,
    ),
    "replace": typer.Option(
        "--replace",
        help="Cancel a run of this name, launched from this directory, that is not over.",
        rich_help_panel=HOW,
    ),
    "after": typer.Option(
        metavar="RUN", help="Start once that run has succeeded.", rich_help_panel=HOW
    ),
    "max_failures": typer.Option(
        min=0, metavar="N", help="Restarts after failures.", rich_help_panel=HOW
    ),
    "force": typer.Option(
        "--force",
        help="Launch even if the estimate says that it does not fit.",
        rich_help_panel=HOW,
    ),
    "wait": typer.Option(
        "--wait", help="Wait for the end; exit with the run's code.", rich_help_panel=HOW
    ),
    "dry_run": typer.Option(
        "--dry-run", help="Print exactly what would be executed.", rich_help_panel=SHOW
    ),
    "files": typer.Option(
        "--files", help="With --dry-run: print every file whole.", rich_help_panel=SHOW
    ),
    "explain": typer.Option(
        "--explain",
        help="Print the reason of each generated field, and stop.",
        rich_help_panel=SHOW,
    ),
    "output": typer.Option(
        metavar="DIR",
        help="Write everything as files, with apply.sh, and stop.",
        rich_help_panel=SHOW,
    ),
    "overwrite": typer.Option(
        "--overwrite", help="Replace an earlier plan in DIR.", rich_help_panel=SHOW
    ),
    "as_json": typer.Option("--json", help="Print as JSON.", rich_help_panel=SHOW),
}


def register(app: typer.Typer) -> None:
    """Add the command `launch`."""
    app.command("launch")(with_flags(launch, FLAGS))


def launch(
    run: Path,
    cluster: Path = Path("cluster.yaml"),
    overrides: list[str] | None = None,
    nodes: int | None = None,
    sweep: list[str] | None = None,
    sync: bool = False,
    replace: bool = False,
    after: str | None = None,
    max_failures: int = 3,
    force: bool = False,
    wait: bool = False,
    dry_run: bool = False,
    files: bool = False,
    explain: bool = False,
    output: Path | None = None,
    overwrite: bool = False,
    as_json: bool = False,
) -> None:
    """Submit a run to a cluster's scheduler, or start it on hosts. It continues when this terminal
    is closed.

    Prints the run's handle, platform://cluster/run, for `drillyard runs status | logs | watch |
    cancel | artifacts`.

    Exit codes: 0 it was submitted; 2 a mistake to fix, nothing was submitted. With --wait the run's
    own: 0 succeeded, 1 failed, 2 refused, 130 cancelled.
    """
    from drillyard.launch.plan_output import write_plan
    from drillyard.launch.submission import check_memory, plan_launch

    requests, plans = plan_launch(
        run,
        cluster,
        overrides=overrides or [],
        nodes=nodes,
        sweep=sweep or [],
        sync=sync,
        max_failures=max_failures,
        after=after,
    )
    if output is not None:
        for plan in plans:
            directory = output if len(plans) == 1 else output / plan.handle.run
            written = write_plan(plan, directory, overwrite=overwrite)
            print(
                f"{len(written)} files in {directory}; {directory / 'apply.sh'} executes them",
                file=sys.stderr,
            )
    if dry_run or explain:
        _show(
            requests[0].cluster,
            plans,
            dry_run=dry_run,
            files=files,
            explain=explain,
            as_json=as_json,
        )
    if output is not None or dry_run or explain:
        return
    for line in check_memory(requests, force=force):
        print(line, file=sys.stderr)
    for plan in plans:
        for warning in plan.warnings:
            print(f"warning: {warning}", file=sys.stderr)
    _submit(requests[0].cluster, plans, replace=replace, wait=wait, as_json=as_json)


def _show(
    cluster: ClusterConfig,
    plans: list[Plan],
    *,
    dry_run: bool,
    files: bool,
    explain: bool,
    as_json: bool,
) -> None:
    from drillyard.launch.launcher import launcher_for
    from drillyard.launch.plan_output import explain_text, plan_json, plan_text

    if as_json:
        shown = [plan_json(plan) for plan in plans]
        print_json(shown[0] if len(shown) == 1 else shown)
        return
    for plan in plans:
        if dry_run:
            print(plan_text(plan, whole_files=files), end="")
            print(launcher_for(cluster).rendered(plan), end="")
        if explain:
            print(explain_text(plan), end="")


def _submit(
    cluster: ClusterConfig, plans: list[Plan], *, replace: bool, wait: bool, as_json: bool
) -> None:
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
        from drillyard.launch.launcher import launcher_for
        from drillyard.launch.run_wait import wait_for

        launcher = launcher_for(cluster)
        raise typer.Exit(max(wait_for(launcher, handle.run) for handle in handles))
