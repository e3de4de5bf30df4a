"""The nodes: one virtual machine and one boot disk each, joined by a GPU cluster, which is a place
in an InfiniBand fabric. A machine joins it when it is made, never later
(https://docs.nebius.com/compute/clusters/gpu).
"""

from __future__ import annotations

import json
from typing import Any

from drillyard.hardware.cloud_limits import boot_image
from drillyard.hardware.facts import cited
from drillyard.provision.nebius.nebius_rules import joins_fabric
from drillyard.provision.nebius.nebius_settings import NebiusSettings, add_named
from drillyard.provision.node_login import public_key, script_text, verbatim
from drillyard.provision.terraform_document import (
    Because,
    Body,
    TerraformDocument,
    because,
    reference,
)

KIND = "nebius_compute_v1_instance"
FILESYSTEM_KIND = "nebius_compute_v1_filesystem"
DISK_KIND = "nebius_compute_v1_disk"
GPU_CLUSTER_KIND = "nebius_compute_v1_gpu_cluster"
MOUNT_TAG = "shared"
BLOCK_BYTES = 4096
"""The block size of Nebius' own examples of boot disks and shared file systems."""
_CONSUMPTION = "cluster.yaml: consumption"
_SCRIPT = "/opt/drillyard/first-start"
_STORAGE = "cluster.yaml: storage.directory, nebius.filesystem, nebius.filesystem_gib"
PREEMPTIBLE = "https://docs.nebius.com/compute/virtual-machines/preemptible"


def fabric_of(settings: NebiusSettings) -> str | None:
    """The InfiniBand fabric that joins the nodes; None: none does."""
    if not joins_fabric(settings.cluster, settings.pool, settings.facts):
        return None
    found = settings.pool.machine.infiniband_fabrics.get(settings.region, ())
    return settings.section.fabric or found[0]


def joined_and_shared(document: TerraformDocument, settings: NebiusSettings) -> Body:
    """What joins the nodes, and what they share, as settings of each; both are added to the
    document where the cluster makes them."""
    body: Body = {}
    if (fabric := fabric_of(settings)) is not None:
        cluster = add_named(
            document,
            settings,
            GPU_CLUSTER_KIND,
            "nodes",
            {
                "infiniband_fabric": because(
                    fabric,
                    "a fabric that the region has for the machine",
                    "cluster.yaml: nebius.fabric"
                    if settings.section.fabric
                    else cited(settings.pool.machine, "infiniband_fabrics"),
                )
            },
        )
        body["gpu_cluster"] = {"id": because(reference(cluster), "InfiniBand joins the nodes")}
    if (filesystem := _filesystem(document, settings)) is not None:
        body["filesystems"] = [
            {
                "attach_mode": because("READ_WRITE", "every node reads and writes it"),
                "mount_tag": because(MOUNT_TAG, "the name by which the nodes mount it"),
                "existing_filesystem": {"id": filesystem},
            }
        ]
    return body


def machine_resources(settings: NebiusSettings) -> Body:
    """Platform and preset of the nodes."""
    machine = settings.pool.machine
    return {
        "platform": because(machine.name.partition("_")[0], "the machine", "cluster.yaml: machine"),
        "preset": because(machine.preset, "its GPUs and CPUs", cited(machine, "preset")),
    }


def boot_image_of(settings: NebiusSettings) -> Because:
    """The family of the boot disks' image: the config's, or ours."""
    given, row = settings.section.boot_image, boot_image("nebius")
    if given is not None:
        return because(given, "as the config says", "cluster.yaml: nebius.boot_image")
    return because(row.image, "with NVIDIA's driver", cited(row, "image"))


def add_nodes(
    document: TerraformDocument, settings: NebiusSettings, subnet: str, group: str
) -> tuple[str, ...]:
    """Add the nodes with what they share; their addresses in the order of the ranks. `subnet` and
    `group`: the addresses of the nodes' subnet and security group."""
    shared = _shared(document, settings, subnet, group)
    return tuple(
        _add_node(document, settings, f"{settings.name}-{number}", shared)
        for number in range(settings.pool.nodes)
    )


def _shared(document: TerraformDocument, settings: NebiusSettings, subnet: str, group: str) -> Body:
    """What is the same for all nodes."""
    body: Body = {
        "resources": machine_resources(settings),
        "network_interfaces": [
            {
                "name": because("eth0", "the first interface"),
                "subnet_id": because(reference(subnet), "the nodes' own subnet"),
                "ip_address": because({}, "an address of the subnet"),
                "public_ip_address": because({}, "by it one logs in"),
                "security_groups": because(
                    [{"id": reference(group)}], "logins from where the config says, and the nodes"
                ),
            }
        ],
        "cloud_init_user_data": _user_data(settings),
        "stopped": because(False, "one that was stopped, or preempted, is started again"),
        **_capacity(settings),
    }
    body |= joined_and_shared(document, settings)
    return body


def _add_node(
    document: TerraformDocument, settings: NebiusSettings, name: str, shared: Body
) -> str:
    label = name.replace("-", "_")
    disk = add_named(
        document,
        settings,
        DISK_KIND,
        label,
        {
            **boot_disk(settings),
            "source_image_family": {"image_family": boot_image_of(settings)},
        },
        name=name,
    )
    boot = {
        "attach_mode": because("READ_WRITE", "the node boots from it"),
        "existing_disk": {"id": because(reference(disk), "the node's own disk")},
    }
    hostname = because(name, "as the plan names it", "cluster.yaml: name")
    return add_named(
        document,
        settings,
        KIND,
        label,
        {"hostname": hostname, **shared, "boot_disk": boot},
        name=name,
    )


def boot_disk(settings: NebiusSettings) -> Body:
    """Type and size of a node's boot disk."""
    return {
        "type": because(
            "NETWORK_SSD",
            "what machines boot from",
            "https://docs.nebius.com/compute/storage/types",
        ),
        "size_gibibytes": because(
            settings.creation.disk_gib, "the boot disk", "cluster.yaml: cluster.disk_gib"
        ),
        "block_size_bytes": because(BLOCK_BYTES, "the usual size of blocks"),
    }


def reservation_policy(settings: NebiusSettings) -> Because:
    """From which capacity the nodes are taken, that are not preemptible."""
    if held := settings.pool.reservations:
        policy = {"policy": "STRICT", "reservation_ids": list(held)}
        why = "the nodes are taken from these capacity blocks alone"
        return because(policy, why, "cluster.yaml: reservation")
    why = "these nodes must not consume a reservation"
    return because({"policy": "FORBID"}, why, _CONSUMPTION)


def _capacity(settings: NebiusSettings) -> Body:
    """How the machines are bought. A preemptible one is stopped when its capacity is taken back."""
    if settings.pool.consumption == "spot":
        return {
            "preemptible": because(
                {"on_preemption": "STOP", "priority": 1},
                "its capacity may be taken back, and its boot disk stays",
                PREEMPTIBLE,
            ),
            "recovery_policy": because(
                "FAIL", "a preemptible machine is not started by itself", PREEMPTIBLE
            ),
        }
    return {"reservation_policy": reservation_policy(settings)}


def _filesystem(document: TerraformDocument, settings: NebiusSettings) -> Because | None:
    """The id of the file system that the nodes share, which is made or exists; None: none."""
    section = settings.section
    if section.filesystem is not None:
        why = "the file system that the config names"
        return because(section.filesystem, why, "cluster.yaml: nebius.filesystem")
    if section.filesystem_gib is None:
        return None
    made = add_named(
        document,
        settings,
        FILESYSTEM_KIND,
        MOUNT_TAG,
        {
            "type": because("NETWORK_SSD", "the type that Nebius has for training"),
            "size_gibibytes": because(
                section.filesystem_gib, "its size", "cluster.yaml: nebius.filesystem_gib"
            ),
            "block_size_bytes": because(BLOCK_BYTES, "the usual size of blocks"),
            "lifecycle": because(
                {"prevent_destroy": True}, "runs and checkpoints are never destroyed unasked"
            ),
        },
    )
    return because(reference(made), "the file system of this cluster", _STORAGE)


def _user_data(settings: NebiusSettings) -> Because:
    """What a node does at its first start, as cloud-init reads it
    (https://cloudinit.readthedocs.io/en/latest/reference/examples.html); JSON is YAML."""
    section = settings.section
    assert section.identity_file is not None, "refused by the rules"
    content: dict[str, Any] = {
        "users": [
            {
                "name": settings.user,
                "shell": "/bin/bash",
                "sudo": "ALL=(ALL) NOPASSWD:ALL",
                "ssh_authorized_keys": [public_key(section.identity_file)],
            }
        ],
        "runcmd": [*mount_commands(settings, settings.user)],
    }
    if section.startup_script is not None:
        text = script_text(section.startup_script)
        content["write_files"] = [{"path": _SCRIPT, "permissions": "0700", "content": text}]
        content["runcmd"].append([_SCRIPT])
    plain = verbatim("#cloud-config\n" + json.dumps(content, indent=2) + "\n")
    source = "cluster.yaml: nebius.user, identity_file, startup_script; storage.directory"
    return because(plain, "who logs in, what is mounted, and what runs at the first start", source)


def mount_commands(settings: NebiusSettings, owner: int | str) -> list[list[str]]:
    """Commands that mount the shared file system, now and at each later start. A new one belongs to
    root alone, so its own directory is given to `owner`."""
    directory = settings.cluster.storage.directory
    if directory is None:
        return []
    line = f"{MOUNT_TAG} {directory} virtiofs rw,nofail 0 0"
    commands = [
        ["mkdir", "-p", directory],
        ["sh", "-c", f"echo '{line}' >>/etc/fstab"],
        ["mount", directory],
    ]
    if settings.section.filesystem is None:
        commands.append(["chown", f"{owner}:", directory])
    return commands
