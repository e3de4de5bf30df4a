"""What a launcher's agent and the command that it starts on a node tell each other, in the environment and in files.

The agent (launch/agent) gives every command the variables in `GIVEN`, and may write beside the exit record why it stops
a command that is not at fault itself; the command may tell in the record how it ended. Both sides use this file, and
the agent takes it along: standard library only, and nothing newer than Python 3.9.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

EXIT_RECORD = "DRILLYARD_EXIT_RECORD"
"""Names the file in which the launcher wants to read how the ranks ended."""
ROUND = "DRILLYARD_LAUNCH_ROUND"
"""How often the launcher has started the command of this submission before: 0, 1, ..."""
SUBMISSION = "DRILLYARD_SUBMISSION"
"""What the launcher calls this submission of the run: the same over all rounds, requeues included; may be empty."""
GIVEN = (
    "NODE_RANK",
    "NNODES",
    "NPROC_PER_NODE",
    "MASTER_ADDR",
    "MASTER_PORT",
    EXIT_RECORD,
    ROUND,
    SUBMISSION,
)


@dataclass(frozen=True)
class FailureElsewhere:
    """Why a healthy node is stopped: another one failed or was lost."""

    reason: str
    rank: int | None
    exit_code: int | None


def is_launched() -> bool:
    """Whether a launcher has started this node, and starts it again when that helps."""
    return EXIT_RECORD in os.environ


def first_round() -> int:
    """The number of the first round of a supervisor's ranks: 0, or the launcher's own where there is one."""
    told = os.environ.get(ROUND, "")
    return int(told) if told.isdigit() else 0


def submission() -> str | None:
    """The launcher's name for this submission; None where it has none, or there is no launcher."""
    return os.environ.get(SUBMISSION) or None


def record_exit(
    *,
    rank: int | None,
    exit_code: int,
    reason: str,
    lines: Sequence[str] = (),
    lost_peer: bool = False,
    final: bool = False,
) -> None:
    """Tell the launcher, where one has asked for it, how this node's ranks ended. A full disk is its own message.

    `final`: the same command would end in the same way again, so it must not be started again.
    """
    path = os.environ.get(EXIT_RECORD)
    if path is None:
        return
    told = {
        "rank": rank,
        "exit_code": exit_code,
        "reason": reason,
        "lines": list(lines),
        "lost_peer": lost_peer,
        "final": final,
    }
    with contextlib.suppress(OSError):
        Path(path).write_text(json.dumps(told) + "\n", encoding="utf-8")


def tell_failure_elsewhere(record: Path, failure: FailureElsewhere) -> None:
    """Of the agent, before it signals the command whose exit record that is. On a full disk only the signal tells."""
    with contextlib.suppress(OSError):
        _note(record).write_text(json.dumps(asdict(failure)) + "\n", encoding="utf-8")


def failure_elsewhere() -> FailureElsewhere | None:
    """Of the command, when it was signalled: whether another node's failure is why; None for a request to stop."""
    path = os.environ.get(EXIT_RECORD)
    try:
        told = json.loads(_note(Path(path)).read_text(encoding="utf-8")) if path else {}
        return FailureElsewhere(str(told["reason"]), told["rank"], told["exit_code"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _note(record: Path) -> Path:
    return record.with_name(f"{record.name}.stop")
