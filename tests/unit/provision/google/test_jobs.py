"""Jobs of Vertex AI in a project: what `leaks`, `down`, `status` and the project's check say of
them, by Google's own clients."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.provision.clusters import plan as planned
from tests.unit.provision.google.gcloud import ACCEPTED, shape
from tests.unit.provision.google.google_cloud import DISABLED, NUMBER, PROJECT, GoogleCloud
from tests.unit.provision.google.test_leaks import make_planned, planned_keys
from tests.unit.provision.job_clusters import config

from drillyard.errors import UserError
from drillyard.provision import jobs_stage
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.google.api import GoogleApis
from drillyard.provision.google.leaks import find_leaks
from drillyard.provision.google.preflight import check_project
from drillyard.provision.google.resource_marks import plain_kind
from drillyard.provision.google.terraform_state import state_keys
from drillyard.provision.jobs_stage import jobs_status, running_jobs

LOCATION = {"project": PROJECT, "region": "us-central1"}
OURS, THEIRS = {"drillyard-cluster": "train"}, {"drillyard-cluster": "train-2"}
NETWORK = f"projects/{NUMBER}/global/networks/train"
QUOTA = "custom_model_training_preemptible_nvidia_h100_mega_gpus"
ENDED = ("SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED", "PARTIALLY_SUCCEEDED")
ACTIVE = ("QUEUED", "PENDING", "RUNNING", "CANCELLING", "PAUSED", "UPDATING")
POOLS = [
    {"machineSpec": {"machineType": "a3-megagpu-8g"}, "replicaCount": count} for count in ("1", "3")
]


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., ClusterPlan]:
    def make_plan(**settings: Any) -> ClusterPlan:
        return planned(tmp_path, config(**{"name": "train", "location": LOCATION, **settings}))

    return make_plan


def seed_job(cloud: GoogleCloud, job: str, state: str, **body: Any) -> None:
    spec = {"workerPoolSpecs": POOLS, "scheduling": {"strategy": "SPOT"}, **body.pop("spec", {})}
    cloud.add(
        "aiplatform",
        f"locations/us-central1/customJobs/{job}",
        **{"displayName": f"run-{job}", "state": f"JOB_STATE_{state}", "jobSpec": spec, **body},
    )


def seed_resource(cloud: GoogleCloud, name: str, **body: Any) -> None:
    path = f"locations/us-central1/persistentResources/{name}"
    cloud.add("aiplatform", path, **{"state": "RUNNING", "resourcePools": POOLS, **body})


@pytest.mark.parametrize("seed", [1, 2])
def test_all_seeded_jobs_are_found_and_no_decoy(
    cloud: GoogleCloud, apis: GoogleApis, make: Callable[..., ClusterPlan], seed: int
) -> None:
    draw = random.Random(seed)
    cloud.page_size = 40
    expected: set[str] = set()
    for number in range(500):
        name, labels = str(1000 + number), draw.choice((OURS, OURS, THEIRS, {}))
        network = draw.choice((NETWORK, f"projects/{NUMBER}/global/networks/other", None))
        if draw.random() < 0.3:
            seed_resource(cloud, name, labels=labels, **({"network": network} if network else {}))
            active = True
        else:
            state = draw.choice((*ENDED, *ACTIVE))
            seed_job(
                cloud, name, state, labels=labels, spec={"network": network} if network else {}
            )
            active = state in ACTIVE
        if active and (labels == OURS or network == NETWORK):
            expected.add(name)
    report = find_leaks(make(vertex={"network": NETWORK}), apis)
    assert {each.name for each in report.leaks} == expected
    assert (report.exit_code, report.unknown, report.doubtful) == (1, (), ())
    for command in report.commands:
        assert shape(command) in ACCEPTED
        assert "--region=us-central1" in command


def test_a_running_job_costs_its_machines_and_comes_first(
    cloud: GoogleCloud, apis: GoogleApis, make: Callable[..., ClusterPlan]
) -> None:
    found = make()
    make_planned(cloud, found)
    seed_job(cloud, "1", "RUNNING", labels=OURS)
    seed_job(cloud, "2", "PENDING", labels=OURS)
    seed_resource(cloud, "3", labels=OURS)
    leaks = find_leaks(found, apis).leaks
    prices = {each.name: each.usd_per_day for each in leaks[:3]}
    assert prices["1"] == pytest.approx(28.17 * 4 * 24, rel=1e-3)
    assert prices["2"] == 0.0
    assert prices.keys() == {"1", "2", "3"}
    assert (
        leaks[0].command
        == f"gcloud ai custom-jobs cancel 1 --region=us-central1 --project={PROJECT}"
    )


WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"vertex": {"network": NETWORK}},
    {"cluster": {"registry": False, "existing_bucket": True}},
)


@pytest.mark.parametrize("settings", WAYS)
def test_what_the_plan_makes_is_what_leaks_lists(
    cloud: GoogleCloud,
    apis: GoogleApis,
    make: Callable[..., ClusterPlan],
    settings: dict[str, Any],
) -> None:
    found = make(**settings)
    make_planned(cloud, found)
    report = find_leaks(found, apis)
    listed = {f"{plain_kind(each.kind)}/{each.location}/{each.name}" for each in report.leaks}
    as_listed = {
        "/".join([plain_kind(kind), *rest])
        for kind, *rest in (each.split("/", 2) for each in planned_keys(found))
    }
    assert listed == as_listed
    assert find_leaks(found, apis, planned_keys(found)).leaks == ()
    assert report.unknown == ()


def test_the_state_names_the_peering_as_the_plan_does() -> None:
    attributes = {
        "id": "projects%2Fp%2Fglobal%2Fnetworks%2Ftrain:servicenetworking.googleapis.com",
        "network": "projects/p/global/networks/train",
        "peering": "servicenetworking-googleapis-com",
        "service": "servicenetworking.googleapis.com",
    }
    kind = "google_service_networking_connection"
    row = {"mode": "managed", "type": kind, "instances": [{"attributes": attributes}]}
    assert [*state_keys({"resources": [row]})] == [f"{kind}//servicenetworking-googleapis-com"]


def test_a_list_that_is_refused_is_unknown_and_ended_jobs_are_not_leaks(
    cloud: GoogleCloud, apis: GoogleApis, make: Callable[..., ClusterPlan]
) -> None:
    found = make()
    seed_job(cloud, "1", "SUCCEEDED", labels=OURS)
    assert find_leaks(found, apis).exit_code == 0
    cloud.refuse("aiplatform", "customJobs")
    report = find_leaks(found, apis)
    assert (report.leaks, report.exit_code) == ((), 3)


def test_other_platforms_do_not_ask_the_service(
    cloud: GoogleCloud, apis: GoogleApis, plan: ClusterPlan
) -> None:
    seed_job(cloud, "1", "RUNNING", labels={})
    assert find_leaks(plan, apis).exit_code == 0
    assert not any("aiplatform" in each for each in cloud.requests)


def test_jobs_that_wait_or_run_are_found_by_the_label_alone(
    cloud: GoogleCloud, make: Callable[..., ClusterPlan]
) -> None:
    for number, state in enumerate((*ENDED, *ACTIVE)):
        seed_job(cloud, str(number), state, labels=OURS)
        seed_job(cloud, str(100 + number), state, labels=THEIRS)
    found = running_jobs(make())
    numbers = range(len(ENDED), len(ENDED) + len(ACTIVE))
    assert sorted(found) == sorted(f"run-{each} (job {each})" for each in numbers)


def test_a_project_that_does_not_use_the_service_has_no_jobs(
    cloud: GoogleCloud, make: Callable[..., ClusterPlan]
) -> None:
    """As an `up` leaves it that ended early. That of another project says nothing of this one."""
    cloud.refuse("aiplatform", reason=DISABLED)
    assert running_jobs(make()) == []
    cloud.faults.clear()
    cloud.refuse("aiplatform", reason=DISABLED, consumer="projects/999")
    with pytest.raises(UserError, match="gcloud services enable"):
        running_jobs(make())
    cloud.faults.clear()
    cloud.refuse("aiplatform")
    with pytest.raises(UserError, match=r"roles/aiplatform\.user"):
        running_jobs(make())


class _State:
    title = "gs://acme-ml-train-tfstate"

    def __init__(self, resources: dict[str, Any]) -> None:
        self._resources = resources

    def find(self) -> Any:
        return self._resources or None

    def resources(self) -> dict[str, Any]:
        return self._resources


def test_status_says_what_is_missing_and_what_runs(
    cloud: GoogleCloud, make: Callable[..., ClusterPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = make()
    monkeypatch.setattr(jobs_stage, "state_bucket", lambda _: _State({}))
    with pytest.raises(UserError, match="made yet"):
        jobs_status(found)
    made = {each.address: _Made(each.kind) for each in found.made_by_terraform}
    account = made.pop("google_service_account.jobs")
    monkeypatch.setattr(jobs_stage, "state_bucket", lambda _: _State(made))
    seed_job(cloud, "1", "RUNNING", labels=OURS, startTime="2026-10-01T12:00:00Z")
    seed_job(cloud, "2", "QUEUED", labels=OURS)
    status = jobs_status(found)
    [line] = status.missing
    assert "train-jobs@" in line
    (pool,), (queue,) = status.pools, status.queues
    assert (pool.present, len(pool.nodes_made), pool.starts_at_zero) == (4, 4, True)
    assert (queue.admitted, queue.pending) == (1, 1)
    assert status.created == "2026-10-01T10:00:00Z"
    made["google_service_account.jobs"] = account
    assert jobs_status(found).missing == ()


class _Made:
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.attributes = {"time_created": "2026-10-01T10:00:00Z"}


def limit_of_quota(cloud: GoogleCloud, limit: int) -> None:
    bucket = {"effectiveLimit": str(limit), "dimensions": {"region": "us-central1"}}
    cloud.quota_metrics[f"aiplatform.googleapis.com/{QUOTA}"] = {
        "consumerQuotaLimits": [{"quotaBuckets": [bucket]}]
    }


def test_the_projects_check_compares_the_quotas_of_the_service(
    cloud: GoogleCloud, apis: GoogleApis, make: Callable[..., ClusterPlan]
) -> None:
    limit_of_quota(cloud, 8)
    [short] = [each for each in check_project(make(), apis) if each.level == "error"]
    assert QUOTA in short.what and "16 GPUs" in short.what and "is 8" in short.what
    limit_of_quota(cloud, 16)
    found = check_project(make(), apis)
    assert not [each for each in found if each.level == "error"]
    # Compute Engine is asked for neither its quotas nor its zones: the project may not use it.
    assert not any("/regions/" in each or "/machineTypes/" in each for each in cloud.requests)
    assert "GKE" not in " ".join(each.what for each in found)
    assert "permissions for" not in " ".join(each.what for each in found)


def test_the_projects_check_finds_a_network_of_another_number(
    cloud: GoogleCloud, apis: GoogleApis, make: Callable[..., ClusterPlan]
) -> None:
    limit_of_quota(cloud, 16)
    wrong = make(vertex={"network": "projects/1/global/networks/train"})
    [error] = [each for each in check_project(wrong, apis) if each.level == "error"]
    assert error.what.startswith("vertex.network: ") and error.fix == f"write {NETWORK}"
    right = make(vertex={"network": NETWORK})
    assert not [each for each in check_project(right, apis) if each.level == "error"]


def test_a_reservation_must_be_shared_with_the_service(
    cloud: GoogleCloud, apis: GoogleApis, make: Callable[..., ClusterPlan]
) -> None:
    body: dict[str, Any] = {
        "specificReservation": {
            "count": "4",
            "inUseCount": "0",
            "instanceProperties": {"machineType": "a3-megagpu-8g"},
        },
        "specificReservationRequired": True,
        "status": "READY",
    }
    zone = "us-central1-b"
    place = {"location": {**LOCATION, "zone": zone}, "consumption": "reservation"}
    cloud.add("compute", f"zones/{zone}/reservations/mine", **body)
    found = make(**place, reservation="mine")
    [error] = [each for each in check_project(found, apis) if each.level == "error"]
    assert error.what.startswith("reservation: mine is not shared with Vertex AI")
    assert shape(error.fix) in ACCEPTED
    shared = {**body, "reservationSharingPolicy": {"serviceShareType": "ALLOW_ALL"}}
    cloud.add("compute", f"zones/{zone}/reservations/mine", **shared)
    assert not [each for each in check_project(found, apis) if each.level == "error"]
    # By its full name the zone is in the name.
    whole = f"projects/{PROJECT}/zones/{zone}/reservations/mine"
    named = make(consumption="reservation", reservation=whole)
    assert not [each for each in check_project(named, apis) if each.level == "error"]
