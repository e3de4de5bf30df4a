"""Clusters in a VPC of the user's, also a shared one (`cluster.network`): nothing of it is made,
and all parts refer to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.provision import clusters, job_clusters, slurm_clusters, vm_clusters
from tests.unit.provision.provider_schema import (
    VERSIONS,
    document_problems,
    unknown_references,
)

from drillyard.errors import UserError
from drillyard.provision.cluster_plan import ClusterPlan

HOST = "net-host"
OWN: dict[str, Any] = {"name": "corp", "subnet": "gpu-nodes"}
SHARED = {**OWN, "project": HOST}
PODS = {"pods": "gpu-pods", "services": "gpu-services"}
OF_A_VPC = (
    *("google_compute_network", "google_compute_subnetwork", "google_compute_router"),
    *("google_compute_router_nat", "google_compute_firewall"),
)
PATH = f"projects/{HOST}/global/networks/corp"
SUBNET = f"projects/{HOST}/regions/us-central1/subnetworks/gpu-nodes"
MACHINES = ("g2-standard-8", "a3-megagpu-8g", "a4-highgpu-8g")


def cluster(platform: str, network: dict[str, Any], machine: str = MACHINES[-1], **of: Any) -> Any:
    """The content of a cluster.yaml of a platform, in this network."""
    more = PODS if platform == "gke" else {}
    content = {"cluster": {"network": {**network, **more}, **of}}
    modules = {"gke": clusters, "gce": vm_clusters, "slurm": slurm_clusters}
    return modules[platform].config(machine, "spot", **content)


def made(found: ClusterPlan) -> set[str]:
    """What of networks the plan makes, by kind and name."""
    return {f"{each.kind} {each.name}" for each in found.resources if each.kind in OF_A_VPC}


@pytest.mark.parametrize("platform", ["gke", "gce"])
@pytest.mark.parametrize("machine", MACHINES)
def test_no_part_of_the_vpc_is_made_and_the_provider_takes_the_document(
    platform: str, machine: str, tmp_path: Path
) -> None:
    content = cluster(platform, SHARED, machine)
    found = clusters.plan(tmp_path, content)
    for version in VERSIONS:
        assert document_problems(found.terraform, version) == []
    assert unknown_references(found.terraform) == set()
    plain = clusters.plan(tmp_path, {**content, "cluster": {}})
    own = {
        *("google_compute_network team", "google_compute_subnetwork team"),
        *("google_compute_router team", "google_compute_router_nat team"),
        *(f"google_compute_firewall team-{each}" for each in ("ssh", "internal")),
    }
    # Networks of the data NICs are the cluster's either way.
    assert made(found) == made(plain) - own
    assert found.network is not None and plain.network is None
    assert (found.network.path, found.network.subnet_path) == (PATH, SUBNET)


def test_nodes_and_clusters_are_in_the_shared_subnet(tmp_path: Path) -> None:
    gke = clusters.plan(tmp_path, cluster("gke", SHARED))
    [body] = clusters.bodies(gke, "google_container_cluster").values()
    assert (body["network"], body["subnetwork"]) == (PATH, SUBNET)
    assert body["ip_allocation_policy"] == [
        {
            "cluster_secondary_range_name": "gpu-pods",
            "services_secondary_range_name": "gpu-services",
        }
    ]
    gce = clusters.plan(tmp_path, cluster("gce", SHARED))
    for node in clusters.bodies(gce, "google_compute_instance").values():
        nics = [each["subnetwork"] for each in node["network_interface"]]
        assert nics[0] == SUBNET
        assert nics[1:] and all("google_compute_subnetwork." in each for each in nics[1:])
        assert not any("router" in each for each in node["depends_on"])


def test_a_vpc_of_the_same_project_needs_no_project(tmp_path: Path) -> None:
    for platform in ("gke", "gce", "slurm"):
        found = clusters.plan(tmp_path, cluster(platform, OWN))
        assert found.network is not None
        assert found.network.path == "projects/my-project/global/networks/corp"
        assert (found.network.users, found.network.agents) == ((), ())


@pytest.mark.parametrize("home", ["filestore", "lustre"])
@pytest.mark.parametrize("machine", ["a3-megagpu-8g", "a4-highgpu-8g"])
@pytest.mark.parametrize("network", [OWN, SHARED])
def test_the_toolkit_takes_the_blueprint_of_a_cluster_in_it(
    network: dict[str, Any], machine: str, home: str, tmp_path: Path
) -> None:
    content = cluster("slurm", network, machine, head={"home": home})
    found = clusters.plan(tmp_path, content)
    assert list(slurm_clusters.blueprint_problems(found)) == []
    modules = slurm_clusters.modules(found)
    assert modules["network"]["source"] == "modules/network/pre-existing-vpc"
    host = network.get("project", "my-project")
    assert modules["network"]["settings"] == {
        "project_id": host,
        "network_name": "corp",
        "subnetwork_name": "gpu-nodes",
    }
    for user in ("nodes", "login", "controller", "home", "slurm-image"):
        assert "network" in modules[user]["use"]
    image = slurm_clusters.settings_of(found, "slurm-image")
    assert image.get("network_project_id") == (HOST if network is SHARED else None)
    assert "private-access" not in modules
    of_home = slurm_clusters.settings_of(found, "home")
    peered = home == "lustre" or network is SHARED
    assert found.network is not None and found.network.needs_peering == peered
    if home == "lustre":
        assert of_home["private_vpc_connection_peering"] == "servicenetworking-googleapis-com"
    else:
        mode = "PRIVATE_SERVICE_ACCESS" if network is SHARED else None
        assert of_home.get("connect_mode") == mode
    assert not {"google_compute_network team", "google_compute_router_nat team (one)"} & made(found)
    assert found.toolkit is not None and "team" not in found.toolkit.ranges


def test_who_must_be_allowed_to_use_a_shared_subnet(tmp_path: Path) -> None:
    def users(platform: str) -> tuple[str, ...]:
        network = clusters.plan(tmp_path, cluster(platform, SHARED)).network
        assert network is not None
        return network.users

    agent = "serviceAccount:service-{number}@container-engine-robot.iam.gserviceaccount.com"
    google = "serviceAccount:{number}@cloudservices.gserviceaccount.com"
    assert set(users("gke")) == {agent, google}
    assert users("gce") == ()
    control = "serviceAccount:team-control@my-project.iam.gserviceaccount.com"
    assert users("slurm") == (control,)
    slurm = clusters.plan(tmp_path, cluster("slurm", SHARED))
    grant = next(each for each in slurm.warnings if "add-iam-policy-binding" in each)
    assert "gpu-nodes --project=net-host --region=us-central1" in grant and control in grant


def test_what_is_not_made_is_neither_priced_nor_counted(tmp_path: Path) -> None:
    for platform in ("gke", "gce", "slurm"):
        content = cluster(platform, SHARED)
        found = clusters.plan(tmp_path, content)
        plain = clusters.plan(tmp_path, {**content, "cluster": {}})
        lines = {each.what for each in plain.prices} - {each.what for each in found.prices}
        assert lines and all("NAT" in each for each in lines)
        now, before = ({each.metric: each.amount for each in one.quotas} for one in (found, plain))
        assert "IN_USE_ADDRESSES" not in now and "ROUTERS" not in now
        own = 0 if platform == "slurm" else 1
        assert before["NETWORKS"] - now["NETWORKS"] == own
        assert before["SUBNETWORKS"] - now["SUBNETWORKS"] == own


@pytest.mark.parametrize(
    ("platform", "network", "further", "path"),
    [
        ("gke", OWN, {}, "cluster.network.pods"),
        ("gke", {**OWN, "pods": "a", "services": "a"}, {}, "cluster.network.services"),
        ("gke", {**OWN, **PODS}, {"ranges": {"pods": "100.64.0.0/14"}}, "cluster.ranges.pods"),
        ("gce", {**OWN, "pods": "a"}, {}, "cluster.network.pods"),
        ("slurm", OWN, {"ranges": {"nodes": "10.0.0.0/16"}}, "cluster.ranges.nodes"),
        ("gce", {**OWN, "project": "Net Host"}, {}, "cluster.network.project"),
        ("vertex", OWN, {}, "cluster.network"),
    ],
)
def test_what_does_not_fit_is_an_error_at_its_key(
    platform: str, network: dict[str, Any], further: dict[str, Any], path: str, tmp_path: Path
) -> None:
    modules = {"gke": clusters, "gce": vm_clusters, "slurm": slurm_clusters, "vertex": job_clusters}
    machine = "a3-megagpu-8g" if platform != "gce" else "a4-highgpu-8g"
    content = modules[platform].config(machine, "spot", cluster={"network": network, **further})
    with pytest.raises(UserError) as raised:
        clusters.plan(tmp_path, content)
    assert path in str(raised.value)
