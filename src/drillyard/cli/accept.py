"""`drillyard accept cluster.yaml`: check the nodes of a cluster before training on them."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from drillyard.cli.options import (
    POOL,
    SHOW_PLAN_FLAGS,
    config_to_read,
    node_flags,
    require_dry_run,
    with_flags,
)

if TYPE_CHECKING:
    from drillyard.cli.acceptance_output import AcceptanceFiles

JOB, OTHERWISE = "The job", "Without a scheduler"
RECORDED = "Recorded output"

FLAGS = {
    **node_flags(JOB, JOB),
    **SHOW_PLAN_FLAGS,
    "cluster": typer.Argument(
        metavar="CLUSTER.YAML", help="The cluster config; with --from optional."
    ),
    "level": typer.Option(
        metavar="LEVEL", help="quick (a minute, the default), standard (15 minutes) or full."
    ),
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
    "wait_seconds": typer.Option(
        min=1.0,
        metavar="SECONDS",
        help="Cancel the job where it has not ended after so long; default: wait.",
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
}


def register(app: typer.Typer) -> None:
    """Add the command `accept`."""
    app.command("accept")(with_flags(accept, FLAGS))


def accept(
    cluster: Path | None = None,
    level: str | None = None,
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
    from drillyard.acceptance.check import Level, level_named
    from drillyard.acceptance.hardware_rows import require_machine
    from drillyard.acceptance.results import EXIT_CODES
    from drillyard.cli.acceptance_output import (
        AcceptanceFiles,
        acceptance_file,
        drain_nodes,
        print_outcome,
        require_drain,
    )
    from drillyard.cli.launch import show_plans
    from drillyard.errors import ConfigError
    from drillyard.launch.remote_files import print_notice
    from drillyard.launch.submission import plan_requests

    require_drain(drain, max_share)
    require_dry_run(files, dry_run)
    of_job: dict[str, object] = {
        "--exclude": exclude,
        "--wait-seconds": wait_seconds,
        "--drain": drain,
        "--dry-run": dry_run,
        "--explain": explain,
    }
    of_node: dict[str, object] = {
        "--nnodes": nnodes,
        "--master-addr": master_addr,
        "--master-port": master_port,
    }
    if recorded:
        of_probes: dict[str, object] = {
            "--level": level,
            "--pool": pool,
            "--run": run,
            "--node-rank": node_rank,
        }
        _require_absent({**of_probes, **of_job, **of_node}, "is of a job, and --from submits none")
        _judge_recorded(
            recorded,
            AcceptanceFiles(acceptance_file(output) if output else None, write_hardware),
            as_json,
            cluster_file=cluster,
            machine=machine,
            num_nodes=nodes,
            hardware=hardware,
            baseline_file=baseline,
        )
    if cluster is None:
        raise ConfigError(
            "CLUSTER.YAML: name a cluster config, or recorded output with --from FILE"
        )
    if machine is not None:
        raise ConfigError("--machine: goes with --from; else set machine in the cluster config")
    part = None
    if node_rank is not None:
        from drillyard.acceptance.without_scheduler import node_part

        why = "is of a job, and --node-rank submits none; leave one of them out"
        _require_absent({"--nodes": nodes, **of_job}, why)
        part = node_part(node_rank, nnodes, master_addr, master_port)
    else:
        why = "goes with --node-rank, which is not given; --nodes sets the nodes of a job"
        _require_absent(of_node, why)
    level_asked = level_named(level or Level.quick)
    if run is not None and level_asked is Level.quick:
        print_notice("--run: changes nothing; storage is checked from --level standard on")
    read = nullcontext() if run is None else config_to_read(run, [], trust_config=False)
    with read as config_of_run:
        acceptance = acceptance_of(
            cluster,
            level_asked,
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
    default = Path(config.output, config.name, "acceptance.json")
    file = acceptance_file(output) if output else default
    written = AcceptanceFiles(file, write_hardware)
    written.require_replaceable()
    if baseline is not None and baseline.resolve() == file.resolve():
        print_notice(f"{baseline}: this run replaces its baseline; --output elsewhere keeps it")
    if part is not None:
        from drillyard.acceptance.without_scheduler import run_node_part

        found = run_node_part(acceptance, part, file.parent)
        if found is None:
            return
        outcome = found
    else:
        outcome = run_acceptance(acceptance)
    print_outcome(outcome, as_json=as_json)
    if drain:
        drain_nodes(acceptance.request.cluster, outcome, max_share)
    written.write(outcome, acceptance.request.cluster.name)
    raise typer.Exit(EXIT_CODES[outcome.verdict])


def _require_absent(options: dict[str, object], why: str) -> None:
    """Raise ConfigError for the first option that is given, as it would be ignored."""
    from drillyard.errors import ConfigError

    for name, value in options.items():
        if value is not None and value is not False and value != []:
            raise ConfigError(f"{name}: {why}")


def _judge_recorded(
    recorded: list[Path], files: AcceptanceFiles, as_json: bool, **options: Any
) -> NoReturn:
    """Judge recorded output, and exit with the code of its verdict."""
    from drillyard.acceptance.recorded import outcome_of_files
    from drillyard.acceptance.results import EXIT_CODES
    from drillyard.cli.acceptance_output import print_outcome

    files.require_replaceable()
    outcome = outcome_of_files(recorded, **options)
    print_outcome(outcome, as_json=as_json)
    files.write(outcome, recorded[0].name)
    raise typer.Exit(EXIT_CODES[outcome.verdict])
