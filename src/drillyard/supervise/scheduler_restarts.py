"""What a scheduler that restarts a run, as JobSet does, cannot know: said by the exit code and by a
claim on the run.

JobSet restarts all pods after 85 without counting it, and counts any other failure but 2. So a
second attempt in a row that ends with 85 and saved nothing leaves with 1, as restart_policy.py
counts it, and a counted restart pauses before its command starts. Every node decides from the run
directory, and so alike.

A pod of a lost node may still run when its replacement starts, and on a bucket no lock holds: the
first node of every attempt writes its claim, and rank 0 of an earlier attempt ends itself before it
writes a checkpoint.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drillyard.guarded_files import read_json
from drillyard.safe_files import make_directory, replace_file
from drillyard.supervise import launch_contract
from drillyard.supervise.launch_contract import EXIT_CHECKPOINTED, EXIT_FAILED, RESTARTED_BY
from drillyard.supervise.restart_policy import RestartCounts, pause_seconds
from drillyard.telemetry.events import read_events

CLAIM_FILE = "launch/claim.json"
_MANIFESTS = "checkpoints/*/manifest.json"


@dataclass(frozen=True)
class SchedulerRestarts:
    """An attempt of a run that a scheduler restarts; made before its command starts."""

    directory: Path
    unsaved_before: bool
    """Whether the attempt before ended with 85 and saved nothing."""
    pause_seconds: float
    """Pause before the command starts, after a failure that counted."""
    checkpoints: frozenset[Path]

    def exit_code(self, code: int) -> int:
        """The code with which this node leaves: 1 for the second 85 in a row without a newer
        checkpoint."""
        if (
            code == EXIT_CHECKPOINTED
            and self.unsaved_before
            and not _checkpoints(self.directory) - self.checkpoints
        ):
            return EXIT_FAILED
        return code


def scheduler_restarts(directory: Path) -> SchedulerRestarts | None:
    """This attempt as its run directory shows the ones before; None where no scheduler restarts the
    run."""
    submission = launch_contract.submission()
    if RESTARTED_BY not in os.environ or submission is None:
        return None
    attempts = _attempts(read_events(directory), submission, launch_contract.first_attempt())
    failures = sum(_failed(attempt) for attempt in attempts)
    last = attempts[-1] if attempts else []
    pause = pause_seconds(RestartCounts(failures=failures)) if failures and _failed(last) else 0.0
    return SchedulerRestarts(directory, _ended_unsaved(last), pause, _checkpoints(directory))


def write_claim(directory: Path) -> None:
    """Claim the run directory for this attempt. An attempt of the same submission that is later
    keeps its claim."""
    if RESTARTED_BY not in os.environ:
        return
    mine, present = _own_claim(), _read_claim(directory)
    if (
        present.get("submission") == mine["submission"]
        and int(present.get("attempt", 0)) > mine["attempt"]
    ):
        return
    path = directory / CLAIM_FILE
    make_directory(path.parent)
    replace_file(path, f"{json.dumps(mine)}\n".encode())


def end_without_claim(directory: Path) -> Callable[[], None]:
    """A function that ends this process where another attempt has claimed the run; it does nothing
    without a scheduler that restarts the run."""

    def check() -> None:
        present = _read_claim(directory)
        if present and present != _own_claim():
            sys.stderr.write(
                f"error: attempt {present.get('attempt')} of submission {present.get('submission')}"
                f" has the run directory {directory} now; this earlier one ends and writes"
                " nothing\n\n"
            )
            sys.stderr.flush()
            os._exit(EXIT_FAILED)

    return check if RESTARTED_BY in os.environ else lambda: None


def _own_claim() -> dict[str, Any]:
    return {
        "submission": launch_contract.submission() or "",
        "attempt": launch_contract.first_attempt(),
    }


def _read_claim(directory: Path) -> dict[str, Any]:
    try:
        found = read_json(directory / CLAIM_FILE)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _attempts(
    events: Sequence[dict[str, Any]], submission: str, before: int
) -> list[list[dict[str, Any]]]:
    """The events of each attempt of the submission with a number below `before`, in order."""
    found: list[list[dict[str, Any]]] = []
    is_own = False
    for event in events:
        if event["event"] == "run_start":
            is_own = event.get("launch") == submission and int(event.get("round") or 0) < before
            if is_own:
                found.append([])
        if is_own:
            found[-1].append(event)
    return found


def _failed(attempt: Sequence[dict[str, Any]]) -> bool:
    return any(event["event"] == "end" and event.get("status") == "failed" for event in attempt)


def _ended_unsaved(attempt: Sequence[dict[str, Any]]) -> bool:
    saved = any(event["event"] == "checkpoint" for event in attempt)
    return not saved and any(
        event["event"] == "end" and event.get("exit_code") == EXIT_CHECKPOINTED for event in attempt
    )


def _checkpoints(directory: Path) -> frozenset[Path]:
    return frozenset(directory.glob(_MANIFESTS))
