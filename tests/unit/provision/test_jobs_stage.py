"""`up` and `down` of a place for jobs: what they ask, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.facts import says
from tests.unit.provision.job_clusters import config

from drillyard.cli.main import main
from drillyard.errors import UnreachableError, UserError
from drillyard.provision import cluster_session, down, jobs_stage, run_guards, up
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.cluster_session import Request, real_stages
from drillyard.provision.down import DownOptions, take_down
from drillyard.provision.provisioner import PlannedCluster, plan_file


@pytest.fixture
def planned(tmp_path: Path) -> PlannedCluster:
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(config()))
    return plan_file(file)


@pytest.fixture
def no_state(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A project without a bucket for the state; what is removed."""
    removed: list[str] = []

    class Bucket:
        title = "gs://state"

        def find(self) -> None:
            return None

    class Stores:
        kind = "google_storage_bucket"

    class Cloud:
        def state_bucket(self, plan: ClusterPlan) -> Bucket:
            return Bucket()

        def data_stores(self, plan: ClusterPlan) -> Stores:
            return Stores()

    monkeypatch.setattr(down, "terraform_program", lambda plan: None)
    monkeypatch.setattr(down, "cloud_of", lambda plan: Cloud())
    monkeypatch.setattr(down, "_own_data", lambda *_: [])
    monkeypatch.setattr(down, "_remove_data", lambda *_: removed.append("buckets") or [])
    monkeypatch.setattr(down, "_check_leaks", lambda *_: 0)
    return removed


def request_of(planned: PlannedCluster) -> Request:
    return Request(planned.plan, "down", "down", yes=True, report=lambda line: None)


def jobs_are(monkeypatch: pytest.MonkeyPatch, found: list[str] | UserError) -> None:
    def running(plan: ClusterPlan) -> list[str]:
        if isinstance(found, UserError):
            raise found
        return found

    monkeypatch.setattr(jobs_stage, "running_jobs", running)


@pytest.mark.parametrize(
    ("found", "facts"),
    [
        (["long (job 7)"], "1 run ... long (job 7) ... runs cancel ... Nothing was changed"),
        (UnreachableError("no answer"), "no answer ... down --ignore-runs"),
        (UserError("denied"), "denied ... down --ignore-runs"),
    ],
)
def test_down_removes_nothing_while_a_job_goes_on_or_may(
    planned: PlannedCluster,
    no_state: list[str],
    monkeypatch: pytest.MonkeyPatch,
    found: list[str] | UserError,
    facts: str,
) -> None:
    jobs_are(monkeypatch, found)
    request, stages = request_of(planned), real_stages(planned)
    with pytest.raises(UserError) as refused:
        take_down(request, stages, DownOptions())
    assert says(str(refused.value), facts)
    assert no_state == []
    assert take_down(request, stages, DownOptions(ignore_runs=True)) == 0
    assert no_state == ["buckets"]


def test_down_without_jobs_touches_neither_kubeconfig_nor_ssh(
    planned: PlannedCluster, no_state: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs_are(monkeypatch, [])
    assert take_down(request_of(planned), real_stages(planned), DownOptions()) == 0
    assert no_state == ["buckets"]


def test_an_edit_that_takes_from_running_jobs_is_refused(
    planned: PlannedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Opened:
        request = request_of(planned)

    opened: Any = Opened()
    stages = real_stages(planned)
    jobs_are(monkeypatch, ["long (job 7)"])
    run_guards._guard_jobs(opened, stages, [])
    with pytest.raises(UserError, match=r"google_compute_network\.system.*long"):
        run_guards._guard_jobs(opened, stages, ["google_compute_network.system"])
    jobs_are(monkeypatch, UnreachableError("no answer"))
    with pytest.raises(UserError, match="no answer"):
        run_guards._guard_jobs(opened, stages, ["google_compute_network.system"])
    jobs_are(monkeypatch, [])
    run_guards._guard_jobs(opened, stages, ["google_compute_network.system"])


def test_a_secret_is_refused_before_anything_is_made(
    planned: PlannedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "x")
    with pytest.raises(UserError) as refused:
        up.bring_up(request_of(planned), real_stages(planned), ["HF_TOKEN"])
    assert "--secret HF_TOKEN" in str(refused.value)


@pytest.mark.parametrize("write", [True, False])
def test_up_writes_what_launch_needs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    write: bool,
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("# mine\n" + yaml.safe_dump(config(), sort_keys=False))
    monkeypatch.setattr(up, "bring_up", lambda *_: up.MadeCluster("", {}))
    with pytest.raises(SystemExit) as ended:
        main(["cluster", "up", str(path), "--yes", *(["--write"] if write else [])])
    printed, errors = capsys.readouterr()
    assert ended.value.code in (0, None), errors
    text = path.read_text() if write else printed
    assert text.startswith("# mine\n")
    found = yaml.safe_load(text)
    assert found["vertex"] == {"service_account": "team-jobs@my-project.iam.gserviceaccount.com"}
    assert "kubernetes" not in found


def test_the_stages_need_no_program_of_kubernetes(
    planned: PlannedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    real_stages(planned).require_programs(planned.plan)
    assert cluster_session._room_of(planned.plan).endswith("jobs_stage")
