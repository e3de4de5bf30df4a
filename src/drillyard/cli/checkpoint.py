"""`drillyard checkpoint list | verify | prune RUN_DIR`: list a run's checkpoints, check their
bytes, delete old ones.

`list` reads manifests and sizes, `verify` and `prune` read the files. None of them needs torch. The
`version` of `--json` is raised when a field changes its meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drillyard.cli.options import find_run, print_json
from drillyard.errors import UserError
from drillyard.formatting import size
from drillyard.guarded_files import is_there

if TYPE_CHECKING:
    from drillyard.training.checkpoint.inventory import CheckpointInfo
    from drillyard.training.checkpoint.verification import (
        CheckpointSelection,
        PrunePlan,
        VerifiedCheckpoint,
    )

RunDirectory = Annotated[
    Path,
    typer.Argument(
        metavar="RUN_DIR", help="A run directory, or its `checkpoints`.", show_default=False
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
JSON_VERSION = 1


def register(app: typer.Typer) -> None:
    """Add the commands on checkpoints to the app."""
    group = typer.Typer(
        help="List, verify and prune the checkpoints of a run.", no_args_is_help=True
    )
    app.add_typer(group, name="checkpoint")

    group.command("list")(list_command)
    group.command("verify")(verify_command)
    group.command("prune")(prune_command)


def list_command(run: RunDirectory, as_json: AsJson = False) -> None:
    """List checkpoints: step, size, age, ranks, held-out loss, and which one the next start uses.

    Reads manifests and sizes only, in milliseconds; `verify` reads the content. Exit code 2 if the
    index of a checkpoint, or a value stored in it, could run code.
    """
    from dataclasses import replace

    from drillyard.training.checkpoint.inventory import best_checkpoint, newest_usable
    from drillyard.training.checkpoint.verification import mark_unsafe, select_checkpoints

    target = select_checkpoints(find_run(run))
    target = replace(target, checkpoints=mark_unsafe(target.checkpoints))
    refused = [info for info in target.checkpoints if info.status == "refused"]
    try:
        used, refusal = newest_usable(target.checkpoints), None
    except UserError as error:
        used, refusal = None, str(error)
    winner = best_checkpoint(target.checkpoints)
    labels = {
        info.path: [
            word for word, labelled in (("newest", used), ("best", winner)) if info is labelled
        ]
        for info in target.checkpoints
    }
    if as_json:
        listed = [{**_facts(info), "marks": labels[info.path]} for info in target.checkpoints]
        _print_json(
            directory=str(target.directory),
            next_start=used and used.step,
            refusal=refusal,
            checkpoints=listed,
        )
    else:
        _print_list(target, labels, used, refusal)
    if refused:
        raise UserError("\n".join(info.reason for info in refused))


def _print_list(
    target: CheckpointSelection,
    labels: dict[Path, list[str]],
    used: CheckpointInfo | None,
    refusal: str | None,
) -> None:
    from drillyard.training.checkpoint.inventory import lost_checkpoints

    lost = lost_checkpoints(target.checkpoints, target.directory.parent)
    _print_table(target.checkpoints, labels)
    for info in target.checkpoints:
        if info.reason and info.status != "refused":
            typer.echo(f"{info.path.name}: {info.reason}")
    if refusal is not None:
        typer.echo(f"The next start is refused: {refusal}")
    elif used is not None:
        typer.echo(f"The next start resumes from step {used.step} (with checkpoint.resume: auto).")
    elif any(info.status == "damaged" for info in target.checkpoints) or lost:
        typer.echo("The next start is refused: none of the checkpoints can be used.")
    else:
        typer.echo(f"{target.directory}: no complete checkpoint; the next start begins at step 0.")


def verify_command(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_DIR", help="A run directory, its `checkpoints`, or one step-N of them."
        ),
    ],
    step: Annotated[
        int | None, typer.Option(metavar="N", help="Only the checkpoint of this step.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read every byte of the checkpoints and compare it with the checksums from when it was
    written.

    Exit code 0: all complete ones are undamaged. 1: a file is damaged, a manifest is invalid or of
    a later format, or there is no complete checkpoint (or the requested one is not). 2: an error,
    or a file that could run code. The remains of interrupted saves are listed and are no damage.
    """
    from drillyard.training.checkpoint.verification import (
        choose_step,
        select_checkpoints,
        verify_all_files,
    )

    target = select_checkpoints(find_run(run))
    one = target.one if step is None else choose_step(target, step)
    chosen = target.checkpoints if one is None else [one]
    with _progress(chosen) as read:
        results = [verify_all_files(info, read) for info in chosen]
    judged = [
        result
        for result in results
        if one is not None or result.info.status not in ("incomplete", "abandoned")
    ]
    good = [result for result in judged if result.good]
    if as_json:
        _print_json(
            directory=str(target.directory),
            undamaged=bool(good) and len(good) == len(judged),
            checkpoints=[
                {**_facts(r.info), "good": r.good, "files": [vars(f) for f in r.files]}
                for r in results
            ],
        )
    else:
        for result in results:
            _print_verified(result)
        if not results:
            typer.echo(f"{target.directory}: no checkpoint is there to verify.")
    if refused := [
        file.detail for result in results for file in result.files if file.verdict == "refused"
    ]:
        raise UserError("\n".join(refused))
    if not good or len(good) < len(judged):
        raise typer.Exit(1)


def prune_command(
    run: RunDirectory,
    keep: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Newest good ones to keep. [default: the run's own setting]"
        ),
    ] = None,
    left_overs: Annotated[
        bool,
        typer.Option(
            "--left-overs", help="Also delete remains of interrupted saves and of abandoned steps."
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Verify and print what would be deleted; delete nothing."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Delete all but the newest good checkpoints and the best one.

    The checkpoints to keep are read and verified in full before anything is deleted. A damaged one
    does not count and is not deleted; without a good one nothing is deleted. Refused while a run
    started with `drillyard train` is active in the directory (other launchers hold no lock).

    Exit code 0: done; 1: a checkpoint to keep is damaged, or none is undamaged; 2: an error.
    """
    from drillyard.supervise.run_lock import exclusive_run_lock
    from drillyard.training.checkpoint.verification import (
        plan_prune,
        select_checkpoints,
        verify_all_files,
    )

    target = select_checkpoints(find_run(run))
    if target.run_directory is None or target.one is not None:
        raise UserError(f"{run}: is not a run directory; give RUN_DIR or RUN_DIR/checkpoints")
    keep, keep_best = _retention(target, keep)
    with exclusive_run_lock(target.run_directory, does="prunes its checkpoints"):
        target = select_checkpoints(find_run(run))
        with _progress([info for info in target.checkpoints if info.complete]) as read:
            plan = plan_prune(
                target.checkpoints,
                keep,
                keep_best,
                left_overs=left_overs,
                problem_with=lambda info: verify_all_files(info, read).problem,
            )
        failures = [] if dry_run else _remove(plan)
    if as_json:
        _print_json(
            directory=str(target.directory),
            dry_run=dry_run,
            keep=[_facts(info) for info in plan.keep],
            removed=[_facts(info) for info in plan.remove],
            damaged=[{**_facts(info), "reason": problem} for info, problem in plan.damaged],
            failures=failures,
        )
    else:
        _print_pruned(plan, target, dry_run)
    if failures:
        raise UserError("\n".join(failures))
    if plan.damaged or not plan.keep:
        raise typer.Exit(1)


def _retention(target: CheckpointSelection, keep: int | None) -> tuple[int, bool]:
    """Return how many checkpoints to keep, and whether the best: from `keep` and run.yaml.
    UserError without either."""
    from drillyard.config.saved_config import load_saved_config

    assert target.run_directory is not None
    saved = target.run_directory / "run.yaml"
    if is_there(saved):
        settings = load_saved_config(saved).checkpoint
        return keep or settings.keep, settings.keep_best
    if keep is None:
        raise UserError(
            f"{saved}: is not there to say how many checkpoints the run keeps; give --keep N"
        )
    return keep, True


def _remove(plan: PrunePlan) -> list[str]:
    """Delete what the plan says, oldest first; what could not be deleted, in words."""
    from drillyard.training.checkpoint.inventory import remove_checkpoint

    failures = []
    for info in plan.remove:
        try:
            remove_checkpoint(info.path)
        except OSError as error:
            failures.append(
                f"{info.path}: could not be deleted: {error.strerror}; check its rights and try"
                " again"
            )
    return failures


# -- what is printed -------------------------------------------------------------------------------


def _facts(info: CheckpointInfo) -> dict[str, Any]:
    manifest = info.manifest
    return {
        "step": info.step,
        "path": str(info.path),
        "status": info.status,
        "reason": info.reason or None,
        "bytes": info.bytes,
        "created": info.created,
        "age_seconds": _age_seconds(info),
        "world_size": manifest.world_size if manifest else None,
        "torch_version": manifest.torch_version if manifest else None,
        "format_version": manifest.format_version if manifest else None,
        "held_out_loss": info.held_out_loss,
    }


def _print_table(checkpoints: list[CheckpointInfo], labels: dict[Path, list[str]]) -> None:
    from rich.table import Table

    from drillyard.console import SafeConsole
    from drillyard.launch.status_text import age

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for heading in ("step", "size", "age", "ranks", "held-out loss"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("", no_wrap=True)
    for info in checkpoints:
        loss = "" if info.held_out_loss is None else f"{info.held_out_loss:.4f}"
        ranks = str(info.manifest.world_size) if info.manifest else ""
        status = f"[{_style(info.status)}]{info.status}[/]"
        made = "" if (seconds := _age_seconds(info)) is None else age(seconds)
        table.add_row(
            str(info.step),
            size(info.bytes),
            made,
            ranks,
            loss,
            status,
            ", ".join(labels[info.path]),
        )
    if checkpoints:
        SafeConsole(highlight=False).print(table)


def _print_verified(result: VerifiedCheckpoint) -> None:
    from rich.markup import escape

    from drillyard.console import SafeConsole

    console = SafeConsole(highlight=False, soft_wrap=True)
    info = result.info
    whole = "undamaged" if result.good else info.status if not info.complete else "damaged"
    console.print(
        f"{escape(info.path.name)}  [{_style('complete' if result.good else whole)}]{whole}[/] "
        f" {size(info.bytes)}"
    )
    width = max(len(file.verdict) for file in result.files)
    for file in result.files:
        style = "green" if file.verdict == "ok" else "yellow" if file.harmless else "red"
        detail = f"  {file.detail}" if file.detail else ""
        console.print(f"  [{style}]{file.verdict:<{width}}[/]  {escape(file.name + detail)}")


def _print_pruned(plan: PrunePlan, target: CheckpointSelection, dry_run: bool) -> None:
    for info, problem in plan.damaged:
        typer.echo(f"{info.path.name}: damaged, not deleted: {problem}")
    for info in sorted(plan.keep, key=lambda info: info.step):
        typer.echo(f"{info.path.name}: kept, {size(info.bytes)}")
    for info in plan.remove:
        typer.echo(
            f"{info.path.name}: {'would be deleted' if dry_run else 'deleted'}, {size(info.bytes)}"
        )
    if not plan.keep:
        typer.echo(f"{target.directory}: holds no undamaged checkpoint; nothing is deleted.")
    elif not plan.remove:
        typer.echo("Nothing to delete.")
    else:
        freed = size(sum(info.bytes for info in plan.remove))
        typer.echo(
            f"{freed} would be freed; nothing was deleted." if dry_run else f"{freed} freed."
        )


def _print_json(**values: Any) -> None:
    print_json({"version": JSON_VERSION, **values}, indent=None)


@contextmanager
def _progress(checkpoints: list[CheckpointInfo]) -> Iterator[Callable[[int], None] | None]:
    """A progress bar on stderr if it is a terminal; yields the function to call with the number of
    bytes read."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    from drillyard.console import SafeConsole

    console = SafeConsole(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=sum(info.bytes for info in checkpoints))
        yield lambda count: progress.advance(task, count)


def _style(status: str) -> str:
    return {"complete": "green", "damaged": "red", "later-format": "red", "refused": "red"}.get(
        status, "yellow"
    )


def _age_seconds(info: CheckpointInfo) -> int | None:
    """Since the manifest was written; without one, since the directory last changed. None when it
    is gone."""
    import time
    from datetime import datetime

    try:
        made = (
            info.path.lstat().st_mtime
            if info.created is None
            else datetime.fromisoformat(info.created).timestamp()
        )
    except (FileNotFoundError, ValueError, OverflowError):
        return None
    return max(0, round(time.time() - made))
