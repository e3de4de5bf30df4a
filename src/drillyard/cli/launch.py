"""`drillyard launch run.yaml --cluster cluster.yaml`: hand a run to the cluster's own scheduler."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from drillyard.errors import DoesNotFitError, NotFoundError, UserError

if TYPE_CHECKING:
    from drillyard.config.cluster import ClusterConfig
    from drillyard.launch.launcher import Launcher
    from drillyard.launch.plan import Plan
    from drillyard.launch.request import LaunchRequest

SHOW, HOW = "What is shown", "How it is launched"


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
            metavar="KEY=A,B,...", help="Launch one run per value; repeated: every combination.", rich_help_panel=HOW
        ),
    ] = None,
    sync: Annotated[
        bool,
        typer.Option("--sync", help="Carry this directory (what git does not ignore) along.", rich_help_panel=HOW),
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Cancel a run of this name that is not over.", rich_help_panel=HOW)
    ] = False,
    after: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Start once that run has succeeded (slurm).", rich_help_panel=HOW),
    ] = None,
    max_failures: Annotated[
        int, typer.Option(min=0, metavar="N", help="Restarts after failures that count.", rich_help_panel=HOW)
    ] = 3,
    force: Annotated[
        bool,
        typer.Option("--force", help="Launch what the estimate says does not fit in memory.", rich_help_panel=HOW),
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
        typer.Option("--explain", help="Print why each generated field is as it is, and stop.", rich_help_panel=SHOW),
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
    """Hand a run to a cluster's scheduler: local, ssh, slurm or vertex. It continues when this terminal is closed.

    Prints the run's handle, platform://cluster/run, for `drillyard runs status | logs | watch | cancel | artifacts`.

    Exit codes: 0 it was submitted; 2 a mistake to fix, nothing was submitted. With --wait the run's own: 0 succeeded,
    1 failed, 2 refused, 130 cancelled.
    """
    from drillyard.config.platforms import require_capability
    from drillyard.launch.launcher import launcher_for

    config, requests = _requests(run, cluster, overrides or [], sweep or [], sync, max_failures, after)
    if sync:
        require_capability(config.platform, "sync", "--sync")
    if after is not None:
        require_capability(config.platform, "dependency", "--after")
    launcher = launcher_for(config)
    plans = launcher.plan_sweep(requests) if sweep else [launcher.plan(requests[0])]
    if output is not None:
        _write(plans, output, overwrite=overwrite)
    if dry_run or explain:
        _show(plans, dry_run=dry_run, files=files, explain=explain, as_json=as_json)
    if output is not None or dry_run or explain:
        return
    _tell_estimates(requests, force=force)
    for plan in plans:
        for warning in plan.warnings:
            print(f"warning: {warning}", file=sys.stderr)
    _submit(launcher, config, plans, replace=replace, wait=wait, as_json=as_json)


def _requests(
    run: Path,
    cluster: Path,
    overrides: list[str],
    sweep: list[str],
    sync: bool,
    max_failures: int,
    after: str | None,
) -> tuple[ClusterConfig, list[LaunchRequest]]:
    """The cluster, and what is to be launched on it: one request, or one per point of a sweep."""
    from drillyard.config import load_cluster_config, load_launch_config
    from drillyard.hardware import load_catalog
    from drillyard.launch.request import LaunchRequest
    from drillyard.launch.sweep import SweepPoint, sweep_points

    if not cluster.exists():
        raise NotFoundError(f"{cluster}: there is no such file; give --cluster FILE, or write one: drillyard init")
    _require_launcher(cluster)
    config = _with_ranks_of_this_machine(load_cluster_config(cluster, resolve_environment=False))
    first = load_launch_config(run, overrides, resolve_environment=False)
    facts = load_catalog(config.hardware)
    points = sweep_points(sweep, first.name) if sweep else [SweepPoint("", ())]
    requests = []
    for point in points:
        named = [*point.overrides, *([f"name={first.name}-{point.name}"] if point.name else [])]
        each = load_launch_config(run, [*overrides, *named], resolve_environment=False) if named else first
        requests.append(
            LaunchRequest(
                run=each,
                cluster=config,
                facts=facts,
                here=os.getcwd(),
                python=sys.executable,
                sync=sync,
                max_failures=max_failures,
                dependency=after,
            )
        )
    return config, requests


def _require_launcher(cluster: Path) -> None:
    """Refuse a platform that cannot be launched on before asking for more of its config."""
    from drillyard.config.platforms import launcher_class, platforms
    from drillyard.config.yaml_document import read_document

    config = read_document(cluster).value
    platform = config.get("platform") if isinstance(config, dict) else None
    if isinstance(platform, str) and platform in platforms():
        launcher_class(platform)


def _with_ranks_of_this_machine(cluster: ClusterConfig) -> ClusterConfig:
    """`cluster`; where it is this machine and sets no ranks, with one per GPU, as `drillyard train` starts."""
    from drillyard.config.platforms import platforms

    here = platforms()[cluster.platform].is_this_machine
    if not here or cluster.processes_per_node is not None or cluster.machine is not None:
        return cluster
    from drillyard.cli.train import num_gpus

    return cluster.model_copy(update={"processes_per_node": num_gpus() or 1})


def _write(plans: list[Plan], output: Path, *, overwrite: bool) -> None:
    from drillyard.launch.plan_output import write_plan

    for plan in plans:
        directory = output if len(plans) == 1 else output / plan.handle.run
        written = write_plan(plan, directory, overwrite=overwrite)
        print(f"{len(written)} files in {directory}; {directory / 'apply.sh'} executes them", file=sys.stderr)


def _show(plans: list[Plan], *, dry_run: bool, files: bool, explain: bool, as_json: bool) -> None:
    from dataclasses import asdict

    from drillyard.launch.plan_output import explain_text, plan_text

    if as_json:
        told = [{**asdict(plan), "handle": str(plan.handle)} for plan in plans]
        print(json.dumps(told[0] if len(told) == 1 else told, indent=2))
        return
    for plan in plans:
        if dry_run:
            print(plan_text(plan, whole_files=files), end="")
        if explain:
            print(explain_text(plan), end="")


def _tell_estimates(requests: list[LaunchRequest], *, force: bool) -> None:
    """Print what is expected, once for runs of the same cost, and stop where one does not fit."""
    from drillyard.launch.preflight import cost_key, preflight_estimate

    said = set()
    for request in requests:
        if (key := cost_key(request)) in said:
            continue
        said.add(key)
        told = preflight_estimate(request)
        if told is None:
            continue
        print(told.line, file=sys.stderr)
        if not told.fits and not force:
            raise DoesNotFitError(
                f"{request.run.name}: does not fit on {request.cluster.machine}; nothing was submitted\n"
                "drillyard estimate says what would fit; --force launches it all the same"
            )


def _submit(
    launcher: Launcher, cluster: ClusterConfig, plans: list[Plan], *, replace: bool, wait: bool, as_json: bool
) -> None:
    from drillyard.launch.cluster_registry import remember_cluster
    from drillyard.launch.completion_cache import remember_run

    undo = remember_cluster(cluster)
    handles = []
    try:
        for plan in plans:
            handles.append(launcher.submit(plan, replace=replace))
            remember_run(handles[-1])
            if not as_json:
                print(handles[-1], flush=True)
    except BaseException as error:
        if as_json and handles:
            print(json.dumps([str(handle) for handle in handles]))
        # Or every `drillyard runs` from now on would ask a host whose name was mistyped once.
        if isinstance(error, UserError) and not handles and not _has_runs(launcher):
            undo()
        raise
    if as_json:
        told = [
            {"handle": str(handle), "run_directory": plan.run_directory}
            for handle, plan in zip(handles, plans, strict=True)
        ]
        print(json.dumps(told[0] if len(told) == 1 else told), flush=True)
    if wait:
        from drillyard.cli.runs import wait_for

        raise typer.Exit(max(wait_for(launcher, handle.run) for handle in handles))


def _has_runs(launcher: Launcher) -> bool:
    """Whether the cluster answers and knows a run of ours."""
    try:
        return bool(launcher.runs())
    except UserError:
        return False
