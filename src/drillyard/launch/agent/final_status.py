"""How a run is told to have ended, in state.json: its state, reason, exit code and failure. Pure.

Also the pause before a failed run is started again. A failure that repeats at once (a full device, a mount that is not
there yet, a node that is just being mended) would otherwise use up all restarts within a second.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from . import contract
from .contract import RestartCounts, RestartDecision
from .job import EXIT_CANCELLED, EXIT_CHECKPOINTED, EXIT_DONE, EXIT_NODE_LOST, EXIT_REFUSED
from .shared_modules import cause

_LONGEST_PAUSE_SECONDS = 30.0
_NO_FAILURE: dict[str, Any] = {
    "reason": "",
    "rank": None,
    "node": None,
    "node_rank": None,
    "exit_code": None,
    "lines": [],
}


@dataclass(frozen=True)
class FinalStatus:
    """What the last entry of state.json says."""

    state: str
    reason: str | None
    code: int
    failure: dict[str, Any] | None
    ended_at: float | None
    """Unix seconds; None where the scheduler starts the run again."""


def final_status(decision: RestartDecision, cancelled: bool, failure: dict[str, Any] | None) -> FinalStatus:
    """The end of a run by `decision`; `failure`: of the last round that failed, `cancelled`: a user wanted no more."""
    code = decision.code
    state, reason = "failed", decision.reason
    if cancelled and code != EXIT_DONE:
        state, reason, code = "cancelled", "cancelled", EXIT_CANCELLED
    elif code == EXIT_DONE:
        state, reason = "succeeded", ""
    elif code in (EXIT_CHECKPOINTED, EXIT_NODE_LOST):
        state, reason = "restarting", f"{decision.reason}; to be started again (exit code {code})"
    if state == "failed" and not (decision.counted and failure):
        # Not the last failed round, but something that came after it, is why.
        known = failure if code == EXIT_REFUSED else None
        failure = {**_NO_FAILURE, **(known or {}), "reason": decision.reason}
    if state == "succeeded":
        failure = None
    ended_at = None if state == "restarting" else time.time()
    return FinalStatus(state, reason or None, code, failure, ended_at)


def failure_entry(end: dict[str, Any]) -> dict[str, Any]:
    """What state.json tells of the node that failed first, from its report."""
    return {
        "reason": end["reason"],
        "rank": end["rank"],
        "node": end["host"],
        "node_rank": end["node"],
        "exit_code": end["status"],
        "lines": end["lines"],
    }


def reason_with_node(end: dict[str, Any], nodes: int) -> str:
    """The reason of a report, with its node where there are several."""
    return str(end["reason"]) if nodes == 1 else f"node {end['node']} ({end['host']}): {end['reason']}"


def clean_exit_text(status: int) -> str:
    """The ends after which the other nodes get time to come to theirs, in words; nothing for a failure."""
    return cause.describe_exit(status) if status in (EXIT_DONE, EXIT_CHECKPOINTED) else ""


def pause_seconds(decision: RestartDecision, counts: RestartCounts) -> float:
    """From the end of a round to the next one: none where nothing counts, else 1, 2, 4, ... at most 30."""
    if decision.what != contract.AGAIN or not decision.counted:
        return 0.0
    return min(2.0 ** min(counts.failures - 1, 10), _LONGEST_PAUSE_SECONDS)
