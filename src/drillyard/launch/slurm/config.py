"""Platform `slurm`: its settings in cluster.yaml, and what holds for every such cluster."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, PositiveInt

from drillyard.allowed_values import Allowed
from drillyard.config.platforms import Capabilities, PlatformFacts, PlatformSection, SshHost
from drillyard.config.strict_model import LocalFile

TimeLimit = Annotated[
    str,
    Field(pattern=r"^(\d+-)?\d+(:[0-5]\d){0,2}$"),
    Allowed("minutes, HH:MM:SS or D-HH:MM:SS"),
]


def seconds_of(time: str) -> int | None:
    """Seconds of a time as Slurm writes it: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S (sbatch, --time);
    None for another text, such as UNLIMITED."""
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", time):
        return None
    days, dash, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    from_hours = parts if dash or len(parts) == 3 else [0, *parts]
    hours, minutes, seconds = (*from_hours, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


class SlurmConfig(PlatformSection):
    """Submission of jobs to Slurm."""

    partition: str | None = Field(default=None, description="Partition; default: the cluster's.")
    account: str | None = Field(default=None, description="Account that the job is charged to.")
    qos: str | None = Field(default=None, description="Quality of service.")
    time_limit: TimeLimit | None = Field(
        default=None, description="Time limit as Slurm writes it: minutes, HH:MM:SS or D-HH:MM:SS."
    )
    login_host: SshHost | None = Field(
        default=None,
        description="Login node, reached by ssh: [USER@]HOST; null: sbatch runs on this machine.",
    )
    exclusive: bool = Field(default=True, description="Ask for whole nodes.")
    exclude: list[str] = Field(default=[], description="Nodes that jobs must not use.")
    constraint: str | None = Field(default=None, description="Features that nodes must have.")
    gres: str | None = Field(
        default=None,
        description=(
            "GPUs per node as the cluster types them, such as gpu:nvidia_h100_80gb_hbm3:8"
            " (Soperator); default: --gpus-per-node with the accelerators of `machine`."
        ),
    )
    segment: PositiveInt | None = Field(
        default=None,
        description="Nodes of one NVLink domain or block that belong together (sbatch --segment).",
    )
    signal_seconds: Annotated[int, Field(ge=30)] = Field(
        default=300,
        description=(
            "Seconds before its time limit at which a job is signalled to save; it is queued again."
        ),
    )
    max_requeues: Annotated[int, Field(ge=0)] = Field(
        default=1000,
        description=(
            "Times that a job is queued again after its time limit, preemption or a lost node."
        ),
    )
    setup: list[str] = Field(
        default=[],
        description=(
            "Shell lines that the job runs on its first node before anything: [module load cuda]."
        ),
    )
    directory: str | None = Field(
        default=None, description="Directory of this project on the cluster; default: as here."
    )
    config_file: LocalFile | None = Field(
        default=None,
        description="OpenSSH configuration file for `login_host`; default: ~/.ssh/config.",
    )
    arguments: list[str] = Field(
        default=[], description="Further #SBATCH arguments, as written: [--mail-type=END]."
    )

    @property
    def limit_seconds(self) -> int | None:
        """`time_limit` in seconds; None: the partition's."""
        return None if self.time_limit is None else seconds_of(self.time_limit)

    @property
    def project_directory(self) -> str | None:
        return self.directory

    @property
    def head_host(self) -> str:
        return self.login_host or ""


SLURM = PlatformFacts(
    optional=(
        "slurm",
        "storage",
        "image",
        "mounts",
        "python",
        "location",
        "machine",
        "consumption",
        "reservation",
        "cluster",
    ),
    section=SlurmConfig,
    provisioner="drillyard.provision.toolkit.slurm_plan:slurm_plan",
    provision_rules="drillyard.provision.toolkit.slurm_plan:slurm_problems",
    instead_of_provisioning=(
        "this file is of a cluster that exists: `drillyard cluster status` looks at its nodes, and"
        " `drillyard launch` starts runs there; one that is to be made on Google Cloud has"
        " location, machine and consumption (or platform: gke)"
    ),
    cluster_check="drillyard.launch.slurm.cluster_check:check_slurm",
    consumption=("on-demand", "reservation", "spot", "flex-start", "calendar"),
    machines="own or bought",
    has_head=True,
    has_prolog=True,
    capabilities=Capabilities(queue=True, image=True, sync=True, dependency=True, exclude=True),
    launcher="drillyard.launch.slurm.launcher:SlurmLauncher",
)
