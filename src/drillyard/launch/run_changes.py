"""What changes the runs of a cluster: submit, cancel, resume, forget. Each finds the run, decides
whether it may be changed, and has the launcher do it.

    submit    plan, find existing, execute
    resume    find, submit again
    cancel    find, stop
    forget    find, remove the scheduler's record

A plan is submitted under its run's submit lock, and only as long as nobody has submitted the run
since this launch began: of several launches of a name at once one submits. Where the plan's own
program submits, it does both (agent/submit.py). `given` is the command that gave a bare name; None:
the run is meant, wherever it was launched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from drillyard.errors import UserError
from drillyard.launch.launched_from import (
    LaunchedFrom,
    NameGiven,
    record_of,
    require_launched_here,
    this_directory,
)
from drillyard.launch.launcher import Launcher, NotListedError
from drillyard.launch.plan import Plan, secrets_file
from drillyard.launch.remote_files import print_notice
from drillyard.launch.request import Cancellation
from drillyard.launch.run_status import Handle, RunStatus

AnyLauncher = Launcher[Any]


class ActiveRunError(UserError):
    """A run of that name is not over."""


def submit(launcher: AnyLauncher, plan: Plan, *, replace: bool = False) -> Handle:
    """Execute the plan's steps. Refuses a run that is not over; with `replace`, cancels it first,
    where it was launched from this directory or one above it."""
    # Of an array, the first plan submits all runs; the others have no steps.
    if plan.steps:
        secrets_json = secrets_file(plan.files)
        seen = launcher.newest_submission(plan.handle.run)
        launcher.check(plan)
        with launcher.submit_lock(plan.handle, seen):
            existing = _free_names(launcher, [job.run for job in plan.jobs], replace)
            record = record_of(this_directory())
            executed = dataclasses.replace(plan, files=(*plan.files, record))
            launcher.execute(executed, secrets_json, existing)
    return plan.handle


def cancel(launcher: AnyLauncher, run: str, *, given: NameGiven | None = None) -> Cancellation:
    """Stop a run; it gets its job's `stop_seconds` to save. Does nothing to a run that is over.
    Raises UserError where it was launched from another directory than that of `given`."""
    try:
        found = launcher.find_one(run)
        _require_launched_here(launcher, found, given, "cancel")
        before = found.status
        is_ended = before.state.over and not launcher.may_still_run(found)
        status = before if is_ended else launcher.stop(found)
    except NotListedError as error:
        raise launcher.stop_unlisted(run, given, error) from None
    unchanged = before.state.over and before.state is status.state
    return Cancellation(status, status.state if unchanged else None)


def resume(launcher: AnyLauncher, run: str, *, given: NameGiven | None = None) -> Handle:
    """Submit a run that is over again; its trainer continues from the newest checkpoint."""
    seen = launcher.newest_submission(run)
    found = launcher.find_one(run)
    status: RunStatus = found.status
    if not status.state.over:
        raise UserError(f"{status.handle}: is {status.state} and needs no resume")
    _require_launched_here(launcher, found, given, "resume")
    secrets_json = secrets_file(launcher.configs(found))
    with launcher.submit_lock(status.handle, seen):
        launcher.resubmit(found, secrets_json)
    return status.handle


def forget(launcher: AnyLauncher, run: str, *, given: NameGiven | None = None) -> Handle:
    """Remove the scheduler's record of a run that is over; its run directory stays. Raises
    UserError where the platform keeps none: then whose run it is does not matter."""
    seen = launcher.newest_submission(run) if launcher.keeps_record else None
    found = launcher.find_one(run)
    status: RunStatus = found.status
    handle, state = status.handle, status.state
    if not launcher.keeps_record:
        raise UserError(
            f"{handle}: platform {handle.platform} keeps no record that could be removed"
        )
    _require_launched_here(launcher, found, given, "forget")
    if not state.over:
        raise UserError(f"{handle}: is {state}; drillyard runs cancel {handle} ends it")
    with launcher.submit_lock(handle, seen):
        launcher.remove(found)
    return handle


def _require_launched_here(
    launcher: AnyLauncher, found: Any, given: NameGiven | None, command: str
) -> None:
    """Raise UserError where a bare name was given and means another run in that directory."""
    if given is not None:
        require_launched_here(found.status.handle, launcher.launched_from(found), given, command)


def _free_names(launcher: AnyLauncher, names: Collection[str], replace: bool) -> list[Any]:
    """Cancel the runs of these names that are not over, or refuse; returns all runs of these
    names."""
    try:
        existing = launcher.named(names)
    except NotListedError:
        return []
    here = this_directory()
    for run in existing:
        handle, state = run.status.handle, run.status.state
        if state.over:
            continue
        origin = launcher.launched_from(run)
        elsewhere = origin is not None and not origin.covers(here)
        if elsewhere or not replace:
            title = f" ({run.job_title})" if run.job_title else ""
            where = f", launched from {origin.seen_from(here)}" if origin and elsewhere else ""
            unless = "; launch --replace does so first" if not elsewhere else ""
            raise ActiveRunError(
                f"{handle}: is {state} already{title}{where}, and nothing was submitted\n"
                f"give this run another name (--set name=NAME), or end that one first:"
                f" drillyard runs cancel {handle}{unless}"
            )
        cancel(launcher, handle.run)
    _announce_replaced(launcher, existing, here)
    return existing


def _announce_replaced(launcher: AnyLauncher, existing: Sequence[Any], here: LaunchedFrom) -> None:
    """Print which runs of other directories, all of them over, a launch takes the places of."""
    for run in {run.status.handle: run for run in reversed(existing)}.values():
        origin = launcher.launched_from(run)
        if origin is not None and not origin.covers(here):
            print_notice(
                f"{run.status.handle}: takes the place of a run of that name that is over,"
                f" launched from {origin.seen_from(here)}; its run directory stays"
            )
