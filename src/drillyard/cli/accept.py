"""`drillyard accept cluster.yaml`: check the nodes of a cluster before training on them."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path

import typer

from drillyard.cli.options import POOL, config_to_read, with_flags

JOB, OTHERWISE, SHOW = "The job", "Without a scheduler", "Show the plan"
RECORDED = "Recorded output"

FLAGS = {
    "cluster": typer.Argument(
        metavar="CLUSTER.YAML", help="The cluster config; with --from optional."
    ),
    "level": typer.Option(metavar="LEVEL", help="quick (a minute), standard (15 minutes) or full."),
    "nodes": typer.Option(
        min=1,
        metavar="N",
        help="Nodes to check; default: the idle ones where the scheduler says, else the config's."
        " With --from: of each table, default: as it says.",
    ),
    "pool": POOL,
    "run": typer.Option(
        metavar="RUN.YAML", help="The run to come: storage is checked at its checkpoint's size."
    ),
    "baseline": typer.Option(
        metavar="FILE", help="acceptance.json of this cluster to compare figures with."
    ),
    "hardware": typer.Option(metavar="FILE", help="Your own hardware, added to the built-in one."),
    "output": typer.Option(
        metavar="PATH",
        help="Where acceptance.json goes, a directory or a .json file; default:"
        " runs/accept-CLUSTER.",
    ),
    "write_hardware": typer.Option(
        metavar="FILE",
        help="Write the measured bandwidths and rates there, as rows for --hardware.",
    ),
    "recorded": typer.Option(
        "--from",
        metavar="FILE",
        help="Judge recorded output of nccl-tests, nvidia-smi, dcgmi or dmesg, and submit nothing;"
        " repeatable.",
        rich_help_panel=RECORDED,
    ),
    "machine": typer.Option(
        metavar="NAME",
        help="With --from: the machine that it was recorded on, in place of the config's.",
        rich_help_panel=RECORDED,
    ),
    "as_json": typer.Option("--json", help="Print acceptance.json."),
    "exclude": typer.Option(
        metavar="NODE",
        help="Do not use this node, by the scheduler's name; repeatable.",
        rich_help_panel=JOB,
    ),
    "wait_seconds": typer.Option(
        min=1.0,
        metavar="SECONDS",
        help="Cancel the job where it has not ended after so long; default: wait.",
        rich_help_panel=JOB,
    ),
    "drain": typer.Option(
        "--drain",
        help="Have the scheduler start nothing on nodes proven to be bad.",
        rich_help_panel=JOB,
    ),
    "max_share": typer.Option(
        min=0.0,
        max=1.0,
        metavar="SHARE",
        help="Drain nothing if more of the checked nodes are bad; default: 0.1.",
        rich_help_panel=JOB,
    ),
    "node_rank": typer.Option(
        min=0,
        metavar="R",
        help="Take part as node R of --nnodes, and submit nothing; node 0 judges.",
        rich_help_panel=OTHERWISE,
    ),
    "nnodes": typer.Option(min=1, metavar="N", help="Nodes in all.", rich_help_panel=OTHERWISE),
    "master_addr": typer.Option(metavar="HOST", help="Where node 0 is.", rich_help_panel=OTHERWISE),
    "master_port": typer.Option(
        min=1024,
        max=65000,
        metavar="PORT",
        help="First of the ports that are used on node 0; default: 29400.",
        rich_help_panel=OTHERWISE,
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
}


def register(app: typer.Typer) -> None:
    """Add the command `accept`."""
    app.command("accept")(with_flags(accept, FLAGS))


def accept(
    cluster: Path | None = None,
    level: str = "quick",
    nodes: int | None = None,
    pool: str | None = None,
    run: Path | None = None,
    baseline: Path | None = None,
    hardware: Path | None = None,
    output: Path | None = None,
    write_hardware: Path | None = None,
    recorded: list[Path] | None = None,
    machine: str | None = None,
    as_json: bool = False,
    exclude: list[str] | None = None,
    wait_seconds: float | None = None,
    drain: bool = False,
    max_share: float | None = None,
    node_rank: int | None = None,
    nnodes: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
    dry_run: bool = False,
    files: bool = False,
    explain: bool = False,
) -> None:
    """Check every node of a cluster through its own scheduler, and find the bad one.

    Submits a job, waits for it, judges what it observed, writes acceptance.json and removes the
    job's objects. Ctrl-C cancels the job.

    Exit codes: 0 pass or warn; 1 fail; 3 incomplete, something could not be judged; 2 a mistake to
    fix, nothing was submitted; 130 interrupted.
    """
    from drillyard.acceptance.accept_command import acceptance_of, run_acceptance
    from drillyard.acceptance.check import level_named
    from drillyard.acceptance.hardware_rows import require_machine
    from drillyard.acceptance.results import EXIT_CODES
    from drillyard.cli.acceptance_output import (
        acceptance_file,
        drain_nodes,
        report_outcome,
        require_drain,
        write_hardware_file,
    )
    from drillyard.cli.launch import show_plans
    from drillyard.errors import ConfigError
    from drillyard.launch.submission import plan_requests

    require_drain(drain, max_share)
    if recorded:
        from drillyard.acceptance.recorded import outcome_of_files

        job_options = {
            "--drain": drain,
            "--exclude": exclude,
            "--node-rank": node_rank is not None,
            "--pool": pool,
            "--run": run,
            "--wait-seconds": wait_seconds,
            "--dry-run": dry_run,
            "--explain": explain,
        }
        if given_options := [name for name, value in job_options.items() if value]:
            raise ConfigError(f"{given_options[0]}: is of a job, and --from submits none")
        outcome = outcome_of_files(
            recorded,
            cluster_file=cluster,
            machine=machine,
            num_nodes=nodes,
            hardware=hardware,
            baseline_file=baseline,
        )
        file = acceptance_file(output) if output else None
        report_outcome(outcome, recorded[0].name, file, as_json=as_json)
        if write_hardware is not None:
            write_hardware_file(outcome, write_hardware, recorded[0].name)
        raise typer.Exit(EXIT_CODES[outcome.verdict])
    if cluster is None:
        raise ConfigError(
            "CLUSTER.YAML: name a cluster config, or recorded output with --from FILE"
        )
    if machine is not None:
        raise ConfigError("--machine: goes with --from; else set machine in the cluster config")
    part = None
    if node_rank is not None:
        from drillyard.acceptance.without_scheduler import node_part

        part = node_part(node_rank, nnodes, master_addr, master_port)
    elif given := [each for each in (nnodes, master_addr, master_port) if each is not None]:
        raise ConfigError(
            f"{given[0]}: --nnodes, --master-addr and --master-port go with --node-rank, which is"
            " not given; --nodes sets the nodes of a job"
        )
    read = nullcontext() if run is None else config_to_read(run, [], trust_config=False)
    with read as config_of_run:
        acceptance = acceptance_of(
            cluster,
            level_named(level),
            nodes=nodes,
            pool=pool,
            dry_run=dry_run or explain,
            fixed_nodes=part is not None,
            run=config_of_run,
            hardware=hardware,
            baseline_file=baseline,
            exclude=exclude or (),
            wait_seconds=math.inf if wait_seconds is None else wait_seconds,
        )
    if write_hardware is not None:
        require_machine(acceptance.expected)
    if dry_run or explain:
        show_plans(
            acceptance.request.cluster,
            plan_requests([acceptance.request]),
            dry_run=dry_run,
            files=files,
            explain=explain,
            as_json=as_json,
        )
        return
    config = acceptance.request.run
    place = output or Path(config.output, config.name)
    file = acceptance_file(place)
    if part is not None:
        from drillyard.acceptance.without_scheduler import run_node_part

        found = run_node_part(acceptance, part, file.parent)
        if found is None:
            return
        outcome = found
    else:
        outcome = run_acceptance(acceptance)
    report_outcome(outcome, acceptance.request.cluster.name, file, as_json=as_json)
    if write_hardware is not None:
        write_hardware_file(outcome, write_hardware, config.name)
    if drain:
        drain_nodes(acceptance.request.cluster, outcome, max_share)
    raise typer.Exit(EXIT_CODES[outcome.verdict])
