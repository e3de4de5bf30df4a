"""Report of how a node's command ended, made by its agent for the leader and kept in exits/; which
node failed first.

A command may write its end to the file DRILLYARD_EXIT_RECORD (launch_contract.py). For one that
does not, the last lines it printed are searched; where torchrun printed its report
(torch.distributed.elastic.multiprocessing.errors, "Root Cause (first observed failure)"), rank and
exit code come from that, as torchrun itself exits with 1 for all.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drillyard.supervise import cause
from drillyard.supervise.launch_contract import EXIT_CHECKPOINTED, EXIT_DONE

from .state_file import read_json_object

_ROOT_CAUSE = re.compile(
    r"Root Cause \(first observed failure\):.*?^[^\n]*\brank\s*: (\d+) \(local_rank: \d+\)\s*$"
    r".*?^[^\n]*\bexitcode\s*: (-?\d+)",
    re.DOTALL | re.MULTILINE,
)
_LINE = 2000
_FAILED_LINE = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: \d+\)")
_LAUNCHERS_WORDS = re.compile(
    r"failed \(exitcode: -?\d+\) local_rank: |Sending process \d+ closing signal SIG"
)


def torchrun_cause(text: str) -> tuple[int | None, int] | None:
    """Rank (None: not reported) and exit code (negative: a signal) of the first rank that torchrun
    saw failing, or None."""
    if blocks := list(_ROOT_CAUSE.finditer(text)):
        return int(blocks[-1][1]), int(blocks[-1][2])
    lines = list(_FAILED_LINE.finditer(text))
    return (None, int(lines[-1][1])) if lines else None


def merged_rank_output(printed: str, ranks: Sequence[str], first_rank: int) -> str:
    """Output of torchrun's ranks, then torchrun's own. The ranks are in order, from `first_rank`
    on, but the one that torchrun saw failing first comes last, where `last_lines` finds it."""
    seen = torchrun_cause(printed)
    order = sorted(
        range(len(ranks)), key=lambda local: seen is not None and seen[0] == first_rank + local
    )
    return (
        "".join(
            text if text.endswith("\n") else f"{text}\n"
            for local in order
            if (text := ranks[local])
        )
        + printed
    )


def last_lines(text: str) -> list[str]:
    """Select the lines that best explain a command's end: its ranks', where torchrun's own lines
    follow them."""
    found = _LAUNCHERS_WORDS.search(text)
    before = text[: text.rfind("\n", 0, found.start()) + 1] if found else text
    return cause.last_words(before if before.strip() else text)


def make_report(
    node: int,
    host: str,
    returncode: int,
    record: dict[str, Any],
    printed: str,
    asked: bool,
    why: str | None,
) -> dict[str, Any]:
    """Make the report of a node's command for the leader and exits/. `messages.parse_report` checks
    the types.

    `status` is the code that decides: a rank's own where it is known, since launchers turn every
    code into 1. `record` is the command's own exit record (empty without one); `why` an end that
    the agent caused, in words.
    """
    seen = torchrun_cause(printed) if returncode != 0 else None
    status, rank, step = cause.exit_status(returncode), record.get("rank"), record.get("step")
    if returncode != 0 and isinstance(record.get("exit_code"), int) and record["exit_code"] != 0:
        status = cause.exit_status(record["exit_code"])
    elif seen is not None and status == 1:
        rank, status = seen[0], cause.exit_status(seen[1])
    words = record.get("lines")
    words = words if isinstance(words, list) and words else last_lines(printed)
    lines = [str(line)[:_LINE] for line in words[:20]] if returncode != 0 else []
    ended = 128 - status if status > 128 else status
    reason = why or record.get("reason") or cause.exit_reason(rank, ended, lines)
    return {
        "node": node,
        "host": host,
        "rank": rank if isinstance(rank, int) else None,
        "exit_code": cause.exit_status(returncode),
        "status": status,
        "reason": str(reason)[:_LINE],
        "lines": lines,
        "lost_peer": bool(
            record.get("lost_peer", not record and why is None and cause.speaks_of_lost_peer(lines))
        ),
        "asked": asked,
        "final": record.get("final") is True,
        "step": step if isinstance(step, int) else None,
        "knows_step": "step" in record and why is None,
        "has_record": bool(record),
        "ended_at": time.time(),
    }


def first_cause(reports: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The report of the node that failed first; `reports` are in the order in which the leader
    received them.

    Failures that only report a lost peer are effects. A node that was sent a signal meanwhile may
    still have died of an error of its own, where its code is no signal's, or its command wrote an
    exit record: a supervisor takes a moment to end its ranks, and the report of an effect on
    another node may be quicker.
    """
    failed = [each for each in reports if each["status"] != 0]
    # `told` in the reports of an earlier version, whose launch directories a newer one reads.
    own = (
        each for each in failed if each["status"] < 128 or each.get("has_record", each.get("told"))
    )
    suspects = [*(each for each in failed if not each["asked"]), *own]
    return min(suspects, key=lambda each: bool(each["lost_peer"]), default=None)


def attempt_failure(launch_directory: Path, state: dict[str, Any]) -> dict[str, Any] | None:
    """Report in exits/ which explains why the current attempt of state.json failed: that of the
    node that failed first. None where no node of it has ended with an error."""
    epoch, attempt = state.get("epoch"), state.get("round")
    if not isinstance(epoch, int) or not isinstance(attempt, int):
        return None
    paths = (launch_directory / "exits").glob(f"{epoch:04d}-{attempt:04d}.node-*.json")
    reports = [read_json_object(path) for path in paths if not path.name.endswith(".record.json")]
    whole = [
        each
        for each in reports
        if {"asked", "lost_peer"} <= each.keys()
        and isinstance(each.get("status"), int)
        and type(each.get("ended_at")) in (int, float)
    ]
    return first_cause(sorted(whole, key=lambda each: each["ended_at"]))


def failure_entry(report: dict[str, Any]) -> dict[str, Any]:
    """The `failure` of state.json, from the report of the node that failed first."""
    return {
        "reason": report["reason"],
        "rank": report["rank"],
        "node": report["host"],
        "node_rank": report["node"],
        "exit_code": report["status"],
        "lines": report["lines"],
    }


def reason_with_node(report: dict[str, Any], nodes: int) -> str:
    """The reason of a report, with its node where there are several."""
    return (
        str(report["reason"])
        if nodes == 1
        else f"node {report['node']} ({report['host']}): {report['reason']}"
    )


def clean_exit_text(status: int) -> str:
    """Describe an exit code after which the other nodes get time to finish; empty for a failure."""
    return cause.describe_exit(status) if status in (EXIT_DONE, EXIT_CHECKPOINTED) else ""
