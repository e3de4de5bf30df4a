"""What every launcher offers, and what it is asked. A new one is one file that does this, and a row of registry.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from drillyard.config.cluster import ClusterConfig
from drillyard.config.run import RunConfig
from drillyard.config.workload import WorkloadRunConfig
from drillyard.hardware.catalog import Catalog
from drillyard.launch.handles import Handle
from drillyard.launch.plan import Plan
from drillyard.launch.run_status import RunStatus, State


@dataclass(frozen=True)
class Capabilities:
    """What a launcher can do; a config that asks for more is refused with the launchers that can."""

    multi_node: bool = True
    gang: bool = False
    """All nodes start together or none does."""
    requeue: bool = False
    """After a lost node or preemption the scheduler itself starts the run again."""
    queue: bool = False
    array: bool = False
    """Several points of a sweep as one job."""
    image: bool = False
    sync: bool = False
    """The working directory can be carried to the nodes."""
    time_limit: bool = False
    exclude_nodes: bool = False
    dependency: bool = False


@dataclass(frozen=True)
class SweepPoint:
    """One point of a sweep: its name (a suffix of the run's) and its overrides."""

    name: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class LaunchRequest:
    """What is to be launched, all of it: a plan is a function of this value alone."""

    run: RunConfig | WorkloadRunConfig
    cluster: ClusterConfig
    facts: Catalog
    here: str
    """The working directory of this machine, absolute: relative paths of the run config begin here."""
    python: str
    """The interpreter that runs this process; what platform local starts ranks with."""
    sync: bool = False
    max_failures: int = 3
    dependency: str | None = None
    """Runs that must have succeeded before, by handle; `slurm` only."""


READ_BYTES = 4 << 20
"""The most that one `Launcher.read` returns."""


@dataclass(frozen=True)
class LogSelection:
    """Which lines of a run's logs are asked for; `launch/logs/reader.py: run_logs` answers where hosts have the
    files."""

    follow: bool = False
    """Until the run is over, and then what is left."""
    rank: int | None = None
    """Of one rank only: its own log, or its lines in its node's log, where a launcher's prefix tells them apart."""
    node: int | None = None
    tail: int | None = None
    """The last so many lines of the answer; with `follow`, the last so many so far, then what comes."""
    since: float | None = None
    """Lines written at that time or later; Unix seconds."""
    submitted_at: float | None = None
    """Not those of submissions before the one of that time, where lines tell when they were written; Unix seconds."""


@dataclass(frozen=True)
class Cancellation:
    """What came of `Launcher.cancel`."""

    status: RunStatus
    """How the run is now."""
    before: State | None
    """How it was over before, None where it went on until then."""


class Launcher(Protocol):
    """Runs of one cluster. Everything but `plan` talks to the cluster and raises UserError where it cannot."""

    capabilities: Capabilities

    def plan(self, request: LaunchRequest) -> Plan:
        """What launching `request` would write and call. Pure. Raises UserError for every mistake that can be seen."""

    def plan_sweep(self, requests: list[LaunchRequest]) -> list[Plan]:
        """One plan per point of a sweep; where the scheduler has arrays, only the first one's steps submit."""

    def submit(self, plan: Plan, *, replace: bool = False) -> Handle:
        """Execute the plan's steps. Refused where the run is there already and not over, unless `replace`."""

    def runs(self) -> list[RunStatus]:
        """The runs that the scheduler or the head host know, newest first."""

    def status(self, run: str) -> RunStatus:
        """One run. Raises UserError where it is not known, with the names that are."""

    def logs(self, run: str, wanted: LogSelection) -> Iterator[bytes]:
        """Lines in order of time, `NODE: STAMP TEXT` (of a rank `[rankR]: STAMP TEXT`), whole lines in each piece.

        Where the files are on hosts, this is one call of `launch/logs/reader.py: run_logs`, which also follows them.
        """

    def cancel(self, run: str) -> Cancellation:
        """Stop a run, which has its job's `stop_seconds` to save; nothing happens to one that is over."""

    def resume(self, run: str) -> Handle:
        """Submit a run that is over again, from its checkpoint."""

    def artifacts(self, run: str) -> list[tuple[str, int]]:
        """Files of the run directory: path relative to it, size in bytes (`launch/remote_files.py: artifacts_of`)."""

    def fetch(self, run: str, paths: list[str], destination: str) -> None:
        """Copy files of the run directory to a directory here."""

    def read(self, run: str, path: str, offset: int) -> bytes:
        """The bytes of a file of the run directory from `offset` on (below 0: the last `-offset` bytes), at most
        READ_BYTES; none where it ends or is not there yet. For what is followed and looked at: metrics.jsonl,
        events.jsonl. On hosts: `launch/remote_files.py: read_file`.
        """
