"""The interface of a launcher, and how to get one.

A new launcher is a class that extends `Launcher` and has `plan`, `submit`, `runs`, `logs` and `cancel`. Where this
machine can read its run directories, it extends `directory_launcher.DirectoryLauncher`, which has the rest. It is
registered in `config/platforms.py`, or by the entry point `drillyard.launchers` of its own distribution.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from drillyard.config.cluster import ClusterConfig
from drillyard.config.platforms import PlatformFacts, launcher_class, require_capability
from drillyard.errors import NotFoundError, UserError
from drillyard.hardware.machines import Machine
from drillyard.launch.plan import Plan
from drillyard.launch.programs import Programs
from drillyard.launch.request import Cancellation, LaunchFinding, LaunchRequest, LogSelection
from drillyard.launch.run_status import Handle, RunStatus


class Launcher(ABC):
    """The runs of one cluster. Every method but `plan` and `checks` talks to the cluster; it raises UserError where
    the cluster does not answer."""

    facts: ClassVar[PlatformFacts]
    """Read from plug-ins only; the facts of built-in platforms are found without importing their launchers."""

    def __init__(self, cluster: ClusterConfig, programs: Programs) -> None:
        self.cluster = cluster
        self.programs = programs

    @classmethod
    def checks(cls, request: LaunchRequest, machine: Machine | None) -> Iterator[LaunchFinding]:
        """The platform's own checks of a request, beside those of `checks.py`. Pure."""
        yield from ()

    @abstractmethod
    def plan(self, request: LaunchRequest) -> Plan:
        """What launching `request` writes and calls. Pure. Raises UserError for every mistake that can be seen."""

    @abstractmethod
    def submit(self, plan: Plan, *, replace: bool = False) -> Handle:
        """Execute the plan's steps. Refuses a run that is not over; with `replace`, cancels it first."""

    @abstractmethod
    def runs(self) -> list[RunStatus]:
        """The cluster's runs, newest first."""

    @abstractmethod
    def logs(self, run: str, selection: LogSelection) -> Iterator[bytes]:
        """Lines in order of time, `NODE: STAMP TEXT` (of a rank `[rankR]: STAMP TEXT`), whole lines in each piece."""

    @abstractmethod
    def cancel(self, run: str) -> Cancellation:
        """Stop a run; it gets its job's `stop_seconds` to save. Does nothing to a run that is over."""

    def plan_sweep(self, requests: list[LaunchRequest]) -> list[Plan]:
        """One plan per point of a sweep; where the scheduler has arrays, only the first one's steps submit."""
        if len(requests) > 1:
            require_capability(self.cluster.platform, "queue", "--sweep")
        return [self.plan(request) for request in requests]

    def status(self, run: str) -> RunStatus:
        """The status of one run. Raises UserError with the known names where there is none of that name."""
        statuses = self.runs()
        found = next((status for status in statuses if status.handle.run == run), None)
        if found is None:
            raise no_such_run(run, f"cluster {self.cluster.name}", [each.handle.run for each in statuses])
        return found

    def resume(self, run: str) -> Handle:
        """Submit a run that is over again; its trainer continues from the newest checkpoint."""
        raise UserError(f"platform {self.cluster.platform} cannot resume {run}; launch its run config again")

    def artifacts(self, run: str) -> list[tuple[str, int]]:
        """Files of the run directory: path relative to it, size in bytes."""
        raise UserError(f"platform {self.cluster.platform} cannot list the files of {run}")

    def fetch(self, run: str, paths: list[str], destination: str) -> None:
        """Copy files of the run directory to a directory here."""
        raise UserError(f"platform {self.cluster.platform} cannot copy files of {run}")

    def read(self, run: str, path: str, offset: int) -> bytes:
        """The bytes of a file of the run directory from `offset` on (below 0: the last `-offset` bytes), at most
        `remote_files.READ_BYTES`; empty at its end and where there is no such file."""
        return b""


def launcher_for(cluster: ClusterConfig, programs: Programs | None = None) -> Launcher:
    """The launcher of `cluster`. Raises UserError where its platform has none."""
    launcher: Launcher = launcher_class(cluster.platform)(cluster, programs or Programs())
    return launcher


def no_such_run(run: str, where: str, names: list[str]) -> NotFoundError:
    """The error for a run name that `where` does not have."""
    return NotFoundError(f"there is no run '{run}'; {where} knows: {', '.join(names[:8]) or 'none yet'}")
