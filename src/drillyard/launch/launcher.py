"""The interface of a launcher, and the flow that launchers share: submit, cancel, resume, logs and
files.

A launcher extends `Launcher` and has `facts`, `plan` and a few hooks. It is registered in
`config/platforms.py`, or by the entry point `drillyard.launchers` of its own distribution. This
machine reads run directories through `Files`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import posixpath
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache, cached_property
from pkgutil import resolve_name
from typing import Any, ClassVar, Final, Generic, Protocol, TypeVar

from drillyard.config.cluster import ClusterConfig
from drillyard.config.platforms import PlatformFacts, platforms
from drillyard.errors import ConfigError, NotFoundError, UserError
from drillyard.launch.agent.job import LAUNCHED_FROM
from drillyard.launch.launched_from import (
    UNKNOWN,
    LaunchedFrom,
    NameGiven,
    record_of,
    recorded,
    this_directory,
)
from drillyard.launch.logs.reader import run_logs
from drillyard.launch.plan import CONFIG_FILES, Plan, secrets_file
from drillyard.launch.remote_files import (
    Files,
    UnreadableFile,
    artifacts_of,
    copy_files,
    print_notice,
    read_file,
)
from drillyard.launch.request import Cancellation, LaunchRequest, LogSelection
from drillyard.launch.run_status import Handle, RunStatus
from drillyard.plan_files import PlanFile
from drillyard.programs import Programs

AFTER_STOP_SECONDS: Final = 15.0
"""After the job's `stop_seconds` agents kill what still runs, and then have this long to report
it."""
_QUIET_SECONDS: Final = 3.0
"""Most runs end within this time; only a longer wait is announced."""


class SubmittedRun(Protocol):
    """A run as a launcher finds it."""

    @property
    def launch_directory(self) -> str:
        """`launch/` of its run directory, as `files` names it."""

    @property
    def status(self) -> RunStatus:
        """Its status when it was read."""

    @property
    def job_title(self) -> str:
        """The scheduler's job, for error messages; empty without a scheduler."""


_Run = TypeVar("_Run", bound=SubmittedRun)


class Launcher(ABC, Generic[_Run]):
    """The runs of one cluster. Every method but `plan` and `plan_sweep` talks to the cluster, and
    raises UserError where it does not answer."""

    facts: ClassVar[PlatformFacts]
    """Of plug-ins. Those of built-in platforms are in their config.py, which imports no
    launcher."""

    reads_after_end: ClassVar[bool] = True
    """Whether the files of a run that is over are read without starting anything for it."""

    keeps_record: ClassVar[bool] = False
    """Whether the scheduler keeps a record of a run that is over until `forget` removes it."""

    def __init__(self, cluster: ClusterConfig, programs: Programs) -> None:
        self.cluster = cluster
        self.programs = programs

    # What a launcher adds.

    @abstractmethod
    def plan(self, request: LaunchRequest) -> Plan:
        """Plan the files and calls of launching `request`. Pure. Raises UserError for every
        detectable mistake."""

    def plan_sweep(self, requests: Sequence[LaunchRequest]) -> list[Plan]:
        """One plan per point of a sweep of two or more; where the scheduler has arrays, only the
        first one's steps submit."""
        return [self.plan(request) for request in requests]

    def rendered(self, plan: Plan) -> str:
        """The scheduler's objects that the plan's steps make, as text; empty where the plan shows
        them itself."""
        return ""

    def forget(self, run: str, *, given: NameGiven | None = None) -> Handle:
        """Remove the scheduler's record of a run that is over; its run directory stays. `given`: as
        for `cancel`. Raises UserError where the platform keeps none: then whose run it is does not
        matter."""
        handle = self._find(run).status.handle
        raise UserError(
            f"{handle}: platform {handle.platform} keeps no record that could be removed"
        )

    def idle_nodes(self, request: LaunchRequest) -> list[str] | None:
        """The nodes on which the request could start now; None where the platform cannot say."""
        return None

    def nodes_short_of_gpus(self, request: LaunchRequest) -> dict[str, str]:
        """Nodes that offer fewer GPUs than the machine of the config has, so that a run would wait
        or fail, and what each offers. Empty where no machine is named or the platform cannot
        say."""
        return {}

    def node_names(self, status: RunStatus) -> tuple[str, ...]:
        """The nodes of a run by rank, as the scheduler or the cluster config names them; empty
        where not known."""
        return status.hosts

    def drain(self, node: str, reason: str) -> str | None:
        """Keep new jobs off a node; returns the command that undoes it, None where it was out
        already. Raises UserError where that cannot be done, with what to do instead."""
        raise UserError(self._cannot_drain(node, "start no run there until it is repaired"))

    def _cannot_drain(self, node: str, instead: str) -> str:
        return f"{node}: platform {self.cluster.platform} cannot keep jobs off a node; {instead}"

    @abstractmethod
    def _runs(self) -> list[_Run]:
        """All runs of the cluster."""

    @abstractmethod
    def _open_files(self) -> Files:
        """A new connection to the run directories."""

    @abstractmethod
    def _execute(self, plan: Plan, secrets_json: PlanFile, existing: Sequence[_Run]) -> None:
        """Execute the plan's steps. `existing`: runs of the same names, all of them over."""

    @abstractmethod
    def _stop(self, run: _Run) -> RunStatus:
        """Stop a run and wait for its end; returns its status then."""

    @abstractmethod
    def _resubmit(self, run: _Run, secrets_json: PlanFile) -> None:
        """Submit a run that is over again, from its launch directory."""

    def _check(self, plan: Plan) -> None:
        """Ask what only the cluster knows about a plan, before anything is changed. Raises
        UserError where it would not run."""

    def _newest_submission(self, run: str) -> str | None:
        """What identifies the newest submission of a run name, where `_submit_lock` looks at it;
        None: there is none."""
        return None

    def _submit_lock(
        self, handle: Handle, seen: str | None
    ) -> contextlib.AbstractContextManager[None]:
        """The submit lock of a run. Raises UserError where another launch has it, or has submitted
        since `_newest_submission` was `seen`. None here: the plan's own program has one."""
        return contextlib.nullcontext()

    def _runs_named(self, names: Collection[str]) -> list[_Run]:
        return [run for run in self._runs() if run.status.handle.run in names]

    def _may_still_run(self, run: _Run) -> bool:
        """Whether processes of a run whose state is final may still exist."""
        return False

    def _launched_from(self, run: _Run) -> LaunchedFrom | None:
        """Where a run was launched; None where nothing says so: an older version launched it, or
        its plan was applied by hand."""
        path = posixpath.join(run.launch_directory, LAUNCHED_FROM)
        try:
            return recorded(read_file(self._files, path, 0))
        except UnreadableFile:
            return UNKNOWN

    def _is_over(self, run: _Run) -> Callable[[], bool]:
        """A function that returns whether the run is over, for followers of its logs."""
        return lambda: self.status(run.status.handle.run).state.over

    # The flow.

    def submit(self, plan: Plan, *, replace: bool = False) -> Handle:
        """Execute the plan's steps. Refuses a run that is not over; with `replace`, cancels it
        first, where it was launched from this directory or one above it."""
        # Of an array, the first plan submits all runs; the others have no steps.
        if plan.steps:
            secrets_json = secrets_file(plan.files)
            seen = self._newest_submission(plan.handle.run)
            self._check(plan)
            with self._submit_lock(plan.handle, seen):
                existing = self._free_names([job.run for job in plan.jobs], replace)
                record = record_of(this_directory())
                executed = dataclasses.replace(plan, files=(*plan.files, record))
                self._execute(executed, secrets_json, existing)
        return plan.handle

    def _free_names(self, names: Collection[str], replace: bool) -> list[_Run]:
        """Cancel the runs of these names that are not over, or refuse; returns all runs of these
        names."""
        existing, here = self._runs_named(names), this_directory()
        for run in existing:
            handle, state = run.status.handle, run.status.state
            if state.over:
                continue
            origin = self._launched_from(run)
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
            self.cancel(handle.run)
        self._announce_replaced(existing, here)
        return existing

    def _announce_replaced(self, existing: Sequence[_Run], here: LaunchedFrom) -> None:
        """Print which runs of other directories, all of them over, a launch takes the places of."""
        for run in {run.status.handle: run for run in reversed(existing)}.values():
            origin = self._launched_from(run)
            if origin is not None and not origin.covers(here):
                print_notice(
                    f"{run.status.handle}: takes the place of a run of that name that is over,"
                    f" launched from {origin.seen_from(here)}; its run directory stays"
                )

    def cancel(self, run: str, *, given: NameGiven | None = None) -> Cancellation:
        """Stop a run; it gets its job's `stop_seconds` to save. Does nothing to a run that is over.

        `given`: the command that gave its bare name; None: the run is meant, wherever it was
        launched. Raises UserError where it was launched from another directory.
        """
        found = self._find(run)
        self._require_launched_here(found, given, "cancel")
        before = found.status
        status = (
            before if before.state.over and not self._may_still_run(found) else self._stop(found)
        )
        return Cancellation(
            status, status.state if before.state.over and before.state is status.state else None
        )

    def resume(self, run: str, *, given: NameGiven | None = None) -> Handle:
        """Submit a run that is over again; its trainer continues from the newest checkpoint.
        `given`: as for `cancel`."""
        seen = self._newest_submission(run)
        found = self._find(run)
        status = found.status
        if not status.state.over:
            raise UserError(f"{status.handle}: is {status.state} and needs no resume")
        self._require_launched_here(found, given, "resume")
        configs = [
            PlanFile(
                name,
                read_file(self._files, posixpath.join(found.launch_directory, name), 0).decode(),
            )
            for name in CONFIG_FILES
        ]
        secrets_json = secrets_file(configs)
        with self._submit_lock(status.handle, seen):
            self._resubmit(found, secrets_json)
        return status.handle

    # Reading.

    def runs(self) -> list[RunStatus]:
        """The cluster's runs, newest first."""
        return sorted(
            (run.status for run in self._runs()),
            key=lambda each: (-(each.submitted_at or 0.0), each.handle),
        )

    def status(self, run: str) -> RunStatus:
        """The status of one run. Raises UserError with the known names where there is none of that
        name."""
        return self._find(run).status

    def logs(self, run: str, selection: LogSelection) -> Iterator[bytes]:
        """Lines in order of time, `NODE: STAMP TEXT` (of a rank `[rankR]: STAMP TEXT`), whole lines
        in each piece."""
        found = self._find(run)
        with contextlib.closing(self._open_files()) as files:
            yield from run_logs(found.launch_directory, files, selection, over=self._is_over(found))

    def artifacts(self, run: str) -> list[tuple[str, int]]:
        """Files of the run directory: path relative to it, size in bytes."""
        return artifacts_of(self._files, self._run_directory(run))

    def fetch(self, run: str, paths: list[str], destination: str) -> None:
        """Copy files of the run directory to a directory here."""
        copy_files(self._files, self._run_directory(run), paths, destination)

    def read(self, run: str, path: str, offset: int) -> bytes:
        """The bytes of a file of the run directory from `offset` on (below 0: the last `-offset`
        bytes), at most `remote_files.READ_BYTES`; empty at its end and where there is no such
        file."""
        return read_file(self._files, posixpath.join(self._run_directory(run), path), offset)

    @cached_property
    def _files(self) -> Files:
        """One connection for everything but logs."""
        return self._open_files()

    @cached_property
    def _run_directory(self) -> Callable[[str], str]:
        """The directory of a run. It never changes, and followers need it every second: read
        once."""
        return cache(lambda run: posixpath.dirname(self._find(run).launch_directory))

    def _require_launched_here(self, run: _Run, given: NameGiven | None, command: str) -> None:
        """Raise UserError where a bare name was given and means another run in that directory."""
        if given is not None:
            require_launched_here(run.status.handle, self._launched_from(run), given, command)

    def _find(self, run: str) -> _Run:
        found = self._runs_named([run])
        if not found:
            names = [each.handle.run for each in self.runs()]
            there = (
                f"; there are: {', '.join(names[:8])}"
                if names
                else ", nor any other; drillyard launch starts one"
            )
            raise NotFoundError(f"there is no run '{run}' on {self._files.title}{there}")
        return found[0]


class ActiveRunError(UserError):
    """A run of that name is not over."""


def launcher_for(cluster: ClusterConfig, programs: Programs | None = None) -> Launcher[Any]:
    """The launcher of `cluster`. Raises UserError where its platform has none."""
    return launcher_class(cluster.platform)(cluster, programs or Programs())


def launcher_class(platform: str, file: str = "FILE") -> type[Launcher[Any]]:
    """The launcher class of a platform. Raises UserError where there is none, with what to do with
    the cluster config `file`."""
    facts = platforms().get(platform)
    if facts is None or not facts.launcher:
        able = ", ".join(name for name, each in platforms().items() if each.launcher)
        instead = "" if facts is None else facts.instead_of_launching.replace("{file}", file)
        raise ConfigError(
            f"platform {platform}: no run is launched there{instead and f': {instead}'}\nPlatforms"
            f" with a launcher: {able}"
        )
    found: type[Launcher[Any]] = (
        resolve_name(facts.launcher) if isinstance(facts.launcher, str) else facts.launcher
    )
    return found


def require_launched_here(
    handle: Handle, origin: LaunchedFrom | None, given: NameGiven, command: str
) -> None:
    """Raise UserError where a run that is named by its bare name was launched from another
    directory."""
    if origin is not None and not origin.covers(given.here):
        raise UserError(
            f"{handle}: was launched from {origin.seen_from(given.here)}, not from this directory:"
            f" nothing was done\nif you mean that run: drillyard runs {command}"
            f" {handle}{given.options}"
        )


def being_launched_error(handle: Handle, whose: str) -> UserError:
    """The error where another launch, described by `whose`, has the run."""
    return UserError(
        f"{handle}: is being launched by another drillyard ({whose}); nothing was submitted\n"
        f"see drillyard runs status {handle}; give this run another name, or launch it again later"
    )


@contextlib.contextmanager
def cancel_notice(handle: Handle, stop_seconds: float) -> Iterator[None]:
    """Print how long a cancelled run may take to save, where the wait is longer than a few
    seconds."""
    words = (
        f"{handle}: is stopping and has {stop_seconds:.0f} s to save; cancel it again to kill it at"
        " once"
    )
    timer = threading.Timer(_QUIET_SECONDS, print_notice, [words])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
