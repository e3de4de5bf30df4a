"""state.json: how it is written, also on a full disk, and what its last fields say."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path

import pytest

from drillyard.launch.agent import state_file
from drillyard.launch.agent.exit_report import failure_entry
from drillyard.launch.agent.state_file import final_fields
from drillyard.supervise.restart_policy import LEAVE, RestartCounts, RestartDecision

REPORT = {
    "node": 1,
    "host": "n1",
    "rank": 9,
    "status": 7,
    "reason": "rank 9: exit code 7",
    "lines": ["ValueError: x"],
}
FAILED = RestartDecision(
    LEAVE, 1, "rank 9: exit code 7; all 3 restarts are used", RestartCounts(3), counted=True
)


def test_the_last_failed_attempt_is_reported_where_it_is_why() -> None:
    failure = failure_entry(REPORT)
    end = final_fields(FAILED, False, failure)
    assert (end["state"], end["exit_code"], end["failure"]) == ("failed", 1, failure) and end[
        "ended_at"
    ] is not None
    capacity = final_fields(replace(FAILED, reason="lost for good", counted=False), False, failure)
    assert (capacity["failure"]["reason"], capacity["failure"]["rank"]) == ("lost for good", None)
    refused = final_fields(
        replace(FAILED, code=2, counted=False, reason="refused: x"), False, failure
    )
    assert refused["failure"]["rank"] == 9


@pytest.mark.parametrize("code", [75, 85])
def test_a_run_that_its_scheduler_starts_again_has_not_ended(code: int) -> None:
    end = final_fields(replace(FAILED, code=code, reason="stopped"), False, None)
    assert (end["state"], end["ended_at"]) == ("restarting", None)
    assert end["reason"] == f"stopped; to be started again (exit code {code})"


@pytest.mark.parametrize(
    ("code", "state", "status"),
    [(1, "cancelled", 130), (85, "cancelled", 130), (0, "succeeded", 0)],
)
def test_a_cancelled_run_did_not_fail_and_a_done_one_is_done(
    code: int, state: str, status: int
) -> None:
    end = final_fields(replace(FAILED, code=code), True, failure_entry(REPORT))
    assert (end["state"], end["exit_code"]) == (state, status)
    assert (end["failure"] is None) == (state == "succeeded")


def test_on_a_full_disk_a_state_is_cut_to_the_blocks_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    state = state_file.StateFile(
        tmp_path, {"state": "running", "reason": None, "since": 0, "hosts": ["n1", "n2"]}
    )
    state.save()
    blocks = 512 * (tmp_path / "state.json").stat().st_blocks
    monkeypatch.setattr(state_file, "replace_file", full)
    cause = "exit code 2; error: cannot export: No space left on device. " + "x" * 2000
    state.enter(
        "failed",
        cause,
        failure={"reason": cause, "rank": 3, "lines": ["y" * 2000] * 20},
        exit_code=2,
    )
    message = state_file.read_state(tmp_path)
    assert (tmp_path / "state.json").stat().st_size <= blocks
    assert (message["state"], message["exit_code"], message["failure"]["rank"]) == ("failed", 2, 3)
    assert message["reason"].startswith(
        "exit code 2; error: cannot export: No space left on device."
    )


def test_a_state_is_replaced_as_a_whole_and_waits_for_a_disk(tmp_path: Path) -> None:
    state = state_file.StateFile(tmp_path / "launch", {"state": "starting", "since": 0})
    state.enter("running", round=1)
    assert state_file.read_state(tmp_path / "launch") == {}
    (tmp_path / "launch").mkdir()
    state.save()
    read = state_file.read_state(tmp_path / "launch")
    assert (read["state"], read["round"], read["reason"]) == ("running", 1, None) and read[
        "since"
    ] > 0
    since = read["since"]
    state.enter("running", "another reason")
    assert state_file.read_state(tmp_path / "launch")["since"] == since
    assert [path.name for path in (tmp_path / "launch").iterdir()] == ["state.json"]


def test_a_leader_that_was_superseded_writes_no_state(tmp_path: Path) -> None:
    over: list[int] = []
    state = state_file.StateFile(tmp_path, {"state": "running"}, lambda: bool(over))
    state.save()
    over.append(1)
    state.enter("failed")
    assert state_file.read_state(tmp_path)["state"] == "running"


def test_a_summary_says_completed_or_not(tmp_path: Path) -> None:
    assert not state_file.summary_completed(tmp_path)
    for text, expected in (
        ('{"status": "completed"}', True),
        ('{"status": "failed"}', False),
        ("[", False),
    ):
        (tmp_path / "summary.json").write_text(text)
        assert state_file.summary_completed(tmp_path) is expected


def test_a_newer_checkpoint_is_seen(tmp_path: Path) -> None:
    pattern = str(tmp_path / "*" / "manifest.json")
    assert (
        state_file.newest_checkpoint(None) is None and state_file.newest_checkpoint(pattern) is None
    )
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "manifest.json").write_text(json.dumps({}))
    first = state_file.newest_checkpoint(pattern)
    assert first is not None and first[1].endswith("step-1/manifest.json")
    (tmp_path / "step-2").mkdir()
    assert state_file.newest_checkpoint(pattern) == first
    (tmp_path / "step-2" / "manifest.json").write_text(json.dumps({}))
    assert state_file.newest_checkpoint(pattern) not in (None, first)


def test_an_unreadable_state_is_none_to_go_on_from(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"state": "run')
    assert state_file.last_state(tmp_path) == {}
    with pytest.raises(ValueError, match="Unterminated"):
        state_file.read_state(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"state": "dancing"},
        {"state": ["running"]},
        {"since": float("nan")},
        {"started_at": "soon"},
        {"nodes": 10**400},
        {"hosts": 5},
        {"hosts": [1]},
        {"losses": {"n1": "two"}},
        {"failure": "x"},
        {"failure": {"rank": [0]}},
    ],
)
def test_what_no_leader_has_written_is_not_a_state(
    tmp_path: Path, change: dict[str, object]
) -> None:
    state = {"state": "running", "hosts": ["n1"], "losses": {"n1": 2}, "failure": {"rank": 0}}
    (tmp_path / "state.json").write_text(json.dumps(state))
    assert state_file.read_state(tmp_path) == state_file.last_state(tmp_path) == state
    (tmp_path / "state.json").write_text(json.dumps(state | change))
    assert state_file.last_state(tmp_path) == {}
    with pytest.raises(ValueError, match="not a state"):
        state_file.read_state(tmp_path)


def test_a_cancelled_submission_is_the_only_one(tmp_path: Path) -> None:
    assert not state_file.is_cancelled(tmp_path, "a")
    state_file.record_cancelled(tmp_path, "a")
    assert state_file.is_cancelled(tmp_path, "a") and not state_file.is_cancelled(tmp_path, "b")
