"""The blueprint of a Slurm cluster and its deployment file.

Three groups, deployed one after the other: the network with the script of the image; the image
itself, on which Slurm and the network stack are installed; and the cluster. Settings are those of
the modules of Cluster Toolkit 1.95.0
(https://github.com/GoogleCloudPlatform/cluster-toolkit/tree/v1.95.0).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from drillyard.hardware.cloud_limits import boot_image
from drillyard.hardware.cluster_toolkit import slurm_machines, toolkit_release
from drillyard.hardware.facts import cited
from drillyard.hardware.network_stacks import NetworkStack
from drillyard.plan_files import ExplainedField
from drillyard.provision.terraform_document import Body, because
from drillyard.provision.toolkit import scripts
from drillyard.provision.toolkit.accounts import (
    CONTROLLER,
    NODES,
    account_of,
    add_accounts,
    bucket_viewers,
)
from drillyard.provision.toolkit.blueprint_document import BlueprintDocument
from drillyard.provision.toolkit.networks import (
    PRIVATE,
    add_data_networks,
    add_network,
    home_connection,
    image_network,
)
from drillyard.provision.toolkit.nodeset import SUSPEND_SECONDS, add_nodes, nodeset_settings
from drillyard.provision.toolkit.settings import CONTROLLER_DISK, HOME, LOGIN, SlurmCluster
from drillyard.provision.toolkit.slurm_conf import SCHEDULER_PARAMETERS, slurm_conf

IMAGE_MACHINE = "n2-standard-16"
BASE, IMAGE, CLUSTER = "base", "image", "cluster"
TERRAFORM_GROUPS = (BASE, CLUSTER)
_STARTUP = "modules/scripts/startup-script"
_VARIABLES = "/var/tmp/slurm_vars.json"  # noqa: S108 - on the machine that builds the image
_IMAGE = "$(vars.instance_image)"


@dataclass(frozen=True)
class Blueprint:
    """Both documents, and why each value is as it is."""

    blueprint: dict[str, Any]
    deployment: dict[str, Any]
    image_family: str
    fields: tuple[ExplainedField, ...]


def slurm_blueprint(slurm: SlurmCluster) -> Blueprint:
    """The documents of a cluster that the rules allow."""
    document = BlueprintDocument(slurm.settings.name)
    document.start_group(BASE)
    add_network(document, slurm)
    add_accounts(document)
    _add_image_script(document, slurm)
    document.start_group(IMAGE)
    family = _add_image(document, slurm)
    document.start_group(CLUSTER)
    used, networks = add_data_networks(document, slurm)
    home = _add_home(document, slurm)
    startup = _add_node_startup(document, slurm)
    body = nodeset_settings(slurm, networks)
    nodes = ["network", *used, *startup, account_of(NODES)]
    partition = add_nodes(document, slurm, nodes, body)
    _add_login(document, slurm)
    head = ["network", partition, "login", home, account_of(CONTROLLER)]
    _add_controller(document, slurm, head)
    return Blueprint(
        document.as_value(), _deployment(slurm, family), family, tuple(document.fields)
    )


def _deployment(slurm: SlurmCluster, family: str) -> dict[str, Any]:
    settings = slurm.settings
    return {
        "terraform_backend_defaults": {
            "type": "gcs",
            "configuration": {"bucket": slurm.state_bucket},
        },
        "vars": {
            "deployment_name": settings.name,
            "project_id": settings.project,
            "region": settings.region,
            "zone": slurm.pool.zone,
            "labels": dict(settings.labels),
            "instance_image": {"project": settings.project, "family": family},
        },
    }


def _runner(kind: str, name: str, content: str) -> dict[str, str]:
    return {"type": kind, "destination": name, "content": content}


def _stack_install(stack: NetworkStack | None) -> list[dict[str, str]]:
    if stack is None or stack.name not in ("gib", "tcpxo"):
        return []
    gib = stack.name == "gib"
    text = scripts.install_gib(toolkit_release()) if gib else scripts.install_tcpxo()
    return [_runner("shell", f"install_{stack.name}.sh", text)]


def _add_image_script(document: BlueprintDocument, slurm: SlurmCluster) -> None:
    release = toolkit_release()
    lustre = slurm.own.home == "lustre"
    runners = [
        _runner("data", _VARIABLES, scripts.slurm_variables(lustre=lustre)),
        _runner("shell", "install_slurm.sh", scripts.install_slurm(release)),
        _runner("shell", "install_containers.sh", scripts.install_containers()),
        *_stack_install(slurm.network.stack),
    ]
    why = "Slurm, containers and the network stack are in the image: a node starts with them"
    document.add(
        "image-script",
        _STARTUP,
        {
            "install_ansible": because(True, "slurm-gcp is installed by a playbook"),
            "enable_gpu_network_wait_online": because(
                True, "slurmd starts once all NICs are there"
            ),
            "docker": because(
                {"enabled": True, "world_writable": True}, "daemons of network stacks run in it"
            ),
            "runners": because(runners, why, cited(release, "slurm_gcp")),
            "bucket_viewers": bucket_viewers(),
        },
    )


def _add_image(document: BlueprintDocument, slurm: SlurmCluster) -> str:
    """Add the image; its family, which is named after all that the image is made of."""
    row = boot_image(slurm.pool.machine.architecture)
    project, source = row.image.split("/")
    content = json.dumps(
        [document.settings("image-script"), row.image, slurm.settings.creation.disk_gib],
        sort_keys=True,
    )
    family = f"{slurm.settings.name}-slurm-{hashlib.sha256(content.encode()).hexdigest()[:8]}"
    document.add(
        "slurm-image",
        "modules/packer/custom-image",
        {
            "source_image_family": because(source, "with NVIDIA's driver", cited(row, "image")),
            "source_image_project_id": because([project], "Google's", cited(row, "image")),
            "image_family": because(
                family, "nodes start from it; another content is another family"
            ),
            "machine_type": because(IMAGE_MACHINE, "to build an image needs no GPU"),
            "disk_size": because(
                slurm.settings.creation.disk_gib,
                "the disk of a node is not smaller",
                "cluster.yaml: cluster.disk_gib",
            ),
            "omit_external_ip": because(
                slurm.settings.creation.private_nodes, "as the nodes", PRIVATE
            ),
            **image_network(slurm),
        },
        use=["network", "image-script", account_of(NODES)],
        kind="packer",
    )
    return family


def _add_home(document: BlueprintDocument, slurm: SlurmCluster) -> str:
    source = "cluster.yaml: cluster.head.home"
    size = because(slurm.home_gib, "its size", "cluster.yaml: cluster.head.home_gib")
    mount = because(HOME, "all nodes share it: code, runs, checkpoints")
    if slurm.own.home == "filestore":
        protected = slurm.settings.creation.deletion_protection
        return document.add(
            "home",
            "modules/file-system/filestore",
            {
                "filestore_tier": because(slurm.home.tier, "its speed grows with its size", source),
                "size_gb": size,
                "local_mount": mount,
                "mount_options": because("defaults,hard", "a run waits for a slow server"),
                **home_connection(slurm),
                "deletion_protection": because(
                    {"enabled": protected, "reason": "data of runs"},
                    "whether it can be deleted",
                    "cluster.yaml: cluster.deletion_protection",
                ),
            },
            use=["network"],
        )
    connection, use = home_connection(slurm), ["network"]
    if not connection:
        source = "modules/network/private-service-access"
        use.append(document.add("private-access", source, {}, use=["network"]))
    return document.add(
        "home",
        "modules/file-system/managed-lustre",
        {
            "name": because(f"{slurm.settings.name}-home", "the cluster's"),
            "size_gib": size,
            "per_unit_storage_throughput": because(
                slurm.home.throughput, "MB/s of each TiB", cited(slurm.home, "throughput")
            ),
            "local_mount": mount,
            "remote_mount": because("lustrefs", "the name of the file system"),
            **connection,
        },
        use=use,
    )


def _add_node_startup(document: BlueprintDocument, slurm: SlurmCluster) -> list[str]:
    """The script of each start of a node, where its machine or network stack needs one."""
    body: Body = {}
    if slurm.pool.machine.local_disks is not None:
        body["local_ssd_filesystem"] = because(
            {"fs_type": "ext4", "mountpoint": "/mnt/localssd", "permissions": "1777"},
            "local SSDs come without a file system",
            cited(slurm.pool.machine, "local_disks"),
        )
    stack = slurm.network.stack
    if stack is not None and stack.sidecar is not None and slurm.data:
        body["runners"] = because(
            [_runner("shell", "install_plugin.sh", scripts.install_plugin(stack))],
            "the libraries of the network stack, where runs look for them",
            cited(stack, "images"),
        )
    if not body:
        return []
    return [document.add("node-startup", _STARTUP, {**body, "bucket_viewers": bucket_viewers()})]


def _add_login(document: BlueprintDocument, slurm: SlurmCluster) -> None:
    document.add(
        "login",
        "community/modules/scheduler/schedmd-slurm-gcp-v6-login",
        {
            "name_prefix": because(LOGIN, "a part of its name"),
            "machine_type": because(
                slurm.own.login, "it runs no jobs", "cluster.yaml: cluster.head.login"
            ),
            "instance_image": because(_IMAGE, "as the nodes: programs are built there"),
            "instance_image_custom": because(True, "it is not one of the toolkit's own"),
            "disk_type": because(CONTROLLER_DISK, "a boot disk that any machine can have"),
            "disk_size_gb": because(
                slurm.settings.creation.disk_gib,
                "not smaller than the image",
                "cluster.yaml: cluster.disk_gib",
            ),
            "enable_login_public_ips": because(
                not slurm.settings.creation.private_nodes, "how one logs in", PRIVATE
            ),
        },
        use=["network", account_of(LOGIN)],
    )


def _add_controller(document: BlueprintDocument, slurm: SlurmCluster, use: list[str]) -> None:
    row = slurm_machines()[slurm.pool.machine.name]
    creation, stack = slurm.settings.creation, slurm.network.stack
    body: Body = {
        "slurm_cluster_name": because(
            slurm.settings.name, "names of nodes begin with it", "cluster.yaml: name"
        ),
        "machine_type": because(
            slurm.own.controller, "slurmctld and slurmdbd", "cluster.yaml: cluster.head.controller"
        ),
        "instance_image": because(_IMAGE, "as the nodes: the same version of Slurm"),
        "instance_image_custom": because(True, "it is not one of the toolkit's own"),
        "disk_type": because(CONTROLLER_DISK, "a boot disk that any machine can have"),
        "disk_size_gb": because(
            creation.disk_gib, "not smaller than the image", "cluster.yaml: cluster.disk_gib"
        ),
        "enable_controller_public_ips": because(
            not creation.private_nodes, "as the nodes", PRIVATE
        ),
        "enable_cleanup_compute": because(True, "nodes that jobs asked for go with the cluster"),
        "enable_slurm_auth": because(True, "Slurm's own key in place of munge"),
        "slurm_conf_template": because(
            slurm_conf(), "accounts, process tracking and preemption as a launch expects them"
        ),
        "cloud_parameters": because(
            {
                "resume_timeout": row.resume_seconds,
                "suspend_timeout": SUSPEND_SECONDS,
                "prolog_flags": "Alloc,Contain",
                "scheduler_parameters": list(SCHEDULER_PARAMETERS),
            },
            "a node that does not come in time is given up; prologs end before ranks start; where"
            " one fails, the job is queued again and not held",
            cited(row, "resume_seconds"),
        ),
    }
    if stack is not None and stack.sidecar is not None and slurm.data:
        for key, text, why in (
            ("prolog_scripts", scripts.daemon_prolog(stack), "starts"),
            ("epilog_scripts", scripts.daemon_epilog(), "ends"),
        ):
            content = [{"filename": f"{scripts.DAEMON}.sh", "content": text}]
            body[key] = because(
                content, f"it {why} the daemon of {stack.name}", cited(stack, "sidecar")
            )
    document.add(
        "controller", "community/modules/scheduler/schedmd-slurm-gcp-v6-controller", body, use=use
    )
