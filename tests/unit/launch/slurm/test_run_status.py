"""What a run on Slurm is said to be doing, from the queue, the accounts, state.json and
ended.json."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from drillyard.launch.run_status import Handle, State
from drillyard.launch.slurm.run_status import SlurmJob, SlurmRun
from drillyard.launch.status_text import status_text

HANDLE = Handle("slurm", "c", "run")
ENTRY = {
    "run": "run",
    "job_id": "12",
    "nodes": 2,
    "submitted_at": 100.0,
    "run_directory": "/shared/runs/run",
}
FAILURE = {
    "reason": "rank 9: out of memory",
    "rank": 9,
    "node": "n2",
    "exit_code": 1,
    "lines": ["CUDA out of memory"],
}


def job(state: str, reason: str = "", **changes: Any) -> SlurmJob:
    made = SlurmJob(
        "12", state, reason, 100.0, 110.0, 200.0, 2, "n[1-2]", "main", "/s", "slurm://c/run"
    )
    return replace(made, **changes)


def own(state: str, reason: str | None = None, **changes: Any) -> dict[str, Any]:
    """state.json of job 12."""
    common = {
        "submission": "12",
        "nodes": 2,
        "since": 150.0,
        "started_at": 120.0,
        "ended_at": None,
        "round": 1,
    }
    return (
        common
        | {
            "state": state,
            "reason": reason,
            "failures": 1,
            "hosts": ["n1", "n2"],
            "exit_code": None,
        }
        | changes
    )


def test_a_job_that_never_got_nodes_has_not_started():
    assert SlurmRun(HANDLE, ENTRY, job("CANCELLED")).status.started_at == 110.0
    assert SlurmRun(HANDLE, ENTRY, job("CANCELLED", node_list="")).status.started_at is None


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Resources", "waits for nodes to become free (Resources)"),
        ("Priority", "other jobs are before it in the queue (Priority)"),
        (
            "(ReqNodeNotAvail, UnavailableNodes:n[1-2])",
            "nodes that it needs are down, drained or reserved (ReqNodeNotAvail",
        ),
        ("Dependency", "waits for another run to succeed"),
        ("JobHeldUser", "is held: scontrol release 12"),
        ("BadConstraints", "can never start: no node has what it asks for (BadConstraints)"),
        (
            "DependencyNeverSatisfied",
            "can never start: the run that it waits for has not succeeded",
        ),
        ("QOSMaxGRESPerUser", "a limit of its account or QOS is reached (QOSMaxGRESPerUser)"),
        ("SomethingNew", "SomethingNew"),
        ("", "waits in the queue"),
    ],
)
def test_a_queued_run_tells_why_in_words_and_since_when(reason: str, words: str):
    status = SlurmRun(HANDLE, ENTRY, job("PENDING", reason)).status
    assert (
        status.state is State.queued
        and status.reason is not None
        and status.reason.startswith(words)
    )
    assert status.since == 100.0 and status.started_at is None and status.failure is None


def test_a_run_that_has_begun_before_is_restarting_while_it_waits_again():
    status = SlurmRun(
        HANDLE, ENTRY, job("PENDING", "Resources"), own("restarting", "stopped by SIGTERM")
    ).status
    assert status.state is State.restarting and status.failures == 1
    assert status.reason == "is queued again: waits for nodes to become free (Resources)"


def test_state_json_of_another_submission_says_nothing_about_this_one():
    other = own("failed", "exit code 1", submission="11", failure=FAILURE)
    status = SlurmRun(HANDLE, ENTRY, job("RUNNING"), other).status
    assert (status.state, status.failure, status.hosts) == (State.starting, None, ())


@pytest.mark.parametrize("state", ["starting", "running", "restarting"])
def test_while_the_job_runs_the_leader_says_what_the_run_does(state: str):
    status = SlurmRun(HANDLE, ENTRY, job("RUNNING"), own(state, "because")).status
    assert (status.state, status.reason, status.attempt, status.hosts) == (
        State(state),
        "because",
        1,
        ("n1", "n2"),
    )


@pytest.mark.parametrize(
    ("asked", "state", "shown"),
    [
        ("SIGTERM", "RUNNING", State.restarting),
        ("SIGTERM", "COMPLETING", State.restarting),
        ("SIGTERM", "FAILED", State.failed),
        (None, "COMPLETING", State.failed),
    ],
)
def test_a_start_that_slurm_stops_has_not_failed_until_slurm_has_ended_it(
    asked: str | None, state: str, shown: State
):
    ended = own("failed", "stopped by SIGTERM", asked=asked, exit_code=1, failure=FAILURE)
    assert SlurmRun(HANDLE, ENTRY, job(state), ended).status.state is shown


def test_a_leader_that_was_killed_leaves_a_run_that_restarts_for_as_long_as_its_job_runs():
    dead = own("failed", "agent gone: the agent of node 0 was killed", failure=FAILURE)
    status = SlurmRun(HANDLE, ENTRY, job("RUNNING"), dead).status
    assert (status.state, status.reason) == (State.restarting, dead["reason"])


@pytest.mark.parametrize(
    ("state", "word"),
    [
        ("TIMEOUT", "time limit"),
        ("NODE_FAIL", "lost capacity"),
        ("PREEMPTED", "lost capacity: preempted"),
        ("OUT_OF_MEMORY", "out of memory"),
        ("BOOT_FAIL", "lost capacity"),
        ("DEADLINE", "time limit"),
    ],
)
def test_what_slurm_ended_for_good_has_failed_with_that_word(state: str, word: str):
    status = SlurmRun(HANDLE, ENTRY, job(state), own("running")).status
    assert status.state is State.failed and status.failure is not None
    assert status.failure.reason.startswith(word) and status.ended_at == 200.0


@pytest.mark.parametrize("known", [job("FAILED"), None])
def test_a_run_that_could_not_save_before_its_time_limit_has_failed_with_that_word(
    known: SlurmJob | None,
):
    end = {
        "submission": "12",
        "attempt": "0",
        "code": 1,
        "state": "failed",
        "reason": "time limit: exit code 1",
        "at": 1,
    }
    status = SlurmRun(
        HANDLE, ENTRY, known, own("failed", "stopped by SIGTERM without a checkpoint"), end
    ).status
    assert status.failure is not None
    assert status.failure.reason == "time limit; stopped by SIGTERM without a checkpoint"
    in_time = SlurmRun(HANDLE, ENTRY, job("TIMEOUT"), own("failed", "exit code 1")).status
    assert in_time.reason == "time limit; exit code 1"


def test_a_failure_names_rank_node_code_and_last_lines():
    status = SlurmRun(
        HANDLE, ENTRY, job("FAILED"), own("failed", FAILURE["reason"], failure=FAILURE)
    ).status
    assert status.failure is not None and status.failure.lines == ("CUDA out of memory",)
    assert (status.failure.rank, status.failure.node, status.failure.exit_code) == (9, "n2", 1)


def test_a_rank_is_not_named_again_in_the_reason_nor_blamed_for_what_slurm_did():
    said = "node 1 (n2): rank 9: out of memory; all 3 restarts are used"
    status = SlurmRun(HANDLE, ENTRY, job("FAILED"), own("failed", said, failure=FAILURE)).status
    assert status.failure is not None and status.failure.reason == FAILURE["reason"]
    screen = status_text(status, now=300.0)
    assert screen.count("rank 9") == 1 and screen.count("n2:") == 1
    assert "  reason         all 3 restarts are used\n" in screen
    limit = SlurmRun(HANDLE, ENTRY, job("TIMEOUT"), own("running", failure=FAILURE)).status
    assert limit.failure is not None and limit.failure.lines == ("CUDA out of memory",)
    assert (limit.failure.reason, limit.failure.rank, limit.failure.node) == (
        "time limit",
        None,
        None,
    )
    assert status_text(limit, now=300.0).count("time limit") == 1
    lost = SlurmRun(
        HANDLE, ENTRY, job("NODE_FAIL"), own("failed", "lost capacity: node 1 (n2) did not come")
    ).status
    assert (
        lost.reason is not None
        and lost.reason.count("lost capacity") == 1
        and "node 1 (n2)" in lost.reason
    )
    forgotten = SlurmRun(HANDLE, ENTRY, None, own("running")).status
    assert forgotten.reason is not None and forgotten.reason.count("running") == 1


def test_cancelled_in_slurm_is_cancelled_whatever_the_run_wrote_last():
    assert (
        SlurmRun(HANDLE, ENTRY, job("CANCELLED"), own("restarting", "all is saved")).status.state
        is State.cancelled
    )


@pytest.mark.parametrize("state", ["succeeded", "failed", "cancelled"])
def test_a_forgotten_job_is_what_its_files_say(state: str):
    by_leader = SlurmRun(HANDLE, ENTRY, None, own(state, "so", ended_at=180.0)).status
    assert (by_leader.state, by_leader.ended_at) == (State(state), 180.0)
    end = {"submission": "12", "attempt": "0", "code": 1, "state": state, "reason": "so", "at": 190}
    by_script = SlurmRun(HANDLE, ENTRY, None, own("restarting"), end).status
    assert (by_script.state, by_script.ended_at) == (State(state), 190.0)
    assert not SlurmRun(HANDLE, ENTRY, None, own("restarting"), end).needs_accounts


def test_a_forgotten_job_without_a_last_word_is_lost_and_never_queued():
    never = SlurmRun(HANDLE, ENTRY).status
    assert (
        never.state is State.failed and never.reason is not None and "never started" in never.reason
    )
    midway = SlurmRun(HANDLE, ENTRY, None, own("running"))
    assert midway.needs_accounts
    status = midway.status
    assert (
        status.state is State.failed
        and status.reason is not None
        and "last seen running" in status.reason
    )


def test_why_the_index_has_no_state_is_said_where_nothing_better_is_known():
    problem = "/run/launch cannot be written to: Read-only file system"
    for known, begins in (
        (job("RUNNING"), "the job script has begun; "),
        (job("FAILED"), "the job script failed; "),
    ):
        reason = SlurmRun(HANDLE, ENTRY, known, problem=problem).status.reason
        assert reason is not None and reason.startswith(begins) and reason.endswith(problem)
    assert (
        SlurmRun(HANDLE, ENTRY, None, problem=problem).status.reason
        == f"lost: Slurm has forgotten the job; {problem}"
    )
    assert SlurmRun(HANDLE, ENTRY, job("PENDING"), problem=problem).status.state is State.queued


def test_the_accounts_tell_the_end_of_a_job_that_the_queue_has_forgotten():
    status = SlurmRun(HANDLE, ENTRY, job("TIMEOUT", exit_code=0), own("running")).status
    assert status.failure is not None and status.failure.reason == "time limit"


def test_a_run_was_submitted_at_the_earlier_of_two_clocks_times_as_a_requeue_moves_the_controllers():  # noqa: E501
    status = SlurmRun(HANDLE, ENTRY, job("RUNNING", submitted_at=170.0)).status
    assert status.submitted_at == 100.0
    ahead = SlurmRun(HANDLE, ENTRY | {"submitted_at": 105.0}, job("RUNNING")).status
    assert ahead.submitted_at == 100.0
    by_hand = SlurmRun(HANDLE, ENTRY, job("RUNNING", job_id="13", submitted_at=170.0)).status
    assert by_hand.submitted_at == 170.0
