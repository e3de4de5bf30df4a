"""What `leaks` finds of a Slurm cluster that Cluster Toolkit made, beside clusters of other names
and blueprints."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tests.unit.provision.google.gcloud import ACCEPTED, run_gcloud, shape
from tests.unit.provision.google.google_cloud import PROJECT, GoogleCloud
from tests.unit.provision.google.seeded_project import (
    BESIDE_HOSTS,
    DESCRIBED,
    OF_HOSTS,
    OURS,
    REGION,
    THEIRS,
    ZONE,
    Seeds,
    named,
    network,
    with_identities,
)
from tests.unit.provision.slurm_clusters import config
from tests.unit.provision.slurm_clusters import plan as planned
from typer.testing import CliRunner

from drillyard.cli.main import app
from drillyard.hardware.cluster_toolkit import slurm_machines
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.google.api import GoogleApis
from drillyard.provision.google.leaks import find_leaks
from drillyard.provision.google.terraform_state import owned_by_state

LOCATION = {"project": PROJECT, "region": REGION, "zone": ZONE}
TOOLKIT = {"ghpc_blueprint": "train", "ghpc_deployment": "train", "ghpc_role": "compute"}
ANOTHER = {**TOOLKIT, "ghpc_blueprint": "hpc-slurm"}
BUCKET = f"{PROJECT}-train-tfstate"


@pytest.fixture
def slurm(tmp_path: Path) -> ClusterPlan:
    content = config("a4-highgpu-8g", "flex-start", name="train", location=LOCATION)
    return planned(tmp_path, content)


def flex_nodes(s: Seeds, labels: dict[str, str] | None = None) -> None:
    """What Slurm's controller makes for a job of flex-start, and leaves behind empty."""
    name, marks = s.name("train-nodes-"), labels or s.draw.choice([OURS, TOOLKIT])
    nics = [{"network": s.vpc}]
    body = {"properties": {"labels": marks, "networkInterfaces": nics}}
    template = s.leak("compute", f"global/instanceTemplates/train-compute-{name}", **body)
    path = f"zones/{ZONE}/instanceGroupManagers/{name}"
    group = s.leak("compute", path, instanceTemplate=template, targetSize=0)
    s.leak("compute", f"{path}/resizeRequests/{s.name('r')}", state="ACCEPTED")
    made_by = {"items": [{"key": "created-by", "value": group}]}
    node = s.leak("compute", f"zones/{ZONE}/instances/{name}-0", labels=marks, metadata=made_by)
    disk = f"zones/{ZONE}/disks/{name}-0"
    s.leak("compute", disk, labels=marks, users=[node])
    address = f"https://www.googleapis.com/compute/v1/projects/{PROJECT}/{disk}"
    s.cloud.things["compute", f"zones/{ZONE}/instances/{name}-0"]["disks"] = [
        {"source": address, "autoDelete": True}
    ]


def head(s: Seeds) -> None:
    marks = s.draw.choice([OURS, TOOLKIT])
    s.leak("compute", f"global/images/{s.name('train-slurm-')}", labels=marks)
    s.leak("compute", f"zones/{ZONE}/instances/{s.name('packer-')}", labels=marks)
    s.leak("storage", f"b/{s.name('train-')}", labels=marks, location="US-CENTRAL1")
    s.leak("file", f"locations/{ZONE}/instances/{s.name('home-')}", labels=marks)
    s.leak("lustre", f"locations/{ZONE}/instances/{s.name('home-')}", labels=marks)
    placement = s.name("train-slurmgcp-managed-nodes-")
    s.leak("compute", f"regions/{REGION}/resourcePolicies/{placement}")
    s.leak("compute", f"global/networks/{s.name('train-gpu-')}", description=DESCRIBED)


def of_others(s: Seeds) -> None:
    """Deployments of the same name by another blueprint, and clusters of other names."""
    marks = s.draw.choice([ANOTHER, THEIRS, {**TOOLKIT, "ghpc_deployment": "train-2"}])
    body = {"properties": {"labels": marks}}
    name = s.name("train-nodes-")
    template = s.cloud.add("compute", f"global/instanceTemplates/{name}", **body)
    path = f"zones/{ZONE}/instanceGroupManagers/{name}"
    s.cloud.add("compute", path, instanceTemplate=template)
    s.cloud.add("compute", f"{path}/resizeRequests/r", state="ACCEPTED")
    s.cloud.add("compute", f"zones/{ZONE}/instances/{name}-0", labels=marks)
    s.cloud.add("compute", f"global/images/{s.name('train-slurm-')}", labels=marks)
    s.cloud.add("file", f"locations/{ZONE}/instances/{s.name('home-')}", labels=marks)
    placement = s.name("train-2-slurmgcp-managed-nodes-")
    s.cloud.add("compute", f"regions/{REGION}/resourcePolicies/{placement}")
    elsewhere = s.name("train-slurmgcp-managed-nodes-")
    s.cloud.add("compute", f"regions/us-east1/resourcePolicies/{elsewhere}")


OF_SLURM = (*OF_HOSTS, flex_nodes, head)
BESIDE_SLURM = (*BESIDE_HOSTS, of_others)


def test_all_of_500_leaks_are_found_and_no_decoy(
    cloud: GoogleCloud, apis: GoogleApis, slurm: ClusterPlan
) -> None:
    cloud.page_size = 60
    seeds = Seeds(cloud, random.Random(1))
    seeds.fill(500, OF_SLURM, BESIDE_SLURM)
    report = find_leaks(with_identities(slurm), apis)
    found = sorted((each.name, each.location) for each in report.leaks)
    assert found == sorted(map(named, seeds.expected))
    assert (report.exit_code, report.unknown, report.doubtful) == (1, (), ())


def test_the_commands_delete_everything_in_their_order(
    cloud: GoogleCloud, apis: GoogleApis, slurm: ClusterPlan
) -> None:
    cloud.page_size = 60
    Seeds(cloud, random.Random(3)).fill(250, OF_SLURM, BESIDE_SLURM)
    report = find_leaks(with_identities(slurm), apis)
    assert {shape(each) for command in report.commands for each in command.split(" && ")} <= (
        ACCEPTED
    )
    for command in report.commands:
        run_gcloud(cloud, command)
    assert find_leaks(with_identities(slurm), apis).exit_code == 0


def state(*resources: tuple[str, dict[str, Any]]) -> bytes:
    found = [
        {"mode": "managed", "type": kind, "instances": [{"attributes": attributes}]}
        for kind, attributes in resources
    ]
    return json.dumps({"version": 4, "resources": found}).encode()


def made_cluster(cloud: GoogleCloud) -> None:
    """A cluster that stands: the states of both groups, and what no state has."""
    cloud.add("storage", f"b/{BUCKET}", labels=OURS, location="US-CENTRAL1")
    cloud.add("compute", "global/networks/train", description=DESCRIBED)
    cloud.objects[f"{BUCKET}/train/train/base/default.tfstate"] = state(
        ("google_compute_network", {"name": "train"})
    )
    instance = {"name": "train-controller", "zone": ZONE}
    cloud.add("compute", f"zones/{ZONE}/instances/train-controller", labels=OURS)
    cloud.objects[f"{BUCKET}/train/train/cluster/default.tfstate"] = state(
        ("google_compute_instance_from_template", instance)
    )
    cloud.add("compute", f"zones/{ZONE}/instances/train-nodes-0", labels=OURS)
    cloud.add("compute", f"zones/{ZONE}/disks/train-nodes-0", labels=OURS)
    cloud.add("compute", "global/images/train-slurm-1", labels=OURS)
    cloud.add("compute", f"regions/{REGION}/resourcePolicies/train-slurmgcp-managed-nodes-0")


def test_nodes_and_image_of_a_cluster_that_stands_are_no_leaks(
    cloud: GoogleCloud, apis: GoogleApis, slurm: ClusterPlan
) -> None:
    made_cluster(cloud)
    owned = owned_by_state(slurm, apis)
    assert find_leaks(slurm, apis, owned).leaks == ()
    # A second home, which nothing of the state answers for.
    cloud.add("file", f"locations/{ZONE}/instances/home-2", labels=OURS)
    assert [each.name for each in find_leaks(slurm, apis, owned).leaks] == ["home-2"]


def test_what_a_controller_made_is_a_leak_once_it_is_gone(
    cloud: GoogleCloud, apis: GoogleApis, slurm: ClusterPlan
) -> None:
    made_cluster(cloud)
    del cloud.objects[f"{BUCKET}/train/train/cluster/default.tfstate"]
    del cloud.things["compute", f"zones/{ZONE}/instances/train-controller"]
    found = find_leaks(slurm, apis, owned_by_state(slurm, apis)).leaks
    assert {each.name for each in found} == {
        *("train-nodes-0", "train-slurm-1", "train-slurmgcp-managed-nodes-0")
    }


def test_the_command_lists_them(cloud: GoogleCloud, tmp_path: Path, slurm: ClusterPlan) -> None:
    made_cluster(cloud)
    cloud.objects.clear()
    ended = CliRunner().invoke(app, ["cluster", "leaks", str(tmp_path / "cluster.yaml"), "--json"])
    assert ended.exit_code == 1, ended.output
    names = {each["name"] for each in json.loads(ended.stdout)["leaks"]}
    assert {"train", "train-controller", "train-nodes-0", "train-slurm-1"} <= names


@pytest.mark.parametrize("machine", slurm_machines())
def test_every_vpc_of_the_plan_is_known_by_name_and_description(
    cloud: GoogleCloud, apis: GoogleApis, tmp_path: Path, machine: str
) -> None:
    found = planned(tmp_path, config(machine, "spot", name="train", location=LOCATION))
    vpcs = [each.name for each in found.resources if each.kind == "google_compute_network"]
    for name in vpcs:
        cloud.add("compute", f"global/networks/{name}", description=DESCRIBED)
        rule = f"global/firewalls/{name}-allow-internal"
        cloud.add("compute", rule, network=network(name))
    leaks = {each.name for each in find_leaks(found, apis).leaks}
    assert leaks == {*vpcs, *(f"{name}-allow-internal" for name in vpcs)}
    for name in vpcs:
        cloud.things["compute", f"global/networks/{name}"]["description"] = "of somebody else"
    assert find_leaks(found, apis).leaks == ()
