"""The verb `stop`: end what a run has on this host, politely and then by force, and look that nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from argparse import Namespace
from pathlib import Path

from . import records
from .identity import RUN_MARK, Process, process_of, run_token, running_process
from .job import EXIT_CANCELLED, EXIT_FAILED
from .shared_modules import guardian
from .startup import agents_here, load_job
from .stopmark import mark_cancelled

_SECONDS_TO_END = 10.0


def stop(options: Namespace) -> int:
    """Cancel a run: end its agents on this host and all they have started; prints JSON. Raises Mistake.

    With `--keep-state` the run is not noted as cancelled: it has failed, and what is left of it is in the way.
    """
    directory = Path(options.launch_directory or load_job(options.job).launch_directory)
    state = records.last_state(directory)
    here = agents_here(directory)
    submissions = {str(each["submission"]) for each in here} | {str(state.get("submission", ""))}
    told: list[dict[str, object]] = []
    problem = None
    for submission in sorted(submissions) if directory.is_dir() and not options.keep_state else ():
        try:
            mark_cancelled(directory, submission)
        except OSError as error:
            # What runs is ended all the same.
            problem = f"not noted as cancelled: {error}"
    if not options.keep_state:
        # Agents that run have read them; those that have yet to start find that the run is cancelled.
        records.forget_secrets(directory)
    if not options.mark_only:
        for each in here:
            told.append({"node": each["node"], "ended": _end_agent(each, options.patience)})
    left: list[int] = []
    if not options.mark_only:
        token = run_token(str(directory))
        if not here:
            told = _end_unannounced(token, options.patience)
        guardian.end_marked_processes(token, mark=RUN_MARK)
        left = guardian.marked_processes(token, RUN_MARK)
        if not options.keep_state:
            _write_cancelled(directory)
    if problem is not None:
        print(f"error: {problem}", file=sys.stderr, flush=True)
    print(json.dumps({"agents": told, "left": left, "state": records.last_state(directory).get("state")}))
    return EXIT_FAILED if left or problem else 0


def _end_unannounced(token: str, patience_seconds: float) -> list[dict[str, object]]:
    """Ask what nobody has announced (any more) to end, and wait for that: the processes that no other of them started.

    Those pass it on in order: a keeper to its agent, an agent to its command.
    """
    marked = guardian.marked_processes(token, RUN_MARK)
    first = [running_process(pid) for pid in marked if _parent(pid) not in marked]
    for process in first:
        _signal(process, signal.SIGTERM)
    deadline = time.monotonic() + patience_seconds
    # A process that exits loses its environment, and with it the mark, a moment before it is gone.
    while time.monotonic() < deadline and (
        guardian.marked_processes(token, RUN_MARK) or any(process.alive for process in first)
    ):
        time.sleep(0.05)
    return [
        {"node": None, "process": process.pid, "ended": "killed" if process.alive else "asked"} for process in first
    ]


def _parent(pid: int) -> int | None:
    try:
        told = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # proc(5): ppid is field 4, the second after the command's name in brackets.
    return int(told[told.rindex(")") + 2 :].split()[1])


def _end_agent(told: dict[str, object], patience_seconds: float) -> str:
    """End an agent and its keeper: `was gone`, `asked` or `killed`."""
    agent, keeper = process_of(told["agent"]), process_of(told["keeper"])
    alive = [process for process in (keeper, agent) if process is not None and process.alive]
    if not alive:
        _forget(told)
        return "was gone"
    _signal(alive[0], signal.SIGTERM)
    how = "asked"
    deadline = time.monotonic() + patience_seconds
    while any(process.alive for process in alive):
        late = time.monotonic() - deadline
        if late > _SECONDS_TO_END:
            # It waits in a call of the kernel; it is among what is told as left.
            break
        if late > 0:
            how = "killed"
            for process in alive:
                _signal(process, signal.SIGKILL)
        time.sleep(0.05)
    _forget(told)
    return how


def _signal(process: Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)


def _forget(told: dict[str, object]) -> None:
    with contextlib.suppress(OSError):
        os.unlink(str(told["path"]))


def _write_cancelled(directory: Path) -> None:
    """Make the state `cancelled` where the leader was of this machine and could not write that any more."""
    state = records.last_state(directory)
    leader = process_of(state.get("agent"))
    if state and state["state"] not in records.OVER and leader is not None and leader.here:
        file = records.StateFile(directory, state)
        file.enter("cancelled", "cancelled", ended_at=time.time(), exit_code=EXIT_CANCELLED)
