"""What a scheduler that restarts a run, as JobSet does, cannot know: said by the exit code and by a
claim on the run.

JobSet restarts all pods after 85 without counting it, and counts any other failure but 2. So a
second attempt in a row that ends with 85 and saved nothing leaves with 1, as restart_policy.py
counts it, and a counted restart pauses before its command starts. Every node decides from the run
directory, and so alike.

A pod of a lost node, or of a run that Kueue has preempted, may still run when its replacement
starts, and on a bucket no lock holds. So the first node of every start makes a claim: a new file of
the next number, created exclusively and never written again, as mounts of buckets show an
overwritten file late. The newest claim is the run's, and rank 0 of any other start ends itself
before it writes or deletes a checkpoint. A preemption changes neither the submission nor the
attempt, so a start is known by an id of its own, which its ranks get as `START`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drillyard.errors import UnsafeFileError
from drillyard.guarded_files import read_json
from drillyard.safe_files import NO_ROOM, describe_os_error
from drillyard.supervise import launch_contract
from drillyard.supervise.launch_contract import EXIT_CHECKPOINTED, EXIT_FAILED, RESTARTED_BY, START
from drillyard.supervise.process_identity import node_name
from drillyard.supervise.restart_policy import RestartCounts, pause_seconds
from drillyard.telemetry.events import read_events

CLAIMS = "launch/claims"
"""Directory of the claims: files 0001, 0002, ..."""
_CLAIM = re.compile(r"\d{4,}")
_PAUSES = (0.2, 1.0, 5.0)
"""Seconds before a claim that could not be read is read again."""
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
    """Claim the run directory for this start, and remove the claims of earlier ones. Raises
    SystemExit where a later attempt of the same submission has it, or where no claim can be made.
    """
    if RESTARTED_BY not in os.environ:
        return
    os.environ[START] = secrets.token_hex(8)
    claims, mine = directory / CLAIMS, _own_claim()
    try:
        claims.mkdir(parents=True, exist_ok=True)
        while True:
            newest = max(_numbers(claims), default=0)
            present = _content(claims, newest)
            if present.get("submission") == mine["submission"] and _attempt(present) > _attempt(
                mine
            ):
                _say_ended(directory, present)
                raise SystemExit(EXIT_FAILED)
            if _created(claims / f"{newest + 1:04d}", f"{json.dumps(mine)}\n"):
                break
        # Only what this start has superseded; the newest stays, so no number is used twice.
        for number in _numbers(claims):
            if number <= newest:
                (claims / f"{number:04d}").unlink(missing_ok=True)
    except OSError as error:
        sys.stderr.write(f"error: {claims}: no claim can be made: {describe_os_error(error)}\n\n")
        raise SystemExit(EXIT_FAILED) from None


def end_without_claim(directory: Path) -> Callable[[], None]:
    """A function that ends this process where the run directory has not this start's claim, or
    where that cannot be read; it does nothing without a scheduler that restarts the run."""

    def check() -> None:
        try:
            present = _newest_claim(directory / CLAIMS)
        except OSError as error:
            words = f"error: {directory / CLAIMS}: cannot be read: {describe_os_error(error)}"
            sys.stderr.write(f"{words}; this start ends and writes nothing\n\n")
        else:
            if present.get("start") == os.environ.get(START):
                return
            _say_ended(directory, present)
        sys.stderr.flush()
        os._exit(EXIT_FAILED)

    return check if RESTARTED_BY in os.environ else lambda: None


def _own_claim() -> dict[str, Any]:
    return {
        "start": os.environ[START],
        "submission": launch_contract.submission() or "",
        "attempt": launch_contract.first_attempt(),
        "host": node_name(),
    }


def _say_ended(directory: Path, present: dict[str, Any]) -> None:
    who = f"attempt {present.get('attempt')} on {present.get('host')}" if present else "another"
    sys.stderr.write(
        f"error: {who} has claimed the run directory {directory}; this start ends and writes"
        " nothing\n\n"
    )


def _newest_claim(claims: Path) -> dict[str, Any]:
    """The newest claim; empty where its content is not one. Raises OSError, also without any."""
    for pause in (*_PAUSES, None):
        try:
            # An NFS client reads a directory again once it has changed something in it.
            with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=claims):
                pass
            numbers = _numbers(claims)
            if not numbers:
                raise FileNotFoundError(errno.ENOENT, "no claim is left", str(claims))
            return _content(claims, max(numbers))
        except OSError:
            if pause is None:
                raise
            time.sleep(pause)
    raise AssertionError("unreachable")


def _numbers(claims: Path) -> list[int]:
    return [int(name) for name in os.listdir(claims) if _CLAIM.fullmatch(name)]


def _content(claims: Path, number: int) -> dict[str, Any]:
    """A claim's content; empty where it is not an object, or for number 0. Raises OSError."""
    if not number:
        return {}
    try:
        found = read_json(claims / f"{number:04d}")
    except UnsafeFileError as error:
        raise OSError(errno.EIO, str(error)) from None
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _attempt(claim: dict[str, Any]) -> int:
    found = claim.get("attempt")
    return found if isinstance(found, int) else 0


def _created(path: Path, text: str) -> bool:
    """Create a file, complete as soon as it is there; False where another start has. Raises
    OSError."""
    draft = path.with_name(f"draft-{os.environ[START]}")
    try:
        draft.write_text(text, encoding="utf-8")
        try:
            os.link(draft, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno in NO_ROOM:
                raise
            # A mounted bucket has no links. A second creator fails there when it closes the file.
            try:
                with path.open("x", encoding="utf-8") as file:
                    file.write(text)
            except OSError as other:
                if other.errno not in (errno.EEXIST, errno.ESTALE):
                    raise
                return False
        return True
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


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
