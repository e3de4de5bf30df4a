"""Platform `ssh`: machines of one's own, or of a cloud without a scheduler, that OpenSSH reaches.

The first of `ssh.hosts` is node 0 and the head host. Runs need a directory that all hosts share.
"""

from __future__ import annotations

import posixpath

from drillyard.config.cluster import ClusterConfig
from drillyard.launch.hosts.launcher import HostsLauncher
from drillyard.launch.hosts.plan import HostLayout, absolute
from drillyard.launch.launcher import LaunchRequest
from drillyard.launch.prepared_run import ClusterPaths, image_of
from drillyard.launch.programs import Host, Programs
from drillyard.launch.registry import LAUNCHERS


def launcher(cluster: ClusterConfig, programs: Programs) -> HostsLauncher:
    """The launcher of an ssh cluster."""
    hosts = hosts_of(cluster)
    return HostsLauncher(
        cluster, programs, LAUNCHERS["ssh"].capabilities, hosts, lambda request: layout(cluster, hosts, request)
    )


def hosts_of(cluster: ClusterConfig) -> tuple[Host, ...]:
    """The hosts, in order of their ranks."""
    ssh = cluster.ssh
    assert ssh is not None
    return tuple(Host(name, ssh.user, ssh.port, ssh.identity_file, ssh.config_file) for name in ssh.hosts)


def layout(cluster: ClusterConfig, hosts: tuple[Host, ...], request: LaunchRequest | None) -> HostLayout:
    """Where things are on the hosts; without a request, what does not depend on one."""
    ssh = cluster.ssh
    assert ssh is not None
    leader = ssh.rendezvous_host or ssh.hosts[0].rpartition("@")[2]
    if request is None:
        return HostLayout(hosts, leader, ClusterPaths("", "", ""), False, "")
    project = absolute(ssh.directory or request.here, "ssh.directory")
    storage = cluster.storage.directory
    root = absolute(storage, "storage.directory") if storage else project
    output = posixpath.normpath(posixpath.join(root, request.run.output))
    image = image_of(request.run, cluster)
    python = cluster.python or ("python3" if image else posixpath.join(project, ".venv/bin/python"))
    shared = len(hosts) == 1 or _below(project, root) or _below(output, project)
    return HostLayout(
        hosts, leader, ClusterPaths(project, output, python), shared, f"there already: {project} on every host"
    )


def _below(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")
