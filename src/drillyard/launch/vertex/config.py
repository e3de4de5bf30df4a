"""Platform `vertex`: its settings in cluster.yaml, what holds for every such cluster, and the paths
in its bucket.

Every container sees gs://BUCKET as the directory /gcs/BUCKET. The mount is Cloud Storage FUSE
(https://cloud.google.com/vertex-ai/docs/training/cloud-storage-file-system). Plans contain the
containers' paths; this machine reads and writes the bucket itself.
"""

from __future__ import annotations

import posixpath
import re
from typing import Annotated, Literal

from pydantic import Field

from drillyard.config.cluster import ClusterConfig
from drillyard.config.platforms import Capabilities, PlatformFacts, PlatformSection
from drillyard.errors import UserError

MOUNT = "/gcs"
NO_CLIENT = "platform vertex needs Google's client ({}): pip install 'drillyard[gcp]'"
_SCHEME = "gs://"
# https://cloud.google.com/storage/docs/buckets#naming
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")


class VertexConfig(PlatformSection):
    """Settings of a Vertex AI custom job."""

    service_account: str | None = Field(
        default=None, description="Service account that the containers run as."
    )
    network: str | None = Field(
        default=None, description="VPC network to peer with: projects/NUMBER/global/networks/NAME."
    )
    reserved_ip_ranges: list[str] = Field(
        default=[], description="Names of the address ranges for that network."
    )
    tensorboard: str | None = Field(
        default=None,
        description="Tensorboard instance: projects/NUMBER/locations/REGION/tensorboards/ID.",
    )
    timeout_hours: Annotated[float, Field(gt=0)] = Field(
        default=168.0,
        description="Longest time that the job may run. flex-start: at most 168 (7 days).",
    )
    max_wait_hours: Annotated[float, Field(ge=0)] = Field(
        default=24.0,
        description="Longest time that a flex-start job waits for capacity; 0: no limit.",
    )
    boot_disk_gb: Annotated[int, Field(ge=100)] = Field(
        default=500, description="Size of each node's boot disk, GB."
    )
    boot_disk_type: Literal["pd-ssd", "pd-standard", "hyperdisk-balanced"] | None = Field(
        default=None, description="Type of the boot disk; default: that of the machine."
    )
    web_access: bool = Field(
        default=False, description="Allow interactive shells in the containers."
    )
    labels: dict[str, str] = Field(default={}, description="Further labels of the job.")
    endpoint: str | None = Field(
        default=None,
        description="Address of the service; default: REGION-aiplatform.googleapis.com.",
    )


VERTEX = PlatformFacts(
    required=(
        "location.project",
        "location.region",
        "machine",
        "consumption",
        "storage.bucket",
    ),
    optional=("location", "storage", "reservation", "python", "image", "vertex", "cluster"),
    section=VertexConfig,
    provisioner="drillyard.provision.vertex.vertex_plan:vertex_plan",
    provision_rules="drillyard.provision.vertex.vertex_plan:vertex_problems",
    consumption=("on-demand", "reservation", "spot", "flex-start"),
    cloud="gcp",
    in_pods=True,
    bucket_mount=MOUNT,
    capabilities=Capabilities(queue=True, image=True),
    launcher="drillyard.launch.vertex.launcher:VertexLauncher",
)


def uri_of(path: str) -> str:
    """The gs:// address of a container's path."""
    return _SCHEME + path.removeprefix(f"{MOUNT}/")


def mounted(uri: str) -> str:
    """The path under which containers see gs://BUCKET/KEY."""
    return posixpath.join(MOUNT, uri.removeprefix(_SCHEME)).rstrip("/")


def bucket_of(cluster: ClusterConfig) -> str:
    """The bucket of the cluster. Raises UserError where its name cannot be one."""
    name = cluster.storage.bucket or ""
    if not _BUCKET.fullmatch(name):
        raise UserError(
            f"cluster config: storage.bucket: '{name}' cannot be a bucket's name: 3 to 222 lower"
            " case letters, digits, '-', '_' and '.'"
            " (https://cloud.google.com/storage/docs/buckets#naming); write it without gs://"
        )
    return name


def project_of(cluster: ClusterConfig) -> str:
    """Directory that relative paths of a run config refer to: `storage.directory`, in the bucket,
    or the bucket."""
    directory, root = cluster.storage.directory or "", mounted(bucket_of(cluster))
    return _in_bucket(directory, root, root, "cluster config: storage.directory")


def output_of(output: str, cluster: ClusterConfig) -> str:
    """The directory that holds run directories: `output` of the run config, in the cluster's
    bucket."""
    return _in_bucket(
        output, project_of(cluster), mounted(bucket_of(cluster)), "run config: output"
    )


def _in_bucket(path: str, base: str, root: str, where: str) -> str:
    whole = posixpath.normpath(
        posixpath.join(base, mounted(path) if path.startswith(_SCHEME) else path)
    )
    if whole != root and not whole.startswith(root + "/"):
        bucket = posixpath.basename(root)
        raise UserError(
            f"{where}: {path} is not in the bucket {bucket}: on Vertex AI only a bucket is seen by"
            f" all nodes and outlives them\nWrite a relative path, or one below {root} (that is"
            f" {uri_of(root)})."
        )
    return whole
