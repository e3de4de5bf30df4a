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


@pytest.mark.parametrize("reason", ["ErrImagePull", "ImagePullBackOff", "CrashLoopBackOff"])
def test_a_daemon_that_does_not_start_is_named(reason: str) -> None:
    stuck = pod(0, {"waiting": {"reason": "PodInitializing"}})
    waiting = {"waiting": {"reason": reason, "message": "no d:1"}}
    stuck["status"]["initContainerStatuses"] = [{"name": "tcpxo-daemon", "state": waiting}]
    assert (
        status(jobset(), [stuck]).reason
        == f"pod r-w-0-0-abcde on n0, tcpxo-daemon: {reason}: no d:1"
    )


def blocked(job: str, uid: str, said: str) -> dict[str, Any]:
    """The event of a Job that could not make a pod."""
    return {
        "reason": "FailedCreate",
        "message": said,
        "lastTimestamp": "2026-01-01T00:12:00Z",
        "involvedObject": {"kind": "Job", "name": job, "uid": uid},
    }


def test_a_quota_that_blocks_the_second_pod_is_named() -> None:
    first = pod(0, RUNNING)
    first["metadata"]["ownerReferences"] = [{"uid": "job-1"}]
    now = blocked("r-w-0", "job-1", "exceeded quota: q")
    assert status(jobset(), [first], events=[now]).reason == "FailedCreate: exceeded quota: q"
    assert status(jobset(), events=[now]).reason == "FailedCreate: exceeded quota: q"


@pytest.mark.parametrize(
    "event", [blocked("r-w-0", "job-0", "earlier"), blocked("r-x-w-0", "job-1", "another")]
)
def test_an_event_of_an_earlier_attempt_or_another_run_is_no_reason(event: Any) -> None:
    first = pod(0, RUNNING)
    first["metadata"]["ownerReferences"] = [{"uid": "job-1"}]
    assert status(jobset(), [first], events=[event]).reason == "1 of 2 pods run"


def queued(**labels: str) -> dict[str, Any]:
    """A suspended JobSet with labels of Kueue."""
    found = jobset(suspend=True)
    named = {f"kueue.x-k8s.io/{name.replace('_', '-')}": value for name, value in labels.items()}
    found["metadata"] |= {"name": "r", "namespace": "team", "labels": named}
    return found


def test_a_run_that_is_in_no_queue_was_suspended_by_hand() -> None:
    reason = str(status(queued()).reason)
    assert "Kueue" not in reason
    assert 'kubectl -n team patch jobset r --type merge -p \'{"spec":{"suspend":false}}\'' in reason


def test_a_run_that_kueue_does_not_look_at_names_its_priority_class() -> None:
    assert "WorkloadPriorityClass high" in str(
        status(queued(queue_name="q", priority_class="high")).reason
    )
    assert "WorkloadPriorityClass" not in str(status(queued(queue_name="q")).reason)


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


@pytest.mark.parametrize(
    ("tail", "lines"),
    [
        ("a\nTraceback\nValueError: x\n", ("a", "Traceback", "ValueError: x")),
        ('{"exit_code": "two", "reason": 3}', ('{"exit_code": "two", "reason": 3}',)),
        ('{"exit_code": 1, "reason": "r", "lines": 7}',) * 2,
        ("[1]", ("[1]",)),
    ],
)
def test_the_end_of_a_programs_log_is_the_cause_where_it_wrote_no_record(
    tail: str, lines: Any
) -> None:
    lines = (lines,) if isinstance(lines, str) else lines
    gone = pod(0, {"terminated": {"exitCode": 2, "finishedAt": "", "message": tail}})
    found = first_cause([gone])
    assert found is not None
    assert (found.exit_code, found.reason, found.lines) == (2, "exit code 2", lines)


def test_counts_come_from_jobset() -> None:
    found = status(
        jobset(("Completed", "AllJobsCompleted", ""), restarts=3, restartsCountTowardsMax=1)
    )
    assert (found.state, found.attempt, found.failures) == (State.succeeded, 3, 1)


def test_a_run_of_which_only_helms_record_is_left_was_cancelled() -> None:
    record = {"metadata": {"labels": {"modifiedAt": "1767225600", "status": "uninstalled"}}}
    found = status_of("c", "kubernetes", RunObjects("r", record=record))
    assert (found.state, found.ended_at) == (State.cancelled, 1767225600.0)


@pytest.mark.parametrize(
    ("helm", "state"),
    [("pending-install", State.starting), ("uninstalled", State.cancelled)],
)
def test_a_release_that_is_being_installed_is_not_over(helm: str, state: State) -> None:
    """Its record is there before its objects are."""
    record = {"metadata": {"labels": {"status": helm, "modifiedAt": "1767225600"}}}
    assert status_of("c", "kubernetes", RunObjects("r", record=record)).state is state
