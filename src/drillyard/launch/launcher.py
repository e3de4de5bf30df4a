"""The interface of a launcher, and how the runs of a cluster are read through it.

A launcher extends `Launcher` and gives `plan`, `find`, `execute`, `resubmit`, `stop` and `files`;
what else is here has a default. `run_changes.py` submits, cancels, resumes and forgets through
these. A launcher is registered in `config/platforms.py`, or by the entry point
`drillyard.launchers` of its own distribution. This machine reads run directories through `Files`.
"""

from __future__ import annotations

import contextlib
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
from drillyard.launch.launched_from import UNKNOWN, LaunchedFrom, NameGiven, recorded
from drillyard.launch.logs.reader import run_logs
from drillyard.launch.plan import CONFIG_FILES, Plan
from drillyard.launch.remote_files import (
    Files,
    UnreadableFile,
    artifacts_of,
    copy_files,
    print_notice,
    read_file,
)
from drillyard.launch.request import LaunchRequest, LogSelection
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


class NotListedError(UserError):
    """A launcher cannot list its runs, and its `execute` would say so too, with all other problems:
    a launch goes on as if there were none."""


class Launcher(ABC, Generic[_Run]):
    """The runs of one cluster. Every method but `plan` and `plan_sweep` talks to the cluster, and
    raises UserError where it does not answer."""

    facts: ClassVar[PlatformFacts]
    """Of plug-ins. Those of built-in platforms are in their config.py, which imports no
    launcher."""

    reads_after_end: ClassVar[bool] = True
    """Whether the files of a run that is over are read without starting anything for it."""

    keeps_record: ClassVar[bool] = False
    """Whether the scheduler keeps a record of a run that is over until `remove`."""

    def __init__(self, cluster: ClusterConfig, programs: Programs) -> None:
        self.cluster = cluster
        self.programs = programs

    # What every launcher gives.

    @abstractmethod
    def plan(self, request: LaunchRequest) -> Plan:
        """Plan the files and calls of launching `request`. Pure. Raises UserError for every
        detectable mistake."""

    @abstractmethod
    def find(self, names: Collection[str] | None = None) -> list[_Run]:
        """The cluster's runs: at least those of `names`, or all."""

    @abstractmethod
    def execute(self, plan: Plan, secrets_json: PlanFile, existing: Sequence[_Run]) -> None:
        """Execute the plan's steps. `existing`: runs of the same names, all of them over."""

    @abstractmethod
    def resubmit(self, run: _Run, secrets_json: PlanFile) -> None:
        """Submit a run that is over again, as it was planned."""

    @abstractmethod
    def stop(self, run: _Run) -> RunStatus:
        """Stop a run and wait for its end; returns its status then."""

    @abstractmethod
    def files(self) -> Files:
        """A new connection to the run directories."""

    # What a launcher may add to planning.

    def plan_sweep(self, requests: Sequence[LaunchRequest]) -> list[Plan]:
        """One plan per point of a sweep of two or more; where the scheduler has arrays, only the
        first one's steps submit."""
        return [self.plan(request) for request in requests]

    def rendered(self, plan: Plan) -> str:
        """The scheduler's objects that the plan's steps make, as text; empty where the plan shows
        them itself."""
        return ""

    # To changes of runs.

    def check(self, plan: Plan) -> None:
        """Ask what only the cluster knows about a plan, before anything is changed. Raises
        UserError where it would not run."""

    def newest_submission(self, run: str) -> str | None:
        """What identifies the newest submission of a run name, where `submit_lock` looks at it;
        None: there is none."""
        return None

    def submit_lock(
        self, handle: Handle, seen: str | None
    ) -> contextlib.AbstractContextManager[None]:
        """The submit lock of a run. Raises UserError where another launch has it, or has submitted
        since `newest_submission` was `seen`. None here: the plan's own program has one."""
        return contextlib.nullcontext()

    def configs(self, run: _Run) -> list[PlanFile]:
        """The files of a submitted run that may refer to secrets, which `resubmit` needs again."""
        launch = run.launch_directory
        return [
            PlanFile(name, read_file(self._files, posixpath.join(launch, name), 0).decode())
            for name in CONFIG_FILES
        ]

    def may_still_run(self, run: _Run) -> bool:
        """Whether processes of a run whose state is final may still exist."""
        return False

    def launched_from(self, run: _Run) -> LaunchedFrom | None:
        """Where a run was launched; None where nothing says so: an older version launched it, or
        its plan was applied by hand."""
        path = posixpath.join(run.launch_directory, LAUNCHED_FROM)
        try:
            return recorded(read_file(self._files, path, 0))
        except UnreadableFile:
            return UNKNOWN

    def stop_unlisted(self, run: str, given: NameGiven | None, error: NotListedError) -> UserError:
        """The runs cannot be listed: stop what can be stopped of one without; returns the error to
        raise."""
        return error

    def remove(self, run: _Run) -> None:
        """Remove the scheduler's record of a run that is over, where `keeps_record`."""

    # To reading runs.

    def is_over(self, run: _Run) -> Callable[[], bool]:
        """A function that returns whether the run is over, for followers of its logs."""
        return lambda: self.status(run.status.handle.run).state.over

    def log_files(self, run: _Run) -> Files:
        """A new connection to the logs of a run."""
        return self.files()

    # To nodes.

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

    # Reading runs.

    def runs(self) -> list[RunStatus]:
        """The cluster's runs, newest first."""
        return sorted(
            (run.status for run in self.find()),
            key=lambda each: (-(each.submitted_at or 0.0), each.handle),
        )

    def named(self, names: Collection[str]) -> list[_Run]:
        """The runs of these names; of one name the newest first."""
        return [run for run in self.find(names) if run.status.handle.run in names]

    def find_one(self, name: str) -> _Run:
        """One run. Raises NotFoundError with the known names where there is none of that name."""
        found = self.named([name])
        if not found:
            names = [each.handle.run for each in self.runs()]
            there = (
                f"; there are: {', '.join(names[:8])}"
                if names
                else ", nor any other; drillyard launch starts one"
            )
            raise NotFoundError(f"there is no run '{name}' on {self._files.title}{there}")
        return found[0]

    def status(self, run: str) -> RunStatus:
        """The status of one run. Raises NotFoundError as `find_one`."""
        return self.find_one(run).status

    def logs(self, run: str, selection: LogSelection) -> Iterator[bytes]:
        """Lines in order of time, `NODE: STAMP TEXT` (of a rank `[rankR]: STAMP TEXT`), whole lines
        in each piece."""
        found = self.find_one(run)
        with contextlib.closing(self.log_files(found)) as files:
            yield from run_logs(found.launch_directory, files, selection, over=self.is_over(found))

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
        return self.files()

    @cached_property
    def _run_directory(self) -> Callable[[str], str]:
        """The directory of a run. It never changes, and followers need it every second: read
        once."""
        return cache(lambda run: posixpath.dirname(self.find_one(run).launch_directory))


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
