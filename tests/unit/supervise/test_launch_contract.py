"""What a launcher and its command tell each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drillyard.supervise.launch_contract import (
    EXIT_RECORD,
    LAUNCH_ATTEMPT,
    SUBMISSION,
    ExitRecord,
    FailureElsewhere,
    failure_elsewhere,
    first_attempt,
    write_failure_elsewhere,
)
from drillyard.supervise.supervisor import is_started
from drillyard.telemetry.events import append_event


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (EXIT_RECORD, LAUNCH_ATTEMPT, SUBMISSION):
        monkeypatch.delenv(name, raising=False)


def test_the_end_is_recorded_where_a_launcher_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ExitRecord(3, 1, "no launcher asks").write()
    record = tmp_path / "exit.json"
    monkeypatch.setenv(EXIT_RECORD, str(record))
    ExitRecord(3, 137, "rank 3: killed", ["a"], lost_peer=True).write()
    message = {
        "rank": 3,
        "exit_code": 137,
        "reason": "rank 3: killed",
        "lines": ["a"],
        "lost_peer": True,
        "final": False,
        "step": None,
    }
    assert json.loads(record.read_text()) == message


def test_a_command_is_reported_that_another_node_is_why_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "0001-0000.node-0.record.json"
    failure = FailureElsewhere("node 1 (n1): rank 3: exit code 7", 3, 7)
    write_failure_elsewhere(record, failure)
    assert failure_elsewhere() is None
    monkeypatch.setenv(EXIT_RECORD, str(record))
    assert failure_elsewhere() == failure
    # That of an attempt before is not this one's.
    monkeypatch.setenv(EXIT_RECORD, str(tmp_path / "0001-0001.node-0.record.json"))
    assert failure_elsewhere() is None


def test_a_directory_that_takes_nothing_leaves_the_signal_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "gone" / "record.json"
    write_failure_elsewhere(record, FailureElsewhere("lost node 1", None, None))
    monkeypatch.setenv(EXIT_RECORD, str(record))
    assert failure_elsewhere() is None


@pytest.mark.parametrize(("message", "number"), [(None, 0), ("", 0), ("0", 0), ("12", 12)])
def test_attempts_count_on_from_the_launchers(
    monkeypatch: pytest.MonkeyPatch, message: str | None, number: int
) -> None:
    if message is not None:
        monkeypatch.setenv(LAUNCH_ATTEMPT, message)
    assert first_attempt() == number


def test_a_run_was_begun_by_the_launch_whose_name_its_start_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_started(tmp_path)
    append_event(tmp_path, "run_start", round=0, launch="first")
    assert not is_started(tmp_path)
    monkeypatch.setenv(SUBMISSION, "first")
    assert is_started(tmp_path)
    monkeypatch.setenv(SUBMISSION, "second")
    assert not is_started(tmp_path)
    # A launcher without a name for it cannot tell its starts apart.
    append_event(tmp_path, "run_start", round=0)
    monkeypatch.setenv(SUBMISSION, "")
    assert not is_started(tmp_path)
