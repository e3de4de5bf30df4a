"""Rules for rendered objects, each from a trap that real charts fell into; `broken_rules` names
those that are broken.

They look at the objects alone, as a cluster does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import yaml

from drillyard.hardware import catalog
from drillyard.hardware.machines import Machine

Objects = dict[str, dict[str, Any]]


def pod_of(objects: Objects) -> dict[str, Any]:
    return dict(objects["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"])


def annotations(thing: dict[str, Any]) -> dict[str, str]:
    return thing["metadata"].get("annotations") or {}


def provisioning_is_asked_for_on_the_jobset(objects: Objects, machine: Machine) -> bool:
    """Kueue reads provreq annotations of the JobSet; on the pod template they are ignored without a
    word."""
    return not [name for name in annotations(pod_of(objects)) if name.startswith("provreq.")]


def topology_is_asked_for_on_the_pods(objects: Objects, machine: Machine) -> bool:
    """Kueue reads podset annotations of the pod template."""
    return not [name for name in annotations(objects["JobSet"]) if "podset-" in name]


def there_is_one_pod_set(objects: Objects, machine: Machine) -> bool:
    """A ProvisioningRequest may have one PodSet: several would be provisioned one by one."""
    jobs = objects["JobSet"]["spec"]["replicatedJobs"]
    return len(jobs) == 1 and jobs[0]["replicas"] == 1


def interfaces_are_json_and_one_per_nic(objects: Objects, machine: Machine) -> bool:
    """eth0 and an interface on a network of its own for each data NIC, numbered as the stack
    numbers them."""
    text = annotations(pod_of(objects)).get("networking.gke.io/interfaces")
    if text is None:
        return True
    try:
        found = [(each["interfaceName"], each["network"]) for each in json.loads(text)]
    except ValueError:
        return False
    wanted = {"tcpx": (1, "vpc{}", 1), "tcpxo": (1, "vpc{}", 1), "gib": (2, "rdma-{}", 0)}[
        machine.network_stack
    ]
    first, network, number = wanted
    data = [(f"eth{first + i}", network.format(number + i)) for i in range(machine.data_nics.count)]
    return found == [("eth0", "default"), *data]


def a_bucket_has_its_sidecar(objects: Objects, machine: Machine) -> bool:
    """A volume of Cloud Storage FUSE hangs without the annotation by which its container is
    added."""
    drivers = [each.get("csi", {}).get("driver", "") for each in pod_of(objects)["spec"]["volumes"]]
    asked = annotations(pod_of(objects)).get("gke-gcsfuse/volumes") == "true"
    return asked == any("gcsfuse" in driver for driver in drivers)


def container_0_is_the_run(objects: Objects, machine: Machine) -> bool:
    """Only the first container that is no init container gets RDMA devices."""
    spec = pod_of(objects)["spec"]
    return spec["containers"][0]["name"] == "train" and len(spec["containers"]) == 1


def daemons_end_with_the_run(objects: Objects, machine: Machine) -> bool:
    """A daemon that is no native sidecar keeps a finished Job running."""
    return all(
        each.get("restartPolicy") == "Always"
        for each in pod_of(objects)["spec"].get("initContainers", ())
    )


def the_daemon_has_its_devices(objects: Objects, machine: Machine) -> bool:
    """The device injector finds the container by the name in the annotation's key."""
    found = {
        key.rpartition("container.")[2]
        for key in annotations(pod_of(objects))
        if key.startswith("devices.gke.io/")
    }
    return found == {each["name"] for each in pod_of(objects)["spec"].get("initContainers", ())}


def plugin_and_daemon_work_together(objects: Objects, machine: Machine) -> bool:
    """Versions of TCPXO's plugin and its daemon are coupled; retired arguments go with old versions
    only."""
    stack = catalog().network_stack(machine.network_stack)
    for daemon in pod_of(objects)["spec"].get("initContainers", ()):
        version = daemon["image"].rpartition(":v")[2]
        current = [each["rxdm"] for each in stack.coupled_versions if "arguments" not in each]
        if version not in current or "--num_nics" in str(daemon["command"]):
            return False
    return True


def pods_are_never_restarted_in_place(objects: Objects, machine: Machine) -> bool:
    """podFailurePolicy needs restartPolicy Never and podReplacementPolicy Failed; JobSet restarts
    the set."""
    job = objects["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    return (job["backoffLimit"], job["podReplacementPolicy"], pod["restartPolicy"]) == (
        0,
        "Failed",
        "Never",
    )


def all_gpus_of_whole_nodes_are_asked_for(objects: Objects, machine: Machine) -> bool:
    limits = pod_of(objects)["spec"]["containers"][0]["resources"]["limits"]
    return bool(limits["nvidia.com/gpu"] == machine.num_accelerators)


RULES: tuple[Callable[[Objects, Machine], bool], ...] = (
    *(
        provisioning_is_asked_for_on_the_jobset,
        topology_is_asked_for_on_the_pods,
        there_is_one_pod_set,
    ),
    *(
        interfaces_are_json_and_one_per_nic,
        a_bucket_has_its_sidecar,
        container_0_is_the_run,
        daemons_end_with_the_run,
    ),
    *(
        the_daemon_has_its_devices,
        plugin_and_daemon_work_together,
        pods_are_never_restarted_in_place,
    ),
    all_gpus_of_whole_nodes_are_asked_for,
)


def broken_rules(manifests: str, machine: Machine) -> Iterator[str]:
    """Names of the rules that rendered manifests break."""
    objects = {each["kind"]: each for each in yaml.safe_load_all(manifests) if each}
    for rule in RULES:
        if not rule(objects, machine):
            yield rule.__name__
