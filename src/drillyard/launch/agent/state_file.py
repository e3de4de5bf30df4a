"""Shared files of a run's agents: state.json, which the leader writes, the file of a cancelled run,
secrets.json.

state.json is replaced as a whole, so readers on any host see one state or the next. A full disk
does not end the run: the newest state waits in memory and is written once it can be.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from drillyard.supervise.launch_contract import (
    EXIT_CANCELLED,
    EXIT_CHECKPOINTED,
    EXIT_DONE,
    EXIT_NODE_LOST,
    EXIT_USER_ERROR,
)
from drillyard.supervise.process_identity import Process, process_of

if TYPE_CHECKING:
    from drillyard.supervise.restart_policy import RestartDecision

OVER = ("succeeded", "failed", "cancelled")
"""States of a run that has ended."""
ACTIVE = ("starting", "running", "restarting")
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("submission", "reason", "run_directory", "asked", "node"), (str,)),
    **dict.fromkeys(("exclude", "last_failure"), (str,)),
    **dict.fromkeys(("nodes", "round", "failures", "exit_code", "rank", "epoch", "code"), (int,)),
    **dict.fromkeys(("unsaved_stops", "failed_starts", "repeats"), (int,)),
    **dict.fromkeys(("since", "started_at", "ended_at", "at"), (int, float)),
    **dict.fromkeys(("hosts", "lines"), (list,)),
    **dict.fromkeys(("losses", "failure"), (dict,)),
}
"""Of the fields of a state, and of a failure in it, that somebody reads. Lists are of strings."""
_MOST = 1e10
"""No time or count is larger."""


def failure_for(reason: str, known: dict[str, Any] | None) -> dict[str, Any]:
    """The `failure` of state.json for another reason than that of the `known` one, if there is
    one."""
    unknown = dict.fromkeys(("rank", "node", "node_rank", "exit_code"))
    return {**unknown, "lines": [], **(known or {}), "reason": reason}


def final_fields(
    decision: RestartDecision, cancelled: bool, failure: dict[str, Any] | None
) -> dict[str, Any]:
    """The last fields of state.json, after `decision`. `failure`: of the last attempt that failed;
    `cancelled`: by a user. `ended_at` is None where the scheduler starts the run again."""
    code = decision.code
    state, reason = "failed", decision.reason
    if cancelled and code != EXIT_DONE:
        state, reason, code = "cancelled", "cancelled", EXIT_CANCELLED
    elif code == EXIT_DONE:
        state, reason = "succeeded", ""
    elif code in (EXIT_CHECKPOINTED, EXIT_NODE_LOST):
        state, reason = "restarting", f"{decision.reason}; to be started again (exit code {code})"
    if state == "failed" and not (decision.counted and failure):
        # The cause came after the last attempt that failed.
        failure = failure_for(decision.reason, failure if code == EXIT_USER_ERROR else None)
    return {
        "state": state,
        "reason": reason or None,
        "exit_code": code,
        "failure": None if state == "succeeded" else failure,
        "ended_at": None if state == "restarting" else time.time(),
    }


class NotRegularFile(OSError):
    """Something else than a file that an agent wrote: a pipe, a device, or far too many bytes."""


def read_file(path: Path, most: int = 1 << 20) -> bytes:
    """The content of a regular file of at most `most` bytes. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size > most:
        os.close(descriptor)
        raise NotRegularFile(
            errno.EINVAL, f"is not a regular file of at most {most:,} bytes", str(path)
        )
    with open(descriptor, "rb") as file:
        return file.read(most + 1)


def make_directory(path: Path) -> None:
    """Create a directory below one that is there; another node may do so at this moment, and file
    systems that hosts share may show it some seconds late. Raises OSError."""
    end = time.monotonic() + 15.0
    while True:
        try:
            path.mkdir(exist_ok=True)
            return
        except FileExistsError:
            if os.path.lexists(path) or time.monotonic() > end:
                raise
            time.sleep(0.1)


def json_object(text: str | bytes) -> dict[str, Any]:
    """The JSON object that is `text`; empty where it is none."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def read_json_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file; empty where it is missing or damaged."""
    try:
        return json_object(read_file(path))
    except OSError:
        return {}


def is_state(content: object) -> bool:
    """Whether JSON is a state, or an end as Slurm's job program writes it. Fields may be missing or
    null, as other versions write others."""
    if not isinstance(content, dict) or content.get("state") not in (*ACTIVE, *OVER):
        return False
    failure, losses = content.get("failure") or {}, content.get("losses") or {}
    return (
        _is_typed(content)
        and _is_typed(failure)
        and all(isinstance(times, int) for times in losses.values())
    )


def _is_typed(fields: dict[str, Any]) -> bool:
    for name, types in _TYPES.items():
        value = fields.get(name)
        if value is None:
            continue
        if not isinstance(value, types):
            return False
        # JSON of Python has NaN and Infinity, too; no comparison holds for NaN.
        if isinstance(value, (int, float)) and not abs(value) < _MOST:
            return False
        if isinstance(value, list) and not all(isinstance(each, str) for each in value):
            return False
    return True


def read_state(launch_directory: Path) -> dict[str, Any]:
    """Read state.json; empty where there is none yet. Raises ValueError for one that is
    not a state."""
    try:
        state = json.loads(read_file(launch_directory / "state.json"))
    except NotRegularFile as error:
        raise ValueError(error.strerror) from None
    except OSError:
        return {}
    except RecursionError:
        state = None
    if not is_state(state):
        raise ValueError("not a state")
    return dict(state)


def last_state(launch_directory: Path) -> dict[str, Any]:
    """Read state.json to continue from: a damaged one (a host lost power) counts as none."""
    found = read_json_object(launch_directory / "state.json")
    return found if is_state(found) else {}


def exit_code_of(state: dict[str, Any], start: dict[str, str]) -> int | None:
    """The exit code in the state of this start of a run; None in that of another one, or while it
    runs."""
    code = state.get("exit_code")
    return code if start.items() <= state.items() and isinstance(code, int) else None


def read_secrets(launch_directory: Path) -> dict[str, str]:
    """Read secrets.json: the values of the configs' `${env:NAME}`, which submission put there;
    empty without it."""
    values = read_json_object(launch_directory / "secrets.json")
    return {str(name): str(value) for name, value in values.items()}


def forget_secrets(launch_directory: Path) -> None:
    """Remove secrets.json: nothing is started from this directory until a submission sends the
    values again."""
    with contextlib.suppress(OSError):
        (launch_directory / "secrets.json").unlink()


@dataclass(repr=False)
class StateFile:
    """state.json as its leader writes it: fields are changed in memory and written at once, or when
    the disk has room.

    On a full disk it is overwritten in place, cut to the blocks that the file has and padded with
    blanks. A reader may see half of a write then, which is better than no news until there is room.
    Nothing is written once `superseded`: a leader that was frozen must not write after another has
    begun.
    """

    _directory: Path
    fields: dict[str, Any]
    superseded: Callable[[], bool] = lambda: False
    _written: bool = False

    def enter(self, state: str, reason: str | None = None, **fields: Any) -> None:
        """Change to a state, or to another reason for it; writes nothing where nothing changes."""
        if not fields and (self.fields.get("state"), self.fields.get("reason")) == (state, reason):
            return
        if state != self.fields.get("state"):
            self.fields["since"] = time.time()
        self.fields.update(fields, state=state, reason=reason)
        self._written = False
        if state in OVER and not self.superseded():
            # Before others can see that the run is over, and send the secrets of its next start.
            forget_secrets(self._directory)
        self.save()

    def save(self) -> None:
        if self._written or self.superseded():
            return
        path = self._directory / "state.json"
        with contextlib.suppress(OSError):
            try:
                replace_file(path, json.dumps(self.fields, indent=2) + "\n")
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                _write_over(path, self.fields)
            self._written = True


def _write_over(path: Path, fields: dict[str, Any]) -> None:
    with open(path, "r+b", buffering=0) as file:
        status = os.fstat(file.fileno())
        # stat(2) counts allocated blocks in units of 512 bytes.
        data = _fitting(fields, max(status.st_size, 512 * status.st_blocks)).ljust(status.st_size)
        if file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _fitting(fields: dict[str, Any], size: int) -> bytes:
    """The state as JSON, in at most `size` bytes where cutting the texts of a failure achieves
    that."""
    for most in (None, 1000, 200, 50):
        text = json.dumps(fields if most is None else _cut(fields, most), indent=2) + "\n"
        if len(text.encode()) <= size:
            break
    return text.encode()


def _cut(fields: dict[str, Any], most: int) -> dict[str, Any]:
    """Copy the state without a failure's last lines, and with reasons of at most `most`
    characters."""
    cut = {**fields, "reason": fields["reason"] and fields["reason"][:most]}
    if isinstance(failure := fields.get("failure"), dict):
        cut["failure"] = {**failure, "reason": str(failure.get("reason"))[:most], "lines": []}
    return cut


def replace_file(path: Path, text: str) -> None:
    """Replace a file as a whole. Raises OSError; the old one stays then."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def summary_completed(run_directory: Path) -> bool:
    return read_json_object(run_directory / "summary.json").get("status") == "completed"


def newest_checkpoint(pattern: str | None) -> list[Any] | None:
    """Time and path of the newest match, which change when a checkpoint is added; None: there is
    none."""
    found = []
    for path in glob.glob(pattern) if pattern is not None else ():
        with contextlib.suppress(OSError):
            found.append([os.stat(path).st_mtime, path])
    return max(found, default=None)


def record_cancelled(launch_directory: Path, submission: str) -> None:
    """Record that the user cancelled a submission, so its end is no failure and starts nothing;
    later submissions of the run are not affected. Raises OSError.

    The file is empty, and so needs no room on a full disk.
    """
    _cancel_file(launch_directory, submission).touch()


def is_cancelled(launch_directory: Path, submission: str) -> bool:
    """Whether a submission was cancelled: by `record_cancelled`, or by a file with its name, as on
    Vertex AI."""
    if _cancel_file(launch_directory, submission).exists():
        return True
    return read_json_object(launch_directory / "cancelled").get("submission") == submission


def _cancel_file(launch_directory: Path, submission: str) -> Path:
    return launch_directory / f"cancelled.{quote(submission, safe='')}"


def agents_here(directory: Path) -> list[tuple[dict[str, Any], Process]]:
    """List the announcements of a run's agents on this machine, each with its `path`, and the
    agents, dead or alive."""
    paths = sorted((directory / "agents").glob("*.json"))
    fields = {"node": None, "submission": "", "keeper": None}
    announced = [{**fields, **read_json_object(path), "path": str(path)} for path in paths]
    agents = ((each, process_of(each.get("agent"))) for each in announced)
    return [(each, agent) for each, agent in agents if agent is not None and agent.here]
