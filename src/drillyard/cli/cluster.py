"""`drillyard cluster plan | up | status | down | leaks CLUSTER.yaml`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from drillyard.cli.cluster_changes import down, up
from drillyard.cli.cluster_options import ClusterFile, ClusterOverrides, Hardware, NodePrices
from drillyard.cli.options import AsJson, print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from drillyard.provision.cluster_plan import ClusterPlan
    from drillyard.provision.existing_objects import ObjectState

SHOW = "Show the plan"


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    group = typer.Typer(help="Create a cluster, look at it, and remove it.")
    group.command()(plan)
    group.command()(up)
    group.command()(down)
    group.command()(leaks)
    group.command()(status)
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
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Ask the project as well: rights, quotas, reservations, zone, fabric, versions,"
            " names. Exit code 1: `up` would fail, 3: something is unknown.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what `up` would make: pools, networks, prices and quotas. Asks no cloud without --check,
    changes nothing, and needs no terraform. Of a cluster that exists (platform kubernetes): what of
    it is there, what will be added, and what conflicts.

    --json prints it for programs (`drillyard schema cluster-plan`), Terraform's main.tf.json
    included.
    """
    from drillyard.errors import UserError
    from drillyard.plan_files import explanation
    from drillyard.provision.plan_directory import write_cluster_plan
    from drillyard.provision.plan_document import plan_document
    from drillyard.provision.plan_text import plan_text
    from drillyard.provision.prices import prices_of_use
    from drillyard.provision.provisioner import plan_file, require_created, require_driven

    if overwrite and output is None:
        raise UserError("--overwrite belongs to --output DIR")
    if (output is not None) + explain + as_json + check > 1:
        raise UserError("--output, --explain, --json and --check: give one of them")
    planned = plan_file(config, overrides or (), hardware=hardware, prices=price or ())
    found = planned.plan
    if check:
        require_driven(found, "plan --check")
    # Those that are known are of Google Cloud.
    of_use = (
        () if found.state_endpoint or found.recipe else prices_of_use(planned.facts, found.region)
    )
    if output is not None:
        require_created(found)
        written = write_cluster_plan(found, of_use, output, overwrite=overwrite)
        print(
            f"{len(written)} files in {output}; {output / 'apply.sh'} executes them",
            file=sys.stderr,
        )
    elif explain:
        print(explanation(f"cluster {found.name}", found.fields), end="")
    elif as_json:
        objects = None if found.is_made_in_a_cloud else _states_or_none(found)
        print(plan_document(found, of_use, objects).as_text())
    else:
        given = [("--set", each) for each in overrides or ()]
        given += [("--hardware", str(hardware))] if hardware else []
        given += [("--price", each) for each in price or ()]
        options = "".join(f" {shlex.join(pair)}" for pair in given)
        lines, code = ([], 0) if found.is_made_in_a_cloud else _on_cluster(found, check=check)
        print(plan_text(found, of_use, str(config), options, lines), end="")
        if not found.is_made_in_a_cloud:
            raise typer.Exit(code)
    if check:
        from drillyard.provision.clouds import cloud_of
        from drillyard.provision.project_findings import findings_text

        findings = cloud_of(found).check_project(found)
        print(f"\n{findings_text(found.project, findings)}")
        levels = {each.level for each in findings}
        raise typer.Exit(1 if "error" in levels else 3 if "unknown" in levels else 0)


def _on_cluster(plan: ClusterPlan, *, check: bool) -> tuple[list[str], int]:
    """What a cluster that exists has and lacks, and the exit code of `--check`."""
    from drillyard.errors import UserError
    from drillyard.provision.existing_objects import compare_existing, states_text
    from drillyard.provision.kubeconfig_context import context_name

    try:
        found = compare_existing(plan, context_name(plan))
    except UserError as error:
        return ["on the cluster: unknown", f"  {error}".replace("\n", "\n  ")], 3 if check else 0
    lines = ["on the cluster", *(f"  {line}" for line in states_text(found.states))]
    return lines, int(check and bool(found.refusals))


def _states_or_none(plan: ClusterPlan) -> Sequence[ObjectState] | None:
    """What a cluster that exists has; None, and the reason on standard error, where it cannot be
    asked."""
    from drillyard.errors import UserError
    from drillyard.provision.existing_objects import compare_existing
    from drillyard.provision.kubeconfig_context import context_name

    try:
        return compare_existing(plan, context_name(plan)).states
    except UserError as error:
        print(f"on the cluster: unknown: {error}", file=sys.stderr)
        return None


def leaks(
    config: ClusterFile,
    overrides: ClusterOverrides = None,
    hardware: Hardware = None,
    as_json: AsJson = False,
) -> None:
    """List what of the cluster is left in its project, besides what Terraform's state has.

    Deletes nothing. Exit code 0: nothing, 1: something, 3: unknown, since a list was refused.
    """
    from drillyard.provision.clouds import cloud_of
    from drillyard.provision.provisioner import plan_file, require_created, require_driven

    planned = plan_file(config, overrides or (), hardware=hardware)
    require_created(planned.plan)
    require_driven(planned.plan, "leaks")
    cloud = cloud_of(planned.plan)
    report = cloud.find_leaks(planned.plan, cloud.owned_by_state(planned.plan), planned.facts)
    if as_json:
        print_json(report.as_json())
    else:
        typer.echo(report.text)
    raise typer.Exit(report.exit_code)


def status(
    config: ClusterFile,
    overrides: ClusterOverrides = None,
    price: NodePrices = None,
    hardware: Hardware = None,
    as_json: AsJson = False,
) -> None:
    """Show the cluster's pools and queues, what it lacks, what has changed, and its cost so far. On
    platforms ssh and slurm: what `launch` will need, looked for on all nodes at once.

    Exit code 1 where a run would miss something, 3 where that is not known.
    """
    from drillyard.errors import UserError
    from drillyard.provision.cluster_status import cluster_status, drift_from_engine, status_text
    from drillyard.provision.made_hosts import launch_file_of
    from drillyard.provision.provisioner import check_nodes, plan_file, require_driven

    if (nodes := check_nodes(config, overrides or (), hardware=hardware)) is not None:
        if price:
            raise UserError(f"--price: nothing is bought on platform {nodes.platform}")
        if as_json:
            print_json(nodes.as_json())
        else:
            typer.echo(nodes.text(shlex.quote(str(config))))
        raise typer.Exit(nodes.exit_code)
    plan = plan_file(config, overrides or (), hardware=hardware, prices=price or ()).plan
    require_driven(plan, "status")
    found = cluster_status(plan, drift_of=drift_from_engine if plan.terraform else None)
    if as_json:
        print_json(found.as_json())
    else:
        launch = launch_file_of(config, plan.launch_platform) if plan.launch_platform else config
        typer.echo(status_text(found, shlex.quote(str(config)), shlex.quote(str(launch))))
    raise typer.Exit(3 if found.objects is None else int(not found.ready))
