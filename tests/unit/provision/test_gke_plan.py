"""The plan of a GKE cluster: what is rendered of its settings, and that it is a pure value."""

from __future__ import annotations

import json
import time

import pytest
import yaml
from tests.unit.launch.requests import WORKLOAD, planned, request
from tests.unit.provision.clusters import bodies, config, gpu_pools, plan

from drillyard.launch.kubernetes.gke import node_selector
from drillyard.launch.kubernetes.release import VALUES
from drillyard.provision.gcp.names import service_account_email


def as_text(found):
    return json.dumps(found.terraform)


def system_subnet(found):
    return bodies(found, "google_compute_subnetwork")["system"]


def test_the_same_config_gives_the_same_plan(tmp_path):
    content = config(
        "a3-megagpu-8g", cluster={"pools": [{"consumption": "flex-start", "nodes": 4}]}
    )
    one, two = plan(tmp_path, content), plan(tmp_path, content)
    assert as_text(one) == as_text(two)
    assert one == two


def test_a_plan_of_a_thousand_nodes_is_quick(tmp_path):
    """Its size does not depend on the number of nodes; a second is its promise, of CPU time."""
    content = config("a3-megagpu-8g", nodes=1000)
    started = time.process_time()
    found = plan(tmp_path, content)
    seconds = time.process_time() - started
    [pool] = gpu_pools(found).values()
    assert pool["node_count"] == 1000
    assert len(as_text(found)) == len(as_text(plan(tmp_path, config("a3-megagpu-8g", nodes=2)))) + 3
    assert seconds < 10


def test_no_value_of_the_environment_gets_into_a_plan(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret_value")
    found = plan(tmp_path, config(environment={"HF_TOKEN": "${env:HF_TOKEN}"}))
    assert "hf_secret_value" not in as_text(found) + str(found)


def test_pools_of_different_machines_share_networks_that_are_the_same(tmp_path):
    further = [
        {"name": "high", "machine": "a3-highgpu-8g", "consumption": "spot", "nodes": 300},
        {"name": "ultra", "machine": "a3-ultragpu-8g", "consumption": "spot", "nodes": 5},
        {"name": "b200", "machine": "a4-highgpu-8g", "consumption": "flex-start", "nodes": 5},
        {"name": "l4", "machine": "g2-standard-8", "consumption": "on-demand", "nodes": 5},
    ]
    found = plan(tmp_path, config("a3-megagpu-8g", nodes=1900, cluster={"pools": further}))
    attached = {
        name: [
            each["subnetwork"].split(".")[1]
            for each in pool.get("network_config", [{}])[0].get(
                "additional_node_network_configs", []
            )
        ]
        for name, pool in gpu_pools(found).items()
    }
    vpc = [f"vpc{number}" for number in range(1, 9)]
    rdma = ["gvnic_1", *(f"rdma_{number}" for number in range(8))]
    assert attached == {
        **{"team-spot": vpc, "high": vpc[:4], "ultra": rdma, "b200": rdma, "l4": []},
    }
    assert set(bodies(found, "google_compute_network")) == {"system", *vpc, "gvnic_1", "rdma"}
    # The shared subnets have room for the nodes of both pools.
    subnets = bodies(found, "google_compute_subnetwork")
    assert subnets["vpc1"]["ip_cidr_range"].endswith("/20")
    assert subnets["vpc5"]["ip_cidr_range"].endswith("/21")
    assert {each.network_object: each.device_mode for each in found.interfaces} == {
        **{f"vpc{number}": "NetDevice" for number in range(1, 9)},
        **{"gvnic-1": "NetDevice"},
        **{f"rdma-{number}": "RDMA" for number in range(8)},
    }


@pytest.mark.parametrize("machine", ["a4-highgpu-8g", "a3-megagpu-8g", "g2-standard-8"])
def test_a_further_pool_leaves_what_is_there_as_it_is(machine, tmp_path):
    """Whatever is added and wherever: no resource that is there gets another value."""
    alone = plan(tmp_path, config(machine)).terraform["resource"]
    others = ("a3-megagpu-8g", "a3-ultragpu-8g", "a3-highgpu-8g", "g2-standard-8")
    further = [
        {"name": f"p{number}", "machine": each, "consumption": "spot", "nodes": 400}
        for number, each in enumerate(others)
    ]
    more = plan(tmp_path, config(machine, cluster={"pools": further}))
    for kind, named in alone.items():
        assert bodies(more, kind) | named == bodies(more, kind)
    backwards = plan(tmp_path, config(machine, cluster={"pools": further[::-1]}))
    assert backwards.terraform == more.terraform


def test_interfaces_name_what_is_made(tmp_path):
    found = plan(tmp_path, config("a4-highgpu-8g"))
    names = {each.name for each in found.resources}
    assert found.interfaces[1].vpc == "team-rdma"
    assert found.interfaces[1].subnet == "team-rdma-0"
    assert {name for each in found.interfaces for name in (each.vpc, each.subnet)} <= names


def test_the_cluster_is_what_training_needs(tmp_path):
    cluster = bodies(plan(tmp_path, config()), "google_container_cluster")["cluster"]
    assert cluster["location"] == "us-central1"
    assert cluster["datapath_provider"] == "ADVANCED_DATAPATH"
    assert cluster["enable_multi_networking"] is True
    assert cluster["networking_mode"] == "VPC_NATIVE"
    assert cluster["workload_identity_config"] == [{"workload_pool": "my-project.svc.id.goog"}]
    assert cluster["addons_config"] == [{"gcs_fuse_csi_driver_config": [{"enabled": True}]}]
    assert "DCGM" in cluster["monitoring_config"][0]["enable_components"]
    assert cluster["release_channel"] == [{"channel": "REGULAR"}]
    [exclusion] = cluster["maintenance_policy"][0]["maintenance_exclusion"]
    assert exclusion["exclusion_options"] == [
        {"scope": "NO_MINOR_OR_NODE_UPGRADES", "end_time_behavior": "UNTIL_END_OF_SUPPORT"}
    ]
    assert cluster["private_cluster_config"][0]["enable_private_nodes"] is True
    assert cluster["deletion_protection"] is False
    assert "master_authorized_networks_config" not in cluster
    assert "min_master_version" not in cluster


def test_settings_of_the_cluster_are_rendered(tmp_path):
    settings = {
        "version": "1.34",
        "release_channel": "rapid",
        "authorized_networks": ["203.0.113.0/24"],
        "deletion_protection": True,
        "max_pods_per_node": 64,
        "labels": {"team": "a"},
        "disk_gib": 300,
        "cpu_pool": {"machine": "n2-standard-8", "nodes": 2},
        "ranges": {"nodes": "10.10.0.0/16", "pods": "10.64.0.0/12", "services": "10.11.0.0/20"},
        "gpu_driver": "latest",
        "registry": False,
    }
    found = plan(tmp_path, config(cluster=settings))
    cluster = bodies(found, "google_container_cluster")["cluster"]
    assert cluster["min_master_version"] == "1.34"
    assert cluster["release_channel"] == [{"channel": "RAPID"}]
    assert cluster["master_authorized_networks_config"] == [
        {"cidr_blocks": [{"cidr_block": "203.0.113.0/24"}]}
    ]
    assert cluster["deletion_protection"] is True
    assert cluster["default_max_pods_per_node"] == 64
    assert cluster["resource_labels"] == {"drillyard-cluster": "team", "team": "a"}
    subnet = system_subnet(found)
    assert subnet["ip_cidr_range"] == "10.10.0.0/16"
    assert [each["ip_cidr_range"] for each in subnet["secondary_ip_range"]] == [
        *("10.64.0.0/12", "10.11.0.0/20")
    ]
    cpu = bodies(found, "google_container_node_pool")["cpu"]
    assert (cpu["node_count"], cpu["node_config"][0]["machine_type"]) == (2, "n2-standard-8")
    [pool] = gpu_pools(found).values()
    assert pool["node_config"][0]["disk_size_gb"] == 300
    [driver] = pool["node_config"][0]["guest_accelerator"][0]["gpu_driver_installation_config"]
    assert driver == {"gpu_driver_version": "LATEST"}
    assert not bodies(found, "google_artifact_registry_repository")
    assert found.labels == {"drillyard-cluster": "team", "team": "a"}


def test_nodes_with_public_addresses_need_no_nat(tmp_path):
    found = plan(tmp_path, config(cluster={"private_nodes": False}))
    assert not bodies(found, "google_compute_router_nat")
    cluster = bodies(found, "google_container_cluster")["cluster"]
    assert cluster["private_cluster_config"][0]["enable_private_nodes"] is False
    assert bodies(plan(tmp_path, config()), "google_compute_router_nat")


def test_the_controllers_pool_is_never_queued_nor_for_gpus(tmp_path):
    found = plan(tmp_path, config(consumption="flex-start-queued"))
    cpu = bodies(found, "google_container_node_pool")["cpu"]
    assert cpu["node_count"] == 1
    assert "queued_provisioning" not in cpu
    assert not {"taint", "flex_start", "guest_accelerator"} & cpu["node_config"][0].keys()


def test_a_new_bucket_has_a_hierarchical_namespace_or_versions(tmp_path):
    bucket = bodies(plan(tmp_path, config()), "google_storage_bucket")["runs"]
    assert bucket["name"] == "team-runs"
    assert bucket["location"] == "us-central1"
    assert bucket["hierarchical_namespace"] == [{"enabled": True}]
    assert "versioning" not in bucket
    assert bucket["uniform_bucket_level_access"] is True
    assert bucket["public_access_prevention"] == "enforced"
    assert bucket["force_destroy"] is False
    assert bucket["soft_delete_policy"] == [{"retention_duration_seconds": 7 * 86400}]
    assert [each["action"][0]["type"] for each in bucket["lifecycle_rule"]] == [
        "AbortIncompleteMultipartUpload"
    ]
    settings = {"bucket_keep_versions": 2, "bucket_location": "US", "bucket_recover_days": 0}
    bucket = bodies(plan(tmp_path, config(cluster=settings)), "google_storage_bucket")["runs"]
    assert bucket["versioning"] == [{"enabled": True}]
    assert "hierarchical_namespace" not in bucket
    assert bucket["lifecycle_rule"][1]["condition"][0]["num_newer_versions"] == 2
    assert bucket["location"] == "US"
    assert bucket["soft_delete_policy"] == [{"retention_duration_seconds": 0}]


def test_an_existing_bucket_is_used_and_never_managed(tmp_path):
    found = plan(tmp_path, config(cluster={"existing_bucket": True}))
    assert not bodies(found, "google_storage_bucket")
    assert "team-runs" not in {each.name for each in found.resources}
    members = bodies(found, "google_storage_bucket_iam_member").values()
    assert {each["bucket"] for each in members} == {"team-runs"}
    assert all("${data.google_project.this.number}" in each["member"] for each in members)
    assert found.terraform["data"] == {"google_project": {"this": {"project_id": "my-project"}}}


def test_without_a_bucket_nothing_of_one_is_made(tmp_path):
    found = plan(tmp_path, config(storage={}))
    assert not [each for each in found.resources if "storage" in each.kind and each.address]
    assert "data" not in found.terraform


def members(found):
    return {
        each["member"].partition("/subject/")[2]: each["role"]
        for each in bodies(found, "google_storage_bucket_iam_member").values()
    }


def test_runs_reach_the_bucket_as_themselves_and_nodes_do_not(tmp_path):
    found = plan(tmp_path, config())
    role = "roles/storage.objectUser"
    assert members(found) == {f"ns/{each}/sa/trainer": role for each in ("runs", "runs-privileged")}
    [member, _] = bodies(found, "google_storage_bucket_iam_member").values()
    assert member["member"].startswith(
        "principal://iam.googleapis.com/projects/${google_storage_bucket.runs.project_number}"
        "/locations/global/workloadIdentityPools/my-project.svc.id.goog/subject/"
    )
    roles = {each["role"] for each in bodies(found, "google_project_iam_member").values()}
    assert roles == {
        "roles/container.defaultNodeServiceAccount",
        "roles/artifactregistry.reader",
    }


@pytest.mark.parametrize(
    ("section", "subjects"),
    [
        ({"service_account": "me"}, ["ns/runs/sa/me", "ns/runs-privileged/sa/me"]),
        (
            {"namespace": "team-a"},
            ["ns/runs/sa/trainer", "ns/runs-privileged/sa/trainer", "ns/team-a/sa/trainer"],
        ),
        ({"namespace": "runs"}, ["ns/runs/sa/trainer", "ns/runs-privileged/sa/trainer"]),
    ],
)
def test_the_names_of_the_config_have_access_too(section, subjects, tmp_path):
    assert list(members(plan(tmp_path, config(kubernetes=section)))) == subjects


def test_every_node_has_the_account_of_the_nodes(tmp_path):
    found = plan(tmp_path, config())
    nodes = [*bodies(found, "google_container_node_pool").values()]
    nodes += bodies(found, "google_container_cluster").values()
    assert {each["node_config"][0]["service_account"] for each in nodes} == {
        "${google_service_account.nodes.email}"
    }
    assert "team-nodes@my-project.iam.gserviceaccount.com" in {
        each.name for each in found.resources
    }
    assert (
        service_account_email("a", "example.com:p1") == "a@p1.example.com.iam.gserviceaccount.com"
    )


def test_what_is_made_waits_for_its_api_and_nodes_for_their_roles(tmp_path):
    found = plan(tmp_path, config())
    after = {
        f"{kind}.{label}": body.get("depends_on", [])
        for kind, named in found.terraform["resource"].items()
        for label, body in named.items()
    }
    for address, service in {
        "google_compute_network.system": "compute",
        "google_compute_network.rdma": "compute",
        "google_container_cluster.cluster": "container",
        "google_service_account.nodes": "iam",
        "google_storage_bucket.runs": "storage",
        "google_artifact_registry_repository.images": "artifactregistry",
        "google_project_iam_member.artifactregistry_reader": "cloudresourcemanager",
    }.items():
        assert f"google_project_service.{service}" in after[address]
    for pool in ("cpu", "team_spot"):
        roles = {each for each in after if each.startswith("google_project_iam_member.")}
        assert roles <= set(after[f"google_container_node_pool.{pool}"])
    services = bodies(found, "google_project_service").values()
    assert {each["service"] for each in services} == set(found.services)
    assert not any(each["disable_on_destroy"] for each in services)


def warnings(tmp_path, *arguments, **settings):
    return plan(tmp_path, config(*arguments, **settings)).warnings


def test_warnings_name_what_cannot_be_undone_or_checked(tmp_path):
    assert any("87 hours" in each for each in warnings(tmp_path, "a3-megagpu-8g", "calendar"))
    assert any("7 days" in each for each in warnings(tmp_path, consumption="flex-start"))
    assert any("hierarchical namespace" in each for each in warnings(tmp_path))
    assert any("1.32.2-gke.1475000" in each for each in warnings(tmp_path))
    given = warnings(tmp_path, cluster={"version": "1.34"})
    assert not any("1.32.2-gke.1475000" in each for each in given)
    assert any(
        "must exist" in each for each in warnings(tmp_path, cluster={"existing_bucket": True})
    )


def test_the_state_has_a_bucket_of_its_own(tmp_path):
    found = plan(tmp_path, config())
    assert found.state_bucket == "my-project-team-tfstate"
    [state] = [each for each in found.resources if each.made_by == "drillyard"]
    assert (state.kind, state.name) == ("google_storage_bucket", "my-project-team-tfstate")
    assert plan(tmp_path, config(cluster={"state_bucket": "mine"})).state_bucket == "mine"


def test_one_file_is_that_of_launch_too(tmp_path):
    """The section `cluster:` and a reservation's block leave what a run gets as it is."""
    content = config(
        consumption="reservation",
        reservation="r/reservationBlocks/b",
        cluster={"pools": [{"consumption": "spot", "nodes": 1}]},
    )
    found = request(yaml.safe_dump(content), WORKLOAD)
    labels = node_selector(found, found.facts.machine("a4-highgpu-8g"))
    assert labels["cloud.google.com/reservation-name"] == "r"


@pytest.mark.parametrize("mode", ["spot", "flex-start", "flex-start-queued", "reservation"])
def test_a_run_tolerates_every_taint_of_its_pool(mode, tmp_path):
    content = config(consumption=mode, kubernetes={"queue": "q"})
    asked = request(yaml.safe_dump(content), WORKLOAD)
    tolerated = planned(asked).file(VALUES).content
    [pool] = gpu_pools(plan(tmp_path, content)).values()
    for taint in pool["node_config"][0]["taint"]:
        assert taint["key"] in tolerated


COUNTED = {
    "NETWORKS": "google_compute_network",
    "SUBNETWORKS": "google_compute_subnetwork",
    "FIREWALLS": "google_compute_firewall",
    "ROUTERS": "google_compute_router",
}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"machine": "a3-megagpu-8g"},
        {"machine": "g2-standard-8"},
        {"network_stack": "ethernet"},
        {"kubernetes": {"pod_network": "dranet"}},
        {"cluster": {"private_nodes": False}},
        {"machine": "a4x-maxgpu-4g-metal", "consumption": "reservation", "reservation": "r"},
        {
            "machine": "a3-megagpu-8g",
            "cluster": {
                "pools": [
                    {"name": "high", "machine": "a3-highgpu-8g", "consumption": "spot", "nodes": 2},
                    {"name": "b200", "machine": "a4-highgpu-8g", "consumption": "spot", "nodes": 2},
                ]
            },
        },
    ],
    ids=str,
)
def test_quotas_count_what_is_made(settings, tmp_path):
    """An estimate has the same rules, and no plan."""
    found = plan(tmp_path, config(**settings))
    needed = {quota.metric: quota.amount for quota in found.quotas}
    kinds = [each.kind for each in found.resources]
    for metric, kind in COUNTED.items():
        assert needed.get(metric, 0) == kinds.count(kind), metric
