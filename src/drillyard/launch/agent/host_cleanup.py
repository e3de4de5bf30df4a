"""The verb `stop`: end a run's processes on this host, with SIGTERM and then SIGKILL, and check
that none is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from drillyard.supervise.launch_contract import EXIT_CANCELLED, EXIT_FAILED
from drillyard.supervise.process_identity import Process, process_of, running_process, stat_fields
from drillyard.supervise.reaper import RUN_MARK, end_marked_processes, marked_processes

from . import state_file
from .job import run_token
from .state_file import agents_here


def stop(options: Namespace) -> int:
    """Cancel a run: end its agents on this host and everything that they have started; prints JSON.

    With `--keep-state` the run is not marked as cancelled: it has failed, and its remains are
    removed. With `--submission` only agents of that one are ended, and nothing else where agents of
    another live here: the launch directory, and the mark of processes, are theirs too.
    """
    directory = Path(options.launch_directory)
    state = state_file.last_state(directory)
    here = agents_here(directory)
    if options.submission is not None:
        own = [each for each in here if each[0]["submission"] == options.submission]
        if any(agent.alive for each, agent in here if each["submission"] != options.submission):
            return _stop_own(directory, own, options)
        here, state = own, state if state.get("submission") == options.submission else {}
    submissions = {str(each["submission"]) for each, _ in here} | {str(state.get("submission", ""))}
    ended: list[dict[str, object]] = []
    left: list[int] = []
    problem = None
    if not options.keep_state:
        for submission in sorted(submissions) if directory.is_dir() else ():
            try:
                state_file.record_cancelled(directory, submission)
            except OSError as error:
                # Still end the processes.
                problem = f"not marked as cancelled: {error}"
        # Running agents have read them; those yet to start see that the run is cancelled.
        state_file.forget_secrets(directory)
    if not options.mark_only:
        token = run_token(str(directory))
        ended = _end(
            _announced(here) if here else _first_marked(token), token, options.grace_seconds
        )
        for each, _ in here:
            with contextlib.suppress(OSError):
                os.unlink(str(each["path"]))
        left = marked_processes(token, RUN_MARK)
        if not options.keep_state:
            _write_cancelled(directory)
    if problem is not None:
        print(f"error: {problem}", file=sys.stderr, flush=True)
    print(
        json.dumps(
            {"agents": ended, "left": left, "state": state_file.last_state(directory).get("state")}
        )
    )
    return EXIT_FAILED if left or problem else 0


def _stop_own(
    directory: Path, own: list[tuple[dict[str, Any], Process]], options: Namespace
) -> int:
    """End the agents of one submission, beside those of another."""
    if not options.keep_state:
        state_file.record_cancelled(directory, options.submission)
    first = _announced(own)
    for process in first:
        _signal(process, signal.SIGTERM)
    deadline = time.monotonic() + options.grace_seconds
    while time.monotonic() < deadline and any(process.alive for process in first):
        time.sleep(0.05)
    left = [process for process in first if process.alive]
    for process in left:
        _signal(process, signal.SIGKILL)
    ended = [
        {"process": process.pid, "ended": "killed" if process in left else "asked"}
        for process in first
    ]
    print(json.dumps({"agents": ended, "left": [], "state": None}))
    return 0


def _announced(here: list[tuple[dict[str, Any], Process]]) -> list[Process]:
    """List each agent's live process that passes SIGTERM on to all others: its respawner, or itself
    without one."""
    pairs = [(process_of(each["keeper"]), agent) for each, agent in here]
    alive = [
        [process for process in pair if process is not None and process.alive] for pair in pairs
    ]
    return [processes[0] for processes in alive if processes]


def _first_marked(token: str) -> list[Process]:
    """List the marked processes that no other marked one started, for a run whose launch directory
    is gone."""
    marked = marked_processes(token, RUN_MARK)
    ids = {str(pid) for pid in marked}
    # Field 1 is the parent's id; a process that has ended has none.
    return [running_process(pid) for pid in marked if ids.isdisjoint(stat_fields(pid)[1:2])]


def _end(first: list[Process], token: str, grace_seconds: float) -> list[dict[str, object]]:
    """Send SIGTERM to `first`, which pass it on in order, and after a while SIGKILL to all marked
    processes."""
    for process in first:
        _signal(process, signal.SIGTERM)
    # What a killed agent left is waited for no longer: nothing would pass a signal on to it.
    deadline = time.monotonic() + (grace_seconds if first else 0)
    # A process that exits loses its environment, and with it the mark, a moment before it is gone.
    while time.monotonic() < deadline and (
        any(process.alive for process in first) or marked_processes(token, RUN_MARK)
    ):
        time.sleep(0.05)
    ended: list[dict[str, object]] = [
        {"process": process.pid, "ended": "killed" if process.alive else "asked"}
        for process in first
    ]
    for process in first:
        if process.alive:
            _signal(process, signal.SIGKILL)
    end_marked_processes(token, RUN_MARK)
    return ended


def _signal(process: Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)


def _write_cancelled(directory: Path) -> None:
    """Write the state `cancelled` where the leader was on this machine and could not write it
    itself."""
    state = state_file.last_state(directory)
    leader = process_of(state.get("agent"))
    if state and state["state"] not in state_file.OVER and leader is not None and leader.here:
        file = state_file.StateFile(directory, state)
        file.enter("cancelled", "cancelled", ended_at=time.time(), exit_code=EXIT_CANCELLED)
