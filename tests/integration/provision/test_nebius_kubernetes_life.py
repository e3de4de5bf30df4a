"""The whole life of a cluster of Nebius' Managed Kubernetes by the commands that a user types: the
real Terraform, a real control plane with the charts on it, and `leaks`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.integration.kubernetes import kwok
from tests.integration.kubernetes.cluster import Cluster, started
from tests.integration.provision.fake_cloud import Fault
from tests.integration.provision.interruption import kill_and_wait
from tests.integration.provision.joined_nebius import JoinedNebius, fake_node
from tests.integration.provision.nebius_project import CONTROL_PLANE, FILES, GROUP, STATE, VM
from tests.integration.provision.project import TIMEOUT_SECONDS, until

from drillyard.config.load import load_cluster_config
from drillyard.provision.nebius.nebius_plan import BUCKET_KIND

CONTEXT = "nebius_project-e00abc_team"
SPACE = "runs-privileged"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A control plane with JobSet and Kueue, and the GPU nodes."""
    with started(tmp_path_factory.mktemp("nebius")) as made:
        kwok.start_kwok(made)
        kwok.add_nodes(made, [fake_node(number) for number in range(2)])
        yield made


@pytest.fixture
def project(cluster: Cluster, tmp_path: Path) -> Iterator[JoinedNebius]:
    made = JoinedNebius(tmp_path / "project", cluster, image="i:1")
    yield made
    made.close()


def contexts(project: JoinedNebius) -> list[str]:
    found: dict[str, Any] = yaml.safe_load(project.kubeconfig.read_text("utf-8"))
    return [each["name"] for each in found["contexts"]]


def launch(project: JoinedNebius, name: str) -> subprocess.CompletedProcess[str]:
    """`drillyard launch` of a run with the file that `up` wrote."""
    run = project.directory / "run.yaml"
    run.write_text(yaml.safe_dump({"name": name, "workload": {"command": ["true"]}}))
    return subprocess.run(
        [
            *(sys.executable, "-m", "drillyard", "launch", str(run)),
            *("--cluster", str(project.launch_config())),
        ],
        cwd=project.directory,
        env=project.environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )


def test_a_cluster_from_nothing_takes_runs_and_goes_back_to_nothing(
    project: JoinedNebius, cluster: Cluster
) -> None:
    checked = project.run("plan", "--check")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    project.environment["HF_TOKEN"] = "hf_of_the_test"
    written = project.up("--write", "--secret", "HF_TOKEN")
    project.require_whole()
    file = project.launch_config()
    assert f"drillyard launch RUN.YAML --cluster {file}" in written.stderr
    made = load_cluster_config(file, resolve_environment=False)
    assert (made.platform, made.nodes, made.machine) == ("kubernetes", 2, "gpu-h100-sxm")
    section = made.section.model_dump()
    assert (section["context"], section["namespace"]) == (CONTEXT, SPACE)
    assert section["secrets"] == {"HF_TOKEN": "drillyard/HF_TOKEN"}
    assert contexts(project) == [CONTEXT]
    claim = cluster.get("--namespace", SPACE, "persistentvolumeclaim/shared")
    volume = cluster.get(f"persistentvolume/{claim['spec']['volumeName']}")
    assert volume["spec"]["hostPath"]["path"] == "/mnt/shared"

    until(lambda: project.run("status").returncode == 0, "the cluster does not become ready")
    status = project.run("status")
    assert "2 of 2 nodes ready" in status.stdout and "drift  " in status.stdout, status.stdout
    assert f"drillyard launch RUN --cluster {file}" in status.stdout
    begun = len(project.cloud.log)
    again = project.up("--write", "--secret", "HF_TOKEN")
    assert "nothing to change" in again.stderr and len(project.cloud.log) == begun
    # The nodes of the groups carry the label, too, and are in no state.
    project.add(VM, "mk8snodegroup-1")
    assert project.leaks()["leaks"] == []
    project.cloud.objects.pop((VM, "mk8snodegroup-1"))

    launched = launch(project, "first")
    assert launched.returncode == 0, launched.stderr
    for settings in ({"nodes": 1}, {"cluster": {"disk_gib": 300}}):
        project.write(**settings)
        refused = project.run("up", "--yes")
        assert refused.returncode == 2 and "1 runs use the cluster" in refused.stderr
    project.write(image="i:1")
    refused = project.run("down", "--yes")
    assert refused.returncode == 2 and "JobSet runs-privileged/first" in refused.stderr
    cluster.kubectl("--namespace", SPACE, "delete", "jobset", "first")
    until(
        lambda: not cluster.get("--namespace", SPACE, "workloads.kueue.x-k8s.io")["items"],
        "the run does not end",
    )

    kept = project.down()
    assert "file system team (computefilesystem-team) has data and stays" in kept.stderr
    assert project.cloud.kinds() == {FILES: 1} and contexts(project) == []
    assert cluster.get("persistentvolumes")["items"] == []
    assert cluster.get("--all-namespaces", "persistentvolumeclaims")["items"] == []
    # The charts come again, with the volumes, on a control plane that has their release.
    project.up("--write")
    until(
        lambda: (
            cluster.get("--namespace", SPACE, "persistentvolumeclaim/shared")["status"]["phase"]
            == "Bound"
        ),
        "the claim is not bound",
    )
    project.down("--delete-data")
    assert project.cloud.objects == {} and project.leaks()["exit_code"] == 0


def test_a_killed_up_goes_on_and_its_node_groups_are_found_below_the_cluster(
    project: JoinedNebius,
) -> None:
    project.cloud.faults[f"create {GROUP}"] = Fault("", None, hang_seconds=60)
    command = project.start("up", "--yes")
    until(lambda: any(GROUP in line for line in project.cloud.log), "no group is made")
    kill_and_wait(project, command)
    project.cloud.faults.clear()
    assert project.cloud.kinds()[CONTROL_PLANE] == 1
    project.up("--write")
    project.require_whole()
    # Without its state all of it is left; a group of nodes costs what its nodes do.
    project.store.client.delete_object(Bucket=STATE, Key="team/default.tfstate")
    found = project.leaks()
    by_kind = {(each["kind"], each["name"]): each for each in found["leaks"]}
    assert by_kind[GROUP, "team-on-demand"]["usd_per_day"] == pytest.approx(2 * 24 * 23.60)
    assert by_kind[GROUP, "team-cpu"]["usd_per_day"] == pytest.approx(24 * 0.3968)
    assert (CONTROL_PLANE, "team") in by_kind
    for line in found["commands"]:
        if "storage bucket" not in line:
            project.type(line)
    assert {each["kind"] for each in project.leaks()["leaks"]} == {FILES, BUCKET_KIND}
