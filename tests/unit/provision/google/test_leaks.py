"""What `leaks` finds in a project, what it leaves alone, and what it says where it cannot know."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.provision.google.conftest import CLUSTER
from tests.unit.provision.google.gcloud import ACCEPTED, run_gcloud, shape
from tests.unit.provision.google.google_cloud import DISABLED, PROJECT, GoogleCloud
from tests.unit.provision.google.seeded_project import (
    GKE,
    REGION,
    ZONE,
    Seeds,
    named,
    network,
    with_identities,
)
from typer.testing import CliRunner

from drillyard.cli.main import app
from drillyard.config.load import load_cluster_config
from drillyard.errors import UserError
from drillyard.hardware.catalog import catalog
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.google.api import ApiError, GoogleApis, Refusal
from drillyard.provision.google.inventory import Inventory, Thing
from drillyard.provision.google.leaks import find_leaks
from drillyard.provision.google.listings import LISTINGS, RESIZE_REQUESTS
from drillyard.provision.google.ownership import Ownership
from drillyard.provision.google.terraform_state import owned_by_state
from drillyard.provision.provisioner import plan_cluster

DISKS = next(row for row in LISTINGS if row.items == "disks")
REGISTRY = "artifactregistry"
OURS = {"drillyard-cluster": "train"}
NOT_LISTED = ("google_project_service", "google_storage_bucket_iam_member")
_WITH_ROUTER = "google_compute_router_nat"
"""An enabled service costs nothing; a right on a bucket goes with it."""


@pytest.mark.parametrize("seed", [1, 2])
def test_all_of_500_leaks_are_found_and_no_decoy(
    cloud: GoogleCloud, apis: GoogleApis, plan: ClusterPlan, seed: int
) -> None:
    cloud.page_size = 60
    seeds = Seeds(cloud, random.Random(seed))
    seeds.fill(500)
    report = find_leaks(with_identities(plan), apis)
    found = sorted((each.name, each.location) for each in report.leaks)
    assert found == sorted(map(named, seeds.expected))
    assert (report.exit_code, report.unknown, report.doubtful) == (1, (), ())
    wanted = {row.kind for row in (*LISTINGS, RESIZE_REQUESTS) if not row.never_ours}
    wanted |= {row.part.kind for row in LISTINGS if row.part is not None}
    # The global list and the list of all places both have these.
    both = {"google_compute_global_forwarding_rule", "google_compute_global_address"}
    both |= {"google_compute_global_network_endpoint_group"}
    assert wanted - {each.kind for each in report.leaks} <= both


def test_the_commands_delete_everything_in_their_order(
    cloud: GoogleCloud, apis: GoogleApis, plan: ClusterPlan
) -> None:
    """The server refuses to delete what another thing uses."""
    cloud.page_size = 60
    Seeds(cloud, random.Random(3)).fill(250)
    for command in find_leaks(with_identities(plan), apis).commands:
        run_gcloud(cloud, command)
    left = find_leaks(with_identities(plan), apis)
    assert (left.leaks, left.exit_code) == ((), 0)


def test_a_deletion_that_is_lost_is_found(
    cloud: GoogleCloud, apis: GoogleApis, plan: ClusterPlan
) -> None:
    cloud.add("compute", f"zones/{ZONE}/disks/pvc-1", labels=GKE)
    cloud.lost_deletes.add("pvc-1")
    run_gcloud(cloud, find_leaks(plan, apis).commands[0])
    assert [each.name for each in find_leaks(plan, apis).leaks] == ["pvc-1"]


def test_every_command_was_accepted_by_gcloud(
    cloud: GoogleCloud, apis: GoogleApis, plan: ClusterPlan
) -> None:
    """tools/gcloud_commands.py asks gcloud's own parser, and writes what it accepts."""
    cloud.page_size = 60
    Seeds(cloud, random.Random(4)).fill(400)
    commands = find_leaks(with_identities(plan), apis).commands
    shapes = {shape(each) for command in commands for each in command.split(" && ")}
    assert shapes - ACCEPTED == set()


def test_an_empty_project_is_proven_empty(
    cloud: GoogleCloud, apis: GoogleApis, plan: ClusterPlan
) -> None:
    report = find_leaks(plan, apis)
    assert (report.exit_code, report.leaks, report.unknown) == (0, (), ())


class OneRefusal(GoogleApis):
    """Every list is empty, and one is refused."""

    def __init__(self, service: str, method: str, refusal: Refusal) -> None:
        super().__init__(PROJECT, "http://127.0.0.1:9", None)
        self._refused = service, method
        self._refusal = refusal

    def call(self, service: str, method: str, **parameters: Any) -> dict[str, Any]:
        if (service, method) == self._refused:
            raise ApiError(service, self._refusal, "refused")
        return {"name": "projects/1"} if method == "projects.get" else {}


ALL_LISTS = [(row.service, row.method) for row in LISTINGS]
ALL_LISTS.append(("cloudasset", "v1.searchAllResources"))


@pytest.mark.parametrize(("service", "method"), ALL_LISTS)
def test_a_refused_list_is_unknown_and_not_none(
    plan: ClusterPlan, service: str, method: str
) -> None:
    for refusal in ("denied", "unreachable", "other", "absent"):
        report = find_leaks(plan, OneRefusal(service, method, refusal))
        assert report.exit_code == 3
        assert [(each.service, each.method) for each in report.unknown] == [(service, method)]
        assert f"{service}: {method}" in report.text


def test_a_service_that_the_project_does_not_use_holds_nothing(plan: ClusterPlan) -> None:
    name = "projects.locations.instances.list"
    report = find_leaks(plan, OneRefusal("lustre", name, "disabled"))
    assert (report.exit_code, report.disabled, report.unknown) == (0, ("lustre",), ())
    # The inventory of assets is not a service of its own things: without it kinds are not searched.
    report = find_leaks(plan, OneRefusal("cloudasset", "v1.searchAllResources", "disabled"))
    assert (report.exit_code, report.disabled) == (3, ())
    assert "gcloud services enable cloudasset.googleapis.com" in report.text


def test_refusals_by_the_service_itself(
    cloud: GoogleCloud, apis: GoogleApis, plan: ClusterPlan
) -> None:
    cloud.refuse("file", reason=DISABLED)
    # The credentials' own project does not use it; that says nothing about this project.
    cloud.refuse("parallelstore", reason=DISABLED, consumer="projects/999")
    cloud.refuse("iam")
    report = find_leaks(plan, apis)
    assert report.disabled == ("file",)
    assert sorted(each.service for each in report.unknown) == ["iam", "parallelstore"]


def test_places_that_a_list_leaves_out_are_unknown(
    cloud: GoogleCloud, apis: GoogleApis, plan: ClusterPlan
) -> None:
    cloud.left_out = {
        "compute/disks": [f"zones/{ZONE}"],
        "container/clusters": ["us-east1-b"],
        "file/instances": [ZONE],
    }
    cloud.add("compute", f"zones/{ZONE}/disks/pvc-1", labels=GKE)
    cloud.stale_assets.clear()
    report = find_leaks(plan, apis)
    assert {(each.service, each.why) for each in report.unknown} == {
        ("compute", f"did not answer: zones/{ZONE}"),
        ("container", "did not answer: us-east1-b"),
        ("file", f"did not answer: {ZONE}"),
    }
    # The inventory of assets still knows the disk.
    assert [each.name for each in report.leaks] == ["pvc-1"]


def test_a_list_that_fails_on_a_later_page_is_unknown(
    cloud: GoogleCloud, apis: GoogleApis, plan: ClusterPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drillyard.provision.google.api.RETRY_SECONDS", 0.2)
    cloud.page_size = 1
    for number in range(3):
        cloud.add("compute", f"zones/{ZONE}/disks/d{number}", labels=OURS)
    cloud.refuse("compute", "aggregated/disks", status=503, skip=1)
    report = find_leaks(plan, apis)
    assert [each.method for each in report.unknown] == ["disks.aggregatedList"]
    assert len(report.leaks) == 3


def test_stale_assets_are_no_leaks_and_kinds_without_a_list_are(
    cloud: GoogleCloud, apis: GoogleApis, plan: ClusterPlan
) -> None:
    def asset(kind: str, path: str, service: str = "compute") -> dict[str, Any]:
        name = f"//{service}.googleapis.com/projects/{PROJECT}/{path}"
        return {"name": name, "assetType": kind, "labels": OURS, "location": REGION}

    cloud.add(
        "container", f"locations/{REGION}/clusters/train", location=REGION, resourceLabels=OURS
    )
    cloud.stale_assets = [
        asset("compute.googleapis.com/Disk", f"zones/{ZONE}/disks/gone"),
        asset("k8s.io/Pod", f"locations/{REGION}/clusters/train/k8s/pods/p", "container"),
        asset("k8s.io/Node", f"locations/{REGION}/clusters/gone/k8s/nodes/n", "container"),
        asset("x/DockerImage", f"locations/{REGION}/repositories/r/dockerImages/i", REGISTRY),
        asset("pubsub.googleapis.com/Topic", "topics/results", "pubsub"),
    ]
    report = find_leaks(plan, apis)
    assert [(each.kind, each.name) for each in report.leaks] == [
        ("google_container_cluster", "train"),
        ("pubsub.googleapis.com/Topic", "results"),
    ]


def test_a_volume_that_nothing_tells_the_cluster_of_is_doubtful(
    cloud: GoogleCloud, apis: GoogleApis, plan: ClusterPlan
) -> None:
    cloud.add("compute", f"zones/{ZONE}/disks/pvc-0123", sizeGb="10")
    cloud.add("compute", f"zones/{ZONE}/disks/data", sizeGb="10")
    report = find_leaks(plan, apis)
    assert ([each.name for each in report.doubtful], report.leaks) == (["pvc-0123"], ())
    assert report.exit_code == 3


def test_reservations_are_no_leaks(cloud: GoogleCloud, apis: GoogleApis, plan: ClusterPlan) -> None:
    pool = replace(plan.pools[0], reservations=("block-a",))
    cloud.add("compute", f"zones/{ZONE}/reservations/block-a")
    cloud.add("compute", f"zones/{ZONE}/reservations/others")
    cloud.add("compute", f"zones/{ZONE}/futureReservations/fr", reservationName="block-a")
    report = find_leaks(replace(plan, pools=(pool,)), apis)
    assert [each.name for each in report.reservations] == ["block-a", "fr"]
    assert (report.leaks, report.commands, report.exit_code) == ((), (), 0)


def test_prices_are_those_of_the_catalog(
    cloud: GoogleCloud, apis: GoogleApis, plan: ClusterPlan
) -> None:
    kind = f"projects/{PROJECT}/zones/{ZONE}/diskTypes"
    gpus = {"machineType": "x/a3-highgpu-8g", "labels": OURS, "status": "RUNNING"}
    nic = [{"network": network("train")}]
    cloud.add("compute", "global/networks/train", description="drillyard cluster train")
    cloud.add("compute", f"zones/{ZONE}/disks/a", labels=OURS, sizeGb="730", type=f"{kind}/pd-ssd")
    cloud.add("compute", f"zones/{ZONE}/disks/b", labels=OURS, sizeGb="1", type=f"{kind}/pd-new")
    cloud.add("compute", f"regions/{REGION}/addresses/c", labels=OURS, addressType="EXTERNAL")
    cloud.add("compute", f"zones/{ZONE}/instances/d", networkInterfaces=nic, **gpus)
    cloud.add(
        "compute",
        f"zones/{ZONE}/instances/e",
        networkInterfaces=nic,
        **{**gpus, "status": "TERMINATED"},
    )
    cloud.add("storage", "b/f", labels=OURS, location="US")
    report = find_leaks(plan, apis)
    prices = {each.name: each.usd_per_day for each in report.leaks}
    facts = catalog()
    disk = facts.part_price("pd-ssd", REGION, "usd_per_gib_month")
    node = facts.price("a3-highgpu-8g", "on-demand", REGION)
    assert disk is not None and node is not None
    assert prices["a"] == pytest.approx(disk.value * 24)
    assert prices["c"] == pytest.approx(0.005 * 24)
    assert prices["d"] == pytest.approx(node.node_hour(facts.machine("a3-highgpu-8g")).value * 24)
    assert (prices["b"], prices["e"], prices["f"], prices["train"]) == (None, 0.0, None, 0.0)
    known = sum(each for each in prices.values() if each is not None)
    assert report.usd_per_day == pytest.approx(known)


def make_planned(cloud: GoogleCloud, plan: ClusterPlan) -> None:
    """Everything that the plan makes, as it would be in the cloud."""
    bodies = plan.terraform["resource"]
    pools: list[dict[str, Any]] = []
    for each in plan.resources:
        kind, _, label = each.address.partition(".")
        rendered = bodies.get(kind, {}).get(label, {})
        body: dict[str, Any] = {"labels": OURS} if each.labelled else {}
        if "description" in rendered:
            body["description"] = rendered["description"]
        if vpc := re.fullmatch(r"\$\{(.*)\.(id|name|self_link)\}", rendered.get("network", "")):
            named = next(other.name for other in plan.resources if other.address == vpc[1])
            body["network"] = network(named)
        region = f"regions/{each.location}"
        match each.kind.removeprefix("google_"):
            case "compute_network":
                cloud.add("compute", f"global/networks/{each.name}", **body)
            case "compute_subnetwork":
                cloud.add("compute", f"{region}/subnetworks/{each.name}", **body)
            case "compute_router":
                nats = [
                    {"name": other.name}
                    for other in plan.resources
                    if other.kind == "google_compute_router_nat"
                ]
                cloud.add("compute", f"{region}/routers/{each.name}", nats=nats, **body)
            case "compute_global_address":
                cloud.add("compute", f"global/addresses/{each.name}", **body)
            case "service_networking_connection":
                peered = cloud.things["compute", f"global/networks/{plan.name}"]
                peered["peerings"] = [{"name": each.name}]
            case "compute_firewall":
                cloud.add("compute", f"global/firewalls/{each.name}", **body)
            case "compute_resource_policy":
                cloud.add("compute", f"{region}/resourcePolicies/{each.name}", **body)
            case "service_account":
                cloud.add("iam", f"serviceAccounts/{each.name}", **body)
            case "project_iam_member":
                role, member = each.name.split(" ")
                cloud.bindings.append({"role": role, "members": [member]})
            case "storage_bucket":
                cloud.add("storage", f"b/{each.name}", location=str(each.location).upper(), **body)
            case "artifact_registry_repository":
                path = f"locations/{each.location}/repositories/{each.name}"
                cloud.add("artifactregistry", path, **body)
            case "compute_instance":
                nics = [{"network": network(plan.name)}]
                path = f"zones/{each.location}/instances/{each.name}"
                disk = cloud.add("compute", path.replace("/instances/", "/disks/"), **body)
                disks = [{"source": disk, "autoDelete": True}]
                node = cloud.add("compute", path, networkInterfaces=nics, disks=disks, **body)
                cloud.things["compute", path.replace("/instances/", "/disks/")]["users"] = [node]
            case "container_cluster":
                path = f"locations/{each.location}/clusters/{each.name}"
                cloud.add(
                    "container",
                    path,
                    location=each.location,
                    resourceLabels=OURS,
                    nodePools=pools,
                    networkConfig={"network": f"projects/{PROJECT}/global/networks/{plan.name}"},
                )
            case "container_node_pool":
                pools.append({"name": each.name})
            case _:
                assert each.kind in (*NOT_LISTED, _WITH_ROUTER), each.kind


def key(kind: str, location: str | None, name: str) -> str:
    return f"{kind}/{(location or '').lower()}/{name}"


def planned_keys(plan: ClusterPlan) -> frozenset[str]:
    return frozenset(
        key(each.kind, each.location, each.name)
        for each in plan.resources
        if each.kind not in NOT_LISTED
    )


def _machines() -> Iterator[tuple[str, str]]:
    for machine in catalog().machines.values():
        if (
            machine.cloud == "gcp" and machine.name.endswith("8g")
        ) or machine.name == "g2-standard-96":
            for consumption in machine.consumption[:1]:
                yield machine.name, consumption


@pytest.mark.parametrize(("machine", "consumption"), sorted(_machines()))
def test_what_the_plan_makes_is_what_leaks_lists(
    cloud: GoogleCloud, apis: GoogleApis, tmp_path: Path, machine: str, consumption: str
) -> None:
    cloud.page_size = 60
    plan = planned(tmp_path, machine, consumption)
    make_planned(cloud, plan)
    report = find_leaks(plan, apis)
    assert {key(each.kind, each.location, each.name) for each in report.leaks} == planned_keys(plan)
    # The state has all of it, so nothing is left.
    report = find_leaks(plan, apis, planned_keys(plan))
    assert (report.leaks, report.exit_code) == ((), 0)


def planned(directory: Path, machine: str, consumption: str) -> ClusterPlan:
    text = CLUSTER.replace("a3-highgpu-8g", machine).replace("on-demand", consumption)
    if consumption in ("reservation", "calendar"):
        text += "reservation: block-a\n"
    (directory / "cluster.yaml").write_text(text)
    return plan_cluster(load_cluster_config(directory / "cluster.yaml"))


@pytest.mark.parametrize("hierarchical", [False, True])
def test_the_data_of_a_kept_bucket_is_safe_from_the_commands(
    cloud: GoogleCloud, apis: GoogleApis, plan: ClusterPlan, hierarchical: bool
) -> None:
    body = {"labels": OURS, "hierarchicalNamespace": {"enabled": hierarchical}}
    cloud.add("storage", "b/acme-runs", location="US-CENTRAL1", **body)
    everything = "gcloud storage rm --recursive gs://acme-runs --project=acme-ml"
    alone = "gcloud storage buckets delete gs://acme-runs --project=acme-ml"
    report = find_leaks(plan, apis, frozenset())
    # Folders, which hold no data, keep a bucket from being deleted alone.
    assert report.commands == (everything if hierarchical else alone,)
    cloud.objects["acme-runs/run/model"] = b"weights"
    cloud.objects["acme-runs-2/other"] = b"of another bucket"
    report = find_leaks(plan, apis, frozenset())
    (leak,) = report.leaks
    assert report.commands == () and everything in leak.why and shape(everything) in ACCEPTED
    cloud.refuse("storage", "/o$")
    (leak,) = find_leaks(plan, apis, frozenset()).leaks
    assert leak.command == "" and everything in leak.why
    # The config takes it as it is.
    assert find_leaks(replace(plan, existing_bucket="acme-runs"), apis, frozenset()).leaks == ()


def test_a_live_cluster_shows_only_what_the_state_lacks(
    cloud: GoogleCloud, apis: GoogleApis, plan: ClusterPlan
) -> None:
    """What GKE makes for an owned pool goes with it; a pool made by hand does not, nor do disks."""
    make_planned(cloud, plan)
    labels = {**GKE, "goog-k8s-node-pool-name": "cpu"}
    vpc = network("train")
    for pool, name in (
        ("cpu", "gke-train-cpu-0a1b2c3d"),
        ("by-hand", "gke-train-by-hand-9f8e7d6c"),
    ):
        marks = {**labels, "goog-k8s-node-pool-name": pool}
        nic = [{"network": vpc}]
        made = {"labels": marks, "networkInterfaces": nic}
        template = cloud.add("compute", f"global/instanceTemplates/{name}", properties=made)
        cloud.add(
            "compute", f"zones/{ZONE}/instanceGroupManagers/{name}-grp", instanceTemplate=template
        )
        cloud.add("compute", f"zones/{ZONE}/disks/{name}-wxyz", labels=marks)
        cloud.add("compute", f"zones/{ZONE}/instances/{name}-wxyz", **made)
    cloud.add("compute", f"zones/{ZONE}/instanceGroups/gke-train-cpu-0a1b2c3d-grp", network=vpc)
    cloud.add("compute", "global/firewalls/gke-train-0a1b2c3d-all", network=vpc)
    endpoint = f"regions/{REGION}/forwardingRules/gke-train-0a1b2c3d-pe"
    cloud.add("compute", f"regions/{REGION}/addresses/gke-train-0a1b2c3d-pe", network=vpc)
    cloud.add("compute", endpoint, network=vpc)
    zone = {"networks": [{"networkUrl": vpc}]}
    cloud.add("dns", "managedZones/gke-train-0a1b2c3d-dns", privateVisibilityConfig=zone)
    cloud.things["compute", "global/networks/train"]["peerings"] = [
        {"name": "gke-n0123456789abcdef012-0a1b-2c3d-peer", "network": network("x", "google")}
    ]
    cloud.things["container", f"locations/{REGION}/clusters/train"]["nodePools"].append(
        {"name": "by-hand"}
    )
    cloud.add("compute", f"zones/{ZONE}/disks/pvc-77", labels=GKE)
    cloud.add("compute", "global/firewalls/office", network=vpc)
    report = find_leaks(plan, apis, planned_keys(plan))
    with_pool = sorted(each.name for each in report.leaks if each.deleted_with)
    alone = {each.name for each in report.leaks if not each.deleted_with}
    assert alone == {"by-hand", "pvc-77", "office"}
    stem = "gke-train-by-hand-9f8e7d6c"
    assert with_pool == [stem, f"{stem}-grp", f"{stem}-wxyz", f"{stem}-wxyz"]


def state_of(plan: ClusterPlan) -> bytes:
    resources = []
    for each in plan.resources:
        attributes: dict[str, Any] = {"name": each.name, "location": each.location}
        if each.kind == "google_service_account":
            attributes = {"name": f"projects/p/serviceAccounts/{each.name}", "email": each.name}
        elif each.kind == "google_project_iam_member":
            attributes = dict(zip(("role", "member"), each.name.split(" "), strict=True))
        elif each.kind == "google_artifact_registry_repository":
            attributes = {"repository_id": each.name, "name": each.name, "location": each.location}
        elif each.kind in ("google_compute_subnetwork", "google_compute_router"):
            attributes = {"name": each.name, "region": each.location}
        resources.append(
            {"mode": "managed", "type": each.kind, "instances": [{"attributes": attributes}]}
        )
    resources.append({"mode": "data", "type": "google_project", "instances": []})
    return json.dumps({"version": 4, "resources": resources}).encode()


def test_the_command_reads_the_state_and_says_it_by_its_exit_code(
    cloud: GoogleCloud, apis: GoogleApis, plan: ClusterPlan, tmp_path: Path
) -> None:
    make_planned(cloud, plan)
    cloud.objects[f"{plan.state_bucket}/train/default.tfstate"] = state_of(plan)
    assert planned_keys(plan) <= owned_by_state(plan, apis)

    def leaks_of(*options: str) -> tuple[int, str]:
        ended = CliRunner().invoke(
            app, ["cluster", "leaks", str(tmp_path / "cluster.yaml"), *options]
        )
        return ended.exit_code, ended.output

    assert leaks_of()[0] == 0
    cloud.add("compute", f"zones/{ZONE}/disks/pvc-77", labels=GKE)
    code, text = leaks_of()
    assert code == 1 and "gcloud compute disks delete pvc-77" in text
    code, text = leaks_of("--json")
    document = json.loads(text)
    assert (code, document["exit_code"], document["leaks"][0]["name"]) == (1, 1, "pvc-77")
    del cloud.things["compute", f"zones/{ZONE}/disks/pvc-77"]
    cloud.refuse("iam")
    assert leaks_of()[0] == 3


def test_a_state_that_cannot_be_read_is_an_error(
    cloud: GoogleCloud, apis: GoogleApis, plan: ClusterPlan
) -> None:
    assert owned_by_state(plan, apis) == frozenset()
    cloud.objects[f"{plan.state_bucket}/train/default.tfstate"] = b"[]"
    with pytest.raises(UserError, match="is not a state of Terraform"):
        owned_by_state(plan, apis)
    cloud.refuse("storage", "/o/")
    with pytest.raises(ApiError):
        owned_by_state(plan, apis)


def test_without_the_projects_number_nothing_is_certain(
    cloud: GoogleCloud, apis: GoogleApis, plan: ClusterPlan
) -> None:
    cloud.refuse("cloudresourcemanager", "/acme-ml$")
    report = find_leaks(plan, apis)
    assert [each.method for each in report.unknown] == ["projects.get"]


def test_a_role_granted_twice_under_conditions_is_two_leaks(
    cloud: GoogleCloud, apis: GoogleApis, plan: ClusterPlan
) -> None:
    account = "serviceAccount:train-nodes@acme-ml.iam.gserviceaccount.com"
    for title in ("night", "day"):
        condition = {"title": title, "expression": "true"}
        cloud.bindings.append({"role": "roles/x", "members": [account], "condition": condition})
    report = find_leaks(plan, apis)
    assert len(report.leaks) == 2
    assert all(each.command.endswith("--all") for each in report.leaks)


def test_assets_stand_in_for_a_list_that_is_refused(
    cloud: GoogleCloud, apis: GoogleApis, plan: ClusterPlan
) -> None:
    """With what they say: label and name. Pools are parts of a cluster, and no cluster."""
    cluster = f"locations/{REGION}/clusters/train"
    cloud.add("container", cluster, resourceLabels=OURS)
    cloud.add("container", f"{cluster}/nodePools/cpu")
    cloud.add("compute", f"zones/{ZONE}/disks/pvc-1", labels=GKE)
    cloud.add("compute", f"zones/{ZONE}/disks/gke-train-2-0a1b2c3d-pvc-1", description="train")
    cloud.refuse("container")
    cloud.refuse("compute", "aggregated/disks")
    report = find_leaks(plan, apis)
    assert {each.name for each in report.leaks} == {"train", "pvc-1"}
    assert (len(report.unknown), report.exit_code) == (2, 1)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("gke-train-0a1b2c3d-all", True),
        ("gke-train-cpu-0a1b2c3d-grp", True),
        ("gke-train-train-on-dem-0a1b2c3d-x1y2", True),
        ("gke-train-0a1b2c3d-dynamic-pvc-9f8e7d6c-0001-4a4a-8b8b-0123456789ab", True),
        ("gke-train-pvc-9f8e7d6c-0001-4a4a-8b8b-0123456789ab", True),
        ("gke-train-2-0a1b2c3d-all", False),
        ("gke-train-2-cpu-0a1b2c3d-x1y2", False),
        ("gke-train-0a1b2c3d-cpu-9f8e7d6c-x1y2", False),
        ("gke-train-0a1b2c3d-9f8e7d6c-all", False),
        ("gke-training-0a1b2c3d-all", False),
        ("gke-train-notahash-all", False),
        ("my-gke-train-0a1b2c3d", False),
        ("train", False),
    ],
)
def test_names_that_gke_gives_for_this_cluster(plan: ClusterPlan, name: str, ours: bool) -> None:
    disk = Thing("google_compute_disk", name, ZONE, f"zones/{ZONE}/disks/{name}", {}, DISKS)
    inventory = Inventory((disk,), (), ())
    assert (disk.path in Ownership(plan, inventory, None).recognise().ours) is ours


def test_a_label_without_a_location_is_of_the_region_it_is_in(plan: ClusterPlan) -> None:
    def disk(zone: str) -> Thing:
        body = {"labels": {"goog-k8s-cluster-name": "train"}}
        return Thing("google_compute_disk", "d", zone, f"zones/{zone}/disks/d", body, DISKS)

    inventory = Inventory((disk(ZONE), disk("europe-west4-a")), (), ())
    assert set(Ownership(plan, inventory, None).recognise().ours) == {f"zones/{ZONE}/disks/d"}
