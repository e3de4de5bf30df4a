"""The network stack of a run's pods, as values of the chart: interfaces, the daemon beside the
ranks, and what they get from their node.

Facts are those of `hardware/network_stacks.yaml`; the environment and its script are
`launch/network.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from drillyard.config.cluster import ClusterConfig
from drillyard.hardware.catalog import Catalog
from drillyard.hardware.facts import cited
from drillyard.hardware.machines import Machine, PodNeeds
from drillyard.hardware.network_stacks import NetworkStack, Volume
from drillyard.launch.kubernetes.config import ContainerResources, KubernetesConfig
from drillyard.launch.network import has_libraries_in_image, stack_of
from drillyard.launch.request import LaunchFinding, LaunchRequest, error
from drillyard.launch.request_checks import mount_parts
from drillyard.plan_files import ExplainedField

_PRIMARY = "default"


class OnCluster(Protocol):
    """A cluster and the facts about its machines: of a request, or of no run in particular."""

    @property
    def cluster(self) -> ClusterConfig: ...

    @property
    def facts(self) -> Catalog: ...


def pod_stack(request: OnCluster, machine: Machine | None) -> NetworkStack | None:
    """The stack of the run's pods; None on a single node, and where no machine is named whose NICs
    it uses."""
    return stack_of(request.cluster, machine, request.facts) if request.cluster.nodes > 1 else None


def network_mode(request: OnCluster, machine: Machine | None) -> str:
    """How the run's pods reach the data NICs (kubernetes.pod_network): as set, or the only way that
    the machine has, or by interfaces."""
    given = request.cluster.section_as(KubernetesConfig).pod_network
    needs = _pod_needs(request, machine)
    return given or ("interfaces" if needs is None else needs.network)


def _pod_needs(request: OnCluster, machine: Machine | None) -> PodNeeds | None:
    """What the machine's own network stack needs in pods besides what the stack says; None for
    another stack, and on a single node."""
    stack = pod_stack(request, machine)
    own = stack is not None and machine is not None and has_libraries_in_image(stack, machine)
    return machine.pods if own and machine is not None else None


def _libraries_from_node(request: OnCluster, machine: Machine | None) -> bool:
    given = request.cluster.section_as(KubernetesConfig).mounts_network_libraries
    return _pod_needs(request, machine) is None if given is None else given


def findings(request: LaunchRequest, machine: Machine | None) -> Iterator[LaunchFinding]:
    """What the machine's stack cannot do, of what kubernetes.pod_network, network_libraries and
    nccl_plugin ask for."""
    section = request.cluster.section_as(KubernetesConfig)
    stack = pod_stack(request, machine)
    name = "a single node's" if stack is None else stack.name
    if stack is not None and machine is None and _needs_machine(stack):
        message = (
            f"missing: the pods of {name} have one interface or device for each data NIC of the"
            " machine"
        )
        yield error("cluster", "machine", message)
    needs = _pod_needs(request, machine)
    if needs is not None and machine is not None:
        source = machine.fact("pods").source
        if section.pod_network not in (None, needs.network):
            message = (
                f"{section.pod_network}: pods on {machine.name} have the data NICs by"
                f" {needs.network} alone ({source}): remove it"
            )
            yield error("cluster", "kubernetes.pod_network", message)
        if section.network_libraries == "node":
            message = (
                f"node: nodes of {machine.name} have no libraries of {name}; they are in the image"
                f" ({source}): remove it"
            )
            yield error("cluster", "kubernetes.network_libraries", message)
    elif section.pod_network not in (None, "interfaces") and (
        stack is None or stack.device_class is None
    ):
        able = ", ".join(
            each.name for each in request.facts.network_stacks.values() if each.device_class
        )
        message = f"{section.pod_network}: is for network stack {able}, not for {name}: remove it"
        yield error("cluster", "kubernetes.pod_network", message)
    if section.network_libraries == "image" and stack is not None and stack.sidecar is not None:
        message = (
            f"image: {stack.sidecar.name}, which {name} needs, has its libraries from the node:"
            " remove it"
        )
        yield error("cluster", "kubernetes.network_libraries", message)
    if section.daemon_resources != ContainerResources() and (
        stack is None or stack.sidecar is None
    ):
        message = f"{name} stack has no daemon beside the ranks: remove it"
        yield error("cluster", "kubernetes.daemon_resources", message)
    if section.nccl_plugin is None or (stack is not None and stack.daemon_of(section.nccl_plugin)):
        return
    known = [each["plugin"] for each in stack.coupled_versions] if stack else []
    if known:
        rule = (
            f"no daemon is known to work with plugin {section.nccl_plugin} of {name}; these are:"
            f" {', '.join(known)}"
        )
        yield error("cluster", "kubernetes.nccl_plugin", rule)
    else:
        yield error(
            "cluster",
            "kubernetes.nccl_plugin",
            f"{name} stack has no daemon that depends on it: remove it",
        )


def _needs_machine(stack: NetworkStack) -> bool:
    return stack.kubernetes_resource is not None or (
        stack.interfaces is not None and bool(stack.interfaces.first_data)
    )


def network_values(request: OnCluster, machine: Machine | None) -> dict[str, Any]:
    """The chart's values for the data NICs, and the directories of the node that the user mounts.

    `machineResources` are limits of the container besides its GPUs.
    """
    stack = pod_stack(request, machine)
    mounts = [
        {
            "name": f"mount-{number}",
            "hostPath": host,
            "mountPath": inside,
            "readOnly": mount.endswith(":ro"),
        }
        for number, (mount, (host, inside)) in enumerate(
            (each, mount_parts(each)) for each in request.cluster.mounts
        )
    ]
    if stack is None:
        return {"hostPaths": mounts} if mounts else {}
    volumes = stack.volumes if _libraries_from_node(request, machine) else ()
    if (needs := _pod_needs(request, machine)) is not None:
        volumes = tuple(each for each in stack.volumes if each.name in needs.volumes)
    from_node = [*_host_paths(volumes)]
    devices = [
        {"name": f"device-{number}", "hostPath": path, "mountPath": path, "readOnly": False}
        for number, path in enumerate(stack.devices)
    ]
    memory = next((each.size_limit_gib for each in stack.volumes if each.medium == "Memory"), None)
    host = network_mode(request, machine) == "host"
    values: dict[str, Any] = {
        "network": _network(stack, request, machine),
        "hostPaths": [*from_node, *devices, *mounts],
        "capabilities": list(stack.capabilities),
        # A container without privileges may not open a device that no device plugin gave it.
        "privileged": bool(devices) or host,
        "sharedMemory": f"{memory:g}Gi" if memory else "",
    }
    return {name: value for name, value in values.items() if value}


def machine_resources(request: LaunchRequest, machine: Machine | None) -> dict[str, int]:
    """Limits of the container for network devices that a device plugin gives."""
    stack = pod_stack(request, machine)
    if stack is None or machine is None or stack.kubernetes_resource is None:
        return {}
    return {stack.kubernetes_resource: machine.data_nics.count}


def _host_paths(volumes: tuple[Volume, ...]) -> Iterator[dict[str, Any]]:
    for each in volumes:
        if each.host_path is not None:
            yield {
                "name": each.name,
                "hostPath": each.host_path,
                "mountPath": each.mount_path,
                "readOnly": False,
            }


def _network(stack: NetworkStack, request: OnCluster, machine: Machine | None) -> dict[str, Any]:
    section, nodes = request.cluster.section_as(KubernetesConfig), request.cluster.nodes
    found: dict[str, Any] = {}
    mode = network_mode(request, machine)
    if mode == "host":
        found["hostNetwork"] = True
    elif machine is not None and mode == "dranet":
        found["deviceClaim"] = {"class": stack.device_class, "count": machine.data_nics.count}
    elif machine is not None and (interfaces := stack.pod_interfaces(machine)):
        found["interfaces"] = [
            {"interfaceName": name, "network": each} for name, each in interfaces.items()
        ]
    if machine is not None and (machine.link_domain_accelerators or 0) > machine.num_accelerators:
        found["computeDomainNodes"] = nodes
    if stack.sidecar is not None:
        found["sidecar"] = _sidecar(stack, section)
    return found


def _sidecar(stack: NetworkStack, section: KubernetesConfig) -> dict[str, Any]:
    sidecar = stack.sidecar
    assert sidecar is not None
    plugin = section.nccl_plugin
    image, arguments = stack.images["sidecar"], sidecar.arguments
    if plugin is not None:
        versions = stack.daemon_of(plugin)
        assert versions is not None, "refused by findings()"
        image = f"{image.rpartition(':')[0]}:v{versions['rxdm']}"
        arguments = versions.get("arguments", arguments)
    return {
        "name": sidecar.name,
        "image": image,
        "command": [word.replace("{arguments}", arguments) for word in sidecar.command],
        "environment": dict(sidecar.environment),
        "capabilities": list(sidecar.capabilities),
        "devices": list(sidecar.devices),
        "hostPaths": list(_host_paths(sidecar.volumes)),
        "resources": container_resources(section.daemon_resources),
    }


def container_resources(given: ContainerResources) -> dict[str, dict[str, Any]]:
    """`resources` of a container: what is set, by requests and limits."""
    found = {"requests": given.requests.given(), "limits": given.limits.given()}
    return {name: amounts for name, amounts in found.items() if amounts}


def privileges(values: Mapping[str, Any]) -> list[str]:
    """What the pods need that only a namespace of the Pod Security level `privileged` allows."""
    network = values.get("network", {})
    sidecar = network.get("sidecar", {})
    paths = [
        each["hostPath"] for each in (*values.get("hostPaths", ()), *sidecar.get("hostPaths", ()))
    ]
    added = [*values.get("capabilities", ()), *sidecar.get("capabilities", ())]
    found = [f"directories of the node ({', '.join(dict.fromkeys(paths))})"] if paths else []
    found += [f"capabilities {', '.join(added)}"] if added else []
    found += ["the host's network"] if network.get("hostNetwork") else []
    return [*found, *(["a privileged container"] if values.get("privileged") else [])]


def first_versions(versions: Sequence[str]) -> str:
    """The first GKE versions of several minor versions, for people: `1.28.15-gke.1, ... or ...`."""
    *others, last = versions
    return f"{', '.join(others)} or {last}" if others else last


def fields(request: LaunchRequest, machine: Machine | None) -> Iterator[ExplainedField]:
    """What the cluster must have for the pods' network."""
    stack = pod_stack(request, machine)
    if stack is None:
        return
    section = request.cluster.section_as(KubernetesConfig)
    mode, own = network_mode(request, machine), _pod_needs(request, machine)
    if machine is not None:
        versions, path = stack.gke_versions(machine, dranet=mode == "dranet")
        why, source = f"for {stack.title}", cited(stack, path)
        if own is not None and own.gke_versions:
            versions, why = own.gke_versions, f"for {machine.name}"
            source = cited(machine, "pods.gke_versions")
        if versions:
            yield ExplainedField("GKE", first_versions(versions), why, source)
    for name, title in {"daemonset": "DaemonSet", "image": "in the image"}.items():
        if own is not None and machine is not None and name in own.requires:
            source = cited(machine, f"pods.requires.{name}")
            yield ExplainedField(title, own.requires[name], f"for {machine.name}", source)
        elif name in stack.requires:
            yield ExplainedField(
                title, stack.requires[name], f"for {stack.title}", cited(stack, f"requires.{name}")
            )
    if machine is not None and mode == "interfaces" and (found := stack.pod_interfaces(machine)):
        why = "objects Network and GKENetworkParamSet of the cluster, one per data NIC"
        names = ", ".join(name for name in found.values() if name != _PRIMARY)
        yield ExplainedField("networks", names, why, cited(stack, "interfaces"))
    architecture = "x86_64" if machine is None else machine.architecture
    image = stack.installer_image(architecture, section.nccl_plugin)
    if image is not None and _libraries_from_node(request, machine):
        why = "the DaemonSet of the cluster that installs the libraries on its nodes"
        yield ExplainedField("installer", image, why, cited(stack, "images"))
