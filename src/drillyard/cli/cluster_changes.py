"""`drillyard cluster up` and `drillyard cluster down`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from drillyard.cli.cluster_options import ClusterFile, ClusterOverrides, Hardware, NodePrices

if TYPE_CHECKING:
    from drillyard.provision.cluster_plan import ClusterPlan
    from drillyard.provision.up import MadeCluster

Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
Unlock = Annotated[
    str | None,
    typer.Option(metavar="ID", help="Release the state's lock of this id, which another one has."),
]


def up(
    config: ClusterFile,
    overrides: ClusterOverrides = None,
    price: NodePrices = None,
    hardware: Hardware = None,
    yes: Yes = False,
    write: Annotated[
        bool,
        typer.Option(
            "--write",
            help="Put what `launch` needs into CLUSTER, or of hosts into CLUSTER-ssh.yaml, of"
            " Kubernetes on Nebius into CLUSTER-kubernetes.yaml, not on stdout.",
        ),
    ] = False,
    secret: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Put this environment variable into a Secret of the cluster; repeatable.",
        ),
    ] = None,
    unlock: Unlock = None,
) -> None:
    """Create the cluster, or what it lacks. Can be repeated after any end.

    Prints the cluster config for `launch`. Exit codes: 0 done; 2 a mistake to fix; 130 interrupted,
    with the state saved.
    """
    from drillyard.provision.cluster_session import Request, command_line, real_stages
    from drillyard.provision.made_hosts import launch_file_of, require_launch_file
    from drillyard.provision.provisioner import plan_file
    from drillyard.provision.up import bring_up, launch_config, write_launch_config

    planned = plan_file(config, overrides or (), hardware=hardware, prices=price or ())
    plan = planned.plan
    if write and plan.launch_platform:
        # Before anything is bought.
        require_launch_file(launch_file_of(config, plan.launch_platform))
    words = [*_repeated("--set", overrides), *_repeated("--price", price)]
    words += [*_hardware(hardware), *(["--write"] if write else [])]
    words += _repeated("--secret", secret)
    request = Request(
        plan,
        command_line("up", str(config), *words),
        command_line("down", str(config), *_repeated("--set", overrides), *_hardware(hardware)),
        yes=yes,
        unlock=unlock,
    )
    made = bring_up(request, real_stages(planned), secret or [])
    if plan.launch_platform:
        _give_launch_file(config, plan, made, write=write)
        return
    found = launch_config(config, plan, made, overrides or ())
    if write and write_launch_config(config, found):
        print(f"drillyard launch RUN.YAML --cluster {shlex.quote(str(config))}", file=sys.stderr)
        return
    if write:
        print(
            f"warning: {config} is not changed: an alias in it (*name) would change with its"
            " anchor. Its content for launch is on standard output",
            file=sys.stderr,
        )
    typer.echo(found.text, nl=False)


def down(
    config: ClusterFile,
    overrides: ClusterOverrides = None,
    hardware: Hardware = None,
    yes: Yes = False,
    delete_data: Annotated[
        bool,
        typer.Option(
            "--delete-data",
            help="Delete the cluster's buckets, or its shared file system, with their data.",
        ),
    ] = False,
    ignore_runs: Annotated[
        bool, typer.Option("--ignore-runs", help="Do not ask the cluster what runs on it.")
    ] = False,
    unlock: Unlock = None,
) -> None:
    """Remove the cluster with all that was made for it, and prove that nothing is left.

    Refuses while runs go on, of any user. Buckets and file
    systems with data stay unless --delete-data is given.
    Exit codes: 0 nothing is left, 1 something is, 3 unknown; 2 a mistake to fix.
    """
    from drillyard.provision.cluster_session import Request, command_line, real_stages
    from drillyard.provision.down import DownOptions, take_down
    from drillyard.provision.provisioner import plan_file

    planned = plan_file(config, overrides or (), hardware=hardware)
    words = [*_repeated("--set", overrides), *_hardware(hardware)]
    words += ["--delete-data"] if delete_data else []
    command = command_line("down", str(config), *words)
    request = Request(planned.plan, command, command, yes=yes, unlock=unlock)
    options = DownOptions(delete_data=delete_data, ignore_runs=ignore_runs)
    raise typer.Exit(take_down(request, real_stages(planned), options))


def _give_launch_file(config: Path, plan: ClusterPlan, made: MadeCluster, *, write: bool) -> None:
    """Print the config of another platform for `launch`, or write it beside the cluster's own."""
    from drillyard.provision.made_hosts import launch_file_of, launch_text, write_launch_file
    from drillyard.provision.up import separate_launch_values

    text = launch_text(plan, separate_launch_values(plan, made), config.name)
    if write:
        path = launch_file_of(config, plan.launch_platform)
        write_launch_file(path, text)
        print(f"drillyard launch RUN.YAML --cluster {shlex.quote(str(path))}", file=sys.stderr)
    else:
        typer.echo(text, nl=False)


def _hardware(path: Path | None) -> list[str]:
    return ["--hardware", str(path)] if path else []


def _repeated(option: str, values: list[str] | None) -> list[str]:
    return [word for value in values or () for word in (option, value)]
