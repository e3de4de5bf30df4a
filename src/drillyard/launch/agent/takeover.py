"""What a leader takes over from the one before it, by state.json: the counts, and a loss where that one was killed.

A leader that ends writes its exit code. One that left none was killed, or its host is gone, also where a keeper or the
scheduler has started this one since.
"""

from __future__ import annotations

from typing import Any

from . import contract, records
from .contract import RestartCounts, RestartDecision, RestartLimits
from .job import Job


def counts_in(before: dict[str, Any]) -> RestartCounts:
    """The counts in the state of an earlier leader of the same submission; zeros without one."""
    return RestartCounts(before.get("failures", 0), before.get("unsaved_stops", 0), before.get("losses") or {})


def as_fields(counts: RestartCounts) -> dict[str, Any]:
    """The fields of state.json that outlive a leader; `exclude` is for the job script."""
    return {
        "failures": counts.failures,
        "unsaved_stops": counts.unsaved_stops,
        "losses": dict(counts.losses),
        "exclude": ",".join(counts.excluded),
    }


def after_killed_leader(
    job: Job, before: dict[str, Any], counts: RestartCounts, limits: RestartLimits
) -> RestartDecision | None:
    """What follows where the leader that left the state `before` was killed; None where it ended, or there was none."""
    if not before or before.get("exit_code") is not None:
        return None
    newer = None
    if job.checkpoints is not None:
        known = before.get("checkpoint")
        newer = records.newest_checkpoint(job.checkpoints) != (None if known is None else tuple(known))
    host = str((before.get("hosts") or [""])[0])
    return contract.leader_killed(host, before.get("asked") is not None, newer, counts, limits)
