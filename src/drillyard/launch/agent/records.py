"""What a run's agents leave on disk about it: state.json (the leader's) and exits/ (each node's), and who failed first.

state.json is replaced as a whole, so readers on any host see one state or the next. A disk that takes nothing ends no
run: the newest state waits in memory and is written when it can be.

A node's command may tell how it ended in the file DRILLYARD_EXIT_RECORD. For a command that does not, the last lines it
printed are looked at; where torchrun printed its report (torch.distributed.elastic.multiprocessing.errors, "Root Cause
(first observed failure)"), rank and exit code are taken from it, as torchrun itself exits with 1 for all of them.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .output_pump import stamp
from .shared_modules import cause

_ROOT_CAUSE = re.compile(
    r"Root Cause \(first observed failure\):.*?^[^\n]*\brank\s*: (\d+) \(local_rank: \d+\)\s*$"
    r".*?^[^\n]*\bexitcode\s*: (-?\d+)",
    re.DOTALL | re.MULTILINE,
)
_LINE = 2000
_FAILED_LINE = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: \d+\)")
_LAUNCHERS_WORDS = re.compile(r"failed \(exitcode: -?\d+\) local_rank: |Sending process \d+ closing signal SIG")


OVER = ("succeeded", "failed", "cancelled")
"""States after which nothing more happens by itself."""


def torchrun_cause(text: str) -> tuple[int | None, int] | None:
    """Rank (None: not told) and exit code (negative: a signal) of the rank that torchrun saw failing first, or None."""
    blocks = list(_ROOT_CAUSE.finditer(text))
    if blocks:
        return int(blocks[-1][1]), int(blocks[-1][2])
    lines = list(_FAILED_LINE.finditer(text))
    return (None, int(lines[-1][1])) if lines else None


def merged_rank_output(printed: str, ranks: Sequence[str], first_rank: int) -> str:
    """What torchrun's ranks printed, then what it printed itself. Its ranks are in order, from `first_rank` on, but the
    one that it saw failing first comes last: who looks for the cause finds that one's words nearest."""
    seen = torchrun_cause(printed)
    order = sorted(range(len(ranks)), key=lambda local: seen is not None and seen[0] == first_rank + local)
    return "".join(text if text.endswith("\n") else f"{text}\n" for local in order if (text := ranks[local])) + printed


def last_lines(text: str, limit: int = 6) -> list[str]:
    """The lines that say best why a command ended: those of its ranks, where torchrun's own words follow them."""
    found = _LAUNCHERS_WORDS.search(text)
    before = text[: text.rfind("\n", 0, found.start()) + 1] if found else text
    return cause.last_words(before if before.strip() else text, limit)


def make_report(
    node: int, host: str, returncode: int, told: dict[str, Any], printed: str, asked: bool, why: str | None
) -> dict[str, Any]:
    """How a node's command ended, as the leader and exits/ get it.

    `status` is the code that decides: a rank's own where it is known, since launchers turn every code into 1.
    `told` is the command's own record (empty without one); `why` an end that the agent caused, in words.
    """
    seen = torchrun_cause(printed) if returncode != 0 else None
    status, rank = cause.exit_status(returncode), told.get("rank")
    if returncode != 0 and isinstance(told.get("exit_code"), int) and told["exit_code"] != 0:
        status = cause.exit_status(told["exit_code"])
    elif seen is not None and status == 1:
        rank, status = seen[0], cause.exit_status(seen[1])
    words = told.get("lines")
    words = words if isinstance(words, list) and words else last_lines(printed)
    lines = [str(line)[:_LINE] for line in words[:20]] if returncode != 0 else []
    reason = why or told.get("reason") or _reason(status, rank, lines)
    return {
        "node": node,
        "host": host,
        "rank": rank if isinstance(rank, int) else None,
        "exit_code": cause.exit_status(returncode),
        "status": status,
        "reason": str(reason)[:_LINE],
        "lines": lines,
        "lost_peer": bool(told.get("lost_peer", not told and why is None and cause.speaks_of_lost_peer(lines))),
        "asked": asked,
        "final": told.get("final") is True,
        "told": bool(told),
        "ended_at": time.time(),
    }


def _reason(status: int, rank: int | None, lines: list[str]) -> str:
    who = "" if rank is None else f"rank {rank}: "
    shown = cause.describe_exit(128 - status if status > 128 else status)
    # What a killed process printed before was about its work.
    error = "" if cause.was_killed(status) else cause.error_line(lines)
    return f"{who}{shown}" + (f"; {error}" if error else "")


def first_cause(reports: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The report of the node that failed first; `reports` are in the order in which the leader heard them.

    Failures that only tell of a lost peer are effects. A node that was told to stop meanwhile may still have died of an
    error of its own, when its code is no signal's, or when its command told so itself: a supervisor takes a moment to
    end its ranks, and the news of an effect on another node may be quicker.
    """
    failed = [each for each in reports if each["status"] != 0]
    of_their_own = [each for each in failed if not each["asked"]]
    suspects = of_their_own + [each for each in failed if each["asked"] and (each["status"] < 128 or each.get("told"))]
    faults = [each for each in suspects if not each["lost_peer"]]
    return next(iter(faults or suspects), None)


def attempt_failure(launch_directory: Path, state: dict[str, Any]) -> dict[str, Any] | None:
    """Why the round that state.json calls the current one failed, by the reports of its nodes in exits/: the report of
    the node that failed first. None where no node of that round has ended with an error."""
    epoch, number = state.get("epoch"), state.get("round")
    if not isinstance(epoch, int) or not isinstance(number, int):
        return None
    paths = (launch_directory / "exits").glob(f"{epoch:04d}-{number:04d}.node-*.json")
    reports = [read_json_object(path) for path in paths if not path.name.endswith(".told.json")]
    whole = [
        each
        for each in reports
        if {"asked", "lost_peer"} <= each.keys()
        and isinstance(each.get("status"), int)
        and isinstance(each.get("ended_at"), int | float)
    ]
    return first_cause(sorted(whole, key=lambda each: each["ended_at"]))


def read_json_object(path: Path) -> dict[str, Any]:
    """What a command told about its end; nothing where it told nothing."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


def read_state(launch_directory: Path) -> dict[str, Any]:
    """state.json, or nothing where there is none yet. Raises ValueError for one that is no state."""
    try:
        text = (launch_directory / "state.json").read_text(encoding="utf-8")
    except OSError:
        return {}
    try:
        state = json.loads(text)
    except RecursionError:
        state = None
    if not isinstance(state, dict):
        raise ValueError(f"{launch_directory / 'state.json'}: not a state")
    return state


def last_state(launch_directory: Path) -> dict[str, Any]:
    """The state for those who go on from it: a file that cannot be read (a host lost power) is as good as none."""
    try:
        return read_state(launch_directory)
    except ValueError:
        return {}


def read_secrets(launch_directory: Path) -> dict[str, str]:
    """secrets.json: the values of the configs' `${env:NAME}`, which submission put there; nothing without it."""
    told = read_json_object(launch_directory / "secrets.json")
    return {str(name): str(value) for name, value in told.items()}


def forget_secrets(launch_directory: Path) -> None:
    """Remove secrets.json: nothing is started from this directory until a submission sends the values again."""
    with contextlib.suppress(OSError):
        (launch_directory / "secrets.json").unlink()


class StateFile:
    """state.json as its leader writes it: fields are changed in memory and written at once, or when the disk can.

    On a full disk it is written over where it lies, cut to the blocks that the file has; blanks make up for a longer
    one before. A reader may see half of one write then, which is better than no news until there is room.

    Nothing is written once `superseded`: a leader that was frozen has no say any more when another has begun.
    """

    def __init__(
        self, launch_directory: Path, fields: dict[str, Any], superseded: Callable[[], bool] = lambda: False
    ) -> None:
        self._path = launch_directory / "state.json"
        self._superseded = superseded
        self.fields = fields
        self._written = False

    def enter(self, state: str, reason: str | None = None, **fields: Any) -> None:
        """Come into a state, or tell another reason for it."""
        if state != self.fields.get("state"):
            self.fields["since"] = time.time()
        self.fields.update(fields, state=state, reason=reason)
        self._written = False
        if state in OVER and not self._superseded():
            # Before others can see that the run is over, and send the secrets of its next start.
            forget_secrets(self._path.parent)
        self.save()

    def save(self) -> None:
        """Write what is not written yet."""
        if self._written or self._superseded():
            return
        text = json.dumps(self.fields, indent=2) + "\n"
        with contextlib.suppress(OSError):
            try:
                replace_file(self._path, text)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                _write_over(self._path, self.fields)
            self._written = True


def _write_over(path: Path, fields: dict[str, Any]) -> None:
    with open(path, "r+b", buffering=0) as file:
        status = os.fstat(file.fileno())
        # stat(2) counts allocated blocks in units of 512 bytes.
        data = _fitting(fields, max(status.st_size, 512 * status.st_blocks)).ljust(status.st_size)
        if file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _fitting(fields: dict[str, Any], size: int) -> bytes:
    """The state as JSON in at most `size` bytes, where that can be reached by cutting what is said of a failure."""
    for most in (None, 1000, 200, 50):
        text = json.dumps(fields if most is None else _cut(fields, most), indent=2) + "\n"
        if len(text.encode()) <= size:
            break
    return text.encode()


def _cut(fields: dict[str, Any], most: int) -> dict[str, Any]:
    """The same without a failure's last lines, and with reasons of at most `most` characters."""
    cut = {**fields, "reason": fields["reason"] and fields["reason"][:most]}
    if isinstance(failure := fields.get("failure"), dict):
        cut["failure"] = {**failure, "reason": str(failure.get("reason"))[:most], "lines": []}
    return cut


def replace_file(path: Path, text: str) -> None:
    """Put a whole file in the place of another. Raises OSError; the old one stays then."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def summary_completed(run_directory: Path) -> bool:
    """Whether the run's own summary says that it is complete."""
    try:
        summary = json.loads((run_directory / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(summary, dict) and summary.get("status") == "completed"


def newest_checkpoint(pattern: str | None) -> tuple[float, str] | None:
    """What changes when a checkpoint is added: time and path of the newest match; None: nothing is there."""
    if pattern is None:
        return None
    newest: tuple[float, str] | None = None
    for path in glob.glob(pattern):
        with contextlib.suppress(OSError):
            found = os.stat(path).st_mtime, path
            newest = found if newest is None else max(newest, found)
    return newest


def stamped_line(text: str) -> bytes:
    """A line of a node's log, as of now."""
    return stamp(time.time()) + text.encode(errors="replace") + b"\n"
