"""The nodes that flex-start grants: a managed group, and a request for all of them at once.

A machine of its own cannot wait for capacity for days, and several that wait apart would come one
by one. A request for a group's nodes is granted as a whole, when there is capacity, and costs
nothing until then (https://cloud.google.com/compute/docs/instance-groups/about-resize-requests-mig).
After their run duration, at most a week, the machines are deleted.

A request cannot be changed and a group only grows by one, so another number, machine or network of
the nodes is another group, with another name; another label, key or startup script is another
template of the same group, which nodes to come are made from. To remove a request, Google's
provider cancels it first (https://github.com/GoogleCloudPlatform/magic-modules,
mmv1/products/compute/ResizeRequest.yaml).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from drillyard.hardware.cloud_limits import way_of_buying
from drillyard.hardware.facts import cited
from drillyard.provision.cluster_plan import NodeGroup, Pool
from drillyard.provision.gce.config import GceConfig
from drillyard.provision.gce.instances import (
    account_of,
    boot_image_of,
    disk_type_of,
    interfaces,
    metadata_of,
    reservation_of,
)
from drillyard.provision.gcp.names import described, labelled, named
from drillyard.provision.gcp.node_network import NodeNetwork
from drillyard.provision.gcp.placement import is_compact
from drillyard.provision.gcp.pool_networks import PoolNetwork
from drillyard.provision.gcp.settings import GoogleSettings
from drillyard.provision.terraform_document import (
    Body,
    TerraformDocument,
    because,
    plain_value,
    reference,
)

GROUP_KIND = "google_compute_instance_group_manager"
REQUEST_KIND = "google_compute_resize_request"
_TEMPLATE_KIND = "google_compute_region_instance_template"
_LABEL = "nodes"
_CONSUMPTION = "cluster.yaml: consumption"
_CHANGEABLE = ("labels", "metadata", "lifecycle", "description", "name")
"""Of a template: what the nodes that are there need not be replaced for."""
_SECONDS_PER_HOUR = 3600


def add_node_group(
    document: TerraformDocument,
    settings: GoogleSettings,
    network: PoolNetwork,
    nodes: NodeNetwork,
    identity: Sequence[str],
) -> NodeGroup:
    """Add template, group and request. `nodes`: the network of the first NIC; `identity`: the
    addresses of the nodes' service account and its roles."""
    pool, (account, *roles) = network.pool, identity
    name, zone = settings.name, because(network.pool.zone, "one zone", "cluster.yaml: location")
    body = _template(settings, network, nodes, account)
    shape = {key: value for key, value in body.items() if key not in _CHANGEABLE}
    shape["disk"] = [
        {key: value for key, value in each.items() if key not in _CHANGEABLE}
        for each in body["disk"]
    ]
    template = f"{name}-{_digest(body)}"
    group = f"{name}-{_digest({'shape': shape, 'nodes': because(pool.nodes, 'nodes')})}"
    made_from = document.add(
        _TEMPLATE_KIND,
        _LABEL,
        {"name": because(template, "its content is a part of its name"), **body},
        name=template,
        location=settings.region,
        labelled=True,
        after=[*roles, *nodes.after],
    )
    members: Body = {
        "name": because(group, "other nodes are another group"),
        "description": described(name),
        "zone": zone,
        "base_instance_name": named(name),
        "version": because(
            [{"instance_template": reference(made_from, "self_link")}], "what nodes are made from"
        ),
        "instance_lifecycle_policy": because(
            [{"default_action_on_failure": "DO_NOTHING"}],
            "a machine of flex-start that ends is not made again",
            cited(way_of_buying("flex-start"), "longest_hours"),
        ),
        "wait_for_instances": because(False, "`up` waits for them itself"),
    }
    if (policy := _add_placement(document, settings, pool)) is not None:
        members["resource_policies"] = because(
            [{"workload_policy": reference(policy)}],
            "fewer switches between the nodes",
            "cluster.yaml: cluster.compact_placement",
        )
    made = document.add(GROUP_KIND, _LABEL, members, name=group, location=pool.zone)
    request = document.add(
        REQUEST_KIND,
        _LABEL,
        {
            "name": because(group, "the group has one request"),
            "description": described(name),
            "instance_group_manager": because(reference(made, "name"), "the group of the nodes"),
            "zone": zone,
            "resize_by": because(pool.nodes, "all nodes at once", "cluster.yaml: nodes"),
            "requested_run_duration": [{"seconds": _run_seconds(settings)}],
        },
        name=group,
        location=pool.zone,
    )
    return NodeGroup(made, request)


def _template(
    settings: GoogleSettings, network: PoolNetwork, nodes: NodeNetwork, account: str
) -> Body:
    pool = network.pool
    return {
        "description": described(settings.name),
        "region": because(settings.region, "where the nodes are", "cluster.yaml: location"),
        "machine_type": because(pool.machine.name, "the machine", "cluster.yaml: machine"),
        "disk": [
            {
                "boot": because(True, "the boot disk"),
                "auto_delete": because(True, "it goes with its node"),
                "source_image": boot_image_of(settings, pool),
                "disk_size_gb": because(
                    settings.creation.disk_gib, "the boot disk", "cluster.yaml: cluster.disk_gib"
                ),
                "disk_type": disk_type_of(pool.machine),
                "labels": labelled(settings.labels),
            }
        ],
        "network_interface": [*interfaces(settings, network, nodes)],
        "scheduling": [
            {
                "provisioning_model": because("FLEX_START", "how they are bought", _CONSUMPTION),
                "on_host_maintenance": because("TERMINATE", "a machine with GPUs cannot move"),
                "automatic_restart": because(False, "flex-start demands it", _CONSUMPTION),
                "instance_termination_action": because(
                    "DELETE", "flex-start demands it: nothing is kept", _CONSUMPTION
                ),
                "max_run_duration": [{"seconds": _run_seconds(settings)}],
            }
        ],
        "reservation_affinity": reservation_of(pool, settings.project),
        "metadata": metadata_of(settings.cluster.section_as(GceConfig)),
        "service_account": account_of(account),
        "labels": labelled(settings.labels),
        "lifecycle": because(
            {"create_before_destroy": True, "ignore_changes": ["disk[0].source_image"]},
            "the group uses one until it uses the next; a newer image of the family is none",
        ),
    }


def _run_seconds(settings: GoogleSettings) -> Any:
    row = way_of_buying("flex-start")
    hours = settings.cluster.section_as(GceConfig).max_run_hours
    assert row.longest_hours is not None
    seconds = round((hours or row.longest_hours) * _SECONDS_PER_HOUR)
    why = "after it the nodes are deleted; a shorter one is granted sooner"
    return because(
        seconds, why, "cluster.yaml: gce.max_run_hours" if hours else cited(row, "longest_hours")
    )


def _add_placement(document: TerraformDocument, settings: GoogleSettings, pool: Pool) -> str | None:
    """The policy by which the nodes of a group are near each other, if they are."""
    if not is_compact(pool, settings.creation):
        return None
    why, source = "fewer switches between the nodes", "cluster.yaml: cluster.compact_placement"
    return document.add(
        "google_compute_resource_policy",
        "placement",
        {
            "name": named(settings.name),
            "description": described(settings.name),
            "region": because(settings.region, "where the nodes are", "cluster.yaml: location"),
            "workload_policy": because([{"type": "HIGH_THROUGHPUT"}], why, source),
        },
        name=settings.name,
        location=settings.region,
        after=["google_project_service.compute"],
    )


def _digest(body: Body) -> str:
    text = json.dumps(plain_value([], "", "", body), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
