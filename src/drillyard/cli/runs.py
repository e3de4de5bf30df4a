"""`drillyard runs list | status | logs | watch | wait | cancel | resume | artifacts`: launched
runs, wherever they are.

A run is given by its handle, `platform://cluster/run`, or by its name, which is looked up on the
clusters that this user has launched on. The status always comes from the cluster.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drillyard.cli.options import AsJson, Cluster, RunArgument, RunsArgument, print_json
from drillyard.errors import UserError
from drillyard.launch.run_status import RunStatus, State

if TYPE_CHECKING:
    from drillyard.launch.cluster_registry import FoundRun
    from drillyard.launch.request import Cancellation

JSON_VERSION = 1
"""Raise it when a field of `--json` changes its meaning."""


def register(app: typer.Typer) -> None:
    """Add the commands on launched runs to the app."""
    from drillyard.cli.watch import runs_logs, runs_watch

    group = typer.Typer(
        help="List, follow and stop runs that were launched, wherever they are.",
        no_args_is_help=True,
    )
    app.add_typer(group, name="runs")

    group.command("list")(list_command)
    group.command("status")(status_command)
    group.command("logs")(runs_logs)
    group.command("watch")(runs_watch)
    group.command("wait")(wait_command)
    group.command("cancel")(cancel_command)
    group.command("resume")(resume_command)
    group.command("forget")(forget_command)
    group.command("artifacts")(artifacts_command)


def list_command(
    cluster: Cluster = None,
    state: Annotated[
        list[str] | None,
        typer.Option(metavar="STATE", help="Only runs in this state, such as running; repeatable."),
    ] = None,
    last: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only the newest N.")] = None,
    as_json: AsJson = False,
) -> None:
    """List runs: their state, for how long, and why they wait or failed. Newest first.

    States: queued, starting, running, restarting, succeeded, failed, cancelled.

    Exit code 0; 1 when a cluster did not answer: its error is printed, and the other clusters are
    listed.
    """
    from drillyard.launch.cluster_registry import clusters_to_search
    from drillyard.launch.status_text import status_json

    for text in state or ():
        if text not in set(State):
            raise UserError(f"--state {text}: is not a state; these are: {', '.join(State)}")
    found, silent = clusters_to_search(cluster).all_runs()
    chosen = [status for status in found if not state or status.state in state][:last]
    if as_json:
        no_answer = [{"cluster": name, "error": why} for name, why in silent.items()]
        _print_json({"runs": [status_json(status) for status in chosen], "no_answer": no_answer})
    elif chosen:
        _print_runs(chosen)
    elif not silent:
        typer.echo("no runs" + (" in that state" if state and found else ""), err=True)
    for name, why in silent.items():
        first, *more = why.splitlines()
        typer.echo(
            "\n".join([f"cluster {name}: no answer: {first}", *(f"    {line}" for line in more)]),
            err=True,
        )
    if silent:
        raise typer.Exit(1)


def status_command(run: RunArgument, cluster: Cluster = None, as_json: AsJson = False) -> None:
    """Show one run: state, queue, nodes, restarts, progress, why it failed, and what to do next.

    Exit code 0, whatever the state; `wait` returns the run's own code.
    """
    from drillyard.launch.cluster_registry import find_launched_run
    from drillyard.launch.status_text import status_json, status_text
    from drillyard.watch.remote_run import read_progress

    found = find_launched_run(run, cluster)
    status = found.status()
    readable = status.run_directory and (found.launcher.reads_after_end or not status.state.over)
    progress = read_progress(found.launcher, found.handle.run) if readable else None
    if as_json:
        _print_json(
            {**status_json(status), "progress": None if progress is None else progress.as_json()}
        )
        return
    text = status_text(
        status,
        progress=None if progress is None else progress.line,
        where=found.cluster.section.head_host,
        words=found.words,
    )
    _print_status(status, text)


def wait_command(run: RunArgument, cluster: Cluster = None, as_json: AsJson = False) -> None:
    """Wait until a run is over. Ctrl-C ends the waiting, not the run.

    Exit code: the run's own. 0 succeeded, 1 failed, 2 refused its config, 130 cancelled.
    """
    from drillyard.launch.cluster_registry import find_launched_run
    from drillyard.launch.run_wait import wait_for
    from drillyard.launch.status_text import status_json

    found = find_launched_run(run, cluster)
    code = wait_for(found.launcher, found.handle.run)
    if as_json:
        _print_json({**status_json(found.status()), "exit_code": code})
    raise typer.Exit(code)


def cancel_command(runs: RunsArgument, cluster: Cluster = None, as_json: AsJson = False) -> None:
    """Stop runs and wait until none of their processes is left; does nothing to runs that are over.

    A run gets time to save: as long as before its scheduler's time limit, or two minutes where
    there is none. `resume` continues from what it saved. Cancel a run again meanwhile to kill it at
    once. Ctrl-C ends the waiting only.

    Exit code 0, also for a run that was over already; 2 when one could not be cancelled (the others
    are); 130 for Ctrl-C.
    """
    from drillyard.launch.cluster_registry import clusters_to_search
    from drillyard.launch.status_text import status_json

    found = clusters_to_search(cluster).find(list(dict.fromkeys(runs)))
    outcomes = _cancelled(found)
    failed = [pair for pair in zip(found, outcomes, strict=True) if isinstance(pair[1], UserError)]
    # Some messages begin with the handle already.
    problems = [
        f"{each.handle}: {str(error).removeprefix(f'{each.handle}: ')}" for each, error in failed
    ]
    done = [outcome for outcome in outcomes if not isinstance(outcome, UserError)]
    if as_json:
        cancelled = [
            {**status_json(each.status), "was_over": each.before is not None} for each in done
        ]
        _print_json({"runs": cancelled, "problems": problems})
    else:
        for each in done:
            typer.echo(f"{each.status.handle}  {_after_cancel(each)}")
    if problems:
        raise UserError("\n".join(problems))


def resume_command(run: RunArgument, cluster: Cluster = None, as_json: AsJson = False) -> None:
    """Submit a run that is over again, as it was launched; it continues from its last
    checkpoint."""
    from drillyard.launch.cluster_registry import find_launched_run
    from drillyard.launch.run_changes import resume

    found = find_launched_run(run, cluster)
    handle = resume(found.launcher, found.handle.run, given=found.given)
    if as_json:
        _print_json({"handle": str(handle)})
    else:
        typer.echo(str(handle))


def forget_command(run: RunArgument, cluster: Cluster = None, as_json: AsJson = False) -> None:
    """Remove the scheduler's record of a run that is over, such as Helm's; its run directory stays.

    Exit code 2 for a run that is not over, and where the platform keeps no record.
    """
    from drillyard.launch.cluster_registry import find_launched_run
    from drillyard.launch.run_changes import forget

    found = find_launched_run(run, cluster)
    handle = forget(found.launcher, found.handle.run, given=found.given)
    if as_json:
        _print_json({"handle": str(handle)})
    else:
        typer.echo(f"{handle}  forgotten")


def artifacts_command(
    run: RunArgument,
    patterns: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PATTERN", help="Only files whose path matches, such as 'final/*' or '*.json'."
        ),
    ] = None,
    fetch: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Copy the files here, with their directories."),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace files of the same names in the DIR of --fetch."),
    ] = False,
    cluster: Cluster = None,
    as_json: AsJson = False,
) -> None:
    """List the files of a run's directory with their sizes, or copy them here.

    Patterns are as in a shell, and * also matches /.
    """
    from fnmatch import fnmatch

    from drillyard import formatting
    from drillyard.launch.cluster_registry import find_launched_run

    found = find_launched_run(run, cluster)
    files = found.launcher.artifacts(found.handle.run)
    chosen = [
        (path, size)
        for path, size in files
        if not patterns or any(fnmatch(path, each) for each in patterns)
    ]
    if patterns and not chosen:
        raise UserError(
            f"{found.handle}: none of its {len(files)} files matches {' '.join(patterns)}"
        )
    if fetch is not None:
        if not overwrite:
            _refuse_existing(fetch, [path for path, _ in chosen])
        found.launcher.fetch(found.handle.run, [path for path, _ in chosen], str(fetch))
    if as_json:
        listed = [{"path": path, "bytes": size} for path, size in chosen]
        _print_json(
            {
                "handle": str(found.handle),
                "files": listed,
                "fetched_to": None if fetch is None else str(fetch),
            }
        )
        return
    total = (
        f"{formatting.plural(len(chosen), 'file')},"
        f" {formatting.size(sum(size for _, size in chosen))}"
    )
    if fetch is not None:
        typer.echo(f"{fetch}: {total}")
        return
    for path, size in chosen:
        typer.echo(f"{formatting.size(size):>10}  {path}")
    typer.echo(total, err=True)


def _refuse_existing(directory: Path, paths: Sequence[str]) -> None:
    """Raise UserError where one of the files to copy exists already."""
    there = [path for path in paths if os.path.lexists(directory / path)]
    if there:
        more = f" and {len(there) - 1} more" if len(there) > 1 else ""
        raise UserError(
            f"{directory / there[0]}{more}: exists already, so nothing was copied; give --overwrite"
            " to replace files of the same names, or name another directory"
        )


def _print_json(document: dict[str, Any]) -> None:
    print_json({"version": JSON_VERSION, **document}, allow_nan=True)


def _cancelled(found: Sequence[FoundRun]) -> list[Cancellation | UserError]:
    """The result of cancelling each of these runs. At Ctrl-C, names those that are still
    stopping."""
    from drillyard.launch.remote_files import print_notice
    from drillyard.launch.run_changes import cancel
    from drillyard.programs import parallel_map

    waited_for = [each.words for each in found]

    def cancelled(each: FoundRun) -> Cancellation | UserError:
        # This thread's programs ignore Ctrl-C: they finish stopping the run.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return cancel(each.launcher, each.handle.run, given=each.given)
        except UserError as error:
            return error
        finally:
            waited_for.remove(each.words)

    try:
        return parallel_map(cancelled, found, 16)
    except KeyboardInterrupt:
        for words in list(waited_for):
            # Within the first moment, the request to stop may not have been sent yet.
            print_notice(
                f"{words.split()[0]}: still stopping; this command no longer waits: drillyard runs"
                f" status {words}"
            )
        raise


def _after_cancel(done: Cancellation) -> str:
    status, before = done.status, done.before
    if before is not None:
        return "was already cancelled" if before is State.cancelled else f"had already {before}"
    if status.state is State.cancelled:
        return "cancelled"
    return (
        f"ended by itself meanwhile: {status.state}"
        if status.state.over
        else f"is being stopped ({status.state})"
    )


def _print_runs(statuses: Sequence[RunStatus]) -> None:
    """Fit the table to a terminal; print whole lines elsewhere."""
    from drillyard.console import SafeConsole
    from drillyard.launch.status_text import runs_table, runs_text

    console = SafeConsole()
    if console.is_terminal:
        console.print(runs_table(statuses, width=console.width))
    else:
        typer.echo(runs_text(statuses), nl=False)


def _print_status(status: RunStatus, text: str) -> None:
    """Print the text, the state in colour on a terminal."""
    from rich.text import Text

    from drillyard.console import SafeConsole
    from drillyard.launch.status_text import STATE_STYLES

    console = SafeConsole()
    if not console.is_terminal:
        sys.stdout.write(text)
        return
    styled = Text(text, end="")
    place = text.index(str(status.state), len(str(status.handle)))
    styled.stylize(STATE_STYLES[status.state], place, place + len(str(status.state)))
    console.print(styled, soft_wrap=True)
