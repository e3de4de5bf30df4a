"""Platforms `local` and `ssh`: their settings in cluster.yaml, and what holds for every such
cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from drillyard.config.platforms import (
    Capabilities,
    HostAddress,
    Login,
    PlatformFacts,
    PlatformSection,
    SshHost,
)
from drillyard.config.problems import Problem
from drillyard.config.strict_model import LocalFile


class SshConfig(PlatformSection):
    """Machines that are reached by ssh."""

    hosts: Annotated[list[SshHost], Field(min_length=1)] = Field(
        description="Host names or addresses, the first one is rank 0's: [node-0, node-1].",
        examples=[["node-0", "node-1"]],
    )
    user: Login | None = Field(
        default=None,
        description=(
            "Login, which begins with a letter or digit; default: what the ssh configuration says."
        ),
    )
    port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        default=None,
        description="Port of the ssh server; default: what the ssh configuration says, else 22.",
    )
    identity_file: LocalFile | None = Field(
        default=None, description="Private key; default: what the ssh configuration says."
    )
    directory: str | None = Field(
        default=None, description="Directory of this project on the hosts; default: as here."
    )
    config_file: LocalFile | None = Field(
        default=None, description="OpenSSH configuration file; default: ~/.ssh/config."
    )
    rendezvous_host: HostAddress | None = Field(
        default=None,
        description=(
            "Name or address under which the hosts reach the first one; default: as `hosts` has it."
        ),
    )

    @property
    def project_directory(self) -> str | None:
        return self.directory

    @property
    def head_host(self) -> str:
        return self.hosts[0]

    def problems(self, nodes: int) -> Iterator[Problem]:
        if nodes != len(self.hosts):
            message = (
                f"found {nodes}, but ssh.hosts names {len(self.hosts)}; write nodes:"
                f" {len(self.hosts)}"
            )
            yield Problem(("nodes",), message)
        for host in dict.fromkeys(host for host in self.hosts if self.hosts.count(host) > 1):
            yield Problem(("ssh", "hosts"), f"'{host}' is named more than once")


LOCAL = PlatformFacts(
    optional=("machine", "storage", "python"),
    max_nodes=1,
    machines="own",
    is_this_machine=True,
    capabilities=Capabilities(multi_node=False),
    instead_of_provisioning=(
        "this machine is there: start a run with `drillyard train`, or `drillyard launch`"
    ),
    launcher="drillyard.launch.hosts.launcher:HostsLauncher",
)
SSH = PlatformFacts(
    required=("ssh",),
    optional=("machine", "storage", "image", "mounts", "python"),
    section=SshConfig,
    machines="own",
    capabilities=Capabilities(image=True, sync=True),
    instead_of_provisioning=(
        "its hosts are there: `drillyard cluster status` looks at them, and `drillyard launch`"
        " starts runs on them"
    ),
    cluster_check="drillyard.launch.hosts.cluster_check:check_hosts",
    launcher="drillyard.launch.hosts.launcher:HostsLauncher",
)
