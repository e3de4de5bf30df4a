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
    group.command()(leaks)
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


def leaks(config: ClusterFile, as_json: AsJson = False) -> None:
    """List what of the cluster is left in its project, besides what the state has.

    Deletes nothing. Exit code 0: nothing, 1: something, 3: unknown, as a list was refused.
    """
    from drillyard.config.load import load_cluster_config
    from drillyard.provision.google.api import google_apis
    from drillyard.provision.google.leaks import find_leaks
    from drillyard.provision.google.terraform_state import owned_by_state
    from drillyard.provision.provisioner import plan_cluster

    found = plan_cluster(load_cluster_config(config, resolve_environment=False))
    apis = google_apis(found.project)
    report = find_leaks(found, apis, owned_by_state(found, apis))
    if as_json:
        print_json(report.as_json())
    else:
        typer.echo(report.text)
    raise typer.Exit(report.exit_code)
