"""What Google says of a request for nodes, by its own client; and what of it `leaks` finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.provision.google.gcloud import ACCEPTED, shape
from tests.unit.provision.google.google_cloud import PROJECT, GoogleCloud
from tests.unit.provision.google.test_leaks_of_hosts import LOCATION
from tests.unit.provision.vm_clusters import config
from tests.unit.provision.vm_clusters import plan as planned

from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.google.api import GoogleApis
from drillyard.provision.google.granted_nodes import node_request
from drillyard.provision.google.leaks import find_leaks
from drillyard.provision.google.preflight import check_project

ZONE = "zones/us-central1-b"
NAMES = {"name": "train-1a2b3c4d", "zone": "us-central1-b"}
PATH = f"{ZONE}/instanceGroupManagers/train-1a2b3c4d"


@pytest.fixture
def flex(tmp_path: Path) -> ClusterPlan:
    content = config("a4-highgpu-8g", "flex-start", name="train", location=LOCATION, storage={})
    return planned(tmp_path, content)


def machine(cloud: GoogleCloud, name: str, status: str = "RUNNING") -> dict[str, str]:
    nic = {"networkIP": "10.0.0.7", "accessConfigs": [{"natIP": "203.0.113.9"}]}
    path = f"{ZONE}/instances/{name}"
    address = cloud.add("compute", path, status=status, id="77", networkInterfaces=[nic])
    return {"instance": address}


def request_of(cloud: GoogleCloud, members: list[dict[str, str]], **body: Any) -> None:
    cloud.add("compute", PATH)
    cloud.add("compute", f"{PATH}/listManagedInstances", managedInstances=members)
    cloud.add("compute", f"{PATH}/resizeRequests/train-1a2b3c4d", **body)


def test_the_machines_that_run_and_their_addresses(cloud: GoogleCloud, flex: ClusterPlan) -> None:
    members = [machine(cloud, "train-z"), machine(cloud, "train-b"), machine(cloud, "c", "STAGING")]
    gone = {"instance": f"https://www.googleapis.com/compute/v1/projects/{PROJECT}/{ZONE}/x/gone"}
    request_of(cloud, [*members, gone], state="SUCCEEDED")
    found = node_request(flex, NAMES)
    assert (found.state, found.nodes, found.has_ended) == ("SUCCEEDED", 4, True)
    assert [each.name for each in found.hosts] == ["train-b", "train-z"]
    first = found.hosts[0]
    assert (first.address, first.public, first.instance_id) == ("10.0.0.7", "203.0.113.9", "77")
    assert flex.login is not None and flex.login.group is not None
    assert first.key == flex.login.group.group


@pytest.mark.parametrize("holder", ["error", "lastAttempt"])
def test_why_it_waits_or_failed(cloud: GoogleCloud, flex: ClusterPlan, holder: str) -> None:
    errors = {"errors": [{"code": "ZONE_RESOURCE_POOL_EXHAUSTED", "message": "no capacity"}]}
    status = {"error": errors} if holder == "error" else {"lastAttempt": {"error": errors}}
    request_of(cloud, [], state="ACCEPTED", status=status)
    assert node_request(flex, NAMES).why == "no capacity"


def test_what_is_not_there_has_no_state(cloud: GoogleCloud, flex: ClusterPlan) -> None:
    found = node_request(flex, NAMES)
    assert (found.state, found.nodes, found.hosts) == ("", 0, ())


def seed(cloud: GoogleCloud, cluster: str) -> None:
    """A template, a group with a request, a machine of it, and the policy of its placement."""
    labels = {"drillyard-cluster": cluster}
    network = cloud.add(
        "compute", f"global/networks/{cluster}", description=f"drillyard cluster {cluster}"
    )
    nics = [{"network": network}]
    template = cloud.add(
        "compute",
        f"regions/us-central1/instanceTemplates/{cluster}-5e6f7a8b",
        properties={"labels": labels, "networkInterfaces": nics},
    )
    group = f"{ZONE}/instanceGroupManagers/{cluster}-1a2b3c4d"
    cloud.add("compute", group, instanceTemplate=template)
    cloud.add("compute", f"{group}/resizeRequests/{cluster}-1a2b3c4d", state="ACCEPTED")
    cloud.add(
        "compute",
        f"regions/us-central1/resourcePolicies/{cluster}",
        description=f"drillyard cluster {cluster}",
    )


def test_each_part_of_a_request_is_found_and_none_of_others(
    cloud: GoogleCloud, apis: GoogleApis, flex: ClusterPlan
) -> None:
    for cluster in ("train", "train-2"):
        seed(cloud, cluster)
    report = find_leaks(flex, apis)
    kinds = [each.kind.removeprefix("google_compute_") for each in report.leaks]
    assert kinds == [
        *("resize_request", "instance_group_manager", "instance_template"),
        *("resource_policy", "network"),
    ]
    assert all("train-2" not in each.name for each in report.leaks)
    commands = {shape(each) for command in report.commands for each in command.split(" && ")}
    assert commands <= ACCEPTED


def test_what_the_state_has_is_no_leak(
    cloud: GoogleCloud, apis: GoogleApis, flex: ClusterPlan
) -> None:
    seed(cloud, "train")
    group = f"projects/{PROJECT}/{ZONE}/instanceGroupManagers/train-1a2b3c4d"
    cloud.add(
        "compute",
        f"{ZONE}/instances/train-x1",
        labels={"drillyard-cluster": "train"},
        metadata={"items": [{"key": "created-by", "value": group}]},
    )
    owned = {
        *("google_compute_network//train", "google_compute_resource_policy/us-central1/train"),
        "google_compute_region_instance_template/us-central1/train-5e6f7a8b",
        "google_compute_instance_group_manager/us-central1-b/train-1a2b3c4d",
        "google_compute_resize_request/us-central1-b/train-1a2b3c4d",
    }
    assert find_leaks(flex, apis, frozenset(owned)).leaks == ()


def test_the_rights_of_each_kind_are_known(
    cloud: GoogleCloud, apis: GoogleApis, flex: ClusterPlan
) -> None:
    findings = check_project(flex, apis)
    assert not [each for each in findings if "permissions for" in each.what]
