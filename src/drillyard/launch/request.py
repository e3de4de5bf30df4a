"""Requests to a launcher: a run to launch, a selection of log lines; and the findings about a
request."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from drillyard.config.cluster import ClusterConfig
from drillyard.config.problems import Path, Problem
from drillyard.config.run import RunConfig, WorkloadConfig, WorkloadRunConfig
from drillyard.errors import ConfigError
from drillyard.hardware.catalog import Catalog
from drillyard.hardware.machines import Machine
from drillyard.launch.run_status import RunStatus, State
from drillyard.plan_files import PlanFile


@dataclass(frozen=True)
class LaunchRequest:
    """One run to launch. A plan is a function of this value alone."""

    run: RunConfig | WorkloadRunConfig
    cluster: ClusterConfig
    facts: Catalog
    here: str
    """The working directory of this machine, absolute: relative paths of the run config begin
    here."""
    python: str
    """The interpreter of this process; platform local starts ranks with it."""
    sync: bool = False
    max_failures: int = 3
    dependency: str | None = None
    """Handle of the run that must succeed before this one starts."""
    files: tuple[PlanFile, ...] = ()
    """Files of a workload that are not on this machine's disk: made here, or of this package. Paths
    below {launch_directory}/files."""
    exclude: tuple[str, ...] = ()
    """Nodes that the run must not use, by the scheduler's names."""

    @property
    def workload(self) -> WorkloadConfig | None:
        """The command to run; None: the run is Drillyard's trainer."""
        return self.run.workload if isinstance(self.run, WorkloadRunConfig) else None

    @property
    def processes_per_node(self) -> int | None:
        """Ranks per node as a config sets them; None: one per accelerator."""
        own = self.run.processes_per_node if isinstance(self.run, WorkloadRunConfig) else None
        return own or self.cluster.processes_per_node

    @property
    def uses_gpus(self) -> bool:
        """False for a training run on CPUs."""
        return not (isinstance(self.run, RunConfig) and self.run.training.device == "cpu")

    @property
    def image(self) -> str | None:
        """The container image of the run, if it has one."""
        return (self.workload and self.workload.image) or self.cluster.image

    @property
    def image_setting(self) -> tuple[ConfigName, str]:
        """Config and key of the setting that names the image."""
        return (
            ("run", "workload.image")
            if self.workload and self.workload.image
            else ("cluster", "image")
        )


@dataclass(frozen=True)
class LogSelection:
    """The lines of a run's logs to return."""

    follow: bool = False
    """Continue until the run is over."""
    rank: int | None = None
    """Lines of one rank only: its own log, or its lines in its node's log, recognised by a
    launcher's prefix."""
    node: int | None = None
    tail: int | None = None
    """The last so many lines; with `follow`, the last so many at first, then new ones."""
    since: float | None = None
    """Lines written at that time or later; Unix seconds."""
    submitted_at: float | None = None
    """Omit lines of submissions before the one of that time, where lines carry times; Unix
    seconds."""


def parse_since(text: str, now: float) -> float:
    """The Unix time of `10m` (so long before `now`) or of a time stamp; without a zone it is UTC.

    Raises ConfigError for another text.
    """
    from drillyard.loglines.stamps import STYLES, Stamps

    ago = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|min|h|d)", text)
    if ago is not None:
        return now - float(ago[1]) * {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}[ago[2]]
    stamp = text.encode()
    if re.fullmatch(STYLES["iso"], stamp):
        (microseconds,) = Stamps().convert("iso", [stamp])
        if microseconds is not None:
            return microseconds / 1e6
    raise ConfigError(
        f"--since {text}: is not a time; write 90s, 10m, 2h, 3d, or 2026-01-31T12:00:00Z"
    )


@dataclass(frozen=True)
class Cancellation:
    """The result of `run_changes.cancel`."""

    status: RunStatus
    """The run's status now."""
    before: State | None
    """The state in which the run was already over; None where it was not."""


ConfigName = Literal["run", "cluster"]


@dataclass(frozen=True)
class LaunchFinding:
    """A finding about the value at `problem.path` of a config; one that is not `fatal` is a
    warning."""

    config: ConfigName
    problem: Problem
    fatal: bool = True


Check = Callable[[LaunchRequest, Machine | None], Iterator[LaunchFinding]]
"""Checks a request against its machine; None where no machine is named or it is not in the
catalog."""


def error(config: ConfigName, key: str | Path, message: str) -> LaunchFinding:
    """A mistake in the value at `key`, dotted or in parts."""
    return LaunchFinding(config, Problem(_path(key), message))


def warning(config: ConfigName, key: str | Path, message: str) -> LaunchFinding:
    """A likely mistake in the value at `key`, dotted or in parts."""
    return LaunchFinding(config, Problem(_path(key), message), fatal=False)


def _path(key: str | Path) -> Path:
    parts = key.split(".") if isinstance(key, str) else key
    return tuple(
        int(part) if isinstance(part, str) and part.isdecimal() else part for part in parts
    )
