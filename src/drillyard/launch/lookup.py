"""Runs on several clusters: all asked at once, and which run a name on the command line means.

A cluster that does not answer never hides the others: it is told beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from drillyard.config import ClusterConfig
from drillyard.errors import NotFoundError, UserError
from drillyard.launch.cluster_registry import UnreadableCluster
from drillyard.launch.completion_cache import remember_runs
from drillyard.launch.handles import Handle, parse_handle
from drillyard.launch.launcher import Launcher
from drillyard.launch.registry import launcher_for
from drillyard.launch.run_status import RunStatus

_AT_ONCE = 16


@dataclass(frozen=True)
class FoundRun:
    """A run and who can be asked about it."""

    handle: Handle
    cluster: ClusterConfig
    launcher: Launcher


@dataclass(frozen=True)
class RunListing:
    """The runs of all clusters that answered, newest first, and what the others said, by cluster name."""

    runs: list[RunStatus]
    silent: dict[str, str]


class Clusters:
    """The clusters on which runs are looked for."""

    def __init__(
        self,
        clusters: Sequence[ClusterConfig],
        unreadable: Sequence[UnreadableCluster] = (),
        launcher: Callable[[ClusterConfig], Launcher] = launcher_for,
    ) -> None:
        self._clusters = list(clusters)
        self._unreadable = {each.name: each.problem for each in unreadable}
        self._make = launcher
        self._launchers: dict[str, Launcher] = {}

    def all_runs(self) -> RunListing:
        """All runs, all clusters asked at once."""
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            answers = list(threads.map(self._runs_of, self._clusters))
        silent = dict(self._unreadable)
        runs: list[RunStatus] = []
        for cluster, answer in zip(self._clusters, answers, strict=True):
            if isinstance(answer, UserError):
                silent[cluster.name] = str(answer)
            else:
                remember_runs(cluster.name, [status.handle for status in answer])
                runs += answer
        runs.sort(key=lambda status: (-(status.submitted_at or 0.0), status.handle))
        return RunListing(runs, silent)

    def find(self, texts: Sequence[str]) -> list[FoundRun]:
        """The runs that handles or bare names mean, in their order.

        A bare name is looked up on all clusters, which are asked once. Raises UserError for a cluster that is not
        known, a run that is nowhere, and a name that several clusters have.
        """
        listing = self.all_runs() if len(self._clusters) > 1 and any("://" not in text for text in texts) else None
        return [self._find(text, listing) for text in texts]

    def _find(self, text: str, listing: RunListing | None) -> FoundRun:
        if "://" in text:
            handle = parse_handle(text)
            return FoundRun(handle, *self._asked_by(handle))
        if listing is None and self._clusters:
            # The only cluster says itself that it does not know a run.
            handle = Handle(self._clusters[0].platform, self._clusters[0].name, text)
            return FoundRun(handle, *self._asked_by(handle))
        runs = [] if listing is None else listing.runs
        handles = sorted({status.handle for status in runs if status.handle.run == text})
        if len(handles) > 1:
            several = "\n".join(str(handle) for handle in handles)
            raise UserError(f"{text}: several clusters have a run of that name; name the one you mean:\n{several}")
        if not handles:
            silent = dict(self._unreadable) if listing is None else listing.silent
            asked = ", ".join(cluster.name for cluster in self._clusters if cluster.name not in silent) or "none"
            without = "".join(f"\nno answer from {name}: {_gist(why)}" for name, why in silent.items())
            raise NotFoundError(f"{text}: no such run (clusters asked: {asked}); see drillyard runs list{without}")
        return FoundRun(handles[0], *self._asked_by(handles[0]))

    def _asked_by(self, handle: Handle) -> tuple[ClusterConfig, Launcher]:
        for cluster in self._clusters:
            if (cluster.platform, cluster.name) == (handle.platform, handle.cluster):
                return cluster, self._launcher(cluster)
        if handle.cluster in self._unreadable:
            raise UserError(self._unreadable[handle.cluster])
        known = ", ".join(f"{cluster.platform}://{cluster.name}" for cluster in self._clusters) or "none"
        raise UserError(
            f"{handle}: cluster {handle.platform}://{handle.cluster} is not known here (known: {known})\n"
            "give its config: --cluster FILE"
        )

    def _runs_of(self, cluster: ClusterConfig) -> list[RunStatus] | UserError:
        try:
            return self._launcher(cluster).runs()
        except UserError as error:
            return error

    def _launcher(self, cluster: ClusterConfig) -> Launcher:
        if cluster.name not in self._launchers:
            self._launchers[cluster.name] = self._make(cluster)
        return self._launchers[cluster.name]


def _gist(why: str) -> str:
    """The first line of a message, with the next where it only announces that."""
    first, *more = why.splitlines()
    return f"{first} {more[0].strip()}" if first.endswith(":") and more else first
