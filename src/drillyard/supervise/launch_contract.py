"""Contract between a launcher's agent and the command that it starts on a node: exit codes,
variables and files.

The agent (launch/agent) gives every command the variables in `GIVEN`. The command may write an exit
record; the agent may write next to it that the command is stopped because another node failed.
Shipped with the agents: standard library only, nothing newer than Python 3.9.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_NODE_LOST = 75
"""A node is lost: the scheduler may start the run again on others. sysexits.h: EX_TEMPFAIL."""
EXIT_CHECKPOINTED = 85
"""Stopped on request with all of its training saved: start it again."""
EXIT_NOT_SAVED = 86
"""Between a rank and its supervisor: stopped on request without a checkpoint of that moment. The
run's code is 1."""
EXIT_CANCELLED = 130

EXIT_RECORD = "DRILLYARD_EXIT_RECORD"
"""Path of the file in which the launcher expects the exit record."""
LAUNCH_ATTEMPT = "DRILLYARD_LAUNCH_ROUND"
"""The launch attempt: number of earlier starts of this submission's command by the launcher, 0, 1,
..."""
SUBMISSION = "DRILLYARD_SUBMISSION"
"""The launcher's name of this submission of the run, the same over all attempts and requeues; may
be empty."""
STOP_SECONDS = "DRILLYARD_STOP_SECONDS"
"""Seconds from the request to stop a node's command until it is killed, where the launcher has set
a limit."""
RESTARTED_BY = "DRILLYARD_RESTARTED_BY"
"""The scheduler that restarts all nodes of the run after an exit code that asks for it, where one
does: `jobset`."""
START = "DRILLYARD_START"
"""Id of one start of `drillyard train` where a scheduler restarts the run; its ranks get it."""
RECORD_BYTES = 4096
"""Most bytes of an exit record: a container's termination message (kubernetes.io, Container v1
core) has no more."""
GIVEN = (
    *("NODE_RANK", "NNODES", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT"),
    *(EXIT_RECORD, LAUNCH_ATTEMPT, SUBMISSION, STOP_SECONDS),
)


@dataclass(frozen=True)
class FailureElsewhere:
    """Reason for stopping a healthy node: another one failed or was lost."""

    reason: str
    rank: int | None
    exit_code: int | None


@dataclass(frozen=True)
class ExitRecord:
    """End of this node's ranks: the rank that failed first, if one did, its code, the reason and
    its last lines."""

    rank: int | None
    exit_code: int
    reason: str
    lines: Sequence[str] = ()
    lost_peer: bool = False
    """Whether it is only an effect of another rank's end, on whichever node."""
    final: bool = False
    """Whether the same command would end in the same way, so that it must not be started again."""
    step: int | None = None
    """Last step done in this attempt; None before the first, or where the failure belongs to
    none."""

    def write(self) -> None:
        """Write the record where a launcher has asked for it. Silent on a full disk."""
        path = os.environ.get(EXIT_RECORD)
        if path is not None:
            with contextlib.suppress(OSError):
                Path(path).write_text(self.as_json(), encoding="utf-8")

    def as_json(self) -> str:
        """The record as one line of JSON of at most `RECORD_BYTES`: of more, the first lines and
        the end of the reason are left out."""
        fields, lines = asdict(self), list(self.lines)
        while len(text := json.dumps({**fields, "lines": lines}) + "\n") > RECORD_BYTES and lines:
            del lines[0]
        if len(text) > RECORD_BYTES:
            # JSON writes a character in at most 12 bytes.
            text = (
                json.dumps({**fields, "reason": self.reason[: RECORD_BYTES // 16], "lines": []})
                + "\n"
            )
        return text


def is_launched() -> bool:
    """Whether a launcher has started this node, and starts it again when that helps."""
    return EXIT_RECORD in os.environ


def first_attempt() -> int:
    """The number of a supervisor's first attempt: that of the launch attempt, 0 without a
    launcher."""
    given = os.environ.get(LAUNCH_ATTEMPT, "")
    return int(given) if given.isdigit() else 0


def stop_seconds() -> float | None:
    """The time that a command which is asked to stop has for it; None where no launcher limits
    it."""
    given = os.environ.get(STOP_SECONDS, "")
    return float(given) if given.isdigit() else None


def submission() -> str | None:
    """The launcher's name for this submission; None where it has none, or there is no launcher."""
    return os.environ.get(SUBMISSION) or None


def write_failure_elsewhere(record: Path, failure: FailureElsewhere) -> None:
    """Record why the agent is about to signal a command. On a full disk only the signal comes."""
    with contextlib.suppress(OSError):
        _stop_note(record).write_text(json.dumps(asdict(failure)) + "\n", encoding="utf-8")


def failure_elsewhere() -> FailureElsewhere | None:
    """Read, in a signalled command, which failure of another node is the reason; None for a request
    to stop."""
    path = os.environ.get(EXIT_RECORD)
    try:
        note = json.loads(_stop_note(Path(path)).read_text(encoding="utf-8")) if path else {}
        return FailureElsewhere(str(note["reason"]), note["rank"], note["exit_code"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _stop_note(record: Path) -> Path:
    return record.with_name(f"{record.name}.stop")
