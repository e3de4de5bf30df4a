"""What `up` and `down` ask of the cloud for a Slurm cluster, by Google's own client."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.unit.provision.google.google_cloud import PROJECT, GoogleCloud
from tests.unit.provision.google.seeded_project import OURS, REGION, THEIRS, ZONE
from tests.unit.provision.slurm_clusters import config
from tests.unit.provision.slurm_clusters import plan as planned

from drillyard.errors import UserError
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.google.api import GoogleApis
from drillyard.provision.google.preflight import check_project
from drillyard.provision.slurm_stage import (
    has_image,
    login_settings,
    remove_left,
    require_programs,
    running_jobs,
)
from drillyard.provision.toolkit.toolkit_cluster import GROUPS, LEFT_AT_LAST

LOCATION = {"project": PROJECT, "region": REGION, "zone": ZONE}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterPlan:
    monkeypatch.setenv("DRILLYARD_CACHE", str(tmp_path / "cache"))
    content = config("a4-highgpu-8g", "flex-start", name="train", location=LOCATION)
    return planned(tmp_path, content)


def seed(cloud: GoogleCloud, cluster: str, labels: dict[str, str]) -> None:
    """An empty group with requests, and what else no state has."""
    template = cloud.add(
        "compute", f"global/instanceTemplates/{cluster}", properties={"labels": labels}
    )
    group = f"zones/{ZONE}/instanceGroupManagers/{cluster}-nodes-1"
    cloud.add("compute", group, instanceTemplate=template, targetSize=0)
    for number, state in enumerate(("ACCEPTED", "SUCCEEDED", "CREATING")):
        cloud.add("compute", f"{group}/resizeRequests/r{number}", state=state)
    cloud.add("compute", f"zones/{ZONE}/instances/packer-{cluster}", labels=labels)
    cloud.add("compute", f"global/images/{cluster}-slurm-1", labels=labels)
    placement = f"{cluster}-slurmgcp-managed-nodes-0"
    cloud.add("compute", f"regions/{REGION}/resourcePolicies/{placement}")


def test_empty_groups_are_removed_and_their_waiting_requests_cancelled(
    cloud: GoogleCloud, slurm: ClusterPlan
) -> None:
    seed(cloud, "train", OURS)
    seed(cloud, "train-2", THEIRS)
    before = set(cloud.things)
    assert remove_left(slurm, GROUPS) == ["instance group manager train-nodes-1"]
    gone = before - set(cloud.things)
    assert {path for _, path in gone if "/resizeRequests/" not in path} == {
        f"zones/{ZONE}/instanceGroupManagers/train-nodes-1"
    }
    cancelled = [each for each in cloud.requests if each.endswith("/cancel")]
    assert [each.split("/")[-2] for each in cancelled] == ["r0", "r2"]
    assert all("/train-nodes-1/" in each for each in cancelled)

    left = remove_left(slurm, LEFT_AT_LAST)
    assert {each.rpartition(" ")[2] for each in left} == {
        *("packer-train", "train-slurm-1", "train-slurmgcp-managed-nodes-0")
    }
    paths = {path for _, path in cloud.things}
    assert "global/images/train-2-slurm-1" in paths
    assert f"zones/{ZONE}/instances/packer-train-2" in paths
    assert remove_left(slurm, LEFT_AT_LAST) == []


def test_the_image_is_found_by_its_family(cloud: GoogleCloud, slurm: ClusterPlan) -> None:
    assert not has_image(slurm)
    (image,) = (each.name for each in slurm.resources if each.kind == "google_compute_image")
    cloud.add("compute", f"global/images/family/{image.split()[0]}")
    assert has_image(slurm)


def test_another_script_or_disk_is_another_image(tmp_path: Path, slurm: ClusterPlan) -> None:
    def family(**settings: object) -> str:
        found = planned(tmp_path, config(name="train", location=LOCATION, **settings))
        (image,) = (each.name for each in found.resources if each.kind == "google_compute_image")
        return image

    assert family() == family(nodes=7, slurm={"partition": "big"})
    assert len({family(), family(cluster={"disk_gib": 300}), family(network_stack="ethernet")}) == 3


def test_the_login_is_that_of_os_login(cloud: GoogleCloud, slurm: ClusterPlan) -> None:
    with pytest.raises(UserError, match="describe-profile"):
        login_settings(slurm)
    accounts = [{"username": "old"}, {"username": "ann_example_com", "primary": True}]
    cloud.add("oslogin", "v1/users/ann@example.com/loginProfile", posixAccounts=accounts)
    section = login_settings(slurm)["slurm"]
    assert section["login_host"] == "ann_example_com@train-login-001"
    assert section["directory"] == "/home/ann_example_com/project"
    written = Path(section["config_file"]).read_text()
    assert "start-iap-tunnel train-login-001" in written
    assert f"HostName train-login-001.{PROJECT}\n" in written
    assert "StrictHostKeyChecking accept-new" in written and "/known_hosts" in written
    assert Path(section["config_file"]).stat().st_mode & 0o77 == 0


def test_a_login_of_the_config_is_taken_as_it_is(cloud: GoogleCloud, tmp_path: Path) -> None:
    own = {"login_host": "bob@train-login-001", "directory": "/home/bob/x", "config_file": "none"}
    content = config(name="train", location=LOCATION, slurm=own)
    assert login_settings(planned(tmp_path, content))["slurm"] == {**own, "partition": "gpu"}
    assert not [each for each in cloud.requests if "oslogin" in each]
    content["slurm"] = {"login_host": "bob@train-login-001"}
    assert login_settings(planned(tmp_path, content))["slurm"]["directory"] == "/home/bob/project"


def test_jobs_of_all_users_are_asked_for_on_the_login_node(
    cloud: GoogleCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    ssh = 'echo "$@" >"$0.said"; for last; do :; done; exec sh -c "$last"'
    for name, line in (("ssh", ssh), ("squeue", 'echo "$@" >"$0.said"; echo "7|ann|long|run"')):
        (programs / name).write_text(f"#!/bin/sh\n{line}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    own = {"login_host": "bob@train-login-001", "directory": "/home/bob/x", "config_file": "none"}
    found = planned(tmp_path, config(name="train", location=LOCATION, slurm=own))
    assert running_jobs(found) == ["job 7 of ann (long|run)"]
    assert "bob@train-login-001" in (programs / "ssh.said").read_text()
    asked = (programs / "squeue.said").read_text().split()
    assert "--all" in asked and "--me" not in asked
    (programs / "ssh").write_text("#!/bin/sh\necho no route >&2\nexit 255\n")
    with pytest.raises(UserError, match="no route"):
        running_jobs(found)


def test_missing_programs_are_named_with_where_they_are_from(
    slurm: ClusterPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError) as refused:
        require_programs(slurm)
    lines = str(refused.value).splitlines()
    assert [line.partition(":")[0] for line in lines[:4]] == [
        "terraform",
        "packer",
        "gcloud",
        "ssh",
    ]


def test_the_projects_check_asks_for_all_that_the_toolkit_makes(
    cloud: GoogleCloud, apis: GoogleApis, tmp_path: Path
) -> None:
    lustre = {"head": {"home": "lustre"}}
    content = config("a3-ultragpu-8g", "spot", name="train", location=LOCATION, cluster=lustre)
    found = planned(tmp_path, content)
    cloud.permissions, cloud.enabled = set(), set()
    cloud.add("compute", "global/networks/train-rdma", description="of somebody else")
    findings = check_project(found, apis)
    said = "\n".join(f"{each.level} {each.what} {each.fix}" for each in findings)
    assert "permissions for" not in said and "GKE" not in said
    for right in (
        *("compute.instances.create", "compute.images.create", "compute.instanceTemplates.create"),
        *("compute.firewalls.create", "compute.subnetworks.create", "lustre.instances.create"),
        *("servicenetworking.services.addPeering", "storage.objects.create"),
    ):
        assert right in said, right
    assert "services enable" in said and "lustre.googleapis.com" in said
    assert "us-central1-b-vpc-roce" in said
    assert "us-central1-b has no a3-ultragpu-8g" in said
    assert [each.what for each in findings if "is not of this cluster" in each.what] == [
        "network train-rdma exists, and is not of this cluster"
    ]
    assert "bucket" not in "".join(each.what for each in findings if each.level == "unknown")


def test_a_project_that_has_all_is_ready(
    cloud: GoogleCloud, apis: GoogleApis, slurm: ClusterPlan
) -> None:
    for path in (
        f"zones/{ZONE}/machineTypes/a4-highgpu-8g",
        f"zones/{ZONE}/acceleratorTypes/nvidia-b200",
        f"global/networkProfiles/{ZONE}-vpc-roce",
    ):
        cloud.add("compute", path)
    left = [each for each in check_project(slurm, apis) if "quota" not in each.what.lower()]
    assert [(each.level, each.what) for each in left if each.level == "error"] == []
