"""Platform `local`: this machine, as an ssh cluster of one host without the ssh.

The run goes on when the terminal is closed, and is found again from any other one.
"""

from __future__ import annotations

import os
import posixpath
import sys

from drillyard.config.cluster import ClusterConfig
from drillyard.launch.hosts.launcher import HostsLauncher
from drillyard.launch.hosts.plan import Layout
from drillyard.launch.job import Place
from drillyard.launch.launcher import Request
from drillyard.launch.programs import Host, Programs
from drillyard.launch.registry import LAUNCHERS


def launcher(cluster: ClusterConfig, programs: Programs) -> HostsLauncher:
    """The launcher of this machine."""
    return HostsLauncher(
        cluster, programs, LAUNCHERS["local"].capabilities, [Host()], lambda request: layout(cluster, request)
    )


def layout(cluster: ClusterConfig, request: Request | None) -> Layout:
    """Where things are; the interpreter that launches starts the agent and, where none is named, the ranks."""
    if request is None:
        return Layout((Host(),), "127.0.0.1", Place("", "", "", sys.executable), True, "")
    root = cluster.storage.directory or request.here
    output = posixpath.normpath(posixpath.join(request.here, os.path.expanduser(root), request.run.output))
    place = Place(request.here, output, cluster.python or request.python, request.python)
    return Layout((Host(),), "127.0.0.1", place, True, f"there already: {request.here} on this machine")
