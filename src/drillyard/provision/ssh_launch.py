"""The config by which `launch` reaches what a cloud has made: what of the cluster's own file means
the same to it, and the config of platform ssh."""

from __future__ import annotations

from typing import Any

from drillyard.config.cluster import ClusterConfig

_FOR_LAUNCH = (
    *("machine", "nodes", "hardware", "storage", "image", "mounts", "python"),
    *("processes_per_node", "environment", "network_stack"),
)
"""Keys of the file that mean the same to `launch`."""


def launch_basis(cluster: ClusterConfig, platform: str) -> dict[str, Any]:
    """The config of `platform`, without that platform's own section."""
    given = cluster.model_dump(mode="json", include={*_FOR_LAUNCH})
    given["storage"] = {key: each for key, each in given["storage"].items() if each is not None}
    kept = {key: given[key] for key in _FOR_LAUNCH if given[key] not in (None, [], {})}
    return {"name": cluster.name, "platform": platform, "nodes": cluster.nodes, **kept}


def ssh_launch_settings(
    cluster: ClusterConfig, *, user: str, identity_file: str | None, directory: str | None
) -> dict[str, Any]:
    """The config without what is only known once the nodes are there: their addresses."""
    ssh = {"user": user, "identity_file": identity_file, "directory": directory}
    kept = {key: value for key, value in ssh.items() if value is not None}
    return {**launch_basis(cluster, "ssh"), "ssh": kept}
