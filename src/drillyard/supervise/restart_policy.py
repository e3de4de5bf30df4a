"""Decision after an attempt: done, another attempt, or the end. Pure; one for a host's supervisor
and a run's leader.

| how the attempt ended | what follows |
|---|---|
| node 0 exited with 0 and summary.json says completed; or every node exited with 0 | done |
| a node refused its config (2) | failed, not started again |
| stopped from outside, with all saved (85, or a newer checkpoint) | exit with 85: the scheduler starts the run again |
| stopped from outside, not saved | failed |
| a node was lost | another when it is back, not counted; after `join_seconds` (0: at once) exit with 75 |
| a node never joined | exit with 75 |
| 85 without a request | another, not counted |
| the node that failed first exited with 126 or 127, or reported that its failure is final | failed, not started again |
| before its first step | another, not counted; the third in a row: failed |
| the third in a row at the same step with the same error | failed: it belongs to the run and not to a host |
| anything else | another, counted, at most `max_failures` times |

Failures before the first step have a limit of their own, so that problems of the first seconds (a
port, a slow mount) do not use up the restarts of a long run. A command that does not report its
steps has only the last row. Of attempts in a row that end with 85 or a lost node and without a
newer checkpoint, the second and each later one counts as a failure, so that a run without progress
comes to an end. Where checkpoints cannot be seen (no glob), only a stop from outside does not
count. A host that lost its agent `MOST_LOSSES` times, or on which the agent never started, is
excluded: the scheduler is asked for another one.

Shipped with the agents of launched runs: standard library only, nothing newer than Python 3.9.
"""  # noqa: E501

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from drillyard.supervise.launch_contract import (
    EXIT_CANCELLED,
    EXIT_CHECKPOINTED,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_NODE_LOST,
    EXIT_USER_ERROR,
)

DONE = "done"
AGAIN = "again"
LEAVE = "leave"
FINAL_EXIT_CODES = {
    2: "a mistake of the user",
    126: "a command that cannot be executed",
    127: "a command that was not found",
}
"""Codes after which the same command would end in the same way again. 126 and 127 are a shell's:
POSIX.1-2017, XCU 2.8.2, Exit Status for Commands."""
MAX_FAILED_STARTS = 3
MAX_REPEATS = 2
MOST_LOSSES = 2
"""Losses of one host after which it is excluded."""
_LONGEST_PAUSE_SECONDS = 30.0


@dataclass(frozen=True)
class RestartCounts:
    """Counts that are kept from attempt to attempt, and over requeues."""

    failures: int = 0
    """Restarts that counted against the limit."""
    unsaved_stops: int = 0
    """Attempts in a row that ended with 85 or a lost node, without a newer checkpoint."""
    losses: Mapping[str, int] = field(default_factory=dict)
    """Number of times that each host lost its agent."""
    failed_starts: int = 0
    """Attempts in a row that failed before their first step."""
    repeats: int = 0
    """Attempts in a row that failed like the one before, at the same step with the same error."""
    last_failure: str = ""
    """`AttemptFailure.signature` of the last one that had done a step."""

    @property
    def excluded(self) -> list[str]:
        """Hosts that the run must not use again."""
        return sorted(host for host, times in self.losses.items() if times >= MOST_LOSSES)

    def as_fields(self) -> dict[str, Any]:
        """As fields of state.json, which outlive a leader; `exclude` is for the job script."""
        return {**asdict(self), "exclude": ",".join(self.excluded)}


def counts_in(state: Mapping[str, Any]) -> RestartCounts:
    """Read the counts in the state of an earlier leader; zeros for what it does not have."""
    counts = RestartCounts()
    return replace(counts, **{name: state[name] for name in vars(counts) if state.get(name)})


@dataclass(frozen=True)
class AttemptFailure:
    """Failure of an attempt: of the node that failed first its exit code, last step (None: it did
    none) and error."""

    exit_code: int = EXIT_FAILED
    step: int | None = None
    error: str = ""
    knows_step: bool = True
    """False for a command that does not report its steps."""
    cause: str = ""
    """In words, where known."""
    final: bool = False
    """Whether the node reported that another attempt would end in the same way."""

    @property
    def signature(self) -> str:
        """Hash of what two equal failures share: step and error without addresses, ids and
        times."""
        if self.step is None:
            return ""
        text = f"{self.step} {self.exit_code} " + re.sub(r"0x[0-9a-fA-F]+|\d+", "#", self.error)
        return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]


@dataclass(frozen=True)
class AttemptEnd:
    """End of an attempt on all nodes. Codes are as a shell shows them: 128 + N for a process that
    signal N ended."""

    codes: dict[int, int]
    """By node, of all nodes that are not lost. A code that ranks reported, else that of their
    command."""
    lost: dict[int, str]
    """Nodes that vanished, and their hosts."""
    cause_of_loss: str = ""
    """Reason why nodes vanished, where the scheduler reports it."""
    failure: AttemptFailure | None = None
    """None: no node failed by itself."""
    asked: str | None = None
    """The signal that came from outside, by name."""
    completed: bool = False
    """Whether summary.json says that the run is complete."""
    newer_checkpoint: bool | None = None
    """Whether this attempt saved one; None: cannot be seen."""


@dataclass(frozen=True)
class RestartLimits:
    """Settings of the decision. `option`: the flag that sets `max_failures`, for messages."""

    max_failures: int
    join_seconds: float = 0.0
    option: str = ""


@dataclass(frozen=True)
class RestartDecision:
    """Decision: `done`, `again` after `pause_seconds`, or `leave` with `code`; `reason` is for
    people."""

    what: str
    code: int
    reason: str
    counts: RestartCounts
    counted: bool = False
    pause_seconds: float = 0.0


def decide(end: AttemptEnd, counts: RestartCounts, limits: RestartLimits) -> RestartDecision:
    codes = set(end.codes.values())
    if end.codes.get(0) == EXIT_DONE and (end.completed or (codes == {EXIT_DONE} and not end.lost)):
        return RestartDecision(DONE, EXIT_DONE, "done", counts)
    first_error = next(
        (code for _, code in sorted(end.codes.items()) if code != EXIT_DONE), EXIT_FAILED
    )
    failure = end.failure or AttemptFailure(first_error, knows_step=False)
    if EXIT_USER_ERROR in codes:
        return RestartDecision(
            LEAVE, EXIT_USER_ERROR, "refused: " + (failure.cause or "exit code 2"), counts
        )
    if end.asked is not None:
        return _after_stop(end, counts, limits)
    if end.lost:
        return _after_loss(end, counts, limits)
    if failure.exit_code == EXIT_CHECKPOINTED:
        after = _without_checkpoint(counts, end.newer_checkpoint is True)
        return _unless_too_often(
            AGAIN, EXIT_CHECKPOINTED, "checkpointed (exit code 85)", counts, after, limits
        )
    cause = failure.cause or f"exit code {failure.exit_code}"
    if failure.final:
        return RestartDecision(LEAVE, EXIT_FAILED, cause, counts, counted=True)
    decision = after_failure(failure, counts, limits)
    reason = decision.reason.removeprefix(f"{cause.partition(';')[0]} means ")
    return replace(decision, reason=f"{cause}; {reason}" if reason else cause)


def after_failure(
    failure: AttemptFailure, counts: RestartCounts, limits: RestartLimits
) -> RestartDecision:
    """Decide after an attempt that failed by itself; `reason`: why there is no other, empty where
    there is one."""

    def refuse(reason: str, after: RestartCounts = counts) -> RestartDecision:
        return RestartDecision(LEAVE, EXIT_FAILED, reason, after, counted=True)

    if failure.exit_code in FINAL_EXIT_CODES:
        meaning = FINAL_EXIT_CODES[failure.exit_code]
        return refuse(f"exit code {failure.exit_code} means {meaning}: not started again")
    if limits.max_failures == 0:
        return refuse("restarts are off" + (f" ({limits.option} 0)" if limits.option else ""))
    if failure.knows_step and failure.step is None:
        after = replace(counts, failed_starts=counts.failed_starts + 1)
        if after.failed_starts >= MAX_FAILED_STARTS:
            return refuse(
                f"{after.failed_starts} attempts in a row failed before their first step", after
            )
        return RestartDecision(AGAIN, EXIT_FAILED, "", after, False, pause_seconds(after))
    repeats = (
        counts.repeats + 1
        if failure.step is not None and failure.signature == counts.last_failure
        else 0
    )
    after = replace(
        counts, unsaved_stops=0, failed_starts=0, repeats=repeats, last_failure=failure.signature
    )
    if repeats >= MAX_REPEATS:
        return refuse(
            f"{repeats} further attempts ended at the same step {failure.step} with the same error",
            after,
        )
    if counts.failures >= limits.max_failures:
        return refuse(_used_up(limits), after)
    after = replace(after, failures=counts.failures + 1)
    return RestartDecision(AGAIN, EXIT_FAILED, "", after, True, pause_seconds(after))


def never_joined(
    missing: dict[int, str], why: str, counts: RestartCounts, limits: RestartLimits
) -> RestartDecision:
    """Decide after nodes did not join: their hosts (by node rank, empty where unknown) are excluded
    at once."""
    after = _with_losses(_without_checkpoint(counts, saved=False), missing.values(), MOST_LOSSES)
    return _unless_too_often(LEAVE, EXIT_NODE_LOST, f"lost capacity: {why}", counts, after, limits)


def leader_killed(
    host: str,
    asked: bool,
    newer_checkpoint: bool | None,
    counts: RestartCounts,
    limits: RestartLimits,
) -> RestartDecision:
    """Decide when a leader finds that the one before it, on `host`, was killed. `asked`: while it
    stopped."""
    after = _without_checkpoint(counts, newer_checkpoint is True)
    after = after if asked else _with_losses(after, [host], 1)
    reason = f"the agent of node 0 ({host}) was killed"
    return _unless_too_often(AGAIN, EXIT_NODE_LOST, reason, counts, after, limits)


@dataclass(frozen=True)
class LeaderEnd:
    """End of the agent of node 0 in one start of a run, as the scheduler or the agent reports
    it."""

    host: str
    code: int | None
    """None: it was killed, or never began."""
    unstarted: Sequence[str] = ()
    """Hosts on which the scheduler could start no agent."""
    last_line: str = ""


@dataclass(frozen=True)
class FollowUp:
    """What follows a start: the run ends with `code`, or starts `again` on other hosts than
    `without`."""

    reason: str
    code: int = EXIT_FAILED
    again: bool = False
    without: Sequence[str] = ()
    unled: str = ""
    """Where no leader ever began, and why. Only the scheduler's job counts such starts."""


def follow_up(state: Mapping[str, Any], end: LeaderEnd, time_limit: bool) -> FollowUp:
    """Decide for the scheduler, which can start the run again. `state`: the leader's, empty where
    none began; `time_limit`: whether it was near."""
    said = f": node 0 ({end.host}): {end.last_line}" if end.last_line else ""
    if end.code is None:
        return _without_leader(state, end, said)
    if end.code == EXIT_CHECKPOINTED:
        why = "time limit" if time_limit else "stopped from outside"
        return FollowUp(f"{why}, all is saved", again=True)
    if end.code == EXIT_NODE_LOST:
        why = str(state.get("reason") or "a node was lost").partition("; to be started again")[0]
        excluded = str(state.get("exclude") or "")
        return FollowUp(why, again=True, without=excluded.split(",") if excluded else ())
    reasons = {EXIT_DONE: "done", EXIT_CANCELLED: "cancelled", EXIT_USER_ERROR: f"refused{said}"}
    limit = "time limit: " if time_limit else ""
    return FollowUp(reasons.get(end.code, f"{limit}exit code {end.code}{said}"), end.code)


def _without_leader(state: Mapping[str, Any], end: LeaderEnd, said: str) -> FollowUp:
    unstarted = ",".join(end.unstarted)
    why = f"the agent of node 0 ({end.host}) was killed"
    if unstarted:
        why = f"Slurm cannot start the agent of {unstarted}"
    if not state:
        without = end.unstarted or [end.host]
        return FollowUp(why, again=True, without=without, unled=(unstarted or end.host) + said)
    counts = counts_in(state)
    if not unstarted:
        # The next leader counts this loss.
        asked = state.get("asked") is not None
        counts = leader_killed(end.host, asked, True, counts, RestartLimits(0)).counts
    return FollowUp(why, again=True, without=[*end.unstarted, *counts.excluded])


def _after_stop(end: AttemptEnd, counts: RestartCounts, limits: RestartLimits) -> RestartDecision:
    if EXIT_CHECKPOINTED not in end.codes.values() and not end.newer_checkpoint:
        reason = f"stopped by {end.asked} without a checkpoint of this moment"
        return RestartDecision(LEAVE, EXIT_FAILED, reason, counts)
    after = _without_checkpoint(counts, end.newer_checkpoint is not False)
    reason = f"stopped by {end.asked}, all is saved"
    return _unless_too_often(LEAVE, EXIT_CHECKPOINTED, reason, counts, after, limits)


def _after_loss(end: AttemptEnd, counts: RestartCounts, limits: RestartLimits) -> RestartDecision:
    after = _with_losses(
        _without_checkpoint(counts, end.newer_checkpoint is True), end.lost.values(), 1
    )
    reason = f"lost {names(end.lost)}" + (f": {end.cause_of_loss}" if end.cause_of_loss else "")
    if limits.join_seconds <= 0:
        return _unless_too_often(LEAVE, EXIT_NODE_LOST, reason, counts, after, limits)
    return _unless_too_often(
        AGAIN, EXIT_NODE_LOST, f"{reason}; waits for it to come back", counts, after, limits
    )


def _without_checkpoint(counts: RestartCounts, saved: bool) -> RestartCounts:
    """Count an end that is no failure by itself, but may be one of several in a row that saved
    nothing."""
    if saved:
        return replace(counts, failed_starts=0, unsaved_stops=0)
    failures = counts.failures + 1 if counts.unsaved_stops > 0 else counts.failures
    # `failed_starts` stays: an attempt that saved nothing got no further than those that failed at
    # once.
    return replace(counts, failures=failures, unsaved_stops=counts.unsaved_stops + 1)


def _with_losses(counts: RestartCounts, hosts: Iterable[str], times: int) -> RestartCounts:
    more = {host: counts.losses.get(host, 0) + times for host in hosts if host}
    return replace(counts, losses={**counts.losses, **more})


def _unless_too_often(
    what: str,
    code: int,
    reason: str,
    before: RestartCounts,
    after: RestartCounts,
    limits: RestartLimits,
) -> RestartDecision:
    if after.failures > limits.max_failures:
        # The failure beyond the limit is no restart: the count stays at the limit.
        reason = f"{reason}; again without a newer checkpoint; {_used_up(limits)}"
        return RestartDecision(
            LEAVE, EXIT_FAILED, reason, replace(after, failures=limits.max_failures), counted=True
        )
    counted = after.failures > before.failures
    pause = pause_seconds(after) if counted and what == AGAIN else 0.0
    return RestartDecision(what, code, reason, after, counted, pause)


def _used_up(limits: RestartLimits) -> str:
    used = (
        f"all {limits.max_failures} restarts are used"
        if limits.max_failures
        else "restarts are off"
    )
    return used + (f" ({limits.option})" if limits.option else "")


def pause_seconds(counts: RestartCounts) -> float:
    """Pause of 1, 2, 4, ... at most 30 s: failures that repeat at once (a full device) must not use
    up all restarts."""
    return min(2.0 ** min(counts.failures + counts.failed_starts - 1, 10), _LONGEST_PAUSE_SECONDS)


def names(nodes: dict[int, str]) -> str:
    """Nodes and their hosts in words, the first four of them."""
    listed = [
        f"node {node} ({host})" if host else f"node {node}" for node, host in sorted(nodes.items())
    ]
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")
