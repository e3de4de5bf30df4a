"""`drillyard cluster plan | up | status | down | leaks CLUSTER.yaml`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from drillyard.cli.cluster_changes import down, up
from drillyard.cli.cluster_options import ClusterFile, ClusterOverrides, Hardware, NodePrices
from drillyard.cli.options import AsJson

SHOW = "Show the plan"


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    group = typer.Typer(help="Create a cluster, look at it, and remove it.")
    group.command()(plan)
    group.command()(up)
    group.command()(down)
    app.add_typer(group, name="cluster")


def plan(
    config: ClusterFile,
    overrides: ClusterOverrides = None,
    price: NodePrices = None,
    hardware: Hardware = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Print the reason of each generated field, and stop.",
            rich_help_panel=SHOW,
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write everything as files, with apply.sh, and stop.",
            rich_help_panel=SHOW,
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace an earlier plan in DIR.", rich_help_panel=SHOW),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what `up` would make: pools, networks, prices and quotas. Asks no cloud, changes
    nothing, and needs no terraform.

    --json prints it for programs (`drillyard schema cluster-plan`), Terraform's main.tf.json
    included.
    """
    from drillyard.errors import UserError
    from drillyard.plan_files import explanation
    from drillyard.provision.plan_directory import write_cluster_plan
    from drillyard.provision.plan_document import plan_document
    from drillyard.provision.plan_text import plan_text
    from drillyard.provision.prices import prices_of_use
    from drillyard.provision.provisioner import plan_file

    if overwrite and output is None:
        raise UserError("--overwrite belongs to --output DIR")
    if (output is not None) + explain + as_json > 1:
        raise UserError("--output, --explain and --json: give one of them")
    planned = plan_file(config, overrides or (), hardware=hardware, prices=price or ())
    found = planned.plan
    of_use = prices_of_use(planned.facts, found.region)
    if output is not None:
        written = write_cluster_plan(found, of_use, output, overwrite=overwrite)
        print(
            f"{len(written)} files in {output}; {output / 'apply.sh'} executes them",
            file=sys.stderr,
        )
    elif explain:
        print(explanation(f"cluster {found.name}", found.fields), end="")
    elif as_json:
        print(plan_document(found, of_use).as_text())
    else:
        given = [("--set", each) for each in overrides or ()]
        given += [("--hardware", str(hardware))] if hardware else []
        given += [("--price", each) for each in price or ()]
        options = "".join(f" {shlex.join(pair)}" for pair in given)
        print(plan_text(found, of_use, str(config), options), end="")
