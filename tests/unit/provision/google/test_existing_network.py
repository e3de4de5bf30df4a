"""What `--check` and `leaks` say of a VPC of the user's, also a shared one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.provision import clusters, job_clusters
from tests.unit.provision.google.google_cloud import NUMBER, PROJECT, GoogleCloud
from tests.unit.provision.google.test_preflight import one
from tests.unit.provision.test_existing_network import HOST, PODS, SHARED
from tests.unit.provision.test_existing_network import cluster as content_in

from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.google.api import GoogleApis
from drillyard.provision.google.leaks import find_leaks
from drillyard.provision.google.network_checks import check_job_network, check_network
from drillyard.provision.google.preflight import check_project
from drillyard.provision.project_findings import ProjectFinding

REGION = "us-central1"
VPC, SUBNET = "global/networks/corp", f"regions/{REGION}/subnetworks/gpu-nodes"
LOCATION = {"project": PROJECT, "region": REGION, "zone": f"{REGION}-b"}
AGENT = f"serviceAccount:service-{NUMBER}@container-engine-robot.iam.gserviceaccount.com"
GOOGLE = f"serviceAccount:{NUMBER}@cloudservices.gserviceaccount.com"
CONTROL = f"serviceAccount:train-control@{PROJECT}.iam.gserviceaccount.com"
WITHIN = {"sourceRanges": ["10.0.0.0/8"], "allowed": [{"IPProtocol": "all"}]}
IAP = {"sourceRanges": ["35.235.240.0/20"], "allowed": [{"IPProtocol": "tcp", "ports": ["22"]}]}
GRANT = "gcloud compute networks subnets add-iam-policy-binding gpu-nodes"


def planned(directory: Path, platform: str, **network: Any) -> ClusterPlan:
    content = content_in(platform, {**SHARED, **network})
    content |= {"name": "train", "location": LOCATION, "storage": {}}
    return clusters.plan(directory, content)


class Network:
    """The shared VPC of a host project, with all that a cluster needs."""

    def __init__(self, cloud: GoogleCloud, host: str = HOST) -> None:
        self.cloud, self.below = cloud, f"projects/{host}/"
        cloud.host = HOST
        cloud.host_bindings = [
            {"role": "roles/compute.networkUser", "members": [AGENT, GOOGLE, CONTROL]},
            {"role": "roles/container.hostServiceAgentUser", "members": [AGENT]},
        ]
        self.vpc = self.add(VPC, mtu=8896, peerings=[{"name": "servicenetworking-googleapis-com"}])
        self.subnet = self.add(
            SUBNET,
            network=f"projects/{host}/{VPC}",
            ipCidrRange="10.20.0.0/20",
            privateIpGoogleAccess=True,
            secondaryIpRanges=[
                {"rangeName": PODS["pods"], "ipCidrRange": "10.64.0.0/14"},
                {"rangeName": PODS["services"], "ipCidrRange": "10.90.0.0/20"},
            ],
        )
        self.router = self.add(
            f"regions/{REGION}/routers/out", network=f"projects/{host}/{VPC}", nats=[{"name": "n"}]
        )
        self.rules = self.add(f"{VPC}/getEffectiveFirewalls", firewalls=[WITHIN, IAP])

    def add(self, path: str, **body: Any) -> dict[str, Any]:
        self.cloud.add("compute", self.below + path, **body)
        return self.cloud.things["compute", self.below + path]

    def remove(self, path: str) -> None:
        del self.cloud.things["compute", self.below + path]


@pytest.fixture
def network(cloud: GoogleCloud) -> Network:
    return Network(cloud)


def found(plan: ClusterPlan, apis: GoogleApis) -> list[ProjectFinding]:
    return list(check_network(plan, apis))


@pytest.mark.parametrize("platform", ["gke", "gce", "slurm"])
def test_a_network_that_has_all_has_no_findings(
    network: Network, apis: GoogleApis, platform: str, tmp_path: Path
) -> None:
    plan = planned(tmp_path, platform)
    assert found(plan, apis) == []
    # The whole check of a project has it, too.
    network.remove(VPC)
    assert one(check_project(plan, apis), "error", "there is no projects/net-host/global")


def test_a_network_or_subnet_that_is_not_there(
    network: Network, apis: GoogleApis, tmp_path: Path
) -> None:
    plan = planned(tmp_path, "gce")
    network.subnet["network"] = f"projects/{HOST}/global/networks/other"
    assert "is one of other" in one(found(plan, apis), "error", "gpu-nodes").what
    network.remove(SUBNET)
    assert one(found(plan, apis), "error", SUBNET).fix == (
        f"gcloud compute networks subnets list --project={HOST}"
    )
    network.remove(VPC)
    assert one(found(plan, apis), "error", VPC).fix.startswith("gcloud compute networks list")


def test_a_project_that_is_not_attached_to_the_host(
    network: Network, apis: GoogleApis, cloud: GoogleCloud, tmp_path: Path
) -> None:
    for host in ("", "another"):
        cloud.host = host
        cloud.host_bindings = []
        finding = one(found(planned(tmp_path, "gce"), apis), "error", "cluster.network.project")
        assert finding.fix == (
            f"gcloud compute shared-vpc associated-projects add {PROJECT} --host-project={HOST}"
        )


@pytest.mark.parametrize(
    ("platform", "changes", "level", "word"),
    [
        ("gke", {"secondaryIpRanges": []}, "error", "no secondary range gpu-pods"),
        ("gke", {"privateIpGoogleAccess": False}, "error", "Private Google Access"),
        ("gce", {"ipCidrRange": "10.20.0.0/30"}, "error", "0 addresses"),
        ("gce", {"ipCidrRange": "192.168.0.0/16"}, "error", "overlaps"),
        ("slurm", {"ipCidrRange": "192.168.0.0/16"}, "error", "overlaps"),
    ],
)
def test_a_subnet_that_does_not_do(
    network: Network,
    apis: GoogleApis,
    platform: str,
    changes: dict[str, Any],
    level: str,
    word: str,
    tmp_path: Path,
) -> None:
    network.subnet.update(changes)
    findings = [each for each in found(planned(tmp_path, platform), apis) if word in each.what]
    assert findings and {each.level for each in findings} == {level}


def test_secondary_ranges_must_hold_the_pods(
    network: Network, apis: GoogleApis, tmp_path: Path
) -> None:
    network.subnet["secondaryIpRanges"][0]["ipCidrRange"] = "10.64.0.0/26"
    finding = one(found(planned(tmp_path, "gke"), apis), "error", "10.64.0.0/26")
    assert "64 addresses" in finding.what


def test_rights_of_the_person_and_of_googles_accounts(
    network: Network, apis: GoogleApis, cloud: GoogleCloud, tmp_path: Path
) -> None:
    cloud.permissions = set()
    finding = one(found(planned(tmp_path, "gce"), apis), "error", "compute.subnetworks.use")
    assert finding.fix == (
        f"{GRANT} --project={HOST} --region={REGION} --member=user:ann@example.com"
        " --role=roles/compute.networkUser"
    )
    cloud.permissions, cloud.host_bindings = None, []
    lacking = {each.fix for each in found(planned(tmp_path, "gke"), apis)}
    assert len(lacking) == 3 and sum(AGENT in each for each in lacking) == 2
    assert any("hostServiceAgentUser" in each for each in lacking)
    [of_slurm] = found(planned(tmp_path, "slurm"), apis)
    assert of_slurm.level == "warning" and f"--member={CONTROL}" in of_slurm.fix
    # Granted on the subnet alone.
    role = "roles/compute.networkUser"
    path = f"{network.below}{SUBNET}/getIamPolicy"
    cloud.things["compute", path] = {"bindings": [{"role": role, "members": [CONTROL]}]}
    assert found(planned(tmp_path, "slurm"), apis) == []


@pytest.mark.parametrize(
    ("rules", "missing"),
    [
        ([WITHIN], ["35.235.240.0/20"]),
        ([IAP], ["10.20.0.0/20"]),
        ([{**WITHIN, "targetTags": ["web"]}, IAP], ["10.20.0.0/20"]),
        ([{**WITHIN, "disabled": True}, IAP], ["10.20.0.0/20"]),
        ([{**WITHIN, "direction": "EGRESS"}, IAP], ["10.20.0.0/20"]),
        ([{**WITHIN, "sourceRanges": ["10.20.0.0/24"]}, IAP], ["10.20.0.0/20"]),
        ([{**WITHIN, "allowed": [{"IPProtocol": "tcp"}]}, IAP], ["udp, icmp"]),
        ([{"sourceRanges": ["0.0.0.0/0"], "allowed": [{"IPProtocol": "all"}]}], []),
    ],
)
def test_firewall_rules_that_runs_need(
    network: Network,
    apis: GoogleApis,
    rules: list[dict[str, Any]],
    missing: list[str],
    tmp_path: Path,
) -> None:
    network.rules["firewalls"] = rules
    for platform in ("gce", "slurm"):
        findings = found(planned(tmp_path, platform), apis)
        assert [each.level for each in findings] == ["warning"] * len(missing)
        for word, each in zip(missing, findings, strict=True):
            assert word in each.what and "--network=corp" in each.fix
    # GKE makes rules of its own for its clusters.
    assert found(planned(tmp_path, "gke"), apis) == []


def test_rules_of_a_policy_count(network: Network, apis: GoogleApis, tmp_path: Path) -> None:
    layer4 = [{"ipProtocol": "all"}]
    match = {"srcIpRanges": ["10.0.0.0/8", "35.235.240.0/20"], "layer4Configs": layer4}
    rule = {"direction": "INGRESS", "action": "allow", "match": match}
    network.rules.update(firewalls=[], firewallPolicys=[{"rules": [rule]}])
    assert found(planned(tmp_path, "gce"), apis) == []
    rule["action"] = "deny"
    assert len(found(planned(tmp_path, "gce"), apis)) == 2


def test_the_way_to_the_internet_the_frames_and_the_peering(
    network: Network, apis: GoogleApis, tmp_path: Path
) -> None:
    network.router["nats"] = [
        {
            "sourceSubnetworkIpRangesToNat": "LIST_OF_SUBNETWORKS",
            "subnetworks": [{"name": f"projects/{HOST}/regions/{REGION}/subnetworks/other"}],
        }
    ]
    network.vpc.update(mtu=1460, peerings=[])
    findings = found(planned(tmp_path, "gce"), apis)
    assert [each.level for each in findings] == ["warning", "warning"]
    assert "MTU of 1460" in findings[0].what and "Cloud NAT" in findings[1].what
    one(found(planned(tmp_path, "slurm"), apis), "error", "private services access")


def test_quotas_of_the_host_project(
    network: Network, apis: GoogleApis, cloud: GoogleCloud, tmp_path: Path
) -> None:
    cloud.quotas[HOST] = [{"metric": "FIREWALLS", "limit": 100.0, "usage": 97.0}]
    finding = one(found(planned(tmp_path, "gke"), apis), "error", "FIREWALLS")
    assert finding.fix.endswith(f"?project={HOST}")
    assert found(planned(tmp_path, "gce"), apis) == []


def test_what_the_host_does_not_say_is_unknown(
    network: Network, apis: GoogleApis, cloud: GoogleCloud, tmp_path: Path
) -> None:
    cloud.refuse("compute", f"projects/{HOST}/")
    findings = found(planned(tmp_path, "gce"), apis)
    assert {each.level for each in findings} == {"unknown"}


@pytest.mark.parametrize("platform", ["gke", "gce", "slurm"])
def test_nothing_of_the_users_vpc_is_a_leak(
    cloud: GoogleCloud, apis: GoogleApis, platform: str, tmp_path: Path
) -> None:
    """Also in the cluster's own project, with machines of others, whose names are like ours."""
    plan = planned(tmp_path, platform, project=PROJECT)
    address = cloud.add("compute", VPC)
    subnet = cloud.add("compute", SUBNET, network=address)
    cloud.add("compute", "global/firewalls/train-ssh-of-others", network=address)
    cloud.add("compute", f"regions/{REGION}/routers/out", network=address, nats=[{"name": "n"}])
    nic = [{"network": address, "subnetwork": subnet}]
    for name in ("web-1", "train-0", "train-controller"):
        cloud.add("compute", f"zones/{REGION}-b/instances/{name}", networkInterfaces=nic)
    ours = {"drillyard-cluster": "train"}
    cloud.add("compute", f"zones/{REGION}-b/instances/left", networkInterfaces=nic, labels=ours)
    report = find_leaks(plan, apis)
    assert [each.name for each in report.leaks] == ["left"]
    assert report.doubtful == ()


def test_gkes_rules_in_the_host_project_are_found_once_the_cluster_is_gone(
    cloud: GoogleCloud, apis: GoogleApis, tmp_path: Path
) -> None:
    network = Network(cloud)
    plan = planned(tmp_path, "gke")
    for name in ("gke-train-0a1b2c3d-all", "gke-train-2-0a1b2c3d-all", "corp-ssh"):
        network.add(f"global/firewalls/{name}", network=f"projects/{HOST}/{VPC}")
    [left] = find_leaks(plan, apis).leaks
    assert left.command == (
        f"gcloud compute firewall-rules delete gke-train-0a1b2c3d-all --project={HOST}"
    )
    cloud.refuse("compute", f"projects/{HOST}/global/firewalls")
    refused = find_leaks(plan, apis)
    assert refused.leaks == () and refused.exit_code == 3


HOST_NUMBER = "987654321098"


def of_jobs(directory: Path, number: str) -> ClusterPlan:
    network = f"projects/{number}/global/networks/corp"
    content = job_clusters.config(name="train", location=LOCATION, vertex={"network": network})
    return clusters.plan(directory, content)


def jobs_found(plan: ClusterPlan, apis: GoogleApis) -> list[ProjectFinding]:
    return list(check_job_network(plan, apis))


def test_jobs_may_use_a_shared_vpc(cloud: GoogleCloud, apis: GoogleApis, tmp_path: Path) -> None:
    network, plan = Network(cloud, HOST_NUMBER), of_jobs(tmp_path, HOST_NUMBER)
    link = f"https://www.googleapis.com/compute/v1/projects/{HOST}/{VPC}"
    network.vpc["selfLink"] = link
    assert jobs_found(plan, apis) == []
    cloud.host = "another"
    assert f"--host-project={HOST}" in one(jobs_found(plan, apis), "error", "another").fix
    cloud.host = HOST
    network.vpc["peerings"] = []
    one(jobs_found(plan, apis), "error", "private services access")
    network.remove(VPC)
    one(jobs_found(plan, apis), "error", "there is no")
    one(check_project(plan, apis), "error", "there is no")
    # One of the project itself needs no host.
    own = of_jobs(tmp_path, NUMBER)
    cloud.host = ""
    peered = [{"name": "servicenetworking-googleapis-com"}]
    cloud.add("compute", f"projects/{NUMBER}/{VPC}", peerings=peered)
    assert jobs_found(own, apis) == []
    # Nothing that is made here has the user's network.
    assert not bodies_of_network(own)


def bodies_of_network(plan: ClusterPlan) -> list[str]:
    return [each.name for each in plan.resources if each.kind == "google_compute_network"]
