"""The status of a run on Slurm, from four sources: the job in the queue, the accounts, state.json
and ended.json.

Slurm has the state of the job and why it waits; the leader's state.json has the run's state and the
rank that failed first. Slurm forgets a job minutes after its end (MinJobAge), and a cluster without
accounts keeps no record of it; then the run's own files show how it ended: state.json, or the job
script's ended.json where the leader was killed. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from drillyard.launch.run_status import (
    Handle,
    RunFailure,
    RunStatus,
    State,
    failure_of,
    reported_status,
)

ENDED = "ended.json"
"""End of the job's newest start, written by the job script where the agents could not write
theirs."""
_WAITING = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
_FAILED = {
    "TIMEOUT": "time limit",
    "DEADLINE": "time limit: the job's deadline",
    "NODE_FAIL": "lost capacity: a node failed, and Slurm did not queue the job again",
    "BOOT_FAIL": "lost capacity: a node did not boot",
    "PREEMPTED": "lost capacity: preempted, and not queued again",
    "OUT_OF_MEMORY": (
        "out of memory: Slurm killed it (slurm.exclusive takes all memory of the nodes)"
    ),
    "REVOKED": "revoked by a sibling cluster",
}
_REASONS = {
    "Priority": "other jobs are before it in the queue",
    "Resources": "waits for nodes to become free",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved",
    "Dependency": "waits for another run to succeed",
    "BeginTime": "may not start before its begin time, which Slurm sets a moment after a requeue",
    "JobHeldUser": "is held: scontrol release {job}",
    "JobHeldAdmin": "is held by an administrator",
    "JobHoldMaxRequeue": (
        "is held, as Slurm started it too often without success: scontrol release {job}"
    ),
    "launch failed requeued held": "is held, as a node could not start it: scontrol release {job}",
    "job requeued in held state": "is held: scontrol release {job}",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is not active",
    "PartitionConfig": "the partition lacks what it asks for; its nodes may be too few, or down",
    "Reservation": "waits for its reservation to begin",
    "Licenses": "waits for a licence",
    "JobArrayTaskLimit": "the sweep's limit of running tasks is reached",
    "Prolog": "nodes are being prepared",
    "NodeDown": "a node that it needs is down",
    "BadConstraints": "can never start: no node has what it asks for",
    "DependencyNeverSatisfied": "can never start: the run that it waits for has not succeeded",
    "PartitionNodeLimit": "can never start: it asks for more nodes than the partition gives",
    "PartitionTimeLimit": "can never start: it asks for more time than the partition gives",
    "InvalidAccount": "can never start: its account is not valid",
    "InvalidQOS": "can never start: its QOS is not valid",
    "AccountNotAllowed": "can never start: its account may not use the partition",
    "QOSNotAllowed": "can never start: its QOS may not use the partition",
}
"""Explanations of why a job waits, by Slurm's reason."""
_REASONS_LOWER = {name.lower(): text for name, text in _REASONS.items()}


@dataclass(frozen=True)
class SlurmJob:
    """A job, or a task of an array."""

    job_id: str
    """`12`, or `12_3` for task 3 of array 12."""
    state: str
    reason: str
    submitted_at: float | None
    started_at: float | None
    ended_at: float | None
    nodes: int
    node_list: str
    partition: str
    script: str = ""
    comment: str = ""
    """The handle of the run, where the job is one of ours."""
    note: str = ""
    """Reason why the job script queued the job again; it appends that to the comment."""
    exit_code: int | None = None

    @property
    def number(self) -> tuple[int, int]:
        """Sort key: later jobs have higher numbers."""
        array, _, task = self.job_id.partition("_")
        return int(array), int(task) if task.isdigit() else -1


@dataclass(frozen=True)
class SlurmRun:
    """The four sources for a run. All but the handle may be missing. `problem`: why the index has
    no state of it."""

    handle: Handle
    entry: Mapping[str, Any]
    """The index's entry: job_id, launch_directory, submitted_at, nodes."""
    job: SlurmJob | None = None
    state: Mapping[str, Any] = field(default_factory=dict)
    ended: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None

    @property
    def job_id(self) -> str:
        """Of the newest submission."""
        return self.job.job_id if self.job is not None else str(self.entry.get("job_id", ""))

    @property
    def job_title(self) -> str:
        return f"job {self.job_id}"

    @property
    def launch_directory(self) -> str:
        return str(self.entry["launch_directory"])

    @property
    def status(self) -> RunStatus:
        state, reason = _state_and_reason(self)
        own, job = self.own_state, self.job
        ends = (own.get("ended_at"), self.own_end.get("at"), job.ended_at if job else None)
        return reported_status(
            self.handle,
            state,
            own,
            nodes=int(own.get("nodes") or self.entry.get("nodes") or (job.nodes if job else 0)),
            reason=reason,
            since=_since(self, state),
            submitted_at=_submitted_at(self),
            started_at=own.get("started_at") or _started_at(job, state),
            ended_at=(
                next((float(at) for at in ends if at is not None), None) if state.over else None
            ),
            failure=_failure(self, reason) if state is State.failed else None,
            run_directory=own.get("run_directory") or self.entry.get("run_directory"),
            native=_native(self),
        )

    @property
    def is_gone(self) -> bool:
        """Whether nothing of the run can be running: a job that Slurm is ending is COMPLETING."""
        return self.job is None or (
            self.status.state.over and self.job.state not in ("RUNNING", "COMPLETING")
        )

    @property
    def needs_accounts(self) -> bool:
        """Whether only Slurm's accounts may show how the run ended."""
        return self.job is None and not is_over(self.own_state) and not self.own_end

    @property
    def own_state(self) -> Mapping[str, Any]:
        """state.json, where it is of this submission."""
        return self.state if self.state.get("submission") == self.job_id else {}

    @property
    def own_end(self) -> Mapping[str, Any]:
        """ended.json, where it is of this submission."""
        return self.ended if self.ended.get("submission") == self.job_id else {}


def is_over(own: Mapping[str, Any]) -> bool:
    """Whether state.json has a final state."""
    return bool(own) and State(own["state"]).over


def queue_reason(job: SlurmJob) -> str:
    """Explanation of why a job waits, with Slurm's own reason."""
    if not job.reason:
        return "waits in the queue"
    name = job.reason.strip("()")
    short = name.partition(",")[0].partition(":")[0].lower()
    if short in _REASONS_LOWER:
        return f"{_REASONS_LOWER[short].format(job=job.job_id)} ({name})"
    if short.startswith(("qos", "max", "assoc")):
        return f"a limit of its account or QOS is reached ({name})"
    return name


def _state_and_reason(run: SlurmRun) -> tuple[State, str | None]:
    job, own = run.job, run.own_state
    if job is None:
        return _forgotten(run)
    if job.state in _WAITING:
        waits = queue_reason(job)
        why = f" ({job.note})" if job.note else ""
        return (
            (State.restarting, f"is queued again{why}: {waits}")
            if own or why
            else (State.queued, waits)
        )
    if job.state == "CONFIGURING":
        return State.starting, "nodes are being made ready"
    if job.state in _RUNNING:
        return _running(job, own, run.problem)
    if job.state == "COMPLETED":
        return State.succeeded, None
    if job.state == "CANCELLED":
        return State.cancelled, own.get("reason") if own.get("state") == "cancelled" else None
    return State.failed, _failed_reason(job, run)


def _running(
    job: SlurmJob, own: Mapping[str, Any], problem: str | None
) -> tuple[State, str | None]:
    if job.state in ("SUSPENDED", "STOPPED"):
        return State.running, f"is {job.state.lower()} by Slurm"
    if not own:
        script = "the job script has begun" if job.state == "RUNNING" else "Slurm ends the job"
        return State.starting, f"{script}; {problem}" if problem else script
    state = State(own["state"])
    if state.over and own.get("exit_code") is None:
        # The index found the leader dead. While the job exists, its script decides.
        return State.restarting, own.get("reason")
    if state is State.failed and own.get("asked"):
        # Slurm stops a start for a lost node or a preemption, and may queue the job again: that is
        # known once the job neither runs nor is COMPLETING.
        return State.restarting, f"Slurm ends this start: {own.get('reason')}"
    ends = "Slurm ends the job" if job.state == "COMPLETING" and not state.over else None
    return state, own.get("reason") or ends


def _forgotten(run: SlurmRun) -> tuple[State, str | None]:
    """A run whose job Slurm has forgotten."""
    own, end = run.own_state, run.own_end
    if own.get("state") == "failed":
        return State.failed, _with_time_limit(run, own.get("reason"))
    if is_over(own):
        return State(own["state"]), own.get("reason")
    if end:
        return State(end["state"]), None if end["state"] == "succeeded" else end.get("reason")
    if not own:
        return (
            State.failed,
            f"lost: Slurm has forgotten the job; {run.problem or 'it never started'}",
        )
    why = f" ({own['reason']})" if own.get("reason") else ""
    return (
        State.failed,
        f"lost: Slurm has forgotten the job, which was last seen {own['state']}{why}",
    )


def _failed_reason(job: SlurmJob, run: SlurmRun) -> str:
    own, end, said = run.own_state, run.own_end, _leader_reason(run)
    if job.state in _FAILED:
        word = _FAILED[job.state]
        kind = word.partition(":")[0]
        return f"{word}; {said.removeprefix(f'{kind}: ')}" if said else word
    if said:
        return str(_with_time_limit(run, said))
    if end:
        return str(end.get("reason"))
    if job.note:
        return job.note
    if job.exit_code:
        return f"exit code {job.exit_code} of the job script"
    if before := own.get("reason") or run.problem:
        return f"the job script failed; before that: {before}"
    return (
        f"the job script failed ({job.reason or job.state}); see slurm-{job.job_id}.log in the"
        " launch directory"
    )


def _leader_reason(run: SlurmRun) -> str | None:
    """Reason why the run failed, in its leader's words; None where it recorded no failure."""
    own = run.own_state
    return str(own["reason"]) if own.get("state") == "failed" and own.get("reason") else None


def _with_time_limit(run: SlurmRun, said: str | None) -> str | None:
    """The leader's reason, after the one that only the job script knows."""
    ended_at_limit = str(run.own_end.get("reason", "")).startswith("time limit")
    return (
        f"time limit; {said}"
        if ended_at_limit and said and not said.startswith("time limit")
        else said
    )


def _failure(run: SlurmRun, reason: str | None) -> RunFailure:
    failure = failure_of(run.own_state)
    if failure is not None and reason == _leader_reason(run):
        return failure
    if failure is not None:
        # Slurm or the job script ended the run, and no rank caused that.
        return replace(failure, reason=reason or failure.reason, rank=None, node=None)
    return RunFailure(
        reason or "unknown",
        exit_code=run.own_end.get("code") or (run.job.exit_code if run.job else None),
    )


def _since(run: SlurmRun, state: State) -> float | None:
    job, own = run.job, run.own_state
    if own and State(own["state"]) is state:
        return None if own.get("since") is None else float(own["since"])
    if job is None or state is State.queued:
        return _submitted_at(run)
    return job.ended_at if state.over else job.started_at


def _started_at(job: SlurmJob | None, state: State) -> float | None:
    """By Slurm, which has a start also of a job that waits, or was cancelled while it waited."""
    if job is None or state is State.queued or not job.node_list:
        return None
    return job.started_at


def _submitted_at(run: SlurmRun) -> float | None:
    """By the controller's clock or the submitter's, whichever is earlier: a requeue moves the
    controller's."""
    # A job that was submitted by hand is not the one of the index.
    noted = run.entry if run.job is None or run.entry.get("job_id") == run.job.job_id else {}
    times = (noted.get("submitted_at"), run.job.submitted_at if run.job else None)
    return min((float(at) for at in times if at), default=None)


def _native(run: SlurmRun) -> dict[str, Any]:
    native: dict[str, Any] = {"job_id": run.job_id}
    if (job := run.job) is not None:
        native |= {"state": job.state, "partition": job.partition}
        native |= {
            name: value
            for name, value in (("reason", job.reason), ("nodes", job.node_list))
            if value
        }
        if job.state == "PENDING" and job.started_at:
            native["expected_start"] = job.started_at
    return native
