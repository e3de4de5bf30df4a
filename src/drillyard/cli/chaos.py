"""`drillyard chaos run.yaml`: does this run survive? It is disturbed on purpose, and compared to the bit."""

from __future__ import annotations

import inspect
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from drillyard.faults.plan import FaultKind


def register(app: typer.Typer) -> None:
    """Add the command to `app`; its help has one line per paragraph, which the terminal wraps."""
    text = inspect.cleandoc(chaos.__doc__ or "")
    app.command("chaos", help="\n\n".join(" ".join(part.split()) for part in text.split("\n\n")))(chaos)


def chaos(
    config: Annotated[Path, typer.Argument(help="The run config, run.yaml.", metavar="RUN.YAML")],
    faults: Annotated[
        str, typer.Option(help="Kinds, separated by commas: kill, stop, term, disk-full, flip.", metavar="KINDS")
    ] = "kill,stop,term,disk-full,flip",
    count: Annotated[int, typer.Option(min=1, help="Faults in all.", metavar="N")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Draws ranks, steps and moments.", metavar="S")] = 0,
    nproc_per_node: Annotated[
        int | None, typer.Option(min=1, help="Ranks on this host; default: one per GPU, or two.", metavar="N")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override a setting: training.steps=60.", metavar="KEY=VALUE")
    ] = None,
    directory: Annotated[
        Path | None, typer.Option(help="Where to work, an empty directory; default: a temporary one.")
    ] = None,
    watchdog: Annotated[
        float | None,
        typer.Option(min=1, help="Seconds after which a stopped run counts as hung.", metavar="SECONDS"),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep all runs; otherwise only those with a failed fault.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Disturb a run on purpose, and see whether it ends with the same bits as undisturbed.

    RUN.YAML is trained once undisturbed, then under faults: ranks and the supervisor killed in steps, in saves, in the
    cache build, in the export and while they resume; ranks stopped; SIGTERM; a full disk; a flipped bit in the newest
    checkpoint. A fault passes when it struck at its place and every loss and gradient norm, redone steps included, and
    the final weights equal the undisturbed run's to the bit, without a restart that it did not ask for.

    It works in a directory of its own and never touches the run directory of RUN.YAML. Take a short run: each fault
    costs a start of the ranks.

    Example: [bold]drillyard chaos run.yaml --faults kill,flip --count 20 --set training.steps=60
    --set checkpoint.every_steps=4[/bold]

    Exit code 0: every fault passed. 1: some did not. 2: something to mend in the config.
    """
    from drillyard.cli.crash_report import require_training
    from drillyard.config import load_run_config, require_valid
    from drillyard.config.auto_values import num_gpus
    from drillyard.console import SafeConsole
    from drillyard.faults.campaign import Campaign, run_campaign
    from drillyard.faults.campaign_report import as_json as json_of
    from drillyard.faults.campaign_report import print_campaign
    from drillyard.telemetry.jsonlines import encode

    kinds = _kinds(faults)
    require_training()
    run = load_run_config(config, set_ or [])
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
    errors = SafeConsole(stderr=True, highlight=False)
    # So that nothing is left running or on the disk when whoever started this ends it.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        if errors.is_terminal:
            with errors.status("") as status:
                outcome = run_campaign(campaign, run, lambda text: status.update(f"chaos: {text}"))
        else:
            outcome = run_campaign(campaign, run, lambda text: print(f"chaos: {text}", file=sys.stderr, flush=True))
    except BaseException:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        raise
    if as_json:
        typer.echo(encode(json_of(outcome)))
    else:
        print_campaign(outcome, SafeConsole(highlight=False))
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
            f"--faults {text}: {unknown[0] if unknown else 'nothing'} is no kind; name {', '.join(FAULT_KINDS)}"
        )
    return [kind for kind in FAULT_KINDS if kind in named]
