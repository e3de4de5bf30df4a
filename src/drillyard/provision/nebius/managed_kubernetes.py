"""A cluster of Nebius' Managed Kubernetes: the control plane, a group of CPU nodes for the
controllers, one of GPU nodes that a GPU cluster joins, and NVIDIA's device plugin.

Names and limits are those of https://github.com/nebius/api/tree/main/nebius/mk8s/v1. The boot image
of GPU nodes has NVIDIA's driver, so the cluster needs no GPU operator; the device plugin is Nebius'
own application (https://github.com/nebius/nebius-solutions-library, modules/device-plugin).
"""

from __future__ import annotations

import json

from drillyard.launch.kubernetes.created_cluster import IMAGE_USER
from drillyard.provision.nebius.instances import (
    PREEMPTIBLE,
    boot_disk,
    boot_image_of,
    joined_and_shared,
    machine_resources,
    mount_commands,
    reservation_policy,
)
from drillyard.provision.nebius.kubernetes_rules import BOOT_IMAGE, cpu_machine_name
from drillyard.provision.nebius.nebius_settings import NebiusSettings, add_named
from drillyard.provision.node_login import verbatim
from drillyard.provision.prices import CPU_POOL
from drillyard.provision.terraform_document import (
    Because,
    Body,
    TerraformDocument,
    because,
    reference,
)

CLUSTER_KIND, NODE_GROUP_KIND = "nebius_mk8s_v1_cluster", "nebius_mk8s_v1_node_group"
RELEASE_KIND = "nebius_applications_v1alpha1_k8s_release"
CLUSTER = f"{CLUSTER_KIND}.cluster"
POOL_LABEL = "drillyard-pool"
"""The label of nodes with the name of their group. Nebius ignores labels with kubernetes.io."""
GPU_TAINT = "nvidia.com/gpu"
DEFAULT_VERSION = "1.35"
"""The first one whose nodes have the boot image by default
(https://github.com/nebius/nebius-solutions-library, soperator/installations/example)."""
ETCD_NODES = 3
_VERSION = "cluster.yaml: cluster.version"
_DEVICE_PLUGIN = "nvidia-device-plugin"


def add_cluster(document: TerraformDocument, settings: NebiusSettings, subnet: str) -> str:
    """Add the cluster with its nodes; the address of the control plane. `subnet`: that of the
    nodes' subnet."""
    ranges = list(settings.creation.authorized_networks)
    cluster = add_named(
        document,
        settings,
        CLUSTER_KIND,
        "cluster",
        {
            "control_plane": {
                "subnet_id": because(reference(subnet), "the nodes' own subnet"),
                "version": _version(settings),
                "etcd_cluster_size": because(ETCD_NODES, "it outlives the loss of one of them"),
                "endpoints": {
                    "public_endpoint": because(
                        {"allowed_cidrs": ranges} if ranges else {},
                        "who may reach it, with a login; no ranges: everybody",
                        "cluster.yaml: cluster.authorized_networks",
                    )
                },
            }
        },
    )
    creation, pool = settings.creation, settings.pool
    cpu_count = because(
        creation.cpu_pool.nodes, "its nodes", "cluster.yaml: cluster.cpu_pool.nodes"
    )
    gpu_count = because(pool.nodes, "its nodes", "cluster.yaml: nodes")
    joined = joined_and_shared(document, settings)
    # Also of the controllers' nodes: pods without GPUs read runs.
    shared = {"filesystems": joined.pop("filesystems"), **_mounts(settings)}
    cpu = {**_cpu_template(settings), **shared}
    gpu = {**_gpu_template(settings), **joined, **shared}
    groups = (
        _add_group(document, settings, subnet, CPU_POOL, cpu_pool_name(settings), cpu_count, cpu),
        _add_group(document, settings, subnet, "gpu", pool.name, gpu_count, gpu),
    )
    _add_device_plugin(document, settings, cluster, groups)
    return cluster


def cpu_pool_name(settings: NebiusSettings) -> str:
    """The name of the group of the controllers' nodes."""
    return f"{settings.name}-{CPU_POOL}"


def _add_group(
    document: TerraformDocument,
    settings: NebiusSettings,
    subnet: str,
    label: str,
    name: str,
    nodes: Because,
    template: Body,
) -> str:
    """Add a group of `nodes` nodes; its address. `template`: what is its nodes' own."""
    body: Body = {
        "parent_id": because(reference(CLUSTER), "the cluster that it is a part of"),
        "name": because(name, "the pool's name", "cluster.yaml: name, consumption"),
        "version": _version(settings),
        "fixed_node_count": nodes,
        # By default a change makes a further node first, and waits where the quota has none.
        "strategy": because(
            {"max_surge": {"count": 0}, "max_unavailable": {"count": 1}},
            "a change replaces nodes one by one, within the quota",
        ),
        "template": {
            "metadata": {"labels": because({POOL_LABEL: name}, "queues select nodes by it")},
            "instance_metadata": {
                "labels": because(settings.labels, "they identify the machines, also on bills")
            },
            "boot_disk": boot_disk(settings),
            "network_interfaces": _interfaces(settings, subnet),
            **template,
        },
        "labels": because(settings.labels, "they identify it", "cluster.yaml: name"),
    }
    return document.add(
        NODE_GROUP_KIND, label, body, name=name, location=settings.region, labelled=True
    )


def _cpu_template(settings: NebiusSettings) -> Body:
    platform, _, preset = cpu_machine_name(settings.creation.cpu_pool).partition("_")
    key = "cluster.yaml: cluster.cpu_pool.machine"
    return {
        "resources": {
            "platform": because(platform, "the controllers' machine", key),
            "preset": because(preset, "its CPUs and memory", key),
        },
    }


def _gpu_template(settings: NebiusSettings) -> Body:
    image = boot_image_of(settings)
    found = BOOT_IMAGE.fullmatch(str(image.value))
    assert found is not None, "refused by the rules"
    return {
        "resources": machine_resources(settings),
        "os": because(found["os"], image.reason, image.source),
        "gpu_settings": {
            "drivers_preset": because(found["drivers"], image.reason, image.source),
        },
        "taints": because(
            [{"key": GPU_TAINT, "value": "present", "effect": "NO_SCHEDULE"}],
            "only pods that ask for GPUs get these nodes",
        ),
        **_capacity(settings),
    }


def _mounts(settings: NebiusSettings) -> Body:
    """What a node does at its first start."""
    commands = mount_commands(settings, _owner(settings))
    user_data = "#cloud-config\n" + json.dumps({"runcmd": commands}, indent=2) + "\n"
    return {
        "cloud_init_user_data": because(
            verbatim(user_data),
            "mounts the shared file system",
            "cluster.yaml: storage.directory, nebius.filesystem, nebius.filesystem_gib",
        ),
    }


def _interfaces(settings: NebiusSettings, subnet: str) -> list[Body]:
    interface: Body = {"subnet_id": because(reference(subnet), "the nodes' own subnet")}
    if not settings.creation.private_nodes:
        key = "cluster.yaml: cluster.private_nodes"
        interface["public_ip_address"] = because({}, "the nodes have public addresses", key)
    return [interface]


def _capacity(settings: NebiusSettings) -> Body:
    if settings.pool.consumption == "spot":
        why = "its capacity may be taken back"
        return {"preemptible": because({}, why, PREEMPTIBLE)}
    return {"reservation_policy": reservation_policy(settings)}


def _version(settings: NebiusSettings) -> Because:
    given = settings.creation.version
    if given is not None:
        return because(given, "the version of Kubernetes", _VERSION)
    return because(DEFAULT_VERSION, "the first one whose nodes have the boot image")


def _owner(settings: NebiusSettings) -> int:
    """The user whose the file system's directory is: that of the pods."""
    section = getattr(settings.cluster, "kubernetes", None)
    given = None if section is None else section.run_as_user
    return given or IMAGE_USER


def _add_device_plugin(
    document: TerraformDocument, settings: NebiusSettings, cluster: str, groups: tuple[str, ...]
) -> None:
    name = f"{settings.name}-{_DEVICE_PLUGIN}"
    body: Body = {
        "parent_id": because(
            settings.project, "the project that pays for it", "cluster.yaml: location.project"
        ),
        "name": because(name, "the cluster's name, and what it is", "cluster.yaml: name"),
        "cluster_id": because(reference(cluster), "the cluster that it is installed on"),
        "application_name": because(_DEVICE_PLUGIN, "it offers the GPUs to pods"),
        "namespace": because(_DEVICE_PLUGIN, "a namespace of its own"),
        "product_slug": because(f"nebius/{_DEVICE_PLUGIN}", "Nebius' own application"),
        "labels": because(settings.labels, "they identify it", "cluster.yaml: name"),
    }
    document.add(
        RELEASE_KIND,
        "device_plugin",
        body,
        name=name,
        location=settings.region,
        labelled=True,
        after=groups,
    )
