"""The status of a run on Vertex AI, from the CustomJob and the agents' state.json. Pure.

The service knows whether the job waits, runs or has ended; the agents know the attempt and why a
rank failed. A state.json of an earlier submission is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from drillyard.launch.run_status import (
    Handle,
    RunFailure,
    RunStatus,
    State,
    failure_of,
    reported_status,
)
from drillyard.launch.vertex.config import mounted

CustomJobJson = Mapping[str, Any]

_OVER = {
    "JOB_STATE_SUCCEEDED": State.succeeded,
    "JOB_STATE_FAILED": State.failed,
    "JOB_STATE_EXPIRED": State.failed,
    "JOB_STATE_PARTIALLY_SUCCEEDED": State.failed,
    "JOB_STATE_CANCELLED": State.cancelled,
}
_DEADLINE_EXCEEDED, _RESOURCE_EXHAUSTED = 4, 8
"""google.rpc.Code."""
_NO_CAPACITY = re.compile(
    r"resources are insufficient|stockout|out of (capacity|stock)|no (available )?capacity", re.I
)
_TIME_LIMIT = re.compile(r"timed? ?out|timeout|deadline|maximum (run|running|job)", re.I)
_PREEMPTED = re.compile(r"preempt", re.I)
_SECONDS_OF_DOUBT = 120.0
"""The service ends a job that reached its time limit some time after it."""
_HOUR = 3600.0


def is_over(job: CustomJobJson) -> bool:
    return job.get("state") in _OVER


def job_id(job: CustomJobJson) -> str:
    """The last part of its resource name; containers have it as CLOUD_ML_JOB_ID."""
    return str(job.get("name", "")).rpartition("/")[2]


def is_made_here(job: CustomJobJson, bucket: str) -> bool:
    """Whether a job was made by `drillyard launch` for a run in this bucket. Labels do not say so:
    another user's cluster config of the same name, or a copied job, has them too."""
    run_directory = _run_directory(job)
    if run_directory is None or not run_directory.startswith(f"{mounted(bucket)}/"):
        return False
    pools = job.get("jobSpec", {}).get("workerPoolSpecs", ())
    agent = f"{run_directory}/launch/agent"
    return any(agent in pool.get("containerSpec", {}).get("command", ()) for pool in pools)


def _run_directory(job: CustomJobJson) -> str | None:
    """As containers see it."""
    output = job.get("jobSpec", {}).get("baseOutputDirectory", {}).get("outputUriPrefix")
    return mounted(output) if isinstance(output, str) else None


def status_of(job: CustomJobJson, own: Mapping[str, Any], cluster: str) -> RunStatus:
    """The status of a job. `own` is the run's state.json, empty where it could not be read."""
    own = own if own.get("submission") in ("", None, job_id(job)) else {}
    spec = job.get("jobSpec", {})
    native = {
        "job": job.get("name"),
        "state": job.get("state"),
        "strategy": _scheduling(job).get("strategy"),
        "logs": f'resource.type="ml_job" resource.labels.job_id="{job_id(job)}"',
    }
    state, reason, since = _state(job, own)
    return reported_status(
        Handle("vertex", cluster, str(job.get("displayName", ""))),
        state,
        own,
        nodes=sum(int(pool.get("replicaCount", 1)) for pool in spec.get("workerPoolSpecs", ())),
        reason=reason,
        since=since,
        submitted_at=moment(job.get("createTime")),
        started_at=moment(job.get("startTime")),
        ended_at=moment(job.get("endTime")),
        failure=_failure(job, own, state),
        run_directory=own.get("run_directory") or _run_directory(job),
        native={name: value for name, value in native.items() if value is not None},
    )


def moment(text: object) -> float | None:
    """An RFC 3339 time as Unix seconds; digits beyond the microsecond are cut off."""
    return datetime.fromisoformat(text).timestamp() if isinstance(text, str) else None


def seconds_of(duration: object) -> float | None:
    """A Duration in protobuf's JSON form, such as 86400s, in seconds."""
    return float(duration[:-1]) if isinstance(duration, str) and duration.endswith("s") else None


def _state(job: CustomJobJson, own: Mapping[str, Any]) -> tuple[State, str | None, float | None]:
    native = str(job.get("state", "JOB_STATE_UNSPECIFIED"))
    created, started = moment(job.get("createTime")), moment(job.get("startTime"))
    updated = moment(job.get("updateTime"))
    if native in _OVER:
        return _OVER[native], _end_reason(job, native), moment(job.get("endTime")) or updated
    match native:
        case "JOB_STATE_PENDING":
            waits = _wait_words(job)
            return (
                State.starting,
                f"machines are being prepared{waits and f', or waited for: {waits}'}",
                updated,
            )
        case "JOB_STATE_RUNNING" | "JOB_STATE_UPDATING":
            return _running(own, started)
        case "JOB_STATE_CANCELLING":
            return (State.running if started else State.queued), "is being cancelled", updated
        case "JOB_STATE_PAUSED":
            return State.queued, "paused by the service", updated
        case _:
            return (
                State.queued,
                _wait_words(job) or "the service has not begun with it, or quota is missing",
                created,
            )


def _running(
    own: Mapping[str, Any], started: float | None
) -> tuple[State, str | None, float | None]:
    if not own:
        return State.starting, "all replicas run; the agents have not met yet", started
    name = str(own.get("state", ""))
    state = State(name) if name in ("starting", "running", "restarting") else State.running
    # The agents have recorded the end; the service has not seen it yet.
    reason = own.get("reason") if name == state else f"{name}; the service ends the job"
    return state, reason, own.get("since")


def _wait_words(job: CustomJobJson) -> str:
    scheduling = _scheduling(job)
    if scheduling.get("strategy") != "FLEX_START":
        return ""
    limit = seconds_of(scheduling.get("maxWaitDuration"))
    return "flex-start capacity" + (
        f", for {limit / _HOUR:g} h at most" if limit else ", without limit"
    )


def _end_reason(job: CustomJobJson, native: str) -> str | None:
    error = job.get("error") or {}
    message = str(error.get("message") or "").strip()
    if native == "JOB_STATE_EXPIRED":
        limit = seconds_of(_scheduling(job).get("maxWaitDuration"))
        return (
            "no capacity"
            + (f" within {limit / _HOUR:g} h" if limit else "")
            + (f": {message}" if message else "")
        )
    if native == "JOB_STATE_PARTIALLY_SUCCEEDED":
        return f"only a part of it succeeded: {message}"
    if native in ("JOB_STATE_SUCCEEDED", "JOB_STATE_CANCELLED"):
        return message or None
    code = int(error.get("code") or 0)
    started = job.get("startTime") is not None
    if _NO_CAPACITY.search(message) or code == _RESOURCE_EXHAUSTED:
        return f"{'lost' if started else 'no'} capacity: {message}"
    if _PREEMPTED.search(message):
        return f"lost capacity: {message}"
    if _reached_limit(job) or code == _DEADLINE_EXCEEDED or _TIME_LIMIT.search(message):
        return "time limit" + (f": {message}" if message else "")
    return message or "the service gives no reason"


def _reached_limit(job: CustomJobJson) -> bool:
    limit = seconds_of(_scheduling(job).get("timeout"))
    started, ended = moment(job.get("startTime")), moment(job.get("endTime"))
    return (
        None not in (limit, started, ended)
        and 0 <= (ended or 0) - (started or 0) - (limit or 0) < _SECONDS_OF_DOUBT
    )


def _failure(job: CustomJobJson, own: Mapping[str, Any], state: State) -> RunFailure | None:
    failure = failure_of(own)
    if failure is not None and state is not State.cancelled:
        return failure
    if state is not State.failed:
        return None
    reason = _end_reason(job, str(job.get("state"))) or ""
    return RunFailure(
        reason.partition(":")[0]
        if reason.startswith(("time limit", "no cap", "lost cap"))
        else reason
    )


def _scheduling(job: CustomJobJson) -> Mapping[str, Any]:
    found: Mapping[str, Any] = job.get("jobSpec", {}).get("scheduling", {})
    return found
