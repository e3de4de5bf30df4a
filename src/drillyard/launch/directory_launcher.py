"""Submit, cancel and resume as every launcher does them whose run directories this machine can read.

    submit   gather the secrets, refuse or cancel a run of the same name, execute the plan
    cancel   stop the run, wait until nothing of it runs, print a notice where that takes long
    resume   require that the run is over, gather the secrets that its own configs refer to, submit it again

A launcher adds how its scheduler does each: `_runs`, `_execute`, `_stop`, `_resubmit`.
"""

from __future__ import annotations

import contextlib
import posixpath
import threading
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from typing import Final, Generic, Protocol, TypeVar

from drillyard.errors import UserError
from drillyard.launch.launcher import Launcher, no_such_run
from drillyard.launch.logs.reader import run_logs
from drillyard.launch.plan import Plan, PlanFile
from drillyard.launch.remote_files import Files, artifacts_of, copy_files, print_notice, read_file
from drillyard.launch.request import Cancellation, LogSelection
from drillyard.launch.run_status import Handle, RunStatus
from drillyard.launch.submit_secrets import CONFIG_FILES, names_in, secret_names, secrets_file

_QUIET_SECONDS: Final = 3.0
"""Most runs end within this time; only a longer wait is announced."""


class LaunchedRun(Protocol):
    """A run as a launcher finds it."""

    @property
    def handle(self) -> Handle:
        """Its address."""

    @property
    def launch_directory(self) -> str:
        """`launch/` of its run directory, as `files` names it."""

    @property
    def status(self) -> RunStatus:
        """Its status when it was read."""

    @property
    def job_title(self) -> str:
        """The scheduler's job, for error messages; empty without a scheduler."""


_Run = TypeVar("_Run", bound=LaunchedRun)


class DirectoryLauncher(Launcher, Generic[_Run]):
    """A launcher whose run directories can be read from this machine."""

    # What a launcher adds.

    @abstractmethod
    def _runs(self) -> list[_Run]:
        """All runs of the cluster."""

    @abstractmethod
    def _open_files(self) -> Files:
        """A new connection to the run directories."""

    @abstractmethod
    def _execute(self, plan: Plan, secrets: PlanFile, existing: Sequence[_Run]) -> None:
        """Execute the plan's steps. `existing`: runs of the same names, all of them over."""

    @abstractmethod
    def _stop(self, run: _Run) -> RunStatus:
        """Stop a run and wait for its end; returns its status then."""

    @abstractmethod
    def _resubmit(self, run: _Run, secrets: PlanFile) -> None:
        """Submit a run that is over again, from its launch directory."""

    def _runs_named(self, names: Collection[str]) -> list[_Run]:
        """The runs of these names."""
        return [run for run in self._runs() if run.handle.run in names]

    def _handles(self, plan: Plan) -> list[Handle]:
        """The runs that a plan submits."""
        return [plan.handle]

    def _may_still_run(self, run: _Run) -> bool:
        """Whether processes of a run whose state is final may still exist."""
        return False

    def _is_over(self, run: _Run) -> Callable[[], bool]:
        """A function that tells a follower of the run's logs whether the run is over."""
        return lambda: self.status(run.handle.run).state.over

    # The flow.

    def submit(self, plan: Plan, *, replace: bool = False) -> Handle:
        """Execute the plan's steps. Of an array, the first plan submits all runs."""
        if plan.steps:
            secrets = secrets_file(secret_names(plan.files))
            self._execute(plan, secrets, self._free_names(self._handles(plan), replace))
        return plan.handle

    def _free_names(self, handles: Sequence[Handle], replace: bool) -> list[_Run]:
        """Cancel the runs of these names that are not over, or refuse; returns all runs of these names."""
        existing = self._runs_named([handle.run for handle in handles])
        for run in existing:
            if run.status.state.over:
                continue
            if not replace:
                title = f" ({run.job_title})" if run.job_title else ""
                raise UserError(
                    f"{run.handle}: is {run.status.state} already{title}, and nothing was submitted\n"
                    f"drillyard runs cancel {run.handle} ends it, launch --replace does so first; or give the run "
                    "another name"
                )
            self.cancel(run.handle.run)
        return existing

    def cancel(self, run: str) -> Cancellation:
        """Stop a run and wait until nothing of it runs; does nothing to a run that is over."""
        found = self._find(run)
        before = found.status.state if found.status.state.over else None
        if before is not None and not self._may_still_run(found):
            return Cancellation(found.status, before)
        status = self._stop(found)
        return Cancellation(status, before if status.state is before else None)

    def resume(self, run: str) -> Handle:
        """Submit a run that is over again; its trainer continues from the newest checkpoint."""
        found = self._find(run)
        if not found.status.state.over:
            raise UserError(f"{found.handle}: is {found.status.state} and needs no resume")
        paths = [posixpath.join(found.launch_directory, name) for name in CONFIG_FILES]
        configs = [read_file(self._files, path, 0).decode() for path in paths]
        self._resubmit(found, secrets_file(names_in(configs)))
        return found.handle

    # Reading.

    def runs(self) -> list[RunStatus]:
        """The cluster's runs, newest first."""
        return sorted((run.status for run in self._runs()), key=lambda each: (-(each.submitted_at or 0.0), each.handle))

    def status(self, run: str) -> RunStatus:
        """The status of one run."""
        return self._find(run).status

    def logs(self, run: str, selection: LogSelection) -> Iterator[bytes]:
        """The nodes' logs, merged in order of time."""
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
        """The bytes of a file of the run directory from `offset` on."""
        return read_file(self._files, posixpath.join(self._run_directory(run), path), offset)

    @cached_property
    def _files(self) -> Files:
        """One connection for everything but logs."""
        return self._open_files()

    @cached_property
    def _directories(self) -> dict[str, str]:
        return {}

    def _run_directory(self, run: str) -> str:
        """It never changes, and a follower asks every second: the scheduler is asked once."""
        if run not in self._directories:
            self._directories[run] = posixpath.dirname(self._find(run).launch_directory)
        return self._directories[run]

    def _find(self, run: str) -> _Run:
        found = self._runs_named([run])
        if not found:
            names = [each.handle.run for each in self.runs()]
            raise no_such_run(run, self._files.title, names)
        return found[0]


@contextlib.contextmanager
def cancel_notice(handle: Handle, stop_seconds: float) -> Iterator[None]:
    """Print how long a cancelled run may take to save, where the wait is longer than a few seconds."""
    words = f"{handle}: is stopping and has {stop_seconds:.0f} s to save; cancel it again to kill it at once"
    timer = threading.Timer(_QUIET_SECONDS, print_notice, [words])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
