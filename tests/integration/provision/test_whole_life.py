"""The whole life of a cluster by the commands that a user types, with the real stages: Terraform,
the project's checks, the control plane and `leaks` see one and the same cloud."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.integration.kubernetes import kwok
from tests.integration.kubernetes.cluster import Cluster, started
from tests.integration.provision.fake_cloud import Fault
from tests.integration.provision.interruption import kill_and_wait
from tests.integration.provision.joined_project import JoinedProject
from tests.integration.provision.project import until

POOL = "google_container_node_pool"
CONTEXT = "gke_acme-ml_us-central1_c"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A control plane with JobSet and Kueue, and the nodes of the pool."""
    with started(tmp_path_factory.mktemp("life")) as made:
        kwok.start_kwok(made)
        kwok.add_nodes(made, [kwok.node(f"gpu-{n}", "c-on-demand", "b") for n in range(2)])
        yield made


@pytest.fixture
def joined(cluster: Cluster, tmp_path: Path) -> Iterator[JoinedProject]:
    made = JoinedProject(tmp_path, cluster, storage={"bucket": "c-runs"})
    yield made
    made.close()


def contexts(project: JoinedProject) -> list[str]:
    found: dict[str, Any] = yaml.safe_load(project.kubeconfig.read_text("utf-8"))
    return [each["name"] for each in found["contexts"]]


def test_a_cluster_from_nothing_and_back_to_nothing(joined: JoinedProject) -> None:
    checked = joined.run("plan", "--check")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    made = joined.up("--set", "cluster.labels.team=x")
    joined.require_whole()
    config = yaml.safe_load(made.stdout)
    assert config["kubernetes"]["context"] == CONTEXT and contexts(joined) == [CONTEXT]
    assert config["cluster"]["labels"] == {"team": "x"}
    joined.config.write_text(made.stdout, encoding="utf-8")

    # Kueue takes a moment to see the flavors of its queues.
    until(lambda: joined.run("status").returncode == 0, "the queues do not become active")
    status = joined.run("status")
    assert status.returncode == 0, status.stdout + status.stderr
    assert "2 of 2 nodes ready" in status.stdout and "drift    Terraform" in status.stdout
    changes = len(joined.cloud.log)
    again = joined.up()
    assert "nothing to change" in again.stderr and len(joined.cloud.log) == changes
    assert again.stdout == made.stdout
    assert joined.leaks()["leaks"] == []

    # A volume that a claim has made is in no state.
    volume = "zones/us-central1-b/disks/pvc-1"
    labels = {"goog-k8s-cluster-name": "c", "goog-k8s-cluster-location": "us-central1"}
    joined.google.add("compute", volume, labels=labels)
    assert [each["name"] for each in joined.leaks()["leaks"]] == ["pvc-1"]
    joined.google.things.pop(("compute", volume))

    joined.store.put("c-runs", "run/checkpoints/1/model", b"weights")
    removed = joined.down()
    assert "gs://c-runs has data and stays" in removed.stderr
    assert set(joined.store.buckets) == {"c-runs"} and contexts(joined) == []
    (kept,) = joined.leaks()["leaks"]
    assert kept["name"] == "c-runs" and kept["command"] == ""
    removed = joined.down("--delete-data")
    assert "deleted 3 folders of gs://c-runs" in removed.stderr
    joined.require_nothing()
    assert (joined.leaks()["exit_code"], joined.leaks()["unknown"]) == (0, [])


def test_a_failure_in_the_middle_is_made_good_or_removed(joined: JoinedProject) -> None:
    stockout = "Error 503: The zone does not have enough resources available, GCE_STOCKOUT"
    joined.cloud.faults[f"create {POOL} c-on-demand"] = Fault(stockout)
    failed = joined.run("up", "--yes")
    assert failed.returncode == 2 and "GCE_STOCKOUT" in failed.stderr
    assert joined.leaks()["leaks"] == []  # All that was made is in the state.

    joined.up()
    joined.require_whole()
    joined.cloud.faults["delete google_service_account"] = Fault("Error 400: Invalid value")
    failed = joined.run("down", "--yes")
    assert failed.returncode == 2, failed.stderr
    joined.down()
    joined.require_nothing()


def test_what_a_killed_up_has_made_is_a_leak_until_down(joined: JoinedProject) -> None:
    kind = "google_container_cluster"
    joined.cloud.faults[f"create {kind}"] = Fault("", None, hang_seconds=60)
    command = joined.start("up", "--yes")
    until(lambda: f"create {kind} c" in joined.cloud.log, "no cluster is made")
    kill_and_wait(joined, command)
    found = joined.leaks()
    kinds = {each["kind"] for each in found["leaks"]}
    assert found["exit_code"] == 1
    assert {"google_compute_network", "google_service_account", "google_storage_bucket"} <= kinds
    joined.down()
    joined.require_nothing()
