"""What a scheduler that restarts a run, as JobSet does, cannot know: said by the exit code and by a
claim on the run.

JobSet restarts all pods after 85 without counting it, ends the run after 2, 126 and 127, and counts
any other failure. So a second attempt in a row that ends with 85 and saved nothing leaves with 1,
as restart_policy.py counts it, and a counted restart pauses before its command starts. Every node
decides from the run directory, and so alike.

A pod of a lost node, or of a run that Kueue has preempted, may still run when its replacement
starts, and on a bucket no lock holds. So the first node of every start makes a claim: a new file of
the next number, created exclusively and never written again, as mounts of buckets show an
overwritten file late; then it deletes the earlier ones. A start may write while its own claim is
there and the newest. A preemption changes neither the submission nor the attempt, so a start is
known by the number of its claim and a random id, which its ranks get as `START`.

Checkpoints, exports and what ends a run are preceded by a look at the claims; log lines, which come
at each step, by one of at most `CLAIM_SECONDS` ago. So after its claim a start waits that long
before it writes anything else, unless the start before has ended in order and left a claim that
says so. What is left is a process that is suspended between a look and its write.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import secrets
import sys
import threading
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
CLAIM_SECONDS = 5.0
"""How old the look at the claims may be that precedes a log line."""
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
    """Claim the run directory for this start, remove the claims of earlier ones, and wait until
    one that may still run has noticed. Raises SystemExit where a later attempt of the same
    submission has the claim, or where no claim can be made.
    """
    if RESTARTED_BY not in os.environ:
        return
    claims, mine = directory / CLAIMS, _own_claim()
    try:
        claims.mkdir(parents=True, exist_ok=True)
        before = _make_claim(directory, mine)
    except (OSError, UnsafeFileError) as error:
        said = describe_os_error(error) if isinstance(error, OSError) else str(error)
        sys.stderr.write(f"error: {claims}: no claim can be made: {said}\n\n")
        raise SystemExit(EXIT_FAILED) from None
    if before is not None and not before.get("ended"):
        time.sleep(CLAIM_SECONDS)


def end_claim(directory: Path) -> None:
    """Say that this start has ended and writes nothing any more, so that the next one need not
    wait. Nothing where another start has the run; silent where it cannot be said."""
    number = _own_number()
    if not number:
        return
    claims = directory / CLAIMS
    with contextlib.suppress(OSError):
        if max(_numbers(claims), default=0) == number and _created(
            claims / f"{number + 1:04d}", f"{json.dumps({**_own_claim(), 'ended': True})}\n"
        ):
            (claims / f"{number:04d}").unlink(missing_ok=True)


def _make_claim(directory: Path, mine: dict[str, Any]) -> dict[str, Any] | None:
    """Make the newest claim and remove the others; returns the one that was the newest, None
    without any. Raises SystemExit where that is of a later attempt, and OSError."""
    claims = directory / CLAIMS
    while True:
        newest = max(_numbers(claims), default=0)
        before = _content(claims, newest)
        is_later = before.get("submission") == mine["submission"] and (
            _attempt(before) > _attempt(mine)
        )
        if is_later:
            sys.stderr.write(f"error: {_superseded(directory, before)}\n\n")
            raise SystemExit(EXIT_FAILED)
        os.environ[START] = f"{newest + 1:04d}-{secrets.token_hex(8)}"
        claim = {"start": os.environ[START], **mine}
        if _created(claims / f"{newest + 1:04d}", f"{json.dumps(claim)}\n"):
            break
    # Only what this start has superseded; the newest stays, so no number is used twice.
    for number in _numbers(claims):
        if number <= newest:
            (claims / f"{number:04d}").unlink(missing_ok=True)
    return before if newest else None


def end_without_claim(directory: Path) -> Callable[[], None]:
    """A function that ends this process where the run directory has not this start's claim, or
    where that cannot be read; it does nothing without a scheduler that restarts the run."""

    def check() -> None:
        if (reason := reason_to_end(directory)) is not None:
            sys.stderr.write(f"error: {reason}\n\n")
            sys.stderr.flush()
            os._exit(EXIT_FAILED)

    return check


def end_soon_without_claim(directory: Path) -> Callable[[], None]:
    """The same for writes that come often: a thread looks at the claims, and the function itself
    only where the last look is older than `CLAIM_SECONDS`, as in a process that was suspended."""
    if _own_number() is None:
        return lambda: None
    check = end_without_claim(directory)
    looked_at = -math.inf

    def look() -> None:
        nonlocal looked_at
        begun = time.monotonic()
        check()
        looked_at = begun

    def keep_looking() -> None:
        while True:
            time.sleep(CLAIM_SECONDS / 2)
            look()

    threading.Thread(target=keep_looking, name="claim", daemon=True).start()
    return lambda: look() if time.monotonic() - looked_at > CLAIM_SECONDS else None


def reason_to_end(directory: Path) -> str | None:
    """Why this start may no longer write to the run directory; None where it may, or where no
    scheduler restarts the run."""
    if _own_number() is None:
        return None
    claims = directory / CLAIMS
    for pause in (*_PAUSES, None):
        try:
            present = _newest_claim(claims)
        except OSError as error:
            if pause is None:
                said = f"{claims}: cannot be read: {describe_os_error(error)}"
                return f"{said}; this start ends and writes nothing"
            time.sleep(pause)
        else:
            if present.get("start") == os.environ[START]:
                return None
            return _superseded(directory, present)
    raise AssertionError("unreachable")


def own_start() -> str:
    """The id of this start, for ranks on other nodes than its first; empty without a scheduler
    that restarts the run."""
    return os.environ.get(START, "")


def belong_to(start: str) -> None:
    """Be a part of a start, whose claim was made on its first node."""
    if start:
        os.environ[START] = start


def _own_number() -> int | None:
    """The number of this start's claim, 0 for none that could be; None without a scheduler that
    restarts the run."""
    if RESTARTED_BY not in os.environ or not own_start():
        return None
    number = own_start().partition("-")[0]
    return int(number) if number.isdigit() else 0


def _own_claim() -> dict[str, Any]:
    return {
        "submission": launch_contract.submission() or "",
        "attempt": launch_contract.first_attempt(),
        "host": node_name(),
    }


def _superseded(directory: Path, present: dict[str, Any]) -> str:
    who = f"attempt {present.get('attempt')} on {present.get('host')}" if present else "another"
    return f"{who} has claimed the run directory {directory}; this start ends and writes nothing"


def _newest_claim(claims: Path) -> dict[str, Any]:
    """The newest claim; empty where its content is not one. Raises OSError, also without any.

    An NFS client may show an old listing, but opens a file only where it still is: that of this
    start is read, and is deleted once there is a newer one.
    """
    return _content(claims, max([_own_number() or 0, *_numbers(claims)]))


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
