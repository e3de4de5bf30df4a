"""The section `cluster:` of a cluster config: what only the creation of a cluster needs.

`drillyard cluster` reads it, and `launch` only sees that it is there: then its defaults are the
names of a created cluster. So one file serves both. The settings that both need (machine, nodes,
consumption, location, storage) are keys of the file itself, and describe the first pool.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from drillyard.allowed_values import Allowed
from drillyard.config.problems import Path, Problem
from drillyard.config.strict_model import StrictModel

Consumption = Literal[
    "on-demand", "reservation", "spot", "flex-start", "flex-start-queued", "calendar"
]
ShortName = Annotated[
    str,
    Field(pattern=r"^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$"),
    Allowed(
        "at most 40 lower-case letters, digits and '-', beginning with a letter and not ending"
        " with '-'",
        is_name=True,
    ),
]
"""The name of a cluster or a node pool: Google refuses a longer one only when it makes it."""
ResourceName = Annotated[
    str,
    Field(pattern=r"^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$"),
    Allowed(
        "at most 63 lower-case letters, digits and '-', beginning with a letter and not ending"
        " with '-'",
        is_name=True,
    ),
]
"""The name of something of Compute Engine that exists."""
PinnedImage = Annotated[
    str,
    Field(pattern=r"^[^\s@]+@sha256:[0-9a-f]{64}$"),
    Allowed("an image with its tag and digest: IMAGE:TAG@sha256:DIGEST"),
]
LabelKey = Annotated[
    str,
    Field(pattern=r"^[a-z][a-z0-9_-]{0,62}$"),
    Allowed(
        "at most 63 lower-case letters, digits, '-' and '_', beginning with a letter", is_name=True
    ),
]
LabelValue = Annotated[
    str,
    Field(pattern=r"^[a-z0-9_-]{0,63}$"),
    Allowed("at most 63 lower-case letters, digits, '-' and '_'", is_name=True),
]
BucketName = Annotated[
    str,
    Field(pattern=r"^[a-z0-9][a-z0-9_.-]{1,61}[a-z0-9]$"),
    Allowed("3 to 63 lower-case letters, digits, '-', '_' and '.', without gs://", is_name=True),
]
Range = Annotated[
    str,
    Field(pattern=r"^[0-9]{1,3}(\.[0-9]{1,3}){3}/[0-9]{1,2}$"),
    Allowed("an IPv4 range such as 10.0.0.0/16"),
]
"""`CreationConfig.problems` finds host bits and numbers that are too large."""
Version = Annotated[
    str,
    Field(pattern=r"^1\.[0-9]{1,2}(\.[0-9]+(-gke\.[0-9]+)?)?$"),
    Allowed(
        'a version of GKE or its beginning, in quotes: "1.34.1-gke.1829001" or "1.34"; without it'
        " the channel decides"
    ),
]


def default_pool_name(cluster_name: str, consumption: str) -> str:
    """The name of a pool and its queue, where the config has none: at most 40 characters."""
    return f"{cluster_name[: 39 - len(consumption)].rstrip('-')}-{consumption}"


class AddressRanges(StrictModel):
    """Ranges of addresses that the cluster uses. What is not given is computed from its size."""

    nodes: Range | None = Field(
        default=None, description="Subnet of the nodes, such as 10.0.0.0/20."
    )
    pods: Range | None = Field(
        default=None, description="Addresses of the pods, such as 100.64.0.0/14."
    )
    services: Range | None = Field(
        default=None, description="Addresses of the services, such as 10.128.0.0/20."
    )
    data: Range | None = Field(
        default=None,
        description="Room of the subnets of data and second host NICs, such as 192.168.0.0/16.",
    )


class NetworkConfig(StrictModel):
    """A VPC that exists, with the subnet in which the nodes are. It is used, and stays as it is."""

    name: ResourceName = Field(description="Name of the VPC.", examples=["shared-vpc"])
    subnet: ResourceName = Field(
        description="Its subnet in the region, which gives the nodes their addresses.",
        examples=["gpu-nodes"],
    )
    project: str | None = Field(
        default=None, description="Host project of a shared VPC; default: location.project."
    )
    pods: ResourceName | None = Field(
        default=None,
        description="Of platform gke: name of the subnet's secondary range for pods.",
    )
    services: ResourceName | None = Field(
        default=None,
        description="Of platform gke: name of its secondary range for services.",
    )


class CpuPool(StrictModel):
    """The pool that the controllers run on. It is never queued."""

    machine: str = Field(default="e2-standard-16", description="Machine type without GPUs.")
    nodes: PositiveInt = Field(default=1, description="Nodes in each zone of the control plane.")


class HeadConfig(StrictModel):
    """What a Slurm cluster has beside its GPU nodes."""

    home: Literal["filestore", "lustre"] = Field(
        default="filestore", description="Storage of /home, which all nodes share."
    )
    home_gib: PositiveInt | None = Field(
        default=None, description="Size of /home in GiB; default: the least that it may have."
    )
    controller: str = Field(
        default="n2-standard-16", description="Machine type of the controller, without GPUs."
    )
    login: str = Field(
        default="n2-standard-8", description="Machine type of the login node, without GPUs."
    )


class FurtherPool(StrictModel):
    """A pool of GPU nodes beside the first, which the file's own keys describe."""

    name: ShortName | None = Field(
        default=None, description="Name of the pool and its queue; default: NAME-CONSUMPTION."
    )
    machine: str | None = Field(default=None, description="Machine type; default: the first's.")
    consumption: Consumption = Field(description="How its capacity is bought.", examples=["spot"])
    nodes: PositiveInt = Field(description="The most nodes that it may have.", examples=[2])
    reservations: list[str] = Field(
        default=[], description="Reservations, for consumption: reservation or calendar."
    )
    zone: str | None = Field(default=None, description="Zone; default: the first pool's.")


class CreationConfig(StrictModel):
    """What only `drillyard cluster` needs to create the cluster."""

    pools: list[FurtherPool] = Field(default=[], description="Further pools of GPU nodes.")
    version: Version | None = Field(
        default=None,
        description=(
            "Version of Kubernetes, or its beginning, in quotes: '1.34'. Default: the channel's,"
            " which must be at least what the network stack needs."
        ),
    )
    release_channel: Literal["rapid", "regular", "stable"] = Field(
        default="regular", description="Channel of GKE's versions."
    )
    ranges: AddressRanges = Field(
        default=AddressRanges(), description="Ranges of addresses, where they are not computed."
    )
    network: NetworkConfig | None = Field(
        default=None,
        description=(
            "VPC of the nodes that exists, also a shared one; default: one is made. Networks of"
            " data NICs are made either way."
        ),
    )
    cpu_pool: CpuPool = Field(default=CpuPool(), description="Pool of the controllers.")
    head: HeadConfig = Field(
        default=HeadConfig(), description="Of platform slurm: its controller, login and /home."
    )
    disk_gib: PositiveInt = Field(default=200, description="Boot disk of each node, in GiB.")
    max_pods_per_node: Annotated[int, Field(ge=8, le=256)] = Field(
        default=32, description="Decides how many addresses each node takes from ranges.pods."
    )
    compact_placement: bool | None = Field(
        default=None,
        description=(
            "Whether to ask for nodes near each other; default: where machine and consumption"
            " allow it. On A4X it cannot be chosen."
        ),
    )
    private_nodes: bool = Field(
        default=True, description="Nodes without public addresses, behind Cloud NAT."
    )
    authorized_networks: list[Range] = Field(
        default=[],
        description=(
            "Ranges that may reach the control plane, by default any, with login; of platform gce"
            " those that may reach public nodes by ssh."
        ),
    )
    gpu_driver: Literal["default", "latest"] | None = Field(
        default=None,
        description="Which of GKE's GPU drivers; default: what the network stack is tested with.",
    )
    existing_bucket: bool = Field(
        default=False,
        description=(
            "storage.bucket exists: the runs get access, and it is never changed or removed."
            " Default: it is made."
        ),
    )
    bucket_location: str | None = Field(
        default=None, description="Location of storage.bucket; default: the region."
    )
    bucket_keep_versions: NonNegativeInt = Field(
        default=0,
        description=(
            "Earlier versions of an object that the bucket keeps. With any it has no hierarchical"
            " namespace, which Cloud Storage offers only without versions."
        ),
    )
    bucket_recover_days: NonNegativeInt = Field(
        default=7,
        description="Days in which deleted and overwritten objects can be restored: 0, or 7 to 90.",
    )
    registry: bool = Field(
        default=True, description="Make a repository for images in Artifact Registry."
    )
    images: list[PinnedImage] = Field(
        default=[],
        description=(
            "Digests for the images of the DaemonSets that prepare nodes: IMAGE:TAG@sha256:DIGEST."
            " Default: what the registry says at the first `up`."
        ),
    )
    state_bucket: BucketName | None = Field(
        default=None,
        description="Bucket of Terraform's state; default: PROJECT-NAME-tfstate, made first.",
    )
    labels: dict[LabelKey, LabelValue] = Field(
        default={}, description="Further labels of everything that is made."
    )
    deletion_protection: bool = Field(
        default=False,
        description="Refuse `drillyard cluster down` until this is false again.",
    )

    def problems(self) -> Iterator[Problem]:
        """Ranges that are not valid: numbers too large, or bits beyond the prefix."""
        given: list[tuple[Path, str]] = [
            (("cluster", "ranges", key), value)
            for key, value in self.ranges.model_dump().items()
            if value is not None
        ]
        given += [
            (("cluster", "authorized_networks", number), value)
            for number, value in enumerate(self.authorized_networks)
        ]
        for path, value in given:
            if (wrong := _range_problem(value)) is not None:
                yield Problem(path, f"found '{value}'; {wrong}")


def _range_problem(text: str) -> str | None:
    try:
        network = ipaddress.IPv4Network(text, strict=False)
    except ValueError as error:
        return f"not an IPv4 range: {error}"
    if text == str(network):
        return None
    address = text.partition("/")[0]
    return f"{address} is not the first address of such a range: write {network}"
