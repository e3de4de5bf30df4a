"""States of the service and of the run's agents as one status."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from drillyard.launch.run_status import State
from drillyard.launch.vertex.run_status import moment, seconds_of, status_of

CREATED, STARTED = "2026-11-21T10:00:00Z", "2026-11-21T11:00:00.123456789Z"
ID = "4242"


def job(state: str, **more: Any) -> dict[str, Any]:
    scheduling = {"strategy": "FLEX_START", "timeout": "3600s", "maxWaitDuration": "86400s"}
    return {
        "name": f"projects/1/locations/us-central1/customJobs/{ID}",
        "displayName": "nccl",
        "state": f"JOB_STATE_{state}",
        "createTime": CREATED,
        "updateTime": STARTED,
        "jobSpec": {
            "workerPoolSpecs": [{"replicaCount": "1"}, {"replicaCount": "3"}],
            "scheduling": {**scheduling, **more.pop("scheduling", {})},
            "baseOutputDirectory": {"outputUriPrefix": "gs://my-bucket/runs/nccl/"},
        },
        **more,
    }


def unix(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def test_a_queued_job_tells_what_it_waits_for_and_since_when() -> None:
    status = status_of(job("QUEUED"), {}, "c")
    assert str(status.handle) == "vertex://c/nccl"
    assert (status.state, status.nodes, status.since) == (
        State.queued,
        4,
        unix("2026-11-21T10:00:00"),
    )
    assert status.reason == "flex-start capacity, for 24 h at most"
    assert status.run_directory == "/gcs/my-bucket/runs/nccl"
    assert status.native["job"].endswith(ID)


def test_a_wait_without_limit_says_so() -> None:
    assert status_of(job("QUEUED", scheduling={"maxWaitDuration": "0s"}), {}, "c").reason == (
        "flex-start capacity, without limit"
    )


@pytest.mark.parametrize(
    ("native", "error", "state", "reason"),
    [
        (
            "PENDING",
            None,
            State.starting,
            "machines are being prepared, or waited for: flex-start capacity",
        ),
        ("RUNNING", None, State.starting, "the agents have not met yet"),
        ("SUCCEEDED", None, State.succeeded, ""),
        ("EXPIRED", None, State.failed, "no capacity within 24 h"),
        ("CANCELLED", None, State.cancelled, ""),
        ("CANCELLING", None, State.running, "is being cancelled"),
        ("PAUSED", None, State.queued, "paused"),
        (
            "FAILED",
            (9, "The replica workerpool0-0 exited with status 1."),
            State.failed,
            "exited with status 1",
        ),
        (
            "FAILED",
            (8, "Resources are insufficient in region: us-central1."),
            State.failed,
            "lost capacity: Resources",
        ),
        ("FAILED", (14, "Spot VM was preempted."), State.failed, "lost capacity: Spot"),
        ("FAILED", (4, "Job did not finish in time."), State.failed, "time limit: Job"),
        ("FAILED", None, State.failed, "the service gives no reason"),
    ],
)
def test_states_of_the_service(
    native: str, error: tuple[int, str] | None, state: State, reason: str
) -> None:
    message = {"error": {"code": error[0], "message": error[1]}} if error else {}
    status = status_of(job(native, startTime=STARTED, **message), {}, "c")
    assert status.state is state
    assert reason in (status.reason or "")
    assert (status.failure is not None) == (state is State.failed)


def test_no_capacity_before_the_start_is_not_lost_capacity() -> None:
    message = job(
        "FAILED", error={"code": 8, "message": "Resources are insufficient in region: us-central1."}
    )
    status = status_of(message, {}, "c")
    assert status.failure is not None
    assert status.failure.reason == "no capacity"


def test_a_job_that_ended_at_its_limit_is_failed_with_that_word_whatever_the_service_says() -> None:
    message = job(
        "FAILED",
        startTime="2026-11-21T11:00:00Z",
        endTime="2026-11-21T12:00:30Z",
        error={"message": "Ended."},
    )
    status = status_of(message, {}, "c")
    assert status.failure is not None
    assert status.failure.reason == "time limit"
    early = job(
        "FAILED",
        startTime="2026-11-21T11:00:00Z",
        endTime="2026-11-21T11:30:00Z",
        error={"message": "Ended."},
    )
    assert status_of(early, {}, "c").reason == "Ended."


def test_a_running_job_is_what_its_agents_say() -> None:
    message = {
        "submission": ID,
        "state": "restarting",
        "reason": "lost node 2 (w2)",
        "since": 5.0,
        "round": 3,
        "failures": 1,
        "hosts": ["w0", "w1"],
        "run_directory": "/gcs/my-bucket/runs/nccl",
    }
    status = status_of(job("RUNNING", startTime=STARTED), message, "c")
    assert (status.state, status.reason, status.since) == (
        State.restarting,
        "lost node 2 (w2)",
        5.0,
    )
    assert (status.attempt, status.failures, status.hosts) == (3, 1, ("w0", "w1"))


def test_what_an_earlier_submission_left_says_nothing_about_this_one() -> None:
    message = {"submission": "4000", "state": "failed", "failure": {"reason": "old"}, "round": 9}
    status = status_of(job("RUNNING", startTime=STARTED), message, "c")
    assert (status.state, status.attempt, status.failure) == (State.starting, None, None)


def test_the_agents_tell_who_failed() -> None:
    failure = {
        "reason": "rank 9: exit code 1",
        "rank": 9,
        "node": "w1",
        "exit_code": 1,
        "lines": ["boom"],
    }
    message = {"submission": ID, "state": "failed", "failure": failure}
    status = status_of(
        job("FAILED", startTime=STARTED, error={"code": 3, "message": "replica"}), message, "c"
    )
    assert status.failure is not None
    assert (status.failure.rank, status.failure.node, status.failure.exit_code) == (9, "w1", 1)
    assert status.failure.lines == ("boom",)


def test_a_run_that_its_agents_have_ended_still_belongs_to_the_service() -> None:
    message = {"submission": ID, "state": "succeeded", "since": 1.0}
    status = status_of(job("RUNNING", startTime=STARTED), message, "c")
    assert status.state is State.running
    assert "succeeded" in (status.reason or "")


def test_times_and_durations_of_protobuf_s_json() -> None:
    assert moment(STARTED) == pytest.approx(unix("2026-11-21T11:00:00.123456"))
    assert moment(None) is None
    assert (seconds_of("90s"), seconds_of("1.5s"), seconds_of(None)) == (90.0, 1.5, None)
