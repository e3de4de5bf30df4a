"""Attempts of a run that a scheduler restarts: the same endings as in restart_policy.decide, by
exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from drillyard.supervise import scheduler_restarts as restarts
from drillyard.supervise.launch_contract import RECORD_BYTES, ExitRecord
from drillyard.supervise.restart_policy import (
    AttemptEnd,
    AttemptFailure,
    RestartCounts,
    RestartLimits,
    decide,
)
from drillyard.supervise.scheduler_restarts import (
    end_without_claim,
    scheduler_restarts,
    write_claim,
)

REAL_SLEEP = time.sleep


def begin(monkeypatch: pytest.MonkeyPatch, attempt: int, submission: str = "uid") -> None:
    given = {"RESTARTED_BY": "jobset", "SUBMISSION": submission, "LAUNCH_ROUND": str(attempt)}
    for name, value in given.items():
        monkeypatch.setenv(f"DRILLYARD_{name}", value)


def write(
    directory: Path,
    attempt: int,
    code: int | None,
    *,
    saved: bool = False,
    status: str = "interrupted",
) -> None:
    """The events of one attempt; None: it was killed and could not record its end."""
    records: list[dict[str, Any]] = [{"event": "run_start", "launch": "uid"}]
    records += [{"event": "checkpoint", "step": attempt}] if saved else []
    records += [] if code is None else [{"event": "end", "status": status, "exit_code": code}]
    with (directory / "events.jsonl").open("a") as file:
        for record in records:
            file.write(
                json.dumps(
                    {"time": "2026-01-01T00:00:00.000Z", "rank": None, "round": attempt, **record}
                )
                + "\n"
            )


Endings = Sequence[tuple[int, bool]]
"""Of attempts in a row: the exit code, and whether a checkpoint was saved."""


@pytest.mark.parametrize(
    "endings",
    [
        [(85, True), (85, True), (85, True)],
        [(85, False), (85, False)],
        [(85, True), (85, False), (85, False), (85, False)],
        [(85, False), (85, True), (85, False)],
    ],
)
def test_an_85_that_counts_for_the_policy_leaves_as_1(
    endings: Endings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, limits = RestartCounts(), RestartLimits(9)
    for attempt, (code, saved) in enumerate(endings):
        begin(monkeypatch, attempt)
        found = scheduler_restarts(tmp_path)
        assert found is not None
        if saved:
            manifest = tmp_path / f"checkpoints/step-{attempt}/manifest.json"
            manifest.parent.mkdir(parents=True)
            manifest.touch()
        decision = decide(
            AttemptEnd({0: code}, {}, failure=AttemptFailure(code), newer_checkpoint=saved),
            counts,
            limits,
        )
        assert found.exit_code(code) == (1 if decision.counted else 85)
        counts = decision.counts
        write(tmp_path, attempt, code, saved=saved)


@pytest.mark.parametrize("code", [0, 1, 2, 137])
def test_other_codes_stay(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 0, 85)
    begin(monkeypatch, 1)
    found = scheduler_restarts(tmp_path)
    assert found is not None
    assert found.exit_code(code) == code


def test_only_a_restart_after_a_failure_pauses_and_each_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = []
    for attempt, (code, status) in enumerate(
        [(1, "failed"), (85, "interrupted"), (1, "failed"), (1, "failed")]
    ):
        write(tmp_path, attempt, code, status=status)
        begin(monkeypatch, attempt + 1)
        found = scheduler_restarts(tmp_path)
        assert found is not None
        pauses.append(found.pause_seconds)
    assert pauses == [1.0, 0.0, 2.0, 4.0]


def test_attempts_of_another_submission_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 0, 85)
    begin(monkeypatch, 1, "another")
    found = scheduler_restarts(tmp_path)
    assert found is not None
    assert (found.exit_code(85), found.pause_seconds) == (85, 0.0)


def test_without_a_scheduler_that_restarts_there_is_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DRILLYARD_RESTARTED_BY", raising=False)
    write_claim(tmp_path)
    assert scheduler_restarts(tmp_path) is None
    assert not (tmp_path / "launch/claims").exists()


def start(
    monkeypatch: pytest.MonkeyPatch,
    directory: Path,
    attempt: int = 0,
    waits: list[float] | None = None,
) -> str:
    """Make the claim of a new start; its id, which its ranks have in their environment. `waits`
    gets the seconds that it waits then."""
    begin(monkeypatch, attempt)
    replace_sleep(monkeypatch, ([] if waits is None else waits).append)
    write_claim(directory)
    return os.environ.get("DRILLYARD_START", "")


def replace_sleep(monkeypatch: pytest.MonkeyPatch, by: Callable[[float], None]) -> None:
    """Call `by` where the test's own thread would sleep. Those that earlier tests have left sleep
    on."""
    own = threading.current_thread()
    monkeypatch.setattr(
        "time.sleep", lambda pause: (by if threading.current_thread() is own else REAL_SLEEP)(pause)
    )


def ends(monkeypatch: pytest.MonkeyPatch, directory: Path, start_id: str) -> list[int]:
    """The exit codes with which the check of a start ends its process."""
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    replace_sleep(monkeypatch, lambda _: None)
    monkeypatch.setenv("DRILLYARD_START", start_id)
    end_without_claim(directory)()
    return codes


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_later_start_ends_the_earlier_one_also_of_the_same_attempt(
    attempt: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kueue's preemption changes neither the submission nor the attempt."""
    old = start(monkeypatch, tmp_path)
    assert ends(monkeypatch, tmp_path, old) == []
    new = start(monkeypatch, tmp_path, attempt)
    assert ends(monkeypatch, tmp_path, old) == [1]
    assert ends(monkeypatch, tmp_path, new) == []
    assert [path.name for path in (tmp_path / "launch/claims").iterdir()] == ["0002"]


def test_a_start_of_an_earlier_attempt_makes_no_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = start(monkeypatch, tmp_path, 1)
    with pytest.raises(SystemExit) as ended:
        start(monkeypatch, tmp_path, 0)
    assert ended.value.code == 1
    assert ends(monkeypatch, tmp_path, new) == []


def test_a_start_whose_claim_is_gone_or_cannot_be_read_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = start(monkeypatch, tmp_path)
    claim = tmp_path / "launch/claims" / "0001"
    claim.unlink()
    assert ends(monkeypatch, tmp_path, mine) == [1]
    claim.mkdir()
    assert ends(monkeypatch, tmp_path, mine) == [1]


def test_claims_made_at_once_are_different_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number is taken by another start after this one has looked."""
    link, taken = os.link, []

    def taken_first(source: Path, target: Path) -> None:
        if not taken:
            taken.append(target)
            Path(target).write_text('{"start": "other"}')
        link(source, target)

    monkeypatch.setattr("os.link", taken_first)
    mine = start(monkeypatch, tmp_path)
    assert taken[0].name == "0001"
    assert ends(monkeypatch, tmp_path, mine) == []
    assert ends(monkeypatch, tmp_path, "other") == [1]


def test_a_start_waits_until_one_that_may_still_run_has_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    start(monkeypatch, tmp_path, 0, waits)
    assert waits == [], "the first start"
    start(monkeypatch, tmp_path, 0, waits)
    assert waits == [restarts.CLAIM_SECONDS], "the first one may still run"
    restarts.end_claim(tmp_path)
    last = start(monkeypatch, tmp_path, 0, waits)
    assert len(waits) == 1, "the second one has said that it has ended"
    assert ends(monkeypatch, tmp_path, last) == []


def test_an_ended_start_has_no_claim_and_takes_it_from_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start(monkeypatch, tmp_path)
    restarts.end_claim(tmp_path)
    assert ends(monkeypatch, tmp_path, first) == [1], "nothing of it may write after its end"
    second = start(monkeypatch, tmp_path)
    monkeypatch.setenv("DRILLYARD_START", first)
    restarts.end_claim(tmp_path)
    assert ends(monkeypatch, tmp_path, second) == []


def test_log_lines_are_preceded_by_a_recent_look_at_the_claims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread looks in the background; a process that was suspended looks before it writes."""
    old = start(monkeypatch, tmp_path)
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    monkeypatch.setattr(threading.Thread, "start", lambda _: None)
    may_log = restarts.end_soon_without_claim(tmp_path)
    may_log()
    new = start(monkeypatch, tmp_path)
    monkeypatch.setenv("DRILLYARD_START", old)
    may_log()
    assert codes == [], "the last look is recent enough: the new start waits"
    later = time.monotonic() + restarts.CLAIM_SECONDS + 1
    monkeypatch.setattr("time.monotonic", lambda: later)
    may_log()
    assert codes == [1]
    assert ends(monkeypatch, tmp_path, new) == []


def test_the_thread_ends_a_start_that_writes_nothing(tmp_path: Path) -> None:
    """As one whose ranks all wait: it is gone before the new start writes."""
    program = f"""
import os, time
from pathlib import Path
from drillyard.supervise import scheduler_restarts as restarts
directory = Path({str(tmp_path)!r})
restarts.write_claim(directory)
restarts.CLAIM_SECONDS = 0.2
restarts.end_soon_without_claim(directory)
mine = os.environ["DRILLYARD_START"]
restarts.write_claim(directory)
os.environ["DRILLYARD_START"] = mine
time.sleep(60)
"""
    given = {"RESTARTED_BY": "jobset", "SUBMISSION": "uid", "LAUNCH_ROUND": "0"}
    environment = {**os.environ, **{f"DRILLYARD_{name}": text for name, text in given.items()}}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 1
    assert "has claimed the run directory" in done.stderr


def test_ranks_of_other_nodes_belong_to_the_start_of_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = start(monkeypatch, tmp_path)
    monkeypatch.delenv("DRILLYARD_START")
    assert restarts.reason_to_end(tmp_path) is None
    restarts.belong_to(old)
    assert restarts.reason_to_end(tmp_path) is None
    start(monkeypatch, tmp_path)
    restarts.belong_to(old)
    assert restarts.reason_to_end(tmp_path) is not None


@pytest.mark.parametrize("text", ["x" * 5000, "é" * 5000, "\U0001f600" * 5000])
def test_an_exit_record_fits_a_termination_message_as_whole_json(text: str) -> None:
    lines = [f"line {number} {text[:80]}" for number in range(200)]
    record = ExitRecord(3, 1, text, lines).as_json()
    assert len(record.encode()) <= RECORD_BYTES
    assert json.loads(record)["rank"] == 3
    short = json.loads(ExitRecord(3, 1, "why", lines).as_json())
    assert short["lines"][-1] == lines[-1]
    assert short["reason"] == "why"
