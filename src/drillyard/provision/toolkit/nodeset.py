"""The nodes of a Slurm cluster: nodeset and partition.

Nodes of flex-start come when a job asks for them and go after a week; all others are there from
the start. Their names and the counts go into slurm.conf with each deployment, so a changed count
or partition reaches it by deploying again.
"""

from __future__ import annotations

from drillyard.hardware.cloud_limits import way_of_buying
from drillyard.hardware.cluster_toolkit import slurm_machines
from drillyard.hardware.facts import cited
from drillyard.provision.gcp.placement import is_compact
from drillyard.provision.gcp.reservation_rules import reservation_value
from drillyard.provision.prices import DEFAULT_DISK
from drillyard.provision.terraform_document import Body, because
from drillyard.provision.toolkit.blueprint_document import BlueprintDocument
from drillyard.provision.toolkit.settings import SlurmCluster
from drillyard.provision.toolkit.toolkit_rules import nodeset_conflicts

SUSPEND_SECONDS = 600
_CONSUMPTION = "cluster.yaml: consumption"
_SOURCE = "community/modules/compute/schedmd-slurm-gcp-v6-nodeset"


def nodeset_settings(slurm: SlurmCluster, networks: str | None) -> Body:
    """The settings of the only nodeset. `networks`: the expression of its additional networks,
    where no module that it uses has them."""
    pool, machine, creation = slurm.pool, slurm.pool.machine, slurm.settings.creation
    row = slurm_machines()[machine.name]
    flex = pool.consumption == "flex-start"
    assert machine.cores is not None and machine.vcpus is not None
    body: Body = {
        "machine_type": because(machine.name, "the machine", "cluster.yaml: machine"),
        "node_count_static": because(
            0 if flex else pool.nodes, "nodes that are always there", "cluster.yaml: nodes"
        ),
        "node_count_dynamic_max": because(
            pool.nodes if flex else 0, "nodes that jobs ask for", "cluster.yaml: nodes"
        ),
        "enable_placement": because(
            is_compact(pool, creation),
            "whether the nodes are near each other",
            "cluster.yaml: cluster.compact_placement",
        ),
        "disk_type": because(
            machine.boot_disk or DEFAULT_DISK,
            "a boot disk that the machine can have",
            cited(machine, "boot_disk") if machine.boot_disk else "drillyard",
        ),
        "disk_size_gb": because(
            creation.disk_gib, "the boot disk", "cluster.yaml: cluster.disk_gib"
        ),
        "enable_public_ips": because(
            not creation.private_nodes,
            "how the nodes reach the internet",
            "cluster.yaml: cluster.private_nodes",
        ),
        "bandwidth_tier": because("gvnic_enabled", "the network card that GPU machines have"),
        "on_host_maintenance": because("TERMINATE", "a machine with GPUs cannot move"),
        "advanced_machine_features": because(
            {"threads_per_core": None}, "as many threads as the machine has"
        ),
        "node_conf": because(
            {
                "SocketsPerBoard": row.sockets,
                "CoresPerSocket": machine.cores // row.sockets,
                "ThreadsPerCore": machine.vcpus // machine.cores,
            },
            "how slurm.conf counts the cores",
            cited(row, "sockets"),
        ),
        "instance_image": because("$(vars.instance_image)", "the image that this blueprint builds"),
        "instance_image_custom": because(True, "it is not one of the toolkit's own"),
    }
    if networks is not None:
        body["additional_networks"] = because(
            networks, "in the order of the NICs", slurm.network.interfaces[0].source
        )
    body |= _bought(slurm)
    plain = {key: getattr(value, "value", value) for key, value in body.items()}
    assert not [*nodeset_conflicts(plain, machine.name)], "refused by toolkit_problems"
    return body


def _bought(slurm: SlurmCluster) -> Body:
    """What says how the nodes are bought; on demand needs nothing."""
    pool = slurm.pool
    if pool.consumption == "spot":
        return {"enable_spot_vm": because(True, "how they are bought", _CONSUMPTION)}
    if pool.consumption == "flex-start":
        hours = way_of_buying("flex-start").longest_hours
        assert hours is not None
        flex = {"enabled": True, "max_run_duration": hours * 3600, "use_job_duration": True}
        why = "asked for by jobs, each for as long as its time limit, at most a week"
        return {"dws_flex": because(flex, why, cited(way_of_buying("flex-start"), "longest_hours"))}
    if pool.reservations:
        value = reservation_value(pool.reservations[0], slurm.settings.project)
        why = "the nodes are taken from this reservation alone"
        return {"reservation_name": because(value, why, "cluster.yaml: reservation")}
    return {}


def add_nodes(document: BlueprintDocument, slurm: SlurmCluster, use: list[str], body: Body) -> str:
    """Add nodeset and partition; the partition's id. `use`: the network and startup script."""
    document.add("nodes", _SOURCE, body, use=use)
    row = slurm_machines()[slurm.pool.machine.name]
    conf = {
        "OverSubscribe": "EXCLUSIVE",
        "ResumeTimeout": row.resume_seconds,
        "SuspendTimeout": SUSPEND_SECONDS,
    }
    return document.add(
        "partition",
        "community/modules/compute/schedmd-slurm-gcp-v6-partition",
        {
            "partition_name": because(
                slurm.partition, "the partition of runs", "cluster.yaml: slurm.partition"
            ),
            "is_default": because(True, "it is the only one"),
            "exclusive": because(
                slurm.pool.consumption == "flex-start",
                "nodes of flex-start go with their job; others stay for the next one",
                _CONSUMPTION,
            ),
            "partition_conf": because(
                {key: str(value) for key, value in conf.items()},
                "whole nodes; a node that does not come in time is suspended, and is idle again",
                cited(row, "resume_seconds"),
            ),
        },
        use=["nodes"],
    )
