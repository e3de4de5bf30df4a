"""The network stack of a run's pods, as values of the chart: interfaces, the daemon beside the
ranks, and what they get from their node.

Facts are those of `hardware/network_stacks.yaml`; the environment and its script are
`launch/network.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from drillyard.hardware.machines import Machine
from drillyard.hardware.network_stacks import NetworkStack, Volume
from drillyard.launch.kubernetes.config import KubernetesConfig
from drillyard.launch.network import cited, stack_of
from drillyard.launch.plan import ExplainedField
from drillyard.launch.request import LaunchFinding, LaunchRequest, error
from drillyard.launch.request_checks import mount_parts

_PRIMARY = "default"


def pod_stack(request: LaunchRequest, machine: Machine | None) -> NetworkStack | None:
    """The stack of the run's pods; None on a single node, and where no machine is named whose NICs
    it uses."""
    return stack_of(request.cluster, machine, request.facts) if request.cluster.nodes > 1 else None


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
    if section.pod_network != "interfaces" and (stack is None or stack.device_class is None):
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
    if section.nccl_plugin is None or (stack is not None and daemon_of(stack, section.nccl_plugin)):
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


def daemon_of(stack: NetworkStack, plugin: str) -> Mapping[str, str] | None:
    """The daemon's version and arguments (`rxdm`, `arguments`) that work with a version of the
    plugin."""
    return next((each for each in stack.coupled_versions if each["plugin"] == plugin), None)


def network_values(request: LaunchRequest, machine: Machine | None) -> dict[str, Any]:
    """The chart's values for the data NICs, and the directories of the node that the user mounts.

    `machineResources` are limits of the container besides its GPUs.
    """
    section = request.cluster.section_as(KubernetesConfig)
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
    from_node = [*_host_paths(stack.volumes)] if section.network_libraries == "node" else []
    devices = [
        {"name": f"device-{number}", "hostPath": path, "mountPath": path, "readOnly": False}
        for number, path in enumerate(stack.devices)
    ]
    memory = next((each.size_limit_gib for each in stack.volumes if each.medium == "Memory"), None)
    host = section.pod_network == "host"
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


def _network(
    stack: NetworkStack, request: LaunchRequest, machine: Machine | None
) -> dict[str, Any]:
    section, nodes = request.cluster.section_as(KubernetesConfig), request.cluster.nodes
    found: dict[str, Any] = {}
    if section.pod_network == "host":
        found["hostNetwork"] = True
    elif machine is not None and section.pod_network == "dranet":
        found["deviceClaim"] = {"class": stack.device_class, "count": machine.data_nics.count}
    elif machine is not None and (interfaces := stack.pod_interfaces(machine)):
        found["interfaces"] = [
            {"interfaceName": name, "network": each} for name, each in interfaces.items()
        ]
    if machine is not None and (machine.link_domain_accelerators or 0) > machine.num_accelerators:
        found["computeDomainNodes"] = nodes
    if stack.sidecar is not None:
        found["sidecar"] = _sidecar(stack, section.nccl_plugin)
    return found


def _sidecar(stack: NetworkStack, plugin: str | None) -> dict[str, Any]:
    sidecar = stack.sidecar
    assert sidecar is not None
    image, arguments = stack.images["sidecar"], sidecar.arguments
    if plugin is not None:
        versions = daemon_of(stack, plugin)
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
    }


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


def fields(request: LaunchRequest, machine: Machine | None) -> Iterator[ExplainedField]:
    """What the cluster must have for the pods' network."""
    stack = pod_stack(request, machine)
    if stack is None:
        return
    section = request.cluster.section_as(KubernetesConfig)
    needs = {
        "gke_dranet" if section.pod_network == "dranet" else "gke": "GKE",
        "daemonset": "DaemonSet",
    }
    for name, title in needs.items():
        if name in stack.requires:
            yield ExplainedField(
                title, stack.requires[name], f"for {stack.title}", cited(stack, f"requires.{name}")
            )
    if (
        machine is not None
        and section.pod_network == "interfaces"
        and (found := stack.pod_interfaces(machine))
    ):
        why = "objects Network and GKENetworkParamSet of the cluster, one per data NIC"
        names = ", ".join(name for name in found.values() if name != _PRIMARY)
        yield ExplainedField("networks", names, why, cited(stack, "interfaces"))
    if "installer" in stack.images and section.network_libraries == "node":
        image = stack.images["installer"]
        if section.nccl_plugin is not None:
            image = f"{image.rpartition(':')[0]}:v{section.nccl_plugin}"
        why = "the DaemonSet of the cluster that installs the libraries on its nodes"
        yield ExplainedField("installer", image, why, cited(stack, "images.installer"))
