"""What `leaks` finds of a cluster of virtual machines, beside a GKE cluster of the same name."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.unit.provision.google.gcloud import ACCEPTED, run_gcloud, shape
from tests.unit.provision.google.google_cloud import PROJECT, GoogleCloud
from tests.unit.provision.google.seeded_project import (
    BESIDE_HOSTS,
    OF_HOSTS,
    REGION,
    ZONE,
    Seeds,
    named,
    with_identities,
)
from tests.unit.provision.google.test_leaks import make_planned, planned_keys
from tests.unit.provision.vm_clusters import OFFERS, config
from tests.unit.provision.vm_clusters import plan as planned

from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.google.api import GoogleApis
from drillyard.provision.google.leaks import find_leaks
from drillyard.provision.google.preflight import check_project

LOCATION = {"project": PROJECT, "region": REGION, "zone": ZONE}


@pytest.fixture
def hosts(tmp_path: Path) -> ClusterPlan:
    content = config("a3-megagpu-8g", "on-demand", name="train", location=LOCATION, storage={})
    return planned(tmp_path, content)


@pytest.mark.parametrize("seed", [1, 2])
def test_all_of_500_leaks_are_found_and_no_decoy(
    cloud: GoogleCloud, apis: GoogleApis, hosts: ClusterPlan, seed: int
) -> None:
    cloud.page_size = 60
    seeds = Seeds(cloud, random.Random(seed))
    seeds.fill(500, OF_HOSTS, BESIDE_HOSTS)
    report = find_leaks(with_identities(hosts), apis)
    found = sorted((each.name, each.location) for each in report.leaks)
    assert found == sorted(map(named, seeds.expected))
    assert (report.exit_code, report.unknown, report.doubtful) == (1, (), ())
    kinds = {each.kind.removeprefix("google_compute_") for each in report.leaks}
    assert {
        *("instance", "disk", "address", "firewall", "network", "subnetwork", "snapshot"),
        *("instance_group_manager", "instance_template", "resize_request", "resource_policy"),
    } <= kinds


def test_the_commands_delete_everything_in_their_order(
    cloud: GoogleCloud, apis: GoogleApis, hosts: ClusterPlan
) -> None:
    """A machine of a group, and a boot disk, go with what they belong to."""
    cloud.page_size = 60
    Seeds(cloud, random.Random(3)).fill(250, OF_HOSTS, BESIDE_HOSTS)
    report = find_leaks(with_identities(hosts), apis)
    assert {shape(each) for command in report.commands for each in command.split(" && ")} <= (
        ACCEPTED
    )
    for command in report.commands:
        run_gcloud(cloud, command)
    left = find_leaks(with_identities(hosts), apis)
    assert (left.leaks, left.exit_code) == ((), 0)


ONE_OF_EACH_STACK = [
    (machine, next(mode for name, mode in OFFERS if name == machine))
    for machine in ("g2-standard-4", "a3-highgpu-8g", "a3-megagpu-8g", "a4-highgpu-8g")
]


@pytest.mark.parametrize(("machine", "mode"), ONE_OF_EACH_STACK)
def test_what_the_plan_makes_is_what_leaks_lists(
    cloud: GoogleCloud, apis: GoogleApis, tmp_path: Path, machine: str, mode: str
) -> None:
    found = planned(tmp_path, config(machine, mode, name="train", location=LOCATION))
    make_planned(cloud, found)
    report = find_leaks(found, apis)
    listed = {f"{each.kind}/{each.location}/{each.name}" for each in report.leaks}
    boot = {f"google_compute_disk/{ZONE}/train-{number}" for number in (0, 1)}
    assert listed == planned_keys(found) | boot
    assert find_leaks(found, apis, planned_keys(found)).leaks == ()


def test_the_projects_check_asks_for_hosts_and_for_nothing_of_kubernetes(
    cloud: GoogleCloud, apis: GoogleApis, hosts: ClusterPlan
) -> None:
    cloud.permissions = set()
    findings = check_project(hosts, apis)
    words = " ".join(each.what for each in findings)
    assert "permissions for" not in words and "GKE" not in words
    assert "compute.instances.create" in words
    make_planned(cloud, hosts)
    cloud.things["compute", f"zones/{ZONE}/instances/train-0"]["labels"] = {}
    taken = [each for each in check_project(hosts, apis) if "is not of this cluster" in each.what]
    assert [each.what.split()[:2] for each in taken] == [["instance", "train-0"]]
