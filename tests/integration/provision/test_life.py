"""The life of a cluster over the real Terraform: made, compared, changed, lost in part, removed."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest
import yaml
from tests.integration.provision.bucket_server import StoredBucket
from tests.integration.provision.fake_cloud import Fault
from tests.integration.provision.project import STATE, Project

POOL = "google_container_node_pool"
IMAGES = ("us-docker.pkg.dev/gce-ai-infra/gpudirect-gib/nccl-plugin-gib:v1.1.1", "ubuntu:24.04")
"""Those that prepare the nodes of A4."""


def test_a_cluster_is_made_compared_repaired_and_removed(project: Project) -> None:
    project.environment["HF_TOKEN"] = "hf_a_token_of_the_user"
    made = project.up("--secret")
    project.require_whole()
    assert yaml.safe_load(made.stdout)["kubernetes"]["secrets"] == {
        "HF_TOKEN": "drillyard/HF_TOKEN"
    }
    assert project.log.read_text("utf-8").splitlines() == ["install context-c", "secret HF_TOKEN"]
    settings = project.store.buckets[STATE].settings
    assert settings["labels"]["drillyard-cluster"] == "c"
    assert settings["versioning"] == {"enabled": True}
    assert settings["iamConfiguration"]["uniformBucketLevelAccess"]["enabled"]

    changes = len(project.cloud.log)
    again = project.up()
    assert "nothing to change" in again.stderr and len(project.cloud.log) == changes

    # As Google does some time after the creation.
    own = project.cloud.of_kind("google_container_cluster")
    own["master_version"] = "1.34.9"
    assert project.run("drift").stdout.split() == []
    project.cloud.of_kind("google_compute_network")["description"] = "by hand"
    (line,) = project.run("drift").stdout.splitlines()
    assert line.startswith("google_compute_network.system: changed by others; ")
    assert line.endswith("(description)")
    own["master_version"] = "1.34.10"
    restored = project.up()
    assert "changed by others: google_compute_network.system (update)" in restored.stderr
    assert "google_container_cluster" not in restored.stderr
    assert len(project.cloud.log) == changes + 1

    changes = len(project.cloud.log)
    project.cloud.remove(POOL)
    assert "google_container_node_pool.cpu: is gone; " in project.run("drift").stdout
    repaired = project.up()
    project.require_whole()
    assert "changed by others: google_container_node_pool.cpu (gone)" in repaired.stderr
    assert {line.split()[:2] == ["create", POOL] for line in project.cloud.log[changes:]} == {True}

    removed = project.down()
    project.require_nothing()
    assert removed.returncode == 0
    assert project.log.read_text("utf-8").splitlines()[-2:] == [
        "delete workloads context-c",
        "leaks",
    ]


def test_what_the_plan_lists_is_what_exists_on_a_machine_with_data_networks(
    make_project: Callable[..., Project],
) -> None:
    project = make_project(machine="a4-highgpu-8g", consumption="flex-start-queued")
    for image in IMAGES:
        project.registry.push(image, "one")
    project.up()
    project.require_whole()
    assert project.cloud.kinds()["google_compute_subnetwork"] == 10
    project.down()
    project.require_nothing()


def test_the_digests_of_images_are_recorded_and_stay_until_the_config_has_others(
    make_project: Callable[..., Project],
) -> None:
    settings = {"machine": "a4-highgpu-8g", "consumption": "spot"}
    project = make_project(**settings)

    def installed(up: subprocess.CompletedProcess[str]) -> set[str]:
        assert up.returncode == 0, up.stderr
        (line,) = project.log.read_text("utf-8").splitlines()[-1:]
        return {each.partition("@")[2] for each in line.split()[2:]}

    refused = project.run("up", "--yes")
    assert refused.returncode == 2 and all(each in refused.stderr for each in IMAGES)
    project.require_nothing()

    first = {project.registry.push(image, "one") for image in IMAGES}
    assert installed(project.up()) == first
    project.require_whole()
    second = [project.registry.push(image, "two") for image in IMAGES]
    moved = project.up()
    assert installed(moved) == first and all(each in moved.stderr for each in second)
    project.registry.tags.clear()
    assert installed(project.up()) == first
    pinned = [f"{image}@{digest}" for image, digest in zip(IMAGES, second, strict=True)]
    project.write(**settings, cluster={"images": pinned})
    assert installed(project.up()) == set(second)
    project.write(**settings)
    assert installed(project.up()) == set(second)
    project.down()
    project.require_nothing()


def test_an_edit_is_shown_and_a_pool_with_runs_is_not_replaced(project: Project) -> None:
    project.up()
    project.cloud.replaced_by.add((POOL, "node_count"))
    project.write(nodes=1)
    project.stages(runs=["JobSet runs/first"])
    refused = project.run("up", "--yes")
    assert refused.returncode == 2
    assert "replace google_container_node_pool.c_on_demand (node_count)" in refused.stderr
    assert "JobSet runs/first" in refused.stderr

    project.cloud.replaced_by.clear()
    shrunk = project.run("up", "--yes")
    assert shrunk.returncode == 2 and "JobSet runs/first" in shrunk.stderr
    assert not any(line.startswith(("update", "delete")) for line in project.cloud.log)

    project.stages(runs=[])
    changed = project.up()
    assert "update google_container_node_pool.c_on_demand (node_count)" in changed.stderr
    project.require_whole()


def test_nothing_changes_without_an_answer(project: Project) -> None:
    asked = project.run("up")
    assert asked.returncode == 2 and "--yes" in asked.stderr
    project.require_nothing()


def test_a_secret_that_is_not_set_stops_before_anything_is_made(project: Project) -> None:
    project.environment.pop("HF_TOKEN", None)
    refused = project.run("up", "--yes", "--secret")
    assert refused.returncode == 2 and "export HF_TOKEN=" in refused.stderr
    project.require_nothing()


def test_a_finding_of_the_project_stops_before_anything_is_made(project: Project) -> None:
    finding = {"level": "error", "what": "no role", "fix": "gcloud projects add-iam-policy-binding"}
    project.stages(findings=[finding])
    refused = project.run("up", "--yes")
    assert refused.returncode == 2 and finding["fix"] in refused.stderr
    project.require_nothing()


def test_down_refuses_while_runs_go_on_or_may_go_on(project: Project) -> None:
    project.up()
    project.stages(runs=["Workload runs/other"])
    refused = project.run("down", "--yes")
    assert refused.returncode == 2 and "Workload runs/other" in refused.stderr

    project.stages(unreachable=True)
    unknown = project.run("down", "--yes")
    assert unknown.returncode == 2 and "--ignore-runs" in unknown.stderr
    project.require_whole()

    project.down("--ignore-runs")
    project.require_nothing()


def test_a_protected_cluster_stays_until_an_up_without_protection(
    make_project: Callable[..., Project],
) -> None:
    project = make_project(cluster={"deletion_protection": True})
    project.up()
    refused = project.run("down", "--yes")
    assert refused.returncode == 2 and "deletion_protection" in refused.stderr
    project.write()
    # The config alone does not unprotect what exists.
    assert project.run("down", "--yes").returncode == 2
    project.require_whole()
    project.up()
    project.down()
    project.require_nothing()


def test_down_goes_on_where_parts_are_gone(project: Project) -> None:
    project.up()
    project.cloud.remove(POOL)
    project.cloud.remove("google_container_cluster")
    project.stages(unreachable=True)
    project.down()
    project.require_nothing()

    project.stages(leaks=1)
    gone = project.run("down", "--yes")
    assert gone.returncode == 1 and f"gs://{STATE}" in gone.stderr


def test_what_is_still_in_use_is_destroyed_later(project: Project) -> None:
    project.up()
    busy = "Error 400: The network resource is already being used by 'k8s-fw-1'"
    project.cloud.faults["delete google_compute_network"] = Fault(busy, times=1)
    removed = project.down()
    assert "already being used by" in removed.stderr
    project.require_nothing()

    project.up()
    project.cloud.faults["delete google_compute_network"] = Fault(busy, times=None)
    refused = project.run("down", "--yes")
    assert refused.returncode == 2 and "google_compute_network.system" in refused.stderr
    assert "drillyard cluster leaks" in refused.stderr
    project.cloud.faults.clear()
    project.down()
    project.require_nothing()


def test_the_state_bucket_stays_where_it_has_objects_of_others(project: Project) -> None:
    project.up()
    project.store.put(STATE, "other/default.tfstate", b"{}")
    kept = project.down()
    assert "other/default.tfstate" in kept.stderr
    assert project.store.names(STATE) == ["other/default.tfstate"]


def test_a_bucket_of_somebody_else_is_not_removed(project: Project) -> None:
    project.store.buckets[STATE] = StoredBucket({"name": STATE, "versioning": {"enabled": True}})
    project.up()
    project.down()
    assert project.cloud.objects == {} and project.store.names(STATE) == []


def test_a_bucket_without_versions_is_refused_with_the_command(project: Project) -> None:
    project.store.buckets[STATE] = StoredBucket({"name": STATE})
    refused = project.run("up", "--yes")
    assert refused.returncode == 2
    assert f"gcloud storage buckets update gs://{STATE} --versioning" in refused.stderr


def test_no_file_and_no_state_has_the_token(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = "ya29.a-token-of-the-user"
    project.environment |= {
        "GOOGLE_OAUTH_ACCESS_TOKEN": token,
        "HF_TOKEN": token,
        "TF_LOG": "trace",
    }
    project.up("--secret")
    stored = [each.data for place in project.store.buckets.values() for each in place.versions]
    files = [each for each in project.directory.rglob("*") if each.is_file()]
    assert len(files) > 3
    assert not any(token.encode() in data for data in stored)
    assert not any(token.encode() in each.read_bytes() for each in files)


def test_the_data_of_a_cluster_of_the_same_name_in_another_project_stays(project: Project) -> None:
    project.write(storage={"bucket": "runs"})
    settings = {"name": "runs", "labels": {"drillyard-cluster": "c"}, "location": "US"}
    project.store.buckets["runs"] = StoredBucket({**settings, "of": "another"})
    project.store.put("runs", "model", b"weights")
    project.run("down", "--yes", "--delete-data")
    assert project.store.names("runs") == ["model"]
    project.store.buckets["runs"].settings["of"] = project.plan.project
    project.run("down", "--yes", "--delete-data")
    assert "runs" not in project.store.buckets


def test_a_change_that_needs_another_control_plane_is_refused(project: Project) -> None:
    project.up()
    kind = "google_container_cluster"
    project.cloud.replaced_by.add((kind, "default_max_pods_per_node"))
    project.write(cluster={"max_pods_per_node": 64})
    refused = project.run("up", "--yes")
    assert refused.returncode == 2 and f"drillyard cluster down {project.config}" in refused.stderr
    assert not any(line.startswith(f"delete {kind}") for line in project.cloud.log)
