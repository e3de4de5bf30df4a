"""Index of a head host's runs: ~/.local/state/drillyard/<cluster>/<run>.json, and the status of
each.

An entry is written at submission, so that finished runs are found after the scheduler has forgotten
them. If state.json says that a run is active, the reader corrects it: when the leader is dead, when
its lease is no longer renewed, and when exits/ has a failure of the current attempt that did not
reach state.json, as on a full disk.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from drillyard.supervise.launch_contract import EXIT_CHECKPOINTED, EXIT_NODE_LOST
from drillyard.supervise.process_identity import Process, node_name, process_of

from . import exit_report
from .fence import Epochs
from .job import UsageError, read_job
from .state_file import (
    ACTIVE,
    agents_here,
    failure_for,
    is_cancelled,
    read_file,
    read_json_object,
    read_state,
    replace_file,
)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def index_directory() -> Path:
    """Directory of the entries, which has one directory per cluster."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "drillyard"


def write_entry(text: str, submission: str = "") -> None:
    """Record a submission: JSON with run, cluster, platform, launch_directory and more. Raises
    UsageError."""
    entry, path = _parsed(text)
    path.parent.mkdir(parents=True, exist_ok=True)
    entry.setdefault("submitted_at", time.time())
    if submission:
        entry["submission"] = submission
    replace_file(path, json.dumps(entry, indent=2) + "\n")


def lock_of(text: str) -> Path:
    """The file by which submissions that write the same entry exclude each other. Raises
    UsageError."""
    _, path = _parsed(text)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(f".{path.stem}.lock")


def noted_directory(text: str) -> Path | None:
    """The launch directory that the index has for the run of an entry, where it is another one than
    the entry's. Raises UsageError."""
    entry, path = _parsed(text)
    noted = read_json_object(path).get("launch_directory")
    return Path(noted) if noted and noted != entry["launch_directory"] else None


def _parsed(text: str) -> tuple[dict[str, Any], Path]:
    """An entry as it is sent, and its file."""
    try:
        entry = json.loads(text)
        path = _path(entry["cluster"], entry["run"])
        entry["launch_directory"], entry["platform"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"--entry is no entry of the index: {error!r}") from None
    return entry, path


def forget(options: Namespace) -> int:
    """The verb `forget`: remove a run from the index, with `--submission` only the entry that this
    one has made; nothing else changes. Raises UsageError."""
    path = _path(options.cluster, options.run)
    wanted = options.submission
    if wanted is None or read_json_object(path).get("submission") == wanted:
        path.unlink(missing_ok=True)
    return 0


def list_runs(options: Namespace) -> int:
    """The verb `list`: all runs of a cluster, as a JSON list of {entry, state, agent, problem}."""
    directory, names = index_directory() / options.cluster, []
    # Not by glob, which finds nothing in a directory that it may not read.
    with contextlib.suppress(FileNotFoundError):
        names = sorted(os.listdir(directory))
    entries = [
        directory / name for name in names if name.endswith(".json") and not name.startswith(".")
    ]
    print(json.dumps([_seen_entry(path) for path in entries]))
    return 0


def look(entry: dict[str, Any]) -> dict[str, Any]:
    """The status of a run: its state (corrected, None: none yet) and whether its agent lives.

    `agent`: alive, gone, elsewhere (ask its host), none (no state yet). `cancelled`: by the user,
    so a run that the scheduler has forgotten did not fail. An entry without `job_id` has no
    scheduler that starts the run again; node 0 is the host that has the index.
    """
    directory, led_here = Path(entry["launch_directory"]), "job_id" not in entry
    try:
        state = read_state(directory)
    except ValueError as error:
        # A run whose state cannot be read is not over while its agent lives.
        agent = "alive" if any(each.alive for each in _leaders_here(directory)) else "none"
        return {**_unseen(f"{directory / 'state.json'}: {error}"), "agent": agent}
    if not state:
        return _unseen(
            _write_error(directory) if directory.is_dir() else f"{directory} is not there"
        )
    agent = _agent_of(directory, state, led_here)
    cancelled = is_cancelled(directory, str(state.get("submission", "")))
    if state.get("state") in ACTIVE:
        failed = (
            exit_report.attempt_failure(directory, state) if state["state"] == "running" else None
        )
        if failed is not None:
            reason = exit_report.reason_with_node(failed, int(state.get("nodes") or 1))
            state = {
                **state,
                "state": "restarting",
                "reason": reason,
                "failure": exit_report.failure_entry(failed),
            }
        if agent == "gone" and cancelled:
            state = {**state, "state": "cancelled", "reason": "cancelled"}
        elif agent == "gone" and (
            led_here or state.get("exit_code") not in (EXIT_CHECKPOINTED, EXIT_NODE_LOST)
        ):
            # Else the scheduler starts it again, and knows whether it will.
            state = _corrected(state, knows_cause=failed is not None)
        if (
            state["state"] != "cancelled"
            and (why := _why_without_lease(directory, state, agent)) is not None
        ):
            state = _without_lease(state, why)
    return {"state": state, "agent": agent, "cancelled": cancelled, "problem": None}


def _why_without_lease(directory: Path, state: dict[str, Any], agent: str) -> str | None:
    """Reason why the leader's lease is not renewed (fence.py) and its agents have therefore ended
    the ranks; else None.

    Two hosts' clocks are not compared: a lease that looks old here is compared with a file that is
    written next to it. That file also detects a read-only file system, which statvfs does not
    always report.
    """
    epochs, epoch = Epochs(directory), state.get("epoch")
    if not isinstance(epoch, int):
        return None
    lease = epochs.lease(epoch, 0)
    if lease.with_suffix(".gone").exists():
        # An earlier version marked a released lease in this way.
        return None
    try:
        renewed_at = lease.stat().st_mtime
        lease_seconds = read_job(directory / "job.json").lease_seconds
    except (OSError, ValueError):
        # Removed, as a leader does last; or what was written a moment before the disk failed is not
        # there any more.
        return _write_error(directory) if state["state"] in ACTIVE else None
    if agent != "gone" and 0 <= time.time() - renewed_at < lease_seconds / 2:
        return None
    now = _time_of(directory)
    if not isinstance(now, float):
        return now
    if now - renewed_at < lease_seconds:
        return None
    return f"the agent of node 0 has not renewed its lease for {now - renewed_at:.0f} s"


def _time_of(directory: Path) -> float | str | None:
    """The time of a file written to a directory now; why none can be; None on a full disk, which
    may get room."""
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".look-") as probe:
            return os.fstat(probe.fileno()).st_mtime
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return None if full else f"{directory} cannot be written to: {error.strerror}"


def _write_error(directory: Path) -> str | None:
    found = _time_of(directory)
    return found if isinstance(found, str) else None


def _without_lease(state: dict[str, Any], why: str) -> dict[str, Any]:
    """The state of a run whose leader cannot write it."""
    if state["state"] not in ACTIVE:
        how = f"{why}, so how the agent ended is not recorded there"
        return {**state, "reason": how, "failure": failure_for(how, state.get("failure"))}
    reason = (
        f"{why}; without a lease the agents end the ranks, and start them again once it is renewed"
    )
    return {**state, "state": "restarting", "reason": reason}


def _unseen(problem: str | None) -> dict[str, Any]:
    return {"state": None, "agent": "none", "cancelled": False, "problem": problem}


def _agent_of(directory: Path, state: dict[str, Any], led_here: bool) -> str:
    leader = process_of(state.get("agent"))
    if leader is None or not leader.here:
        # Where this host leads the runs it knows, a leader of this name was of an earlier boot.
        return (
            "gone"
            if led_here and leader is not None and leader.host == node_name()
            else "elsewhere"
        )
    processes = [leader, *_leaders_here(directory)]
    return "alive" if any(process.alive for process in processes) else "gone"


def _leaders_here(directory: Path) -> list[Process]:
    """The agents of node 0 on this machine, and their respawners: a leader that was killed will be
    respawned."""
    pairs = [
        (agent, process_of(each["keeper"]))
        for each, agent in agents_here(directory)
        if each["node"] == 0
    ]
    return [process for pair in pairs for process in pair if process is not None]


def _corrected(state: dict[str, Any], knows_cause: bool) -> dict[str, Any]:
    """The state of a run whose leader has exited or died without writing it. `knows_cause`: its
    reason is that of the last attempt's failure."""
    gone = "agent gone: the agent of node 0 was killed, or its host started again"
    how = state.get("reason") if state.get("exit_code") is not None or knows_cause else gone
    return {
        **state,
        "state": "failed",
        "reason": how,
        "failure": failure_for(str(how), state.get("failure")),
    }


def _seen_entry(path: Path) -> dict[str, Any]:
    """An entry and the status of its run. An entry that can be read is there whole, whatever a
    failing disk has left of its run: the scheduler's job is found by it."""
    entry, about = {"run": path.stem, "cluster": path.parent.name}, path
    try:
        read = json.loads(read_file(path))
        about = Path(read["launch_directory"])
        entry = read
        return {"entry": entry, **look(entry)}
    except OSError as error:
        return {"entry": entry, **_unseen(f"{error.filename or about}: {error.strerror}")}
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        return {"entry": entry, **_unseen(f"{about}: {error!r}")}


def _path(cluster: str, run: str) -> Path:
    for name in (cluster, run):
        if not _NAME.fullmatch(name):
            raise UsageError(f"'{name}' is no name of a run or cluster")
    return index_directory() / cluster / f"{run}.json"
