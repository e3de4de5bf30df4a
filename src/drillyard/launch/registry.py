"""The launchers: a row each. A new one is one file and one row."""

from __future__ import annotations

import importlib
from dataclasses import fields
from typing import NamedTuple

from drillyard.config.cluster import ClusterConfig
from drillyard.errors import UserError
from drillyard.launch.launcher import Capabilities, Launcher
from drillyard.launch.programs import Programs


class LauncherRow(NamedTuple):
    """Where a platform's launcher is, and what it can do."""

    module: str
    capabilities: Capabilities


LAUNCHERS = {
    "local": LauncherRow("drillyard.launch.hosts.local", Capabilities(multi_node=False)),
    "ssh": LauncherRow("drillyard.launch.hosts.ssh", Capabilities(gang=True, image=True, sync=True)),
    "slurm": LauncherRow(
        "drillyard.launch.slurm.launcher",
        Capabilities(
            gang=True,
            requeue=True,
            queue=True,
            array=True,
            image=True,
            sync=True,
            time_limit=True,
            exclude_nodes=True,
            dependency=True,
        ),
    ),
    "vertex": LauncherRow(
        "drillyard.launch.vertex.launcher", Capabilities(gang=True, queue=True, image=True, time_limit=True)
    ),
}


def row_of(platform: str) -> LauncherRow:
    """The launcher of a platform. UserError where there is none."""
    if platform not in LAUNCHERS:
        raise UserError(f"platform {platform} cannot be launched on yet; these can: {', '.join(LAUNCHERS)}")
    return LAUNCHERS[platform]


def launcher_for(cluster: ClusterConfig, programs: Programs | None = None) -> Launcher:
    """The launcher of `cluster`. Each module has `launcher(cluster, programs)`. UserError where there is none."""
    row = row_of(cluster.platform)
    launcher: Launcher = importlib.import_module(row.module).launcher(cluster, programs or Programs())
    return launcher


def require(platform: str, capability: str, wanted_by: str) -> None:
    """Refuse what `wanted_by` asks for where the platform's launcher lacks it, naming those that have it."""
    assert capability in {each.name for each in fields(Capabilities)}, capability
    if not getattr(LAUNCHERS[platform].capabilities, capability):
        able = [name for name, row in LAUNCHERS.items() if getattr(row.capabilities, capability)]
        raise UserError(f"{wanted_by}: platform {platform} cannot do that ({capability}); these can: {', '.join(able)}")
