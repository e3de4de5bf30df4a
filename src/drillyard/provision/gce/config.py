"""Platform `gce`: its settings in cluster.yaml, and what holds for every such cluster.

The machines are made by `drillyard cluster up`, which writes a config of platform `ssh` for
`launch`: nothing is launched with the file of platform `gce` itself.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from drillyard.allowed_values import Allowed
from drillyard.config.platforms import Login, PlatformFacts, PlatformSection
from drillyard.config.strict_model import LocalFile

BootImage = Annotated[
    str,
    Field(pattern=r"^[a-z0-9][a-z0-9.:-]*/[a-z]([a-z0-9-]{0,61}[a-z0-9])?$"),
    Allowed("PROJECT/FAMILY or PROJECT/IMAGE, such as ubuntu-os-cloud/ubuntu-2404-lts-amd64"),
]


class GceConfig(PlatformSection):
    """Virtual machines of Compute Engine: how one logs in to them, and what they start from."""

    user: Login | None = Field(
        default=None,
        description=(
            "Login on the nodes; default: drillyard. With os_login it is required: the name that"
            " `gcloud compute os-login describe-profile` prints."
        ),
    )
    identity_file: LocalFile | None = Field(
        default=None,
        description=(
            "Private key by which one logs in; its public half, FILE.pub, is put on the nodes."
            " Without os_login it is required."
        ),
    )
    os_login: bool = Field(
        default=False,
        description="The project's OS Login has the keys, and none is put on the nodes.",
    )
    boot_image: BootImage | None = Field(
        default=None,
        description=(
            "Image of the boot disks, PROJECT/FAMILY or PROJECT/IMAGE; default: Ubuntu with"
            " NVIDIA's driver."
        ),
    )
    startup_script: LocalFile | None = Field(
        default=None,
        description=(
            "Script that each node runs as root at every start: Docker, mounts, drillyard. It is"
            " readable on the nodes and in Terraform's state, so no secret belongs in it."
        ),
    )
    max_run_hours: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description=(
            "Of consumption flex-start: hours after which Google deletes the nodes; default: as"
            " many as there can be, a week."
        ),
    )
    directory: str | None = Field(
        default=None, description="Directory of this project on the nodes; default: as here."
    )


GCE = PlatformFacts(
    required=("location.project", "location.zone", "machine", "consumption"),
    optional=(
        *("location", "storage", "reservation", "mounts", "python", "image"),
        *("gce", "cluster"),
    ),
    section=GceConfig,
    consumption=("on-demand", "reservation", "spot", "flex-start", "calendar"),
    cloud="gcp",
    provisioner="drillyard.provision.gce.gce_plan:gce_plan",
    provision_rules="drillyard.provision.gce.gce_plan:gce_problems",
    instead_of_launching=(
        "make its machines with `drillyard cluster up {file} --write`, then launch with the file"
        " that it writes"
    ),
)
