"""`drillyard accept cluster.yaml`: check the nodes of a cluster before training on them."""

from __future__ import annotations

from pathlib import Path

import typer

from drillyard.cli.options import with_flags

FLAGS = {
    "cluster": typer.Argument(metavar="CLUSTER.YAML", help="The cluster config."),
    "level": typer.Option(metavar="LEVEL", help="quick, standard or full."),
    "nodes": typer.Option(min=1, metavar="N", help="Nodes, in place of the cluster config's."),
    "dry_run": typer.Option("--dry-run", help="Print exactly what would be executed."),
}


def register(app: typer.Typer) -> None:
    """Add the command `accept`."""
    app.command("accept")(with_flags(accept, FLAGS))


def accept(
    cluster: Path, level: str = "quick", nodes: int | None = None, dry_run: bool = False
) -> None:
    """Check every node of a cluster, and find the bad one."""
    from drillyard.acceptance.accept_command import request_of, run_acceptance
    from drillyard.acceptance.check import Level
    from drillyard.acceptance.results import EXIT_CODES
    from drillyard.launch.plan_output import plan_text
    from drillyard.launch.submission import plan_requests

    request = request_of(cluster, Level(level), nodes)
    if dry_run:
        (plan,) = plan_requests([request])
        print(plan_text(plan, whole_files=False), end="")
        return
    outcome = run_acceptance(request)
    for result in outcome.results:
        print(f"{result.status:10} {result.check:24} {result.reason}")
    print(outcome.verdict)
    raise typer.Exit(EXIT_CODES[outcome.verdict])
