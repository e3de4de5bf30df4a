"""The life of a place for jobs of Vertex AI over the real Terraform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml
from tests.integration.provision.fake_cloud import Fault
from tests.integration.provision.project import Project

PEERING = "google_service_networking_connection"
SETTINGS: dict[str, Any] = {
    "platform": "vertex",
    "location": {"project": "p", "region": "us-central1"},
    "machine": "a3-megagpu-8g",
    "consumption": "spot",
    "image": None,
    "storage": {"bucket": "c-runs"},
    "vertex": {"network": "projects/1/global/networks/c"},
}


@pytest.fixture
def project(make_project: Callable[..., Project]) -> Project:
    return make_project(**SETTINGS)


def test_what_jobs_need_is_made_kept_and_removed(project: Project) -> None:
    # A refusal leaves what came before, and the next `up` goes on.
    project.cloud.faults[f"create {PEERING}"] = Fault("Error 403: PERMISSION_DENIED", times=None)
    failed = project.run("up", "--yes")
    assert failed.returncode == 2 and "servicenetworking.networksAdmin" in failed.stderr
    project.cloud.faults.clear()
    made = yaml.safe_load(project.up().stdout)
    project.require_whole()
    section = made["vertex"]
    assert section["service_account"] == "c-jobs@p.iam.gserviceaccount.com"
    assert section["reserved_ip_ranges"] == ["c-peering"]

    # The completed file changes nothing; one without its VPC takes it from jobs that go on.
    changed = len(project.cloud.log)
    project.write(**SETTINGS | {"vertex": section})
    project.up()
    assert len(project.cloud.log) == changed
    project.write(**SETTINGS | {"vertex": {}})
    project.stages(runs=["long (job 7)"])
    refused = project.run("up", "--yes")
    assert refused.returncode == 2 and "long (job 7)" in refused.stderr
    project.write(**SETTINGS)
    project.require_whole()

    refused = project.run("down", "--yes")
    assert refused.returncode == 2 and "long (job 7)" in refused.stderr
    project.stages(runs=[], unreachable=True)
    unknown = project.run("down", "--yes")
    assert unknown.returncode == 2 and "--ignore-runs" in unknown.stderr
    project.require_whole()
    project.stages(unreachable=False)
    # Google keeps the peering for some time after the last job.
    said = "Error 400: Producer services (e.g. CloudSQL) are still using this connection."
    project.cloud.faults[f"delete {PEERING}"] = Fault(said, times=1)
    ended = project.down()
    assert "trying again" in ended.stderr
    project.require_nothing()
