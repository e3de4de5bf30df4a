"""Platform `nebius`: its settings in cluster.yaml, and what holds for every such cluster.

The machines, or the cluster of Managed Kubernetes, are made by Terraform; `up` writes a config of
platform `ssh` or `kubernetes` for `launch`: nothing is launched with the file of platform `nebius`
itself.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from drillyard.allowed_values import Allowed
from drillyard.config.platforms import Login, PlatformFacts, PlatformSection
from drillyard.config.strict_model import LocalFile

ImageFamily = Annotated[
    str,
    Field(pattern=r"^[a-z][a-z0-9.-]*$"),
    Allowed("a family of Nebius' public images, such as ubuntu24.04-cuda13.0"),
]
FilesystemId = Annotated[
    str,
    Field(pattern=r"^computefilesystem-[a-z0-9]+$"),
    Allowed("the id of a shared file system, such as computefilesystem-e00abc"),
]


class NebiusConfig(PlatformSection):
    """A GPU cluster of Nebius: what runs are given to, what joins the nodes, what they share, and
    how one logs in to them."""

    orchestrator: Literal["none", "kubernetes", "soperator"] = Field(
        default="none",
        description=(
            "What runs are given to: none (virtual machines, reached by ssh), kubernetes (a cluster"
            " of Managed Kubernetes, with queues) or soperator (Slurm on it: `plan --output` writes"
            " the settings of Nebius' recipe, which makes it)."
        ),
    )
    user: Login | None = Field(default=None, description="Login on the nodes; default: drillyard.")
    identity_file: LocalFile | None = Field(
        default=None,
        description=(
            "Private key by which one logs in; its public half, FILE.pub, is put on the nodes."
        ),
    )
    fabric: str | None = Field(
        default=None,
        description=(
            "InfiniBand fabric that joins the nodes; default: the first one that the region has for"
            " the machine."
        ),
    )
    boot_image: ImageFamily | None = Field(
        default=None,
        description=(
            "Family of the boot disks' image; default: Ubuntu with NVIDIA's driver and CUDA. Of"
            " nodes of Kubernetes: their OS and preset of drivers, as OS-PRESET."
        ),
    )
    filesystem_gib: PositiveInt | None = Field(
        default=None,
        description="Size of a shared file system that is made, mounted at storage.directory.",
    )
    filesystem: FilesystemId | None = Field(
        default=None,
        description=(
            "Shared file system that exists, mounted at storage.directory; it is never changed or"
            " removed."
        ),
    )
    jail_gib: PositiveInt | None = Field(
        default=None,
        description="Of soperator: size of the root that all nodes share; default: 2048.",
    )
    startup_script: LocalFile | None = Field(
        default=None,
        description=(
            "Script that each node runs as root at its first start, once the file system is"
            " mounted: Docker, drillyard. It is readable on the nodes and in Terraform's state, so"
            " no secret belongs in it."
        ),
    )
    directory: str | None = Field(
        default=None, description="Directory of this project on the nodes; default: as here."
    )


NEBIUS = PlatformFacts(
    required=("location.project", "location.region", "machine", "consumption"),
    optional=(
        *("location", "storage", "reservation", "mounts", "python", "image"),
        *("nebius", "kubernetes", "cluster"),
    ),
    section=NebiusConfig,
    consumption=("on-demand", "reservation", "spot"),
    cloud="nebius",
    provisioner="drillyard.provision.nebius.nebius_plan:nebius_plan",
    provision_rules="drillyard.provision.nebius.nebius_rules:nebius_problems",
    instead_of_launching=(
        "make the cluster with `drillyard cluster up {file} --write`, then launch with the file"
        " that it writes"
    ),
)
