"""What a run on Slurm is doing, from four witnesses: the job in the queue, the accounts, state.json and ended.json.

Slurm knows whether a job waits, runs or is over, and why it waits; the leader's state.json knows what the run does
meanwhile and which rank failed first. Slurm forgets a job minutes after its end (MinJobAge), and clusters without
accounts remember it nowhere; then the run's own files tell how it ended: state.json, or ended.json of the job script
where the leader was killed. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from drillyard.launch.handles import Handle
from drillyard.launch.run_status import RunFailure, RunStatus, State, failure_of
from drillyard.launch.slurm.commands import SlurmJob

_WAITING = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
_FAILED = {
    "TIMEOUT": "time limit",
    "DEADLINE": "time limit: the job's deadline",
    "NODE_FAIL": "lost capacity: a node failed, and Slurm did not queue the job again",
    "BOOT_FAIL": "lost capacity: a node did not boot",
    "PREEMPTED": "lost capacity: preempted, and not queued again",
    "OUT_OF_MEMORY": "out of memory: Slurm killed it (slurm.exclusive takes all memory of the nodes)",
    "REVOKED": "revoked by a sibling cluster",
}
_REASONS = {
    "Priority": "others are before it in the queue",
    "Resources": "waits for nodes to become free",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved",
    "Dependency": "waits for another run to succeed",
    "BeginTime": "may not start before its begin time, which Slurm sets a moment after a requeue",
    "JobHeldUser": "is held: scontrol release {job}",
    "JobHeldAdmin": "is held by an administrator",
    "JobHoldMaxRequeue": "is held, as Slurm started it too often in vain: scontrol release {job}",
    "launch failed requeued held": "is held, as a node could not launch it: scontrol release {job}",
    "job requeued in held state": "is held: scontrol release {job}",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is not active",
    "PartitionConfig": "the partition has not what it asks for; its nodes may be too few, or down",
    "Reservation": "waits for its reservation to begin",
    "Licenses": "waits for a licence",
    "JobArrayTaskLimit": "as many tasks of the sweep run as may at a time",
    "Prolog": "nodes are being prepared",
    "NodeDown": "a node that it needs is down",
}
_NEVER = {
    "BadConstraints": "no node has what it asks for",
    "DependencyNeverSatisfied": "the run that it waits for has not succeeded",
    "PartitionNodeLimit": "it asks for more nodes than the partition gives",
    "PartitionTimeLimit": "it asks for more time than the partition gives",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its QOS is not valid",
    "AccountNotAllowed": "its account may not use the partition",
    "QOSNotAllowed": "its QOS may not use the partition",
}


@dataclass(frozen=True)
class SlurmRun:
    """What is known of a run. All but the handle may be missing."""

    handle: Handle
    entry: Mapping[str, Any]
    """The index's entry: job_id, launch_directory, submitted_at, nodes."""
    job: SlurmJob | None = None
    state: Mapping[str, Any] | None = None
    ended: Mapping[str, Any] | None = None

    @property
    def job_id(self) -> str:
        """Of the newest submission."""
        return self.job.job_id if self.job is not None else str(self.entry.get("job_id", ""))

    @property
    def own_state(self) -> Mapping[str, Any]:
        """state.json, where it is of this submission."""
        return self.state if self.state and self.state.get("submission") == self.job_id else {}

    @property
    def own_end(self) -> Mapping[str, Any]:
        """ended.json, where it is of this submission."""
        return self.ended if self.ended and self.ended.get("submission") == self.job_id else {}


def status_of(known: SlurmRun) -> RunStatus:
    """How the run is."""
    state, reason = _state_and_reason(known)
    own, job = known.own_state, known.job
    over = state.over
    return RunStatus(
        handle=known.handle,
        state=state,
        nodes=int(own.get("nodes") or known.entry.get("nodes") or (job.nodes if job else 0)),
        reason=reason,
        since=_since(known, state),
        submitted_at=_submitted_at(known),
        started_at=own.get("started_at") or (job.started_at if job and state is not State.queued else None),
        ended_at=_ended_at(known) if over else None,
        round=own.get("round"),
        failures=int(own.get("failures") or 0),
        failure=_failure(known, reason) if state is State.failed else None,
        run_directory=own.get("run_directory") or known.entry.get("run_directory"),
        hosts=tuple(own.get("hosts") or ()),
        native=_native(known),
    )


def is_over(own: Mapping[str, Any]) -> bool:
    """Whether state.json says that nothing more will happen."""
    return bool(own) and State(own["state"]).over


def needs_accounts(known: SlurmRun) -> bool:
    """Whether only Slurm's accounts could tell how the run ended."""
    return known.job is None and not is_over(known.own_state) and not known.own_end


def queue_reason(job: SlurmJob) -> str:
    """Why a job waits, in words, with Slurm's own."""
    if not job.reason:
        return "waits in the queue"
    name = job.reason.strip("()")
    short = name.partition(",")[0].partition(":")[0]
    for known, text in _NEVER.items():
        if short == known:
            return f"can never start: {text} ({name})"
    for known, text in _REASONS.items():
        if short.lower() == known.lower():
            return f"{text.format(job=job.job_id)} ({name})"
    if short.startswith(("QOS", "Max", "Assoc")):
        return f"a limit of its account or QOS is reached ({name})"
    return name


def _state_and_reason(known: SlurmRun) -> tuple[State, str | None]:
    job, own = known.job, known.own_state
    if job is None:
        return _forgotten(known)
    if job.state in _WAITING:
        waits = queue_reason(job)
        why = f" ({job.note})" if job.note else ""
        return (State.restarting, f"is queued again{why}: {waits}") if own or why else (State.queued, waits)
    if job.state == "CONFIGURING":
        return State.starting, "nodes are being made ready"
    if job.state in _RUNNING:
        return _running(job, own)
    if job.state == "COMPLETED":
        return State.succeeded, None
    if job.state == "CANCELLED":
        return State.cancelled, own.get("reason") if own.get("state") == "cancelled" else None
    return State.failed, _failed_reason(job, known)


def _running(job: SlurmJob, own: Mapping[str, Any]) -> tuple[State, str | None]:
    if job.state in ("SUSPENDED", "STOPPED"):
        return State.running, f"is {job.state.lower()} by Slurm"
    if not own:
        return State.starting, "the job script has begun" if job.state == "RUNNING" else "Slurm ends the job"
    state = State(own["state"])
    if state.over and own.get("exit_code") is None:
        # Judged so by who read it: its leader is gone. While the job lives, its script has the last word.
        return State.restarting, "the agent of node 0 is gone"
    if job.state == "COMPLETING" and not state.over:
        return state, own.get("reason") or "Slurm ends the job"
    return state, own.get("reason")


def _forgotten(known: SlurmRun) -> tuple[State, str | None]:
    """A job that Slurm does not know any more."""
    own, end = known.own_state, known.own_end
    if own.get("state") == "failed":
        return State.failed, _with_time_limit(known, own.get("reason"))
    if is_over(own):
        return State(own["state"]), own.get("reason")
    if end:
        return State(end["state"]), None if end["state"] == "succeeded" else end["reason"]
    if not own:
        return State.failed, "lost: Slurm has forgotten the job, and it never started"
    why = f" ({own['reason']})" if own.get("reason") else ""
    return State.failed, f"lost: Slurm has forgotten the job, which was last seen {own['state']}{why}"


def _failed_reason(job: SlurmJob, known: SlurmRun) -> str:
    own, end, said = known.own_state, known.own_end, _said(known)
    if job.state in _FAILED:
        word = _FAILED[job.state]
        kind = word.partition(":")[0]
        return f"{word}; {said.removeprefix(f'{kind}: ')}" if said else word
    if said:
        return str(_with_time_limit(known, said))
    if end:
        return str(end["reason"])
    if job.note:
        return job.note
    if job.exit_code:
        return f"exit code {job.exit_code} of the job script"
    if own.get("reason"):
        return f"the job script failed; before that: {own['reason']}"
    return f"the job script failed ({job.reason or job.state}); slurm-{job.job_id}.log beside it tells why"


def _said(known: SlurmRun) -> str | None:
    """Why the run failed, in its leader's words; None where it says of none."""
    own = known.own_state
    return str(own["reason"]) if own.get("state") == "failed" and own.get("reason") else None


def _with_time_limit(known: SlurmRun, said: str | None) -> str | None:
    """What the leader said, after the word that only the job script knows."""
    ended_at_limit = str(known.own_end.get("reason", "")).startswith("time limit")
    return f"time limit; {said}" if ended_at_limit and said and not said.startswith("time limit") else said


def _failure(known: SlurmRun, reason: str | None) -> RunFailure:
    told = failure_of(known.own_state)
    if told is not None and reason == _said(known):
        return told
    if told is not None:
        # Slurm or the job script knows why the run ended, and no rank is to blame for that.
        return replace(told, reason=reason or told.reason, rank=None, node=None)
    code = known.own_end.get("code") or (known.job.exit_code if known.job else None)
    return RunFailure(reason=reason or "unknown", exit_code=code)


def _since(known: SlurmRun, state: State) -> float | None:
    job, own = known.job, known.own_state
    if own and State(own["state"]) is state:
        since = own.get("since")
        return float(since) if since is not None else None
    if job is None or state is State.queued:
        return _submitted_at(known)
    return job.ended_at if state.over else job.started_at


def _submitted_at(known: SlurmRun) -> float | None:
    """By the controller's clock or the submitter's, whichever is earlier: a requeue moves the controller's."""
    # A job that was submitted by hand is not the one that was noted.
    noted = known.entry if known.job is None or known.entry.get("job_id") == known.job.job_id else {}
    times = (noted.get("submitted_at"), known.job.submitted_at if known.job else None)
    return min((float(at) for at in times if at), default=None)


def _ended_at(known: SlurmRun) -> float | None:
    for at in (known.own_state.get("ended_at"), known.own_end.get("at"), known.job.ended_at if known.job else None):
        if at is not None:
            return float(at)
    return None


def _native(known: SlurmRun) -> dict[str, Any]:
    job = known.job
    told: dict[str, Any] = {"job_id": known.job_id}
    if job is not None:
        told |= {"state": job.state, "partition": job.partition}
        told |= {"reason": job.reason} if job.reason else {}
        told |= {"nodes": job.node_list} if job.node_list else {}
        if job.state == "PENDING" and job.started_at:
            told["expected_start"] = job.started_at
    return told
