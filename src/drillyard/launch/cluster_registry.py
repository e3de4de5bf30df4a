"""The clusters that this user has launched on: an address book, so that `runs` needs no `--cluster`.

`$XDG_CONFIG_HOME/drillyard/clusters/NAME.yaml` (default ~/.config) is the cluster config as `launch` had it last, with
every default spelled out and `${env:NAME}` as text. It says where to ask; what runs are doing only the scheduler knows.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from drillyard.config import ClusterConfig, load_cluster_config, resolved_text
from drillyard.errors import UserError
from drillyard.launch.completion_cache import write_atomically
from drillyard.launch.remote_files import print_notice

HERE = Path("cluster.yaml")


@dataclass(frozen=True)
class UnreadableCluster:
    """A cluster of the address book whose file cannot be used."""

    name: str
    problem: str


def clusters_directory() -> Path:
    """Where the address book is."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "drillyard" / "clusters"


def remember_cluster(cluster: ClusterConfig) -> Callable[[], None]:
    """Put a cluster into the address book, in place of an earlier one of its name; returns what takes that back.

    What cannot be written is said: the launch goes on without.
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

    def take_back() -> None:
        if before is None:
            path.unlink(missing_ok=True)
        else:
            write_atomically(path, before)

    return take_back


def known_clusters() -> tuple[list[ClusterConfig], list[UnreadableCluster]]:
    """The clusters of the address book by name, and those whose file cannot be used (of another version, damaged)."""
    clusters, unreadable = [], []
    for path in sorted(clusters_directory().glob("*.yaml")):
        try:
            clusters.append(load_cluster_config(path, resolve_environment=False))
        except UserError as error:
            unreadable.append(UnreadableCluster(path.stem, f"{error}\nlaunch on it again, or delete the file"))
    return clusters, unreadable


def clusters_to_search(file: Path | None) -> tuple[list[ClusterConfig], list[UnreadableCluster]]:
    """Where runs may be: the cluster of `file`, else those of the address book, else that of ./cluster.yaml.

    Raises UserError where there is none.
    """
    if file is not None:
        return [load_cluster_config(file, resolve_environment=False)], []
    clusters, unreadable = known_clusters()
    if not clusters and not unreadable:
        if not HERE.is_file():
            raise UserError(
                "no cluster is known yet: nothing was launched from this machine, and there is no cluster.yaml here\n"
                "give --cluster FILE, or launch a run: drillyard launch run.yaml --cluster cluster.yaml"
            )
        clusters = [load_cluster_config(HERE, resolve_environment=False)]
    return clusters, unreadable
