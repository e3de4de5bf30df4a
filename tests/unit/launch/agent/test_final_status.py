"""How the end of a run is reported, and how long a failed one waits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drillyard.launch.agent.contract import AGAIN, LEAVE, RestartCounts, RestartDecision
from drillyard.launch.agent.final_status import (
    clean_exit_text,
    failure_entry,
    final_status,
    pause_seconds,
    reason_with_node,
)

REPORT = {"node": 1, "host": "n1", "rank": 9, "status": 7, "reason": "rank 9: exit code 7", "lines": ["ValueError: x"]}
FAILED = RestartDecision(LEAVE, 1, "rank 9: exit code 7; all 3 restarts are used", RestartCounts(3), counted=True)


@pytest.mark.parametrize(("failures", "seconds"), [(1, 1), (2, 2), (3, 4), (5, 16), (6, 30), (2000, 30)])
def test_a_counted_restart_waits_longer_each_time(failures: int, seconds: float) -> None:
    decision = RestartDecision(AGAIN, 1, "exit code 1", RestartCounts(failures), counted=True)
    assert pause_seconds(decision, decision.counts) == seconds
    assert pause_seconds(replace(decision, counted=False), decision.counts) == 0
    assert pause_seconds(replace(decision, what=LEAVE), decision.counts) == 0


def test_the_last_failed_round_is_reported_where_it_is_why() -> None:
    failure = failure_entry(REPORT)
    end = final_status(FAILED, False, failure)
    assert (end.state, end.code, end.failure) == ("failed", 1, failure) and end.ended_at is not None
    capacity = final_status(replace(FAILED, reason="lost for good", counted=False), False, failure)
    assert capacity.failure is not None
    assert (capacity.failure["reason"], capacity.failure["rank"]) == ("lost for good", None)
    refused = final_status(replace(FAILED, code=2, counted=False, reason="refused: x"), False, failure)
    assert refused.failure is not None and refused.failure["rank"] == 9


@pytest.mark.parametrize("code", [75, 85])
def test_a_run_that_its_scheduler_starts_again_has_not_ended(code: int) -> None:
    end = final_status(replace(FAILED, code=code, reason="stopped"), False, None)
    assert (end.state, end.ended_at) == ("restarting", None)
    assert end.reason == f"stopped; to be started again (exit code {code})"


@pytest.mark.parametrize(
    ("code", "state", "status"), [(1, "cancelled", 130), (85, "cancelled", 130), (0, "succeeded", 0)]
)
def test_a_cancelled_run_did_not_fail_and_a_done_one_is_done(code: int, state: str, status: int) -> None:
    end = final_status(replace(FAILED, code=code), True, failure_entry(REPORT))
    assert (end.state, end.code) == (state, status)
    assert (end.failure is None) == (state == "succeeded")


def test_the_node_is_named_where_there_are_several() -> None:
    assert reason_with_node(REPORT, 1) == "rank 9: exit code 7"
    assert reason_with_node(REPORT, 2) == "node 1 (n1): rank 9: exit code 7"


def test_only_an_end_that_is_no_failure_gives_the_others_time() -> None:
    assert [bool(clean_exit_text(code)) for code in (0, 85, 1, 2, 143)] == [True, True, False, False, False]
