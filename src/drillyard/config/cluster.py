"""What the user writes about a cluster: `cluster.yaml`, where a run config is trained.

What a platform needs and what it offers are rows of `PLATFORMS`; `cluster_problems` compares a config with its row, so
that a new platform is a new row. Fields hold what every platform shares or one section per platform.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from drillyard.config.problems import Path, Problem, dotted
from drillyard.config.strict_model import StrictModel

Platform = Literal["local", "ssh", "slurm", "gke", "vertex", "gce", "nebius"]
Consumption = Literal["on-demand", "reservation", "spot", "flex-start", "flex-start-queued", "calendar"]


# ssh takes a name that begins with "-" for an option, of which some run programs; nothing else needs other characters.
Login = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+@\\-]*$")]
HostAddress = Annotated[str, Field(pattern=r"^[A-Za-z0-9_:\[][A-Za-z0-9_.:%\[\]-]*$")]
SshHost = Annotated[str, Field(pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.+@\\-]*@)?[A-Za-z0-9_:\[][A-Za-z0-9_.:%\[\]-]*$")]


class Location(StrictModel):
    """Where a cloud's machines stand and who pays for them."""

    project: str | None = Field(default=None, description="Google Cloud project id, or Nebius project id.")
    region: str | None = Field(default=None, description="Region, such as us-central1.")
    zone: str | None = Field(default=None, description="Zone, such as us-central1-b.")


class StorageConfig(StrictModel):
    """Where run directories and data live that every node reads and writes."""

    bucket: str | None = Field(default=None, description="Object storage bucket, without gs:// or s3://.")
    directory: str | None = Field(default=None, description="Shared directory, at the same path on every node.")


class SshConfig(StrictModel):
    """Machines that are reached by ssh."""

    hosts: Annotated[list[SshHost], Field(min_length=1)] = Field(
        description="Host names or addresses, the first one is rank 0's: [node-0, node-1].",
        examples=[["node-0", "node-1"]],
    )
    user: Login | None = Field(
        default=None,
        description="Login, which begins with a letter or digit; default: what the ssh configuration says.",
    )
    port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        default=None, description="Port of the ssh server; default: what the ssh configuration says, else 22."
    )
    identity_file: str | None = Field(
        default=None, description="Private key; default: what the ssh configuration says."
    )
    directory: str | None = Field(default=None, description="Directory of this project on the hosts; default: as here.")
    config_file: str | None = Field(default=None, description="OpenSSH configuration file; default: ~/.ssh/config.")
    rendezvous_host: HostAddress | None = Field(
        default=None,
        description="Name or address under which the hosts reach the first one; default: as `hosts` has it.",
    )


class SlurmConfig(StrictModel):
    """How jobs are submitted to Slurm."""

    partition: str | None = Field(default=None, description="Partition; default: the cluster's.")
    account: str | None = Field(default=None, description="Account that the job is charged to.")
    qos: str | None = Field(default=None, description="Quality of service.")
    time_limit: Annotated[str, Field(pattern=r"^(\d+-)?\d+(:[0-5]\d){0,2}$")] | None = Field(
        default=None, description="Time limit as Slurm writes it: minutes, HH:MM:SS or D-HH:MM:SS."
    )
    login_host: SshHost | None = Field(
        default=None, description="Login node, reached by ssh: [USER@]HOST; null: sbatch runs on this machine."
    )
    exclusive: bool = Field(default=True, description="Ask for whole nodes.")
    exclude: list[str] = Field(default=[], description="Nodes that jobs must not use.")
    constraint: str | None = Field(default=None, description="Features that nodes must have.")
    gres: str | None = Field(
        default=None,
        description="GPUs per node as the cluster types them, such as gpu:nvidia_h100_80gb_hbm3:8 (Soperator); "
        "default: --gpus-per-node with the accelerators of `machine`.",
    )
    segment: PositiveInt | None = Field(
        default=None, description="Nodes of one NVLink domain or block that belong together (sbatch --segment)."
    )
    signal_seconds: Annotated[int, Field(ge=30)] = Field(
        default=300,
        description="How long before its time limit a job is told to save; it goes on after being queued again.",
    )
    max_requeues: Annotated[int, Field(ge=0)] = Field(
        default=1000, description="Times that a job is queued again after its time limit, preemption or a lost node."
    )
    setup: list[str] = Field(
        default=[], description="Shell lines that the job runs on its first node before anything: [module load cuda]."
    )
    directory: str | None = Field(
        default=None, description="Directory of this project on the cluster; default: as here."
    )
    config_file: str | None = Field(
        default=None, description="OpenSSH configuration file for `login_host`; default: ~/.ssh/config."
    )
    arguments: list[str] = Field(default=[], description="Further #SBATCH arguments, as written: [--mail-type=END].")

    @property
    def limit_seconds(self) -> int | None:
        """`time_limit` in seconds: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S (sbatch, --time); None: the partition's."""
        if self.time_limit is None:
            return None
        days, dash, clock = self.time_limit.rpartition("-")
        parts = [int(part) for part in clock.split(":")]
        from_hours = parts if dash or len(parts) == 3 else [0, *parts]
        hours, minutes, seconds = (*from_hours, 0, 0)[:3]
        return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


class VertexConfig(StrictModel):
    """What a Vertex AI custom job may have beside its machines."""

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
        default=24.0, description="Longest time that a flex-start job waits for capacity; 0: without end."
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


class ClusterConfig(StrictModel):
    """A cluster: where to train. `run.yaml` says what."""

    name: Annotated[str, Field(pattern=r"^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$")] = Field(
        description="Name of the cluster: at most 40 lower case letters, digits and '-', beginning with a letter.",
        examples=["my-cluster"],
    )
    platform: Platform = Field(
        description="What runs the job: local, ssh, slurm, gke, vertex, gce or nebius.", examples=["slurm"]
    )
    location: Location | None = Field(default=None, description="Project, region and zone of a cloud platform.")
    machine: str | None = Field(default=None, description="Machine type, such as a4-highgpu-8g.")
    nodes: PositiveInt = Field(default=1, description="Number of machines.")
    hardware: str | None = Field(
        default=None,
        description="File with your own hardware and prices, laid over what is known; a relative path is relative to "
        "this file.",
    )
    consumption: Consumption | None = Field(
        default=None,
        description="How capacity is bought: on-demand, reservation, spot, flex-start, flex-start-queued or calendar.",
    )
    reservation: str | None = Field(
        default=None, description="Name of the reservation, for consumption: reservation or calendar."
    )
    storage: StorageConfig = Field(default=StorageConfig(), description="Storage that every node shares.")
    image: str | None = Field(default=None, description="Container image of the run.")
    mounts: list[Annotated[str, Field(pattern=r"^/[^:]*(:/[^:]*)?(:ro)?$")]] = Field(
        default=[],
        description="Directories of nodes that the container sees beside the run's: [/data, /scratch:/tmp/scratch].",
    )
    python: str | None = Field(
        default=None,
        description="Python interpreter on the nodes, or in the image, that has drillyard; default: python3 in an "
        "image, else .venv/bin/python of the project's directory.",
    )
    processes_per_node: PositiveInt | None = Field(
        default=None, description="Ranks per node; default: the accelerators of `machine`."
    )
    environment: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str] = Field(
        default={}, description="Environment variables of every rank; they win over the network stack's."
    )
    network_stack: Literal["tcpx", "tcpxo", "gib", "infiniband", "efa", "ethernet"] | None = Field(
        default=None, description="How NCCL reaches the data NICs; default: the machine's own stack."
    )
    ssh: SshConfig | None = Field(default=None, description="Hosts of platform ssh.")
    slurm: SlurmConfig | None = Field(default=None, description="Settings of platform slurm.")
    vertex: VertexConfig | None = Field(default=None, description="Settings of platform vertex.")

    @property
    def has_own_machines(self) -> bool:
        """Whether the machines are there already, and no cloud makes them: no quota is needed, nothing is bought."""
        there = self.platform == "slurm" and self.location is None and self.consumption is None
        return there or self.platform in ("local", "ssh")


@dataclass(frozen=True)
class PlatformFacts:
    """What a platform's cluster config must hold, may hold, and how its capacity can be bought."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    consumption: tuple[str, ...] = ()
    max_nodes: int | None = None


PLATFORMS: dict[str, PlatformFacts] = {
    # Machines of one's own have a `machine` where estimates and acceptance are to know what they are.
    "local": PlatformFacts(optional=("machine", "storage", "python"), max_nodes=1),
    "ssh": PlatformFacts(required=("ssh",), optional=("machine", "storage", "image", "mounts", "python")),
    "slurm": PlatformFacts(
        # A Slurm cluster that exists needs none of these; one that is to be made on a cloud says where, of which
        # machines, and how they are bought.
        optional=(
            *("slurm", "storage", "image", "mounts", "python"),
            *("location", "machine", "consumption", "reservation"),
        ),
        consumption=("on-demand", "reservation", "spot", "flex-start", "calendar"),
    ),
    "gke": PlatformFacts(
        required=("location.project", "location.region", "machine", "consumption", "image", "storage.bucket"),
        optional=("location", "storage", "reservation"),
        consumption=("on-demand", "reservation", "spot", "flex-start", "flex-start-queued", "calendar"),
    ),
    "vertex": PlatformFacts(
        required=("location.project", "location.region", "machine", "consumption", "image", "storage.bucket"),
        optional=("location", "storage", "reservation", "python", "vertex"),
        consumption=("on-demand", "reservation", "spot", "flex-start"),
    ),
    "gce": PlatformFacts(
        required=("location.project", "location.zone", "machine", "consumption"),
        optional=("location", "storage", "reservation", "image"),
        consumption=("on-demand", "reservation", "spot", "flex-start", "calendar"),
    ),
    "nebius": PlatformFacts(
        required=("location.project", "location.region", "machine", "consumption"),
        optional=("location", "storage", "reservation", "image"),
        consumption=("on-demand", "reservation", "spot"),
    ),
}


_EVERYWHERE = ("name", "platform", "nodes", "hardware", "processes_per_node", "environment", "network_stack")


def cluster_problems(config: ClusterConfig) -> list[Problem]:
    """What the config's platform lacks, does not know or cannot do."""
    return [*_fields(config), *_capacity(config), *_nodes(config)]


def with_absolute_paths(config: ClusterConfig, path: str | os.PathLike[str]) -> ClusterConfig:
    """`config`, which was read from `path`, with `hardware` absolute: so it holds wherever a copy is saved."""
    if config.hardware is None:
        return config
    directory = FilePath(path).absolute().parent
    return config.model_copy(update={"hardware": os.path.normpath(directory / FilePath(config.hardware).expanduser())})


def _fields(config: ClusterConfig) -> Iterator[Problem]:
    facts = PLATFORMS[config.platform]
    for name in facts.required:
        path = tuple(name.split("."))
        if _value(config, path) is None:
            field = _description(config, path)
            yield Problem(path, f"missing: platform {config.platform} needs it. {field}")
    known = {*_EVERYWHERE, *facts.optional, *(name.split(".")[0] for name in facts.required)}
    for name in ClusterConfig.model_fields:
        if name not in known and getattr(config, name) != ClusterConfig.model_fields[name].get_default():
            others = [platform for platform, row in PLATFORMS.items() if _has(row, name)]
            yield Problem((name,), f"platform {config.platform} has no such setting; it belongs to {', '.join(others)}")


def _capacity(config: ClusterConfig) -> Iterator[Problem]:
    facts = PLATFORMS[config.platform]
    bought = config.consumption
    if bought is not None and facts.consumption and bought not in facts.consumption:
        offered = ", ".join(facts.consumption)
        yield Problem(("consumption",), f"found '{bought}'; platform {config.platform} allows {offered}")
    if bought in ("reservation", "calendar") and config.reservation is None:
        yield Problem(("reservation",), f"missing: consumption {bought} needs the name of the reservation")
    if config.reservation is not None and bought not in ("reservation", "calendar"):
        yield Problem(
            ("reservation",),
            f"only consumption reservation or calendar uses it; consumption is {bought or 'not given'}",
        )
    if config.platform == "slurm" and config.machine is not None and not config.has_own_machines:
        for path in (("location", "project"), ("location", "zone"), ("consumption",)):
            if _value(config, path) is None:
                message = "missing: a cloud needs it; of machines of one's own give neither location nor consumption"
                yield Problem(path, message)


def _nodes(config: ClusterConfig) -> Iterator[Problem]:
    limit = PLATFORMS[config.platform].max_nodes
    if limit is not None and config.nodes > limit:
        yield Problem(("nodes",), f"found {config.nodes}; platform {config.platform} is this machine alone: {limit}")
    if config.platform == "ssh" and config.ssh is not None:
        hosts = config.ssh.hosts
        if config.nodes != len(hosts):
            yield Problem(
                ("nodes",), f"found {config.nodes}, but ssh.hosts names {len(hosts)}; write nodes: {len(hosts)}"
            )
        for host in dict.fromkeys(host for host in hosts if hosts.count(host) > 1):
            yield Problem(("ssh", "hosts"), f"'{host}' is named more than once")


def _has(row: PlatformFacts, name: str) -> bool:
    return name in row.optional or any(dotted(tuple(path.split("."))).split(".")[0] == name for path in row.required)


def _value(config: ClusterConfig, path: Path) -> object:
    value: object = config
    for part in path:
        value = getattr(value, str(part), None)
    return value


def _description(config: ClusterConfig, path: Path) -> str:
    sections: dict[str, type[StrictModel]] = {"location": Location, "storage": StorageConfig}
    model = sections[str(path[0])] if len(path) > 1 else type(config)
    return model.model_fields[str(path[-1])].description or ""
