"""The clusters that this user has launched on, and the runs on all of them.

`$XDG_CONFIG_HOME/drillyard/clusters/NAME.yaml` (default ~/.config) is the cluster config of the last launch there, with
every default spelled out and `${env:NAME}` as text, so that `runs` needs no `--cluster`. The status of a run is read
from its cluster: all clusters are read at once, and one that does not answer hides no other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from drillyard.config import ClusterConfig, load_cluster_config, resolved_text
from drillyard.errors import NotFoundError, UserError
from drillyard.launch.completion_cache import remember_runs, write_atomically
from drillyard.launch.launcher import Launcher, launcher_for
from drillyard.launch.programs import parallel_map
from drillyard.launch.remote_files import print_notice
from drillyard.launch.request import LogSelection
from drillyard.launch.run_status import Handle, RunStatus, parse_handle

DEFAULT_FILE = Path("cluster.yaml")
_MAX_PARALLEL = 16


@dataclass(frozen=True)
class UnreadableCluster:
    """A registered cluster whose file cannot be used."""

    name: str
    problem: str


def clusters_directory() -> Path:
    """The directory of the registered clusters' configs."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "drillyard" / "clusters"


def remember_cluster(cluster: ClusterConfig) -> Callable[[], None]:
    """Register a cluster, replacing an earlier one of its name; returns a function that undoes it.

    Prints a notice where the file cannot be written: the launch continues without.
    """
    path, text = clusters_directory() / f"{cluster.name}.yaml", resolved_text(cluster)
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else None
        write_atomically(path, text)
    except OSError as error:
        print_notice(
            f"{clusters_directory()}: cannot be written ({error.strerror}); `drillyard runs` will need --cluster FILE"
        )
        return lambda: None

    def undo() -> None:
        if before is None:
            path.unlink(missing_ok=True)
        else:
            write_atomically(path, before)

    return undo


def known_clusters() -> tuple[list[ClusterConfig], list[UnreadableCluster]]:
    """The registered clusters by name, and those whose file cannot be used (of another version, damaged)."""
    clusters, unreadable = [], []
    for path in sorted(clusters_directory().glob("*.yaml")):
        try:
            clusters.append(load_cluster_config(path, resolve_environment=False))
        except UserError as error:
            unreadable.append(UnreadableCluster(path.stem, f"{error}\nlaunch on it again, or delete the file"))
    return clusters, unreadable


@dataclass(frozen=True)
class FoundRun:
    """A run and the launcher of its cluster."""

    handle: Handle
    cluster: ClusterConfig
    launcher: Launcher

    def status(self) -> RunStatus:
        """The run's status now."""
        return self.launcher.status(self.handle.run)

    def logs(self, selection: LogSelection, status: RunStatus | None = None) -> Iterator[bytes]:
        """The selected lines; with `follow`, from the newest submission on. `status`: a recent one, where known."""
        if selection.follow:
            selection = replace(selection, submitted_at=(status or self.status()).submitted_at)
        return self.launcher.logs(self.handle.run, selection)


@dataclass(frozen=True)
class RunListing:
    """The runs of all clusters that answered, newest first, and the errors of the others, by cluster name."""

    runs: list[RunStatus]
    silent: dict[str, str]


class Clusters:
    """The clusters to search for runs."""

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
        """The runs of all clusters, read in parallel."""
        answers = parallel_map(self._runs_of, self._clusters, _MAX_PARALLEL)
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
        """The runs of these handles or bare names, in their order.

        A bare name is looked up on all clusters, which are read once. Raises UserError for an unknown cluster, a run
        that no cluster has, and a name that several have.
        """
        listing = self.all_runs() if len(self._clusters) > 1 and any("://" not in text for text in texts) else None
        return [self._find(text, listing) for text in texts]

    def _find(self, text: str, listing: RunListing | None) -> FoundRun:
        if "://" in text:
            handle = parse_handle(text)
            return FoundRun(handle, *self._cluster_of(handle))
        if listing is None and self._clusters:
            # The only cluster has its own message for a name that it does not have.
            handle = Handle(self._clusters[0].platform, self._clusters[0].name, text)
            return FoundRun(handle, *self._cluster_of(handle))
        runs = [] if listing is None else listing.runs
        handles = sorted({status.handle for status in runs if status.handle.run == text})
        if len(handles) > 1:
            several = "\n".join(str(handle) for handle in handles)
            raise UserError(f"{text}: several clusters have a run of that name; name the one you mean:\n{several}")
        if not handles:
            silent = dict(self._unreadable) if listing is None else listing.silent
            asked = ", ".join(cluster.name for cluster in self._clusters if cluster.name not in silent) or "none"
            without = "".join(f"\nno answer from {name}: {_first_line(why)}" for name, why in silent.items())
            raise NotFoundError(f"{text}: no such run (clusters asked: {asked}); see drillyard runs list{without}")
        return FoundRun(handles[0], *self._cluster_of(handles[0]))

    def _cluster_of(self, handle: Handle) -> tuple[ClusterConfig, Launcher]:
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


def _first_line(why: str) -> str:
    """The first line of a message, with the next where the first ends with a colon."""
    first, *more = why.splitlines()
    return f"{first} {more[0].strip()}" if first.endswith(":") and more else first


def clusters_to_search(file: Path | None) -> Clusters:
    """The cluster of `file`, else the registered ones, else that of ./cluster.yaml.

    Raises UserError where there is none.
    """
    if file is not None:
        return Clusters([load_cluster_config(file, resolve_environment=False)])
    clusters, unreadable = known_clusters()
    if not clusters and not unreadable:
        if not DEFAULT_FILE.is_file():
            raise UserError(
                "no cluster is known yet: nothing was launched from this machine, and there is no cluster.yaml here\n"
                "give --cluster FILE, or launch a run: drillyard launch run.yaml --cluster cluster.yaml"
            )
        clusters = [load_cluster_config(DEFAULT_FILE, resolve_environment=False)]
    return Clusters(clusters, unreadable)


def find_launched_run(run: str, file: Path | None) -> FoundRun:
    """The run of a handle or name. Raises UserError where there is none, or where several clusters have one."""
    (found,) = clusters_to_search(file).find([run])
    return found
