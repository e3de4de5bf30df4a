"""Platform `vertex`: its settings in cluster.yaml, and what holds for every such cluster."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from drillyard.config.cluster import ClusterConfig
from drillyard.config.platforms import Capabilities, PlatformFacts, PlatformSection


class VertexConfig(PlatformSection):
    """Settings of a Vertex AI custom job."""

    service_account: str | None = Field(default=None, description="Service account that the containers run as.")
    network: str | None = Field(
        default=None, description="VPC network to peer with: projects/NUMBER/global/networks/NAME."
    )
    reserved_ip_ranges: list[str] = Field(default=[], description="Names of the address ranges for that network.")
    tensorboard: str | None = Field(
        default=None, description="Tensorboard instance: projects/NUMBER/locations/REGION/tensorboards/ID."
    )
    timeout_hours: Annotated[float, Field(gt=0)] = Field(
        default=168.0, description="Longest time that the job may run. flex-start: at most 168 (7 days)."
    )
    max_wait_hours: Annotated[float, Field(ge=0)] = Field(
        default=24.0, description="Longest time that a flex-start job waits for capacity; 0: no limit."
    )
    boot_disk_gb: Annotated[int, Field(ge=100)] = Field(default=500, description="Size of each node's boot disk, GB.")
    boot_disk_type: Literal["pd-ssd", "pd-standard", "hyperdisk-balanced"] | None = Field(
        default=None, description="Type of the boot disk; default: that of the machine."
    )
    web_access: bool = Field(default=False, description="Allow interactive shells in the containers.")
    labels: dict[str, str] = Field(default={}, description="Further labels of the job.")
    endpoint: str | None = Field(
        default=None, description="Address of the service; default: REGION-aiplatform.googleapis.com."
    )


VERTEX = PlatformFacts(
    required=("location.project", "location.region", "machine", "consumption", "image", "storage.bucket"),
    optional=("location", "storage", "reservation", "python", "vertex"),
    section=VertexConfig,
    consumption=("on-demand", "reservation", "spot", "flex-start"),
    cloud="gcp",
    in_pods=True,
    bucket_mount="/gcs",
    capabilities=Capabilities(gang=True, queue=True, image=True, time_limit=True),
    launcher="drillyard.launch.vertex.launcher:VertexLauncher",
)


def vertex_of(cluster: ClusterConfig) -> VertexConfig:
    """The cluster's `vertex` section, with defaults where it has none."""
    assert isinstance(cluster.section, VertexConfig)
    return cluster.section
