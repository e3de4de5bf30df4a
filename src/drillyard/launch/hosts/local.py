"""Platform `local`: this machine, as an ssh cluster of one host without the ssh.

The run goes on when the terminal is closed, and is found again from any other one.
"""

from __future__ import annotations

import os
import posixpath
import sys

from drillyard.config.cluster import ClusterConfig
from drillyard.launch.hosts.launcher import HostsLauncher
from drillyard.launch.hosts.plan import HostLayout
from drillyard.launch.launcher import LaunchRequest
from drillyard.launch.prepared_run import ClusterPaths
from drillyard.launch.programs import Host, Programs
from drillyard.launch.registry import LAUNCHERS


def launcher(cluster: ClusterConfig, programs: Programs) -> HostsLauncher:
    """The launcher of this machine."""
    return HostsLauncher(
        cluster, programs, LAUNCHERS["local"].capabilities, [Host()], lambda request: layout(cluster, request)
    )


def layout(cluster: ClusterConfig, request: LaunchRequest | None) -> HostLayout:
    """Where things are; the interpreter that launches starts the agent and, where none is named, the ranks."""
    if request is None:
        return HostLayout((Host(),), "127.0.0.1", ClusterPaths("", "", "", sys.executable), True, "")
    root = cluster.storage.directory or request.here
    output = posixpath.normpath(posixpath.join(request.here, os.path.expanduser(root), request.run.output))
    place = ClusterPaths(request.here, output, cluster.python or request.python, request.python)
    return HostLayout((Host(),), "127.0.0.1", place, True, f"there already: {request.here} on this machine")
