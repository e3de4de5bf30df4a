"""`drillyard cluster plan | up | status | down | leaks CLUSTER.yaml`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from drillyard.cli.cluster_changes import down, up
from drillyard.cli.options import AsJson, print_json

ClusterFile = Annotated[Path, typer.Argument(metavar="CLUSTER", help="The cluster config.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    group = typer.Typer(help="Create a cluster, look at it, and remove it.")
    group.command()(plan)
    group.command()(up)
    group.command()(down)
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
