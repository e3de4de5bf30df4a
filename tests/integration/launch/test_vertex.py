"""Runs on Vertex AI: Google's own clients against a server that speaks the service's protocol, and
a bucket server."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from google.cloud.aiplatform_v1.types import CustomJob
from tests.facts import says
from tests.integration.gcs import BUCKET, Bucket
from tests.integration.launch.vertex_place import Place, named
from tests.integration.launch.vertex_server import Refusal, Vertex

from drillyard.errors import NotFoundError, UserError
from drillyard.launch import run_changes
from drillyard.launch.launched_from import NameGiven, this_directory
from drillyard.launch.plan import Call
from drillyard.launch.run_status import State
from drillyard.supervise.process_identity import node_name, this_process


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    """A bucket that is not mounted."""
    made = Bucket(tmp_path_factory.mktemp("bucket"))
    made.start_server()
    yield made
    made.discard()


@pytest.fixture
def vertex(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Vertex]:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", bucket.endpoint)
    with Vertex() as service:
        yield service


# The request


@pytest.mark.parametrize(
    ("settings", "strategy"),
    [
        ({"consumption": "on-demand"}, "STANDARD"),
        ({"consumption": "spot"}, "SPOT"),
        ({"consumption": "flex-start", "vertex": "max_wait_hours: 0"}, "FLEX_START"),
        (
            {
                "consumption": "reservation",
                "reservation": "projects/1/zones/us-central1-b/reservations/r",
            },
            "STANDARD",
        ),
    ],
)
def test_what_is_planned_is_what_arrives(
    vertex: Vertex, settings: dict[str, str], strategy: str
) -> None:
    place = Place(vertex, **settings)
    plan = place.plan()
    create = plan.steps[1]
    assert isinstance(create, Call)
    handle = run_changes.submit(place.launcher, plan)
    assert str(handle) == "vertex://c/tiny"
    assert without_false(vertex.bodies[-1]) == without_false(create.body)
    assert vertex.newest.job_spec.scheduling.strategy.name == strategy


def without_false(body: Any) -> Any:
    """Enum values by name and defaults left out: a job as it is, however its JSON was written."""
    return json.loads(
        CustomJob.to_json(
            CustomJob.from_json(json.dumps(body)), including_default_value_fields=False
        )
    )


def test_all_files_of_the_plan_are_in_the_bucket_before_the_job_is_made(vertex: Vertex) -> None:
    place = Place(vertex)
    plan = place.plan(named("files"))
    wanted = {"secret", "secrets.json", *(file.path for file in plan.files)}
    seen: list[str] = []

    def there() -> list[str]:
        return [
            path for path in wanted if Place(vertex).launcher.read("files", f"launch/{path}", 0)
        ]

    # At that moment the service knows the job already, so its files can be asked for.
    vertex.on_created = lambda job: seen.extend(there())
    run_changes.submit(place.launcher, plan)
    assert set(seen) == wanted
    assert not [
        path
        for path, _ in place.launcher.artifacts("files")
        if "secret" in path or "agent/" in path
    ]
    job = plan.file("job.json").content.encode()
    assert place.launcher.read("files", "launch/job.json", 0) == job
    assert place.launcher.read("files", "launch/job.json", 10) == job[10:]


def test_secrets_travel_beside_the_plan(vertex: Vertex, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(vertex, environment="{TOKEN: '${env:A_TOKEN}'}")
    monkeypatch.delenv("A_TOKEN", raising=False)
    plan = place.plan(named("secretive"))
    with pytest.raises(UserError, match=r"A_TOKEN.* not set"):
        run_changes.submit(place.launcher, plan)
    assert vertex.requests == []
    monkeypatch.setenv("A_TOKEN", "hunter2")
    run_changes.submit(place.launcher, plan)
    assert json.loads(place.launcher.read("secretive", "launch/secrets.json", 0)) == {
        "A_TOKEN": "hunter2"
    }
    assert "hunter2" not in json.dumps(vertex.bodies)


# The life of a job


def test_a_job_queues_starts_runs_and_succeeds(vertex: Vertex) -> None:
    place = Place(vertex, consumption="flex-start")
    run_changes.submit(place.launcher, place.plan())

    def state() -> State:
        return place.launcher.status("tiny").state

    queued = place.launcher.status("tiny")
    assert queued.state is State.queued
    assert "24 h" in (queued.reason or "")
    assert abs((queued.since or 0) - time.time()) < 60
    vertex.enter(vertex.newest, "PENDING")
    assert state() is State.starting
    vertex.enter(vertex.newest, "RUNNING")
    assert state() is State.starting
    vertex.enter(vertex.newest, "SUCCEEDED")
    ended = place.launcher.status("tiny")
    assert ended.state is State.succeeded
    assert None not in (ended.submitted_at, ended.started_at, ended.ended_at)


def test_a_job_that_finds_no_capacity_has_failed(vertex: Vertex) -> None:
    place = Place(vertex, consumption="flex-start")
    run_changes.submit(place.launcher, place.plan())
    vertex.enter(vertex.newest, "EXPIRED")
    status = place.launcher.status("tiny")
    assert status.state is State.failed and says(status.reason or "", "no capacity ... 24 h")


def test_cancelling_twice_is_cancelling_once(vertex: Vertex) -> None:
    place = Place(vertex)
    run_changes.submit(place.launcher, place.plan(named("unwanted")))
    first, second = (
        run_changes.cancel(place.launcher, "unwanted"),
        run_changes.cancel(place.launcher, "unwanted"),
    )
    assert (first.status.state, first.before) == (State.cancelled, None)
    assert (second.status.state, second.before) == (State.cancelled, State.cancelled)
    assert len([path for _, path in vertex.requests if ":cancel" in path]) == 1
    mark = json.loads(place.launcher.read("unwanted", "launch/cancelled", 0))
    assert vertex.newest.name.endswith("/" + mark["submission"])


def test_jobs_with_the_same_labels_that_write_elsewhere_are_left_alone(
    vertex: Vertex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(vertex)
    plan = place.plan(named("mine"))
    create = plan.steps[1]
    assert isinstance(create, Call)
    # A colleague's cluster config has the same names and another bucket, or the job was copied.
    text = json.dumps(create.body)
    theirs = json.loads(text.replace(f"/gcs/{BUCKET}/", "/gcs/theirs/").replace(BUCKET, "theirs"))
    copied = json.loads(text.replace("/launch/agent", "/launch/other"))
    for body in (theirs, copied):
        place.launcher._service.create(body)
    others = list(vertex.jobs.values())
    with pytest.raises(NotFoundError):
        run_changes.cancel(place.launcher, "mine")
    run_changes.submit(place.launcher, plan)
    assert [status.handle.run for status in place.launcher.runs()] == ["mine"]
    monkeypatch.chdir(tmp_path)
    given = NameGiven(this_directory())
    # Nor does a bare name of another directory cancel the run of this name.
    with pytest.raises(UserError, match="launched from"):
        run_changes.cancel(place.launcher, "mine", given=given)
    with pytest.raises(UserError, match="launched from"):
        run_changes.submit(place.launcher, plan, replace=True)
    run_changes.cancel(place.launcher, "mine")
    run_changes.submit(place.launcher, plan, replace=True)
    assert run_changes.cancel(place.launcher, "mine", given=given).before is None
    assert [job.state.name for job in others] == ["JOB_STATE_QUEUED"] * 2


def test_a_job_that_ends_while_it_is_cancelled_is_no_error(vertex: Vertex) -> None:
    place = Place(vertex)
    run_changes.submit(place.launcher, place.plan())
    job, listed = vertex.newest, vertex.list

    def ends_after_being_listed(query: dict[str, list[str]]) -> Any:
        message = type(page := listed(query)).from_json(type(page).to_json(page))
        vertex.enter(job, "SUCCEEDED")
        return message

    vertex.list = ends_after_being_listed  # type: ignore[method-assign]
    assert run_changes.cancel(place.launcher, "tiny").status.state is State.succeeded


def test_a_second_submission_is_refused_until_the_first_is_over_or_replaced(vertex: Vertex) -> None:
    place = Place(vertex)
    plan = place.plan()
    run_changes.submit(place.launcher, plan)
    first = vertex.newest
    with pytest.raises(UserError, match="queued already"):
        run_changes.submit(place.launcher, plan)
    assert len(vertex.jobs) == 1
    run_changes.submit(place.launcher, plan, replace=True)
    assert first.state.name == "JOB_STATE_CANCELLED"
    assert place.launcher.status("tiny").state is State.queued
    vertex.enter(vertex.newest, "SUCCEEDED")
    run_changes.submit(place.launcher, plan)
    assert len(vertex.jobs) == 3


def test_another_machine_sees_the_same_runs_and_only_this_cluster_s(vertex: Vertex) -> None:
    here, other = Place(vertex), Place(vertex, name="other")
    for name in ("a.b", "a-b", "z"):
        run_changes.submit(here.launcher, here.plan(named(name)))
    run_changes.submit(other.launcher, other.plan(named("elsewhere")))
    there = Place(vertex)
    assert [status.handle.run for status in there.launcher.runs()] == ["z", "a-b", "a.b"]
    assert there.launcher.status("a.b").handle.run == "a.b"
    with pytest.raises(UserError, match=r"'elsewhere'.*: z, a-b, a\.b"):
        there.launcher.status("elsewhere")


def test_a_run_that_is_over_is_resumed_as_it_was_planned(vertex: Vertex) -> None:
    place = Place(vertex, consumption="spot")
    run_changes.submit(place.launcher, place.plan())
    with pytest.raises(UserError, match=r"queued .*no resume"):
        run_changes.resume(place.launcher, "tiny")
    vertex.enter(vertex.newest, "RUNNING")
    vertex.enter(vertex.newest, "FAILED", (14, "Spot VM was preempted."))
    assert place.launcher.status("tiny").failure is not None
    run_changes.resume(place.launcher, "tiny")
    first, second = vertex.bodies
    assert first == second
    assert place.launcher.status("tiny").state is State.queued


# Several launches of one name


def answer(launch: Callable[[], object]) -> str:
    """The handle, or the error."""
    try:
        return str(launch())
    except UserError as error:
        return str(error)


LOCK = f"/gcs/{BUCKET}/.drillyard/c/tiny.submit-lock"


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("replace", [False, True])
def test_of_launches_at_once_one_makes_a_job(vertex: Vertex, earlier: bool, replace: bool) -> None:
    if earlier:
        place = Place(vertex)
        run_changes.submit(place.launcher, place.plan())
        vertex.enter(vertex.newest, "SUCCEEDED")
    places = [Place(vertex) for _ in range(4)]
    plans = [place.plan() for place in places]
    together = threading.Barrier(len(places))

    def launch(number: int) -> str:
        together.wait()
        return answer(
            lambda: run_changes.submit(places[number].launcher, plans[number], replace=replace)
        )

    with ThreadPoolExecutor(len(places)) as pool:
        said = list(pool.map(launch, range(len(places))))
    assert len(vertex.jobs) == 1 + earlier
    assert said.count("vertex://c/tiny") == 1
    for refusal in said:
        assert refusal == "vertex://c/tiny" or "nothing was submitted" in refusal
    assert places[0].launcher._files.stored(LOCK) is None


@pytest.mark.parametrize("command", ["submit", "resume"])
def test_a_launch_during_another_one_is_refused_with_its_process(
    vertex: Vertex, command: str
) -> None:
    place, other = Place(vertex), Place(vertex)
    run_changes.submit(place.launcher, place.plan())
    vertex.enter(vertex.newest, "FAILED")
    said: list[str] = []
    plan = other.plan()
    vertex.on_created = lambda job: said.append(
        answer(lambda: run_changes.submit(other.launcher, plan, replace=True))
    )
    if command == "submit":
        run_changes.submit(place.launcher, place.plan())
    else:
        run_changes.resume(place.launcher, "tiny")
    assert len(vertex.jobs) == 2
    (refusal,) = said
    assert "is being launched by another drillyard" in refusal
    assert f"process {os.getpid()} on {node_name()}" in refusal


def test_a_launch_that_was_made_since_this_one_looked_is_not_replaced(
    vertex: Vertex, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, other = Place(vertex), Place(vertex)
    plan = place.plan()
    monkeypatch.setattr(
        place.launcher,
        "check",
        lambda plan: run_changes.submit(other.launcher, other.plan(), replace=True),
    )
    with pytest.raises(UserError, match=r"being launched by another .*job 4"):
        run_changes.submit(place.launcher, plan, replace=True)
    assert [job.state.name for job in vertex.jobs.values()] == ["JOB_STATE_QUEUED"]


@pytest.mark.parametrize(("client", "refused"), [({"started": 1}, False), ({}, True)])
def test_the_lock_of_a_launch_that_was_killed_keeps_nobody_out(
    vertex: Vertex, client: dict[str, int], refused: bool
) -> None:
    """Of the same number but another start time, the process that runs is a later one."""
    place = Place(vertex)
    owner = json.dumps(this_process().as_json() | client)
    place.launcher._files.create(LOCK, owner.encode())
    said = answer(lambda: run_changes.submit(place.launcher, place.plan()))
    assert ("is being launched" in said) is refused
    assert len(vertex.jobs) == 1 - refused
    if refused:
        place.launcher._files.remove(LOCK)


def test_a_lock_of_another_machine_is_refused_with_the_command_that_ends_it(vertex: Vertex) -> None:
    place = Place(vertex)
    client = {"host": "desk", "machine": "boot/1", "pid": 7, "started": 1}
    place.launcher._files.create(LOCK, json.dumps(client).encode())
    with pytest.raises(UserError, match="process 7 on desk") as refused:
        run_changes.submit(place.launcher, place.plan())
    lock = f"gs://{BUCKET}/.drillyard/c/tiny.submit-lock"
    assert f"gcloud storage rm {lock}" in str(refused.value)
    assert vertex.jobs == {}
    place.launcher._files.remove(LOCK)


# What the service refuses


def details(kind: str, **fields: Any) -> dict[str, Any]:
    return {"@type": f"type.googleapis.com/google.rpc.{kind}", **fields}


DISABLED = details("ErrorInfo", reason="SERVICE_DISABLED", domain="googleapis.com", metadata={})
EXCEEDED = details(
    "QuotaFailure", violations=[{"subject": "project", "description": "custom_model_training"}]
)
FIELD = details(
    "BadRequest", fieldViolations=[{"field": "job_spec.network", "description": "no such network"}]
)


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        (
            Refusal("PERMISSION_DENIED", "Permission denied on resource."),
            "roles/aiplatform.user .*my-project",
        ),
        (
            Refusal("PERMISSION_DENIED", "API disabled.", [DISABLED]),
            "gcloud services enable aiplatform.googleapis.com",
        ),
        (
            Refusal("RESOURCE_EXHAUSTED", "Quota exceeded.", [EXCEEDED]),
            r"custom_model_training_nvidia_h100_mega_gpus: 16 .*us-central1",
        ),
        (
            Refusal("INVALID_ARGUMENT", "List of found errors.", [FIELD]),
            "job_spec.network: no such network",
        ),
        (
            Refusal("NOT_FOUND", "Location not found."),
            r"location.project \(my-project\) .*location.region",
        ),
    ],
)
def test_a_refusal_says_what_to_do(vertex: Vertex, refusal: Refusal, words: str) -> None:
    place = Place(vertex)
    plan = place.plan()
    vertex.create = refusing(refusal)  # type: ignore[method-assign]
    with pytest.raises(UserError, match=words) as caught:
        run_changes.submit(place.launcher, plan)
    assert "create the job" in str(caught.value)
    assert vertex.jobs == {}


def refusing(refusal: Refusal) -> Callable[..., CustomJob]:
    def refuse(*anything: object) -> CustomJob:
        raise refusal

    return refuse


def test_what_the_service_itself_checks_is_reported_by_field(vertex: Vertex) -> None:
    """A request that our rules let pass and the service does not."""
    place = Place(vertex)
    plan = place.plan()
    create = plan.steps[1]
    assert isinstance(create, Call)
    create.body["jobSpec"]["workerPoolSpecs"][0]["replicaCount"] = "2"
    with pytest.raises(UserError, match=r"worker_pool_specs\[0\].replica_count: must be 1"):
        run_changes.submit(place.launcher, plan)


def test_an_unknown_project_is_reported(vertex: Vertex) -> None:
    place = Place(vertex, location="{project: nobodys, region: us-central1}")
    with pytest.raises(UserError, match=r"projects/nobodys.*\n.*location.project \(nobodys\)"):
        run_changes.submit(place.launcher, place.plan())


def test_a_missing_bucket_is_reported_before_a_job_is_made(vertex: Vertex) -> None:
    place = Place(vertex, storage="{bucket: nobodys-bucket}")
    with pytest.raises(
        UserError, match=r"no bucket nobodys-bucket(.|\n)*gcloud storage buckets create"
    ):
        run_changes.submit(place.launcher, place.plan())
    assert vertex.jobs == {}


def test_a_service_that_is_away_for_a_moment_is_asked_again(vertex: Vertex) -> None:
    place = Place(vertex)
    run_changes.submit(place.launcher, place.plan())
    vertex.refuse_next = [Refusal("UNAVAILABLE", "try again"), Refusal("UNAVAILABLE", "try again")]
    assert place.launcher.status("tiny").state is State.queued


def test_a_lost_answer_does_not_make_a_second_job(vertex: Vertex) -> None:
    place = Place(vertex)
    vertex.loses_answer_to_create = True
    run_changes.submit(place.launcher, place.plan())
    assert len(vertex.jobs) == 1


def test_ctrl_c_while_the_job_is_made_ends_with_the_handle(
    vertex: Vertex, capsys: pytest.CaptureFixture[str]
) -> None:
    place = Place(vertex)
    plan = place.plan()
    vertex.on_created = lambda job: os.kill(os.getpid(), signal.SIGINT)
    assert str(run_changes.submit(place.launcher, plan)) == "vertex://c/tiny"
    assert says(
        capsys.readouterr().err,
        "vertex://c/tiny ... already; drillyard runs cancel vertex://c/tiny",
    )
