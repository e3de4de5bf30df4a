"""The status of a run on Kubernetes, from the objects of the API server. Pure.

JobSet reports end and restarts, Kueue's Workload the queue, and pods, with their events, why a run
does not start. Why an attempt failed is in the termination messages of its pods, which `supervise`
writes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from drillyard.launch.run_status import Handle, RunFailure, RunStatus, State

Object = Mapping[str, Any]

RUN_DIRECTORY, LAUNCHED_FROM = "drillyard/run-directory", "drillyard/launched-from"
_DEACTIVATED = {
    "DeactivatedDueToMaximumExecutionTimeExceeded": "time limit",
    "DeactivatedDueToAdmissionCheck": "capacity revoked",
}
_WAITS = (
    "ImagePullBackOff",
    "ErrImagePull",
    "ErrImageNeverPull",
    "InvalidImageName",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
    "CrashLoopBackOff",
)
_MOUNT_EVENTS = (
    "FailedMount",
    "FailedAttachVolume",
    "FailedCreate",
    "FailedCreatePodSandBox",
    "FailedScheduling",
)
_JOB_TIME_LIMIT = "DeadlineExceeded"
_QUEUE, _PRIORITY = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"


@dataclass(frozen=True)
class RunObjects:
    """The objects of one run. `controller`: its JobSet or Job; None: only Helm's record is left."""

    name: str
    controller: Object | None = None
    workload: Object | None = None
    pods: Sequence[Object] = ()
    events: Sequence[Object] = ()
    record: Object | None = None
    """Metadata of the Secret in which Helm keeps the release."""
    ahead: int | None = None
    """Workloads before it in its queue, where it waits."""
    nodes: int = 0
    run_directory: str | None = None
    """Of a run without a controller, as Helm's record has it."""


def status_of(cluster: str, platform: str, objects: RunObjects) -> RunStatus:
    """The status of a run."""
    handle = Handle(platform, cluster, objects.name)
    controller = objects.controller
    if controller is None:
        record = _labels(objects.record or {})
        updated = _moment(record.get("modifiedAt"))
        is_pending = record.get("status") == "pending-install"
        return RunStatus(
            handle,
            State.starting if is_pending else State.cancelled,
            objects.nodes,
            reason="helm install has not ended" if is_pending else None,
            since=updated,
            ended_at=None if is_pending else updated,
            run_directory=objects.run_directory,
        )
    status = controller.get("status", {})
    state, reason, since = _state(objects)
    failure = first_cause(objects.pods) if state in (State.failed, State.restarting) else None
    if state is State.failed and failure is None:
        failure = RunFailure((reason or "unknown").partition(":")[0])
    pods = sorted(objects.pods, key=_index)
    native = {
        "kind": controller.get("kind"),
        "uid": controller["metadata"].get("uid"),
        "restarts": status.get("restarts"),
        "restartsCountTowardsMax": status.get("restartsCountTowardsMax"),
    }
    return RunStatus(
        handle,
        state,
        nodes=_nodes(controller),
        reason=failure.reason if failure and state is State.failed and not reason else reason,
        since=since,
        submitted_at=_moment(controller["metadata"].get("creationTimestamp")),
        started_at=min(
            filter(None, (_moment(pod.get("status", {}).get("startTime")) for pod in pods)),
            default=None,
        ),
        ended_at=since if state.over else None,
        attempt=int(status.get("restarts") or 0),
        failures=int(status.get("restartsCountTowardsMax") or 0),
        failure=failure,
        run_directory=controller["metadata"].get("annotations", {}).get(RUN_DIRECTORY),
        hosts=tuple(
            str(pod["spec"]["nodeName"]) for pod in pods if pod.get("spec", {}).get("nodeName")
        ),
        native={name: value for name, value in native.items() if value is not None},
    )


def first_cause(pods: Iterable[Object]) -> RunFailure | None:
    """The failure of an attempt: of the pod that failed first and does not report the loss of
    another one."""
    found = []
    for pod in pods:
        ended = _terminated(pod)
        if ended is None or int(ended.get("exitCode", 0)) in (0, 85):
            continue
        record = _exit_record(ended.get("message"))
        order = (bool(record.get("lost_peer")), str(ended.get("finishedAt") or ""), _index(pod))
        found.append((order, pod, ended, record))
    if not found:
        return None
    _, pod, ended, record = min(found, key=lambda each: each[0])
    code = int(record.get("exit_code") or ended.get("exitCode") or 1)
    killed = (
        f"{ended.get('reason')} (exit code {code})"
        if ended.get("reason") == "OOMKilled"
        else f"exit code {code}"
    )
    lines = record.get("lines") or (
        str(ended.get("message") or "").splitlines()[-8:] if not record else ()
    )
    return RunFailure(
        reason=str(record.get("reason") or killed),
        rank=record.get("rank"),
        node=pod.get("spec", {}).get("nodeName"),
        exit_code=code,
        lines=tuple(map(str, lines)),
    )


def waiting_reason(
    pods: Sequence[Object], events: Sequence[Object], jobs: Collection[str] = (), nodes: int = 0
) -> str | None:
    """Why pods do not start, with the pod and its node; None where nothing is known. `jobs`: names
    of the Jobs that make the pods, one for each of `nodes`."""
    for pod in sorted(pods, key=_index):
        name, node = pod["metadata"]["name"], pod.get("spec", {}).get("nodeName")
        where = f"pod {name}" + (f" on {node}" if node else "")
        status = pod.get("status", {})
        # Daemons beside the ranks are init containers: while one does not start, no rank does.
        for kind in ("initContainerStatuses", "containerStatuses"):
            for each in status.get(kind, ()):
                waiting = each.get("state", {}).get("waiting") or {}
                if waiting.get("reason") in _WAITS:
                    container = "" if each.get("name") == "train" else f", {each.get('name')}"
                    said = waiting.get("message") or each.get("image")
                    return f"{where}{container}: {waiting['reason']}: {said}"
        for condition in pod.get("status", {}).get("conditions", ()):
            if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
                return f"{where}: {condition.get('reason')}: {condition.get('message')}"
        of_pod = [event for event in events if event.get("involvedObject", {}).get("name") == name]
        if (event := _newest(of_pod)) is not None and not _is_running(pod):
            return f"{where}: {event.get('reason')}: {event.get('message')}"
    if len(pods) >= nodes:
        return None
    # An event outlives its Job: of an attempt that has pods, only its own are looked at.
    owners = {
        owner.get("uid") for pod in pods for owner in pod["metadata"].get("ownerReferences", ())
    }
    failed = [
        event
        for event in events
        if event.get("reason") == "FailedCreate"
        and event.get("involvedObject", {}).get("name") in jobs
        and (not owners or event["involvedObject"].get("uid") in owners)
    ]
    event = _newest(failed)
    return None if event is None else f"FailedCreate: {event.get('message')}"


def lost_nodes(pods: Iterable[Object]) -> list[str]:
    """Nodes whose kubelet does not answer.

    Then the control plane sets the pod's Ready condition to False, without a reason; a kubelet
    always gives one (kubernetes, pkg/controller/util/node: MarkPodsNotReady). Pods have no
    readiness probe of their own.
    """
    found = set()
    for pod in pods:
        ready = _condition(pod, "Ready") or {}
        if _started(pod) is not None and ready.get("status") == "False" and not ready.get("reason"):
            found.add(str(pod.get("spec", {}).get("nodeName")))
    return sorted(found)


def queue_reason(controller: Object, workload: Object | None, ahead: int | None) -> str:
    """Why a suspended run waits: its place in the queue, quota, admission checks; or that no queue
    has suspended it."""
    labels = _labels(controller)
    if _QUEUE not in labels and workload is None:
        place, kind = controller["metadata"], str(controller.get("kind")).lower()
        command = f"kubectl -n {place.get('namespace')} patch {kind} {place.get('name')}"
        return (
            "suspended by hand: it is in no queue, and its spec.suspend is true. It goes on with:"
            f' {command} --type merge -p \'{{"spec":{{"suspend":false}}}}\''
        )
    if workload is None:
        priority = labels.get(_PRIORITY)
        missing = (
            f" If that lasts, there is no WorkloadPriorityClass {priority}: kubectl get"
            " workloadpriorityclasses"
        )
        return "waits for Kueue, which has made no Workload for it." + (missing if priority else "")
    parts = []
    reserved = _condition(workload, "QuotaReserved")
    if reserved is not None and reserved.get("status") == "True":
        checks = workload.get("status", {}).get("admissionChecks", ())
        for check in checks:
            if check.get("state") != "Ready":
                said = f": {check['message']}" if check.get("message") else ""
                parts.append(
                    f"quota is reserved; admission check {check.get('name')} is"
                    f" {check.get('state')}{said}"
                )
        return "; ".join(parts) or "quota is reserved; being admitted"
    if ahead is not None:
        parts.append(f"{ahead} ahead in queue {workload.get('spec', {}).get('queueName')}")
    if reserved is not None and reserved.get("message"):
        parts.append(str(reserved["message"]))
    return "; ".join(parts) or "waits for quota"


def _state(objects: RunObjects) -> tuple[State, str | None, float | None]:
    controller, workload = objects.controller, objects.workload
    assert controller is not None
    for kind, state in (
        ("Completed", State.succeeded),
        ("Complete", State.succeeded),
        ("Failed", State.failed),
    ):
        if (ended := _condition(controller, kind)) is not None and ended.get("status") == "True":
            reason = None if state is State.succeeded else _end_reason(ended, objects.pods)
            return state, reason, _moment(ended.get("lastTransitionTime"))
    created = _moment(controller["metadata"].get("creationTimestamp"))
    suspended = bool(controller.get("spec", {}).get("suspend"))
    if suspended and workload is not None and workload.get("spec", {}).get("active") is False:
        evicted = _condition(workload, "Evicted") or {}
        reason = _DEACTIVATED.get(str(evicted.get("reason")), "deactivated")
        said = f"{reason}: {evicted['message']}" if evicted.get("message") else reason
        return State.failed, said, _moment(evicted.get("lastTransitionTime"))
    if suspended:
        return State.queued, queue_reason(controller, workload, objects.ahead), created
    restarts = int(controller.get("status", {}).get("restarts") or 0)
    nodes = _nodes(controller)
    if lost := lost_nodes(objects.pods):
        return State.restarting, _lost_words(lost), None
    running = [pod for pod in objects.pods if _is_running(pod)]
    if len(running) == nodes:
        begun = max(filter(None, (_moment(_started(pod)) for pod in running)), default=None)
        return State.running, None, begun
    state = State.restarting if restarts else State.starting
    jobs = (objects.name, f"{objects.name}-w-0")
    why = (
        waiting_reason(objects.pods, objects.events, jobs, nodes)
        or f"{len(running)} of {nodes} pods run"
    )
    return state, why, created if state is State.starting else None


def _lost_words(nodes: Sequence[str]) -> str:
    taint = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
    return (
        f"lost node {', '.join(nodes)}: its pods cannot end. Once it is switched off: "
        f"kubectl taint nodes {' '.join(nodes)} {taint}"
    )


def _end_reason(ended: Object, pods: Sequence[Object]) -> str | None:
    reason, message = str(ended.get("reason") or ""), str(ended.get("message") or "")
    if reason == _JOB_TIME_LIMIT:
        return f"time limit: {message}"
    if reason == "PodFailurePolicy" and (
        "exit code 85 matching" in message or "DisruptionTarget" in message
    ):
        return (
            "stopped from outside, and a Job is not restarted: drillyard runs resume goes on from"
            " what it saved"
        )
    cause = first_cause(pods)
    if cause is not None and cause.exit_code == 2:
        return "refused: the same start would fail again"
    words = {
        "ReachedMaxRestarts": "all restarts are used",
        "FailJobSetFailurePolicyAction": "not started again",
    }
    said = words.get(reason, f"{reason}: {message}" if message else reason)
    return f"{cause.reason}; {said}" if cause is not None else said


def _nodes(controller: Object) -> int:
    spec = controller.get("spec", {})
    if "replicatedJobs" in spec:
        return sum(
            int(job["template"]["spec"].get("parallelism") or 1) for job in spec["replicatedJobs"]
        )
    return int(spec.get("parallelism") or 1)


def _condition(found: Object, kind: str) -> Object | None:
    conditions: Iterator[Object] = iter(found.get("status", {}).get("conditions", ()))
    return next((each for each in conditions if each.get("type") == kind), None)


def _terminated(pod: Object) -> Object | None:
    for each in pod.get("status", {}).get("containerStatuses", ()):
        if each.get("name") == "train":
            ended: Object | None = each.get("state", {}).get("terminated")
            return ended
    return None


def _started(pod: Object) -> Any:
    for each in pod.get("status", {}).get("containerStatuses", ()):
        if each.get("name") == "train":
            return (each.get("state", {}).get("running") or {}).get("startedAt")
    return None


def _is_running(pod: Object) -> bool:
    return _started(pod) is not None and not pod["metadata"].get("deletionTimestamp")


def _newest(events: Sequence[Object]) -> Object | None:
    reported = [event for event in events if event.get("reason") in _MOUNT_EVENTS]
    return max(
        reported,
        key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""),
        default=None,
    )


def _index(pod: Object) -> int:
    text = (
        pod["metadata"].get("annotations", {}).get("batch.kubernetes.io/job-completion-index", "0")
    )
    return int(text) if str(text).isdigit() else 0


def _labels(found: Object) -> Mapping[str, str]:
    labels: Mapping[str, str] = found.get("metadata", {}).get("labels", {})
    return labels


def _exit_record(text: object) -> Mapping[str, Any]:
    """The record that the supervisor wrote; empty for other text, such as the end of the log, which
    Kubernetes takes where a program wrote none."""
    try:
        found = json.loads(str(text or ""))
    except (ValueError, RecursionError):
        return {}
    is_record = (
        isinstance(found, dict)
        and type(found.get("exit_code")) is int
        and isinstance(found.get("reason"), str)
        and isinstance(found.get("lines", []), list)
        and isinstance(found.get("rank"), int | None)
    )
    return found if is_record else {}


def _moment(text: object) -> float | None:
    """Unix seconds of an RFC 3339 time, or of the digits with which Helm's labels write one."""
    if isinstance(text, str) and text.isdigit():
        return float(text)
    return datetime.fromisoformat(text).timestamp() if isinstance(text, str) and text else None
