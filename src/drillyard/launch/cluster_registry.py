"""The clusters that this user has launched on, and the runs on all of them.

`$XDG_CONFIG_HOME/drillyard/clusters/NAME.yaml` (default ~/.config) is the cluster config of the
last launch there, with every default spelled out and `${env:NAME}` as text, so that `runs` needs no
`--cluster`. The status of a run is read from its cluster: all clusters are read at once, and one
that does not answer hides no other.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drillyard.config.cluster import ClusterConfig
from drillyard.config.load import load_cluster_config, resolved_text
from drillyard.errors import ConfigError, NotFoundError, UserError
from drillyard.launch.completion_cache import remember_runs
from drillyard.launch.launched_from import NameGiven, this_directory
from drillyard.launch.launcher import Launcher, launcher_for
from drillyard.launch.remote_files import print_notice
from drillyard.launch.request import LogSelection
from drillyard.launch.run_status import Handle, RunStatus, parse_handle
from drillyard.programs import parallel_map
from drillyard.safe_files import make_directory, replace_file

DEFAULT_FILE = Path("cluster.yaml")
_MAX_PARALLEL = 16


def clusters_directory() -> Path:
    return (
        Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        / "drillyard"
        / "clusters"
    )


def remember_cluster(cluster: ClusterConfig) -> Callable[[], None]:
    """Register a cluster, replacing an earlier one of its name; returns a function that undoes it,
    unless another launch has registered one of that name since.

    Prints a notice where the earlier one is in another place, and where the file cannot be written:
    the launch continues without.
    """
    path, text = clusters_directory() / f"{cluster.name}.yaml", resolved_text(cluster)
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else None
        if before != text:
            _report_other_place(cluster, path)
            make_directory(path.parent, parents=True)
            replace_file(path, text.encode(), mode=0o600)
    except OSError as error:
        print_notice(
            f"{clusters_directory()}: cannot be written ({error.strerror}); `drillyard runs` will"
            " need --cluster FILE"
        )
        return lambda: None

    def undo() -> None:
        if before == text or not path.exists() or path.read_text(encoding="utf-8") != text:
            return
        if before is None:
            path.unlink()
        else:
            replace_file(path, before.encode(), mode=0o600)

    return undo


def _report_other_place(cluster: ClusterConfig, path: Path) -> None:
    """Print a notice where the file of a cluster's name has one in another place, whose runs no
    command without --cluster finds from now on."""
    # Damaged, or of another version.
    with contextlib.suppress(UserError):
        earlier = load_cluster_config(path, resolve_environment=False) if path.exists() else cluster
        if _place(earlier) != _place(cluster):
            print_notice(
                f"cluster {cluster.name}: was {_place(earlier)} until now and is"
                f" {_place(cluster)}: `drillyard runs` finds the earlier one's runs by --cluster"
                " FILE only; two clusters need two names"
            )


def _place(cluster: ClusterConfig) -> str:
    """Where the runs of a cluster are, in words: `slurm, login.lab`."""
    location = cluster.location
    words = [cluster.platform, cluster.section.head_host, getattr(cluster.section, "context", "")]
    words += [] if location is None else [location.project or "", location.region or ""]
    return ", ".join(filter(None, words))


def known_clusters() -> tuple[list[ClusterConfig], dict[str, str]]:
    """The registered clusters, and by name the problems of those whose file cannot be used (other
    version, damaged)."""
    clusters, unreadable = [], {}
    for path in sorted(clusters_directory().glob("*.yaml")):
        try:
            clusters.append(load_cluster_config(path, resolve_environment=False))
        except UserError as error:
            unreadable[path.stem] = f"{error}\nlaunch on it again, or delete the file"
    return clusters, unreadable


def cluster_option(file: Path | None) -> str:
    """` --cluster FILE` that holds in every directory; empty where no file was named."""
    return "" if file is None else f" --cluster {shlex.quote(str(file.absolute()))}"


@dataclass(frozen=True)
class FoundRun:
    """A run and the launcher of its cluster. `given`: the command, where it gave the bare name."""

    handle: Handle
    cluster: ClusterConfig
    launcher: Launcher[Any]
    given: NameGiven | None = None
    file: Path | None = None
    """The cluster config that the user named for it; None: a registered cluster."""

    @property
    def words(self) -> str:
        """The run as a command on it names it, from every directory."""
        return f"{self.handle}{cluster_option(self.file)}"

    def status(self) -> RunStatus:
        return self.launcher.status(self.handle.run)

    def logs(self, selection: LogSelection, status: RunStatus | None = None) -> Iterator[bytes]:
        """The selected lines; with `follow`, from the newest submission on. `status`: a recent one,
        where known."""
        if selection.follow:
            selection = replace(selection, submitted_at=(status or self.status()).submitted_at)
        return self.launcher.logs(self.handle.run, selection)


class Clusters:
    """The clusters to search for runs; `unreadable`: problems of those whose config cannot be used,
    by name; `options`: those of the command line that find the clusters again."""

    def __init__(
        self,
        clusters: Sequence[ClusterConfig],
        unreadable: Mapping[str, str] | None = None,
        file: Path | None = None,
    ) -> None:
        self._clusters = list(clusters)
        self._file = file
        self._unreadable = dict(unreadable or {})
        self._launchers: dict[str, Launcher[Any]] = {}

    def all_runs(self) -> tuple[list[RunStatus], dict[str, str]]:
        """The runs of all clusters that answered, newest first, and the errors of the others, by
        cluster name. All are read in parallel."""
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
        return runs, silent

    def _runs_of(self, cluster: ClusterConfig) -> list[RunStatus] | UserError:
        try:
            return self._launcher(cluster).runs()
        except UserError as error:
            return error

    def find(self, texts: Sequence[str]) -> list[FoundRun]:
        """The runs of these handles or bare names, in their order.

        A bare name is looked up on all clusters, which are read once. Raises UserError for an
        unknown cluster, a run that no cluster has, and a name that several have.
        """
        is_read = len(self._clusters) > 1 and any("://" not in text for text in texts)
        runs, silent = self.all_runs() if is_read else ([], self._unreadable)
        return [self._found(text, runs, silent) for text in texts]

    def _found(self, text: str, runs: Sequence[RunStatus], silent: Mapping[str, str]) -> FoundRun:
        if "://" in text:
            handle = parse_handle(text)
        elif len(self._clusters) == 1:
            # The only cluster has its own message for a name that it does not have.
            handle = Handle(self._clusters[0].platform, self._clusters[0].name, text)
        else:
            handle = self._only(text, runs, silent)
        for cluster in self._clusters:
            if (cluster.platform, cluster.name) == (handle.platform, handle.cluster):
                given = None
                if "://" not in text:
                    given = NameGiven(this_directory(), cluster_option(self._file))
                return FoundRun(handle, cluster, self._launcher(cluster), given, self._file)
        if handle.cluster in self._unreadable:
            raise ConfigError(self._unreadable[handle.cluster])
        known = (
            ", ".join(f"{cluster.platform}://{cluster.name}" for cluster in self._clusters)
            or "none"
        )
        raise NotFoundError(
            f"{handle}: cluster {handle.platform}://{handle.cluster} is not known here (known:"
            f" {known})\ngive its config: --cluster FILE"
        )

    def _only(self, name: str, runs: Sequence[RunStatus], silent: Mapping[str, str]) -> Handle:
        handles = sorted({status.handle for status in runs if status.handle.run == name})
        if len(handles) > 1:
            several = "\n".join(str(handle) for handle in handles)
            raise UserError(
                f"{name}: several clusters have a run of that name; name the one you"
                f" mean:\n{several}"
            )
        if not handles:
            asked = [cluster.name for cluster in self._clusters if cluster.name not in silent]
            without = "".join(
                f"\nno answer from {each}: {_first_line(why)}" for each, why in silent.items()
            )
            raise NotFoundError(
                f"{name}: no such run (clusters asked: {', '.join(asked) or 'none'}); see drillyard"
                f" runs list{without}"
            )
        return handles[0]

    def _launcher(self, cluster: ClusterConfig) -> Launcher[Any]:
        if cluster.name not in self._launchers:
            self._launchers[cluster.name] = launcher_for(cluster)
        return self._launchers[cluster.name]


def _first_line(why: str) -> str:
    """The first line of a message, with the next where the first ends with a colon."""
    first, *more = why.splitlines()
    return f"{first} {more[0].strip()}" if first.endswith(":") and more else first


def clusters_to_search(file: Path | None) -> Clusters:
    """The cluster of `file`, else the registered ones, else that of ./cluster.yaml. NotFoundError
    where none is."""
    if file is not None:
        return Clusters([load_cluster_config(file, resolve_environment=False)], file=file)
    given, (clusters, unreadable) = None, known_clusters()
    if not clusters and not unreadable:
        if not DEFAULT_FILE.is_file():
            raise NotFoundError(
                "no cluster is known yet: nothing was launched from this machine, and there is no"
                " cluster.yaml here\ngive --cluster FILE, or launch a run: drillyard launch"
                " run.yaml --cluster cluster.yaml"
            )
        clusters = [load_cluster_config(DEFAULT_FILE, resolve_environment=False)]
        given = DEFAULT_FILE
    return Clusters(clusters, unreadable, given)


def find_launched_run(run: str, file: Path | None) -> FoundRun:
    """The run of a handle or name. Raises UserError where there is none, or where several clusters
    have one."""
    (found,) = clusters_to_search(file).find([run])
    return found
