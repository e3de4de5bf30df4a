"""`drillyard chaos run.yaml`: inject faults into a run, and check that it ends with the same
bits."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from drillyard.cli.options import TRUST_CONFIG, AsJson, Overrides, config_to_read, with_flags

if TYPE_CHECKING:
    from drillyard.config.run import RunConfig
    from drillyard.faults.campaign import Campaign
    from drillyard.faults.plan import FaultKind


FLAGS = {
    "config": typer.Argument(help="The run config, run.yaml.", metavar="RUN.YAML"),
    "faults": typer.Option(
        help="Kinds, separated by commas: kill, stop, term, disk-full, flip.", metavar="KINDS"
    ),
    "count": typer.Option(min=1, help="Faults in all.", metavar="N"),
    "seed": typer.Option(min=0, help="Seed of the ranks, steps and times of faults.", metavar="S"),
    "nproc_per_node": typer.Option(
        min=1, help="Ranks on this host; default: one per GPU, or two.", metavar="N"
    ),
    "directory": typer.Option(help="An empty directory to work in; default: a temporary one."),
    "watchdog": typer.Option(
        min=1, help="Seconds after which a stopped run counts as hung.", metavar="SECONDS"
    ),
    "trust_config": typer.Option("--trust-config", help=TRUST_CONFIG),
    "keep": typer.Option("--keep", help="Keep all runs, not only those with a failed fault."),
}


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("chaos")(with_flags(chaos, FLAGS))


def chaos(
    config: Path,
    faults: str = "kill,stop,term,disk-full,flip",
    count: int = 10,
    seed: int = 0,
    nproc_per_node: int | None = None,
    set_: Overrides = None,
    directory: Path | None = None,
    watchdog: float | None = None,
    keep: bool = False,
    as_json: AsJson = False,
    trust_config: bool = False,
) -> None:
    """Inject faults into a run, and check that it ends with the same bits as without them.

    Trains RUN.YAML once without faults, then with them: ranks and the supervisor killed in steps,
    saves, the cache build, the export and while they resume; ranks stopped; SIGTERM; a full disk; a
    flipped bit in the newest checkpoint. A fault passes if it struck where planned and every loss
    and gradient norm, of repeated steps too, and the final weights are equal to the bit, without
    restarts beyond those it causes.

    Works in a directory of its own and never touches the run directory of RUN.YAML. Use a short
    run: each fault costs a start of the ranks.

    Example: [bold]drillyard chaos run.yaml --faults kill,flip --count 20 --set training.steps=60
    --set checkpoint.every_steps=4[/bold]

    Exit code 0: every fault passed. 1: some did not. 2: the config must be fixed.
    """
    from drillyard.cli.process_exit import require_training
    from drillyard.config.kernel_rules import num_gpus
    from drillyard.config.run_checks import require_valid
    from drillyard.faults.campaign import Campaign

    kinds = _kinds(faults)
    require_training()
    with config_to_read(config, set_ or [], trust_config=trust_config, everything=True) as run:
        pass
    gpus = num_gpus() if run.training.device != "cpu" else 0
    num_ranks = nproc_per_node or gpus or 2
    require_valid(run, num_ranks)
    made = None if directory is not None else Path(tempfile.mkdtemp(prefix="drillyard-chaos-"))
    campaign = Campaign(
        config=config,
        directory=(directory or made or Path()).resolve(),
        kinds=kinds,
        count=count,
        seed=seed,
        num_ranks=num_ranks,
        overrides=set_ or [],
        watchdog_seconds=watchdog,
        on_gpus=gpus > 0,
        keep=keep,
    )
    _inject(campaign, run, made, as_json=as_json)


def _inject(campaign: Campaign, run: RunConfig, made: Path | None, *, as_json: bool) -> None:
    """Run the campaign and print its report. `made`: a directory that is removed where the campaign
    fails to run."""
    from drillyard.console import SafeConsole
    from drillyard.faults import campaign_report
    from drillyard.faults.campaign import run_campaign
    from drillyard.telemetry.jsonlines import encode

    errors = SafeConsole(stderr=True, highlight=False)
    # Clean up processes and files on SIGTERM too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        if errors.is_terminal:
            with errors.status("") as status:
                outcome = run_campaign(campaign, run, lambda text: status.update(f"chaos: {text}"))
        else:
            outcome = run_campaign(
                campaign, run, lambda text: print(f"chaos: {text}", file=sys.stderr, flush=True)
            )
    except BaseException:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        raise
    if as_json:
        typer.echo(encode(campaign_report.as_json(outcome)))
    else:
        campaign_report.print_campaign(outcome, SafeConsole(highlight=False))
    if campaign.directory.exists():
        errors.print(f"kept: {campaign.directory}", soft_wrap=True)
    if not outcome.passed:
        raise typer.Exit(1)


def _kinds(text: str) -> list[FaultKind]:
    """The kinds named by `--faults`, in the order of KINDS. Raises UserError for others."""
    from drillyard.errors import UserError
    from drillyard.faults.plan import FAULT_KINDS

    named = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in named if name not in FAULT_KINDS]
    if unknown or not named:
        raise UserError(
            f"--faults {text}: {unknown[0] if unknown else 'nothing'} is not a kind of fault;"
            f" choose from {', '.join(FAULT_KINDS)}"
        )
    return [kind for kind in FAULT_KINDS if kind in named]
