"""Every rendered resource against the provider's schema: each machine, way of buying and network
that are allowed, and the others are refused."""

from __future__ import annotations

import re
from functools import cache

import pytest
from tests.unit.provision.clusters import (
    GOOGLE_MACHINES,
    OFFERS,
    RESERVED,
    bodies,
    config,
    gpu_pools,
    plan,
)
from tests.unit.provision.provider_schema import VERSIONS, document_problems

from drillyard.config.cluster import cluster_model
from drillyard.errors import UserError
from drillyard.hardware import catalog
from drillyard.provision.provisioner import plan_cluster

MODES = ("on-demand", "reservation", "spot", "flex-start", "flex-start-queued", "calendar")
CREATION = {
    "version": "1.35",
    "authorized_networks": ["203.0.113.0/24"],
    "labels": {"team": "a"},
    "bucket_keep_versions": 2,
    "deletion_protection": True,
    "gpu_driver": "latest",
}


def ways(machine):
    """The networks that a machine's pods may have, as settings."""
    yield {}
    yield {"network_stack": "ethernet"}
    if machine.network_stack == "gib":
        yield {"kubernetes": {"pod_network": "dranet"}}
        if machine.pods is None:
            yield {"kubernetes": {"pod_network": "host"}}


SETTINGS = (
    {"cluster": CREATION},
    {"cluster": {"existing_bucket": True, "private_nodes": False, "registry": False}},
)
ALLOWED = [
    (machine.name, mode, number, way)
    for machine in GOOGLE_MACHINES
    for mode in machine.consumption
    for number, way in enumerate(
        [*ways(machine), *(SETTINGS if mode == machine.consumption[0] else ())]
    )
]


@cache
def planned(machine, mode, number):
    way = next(
        each for name, bought, n, each in ALLOWED if (name, bought, n) == (machine, mode, number)
    )
    return plan_cluster(cluster_model().model_validate(config(machine, mode, **way)))


@pytest.mark.parametrize("version", VERSIONS)
def test_every_rendered_resource_is_one_of_the_provider(version):
    found = {
        (machine, mode, number): wrong
        for machine, mode, number, _ in ALLOWED
        if (wrong := document_problems(planned(machine, mode, number).terraform, version))
    }
    assert not found, next(iter(found.items()))


def test_the_checker_finds_what_is_wrong():
    """Against a document with a mistake of each kind."""
    document = planned("a4-highgpu-8g", "spot", 0).terraform
    network = {"name": "n", "mtu": "1460", "self_link": "x", "colour": 1, "timeouts": [{}, {}]}
    broken = {
        **document,
        "resource": {"google_compute_network": {"n": network}, "google_x": {"y": {}}},
    }
    wrong = " ".join(document_problems(broken, "7.45.0"))
    for name in ("n.mtu:", "n.self_link:", "n.colour:", "google_x:"):
        assert name in wrong
    assert (
        "max_run_duration"
        in planned("a4-highgpu-8g", "flex-start", 0).terraform["resource"][
            "google_container_node_pool"
        ]["team_flex_start"]["node_config"][0]
    )
    policy = {
        "resource": {
            "google_container_node_pool": {
                "p": {
                    "cluster": "c",
                    "node_config": [
                        {"host_maintenance_policy": [{"maintenance_interval": "PERIODIC"}]}
                    ],
                }
            }
        }
    }
    assert not document_problems(policy, "8.0.0")
    assert "host_maintenance_policy" in document_problems(policy, "8.7.0")[0]


@pytest.mark.parametrize(
    ("machine", "mode"),
    [(one.name, mode) for one in GOOGLE_MACHINES for mode in MODES if mode not in one.consumption],
)
def test_a_way_of_buying_that_the_machine_lacks_is_refused(machine, mode, tmp_path):
    with pytest.raises(UserError) as refused:
        plan(tmp_path, config(machine, mode))
    assert "consumption: " in str(refused.value)
    assert machine in str(refused.value)


def test_every_reference_is_to_a_resource_that_is_there():
    for machine, mode, number, _ in ALLOWED:
        found = planned(machine, mode, number).terraform
        known = {f"{kind}.{label}" for kind, named in found["resource"].items() for label in named}
        known |= {
            f"data.{kind}.{label}"
            for kind, named in found.get("data", {}).items()
            for label in named
        }
        text = str(found["resource"])
        references = set(re.findall(r"\$\{((?:data\.)?[a-z_]+\.[A-Za-z0-9_]+)\.[a-z_]+\}", text))
        assert text.count("${") == len(
            re.findall(r"\$\{(?:data\.)?[a-z_]+\.[A-Za-z0-9_]+\.[a-z_]+\}", text)
        )
        after = {
            each
            for named in found["resource"].values()
            for body in named.values()
            for each in body.get("depends_on", [])
        }
        assert references | after <= known


def test_the_plan_names_each_resource_once_and_in_the_documents_order():
    for machine, mode, number, _ in ALLOWED:
        found = planned(machine, mode, number)
        made = [each for each in found.resources if each.made_by == "terraform"]
        assert {each.address for each in made} == {
            f"{kind}.{label}"
            for kind, named in found.terraform["resource"].items()
            for label in named
        }
        assert len({(each.kind, each.location, each.name) for each in found.resources}) == len(
            found.resources
        )
        for each in made:
            body = bodies(found, each.kind)[each.address.split(".")[1]]
            labels = body.get("labels") or body.get("resource_labels") or {}
            if each.kind == "google_container_node_pool":
                labels = body["node_config"][0]["resource_labels"]
            assert each.labelled == (labels.get("drillyard-cluster") == "team")
            # What has no labels is found by its name, or by the account that it has.
            if not each.labelled and "iam_member" not in each.kind and "service" not in each.kind:
                assert each.name.startswith("team")
                assert body.get("description", "drillyard cluster team") == "drillyard cluster team"


def test_every_value_is_explained_with_a_source():
    for machine, mode, number, _ in ALLOWED:
        found = planned(machine, mode, number)
        explained = {each.place for each in found.fields}
        for kind, named in found.terraform["resource"].items():
            for label, body in named.items():
                for path in leaves({k: v for k, v in body.items() if k != "depends_on"}):
                    # A reason is that of a value, or of a block around it.
                    ends = [match.start() for match in re.finditer(r"[.\[]|$", path)]
                    above = {f"{kind}.{label}: {path[:end]}" for end in ends}
                    assert above & explained, f"{kind}.{label}: {path}"
        assert all(each.reason and each.source for each in found.fields)


def leaves(value, path=""):
    if isinstance(value, dict):
        for key, each in value.items():
            yield from leaves(each, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for number, each in enumerate(value):
            yield from leaves(each, path if len(value) == 1 else f"{path}[{number}]")
    else:
        yield path


def test_no_value_breaks_a_rule_that_only_the_cloud_has():
    """Rules of values that Terraform's provider does not know, on everything that is rendered."""
    for machine, mode, number, _ in ALLOWED:
        found = planned(machine, mode, number)
        networks = bodies(found, "google_compute_network")
        assert all(1300 <= each.get("mtu", 1460) <= 8896 for each in networks.values())
        for label, network in networks.items():
            ruled = label in bodies(found, "google_compute_firewall")
            assert ruled != ("network_profile" in network or label == "system")
        for pool in (
            *gpu_pools(found).values(),
            bodies(found, "google_container_node_pool")["cpu"],
        ):
            node = pool["node_config"][0]
            assert len(pool["name"]) <= 40
            assert "name_prefix" not in pool
            assert re.fullmatch(r"[0-9]+s", node.get("max_run_duration", "1s"))
            assert int(node.get("max_run_duration", "1s")[:-1]) <= 604800
            assert ("node_count" in pool) != ("autoscaling" in pool)
            scaling = pool.get("autoscaling", [{}])[0]
            assert not {"min_node_count", "max_node_count"} & scaling.keys()
            surge = pool["upgrade_settings"][0]
            assert surge["max_surge"] + surge["max_unavailable"] >= 1
            assert surge.get("strategy", "SURGE") == "SURGE"
            assert pool.get("placement_policy", [{"type": "COMPACT"}])[0]["type"] == "COMPACT"
            local = "ephemeral_storage_local_ssd_config" in node
            assert not (local and "local_nvme_ssd_block_config" in node)
            assert "host_maintenance_policy" not in node
        for policy in bodies(found, "google_compute_resource_policy").values():
            assert len([key for key in policy if key.endswith("_policy")]) == 1
        account = bodies(found, "google_service_account")["nodes"]["account_id"]
        assert re.fullmatch(r"[a-z][a-z0-9-]{4,28}[a-z0-9]", account)


@pytest.mark.parametrize(("machine", "mode"), OFFERS)
def test_the_pool_is_what_its_way_of_buying_demands(machine, mode):
    [pool] = gpu_pools(planned(machine, mode, 0)).values()
    node = pool["node_config"][0]
    affinity = node["reservation_affinity"][0]
    flexible = mode.startswith("flex-start")
    assert node.get("spot", False) == (mode == "spot")
    assert node.get("flex_start", False) == flexible
    assert ("max_run_duration" in node) == (mode == "flex-start")
    assert ("queued_provisioning" in pool) == (mode == "flex-start-queued")
    if mode in RESERVED:
        assert affinity == {
            "consume_reservation_type": "SPECIFIC_RESERVATION",
            "key": "compute.googleapis.com/reservation-name",
            "values": ["mine"],
        }
    else:
        assert affinity == {"consume_reservation_type": "NO_RESERVATION"}
    if flexible:
        assert pool["autoscaling"][0]["total_min_node_count"] == 0
        assert pool["autoscaling"][0]["total_max_node_count"] == 2
        assert pool["autoscaling"][0]["location_policy"] == "ANY"
        assert pool["initial_node_count"] == 0
    else:
        assert pool["node_count"] == 2
    assert pool["management"] == [{"auto_repair": not flexible, "auto_upgrade": True}]
    taints = {each["key"]: each for each in node["taint"]}
    assert taints["nvidia.com/gpu"] == {
        "key": "nvidia.com/gpu",
        "value": "present",
        "effect": "NO_SCHEDULE",
    }
    assert ("cloud.google.com/gke-spot" in taints) == (mode == "spot")
    assert ("cloud.google.com/gke-queued" in taints) == (mode == "flex-start-queued")


@pytest.mark.parametrize("machine", GOOGLE_MACHINES, ids=lambda each: each.name)
def test_the_pool_has_the_machines_gpus_disks_and_networks(machine):
    mode = machine.consumption[0]
    found = planned(machine.name, mode, 0)
    [pool] = gpu_pools(found).values()
    node = pool["node_config"][0]
    [gpu] = node["guest_accelerator"]
    assert (gpu["type"], gpu["count"]) == (machine.accelerator_type, machine.num_accelerators)
    assert node["disk_type"] == machine.boot_disk
    disks = node.get("ephemeral_storage_local_ssd_config")
    if machine.local_disks and not machine.link_domain_accelerators:
        assert disks == [{"local_ssd_count": machine.local_disks.count}]
    else:
        assert disks is None
    stack = catalog().network_stack(machine.network_stack)
    networks = pool.get("network_config", [{}])[0]
    if machine.pods is not None:
        assert networks == {"accelerator_network_profile": "auto"}
        assert not found.interfaces
        assert node["labels"] == {"cloud.google.com/gke-networking-dra-driver": "true"}
        return
    attached = networks.get("additional_node_network_configs", [])
    further = stack.additional_networks(machine)
    assert len(attached) == len(further) == len(found.interfaces)
    assert len(bodies(found, "google_compute_network")) == 1 + len({each.vpc for each in further})
    wanted = set(stack.pod_interfaces(machine).values()) - {"default"}
    assert wanted <= {each.network_object for each in found.interfaces}
