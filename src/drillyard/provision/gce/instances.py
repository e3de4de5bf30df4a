"""The nodes: one virtual machine each.

Each is a resource of its own, so the plan names all of them, their names are the ranks' hosts
before they exist, and an edit of labels or keys changes them in place. From an instance template,
whose values cannot change, the same edit would replace every machine, and its capacity might not
come back.

What each way of buying demands is that of
https://cloud.google.com/compute/docs/instances/provisioning-models. Local SSDs come with the
machines that have them (https://cloud.google.com/compute/docs/disks/local-ssd), as raw disks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from drillyard.hardware.cloud_limits import boot_image
from drillyard.hardware.facts import cited
from drillyard.hardware.machines import Machine
from drillyard.provision.cluster_plan import Pool
from drillyard.provision.gce.config import GceConfig
from drillyard.provision.gce.login import startup_script, user_of
from drillyard.provision.gcp.names import described, labelled, named
from drillyard.provision.gcp.node_identity import SCOPES
from drillyard.provision.gcp.node_network import NodeNetwork
from drillyard.provision.gcp.placement import is_compact, nodes_of_domain
from drillyard.provision.gcp.pool_networks import PoolNetwork
from drillyard.provision.gcp.reservation_rules import RESERVATION_KEY, reservation_value
from drillyard.provision.gcp.settings import GoogleSettings
from drillyard.provision.node_login import public_key, verbatim
from drillyard.provision.prices import DEFAULT_DISK
from drillyard.provision.terraform_document import (
    Because,
    Body,
    TerraformDocument,
    because,
    reference,
)

KIND = "google_compute_instance"
_CONSUMPTION = "cluster.yaml: consumption"
_COMPUTE = "google_project_service.compute"


def node_names(name: str, nodes: int) -> list[str]:
    """The names of the nodes in the order of their ranks."""
    return [f"{name}-{number}" for number in range(nodes)]


def add_instances(
    document: TerraformDocument,
    settings: GoogleSettings,
    network: PoolNetwork,
    nodes: NodeNetwork,
    identity: Sequence[str],
) -> tuple[str, ...]:
    """Add the nodes; their addresses in the order of the ranks. `nodes`: the network of the first
    NIC; `identity`: the addresses of their service account and its roles."""
    pool, (account, *roles) = network.pool, identity
    body: Body = {
        "zone": because(pool.zone, "one zone", "cluster.yaml: location.zone"),
        "machine_type": because(pool.machine.name, "the machine", "cluster.yaml: machine"),
        "boot_disk": [_boot_disk(settings, pool)],
        "network_interface": [*interfaces(settings, network, nodes)],
        "scheduling": [_scheduling(pool)],
        "reservation_affinity": reservation_of(pool, settings.project),
        "metadata": metadata_of(settings.cluster.section_as(GceConfig)),
        "service_account": account_of(account),
        "labels": labelled(settings.labels),
        "desired_status": because("RUNNING", "`up` starts one that was stopped, or preempted"),
        "allow_stopping_for_update": because(
            True, "what cannot change while it runs; `up` looks for runs before"
        ),
        "lifecycle": because(
            {"ignore_changes": ["boot_disk[0].initialize_params[0].labels"]},
            "other labels would replace the disk with its machine",
        ),
        "deletion_protection": because(
            settings.creation.deletion_protection,
            "whether `down` is refused",
            "cluster.yaml: cluster.deletion_protection",
        ),
    }
    if (policy := _add_placement(document, settings, pool)) is not None:
        body["resource_policies"] = policy
    return tuple(
        document.add(
            KIND,
            name.replace("-", "_"),
            {"name": named(name), **body},
            name=name,
            location=pool.zone,
            labelled=True,
            after=[*roles, *nodes.after],
        )
        for name in node_names(settings.name, pool.nodes)
    )


def account_of(address: str) -> Because:
    """The service account of a node, by its address."""
    return because(
        [{"email": reference(address, "email"), "scopes": SCOPES}],
        "the nodes' own account; what it may do is decided by its roles",
    )


def boot_image_of(settings: GoogleSettings, pool: Pool) -> Because:
    """The image of the boot disk."""
    given, machine = settings.cluster.section_as(GceConfig).boot_image, pool.machine
    row = boot_image(machine.architecture)
    return because(
        given or row.image,
        "with NVIDIA's driver" if given is None else "the image that the config names",
        "cluster.yaml: gce.boot_image" if given else cited(row, "image"),
    )


def disk_type_of(machine: Machine) -> Because:
    """The type of the boot disk."""
    source = cited(machine, "boot_disk") if machine.boot_disk is not None else "drillyard"
    why = "a boot disk that the machine can have"
    return because(machine.boot_disk or DEFAULT_DISK, why, source)


def _boot_disk(settings: GoogleSettings, pool: Pool) -> Body:
    return {
        "auto_delete": because(True, "it goes with its node"),
        "initialize_params": [
            {
                "image": boot_image_of(settings, pool),
                "size": because(
                    settings.creation.disk_gib, "the boot disk", "cluster.yaml: cluster.disk_gib"
                ),
                "type": disk_type_of(pool.machine),
                "labels": labelled(settings.labels),
            }
        ],
    }


def interfaces(
    settings: GoogleSettings, network: PoolNetwork, nodes: NodeNetwork
) -> Iterator[Body]:
    """The NICs of a node, in their order: first that of the subnet of the nodes."""
    host: Body = {
        "subnetwork": because(nodes.subnet, "the subnet of the nodes", nodes.source),
        "nic_type": because("GVNIC", "the network card that GPU machines have"),
    }
    if not settings.creation.private_nodes:
        host["access_config"] = because(
            [{"network_tier": "PREMIUM"}],
            "a public address, of Google's usual network tier",
            "cluster.yaml: cluster.private_nodes",
        )
    yield host
    for each in network.interfaces:
        rdma = each.device_mode == "RDMA"
        yield {
            "subnetwork": because(
                reference(each.subnet_address), "in the order of the NICs", each.source
            ),
            "nic_type": because(
                "MRDMA" if rdma else "GVNIC",
                "a NIC that other nodes' GPUs write to" if rdma else "a further NIC",
                each.source,
            ),
        }


def _scheduling(pool: Pool) -> Body:
    """A machine with GPUs cannot move while it runs. A spot one that is taken back, and one whose
    reservation ends, is stopped: its boot disk stays."""
    bound = pool.consumption == "calendar" or (
        pool.consumption == "reservation" and pool.machine.data_nics.count > 0
    )
    spot = pool.consumption == "spot"
    model = "RESERVATION_BOUND" if bound else "SPOT" if spot else "STANDARD"
    body: Body = {
        "provisioning_model": because(model, "how its capacity is bought", _CONSUMPTION),
        "on_host_maintenance": because("TERMINATE", "a machine with GPUs cannot move"),
        "automatic_restart": because(not spot, "spot machines are never restarted", _CONSUMPTION),
    }
    if spot:
        body["preemptible"] = because(True, "the provider demands it of spot machines")
    if spot or bound:
        why = "it is stopped when its capacity is taken back, and its boot disk stays"
        body["instance_termination_action"] = because("STOP", why, _CONSUMPTION)
    return body


def reservation_of(pool: Pool, project: str) -> Because:
    """The reservation that nodes are taken from, or none."""
    if not pool.reservations:
        why = "these nodes must not consume a reservation"
        return because([{"type": "NO_RESERVATION"}], why, _CONSUMPTION)
    values = [reservation_value(each, project) for each in pool.reservations]
    named_one = {"key": RESERVATION_KEY, "values": values}
    return because(
        [{"type": "SPECIFIC_RESERVATION", "specific_reservation": [named_one]}],
        "the nodes are taken from this reservation alone",
        "cluster.yaml: reservation",
    )


def metadata_of(section: GceConfig) -> Because:
    """Who logs in to a node, and its startup script."""
    found = {"enable-oslogin": "TRUE" if section.os_login else "FALSE"}
    if not section.os_login:
        assert section.identity_file is not None, "refused by login_problems"
        found["block-project-ssh-keys"] = "TRUE"
        found["ssh-keys"] = f"{user_of(section)}:{public_key(section.identity_file)}"
    if section.startup_script is not None:
        found["startup-script"] = startup_script(section.startup_script)
    plain = {key: verbatim(value) for key, value in found.items()}
    source = "cluster.yaml: gce.os_login, gce.identity_file, gce.startup_script"
    return because(plain, "who logs in, and what runs at each start", source)


def _add_placement(
    document: TerraformDocument, settings: GoogleSettings, pool: Pool
) -> Because | None:
    """The policy by which nodes are near each other, if they are; the value that names it."""
    policy: Body = {"collocation": "COLLOCATED"}
    why, source = "fewer switches between the nodes", "cluster.yaml: cluster.compact_placement"
    if nodes_of_domain(pool.machine) is not None:
        policy["gpu_topology"] = f"1x{pool.machine.link_domain_accelerators}"
        why = "all nodes in one NVLink domain"
        source = cited(pool.machine, "link_domain_accelerators")
    elif not is_compact(pool, settings.creation):
        return None
    address = document.add(
        "google_compute_resource_policy",
        "placement",
        {
            "name": named(settings.name),
            "description": described(settings.name),
            "region": because(settings.region, "where the nodes are", "cluster.yaml: location"),
            "group_placement_policy": because([policy], why, source),
        },
        name=settings.name,
        location=settings.region,
        after=[_COMPUTE],
    )
    return because([reference(address)], why, source)
