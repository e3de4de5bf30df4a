"""Platforms `kubernetes` and `gke`: their settings in cluster.yaml, and what holds for every such
cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt

from drillyard.allowed_values import Allowed
from drillyard.config.platforms import Capabilities, PlatformFacts, PlatformSection
from drillyard.config.problems import Problem
from drillyard.config.strict_model import StrictModel, VariableName

BUCKET_MOUNT = "/gcs"
FILES_MOUNT = "/etc/drillyard"
"""Where pods find the plan's files; the chart mounts them there."""
NO_CLIENT = (
    "platforms kubernetes and gke need the Kubernetes client ({}): pip install"
    " 'drillyard[kubernetes]'"
)

ObjectName = Annotated[
    str,
    Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$"),
    Allowed("at most 63 lower-case letters, digits, '-' and '.'", is_name=True),
]
SecretKey = Annotated[
    str,
    Field(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[-._a-zA-Z0-9]+$"),
    Allowed("SECRET/KEY, such as drillyard/HF_TOKEN"),
]
PluginVersion = Annotated[
    str, Field(pattern=r"^[0-9][0-9A-Za-z.-]*$"), Allowed("a version without 'v', such as 1.0.15")
]


class Topology(StrictModel):
    """Placement by Kueue's topology-aware scheduling."""

    required: str | None = Field(
        default=None, description="Node label of the level that must contain all pods."
    )
    preferred: str | None = Field(
        default=None, description="Node label of the level that should contain all pods."
    )


Quantity = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) in (int, float) else value),
    Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"),
    Allowed("a quantity of Kubernetes, such as 8, 500m or 64Gi"),
]
"""https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity"""
_FACTORS = {
    "m": 0.001,
    **{unit: 1000.0**power for power, unit in enumerate(("", "k", "M", "G", "T", "P"))},
    **{unit: 1024.0**power for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi"), 1)},
}


class ResourceAmounts(StrictModel):
    """CPUs and memory of one container, as Kubernetes writes them."""

    cpu: Quantity | None = Field(default=None, description="CPUs: 8, or 500m for half of one.")
    memory: Quantity | None = Field(default=None, description="Memory: 64Gi.")

    def given(self) -> dict[str, str]:
        """The amounts that are set."""
        return {name: value for name, value in self.model_dump().items() if value is not None}


class ContainerResources(StrictModel):
    """What a container asks for, and the most that it gets."""

    requests: ResourceAmounts = Field(
        default=ResourceAmounts(), description="What a node must have free for the container."
    )
    limits: ResourceAmounts = Field(
        default=ResourceAmounts(), description="The most that the container gets."
    )

    def problems(self, key: str) -> Iterator[Problem]:
        """Requests above their limits, which Kubernetes refuses."""
        limits = self.limits.given()
        for name, amount in self.requests.given().items():
            if name in limits and _amount(amount) > _amount(limits[name]):
                message = f"{amount} is more than limits.{name}, {limits[name]}"
                yield Problem(("kubernetes", key, "requests", name), message)


def _amount(quantity: str) -> float:
    number = quantity.rstrip("mkKMGTPi")
    return float(number) * _FACTORS[quantity[len(number) :]]


class KubernetesConfig(PlatformSection):
    """Settings of a Kubernetes cluster."""

    context: str | None = Field(
        default=None, description="Context of the kubeconfig; default: its current one."
    )
    namespace: ObjectName = Field(default="default", description="Namespace of the runs.")
    controller: Literal["jobset", "job"] = Field(
        default="jobset",
        description=(
            "What runs the pods. job is for clusters without JobSet: nothing restarts the run"
            " there."
        ),
    )
    queue: ObjectName | None = Field(
        default=None, description="Kueue's LocalQueue; null: runs start without a queue."
    )
    priority_class: ObjectName | None = Field(
        default=None, description="Kueue's WorkloadPriorityClass of the runs."
    )
    service_account: ObjectName | None = Field(
        default=None, description="ServiceAccount of the pods; default: the namespace's."
    )
    volume_claim: ObjectName | None = Field(
        default=None,
        description=(
            "PersistentVolumeClaim (ReadWriteMany) of run directories, mounted at"
            " storage.directory; instead of storage.bucket."
        ),
    )
    secrets: dict[VariableName, SecretKey] = Field(
        default={}, description="Variables from Secrets of the namespace: {HF_TOKEN: SECRET/KEY}."
    )
    pull_secrets: list[ObjectName] = Field(
        default=[], description="Secrets for the image's registry."
    )
    resources: ContainerResources = Field(
        default=ContainerResources(),
        description=(
            "CPUs and memory of the run's container on each node, besides its GPUs:"
            " {requests: {cpu: 64, memory: 512Gi}}. Default: none. Needed where the namespace's"
            " quota counts them."
        ),
    )
    daemon_resources: ContainerResources = Field(
        default=ContainerResources(),
        description="The same for the network stack's daemon beside the ranks (tcpx, tcpxo).",
    )
    topology: Topology = Field(
        default=Topology(),
        description="Which nodes Kueue chooses (topology-aware scheduling).",
    )
    pod_network: Literal["interfaces", "host", "dranet"] | None = Field(
        default=None,
        description=(
            "How pods reach the data NICs: interfaces on the cluster's Network objects, the host's"
            " own network, or devices that managed DRANET allocates. Only machines whose stack is"
            " gib have a choice. Default: interfaces, or what the machine has instead."
        ),
    )
    nccl_plugin: PluginVersion | None = Field(
        default=None,
        description=(
            "Version of the NCCL plugin that the nodes have (tcpx, tcpxo); its daemon is of the"
            " version that works with it. Default: the newest pair that is known."
        ),
    )
    network_libraries: Literal["node", "image"] | None = Field(
        default=None,
        description=(
            "Whether the network stack's libraries are mounted from the node, where its installer"
            " put them, or are in the image. Default: node, where the machine's nodes have them."
        ),
    )
    max_run_hours: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="Longest run time from admission, over all restarts; null: no limit.",
    )
    grace_seconds: PositiveInt = Field(
        default=120, description="Time of a stopped pod to save, before it is killed."
    )
    lost_node_seconds: NonNegativeInt = Field(
        default=60, description="Time from the loss of a node until its pods are deleted."
    )
    run_as_user: NonNegativeInt = Field(
        default=0, description="User id of the pods' processes; 0: the image's own user."
    )
    file_group: NonNegativeInt = Field(
        default=0, description="Group that owns the volume's files; 0: unchanged."
    )
    tolerations: list[dict[str, str]] = Field(
        default=[],
        description="Tolerations of the pods: [{key: nvidia.com/gpu, operator: Exists}].",
    )
    node_selector: dict[str, str] = Field(
        default={}, description="Labels that the nodes must have."
    )
    labels: dict[str, str] = Field(default={}, description="Further labels of the run's objects.")

    @property
    def limit_seconds(self) -> int | None:
        return None if self.max_run_hours is None else round(self.max_run_hours * 3600)

    @property
    def mounts_network_libraries(self) -> bool | None:
        return None if self.network_libraries is None else self.network_libraries == "node"

    def problems(self, nodes: int) -> Iterator[Problem]:
        if self.topology.required is not None and self.topology.preferred is not None:
            yield Problem(
                ("kubernetes", "topology"),
                "`required` and `preferred` are both given; keep one of them",
            )
        yield from self.resources.problems("resources")
        yield from self.daemon_resources.problems("daemon_resources")
        needs_queue = {
            "priority_class": self.priority_class,
            "topology": self.topology.required or self.topology.preferred,
            # A Job has a time limit of its own.
            "max_run_hours": self.max_run_hours if self.controller == "jobset" else None,
        }
        for key, value in needs_queue.items():
            if value is not None and self.queue is None:
                yield Problem(
                    ("kubernetes", key),
                    "only Kueue uses it: name kubernetes.queue, or remove it",
                    depends_on=(("kubernetes", "queue"), ("consumption",)),
                )


KUBERNETES = PlatformFacts(
    optional=("kubernetes", "storage", "machine", "mounts", "python", "image"),
    section=KubernetesConfig,
    section_key="kubernetes",
    machines="own",
    in_pods=True,
    bucket_mount=BUCKET_MOUNT,
    capabilities=Capabilities(queue=True, image=True, exclude=True),
    provisioner="drillyard.provision.existing_cluster:existing_cluster_plan",
    provision_rules="drillyard.provision.existing_cluster:existing_cluster_problems",
    launcher="drillyard.launch.kubernetes.launcher:KubernetesLauncher",
)

GKE = replace(
    KUBERNETES,
    required=("location.project", "location.region", "machine", "consumption"),
    optional=(
        *("location", "storage", "reservation", "kubernetes", "mounts", "python", "image"),
        "cluster",
    ),
    completed="drillyard.launch.kubernetes.created_cluster:completed",
    on_pool="drillyard.launch.kubernetes.created_cluster:on_pool",
    provisioner="drillyard.provision.gke.gke_plan:gke_plan",
    provision_rules="drillyard.provision.gke.gke_plan:gke_problems",
    consumption=("on-demand", "reservation", "spot", "flex-start", "flex-start-queued", "calendar"),
    machines="bought",
    cloud="gcp",
)
