"""What `up` installs on a cluster: Helm releases in order, with their values. Pure.

JobSet and Kueue come by their own charts, at the versions below; the chart `drillyard-cluster` is
ours (`charts/drillyard-cluster`). Its names are the defaults of `drillyard launch` on such a
cluster (`launch/kubernetes/created_cluster.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Protocol

import yaml

from drillyard.config.cluster import ClusterConfig
from drillyard.errors import UserError
from drillyard.hardware.capacity import stack_name
from drillyard.hardware.catalog import Catalog
from drillyard.hardware.machines import Machine
from drillyard.hardware.network_stacks import NetworkStack
from drillyard.launch.kubernetes.config import KubernetesConfig
from drillyard.launch.kubernetes.created_cluster import (
    NODE_POOL,
    PRIVILEGED,
    RESTRICTED,
    SERVICE_ACCOUNT,
    as_created,
    namespace_for,
)
from drillyard.launch.kubernetes.gke import tolerations
from drillyard.provision.cluster_plan import ChartRelease, Pool

OWN_CHART = "drillyard-cluster"
OWN_VERSION = "0.1.0"
FIRST_KUBERNETES = "1.30"
"""What the charts need (`kubeVersion` of charts/drillyard-cluster)."""
OWN_NAMESPACE = "drillyard-system"
JOBSET, JOBSET_VERSION = "jobset", "0.10.1"
"""The first version that matches messages of failed Jobs, by which the chart `drillyard-run` tells
a restart that counts from one that does not."""
KUEUE, KUEUE_VERSION = "kueue", "0.17.1"
"""Serves v1beta2 and, for what is there already, v1beta1; 0.14 and later place by topology and make
nodes on request (https://github.com/kubernetes-sigs/kueue/releases)."""
DRA, DRA_VERSION = "nvidia-dra-driver-gpu", "25.3.0"
"""NVIDIA's driver of ComputeDomains, which pods in one NVLink domain need
(GoogleCloudPlatform/cluster-toolkit, examples/gke-a4x)."""
GPU = "nvidia.com/gpu"
QUEUED_CLASS = "queued-provisioning.gke.io"
TOPOLOGY_LEVELS = (
    "cloud.google.com/gce-topology-block",
    "cloud.google.com/gce-topology-subblock",
    "cloud.google.com/gce-topology-host",
    "kubernetes.io/hostname",
)
"""Labels of nodes that are placed densely
(https://cloud.google.com/kubernetes-engine/docs/how-to/gke-topology-aware-scheduling)."""
_KUEUE_CONFIGURATION = {
    "apiVersion": "config.kueue.x-k8s.io/v1beta2",
    "kind": "Configuration",
    "health": {"healthProbeBindAddress": ":8081"},
    "metrics": {"bindAddress": ":8443"},
    "webhook": {"port": 9443},
    "leaderElection": {"leaderElect": True, "resourceName": "c1f6bfd2.kueue.x-k8s.io"},
    # The defaults, 20 and 30 requests a second, are too few for a run of a thousand pods.
    "clientConnection": {"qps": 300, "burst": 600},
    "integrations": {"frameworks": ["batch/job", "jobset.x-k8s.io/jobset"]},
}
_ARCHITECTURES = {"x86_64": "amd64", "arm64": "arm64"}
"""Kubernetes' names of the catalog's."""


class Interface(Protocol):
    """An additional interface of every node: the name of its Network object, the VPC and subnet,
    and how pods get it."""

    @property
    def network_object(self) -> str: ...

    @property
    def vpc(self) -> str: ...

    @property
    def subnet(self) -> str: ...

    @property
    def device_mode(self) -> str: ...


def cluster_releases(
    cluster: ClusterConfig, pools: Sequence[Pool], interfaces: Sequence[Interface], facts: Catalog
) -> tuple[ChartRelease, ...]:
    """The releases of a cluster, in the order of their installation. Raises UserError for a version
    of an NCCL plugin that no daemon is known to work with."""
    cluster = as_created(cluster)
    machines = list({pool.machine.name: pool.machine for pool in pools}.values())
    linked = [each for each in machines if _has_link_domain(each)]
    gpus = sum(pool.nodes * pool.machine.num_accelerators for pool in pools)
    values: dict[str, Any] = {
        "cluster": cluster.name,
        "pools": [_pool_values(cluster, pool, pools) for pool in pools],
        "namespaces": [_namespace(name, gpus, cluster) for name in namespaces_of(cluster)],
        "serviceAccount": {"name": service_account(cluster)},
        "networks": [
            {
                "name": each.network_object,
                "vpc": each.vpc,
                "subnet": each.subnet,
                "deviceMode": each.device_mode,
            }
            for each in interfaces
        ],
        **_node_values(cluster, machines, facts),
        "systemNamespaces": [DRA] if linked else [],
    }
    values = with_images(values, _given_digests(cluster, values))
    return (
        *controllers(),
        ChartRelease(OWN_CHART, OWN_NAMESPACE, OWN_CHART, OWN_VERSION, values),
        *([_dra_driver(linked)] if linked else []),
    )


def controllers() -> tuple[ChartRelease, ChartRelease]:
    """JobSet and Kueue: JobSet first, as Kueue looks for its objects when it starts."""
    configuration = yaml.safe_dump(_KUEUE_CONFIGURATION, sort_keys=False)
    registry = "oci://registry.k8s.io"
    return (
        ChartRelease(
            JOBSET, "jobset-system", f"{registry}/jobset/charts/jobset", JOBSET_VERSION, {}
        ),
        ChartRelease(
            KUEUE,
            "kueue-system",
            f"{registry}/kueue/charts/kueue",
            KUEUE_VERSION,
            {"managerConfig": {"controllerManagerConfigYaml": configuration}},
        ),
    )


def launch_settings(cluster: ClusterConfig, pools: Sequence[Pool]) -> dict[str, Any]:
    """The keys of `kubernetes:` with which `drillyard launch` reaches the first pool: those of the
    file, and the defaults of a created cluster."""
    cluster = as_created(cluster)
    section = cluster.section_as(KubernetesConfig)
    return {
        "kubernetes": {
            "context": section.context,
            "namespace": section.namespace,
            "queue": queue_of(cluster, pools[0], pools),
            "service_account": service_account(cluster),
            "run_as_user": section.run_as_user,
        }
    }


def queue_of(cluster: ClusterConfig, pool: Pool, pools: Sequence[Pool]) -> str:
    """The queue of a pool: of its name; of the first pool the one that the config names, unless it
    names another pool's."""
    named = cluster.section_as(KubernetesConfig).queue
    others = {each.name for each in pools[1:]}
    return named if pool is pools[0] and named and named not in others else pool.name


def service_account(cluster: ClusterConfig) -> str:
    """The service account of the pods."""
    return cluster.section_as(KubernetesConfig).service_account or SERVICE_ACCOUNT


def chart_directory(name: str = OWN_CHART) -> Traversable:
    """A chart of ours: in the wheel, else in the checkout."""
    packaged = files("drillyard").joinpath(f"charts/{name}")
    return packaged if packaged.is_dir() else Path(__file__).parents[3] / "charts" / name


def is_dense(pool: Pool) -> bool:
    """Whether the nodes of a pool have the labels of their place: machines with NICs for data that
    a reservation puts close together. Kueue places nothing on nodes without the labels, nor on
    those that are yet to come, so pools that scale from zero have no topology."""
    is_reserved = pool.consumption in ("reservation", "calendar")
    return is_reserved and pool.machine.data_nics.count > 0


def images_of(values: Mapping[str, Any]) -> Iterator[str]:
    """The images of the DaemonSets in the values of the chart `drillyard-cluster`."""
    for each in values.get("installers", ()):
        yield each["image"]
    others = (values.get("deviceInjector", {}).get("image"), values.get("nodeImage"))
    yield from filter(None, others)


def with_images(values: Mapping[str, Any], digests: Mapping[str, str]) -> dict[str, Any]:
    """The values with the digests of these images beside their tags."""

    def pinned(image: str) -> str:
        return f"{image}@{digests[image]}" if image in digests else image

    changed = dict(values)
    if "installers" in values:
        rows = values["installers"]
        changed["installers"] = [{**each, "image": pinned(each["image"])} for each in rows]
    if "deviceInjector" in values:
        injector = values["deviceInjector"]
        changed["deviceInjector"] = {**injector, "image": pinned(injector["image"])}
    if "nodeImage" in values:
        changed["nodeImage"] = pinned(values["nodeImage"])
    return changed


def _given_digests(cluster: ClusterConfig, values: Mapping[str, Any]) -> dict[str, str]:
    """The digests of `cluster.images`, by their images. Raises UserError for an image that no
    DaemonSet of the cluster runs."""
    used, found = list(images_of(values)), dict[str, str]()
    for each in cluster.cluster.images if cluster.cluster else ():
        image, _, digest = each.partition("@")
        if image not in used:
            names = ", ".join(used) or "none"
            raise UserError(
                f"cluster.images: no DaemonSet of the cluster runs {image}; these do: {names}"
            )
        if found.setdefault(image, digest) != digest:
            raise UserError(f"cluster.images: {image} has two digests")
    return found


def _pool_values(cluster: ClusterConfig, pool: Pool, pools: Sequence[Pool]) -> dict[str, Any]:
    return {
        "name": pool.name,
        "queue": queue_of(cluster, pool, pools),
        "nodeLabels": {NODE_POOL: pool.name},
        "tolerations": tolerations(pool.consumption, pool.machine),
        "resources": quota_of(pool.machine, pool.nodes),
        "topologyLevels": list(TOPOLOGY_LEVELS) if is_dense(pool) else [],
        "provisioningClass": QUEUED_CLASS if pool.is_queued else "",
    }


def quota_of(machine: Machine, nodes: int) -> dict[str, str]:
    """A queue's quota: all that the nodes have. A resource that is missing here would keep each run
    waiting that asks for it; where its amount is not known, it is not limited."""
    unlimited_cpus, unlimited_gib = 1_000_000, 1_000_000
    cpus = unlimited_cpus if machine.vcpus is None else nodes * machine.vcpus
    gib = unlimited_gib if machine.host_memory_gib is None else nodes * machine.host_memory_gib
    return {
        GPU: str(nodes * machine.num_accelerators),
        "cpu": str(cpus),
        "memory": f"{round(gib)}Gi",
    }


def namespaces_of(cluster: ClusterConfig) -> tuple[str, ...]:
    """The namespaces of runs: the two of every created cluster, and another one that the file
    names."""
    own = cluster.section_as(KubernetesConfig).namespace
    return tuple(dict.fromkeys((RESTRICTED, PRIVILEGED, own)))


def _namespace(name: str, gpus: int, cluster: ClusterConfig) -> dict[str, Any]:
    levels = {RESTRICTED: "restricted", PRIVILEGED: "privileged"}
    level = levels.get(name) or levels[namespace_for(cluster)]
    # What costs money outside of the queues: GPUs of pods without one, and load balancers.
    quota = {f"requests.{GPU}": str(gpus), "services.loadbalancers": "0"}
    # Every cluster has the namespace default.
    return {"name": name, "level": level, "create": name != "default", "quota": quota}


def _has_link_domain(machine: Machine) -> bool:
    return (machine.link_domain_accelerators or 0) > machine.num_accelerators


def stack_of(cluster: ClusterConfig, machine: Machine, facts: Catalog) -> NetworkStack:
    """The network stack of the nodes of a machine."""
    return facts.network_stack(stack_name(cluster, machine, facts))


def _node_values(
    cluster: ClusterConfig, machines: Iterable[Machine], facts: Catalog
) -> dict[str, Any]:
    """The DaemonSets that make nodes ready for their network stack."""
    section = cluster.section_as(KubernetesConfig)
    installers: dict[tuple[str, str], dict[str, Any]] = {}
    injector: dict[str, Any] = {"image": "", "accelerators": []}
    for machine in machines:
        stack = stack_of(cluster, machine, facts)
        plugin = _require_known_plugin(stack, section.nccl_plugin)
        image = stack.installer_image(machine.architecture, plugin)
        if image is not None and _uses_node_libraries(stack, machine, section):
            architecture = _ARCHITECTURES[machine.architecture]
            row = {
                "stack": stack.name,
                "image": image,
                "accelerators": [],
                "architecture": architecture,
            }
            row = installers.setdefault((stack.name, architecture), row)
            row["accelerators"] = _with(row["accelerators"], machine.accelerator_type)
        if stack.sidecar is not None and stack.sidecar.devices:
            injector["image"] = stack.images["device_injector"]
            injector["accelerators"] = _with(injector["accelerators"], machine.accelerator_type)
    found: dict[str, Any] = {"installers": list(installers.values()), "deviceInjector": injector}
    # All but tcpx's prepare the node itself, with an image that has a shell.
    if any(each["stack"] != "tcpx" for each in installers.values()):
        found["nodeImage"] = _default_node_image()
    return found


@cache
def _default_node_image() -> str:
    values = yaml.safe_load(chart_directory().joinpath("values.yaml").read_text("utf-8"))
    return str(values["nodeImage"])


def _with(names: Sequence[str], name: str | None) -> list[str]:
    return list(dict.fromkeys([*names, *([name] if name else [])]))


def _uses_node_libraries(stack: NetworkStack, machine: Machine, section: KubernetesConfig) -> bool:
    """Whether pods mount the stack's libraries from their node: as `launch` decides it."""
    given = section.mounts_network_libraries
    own_needs = machine.pods is not None and machine.network_stack == stack.name
    return not own_needs if given is None else given


def _require_known_plugin(stack: NetworkStack, plugin: str | None) -> str | None:
    """The version of the plugin to install; None: the stack's own. Raises UserError for one that
    has no daemon, since `launch` starts the daemon of its version beside the ranks."""
    if plugin is None or not stack.coupled_versions:
        return None
    if stack.daemon_of(plugin) is None:
        known = ", ".join(dict.fromkeys(each["plugin"] for each in stack.coupled_versions))
        raise UserError(
            f"kubernetes.nccl_plugin: no daemon is known to work with plugin {plugin} of"
            f" {stack.name}; these are: {known}"
        )
    return plugin


def _dra_driver(machines: Sequence[Machine]) -> ChartRelease:
    def selected() -> Iterator[dict[str, Any]]:
        accelerators = [each.accelerator_type for each in machines]
        yield {
            "key": "cloud.google.com/gke-accelerator",
            "operator": "In",
            "values": list(dict.fromkeys(accelerators)),
        }

    no_gpu = {"key": "cloud.google.com/gke-accelerator", "operator": "DoesNotExist"}
    values = {
        "nvidiaDriverRoot": "/home/kubernetes/bin/nvidia",
        "resources": {"gpus": {"enabled": False}, "computeDomains": {"enabled": True}},
        "controller": {"affinity": _node_affinity([no_gpu])},
        "kubeletPlugin": {
            "affinity": _node_affinity(list(selected())),
            "tolerations": tolerations(None, machines[0]),
        },
    }
    chart = f"https://helm.ngc.nvidia.com/nvidia/charts/{DRA}-{DRA_VERSION}.tgz"
    return ChartRelease(DRA, DRA, chart, DRA_VERSION, values)


def _node_affinity(expressions: list[dict[str, Any]]) -> dict[str, Any]:
    terms = {"nodeSelectorTerms": [{"matchExpressions": expressions}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
