"""`drillyard launch run.yaml --cluster cluster.yaml`: submit a run to the cluster's scheduler."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from drillyard.cli.options import (
    POOL,
    SHOW_PLAN,
    SHOW_PLAN_FLAGS,
    node_flags,
    print_json,
    require_dry_run,
    with_flags,
)

if TYPE_CHECKING:
    from drillyard.acceptance.accept_command import Acceptance
    from drillyard.acceptance.check import Level
    from drillyard.acceptance.judgement import Outcome
    from drillyard.config.cluster import ClusterConfig
    from drillyard.launch.plan import Plan
    from drillyard.launch.request import LaunchRequest

HOW, FIRST = "Launch", "Check the nodes first"

FLAGS = {
    **node_flags(HOW, FIRST),
    **SHOW_PLAN_FLAGS,
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
    "pool": POOL,
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
    "accept": typer.Option(
        metavar="LEVEL",
        help="Check the nodes first (drillyard accept): quick, standard or full. Bad ones are"
        " excluded, or nothing is submitted.",
        rich_help_panel=FIRST,
    ),
    "wait": typer.Option(
        "--wait", help="Wait for the end; exit with the run's code.", rich_help_panel=HOW
    ),
    "output": typer.Option(
        metavar="DIR",
        help="Write everything as files, with apply.sh, and stop.",
        rich_help_panel=SHOW_PLAN,
    ),
    "overwrite": typer.Option(
        "--overwrite", help="Replace an earlier plan in DIR.", rich_help_panel=SHOW_PLAN
    ),
    "as_json": typer.Option("--json", help="Print as JSON.", rich_help_panel=SHOW_PLAN),
}


def register(app: typer.Typer) -> None:
    """Add the command `launch`."""
    app.command("launch")(with_flags(launch, FLAGS))


def launch(
    run: Path,
    cluster: Path = Path("cluster.yaml"),
    overrides: list[str] | None = None,
    nodes: int | None = None,
    pool: str | None = None,
    sweep: list[str] | None = None,
    sync: bool = False,
    replace: bool = False,
    after: str | None = None,
    exclude: list[str] | None = None,
    max_failures: int = 3,
    force: bool = False,
    accept: str | None = None,
    drain: bool = False,
    max_share: float | None = None,
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
    from drillyard.acceptance.check import level_named
    from drillyard.cli.acceptance_output import require_drain
    from drillyard.errors import ConfigError
    from drillyard.launch.plan_output import write_plan
    from drillyard.launch.submission import check_memory, plan_launch

    def planned(excluded: Sequence[str]) -> tuple[list[LaunchRequest], list[Plan]]:
        return plan_launch(
            run,
            cluster,
            overrides=overrides or [],
            nodes=nodes,
            pool=pool,
            sweep=sweep or [],
            sync=sync,
            max_failures=max_failures,
            after=after,
            exclude=excluded,
        )

    require_drain(drain, max_share)
    require_dry_run(files, dry_run)
    if drain and accept is None:
        raise ConfigError("--drain: takes out what --accept finds, which is not given; give both")
    level = None if accept is None else level_named(accept, "--accept")
    requests, plans = planned(exclude or ())
    if output is not None:
        for plan in plans:
            directory = output if len(plans) == 1 else output / plan.handle.run
            written = write_plan(plan, directory, overwrite=overwrite)
            print(
                f"{len(written)} files in {directory}; {directory / 'apply.sh'} executes them",
                file=sys.stderr,
            )
    if dry_run or explain:
        show_plans(
            requests[0].cluster,
            plans,
            dry_run=dry_run,
            files=files,
            explain=explain,
            as_json=as_json,
        )
    if output is not None or dry_run or explain:
        if level is not None:
            print(f"--accept {level}: nodes are checked when the run is launched", file=sys.stderr)
        return
    for line in check_memory(requests, force=force):
        print(line, file=sys.stderr)
    if level is not None:
        excluded = _checked(requests[0], cluster, level, nodes, pool, drain, max_share)
        requests, plans = planned(excluded)
    for plan in plans:
        for warning in plan.warnings:
            print(f"warning: {warning}", file=sys.stderr)
    _submit(requests[0].cluster, plans, replace=replace, wait=wait, as_json=as_json)


def _checked(
    request: LaunchRequest,
    cluster: Path,
    level: Level,
    nodes: int | None,
    pool: str | None,
    drain: bool,
    max_share: float | None,
) -> list[str]:
    """Check the nodes of a run; returns those that it must not use."""
    from drillyard.acceptance.before_launch import nodes_to_exclude
    from drillyard.acceptance.job import acceptance_run
    from drillyard.cli.acceptance_output import (
        AcceptanceFiles,
        drain_nodes,
        print_outcome,
    )

    config = acceptance_run(request.cluster)
    files = AcceptanceFiles(
        Path(config.output, config.name, "acceptance.json"), remedy="move it away"
    )
    files.require_replaceable()

    def report(acceptance: Acceptance, outcome: Outcome) -> None:
        print_outcome(outcome, sys.stderr)
        if drain and outcome.culprits:
            drain_nodes(acceptance.request.cluster, outcome, max_share)
        files.write(outcome, request.cluster.name)

    return nodes_to_exclude(cluster, level, nodes, list(request.exclude), report, pool=pool)


def show_plans(
    cluster: ClusterConfig,
    plans: list[Plan],
    *,
    dry_run: bool,
    files: bool,
    explain: bool,
    as_json: bool,
) -> None:
    """Print plans: exactly what would be executed, or the reasons of their fields."""
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
