"""`drillyard cluster plan | up | status | down | leaks CLUSTER.yaml`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from drillyard.cli.options import AsJson, print_json

ClusterFile = Annotated[Path, typer.Argument(metavar="CLUSTER", help="The cluster config.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    group = typer.Typer(help="Create a cluster, look at it, and remove it.")
    group.command()(plan)
    group.command()(status)
    app.add_typer(group, name="cluster")


def plan(config: ClusterFile, as_json: AsJson = False) -> None:
    """Show what `up` would make."""
    from drillyard.config.load import load_cluster_config
    from drillyard.provision.provisioner import plan_cluster

    found = plan_cluster(load_cluster_config(config, resolve_environment=False))
    if as_json:
        print_json(found.terraform)
    else:
        typer.echo(json.dumps(found.terraform, indent=2))


def status(config: ClusterFile, as_json: AsJson = False) -> None:
    """Show the cluster's pools and queues, what it lacks, what has changed, and its cost so far.

    Exit code 1 where a run would miss something, 3 where that is not known.
    """
    from drillyard.config.load import load_cluster_config
    from drillyard.provision.cluster_status import cluster_status, drift_from_engine, status_text
    from drillyard.provision.provisioner import plan_cluster

    plan = plan_cluster(load_cluster_config(config, resolve_environment=False))
    found = cluster_status(plan, drift_of=drift_from_engine if plan.terraform else None)
    if as_json:
        print_json(found.as_json())
    else:
        typer.echo(status_text(found))
    raise typer.Exit(3 if found.objects is None else int(not found.ready))
