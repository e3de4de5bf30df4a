"""The status of a run from objects of the API server, in the shapes that JobSet 0.10 and Kueue 0.14
give them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from drillyard.launch.kubernetes.run_status import RunObjects, first_cause, status_of
from drillyard.launch.run_status import RunStatus, State


def jobset(
    *conditions: tuple[str, str, str], suspend: bool = False, **status: Any
) -> dict[str, Any]:
    kinds = [
        {
            "type": kind,
            "status": "True",
            "reason": reason,
            "message": said,
            "lastTransitionTime": "2026-01-01T01:00:00Z",
        }
        for kind, reason, said in conditions
    ]
    return {
        "kind": "JobSet",
        "metadata": {"uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z", "annotations": {}},
        "spec": {
            "suspend": suspend,
            "replicatedJobs": [{"template": {"spec": {"parallelism": 2}}}],
        },
        "status": {"conditions": kinds, **status},
    }


def pod(index: int, state: dict[str, Any], ready: dict[str, Any] | None = None) -> dict[str, Any]:
    conditions = [] if ready is None else [{"type": "Ready", **ready}]
    return {
        "metadata": {
            "name": f"r-w-0-{index}-abcde",
            "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
        },
        "spec": {"nodeName": f"n{index}"},
        "status": {
            "startTime": "2026-01-01T00:10:00Z",
            "conditions": conditions,
            "containerStatuses": [{"name": "train", "image": "i:1", "state": state}],
        },
    }


RUNNING = {"running": {"startedAt": "2026-01-01T00:11:00Z"}}


def workload(
    active: bool = True,
    checks: list[dict[str, str]] | None = None,
    **conditions: tuple[str, str, str],
) -> Any:
    kinds = [
        {
            "type": kind,
            "status": status,
            "reason": reason,
            "message": said,
            "lastTransitionTime": "2026-01-01T02:00:00Z",
        }
        for kind, (status, reason, said) in conditions.items()
    ]
    status = {"conditions": kinds, "admissionChecks": checks or []}
    return {"metadata": {}, "spec": {"active": active, "queueName": "q"}, "status": status}


def status(
    controller: Any, pods: Any = (), found: Any = None, events: Any = (), ahead: int | None = None
) -> RunStatus:
    return status_of(
        "c", "kubernetes", RunObjects("r", controller, found, pods, events, None, ahead)
    )


def ended(code: int, at: str, **record: Any) -> dict[str, Any]:
    message = json.dumps(record) if record else ""
    return {
        "terminated": {"exitCode": code, "finishedAt": f"2026-01-01T00:{at}Z", "message": message}
    }


def test_a_suspended_run_waits_with_its_place_and_kueues_reason() -> None:
    waits = workload(
        QuotaReserved=("False", "Pending", "insufficient quota for nvidia.com/gpu in flavor a4")
    )
    found = status(jobset(suspend=True), found=waits, ahead=3)
    assert found.state is State.queued
    assert found.reason is not None
    assert "3 ahead in queue q" in found.reason
    assert "insufficient quota" in found.reason


def test_an_admission_check_that_waits_is_named() -> None:
    check = [{"name": "dws", "state": "Pending", "message": "provisioning"}]
    found = status(
        jobset(suspend=True),
        found=workload(QuotaReserved=("True", "QuotaReserved", ""), checks=check),
    )
    assert found.reason == "quota is reserved; admission check dws is Pending: provisioning"


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        ("DeactivatedDueToMaximumExecutionTimeExceeded", "time limit"),
        ("DeactivatedDueToAdmissionCheck", "capacity revoked"),
    ],
)
def test_a_deactivated_workload_is_a_failed_run(reason: str, word: str) -> None:
    inactive = workload(active=False, Evicted=("True", reason, "said"))
    found = status(jobset(suspend=True), found=inactive)
    assert (found.state, found.failure and found.failure.reason) == (State.failed, word)
    assert found.ended_at == 1767232800.0


def test_a_run_is_running_when_all_its_pods_are() -> None:
    both = [pod(0, RUNNING), pod(1, RUNNING)]
    found = status(jobset(), both)
    assert (found.state, found.nodes, found.hosts) == (State.running, 2, ("n0", "n1"))
    assert status(jobset(), both[:1]).state is State.starting
    assert status(jobset(restarts=1), both[:1]).state is State.restarting


def test_a_pod_that_cannot_pull_its_image_is_named_with_its_node() -> None:
    stuck = pod(1, {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling i:1"}})
    assert (
        status(jobset(), [pod(0, RUNNING), stuck]).reason
        == "pod r-w-0-1-abcde on n1: ImagePullBackOff: Back-off pulling i:1"
    )


def test_a_volume_that_cannot_be_mounted_is_named() -> None:
    stuck = pod(0, {"waiting": {"reason": "ContainerCreating"}})
    event = {
        "reason": "FailedMount",
        "message": "MountVolume.SetUp failed",
        "lastTimestamp": "2026-01-01T00:12:00Z",
        "involvedObject": {"name": "r-w-0-0-abcde"},
    }
    found = status(jobset(), [stuck], events=[event])
    assert found.reason == "pod r-w-0-0-abcde on n0: FailedMount: MountVolume.SetUp failed"


def test_a_lost_node_is_named_with_the_command_that_frees_it() -> None:
    lost = pod(1, RUNNING, {"status": "False"})
    stops = pod(0, RUNNING, {"status": "False", "reason": "ContainersNotReady"})
    found = status(jobset(), [stops, lost])
    assert found.reason is not None
    assert "kubectl taint nodes n1 node.kubernetes.io/out-of-service" in found.reason
    assert "n0" not in found.reason


def test_the_first_cause_is_the_first_failure_that_is_no_lost_peer() -> None:
    early = pod(0, ended(1, "20:00", rank=0, exit_code=1, reason="lost a peer", lost_peer=True))
    cause = pod(
        1, ended(137, "20:05", rank=9, exit_code=137, reason="killed by SIGKILL", lines=["a"])
    )
    saved = pod(2, ended(85, "19:00"))
    found = first_cause([early, cause, saved])
    assert found is not None
    assert (found.rank, found.node, found.exit_code, found.lines) == (9, "n1", 137, ("a",))


def test_a_job_that_was_stopped_after_a_save_says_how_it_goes_on() -> None:
    message = (
        "Container train for pod t/r-0-abcde failed with exit code 85 matching FailJob rule at"
        " index 1"
    )
    failed = {
        **jobset(("Failed", "PodFailurePolicy", message)),
        "kind": "Job",
        "spec": {"parallelism": 2},
    }
    found = status(failed, [pod(0, ended(85, "20:00"))])
    assert found.state is State.failed
    assert found.reason is not None and "drillyard runs resume" in found.reason


def test_a_refused_run_has_exit_code_2() -> None:
    failed = jobset(
        ("Failed", "FailJobSetFailurePolicyAction", "matched failure policy rule applicationError")
    )
    found = status(
        failed, [pod(0, ended(2, "20:00", rank=None, exit_code=2, reason="no such model"))]
    )
    assert found.state is State.failed
    assert found.failure is not None
    assert found.failure.exit_code == 2


def test_counts_come_from_jobset() -> None:
    found = status(
        jobset(("Completed", "AllJobsCompleted", ""), restarts=3, restartsCountTowardsMax=1)
    )
    assert (found.state, found.attempt, found.failures) == (State.succeeded, 3, 1)


def test_a_run_of_which_only_helms_record_is_left_was_cancelled() -> None:
    record = {"metadata": {"labels": {"modifiedAt": "1767225600", "status": "uninstalled"}}}
    found = status_of("c", "kubernetes", RunObjects("r", record=record))
    assert (found.state, found.ended_at) == (State.cancelled, 1767225600.0)
