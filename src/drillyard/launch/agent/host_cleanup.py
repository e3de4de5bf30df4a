"""The verb `stop`: end what a run has on this host, with SIGTERM and then SIGKILL, and check that nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from argparse import Namespace
from pathlib import Path

from drillyard.supervise.launch_contract import EXIT_CANCELLED, EXIT_FAILED
from drillyard.supervise.process_identity import Process, process_of, running_process, stat_fields
from drillyard.supervise.reaper import RUN_MARK, end_marked_processes, marked_processes

from . import state_file
from .job import run_token
from .startup import agents_here, load_job

_SECONDS_TO_END = 10.0


def stop(options: Namespace) -> int:
    """Cancel a run: end its agents on this host and all they have started; prints JSON. Raises UsageError.

    With `--keep-state` the run is not marked as cancelled: it has failed, and its remains are removed.
    """
    directory = Path(options.launch_directory or load_job(options.job).launch_directory)
    state = state_file.last_state(directory)
    here = agents_here(directory)
    submissions = {str(each["submission"]) for each in here} | {str(state.get("submission", ""))}
    ended: list[dict[str, object]] = []
    left: list[int] = []
    problem = None
    if not options.keep_state:
        for submission in sorted(submissions) if directory.is_dir() else ():
            try:
                state_file.mark_cancelled(directory, submission)
            except OSError as error:
                # Still end what runs.
                problem = f"not marked as cancelled: {error}"
        # Running agents have read them; those yet to start see that the run is cancelled.
        state_file.forget_secrets(directory)
    if not options.mark_only:
        token = run_token(str(directory))
        ended = [{"node": each["node"], "ended": _end_agent(each, options.patience)} for each in here]
        ended = ended if here else _end_unannounced(token, options.patience)
        end_marked_processes(token, RUN_MARK)
        left = marked_processes(token, RUN_MARK)
        if not options.keep_state:
            _write_cancelled(directory)
    if problem is not None:
        print(f"error: {problem}", file=sys.stderr, flush=True)
    print(json.dumps({"agents": ended, "left": left, "state": state_file.last_state(directory).get("state")}))
    return EXIT_FAILED if left or problem else 0


def _end_unannounced(token: str, patience_seconds: float) -> list[dict[str, object]]:
    """Without announcements, send SIGTERM to the marked processes that no other one started, and wait for their end.

    They pass it on in order: a respawner to its agent, an agent to its command.
    """
    marked = marked_processes(token, RUN_MARK)
    first = [running_process(pid) for pid in marked if _parent(pid) not in marked]
    for process in first:
        _signal(process, signal.SIGTERM)
    deadline = time.monotonic() + patience_seconds
    # A process that exits loses its environment, and with it the mark, a moment before it is gone.
    while time.monotonic() < deadline and (
        marked_processes(token, RUN_MARK) or any(process.alive for process in first)
    ):
        time.sleep(0.05)
    return [
        {"node": None, "process": process.pid, "ended": "killed" if process.alive else "asked"} for process in first
    ]


def _parent(pid: int) -> int | None:
    fields = stat_fields(pid)
    return int(fields[1]) if fields else None


def _end_agent(announced: dict[str, object], patience_seconds: float) -> str:
    """End an agent and its respawner; returns `was gone`, `asked` or `killed`."""
    agent, keeper = process_of(announced["agent"]), process_of(announced["keeper"])
    alive = [process for process in (keeper, agent) if process is not None and process.alive]
    how = "asked" if alive else "was gone"
    if alive:
        _signal(alive[0], signal.SIGTERM)
    deadline = time.monotonic() + patience_seconds
    # What outlives SIGKILL waits in a call of the kernel, and is reported in `left`.
    while any(process.alive for process in alive) and time.monotonic() < deadline + _SECONDS_TO_END:
        if time.monotonic() > deadline:
            how = "killed"
            for process in alive:
                _signal(process, signal.SIGKILL)
        time.sleep(0.05)
    with contextlib.suppress(OSError):
        os.unlink(str(announced["path"]))
    return how


def _signal(process: Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)


def _write_cancelled(directory: Path) -> None:
    """Write the state `cancelled` where the leader was on this machine and could not write it itself."""
    state = state_file.last_state(directory)
    leader = process_of(state.get("agent"))
    if state and state["state"] not in state_file.OVER and leader is not None and leader.here:
        file = state_file.StateFile(directory, state)
        file.enter("cancelled", "cancelled", ended_at=time.time(), exit_code=EXIT_CANCELLED)
