"""What is rendered for virtual machines: each machine and way of buying against the provider's
schema, and field by field."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pytest
from tests.unit.provision.clusters import RESERVED, bodies
from tests.unit.provision.offers import every_plan
from tests.unit.provision.provider_schema import (
    VERSIONS,
    document_problems,
    unknown_references,
)
from tests.unit.provision.test_schema import leaves
from tests.unit.provision.vm_clusters import KEY, NEEDS_DAEMON, OFFERS, config, plan

from drillyard.config.cluster import cluster_model
from drillyard.hardware import catalog
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.plan_directory import plan_directory
from drillyard.provision.plan_document import ClusterPlanDocument, plan_document
from drillyard.provision.provisioner import plan_cluster

PUBLIC = {"private_nodes": False, "authorized_networks": ["203.0.113.0/24"]}
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"network_stack": "ethernet", "cluster": {**PUBLIC, "labels": {"team": "a"}}},
    {"cluster": {"existing_bucket": True, "registry": False, "deletion_protection": True}},
    {"storage": {}},
)
VM = "google_compute_instance"
TEMPLATE = "google_compute_region_instance_template"
OF_HOSTS = [each for each in OFFERS if each[1] != "flex-start"]
"""Each node is a resource of its own."""


@cache
def planned(machine: str, mode: str, way: int = 0) -> ClusterPlan:
    content = config(machine, mode, **WAYS[way])
    if mode == "flex-start":
        settings = content.get("cluster", {})
        content["cluster"] = {**settings, "deletion_protection": False}
    return plan_cluster(cluster_model().model_validate(content))


EVERY = every_plan(OFFERS, len(WAYS))


@pytest.mark.parametrize("version", VERSIONS)
def test_every_rendered_resource_is_one_of_the_provider(version: str) -> None:
    wrong = {
        each: found
        for each in EVERY
        if (found := document_problems(planned(*each).terraform, version))
    }
    assert not wrong, next(iter(wrong.items()))


def test_every_reference_is_to_a_resource_that_is_there() -> None:
    for each in EVERY:
        assert not unknown_references(planned(*each).terraform)


def test_the_plan_names_each_resource_once_with_its_labels_and_descriptions() -> None:
    for each in EVERY:
        found = planned(*each)
        made = found.made_by_terraform
        assert {one.address for one in made} == {
            f"{kind}.{label}"
            for kind, named in found.terraform["resource"].items()
            for label in named
        }
        names = Counter((one.kind, one.location, one.name) for one in found.resources)
        assert set(names.values()) == {1}
        for one in made:
            body = bodies(found, one.kind)[one.address.split(".")[1]]
            assert one.labelled == (body.get("labels", {}).get("drillyard-cluster") == "team")
            if not one.labelled and "iam_member" not in one.kind and "service" not in one.kind:
                assert one.name.startswith("team")
                assert body.get("description", "drillyard cluster team") == "drillyard cluster team"


def test_every_value_is_explained_with_a_source() -> None:
    for each in EVERY:
        found = planned(*each)
        explained = {field.place for field in found.fields}
        for kind, named in found.terraform["resource"].items():
            for label, body in named.items():
                for path in leaves({k: v for k, v in body.items() if k != "depends_on"}):
                    ends = [match.start() for match in re.finditer(r"[.\[]|$", path)]
                    assert {f"{kind}.{label}: {path[:end]}" for end in ends} & explained, path
        assert all(field.reason and field.source for field in found.fields)


def test_the_same_config_gives_the_same_documents_byte_for_byte() -> None:
    content = config("a3-megagpu-8g", "on-demand")
    one, other = (plan_cluster(cluster_model().model_validate(content)) for _ in range(2))
    assert plan_document(one, ()).as_text() == plan_document(other, ()).as_text()
    assert plan_directory(one, ()) == plan_directory(other, ())


@pytest.mark.parametrize(("machine", "mode"), OF_HOSTS)
def test_each_node_is_what_machine_and_way_of_buying_demand(machine: str, mode: str) -> None:
    found, facts = planned(machine, mode), catalog().machine(machine)
    nodes = bodies(found, VM)
    assert [body["name"] for body in nodes.values()] == ["team-0", "team-1"]
    assert found.login is not None
    assert found.login.hosts == (f"{VM}.team_0", f"{VM}.team_1")
    (first, second) = nodes.values()
    assert {**first, "name": ""} == {**second, "name": ""}
    assert (first["machine_type"], first["zone"]) == (machine, "us-central1-b")
    assert "guest_accelerator" not in first  # These machines have their GPUs.
    assert first["desired_status"] == "RUNNING"
    [schedule] = first["scheduling"]
    bound = mode == "calendar" or (mode == "reservation" and facts.data_nics.count > 0)
    model = "RESERVATION_BOUND" if bound else "SPOT" if mode == "spot" else "STANDARD"
    assert schedule["provisioning_model"] == model
    assert schedule["on_host_maintenance"] == "TERMINATE"
    assert schedule["automatic_restart"] == (mode != "spot")
    assert schedule.get("preemptible", False) == (mode == "spot")
    stops = schedule.get("instance_termination_action") == "STOP"
    assert stops == (mode == "spot" or bound)
    [affinity] = first["reservation_affinity"]
    if mode in RESERVED:
        assert affinity["type"] == "SPECIFIC_RESERVATION"
        assert affinity["specific_reservation"] == [
            {"key": "compute.googleapis.com/reservation-name", "values": ["mine"]}
        ]
    else:
        assert affinity == {"type": "NO_RESERVATION"}
    [disk] = first["boot_disk"][0]["initialize_params"]
    assert (disk["type"], disk["size"]) == (facts.boot_disk, 200)
    assert ("arm64" in disk["image"]) == (facts.architecture == "arm64")
    assert disk["image"].startswith("ubuntu-os-accelerator-images/")


@pytest.mark.parametrize(("machine", "mode"), OFFERS)
def test_each_node_has_a_nic_in_each_network_of_its_stack(machine: str, mode: str) -> None:
    found, facts = planned(machine, mode), catalog().machine(machine)
    of_group = mode == "flex-start"
    body = bodies(found, TEMPLATE)["nodes"] if of_group else bodies(found, VM)["team_0"]
    stack = catalog().network_stack("ethernet" if machine in NEEDS_DAEMON else facts.network_stack)
    further = stack.additional_networks(facts)
    nics = body["network_interface"]
    assert [nic["subnetwork"] for nic in nics] == [
        "${google_compute_subnetwork.system.id}",
        *(f"${{google_compute_subnetwork.{each.label.replace('-', '_')}.id}}" for each in further),
    ]
    kinds = Counter(nic["nic_type"] for nic in nics)
    rdma = facts.data_nics.count if stack.name == "gib" else 0
    assert kinds == Counter({"GVNIC": 1 + len(further) - rdma, "MRDMA": rdma})
    assert not any("access_config" in nic for nic in nics)
    networks = bodies(found, "google_compute_network")
    assert len(networks) == 1 + len({each.vpc for each in further})
    profiles = {label for label, each in networks.items() if "network_profile" in each}
    assert profiles == ({"rdma"} if rdma else set())
    # Addresses of pods are those of Kubernetes.
    subnet = bodies(found, "google_compute_subnetwork")["system"]
    assert "secondary_ip_range" not in subnet


def test_firewall_rules_let_in_the_tunnel_and_the_nodes_and_nobody_else() -> None:
    found = planned("a4-highgpu-8g", "spot")
    rules = bodies(found, "google_compute_firewall")
    own = bodies(found, "google_compute_subnetwork")["system"]["ip_cidr_range"]
    assert rules["ssh"]["source_ranges"] == ["35.235.240.0/20"]
    assert rules["ssh"]["allow"] == [{"protocol": "tcp", "ports": ["22"]}]
    assert rules["internal"]["source_ranges"] == [own]
    assert not [label for label in rules if "rdma" in label]
    for rule in rules.values():
        assert IPv4Network(rule["source_ranges"][0]).prefixlen >= 20
    for each in EVERY:
        ranges = {
            one
            for rule in bodies(planned(*each), "google_compute_firewall").values()
            for one in rule["source_ranges"]
        }
        assert "0.0.0.0/0" not in ranges


def test_public_nodes_let_in_the_ranges_of_the_config_alone() -> None:
    found = planned("a3-megagpu-8g", "on-demand", 1)
    rule = bodies(found, "google_compute_firewall")["ssh"]
    assert rule["source_ranges"] == ["203.0.113.0/24"]
    assert "google_compute_router_nat" not in found.terraform["resource"]
    first, *others = bodies(found, VM)["team_0"]["network_interface"]
    assert first["access_config"] and not any("access_config" in each for each in others)
    assert "iap.googleapis.com" not in found.services
    assert "iap.googleapis.com" in planned("a3-megagpu-8g", "on-demand").services


def test_nodes_have_their_own_account_with_the_least_rights() -> None:
    found = planned("a4-highgpu-8g", "spot")
    roles = {body["role"] for body in bodies(found, "google_project_iam_member").values()}
    assert roles == {
        "roles/logging.logWriter",
        "roles/monitoring.metricWriter",
        "roles/artifactregistry.reader",
    }
    [grant] = bodies(found, "google_storage_bucket_iam_member").values()
    assert grant["role"] == "roles/storage.objectUser"
    assert grant["member"] == "${google_service_account.nodes.member}"
    [account] = bodies(found, VM)["team_0"]["service_account"]
    assert account["email"] == "${google_service_account.nodes.email}"
    taken = planned("a4-highgpu-8g", "spot", 2)
    assert "google_storage_bucket" not in taken.terraform["resource"]
    [grant] = bodies(taken, "google_storage_bucket_iam_member").values()
    assert grant["bucket"] == "team-runs" and taken.existing_bucket == "team-runs"
    assert (
        "google_storage_bucket_iam_member"
        not in planned("a4-highgpu-8g", "spot", 3).terraform["resource"]
    )


def test_a_key_is_put_on_the_nodes_and_those_of_the_project_are_kept_out(tmp_path: Path) -> None:
    found = plan(tmp_path, config(gce={"identity_file": "key"}))
    metadata = bodies(found, VM)["team_0"]["metadata"]
    assert metadata == {
        "enable-oslogin": "FALSE",
        "block-project-ssh-keys": "TRUE",
        "ssh-keys": f"drillyard:{KEY}",
    }
    assert found.login is not None
    assert (found.login.user, found.login.identity_file) == ("drillyard", str(tmp_path / "key"))
    by_project = bodies(planned("a4-highgpu-8g", "spot"), VM)["team_0"]["metadata"]
    assert by_project == {"enable-oslogin": "TRUE"}


def test_a_startup_script_stays_as_it_is_for_terraform(tmp_path: Path) -> None:
    """`${...}` and `%{...}` are expressions of Terraform, also in JSON."""
    script = '#!/bin/sh\nmount "${DISK:-/dev/nvme0n1}" /data # 100 %{done}\n'
    (tmp_path / "start.sh").write_text(script)
    gce = {"identity_file": "key", "startup_script": "start.sh", "user": "ann"}
    body = bodies(plan(tmp_path, config(gce=gce)), VM)["team_0"]
    written = body["metadata"]["startup-script"]
    assert written.replace("$${", "${").replace("%%{", "%{") == script
    assert written.count("$${") == 1 and written.count("%%{") == 1
    # The argument of its own would replace the machine at each edit.
    assert "metadata_startup_script" not in body
    assert body["metadata"]["ssh-keys"].startswith("ann:")


def test_other_labels_do_not_replace_the_disk() -> None:
    body = bodies(planned("a4-highgpu-8g", "spot", 1), VM)["team_0"]
    assert body["labels"] == {"drillyard-cluster": "team", "team": "a"}
    assert body["boot_disk"][0]["initialize_params"][0]["labels"] == body["labels"]
    ignored = body["lifecycle"]["ignore_changes"]
    assert ignored == ["boot_disk[0].initialize_params[0].labels"]


@pytest.mark.parametrize(
    ("machine", "mode", "settings", "policy"),
    [
        ("a3-megagpu-8g", "on-demand", {}, {"collocation": "COLLOCATED"}),
        ("a3-megagpu-8g", "spot", {}, None),
        ("a3-megagpu-8g", "spot", {"compact_placement": True}, {"collocation": "COLLOCATED"}),
        ("a3-megagpu-8g", "on-demand", {"compact_placement": False}, None),
        ("g2-standard-12", "on-demand", {}, None),
        (
            "a4x-highgpu-4g",
            "reservation",
            {},
            {"collocation": "COLLOCATED", "gpu_topology": "1x72"},
        ),
    ],
)
def test_placement_follows_machine_and_way_of_buying(
    machine: str, mode: str, settings: dict[str, Any], policy: Any, tmp_path: Path
) -> None:
    found = plan(tmp_path, config(machine, mode, cluster=settings))
    policies = bodies(found, "google_compute_resource_policy")
    assert [body["group_placement_policy"] for body in policies.values()] == (
        [[policy]] if policy else []
    )
    used = bodies(found, VM)["team_0"].get("resource_policies", [])
    assert used == (["${google_compute_resource_policy.placement.id}"] if policy else [])


def test_prices_are_of_nodes_disks_and_the_way_out() -> None:
    lines = {line.what: line for line in planned("a4-highgpu-8g", "spot").prices}
    assert [what.partition(":")[0] for what in lines] == [
        "team-spot",
        "team-spot",
        "NAT gateway, 2 nodes",
        "addresses of the NAT gateway, 1",
    ]
    assert all(line.running for line in lines.values())
    public = planned("a4-highgpu-8g", "spot", 1).prices
    assert public[-1].what == "addresses of nodes, 2"


@pytest.mark.parametrize(("machine", "mode"), OFFERS)
def test_every_offer_has_a_price_or_says_what_to_give_and_counts_its_quotas(
    machine: str, mode: str
) -> None:
    found = planned(machine, mode)
    document = plan_document(found, ())
    ClusterPlanDocument.model_validate(document.model_dump(), strict=False)
    [nodes] = [line for line in found.prices if line.pool]
    assert (nodes.usd_per_hour is None) == bool(nodes.missing)
    assert nodes.usd_per_hour is None or nodes.usd_per_hour.value > 0
    quotas = {quota.metric: quota.amount for quota in found.quotas}
    kinds = Counter(each.kind for each in found.resources)
    assert quotas["NETWORKS"] == kinds["google_compute_network"]
    assert quotas["SUBNETWORKS"] == kinds["google_compute_subnetwork"]
    assert quotas["FIREWALLS"] == kinds["google_compute_firewall"]
    assert quotas["ROUTERS"] == kinds["google_compute_router"]
    disks = [amount for name, amount in quotas.items() if name in ("HDB_TOTAL_GB", "SSD_TOTAL_GB")]
    assert disks == [2 * 200]
    assert not {"CPUS", "N2_CPUS"} & quotas.keys()


def test_a_thousand_nodes_are_planned_and_named(tmp_path: Path) -> None:
    found = plan(tmp_path, config(nodes=1000, cluster={"compact_placement": False}))
    assert found.login is not None
    assert found.login.hosts[-1] == f"{VM}.team_999"
    assert found.resources[-1].name == "team-999"


def test_the_directory_makes_it_without_helm_or_kubernetes() -> None:
    files = plan_directory(planned("a4-highgpu-8g", "spot"), ())
    script = files["apply.sh"][0]
    for word in ("helm", "get-credentials", "gke"):
        assert word not in script
    assert "instances list --filter=labels.drillyard-cluster=team --project=my-project" in script
    assert set(files) == {"main.tf.json", "backend.tf.json", "README.md", "apply.sh"}


def test_what_launch_needs_of_the_file_is_kept(tmp_path: Path) -> None:
    settings = {
        "gce": {"identity_file": "key", "directory": "/home/drillyard/project"},
        "storage": {"directory": "/shared", "bucket": "team-runs"},
        "environment": {"NCCL_DEBUG": "INFO"},
        "mounts": ["/data"],
        "processes_per_node": 4,
    }
    found = plan(tmp_path, config(**settings)).launch_settings
    assert found == {
        "name": "team",
        "platform": "ssh",
        "nodes": 2,
        "machine": "a4-highgpu-8g",
        "storage": settings["storage"],
        "image": "us-docker.pkg.dev/my-project/team/train:1",
        "mounts": ["/data"],
        "processes_per_node": 4,
        "environment": {"NCCL_DEBUG": "INFO"},
        "ssh": {
            "user": "drillyard",
            "identity_file": str(tmp_path / "key"),
            "directory": "/home/drillyard/project",
        },
    }
