"""What `plan` and `up` find out about a project before anything is made."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.provision.google.conftest import CLUSTER
from tests.unit.provision.google.gcloud import ACCEPTED, shape
from tests.unit.provision.google.google_cloud import DISABLED, PROJECT, GoogleCloud

from drillyard.config.load import load_cluster_config
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.google.api import GoogleApis, google_apis
from drillyard.provision.google.capacity_checks import check_reservations
from drillyard.provision.google.permissions import _NEEDED, READ_RIGHTS, rights_of
from drillyard.provision.google.preflight import check_project
from drillyard.provision.project_findings import ProjectFinding
from drillyard.provision.provisioner import plan_cluster

ZONE = "us-central1-b"
OURS = {"drillyard-cluster": "train"}


@pytest.fixture
def ready(cloud: GoogleCloud, plan: ClusterPlan) -> GoogleCloud:
    """A project that has all that the plan needs."""
    cloud.page_size = 60
    for pool in plan.pools:
        add_machine(cloud, pool.machine.name, str(pool.machine.accelerator_type), ZONE)
    for quota in plan.quotas:
        if quota.dimensions:
            buckets = [
                {"effectiveLimit": "0", "dimensions": {}},
                {
                    "effectiveLimit": "-1",
                    "dimensions": {**quota.dimensions, "region": quota.region},
                },
            ]
            cloud.quota_metrics[f"compute.googleapis.com/{quota.metric.lower()}"] = {
                "consumerQuotaLimits": [{"quotaBuckets": buckets}]
            }
        else:
            cloud.quotas.setdefault(quota.region or "global", []).append(
                {"metric": quota.metric, "limit": quota.amount + 7.0, "usage": 7.0}
            )
    cloud.server_config = {
        "channels": [
            {
                "channel": "REGULAR",
                "defaultVersion": "1.35.2-gke.100",
                "validVersions": ["1.36.1-gke.50", "1.35.2-gke.100"],
            }
        ]
    }
    return cloud


def add_machine(cloud: GoogleCloud, machine: str, gpu: str, zone: str) -> None:
    cloud.add("compute", f"zones/{zone}/machineTypes/{machine}")
    cloud.add("compute", f"zones/{zone}/acceleratorTypes/{gpu}")


def one(found: list[ProjectFinding], level: str, word: str) -> ProjectFinding:
    """The only finding of a level, which is about `word`."""
    fitting = [each for each in found if word in each.what]
    assert [each.level for each in fitting] == [level], found
    return fitting[0]


def with_config(directory: Path, **changes: str) -> ClusterPlan:
    text = CLUSTER
    for old, new in changes.items():
        text = re.sub(f"(?m)^{old}: .*", f"{old}: {new}", text)
        if not re.search(f"(?m)^{old}: ", text):
            text += f"{old}: {new}\n"
    (directory / "c.yaml").write_text(text)
    return plan_cluster(load_cluster_config(directory / "c.yaml"))


def test_a_project_that_is_ready_has_no_findings(
    ready: GoogleCloud, apis: GoogleApis, plan: ClusterPlan
) -> None:
    assert check_project(plan, apis) == []


def test_no_credentials_are_unknown_and_one_finding(
    plan: ClusterPlan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("DRILLYARD_GOOGLE_ENDPOINT", raising=False)
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    found = check_project(plan, google_apis(PROJECT))
    assert [(each.level, each.fix) for each in found] == [
        ("unknown", "gcloud auth application-default login")
    ]


@pytest.mark.parametrize(
    "service", ["cloudbilling", "serviceusage", "container", "compute", "storage", "iam"]
)
def test_what_is_refused_is_unknown(
    ready: GoogleCloud, apis: GoogleApis, plan: ClusterPlan, service: str
) -> None:
    ready.refuse(service)
    found = check_project(plan, apis)
    assert found and {each.level for each in found} - {"unknown"} <= (
        {"error"} if service == "storage" else set()
    )
    assert any(each.level == "unknown" for each in found) or service == "storage"


def test_the_project_itself(ready: GoogleCloud, apis: GoogleApis, plan: ClusterPlan) -> None:
    ready.project = {"state": "DELETE_REQUESTED"}
    found = check_project(plan, apis)
    assert found[0].fix == f"gcloud projects undelete {PROJECT}"
    ready.project = None
    assert [each.level for each in check_project(plan, apis)] == ["error"]
    ready.project = {}
    ready.refuse("cloudresourcemanager", reason=DISABLED, consumer=f"projects/{PROJECT}")
    (finding,) = check_project(plan, google_apis(PROJECT))
    assert finding.fix == (
        "gcloud services enable cloudresourcemanager.googleapis.com serviceusage.googleapis.com"
        f" --project={PROJECT}"
    )


def test_billing_is_off(ready: GoogleCloud, apis: GoogleApis, plan: ClusterPlan) -> None:
    ready.billing = False
    assert "gcloud billing projects link" in one(check_project(plan, apis), "error", "billing").fix


def test_services(ready: GoogleCloud, apis: GoogleApis, plan: ClusterPlan) -> None:
    """`up` enables what the plan makes; the two that Terraform itself needs must be on."""
    ready.enabled = {"cloudresourcemanager.googleapis.com"}
    found = check_project(plan, apis)
    assert "serviceusage.googleapis.com" in one(found, "error", "not enabled in project").fix
    later = one(found, "warning", "not enabled yet")
    assert "compute.googleapis.com" in later.fix and "serviceusage" not in later.fix


def test_missing_permissions_have_the_role_that_grants_them(
    ready: GoogleCloud, apis: GoogleApis, plan: ClusterPlan
) -> None:
    rights, unknown = rights_of(each.kind for each in plan.resources)
    assert unknown == []
    every = {each for needed in rights.values() for each in needed}
    ready.permissions = every - {"compute.networks.create", "compute.subnetworks.create"}
    finding = one(check_project(plan, apis), "error", "lacks")
    assert "compute.networks.create, compute.subnetworks.create" in finding.what
    assert finding.fix == (
        f"gcloud projects add-iam-policy-binding {PROJECT} --member=user:ann@example.com"
        " --role=roles/compute.networkAdmin --condition=None"
    )
    ready.permissions = {"none"}
    errors = [each for each in check_project(plan, apis) if "lacks" in each.what]
    assert len(errors) == len(rights)


def test_a_zone_without_the_machine(
    ready: GoogleCloud, apis: GoogleApis, plan: ClusterPlan
) -> None:
    pool = plan.pools[0]
    del ready.things["compute", f"zones/{ZONE}/machineTypes/{pool.machine.name}"]
    add_machine(ready, pool.machine.name, "x", "us-central1-c")
    finding = one(check_project(plan, apis), "error", "location.zone")
    assert "us-central1-c" in finding.fix
    add_machine(ready, pool.machine.name, "x", ZONE)
    del ready.things["compute", f"zones/{ZONE}/acceleratorTypes/{pool.machine.accelerator_type}"]
    one(check_project(plan, apis), "error", "accelerator")


@pytest.mark.parametrize("region", ["us-central1", None])
def test_a_quota_that_is_too_small_has_its_numbers(
    ready: GoogleCloud, apis: GoogleApis, plan: ClusterPlan, region: str | None
) -> None:
    rows = ready.quotas[region or "global"]
    rows[0]["limit"] = rows[0]["usage"] + 1
    finding = one(check_project(plan, apis), "error", f"quota {rows[0]['metric']} ")
    needed = next(each.amount for each in plan.quotas if each.metric == rows[0]["metric"])
    for number in (needed, rows[0]["limit"], rows[0]["usage"]):
        assert f"{number:,.0f}" in finding.what
    # An interrupted `up` has made its network: what it made is in use already.
    ready.add("compute", "global/networks/train", description="drillyard cluster train")
    one(check_project(plan, apis), "warning", f"quota {rows[0]['metric']} ")
    ready.delete("compute", "global/networks/train")
    # Its own nodes too.
    ready.add(
        "container", "locations/us-central1/clusters/train", resourceLabels=OURS, nodePools=[]
    )
    one(check_project(plan, apis), "warning", f"quota {rows[0]['metric']} ")


def test_a_quota_of_a_family(ready: GoogleCloud, apis: GoogleApis, plan: ClusterPlan) -> None:
    metric = "compute.googleapis.com/gpus_per_gpu_family"
    bucket = ready.quota_metrics[metric]["consumerQuotaLimits"][0]["quotaBuckets"][1]
    bucket["effectiveLimit"] = "8"
    assert "16 GPUs are needed" in one(check_project(plan, apis), "error", "FAMILY (us").what
    bucket["effectiveLimit"] = "64"
    one(check_project(plan, apis), "unknown", "GPUS_PER_GPU_FAMILY")
    del ready.quota_metrics[metric]
    one(check_project(plan, apis), "unknown", "GPUS_PER_GPU_FAMILY")


def reserve(cloud: GoogleCloud, plan: ClusterPlan, zone: str = ZONE, **changes: Any) -> None:
    pool = plan.pools[0]
    body: dict[str, Any] = {
        "zone": f"projects/{PROJECT}/zones/{zone}",
        "status": "READY",
        "deploymentType": "DENSE",
        "specificReservationRequired": True,
        "specificReservation": {
            "count": str(pool.nodes + 1),
            "inUseCount": "1",
            "instanceProperties": {"machineType": pool.machine.name},
        },
    }
    specific = {**body["specificReservation"], **changes.pop("specificReservation", {})}
    cloud.add(
        "compute",
        f"zones/{zone}/reservations/block-a",
        **{**body, **changes, "specificReservation": specific},
    )


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"specificReservation": {"inUseCount": "2"}}, "VMs free"),
        (
            {"specificReservation": {"instanceProperties": {"machineType": "a2-highgpu-8g"}}},
            "holds a2-highgpu-8g",
        ),
        ({"specificReservationRequired": False}, "without naming it"),
        ({"status": "CREATING"}, "is CREATING"),
        ({"zone": "us-central1-c"}, "is in us-central1-c"),
    ],
)
def test_a_reservation_that_does_not_fit(
    ready: GoogleCloud, apis: GoogleApis, tmp_path: Path, changes: dict[str, Any], word: str
) -> None:
    plan = with_config(tmp_path, consumption="reservation", reservation="block-a")
    reserve(ready, plan, **changes)
    one(check_project(plan, apis), "error", word)


def test_a_reservation_that_fits_or_is_missing(
    ready: GoogleCloud, apis: GoogleApis, tmp_path: Path
) -> None:
    plan = with_config(tmp_path, consumption="reservation", reservation="block-a")
    one(check_project(plan, apis), "error", "there is no reservation block-a")
    ready.add(
        "compute",
        f"zones/{ZONE}/futureReservations/fr",
        reservationName="block-a",
        timeWindow={"startTime": "2027-01-01T00:00:00Z"},
    )
    assert "2027-01-01" in one(check_project(plan, apis), "warning", "block-a").what
    reserve(ready, plan)
    assert not [each for each in check_project(plan, apis) if "block-a" in each.what]
    ready.refuse("compute", "reservations/block-a")
    one(check_project(plan, apis), "unknown", "block-a")


def test_a_reservation_without_compact_placement(
    ready: GoogleCloud, apis: GoogleApis, tmp_path: Path
) -> None:
    plan = with_config(tmp_path, consumption="reservation", reservation="block-a")
    pools = plan.terraform["resource"]["google_container_node_pool"]
    pool = next(body for body in pools.values() if body["name"] == plan.pools[0].name)
    pool["placement_policy"] = [{"type": "COMPACT"}]
    reserve(ready, plan, deploymentType="")
    one(check_project(plan, apis), "error", "compact placement")


def test_a_reservation_of_another_project(
    ready: GoogleCloud, apis: GoogleApis, tmp_path: Path
) -> None:
    name = f"projects/{PROJECT}/reservations/block-a"
    plan = with_config(tmp_path, consumption="reservation", reservation=name)
    reserve(ready, plan)
    other = replace(plan, project="acme-other")
    finding = one(list(check_reservations(other, google_apis("acme-other"))), "error", "shared")
    assert "--add-share-with=acme-other" in finding.fix


def test_a_network_profile_that_the_zone_lacks(
    ready: GoogleCloud, apis: GoogleApis, tmp_path: Path
) -> None:
    plan = with_config(tmp_path, machine="a3-ultragpu-8g")
    one(check_project(plan, apis), "error", f"{ZONE}-vpc-roce")
    ready.add("compute", f"global/networkProfiles/{ZONE}-vpc-roce")
    assert not [each for each in check_project(plan, apis) if "roce" in each.what]


def test_versions_of_the_channel(ready: GoogleCloud, apis: GoogleApis, tmp_path: Path) -> None:
    def with_version(version: str) -> ClusterPlan:
        return with_config(tmp_path, cluster="{version: '" + version + "'}")

    assert (
        "1.36.1-gke.50"
        in one(check_project(with_version("1.37"), apis), "error", "cluster.version").what
    )
    for fine in ("1.35", "1.36.1-gke.50"):
        assert not [
            each for each in check_project(with_version(fine), apis) if "version" in each.what
        ]
    ready.server_config["channels"][0].update(
        defaultVersion="1.20.1-gke.1", validVersions=["1.20.1-gke.1"]
    )
    plan = with_config(tmp_path, machine="a3-ultragpu-8g")
    assert "1.20.1-gke.1" in one(check_project(plan, apis), "error", "cluster.version").what
    # DWS needs a version, too, and machines may need another than their network stack.
    for settings in (
        {"machine": "g2-standard-8", "consumption": "flex-start"},
        {"machine": "a4x-maxgpu-4g-metal", "consumption": "reservation", "reservation": "r"},
    ):
        needy = with_config(tmp_path, **settings)
        assert "1.20.1-gke.1" in one(check_project(needy, apis), "error", "cluster.version").what
    ready.server_config = {}
    one(check_project(plan, apis), "unknown", "channel REGULAR")


Change = Callable[[GoogleCloud], object]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda c: c.add("compute", "global/networks/train"), "network train"),
        (
            lambda c: c.add("compute", "global/networks/train", description="VPC of the web team"),
            "network train",
        ),
        (
            lambda c: c.add("container", "locations/us-central1/clusters/train", resourceLabels={}),
            "container cluster train",
        ),
        (
            lambda c: c.add("artifactregistry", "locations/us-central1/repositories/train"),
            "artifact registry repository train",
        ),
        (
            lambda c: c.add(
                "iam", f"serviceAccounts/train-nodes@{PROJECT}.iam.gserviceaccount.com"
            ),
            "service account train-nodes",
        ),
        (lambda c: c.add("storage", f"b/{PROJECT}-train-tfstate", projectNumber="5"), "another"),
        (lambda c: c.refuse("storage", "b/acme"), "another project"),
    ],
)
def test_a_name_that_something_else_has(
    ready: GoogleCloud, apis: GoogleApis, plan: ClusterPlan, change: Change, word: str
) -> None:
    change(ready)
    one(check_project(plan, apis), "error", word)


def test_what_an_earlier_up_made_is_no_finding(
    ready: GoogleCloud, apis: GoogleApis, plan: ClusterPlan
) -> None:
    described = "drillyard cluster train"
    ready.add("compute", "global/networks/train", description=described)
    ready.add("compute", "regions/us-central1/subnetworks/train", description=described)
    ready.add("compute", "regions/us-east1/subnetworks/train", description="of another region")
    ready.add("container", "locations/us-central1/clusters/train", resourceLabels=OURS)
    ready.add("storage", f"b/{PROJECT}-train-tfstate", labels=OURS, projectNumber="123456789012")
    assert check_project(plan, apis) == []


def test_every_command_of_a_finding_was_accepted_by_gcloud(
    ready: GoogleCloud, apis: GoogleApis, plan: ClusterPlan, tmp_path: Path
) -> None:
    reserved = with_config(tmp_path, consumption="reservation", reservation="block-a")
    found = [*check_project(reserved, apis)]
    ready.billing, ready.enabled, ready.permissions = False, set(), {"none"}
    ready.things.clear()
    ready.add("compute", "global/networks/train")
    ready.server_config = {}
    found += check_project(plan, apis)
    commands = [
        command.rstrip()
        for each in found
        for command in re.findall(r"gcloud [a-z-]+ [^;()]*", each.fix)
    ]
    assert len({shape(each) for each in commands}) > 6
    assert {shape(each) for each in commands} - ACCEPTED == set()


def test_the_document_has_the_rights_that_reading_needs() -> None:
    text = (Path(__file__).parents[4] / "docs/security.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"--permissions=((?:\\\n|[a-zA-Z.,])+)", text)
    assert tuple(block.replace("\\\n", "").strip().split(",")) == READ_RIGHTS
    rights, _ = rights_of(_NEEDED)
    assert [role for role in rights if f"`{role}`" not in text] == []
