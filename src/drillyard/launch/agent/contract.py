"""What follows a round, the same on every launcher. Pure: how the nodes ended in, a decision out.

| how the round ended | what follows |
|---|---|
| node 0 exited with 0 and summary.json says completed; or every node exited with 0 | done |
| a node refused its config (2) | failed, never again |
| stopped from outside, with all saved (85, or a newer checkpoint) | leave with 85: the scheduler starts the run again |
| stopped from outside, not saved | failed, with that word |
| the node that failed first exited with 126 or 127: no such command (rules.py) | failed, never again |
| a node was lost | again when it is back, not counted; after `join_seconds` (0: at once) leave with 75 |
| a node never joined | leave with 75 |
| 85 of itself | again, not counted |
| the node that failed first reported that this is final (launched.py) | failed, never again |
| anything else | again, counted, at most `max_failures` times, after a pause that grows (final_status.py) |

Of rounds in a row that end with 85 or a lost node and without a newer checkpoint, the second and each later one counts
as a failure, so that a run without progress comes to an end. Where checkpoints cannot be seen (no glob), only a stop
from outside is not held against the run.

A host that lost its agent `MOST_LOSSES` times, or on which the agent never started, is excluded: the scheduler is asked
for another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from .job import EXIT_CHECKPOINTED, EXIT_DONE, EXIT_FAILED, EXIT_NODE_LOST, EXIT_REFUSED
from .shared_modules import rules

DONE = "done"
AGAIN = "again"
LEAVE = "leave"
MOST_LOSSES = 2
"""Losses of one host after which it is excluded."""


@dataclass(frozen=True)
class RestartCounts:
    """What is remembered from round to round, and over requeues."""

    failures: int = 0
    """Restarts that counted against the limit."""
    unsaved_stops: int = 0
    """Rounds in a row that ended with 85 or a lost node, without a newer checkpoint."""
    losses: Mapping[str, int] = field(default_factory=dict)
    """How often each host lost its agent."""

    @property
    def excluded(self) -> list[str]:
        """Hosts that the run must not use again."""
        return sorted(host for host, times in self.losses.items() if times >= MOST_LOSSES)


@dataclass(frozen=True)
class AttemptEnd:
    """How a round ended. Codes are as a shell shows them: 128 + N for a process that signal N ended."""

    codes: dict[int, int]
    """By node, of all nodes that are not lost. A code that ranks reported, else that of their command."""
    lost: dict[int, str]
    """Nodes that vanished, and their hosts."""
    cause_of_loss: str = ""
    """Why nodes vanished, where the scheduler says so."""
    first: int | None = None
    """The node whose end ended the round; None: no node failed of itself."""
    asked: str | None = None
    """The signal that came from outside, by name."""
    completed: bool = False
    """The run's own word (summary.json) that it is complete."""
    newer_checkpoint: bool | None = None
    """Whether this round saved one; None: cannot be seen."""
    cause: str = ""
    """Why it failed, in words, where known."""
    final: bool = False
    """Whether the node that failed first reported that another start would end in the same way."""


@dataclass(frozen=True)
class RestartLimits:
    """The settings that decide."""

    max_failures: int
    join_seconds: float


@dataclass(frozen=True)
class RestartDecision:
    """What to do: `done`, `again`, or `leave` with `code`; `reason` is for people."""

    what: str
    code: int
    reason: str
    counts: RestartCounts
    counted: bool = False


def decide(end: AttemptEnd, counts: RestartCounts, limits: RestartLimits) -> RestartDecision:
    """What follows a round that ended so."""
    codes = set(end.codes.values())
    if end.codes.get(0) == EXIT_DONE and (end.completed or (codes == {EXIT_DONE} and not end.lost)):
        return RestartDecision(DONE, EXIT_DONE, "done", counts)
    if EXIT_REFUSED in codes:
        return RestartDecision(LEAVE, EXIT_REFUSED, "refused: " + (end.cause or "exit code 2"), counts)
    if end.asked is not None:
        return _stopped(end, counts, limits)
    if end.lost:
        return _lost(end, counts, limits)
    code = _code_of_round(end)
    if code == EXIT_CHECKPOINTED:
        return _checkpointed(end, counts, limits)
    if code in rules.FINAL_EXIT_CODES:
        reason = f"{end.cause or f'exit code {code}'}; not started again: {rules.FINAL_EXIT_CODES[code]}"
        return RestartDecision(LEAVE, EXIT_FAILED, reason, counts, counted=True)
    if end.final:
        return RestartDecision(LEAVE, EXIT_FAILED, end.cause or f"exit code {code}", counts, counted=True)
    return _failed(end.cause or f"exit code {code}", counts, limits)


def never_joined(missing: dict[int, str], why: str, counts: RestartCounts, limits: RestartLimits) -> RestartDecision:
    """What follows when nodes do not join: their hosts (by node rank, empty where unknown) are excluded at once."""
    after = _with_losses(_stop_counts(counts, saved=False), missing.values(), MOST_LOSSES)
    return _after_loss(LEAVE, f"lost capacity: {why}", counts, after, limits)


def leader_killed(
    host: str, asked: bool, newer_checkpoint: bool | None, counts: RestartCounts, limits: RestartLimits
) -> RestartDecision:
    """What follows when a leader finds that the one before it, on `host`, was killed. `asked`: while it stopped."""
    after = _stop_counts(counts, newer_checkpoint is True)
    after = after if asked else _with_losses(after, [host], 1)
    return _after_loss(AGAIN, f"the agent of node 0 ({host}) was killed", counts, after, limits)


def _stopped(end: AttemptEnd, counts: RestartCounts, limits: RestartLimits) -> RestartDecision:
    reports_saved = EXIT_CHECKPOINTED in end.codes.values()
    if not reports_saved and not end.newer_checkpoint:
        reason = f"stopped by {end.asked} without a checkpoint of this moment"
        return RestartDecision(LEAVE, EXIT_FAILED, reason, counts)
    saved = end.newer_checkpoint is not False
    after = _stop_counts(counts, saved)
    if after.failures > limits.max_failures:
        return _too_often("stopped again without a newer checkpoint", after, limits)
    counted = after.failures > counts.failures
    return RestartDecision(LEAVE, EXIT_CHECKPOINTED, f"stopped by {end.asked}, all is saved", after, counted)


def _checkpointed(end: AttemptEnd, counts: RestartCounts, limits: RestartLimits) -> RestartDecision:
    after = _stop_counts(counts, end.newer_checkpoint is True)
    counted = after.failures > counts.failures
    if after.failures > limits.max_failures:
        return _too_often("exit code 85 again without a newer checkpoint", after, limits)
    return RestartDecision(AGAIN, EXIT_CHECKPOINTED, "checkpointed (exit code 85)", after, counted)


def _stop_counts(counts: RestartCounts, saved: bool) -> RestartCounts:
    if saved:
        return replace(counts, unsaved_stops=0)
    again = counts.unsaved_stops > 0
    failures = counts.failures + 1 if again else counts.failures
    return replace(counts, failures=failures, unsaved_stops=counts.unsaved_stops + 1)


def _with_losses(counts: RestartCounts, hosts: Iterable[str], times: int) -> RestartCounts:
    more = {host: counts.losses.get(host, 0) + times for host in hosts if host}
    return replace(counts, losses={**counts.losses, **more})


def _lost(end: AttemptEnd, counts: RestartCounts, limits: RestartLimits) -> RestartDecision:
    after = _with_losses(_stop_counts(counts, end.newer_checkpoint is True), end.lost.values(), 1)
    reason = f"lost {names(end.lost)}" + (f": {end.cause_of_loss}" if end.cause_of_loss else "")
    if limits.join_seconds <= 0:
        return _after_loss(LEAVE, reason, counts, after, limits)
    return _after_loss(AGAIN, f"{reason}; waits for it to come back", counts, after, limits)


def _after_loss(
    what: str, reason: str, before: RestartCounts, after: RestartCounts, limits: RestartLimits
) -> RestartDecision:
    if after.failures > limits.max_failures:
        return _too_often(f"{reason}; again without a newer checkpoint", after, limits)
    return RestartDecision(what, EXIT_NODE_LOST, reason, after, after.failures > before.failures)


def _failed(cause: str, counts: RestartCounts, limits: RestartLimits) -> RestartDecision:
    after = replace(counts, failures=counts.failures + 1, unsaved_stops=0)
    if after.failures > limits.max_failures:
        return _too_often(cause, after, limits)
    return RestartDecision(AGAIN, EXIT_FAILED, cause, after, counted=True)


def _too_often(cause: str, after: RestartCounts, limits: RestartLimits) -> RestartDecision:
    """The failure that is one too many is no restart: the count stays at the limit."""
    counts = replace(after, failures=limits.max_failures)
    limit = f"all {limits.max_failures} restarts are used" if limits.max_failures else "restarts are off"
    return RestartDecision(LEAVE, EXIT_FAILED, f"{cause}; {limit}", counts, counted=True)


def _code_of_round(end: AttemptEnd) -> int:
    """The code of the node that ended the round; without one, the first that is not 0."""
    if end.first is not None and end.first in end.codes:
        return end.codes[end.first]
    return next((code for _, code in sorted(end.codes.items()) if code != EXIT_DONE), EXIT_FAILED)


def names(nodes: dict[int, str]) -> str:
    """Nodes and their hosts in words, the first four of them."""
    listed = [f"node {node} ({host})" if host else f"node {node}" for node, host in sorted(nodes.items())]
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")
